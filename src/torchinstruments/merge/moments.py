"""What one rank has of a moment at which another one saw a value that is not finite (worker)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.nonfinite_rows import EVIDENCE_COLUMNS, Evidence, SampleSpan, fractions
from torchinstruments.merge.parts import reread
from torchinstruments.merge.sources import Source
from torchinstruments.records import SampleState
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.row_blocks import integers
from torchinstruments.store.series import texts_of

__all__ = ["FINITE", "MomentTask", "Wanted", "look_at_moments"]

FINITE = "finite"
"""What a rank says that measured the same tensor, and whose entries are all finite."""

NONFINITE = "nonfinite"
NO_SAMPLE = "no_sample"
NOT_MEASURED = "not_measured"

_SAMPLE_COLUMNS = ("generation", "sample_id", "attempt", "forward_in_attempt", "forward_index", "state")
_SERIES = ("layer", "signal", "stage", "tensor_path", "mode")
_NUMBERS = ("call_index", "backward_index")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor at a moment.

    Attributes:
        generation: Generation.
        attempt: Attempt; -1 where there is none.
        forward: As in `PhaseEvidence`.
        tensor: Which tensor; its numbers do not count.
    """

    generation: int
    attempt: int
    forward: int
    tensor: Evidence


@dataclass(frozen=True, slots=True)
class MomentTask:
    """One rank to look at (made by the merge, run by a worker).

    Attributes:
        rank: The rank.
        run_id: Parts of another run are left out.
        sources: The folders of the run, by `PartFile.source`.
        samples: Its parts of ``samples`` that can be read.
        history: Its parts of ``history``.
        reads_all: Whether samples may stand in ``history`` alone.
        wanted: What to look for.
    """

    rank: int
    run_id: str
    sources: tuple[Source, ...]
    samples: tuple[PartFile, ...]
    history: tuple[SampleSpan, ...]
    reads_all: bool
    wanted: tuple[Wanted, ...]

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """The rank, as the only one."""
        return (self.rank,)


def look_at_moments(task: MomentTask) -> tuple[str, ...]:
    """Returns for each wanted tensor `FINITE`, or why the rank does not tell.

    A reason is ``no_sample``; the state of a sample that was ``missed`` or ``failed``; ``not_measured``,
    where the sample has no row of that tensor; or the reason code of its row.

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: A part cannot be read any more, or not in these columns.
    """
    states = _states(task)
    return tuple(_answer(task, one, states[place]) for place, one in enumerate(task.wanted))


def _states(task: MomentTask) -> list[dict[int, str]]:
    """Returns for each wanted moment the rank's sample ids, with their states."""
    found: list[dict[int, str]] = [{} for _ in task.wanted]
    for part in task.samples:
        for batch in reread(task.sources, task.run_id, part, _SAMPLE_COLUMNS):
            positions, states = texts_of(batch.column("state"))
            sample_id = integers(batch, "sample_id")
            for place, one in enumerate(task.wanted):
                for row in np.flatnonzero(_is_at(batch, one)).tolist():
                    held = found[place].get(int(sample_id[row]))
                    if held is None or held == SampleState.MISSED:
                        found[place][int(sample_id[row])] = states[positions[row]]
    return found


def _answer(task: MomentTask, wanted: Wanted, states: dict[int, str]) -> str:
    low, high = min(states, default=0), max(states, default=-1)
    shares: list[float] = []
    reasons: list[str] = []
    is_there = bool(states)
    for span in task.history:
        if not task.reads_all and (span.last < low or high < span.first):
            continue
        for batch in reread(task.sources, task.run_id, span.part, EVIDENCE_COLUMNS):
            at = _is_at(batch, wanted)
            is_there = is_there or bool(at.any())
            rows = np.flatnonzero(at & _is_tensor(batch, wanted.tensor))
            if len(rows):
                fraction = fractions(batch)[rows]
                shares += fraction[~np.isnan(fraction)].tolist()
                chosen = batch.column("unavailable_reason").take(pa.array(rows)).to_pylist()
                reasons += [str(reason).partition(":")[0] for reason in chosen if reason]
    if shares:
        return FINITE if max(shares) == 0.0 else NONFINITE
    if reasons:
        return min(reasons)
    if not is_there:
        return NO_SAMPLE
    state = next(iter(states.values()), "")
    return state if state in {SampleState.MISSED, SampleState.FAILED} else NOT_MEASURED


def _is_at(batch: pa.RecordBatch, wanted: Wanted) -> npt.NDArray[np.bool_]:
    ordinal = "forward_index" if wanted.attempt < 0 else "forward_in_attempt"
    found = integers(batch, "generation") == wanted.generation
    found &= integers(batch, "attempt") == wanted.attempt
    return found & (integers(batch, ordinal) == wanted.forward)


def _is_tensor(batch: pa.RecordBatch, tensor: Evidence) -> npt.NDArray[np.bool_]:
    found = np.ones(batch.num_rows, np.bool_)
    for name in _NUMBERS:
        found &= integers(batch, name) == getattr(tensor, name)
    for name in _SERIES:
        positions, texts = texts_of(batch.column(name))
        is_it = np.array([text == getattr(tensor, name) for text in texts], np.bool_)
        found &= is_it[positions] if len(texts) else np.zeros(batch.num_rows, np.bool_)
    return found
