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


class Claims:
    """What a footer says of consecutive row groups, held against their rows as they are decoded.

    Args:
        metadata: The footer.
        groups: The row groups, in the order in which they are decoded.
        names: The columns that are decoded.
    """

    def __init__(self, metadata: pq.FileMetaData, groups: Sequence[int], names: Sequence[str]) -> None:
        chosen = [metadata.row_group(number) for number in groups]
        self._lengths = [group.num_rows for group in chosen]
        self._claimed = {
            name: [_claimed(group, metadata.schema.names.index(name)) for group in chosen]
            for name in CLAIMED_COLUMNS
            if name in names
        }
        # The row group that comes next, or is under way, and how many of its rows were seen.
        self._group, self._seen = 0, 0

    def check(self, batch: pa.RecordBatch) -> None:
        """Takes the next batch.

        Raises:
            UnusableFileError: A row lies outside of what the footer says of its row group.
        """
        pieces = self._pieces(batch.num_rows)
        for name, claimed in self._claimed.items():
            column = batch.column(name)
            low, high = _filled(column, _MOST), _filled(column, _LEAST)
            for group, start, stop in pieces:
                least, most = claimed[group]
                if int(low[start:stop].min()) < least or int(high[start:stop].max()) > most:
                    raise UnusableFileError(
                        "schema_mismatch",
                        f"{name} of row group {group} is not what the statistics in the footer say",
                    )

    def _pieces(self, rows: int) -> list[tuple[int, int, int]]:
        """Returns the row group, first row and end of each part of a batch; none of them is empty."""
        found: list[tuple[int, int, int]] = []
        start = 0
        while start < rows:
            last = len(self._lengths) - 1
            # Rows that no row group claims count for the last one; that they are too many shows elsewhere.
            left = self._lengths[self._group] - self._seen if self._group < last else rows
            stop = min(rows, start + left)
            if stop > start:
                found.append((self._group, start, stop))
            self._seen += stop - start
            start = stop
            if self._group < last and self._seen == self._lengths[self._group]:
                self._group, self._seen = self._group + 1, 0
        return found


def _claimed(group: pq.RowGroupMetaData, place: int) -> tuple[int, int]:
    statistics = group.column(place).statistics
    if statistics is None or not statistics.has_min_max:
        return _LEAST, _MOST
    return statistics.min, statistics.max


def _filled(column: pa.Array, missing: int) -> npt.NDArray[np.int64]:
    filled = column.fill_null(missing) if column.null_count else column
    return filled.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
