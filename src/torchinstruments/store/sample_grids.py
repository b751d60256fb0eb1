"""Rows of samples that all have the same layout, found and numbered as one matrix.

Nearly always each sample of a part has the same series in the same order. Such rows are a matrix of samples
and series: its series are numbered once for the first sample, and all that a summary needs of it are
reductions down its columns. What has no such shape is numbered row by row, with the same result.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.store.row_blocks import RowBlock, integers, row_block
from torchinstruments.store.schema import KEY_COLUMNS
from torchinstruments.store.series import SeriesIndex

__all__ = ["NumberedRows", "SharedLayouts"]

_MAX_STRETCHES = 8
_MAX_REMEMBERED = 4
_MAX_SHARED_SERIES = 131_072

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The key columns of one sample: positions in a dictionary of texts, or numbers."""

    columns: tuple[npt.NDArray[np.generic], ...]
    dictionaries: tuple[pa.Array | None, ...]

    def is_same(self, other: "_Layout") -> bool:
        """Whether both have the same keys in the same order, by the same dictionaries."""
        if len(self.columns[0]) != len(other.columns[0]):
            return False
        for mine, its in zip(self.dictionaries, other.dictionaries, strict=True):
            if mine is not its and (mine is None or its is None or not mine.equals(its)):
                return False
        return all(
            np.array_equal(mine, its) for mine, its in zip(self.columns, other.columns, strict=True)
        )


class SharedLayouts:
    """Numbered series by the first layout of a rank, for other ranks that begin with the same one (worker).

    Ranks of one run measure the same layers, so that most of them number the same keys. Bounded, and safe to
    use from several threads. What is taken from here is what a rank would have made by itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[int, tuple[_Layout, SeriesIndex, _Integers]] = OrderedDict()
        self._next = 0

    def find(self, layout: _Layout) -> tuple[SeriesIndex, _Integers] | None:
        """Returns an index of its own for a rank that begins with this layout, and the numbers of its rows.

        Returns:
            None where no rank did so far.
        """
        with self._lock:
            known = list(self._known.items())
        for number, (other, index, numbers) in reversed(known):
            if layout.is_same(other):
                with self._lock:
                    if number in self._known:
                        self._known.move_to_end(number)
                return index.copy(), numbers
        return None

    def add(self, layout: _Layout, index: SeriesIndex, numbers: _Integers) -> None:
        """Keeps what the first layout of a rank made of an empty index, and the numbers of its rows."""
        own = index.copy()
        own.by_key()
        with self._lock:
            self._known[self._next] = (layout, own, numbers)
            self._next += 1
            while self._known and sum(len(one) for _, one, _ in self._known.values()) > _MAX_SHARED_SERIES:
                self._known.popitem(last=False)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._known.clear()


class NumberedRows:
    """Numbers the series of one rank and cuts its rows into blocks (worker).

    Args:
        shared: What other ranks numbered.

    Attributes:
        index: The series so far.
    """

    def __init__(self, shared: SharedLayouts) -> None:
        self.index = SeriesIndex()
        self._shared = shared
        # Series of the last layouts; None where a sample has several rows of one series.
        self._remembered: deque[tuple[_Layout, _Integers | None]] = deque(maxlen=_MAX_REMEMBERED)

    def blocks(self, batch: pa.RecordBatch) -> Iterator[RowBlock]:
        """Yields the rows of a batch of ``history``, in their order.

        Raises:
            TooManySeriesError: As `SeriesIndex.number`.
        """
        for start, rows, num_samples in _stretches(batch):
            part = batch if rows == batch.num_rows else batch.slice(start, rows)
            numbers = self._numbers(part.slice(0, rows // num_samples)) if num_samples else None
            if numbers is None:
                yield row_block(part, self.index.number(part))
            else:
                yield row_block(part, numbers, num_samples=num_samples)

    def _numbers(self, sample: pa.RecordBatch) -> _Integers | None:
        layout = _layout(sample)
        for other, numbers in self._remembered:
            if layout.is_same(other):
                return numbers
        is_first = len(self.index) == 0
        known = self._shared.find(layout) if is_first else None
        if known is not None:
            self.index, found = known
        else:
            found = self.index.number(sample)
        if is_first and known is None:
            self._shared.add(layout, self.index, found)
        distinct = found if int(np.bincount(found).max()) == 1 else None
        self._remembered.append((layout, distinct))
        return distinct


def _layout(batch: pa.RecordBatch) -> _Layout:
    columns: list[npt.NDArray[np.generic]] = []
    dictionaries: list[pa.Array | None] = []
    for name in KEY_COLUMNS:
        column = batch.column(name)
        if pa.types.is_string(column.type):
            column = column.dictionary_encode()
        is_text = pa.types.is_dictionary(column.type)
        dictionaries.append(column.dictionary if is_text else None)
        # Copied, so that a layout which is remembered does not hold the rows of a part.
        codes = column.indices if is_text else column
        columns.append(codes.to_numpy(zero_copy_only=False).copy())
    return _Layout(tuple(columns), tuple(dictionaries))


def _stretches(batch: pa.RecordBatch) -> Iterator[tuple[int, int, int]]:
    """Yields first row, rows, and samples of equal layout; no sample where the rows are no matrix."""
    ids = integers(batch, "sample_id")
    if len(ids) == 0:
        return
    starts = np.append(0, np.flatnonzero(ids[1:] != ids[:-1]) + 1)
    lengths = np.diff(np.append(starts, len(ids)))
    # Samples of one length in a row, as between two evaluations.
    cuts = np.append(0, np.flatnonzero(lengths[1:] != lengths[:-1]) + 1)
    if len(cuts) > _MAX_STRETCHES:
        yield 0, len(ids), 0
        return
    columns = _key_codes(batch)
    for cut, end in zip(cuts.tolist(), [*cuts[1:].tolist(), len(starts)], strict=True):
        start, length, samples = int(starts[cut]), int(lengths[cut]), end - cut
        stop = start + length * samples
        of_samples = ids[start:stop:length]
        is_grid = bool((of_samples[1:] > of_samples[:-1]).all())
        is_grid = is_grid and all(
            bool((one[start + length : stop].reshape(-1, length) == one[start : start + length]).all())
            for one in columns
        )
        yield start, stop - start, samples if is_grid else 0


def _key_codes(batch: pa.RecordBatch) -> list[npt.NDArray[np.generic]]:
    """Returns what makes a series as columns of numbers, which are comparable within a batch."""
    found: list[npt.NDArray[np.generic]] = []
    for name in KEY_COLUMNS:
        column = batch.column(name)
        if pa.types.is_string(column.type):
            column = column.dictionary_encode()
        if pa.types.is_dictionary(column.type):
            if len(column.dictionary) < 2:
                continue
            column = column.indices
        found.append(column.to_numpy(zero_copy_only=False))
    return found
