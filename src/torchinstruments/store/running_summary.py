"""The summaries of one process while it runs: what its own ``result.json`` says in the end.

Rows are taken as whole parts, just after they were handed to the target, and folded by the arithmetic that
the merge uses over stored parts; so a rank with one process has the same summary in both. Memory is bounded:
beyond a number of series nothing is kept of further ones, and their rows are counted by layer.
The history has them.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.store.columns import Columns
from torchinstruments.store.row_blocks import RowBlock, row_block
from torchinstruments.store.sample_grids import NumberedRows
from torchinstruments.store.series import SeriesIndex, texts_of
from torchinstruments.store.summaries import SeriesSummaries, SummaryBuilder

__all__ = ["MAX_SERIES", "MAX_SUMMARY_BYTES", "RunningSummary", "max_series"]

MAX_SERIES = 131_072
"""Series that are summarised at most: 7,281 tensors with nine statistics each of output and gradient."""

MAX_SUMMARY_BYTES = 512 * 2**20
"""What the summaries may take at most; a window of over 110 samples lowers the number of series."""

_SERIES_BYTES = 500
_WINDOW_ROW_BYTES = 32
_MAX_WAITING_ROWS = 65_536
"""Rows that are folded together at most, but for those of one part; some 32 bytes each."""

_MAX_WAITING_BLOCKS = 64
"""Blocks that are folded together at most: of small parts their arrays are larger than the rows in them."""


def max_series(window: int) -> int:
    """Returns how many series are summarised at most with windows of so many samples."""
    return max(1, min(MAX_SERIES, MAX_SUMMARY_BYTES // (_SERIES_BYTES + _WINDOW_ROW_BYTES * window)))


class RunningSummary:
    """Folds the rows of one process into a summary of each series (writer thread).

    Args:
        window: Samples in each of the two windows.
        bound: Series at most; None for `max_series` of the window.
    """

    def __init__(self, window: int, *, bound: int | None = None) -> None:
        self.bound = max_series(window) if bound is None else bound
        self._rows = NumberedRows(index=SeriesIndex(self.bound))
        self._builder = SummaryBuilder(window)
        self._rows_left_out: Counter[str] = Counter()
        self._waiting: list[RowBlock] = []
        self._waiting_rows = 0

    @property
    def rows_left_out(self) -> Mapping[str, int]:
        """Rows by layer whose series is beyond the bound."""
        return self._rows_left_out

    def add(self, part: Columns | pa.Table) -> None:
        """Takes rows of ``history`` in the order of their part.

        Those of samples that lie alike wait until they are some ten thousand, since each time that rows are
        folded takes as long as thousands of them.

        Args:
            part: The rows, best with the arrays that they were made of.
        """
        table, keyed = (part.table, part.keyed) if isinstance(part, Columns) else (part, None)
        for batch in table.to_batches():
            keys = None if keyed is None else keyed.keys
            for start, rows, numbers, num_samples in self._rows.stretches(batch, keys):
                if num_samples and keyed is not None:
                    self._take(keyed.block.part(start, rows, numbers, num_samples))
                else:
                    self._take(self._block(batch.slice(start, rows), numbers, num_samples))

    def fold_rest(self) -> None:
        """Folds the rows that wait."""
        blocks = self._waiting
        self._waiting = []
        self._waiting_rows = 0
        if blocks:
            self._builder.add_following(blocks)

    def _block(self, rows: pa.RecordBatch, numbers: npt.NDArray[np.int64], num_samples: int) -> RowBlock:
        kept = numbers >= 0
        if not bool(kept.all()):
            self._count_left_out(rows, ~kept)
            numbers, rows = numbers[kept], rows.filter(pa.array(kept))
        return row_block(rows, numbers, num_samples=num_samples)

    def _take(self, block: RowBlock) -> None:
        if self._waiting and not self._waiting[-1].is_followed_by(block):
            self.fold_rest()
        if not block.num_samples:
            self._builder.add(block)
            return
        self._waiting.append(block)
        self._waiting_rows += len(block.sample_id)
        if self._waiting_rows >= _MAX_WAITING_ROWS or len(self._waiting) >= _MAX_WAITING_BLOCKS:
            self.fold_rest()

    def finish(self) -> SeriesSummaries:
        """Returns the summaries so far, sorted by key."""
        self.fold_rest()
        return self._builder.finish(self._rows.index)

    def _count_left_out(self, batch: pa.RecordBatch, left_out: npt.NDArray[np.bool_]) -> None:
        positions, layers = texts_of(batch.column("layer"))
        counts = np.bincount(positions[left_out], minlength=len(layers)).tolist()
        for layer, rows in zip(layers, counts, strict=True):
            if rows:
                self._rows_left_out[layer] += rows
