"""The rows of some stretches of attempts, of every rank, from parts that were read once before."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.parts import reread
from torchinstruments.merge.ranges import BlockTask
from torchinstruments.store.row_blocks import integers

__all__ = ["block_batches", "is_ambiguous"]


def block_batches(task: BlockTask, columns: Sequence[str]) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Yields rank, number of the process, and rows of the stretches (worker).

    Ranks come in ascending order, their parts in the order of writing. Generation and attempt have to be
    among the columns.

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: A part cannot be read any more, or not in these columns.
    """
    processes: dict[tuple[int, str], int] = {}
    generation = task.blocks[0].generation
    firsts = np.array([one.first for one in task.blocks])
    lasts = np.array([one.last for one in task.blocks])

    def is_wanted(lowest: int, highest: int) -> bool:
        return bool(((firsts <= highest) & (lowest <= lasts)).any())

    for rank, parts in task.parts:
        for part in parts:
            process = processes.setdefault((rank, part.process), len(processes))
            for batch in reread(task.sources, task.run_id, part, columns, is_wanted):
                attempt = integers(batch, "attempt")
                # The stretch that begins last before each row; blocks do not overlap.
                place = np.searchsorted(firsts, attempt, side="right") - 1
                chosen = integers(batch, "generation") == generation
                chosen &= (place >= 0) & (attempt <= lasts[place])
                if bool(chosen.all()):
                    yield rank, process, batch
                elif bool(chosen.any()):
                    yield rank, process, batch.filter(pa.array(chosen))


def is_ambiguous(
    rank: npt.NDArray[np.int64], attempt: npt.NDArray[np.int64], process: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Returns which rows are of a rank and attempt that two processes have rows of (worker)."""
    if len(rank) == 0:
        return np.zeros(0, np.bool_)
    order = np.lexsort((process, attempt, rank))
    ranks, attempts, processes = rank[order], attempt[order], process[order]
    is_start = np.append(True, (ranks[1:] != ranks[:-1]) | (attempts[1:] != attempts[:-1]))
    starts = np.flatnonzero(is_start)
    lowest, highest = np.minimum.reduceat(processes, starts), np.maximum.reduceat(processes, starts)
    found = np.zeros(len(rank), np.bool_)
    found[order] = np.repeat(lowest != highest, np.diff(np.append(starts, len(rank))))
    return found
