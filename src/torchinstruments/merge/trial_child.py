"""The process that reads parts which nobody vouches for: ``python -m torchinstruments.merge.trial_child``.

It is told of a part by one line of JSON, reads it as the merge would, and answers with one line: ``{}`` where
that was possible or failed like any damaged file, else the reason. It is given no credentials and no address.
Whatever happens to it happens to it alone.
"""

import os
import signal
import sys
from typing import TextIO

import msgspec

from torchinstruments.errors import TorchInstrumentsError
from torchinstruments.merge.limits import limit_memory
from torchinstruments.merge.parts import ChangedPartError
from torchinstruments.merge.reading import OVER_MEMORY, forget_layouts, read_rank
from torchinstruments.merge.sources import Source, close_sources
from torchinstruments.merge.tasks import RankTask
from torchinstruments.store.inventory import PartFile

__all__ = ["Answer", "Errand", "main"]

_TOKEN = "trial"  # noqa: S105 - names the stores of a merge


class Errand(msgspec.Struct, frozen=True):
    """A part to read.

    Attributes:
        folder: A folder of this host.
        part: The part, by its path below it.
        run_id: Its run.
        window: Samples in each window of a summary.
        generation: Generation of its process by the manifest, -1 where there is none.
        limit_s: Seconds after which the process ends itself.
    """

    folder: str
    part: PartFile
    run_id: str
    window: int
    generation: int
    limit_s: int


class Answer(msgspec.Struct, frozen=True):
    """What came of an errand.

    Attributes:
        reason: A reason code, ``""`` where the part does no harm.
    """

    reason: str = ""


def main() -> None:
    """Reads parts until there is nobody any more who asks (child)."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    limit_memory(int(sys.argv[1]))
    _say(answers, Answer())
    for line in sys.stdin.buffer:
        errand = msgspec.json.decode(line, type=Errand)
        # Should nobody be left who ends this process in time.
        signal.alarm(errand.limit_s)
        try:
            answer = _read(errand)
        except MemoryError:
            answer = Answer(OVER_MEMORY)
        signal.alarm(0)
        _say(answers, answer)


def _say(answers: TextIO, answer: Answer) -> None:
    answers.write(msgspec.json.encode(answer).decode() + "\n")
    answers.flush()


def _read(errand: Errand) -> Answer:
    part = errand.part
    task = RankTask(
        rank=part.rank,
        run_id=errand.run_id,
        window=errand.window,
        sources=(Source(errand.folder, None, _TOKEN, 0),),
        parts={part.table: (part,)},
        generations={} if errand.generation < 0 else {part.process: errand.generation},
        reads_all_columns=True,
    )
    try:
        reading = read_rank(task)
    except ChangedPartError as error:
        # What is damaged is found again by the merge, which then has its reason.
        return Answer(OVER_MEMORY if isinstance(error.__cause__, MemoryError) else "")
    except TorchInstrumentsError:
        return Answer()
    finally:
        forget_layouts()
        close_sources(_TOKEN)
    reasons = [one.reason.partition(":")[0] for one in reading.set_aside]
    return Answer(OVER_MEMORY if OVER_MEMORY in reasons else "")


if __name__ == "__main__":
    main()
