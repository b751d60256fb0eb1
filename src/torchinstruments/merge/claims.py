"""Whether row groups hold what the statistics of their footer say.

Readers skip row groups by these statistics, and so a false one would take rows away without a word. The check
looks at two columns of each batch, which costs next to nothing beside decoding it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.store.documents import UnusableFileError

__all__ = ["CLAIMED_COLUMNS", "Claims"]

CLAIMED_COLUMNS = ("sample_id", "attempt")
"""Columns by which readers of the merge find row groups."""

_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max

_Integers = npt.NDArray[np.int64]


class Claims:
    """What a footer says of consecutive row groups, held against their rows as they are decoded.

    Args:
        metadata: The footer.
        groups: The row groups, in the order in which they are decoded.
        names: The columns that are decoded.
    """

    def __init__(self, metadata: pq.FileMetaData, groups: Sequence[int], names: Sequence[str]) -> None:
        chosen = [metadata.row_group(number) for number in groups]
        self._ends = np.cumsum([group.num_rows for group in chosen], dtype=np.int64)
        self._claimed = {
            name: _claimed(chosen, metadata.schema.names.index(name))
            for name in CLAIMED_COLUMNS
            if name in names
        }
        self._seen = 0

    def check(self, batch: pa.RecordBatch) -> None:
        """Takes the next batch.

        Raises:
            UnusableFileError: A row lies outside of what the footer says of its row group.
        """
        first, self._seen = self._seen, self._seen + batch.num_rows
        if batch.num_rows == 0 or not self._claimed:
            return
        begun = np.searchsorted(self._ends, np.arange(first, self._seen), side="right")
        starts = np.flatnonzero(np.append(True, begun[1:] != begun[:-1]))
        groups = np.minimum(begun[starts], len(self._ends) - 1)
        for name, (least, most) in self._claimed.items():
            column = batch.column(name)
            lowest = np.minimum.reduceat(_filled(column, _MOST), starts)
            highest = np.maximum.reduceat(_filled(column, _LEAST), starts)
            wrong = np.flatnonzero((lowest < least[groups]) | (highest > most[groups]))
            if len(wrong):
                raise UnusableFileError(
                    "schema_mismatch",
                    f"{name} of row group {groups[wrong[0]]} is not what the statistics in the footer say",
                )


def _claimed(groups: Sequence[pq.RowGroupMetaData], place: int) -> tuple[_Integers, _Integers]:
    least = np.full(len(groups), _LEAST)
    most = np.full(len(groups), _MOST)
    for number, group in enumerate(groups):
        statistics = group.column(place).statistics
        if statistics is not None and statistics.has_min_max:
            least[number], most[number] = statistics.min, statistics.max
    return least, most


def _filled(column: pa.Array, missing: int) -> _Integers:
    filled = column.fill_null(missing) if column.null_count else column
    return filled.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
