"""Rows of samples that all have the same layout, found and numbered as one matrix.

Nearly always each sample of a part has the same series in the same order. Such rows are a matrix of samples
and series: its series are numbered once for the first sample, and all that a summary needs of it are
reductions down its columns. What has no such shape is numbered row by row, with the same result.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.store.row_blocks import RowBlock, integers, row_block
from torchinstruments.store.schema import KEY_COLUMNS
from torchinstruments.store.series import SeriesIndex

__all__ = ["KeyColumns", "KeyedRows", "NumberedRows", "SharedLayouts"]

_MAX_STRETCHES = 8
_MAX_REMEMBERED = 4
_MAX_SHARED_SERIES = 131_072
_MAX_SHARED_LAYOUTS = 4
"""Of a rank: the outputs of a sample, late gradients, an evaluation, in the order in which it met them."""

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The key columns of some rows: positions in a dictionary of texts, or numbers."""

    columns: tuple[npt.NDArray[np.generic], ...]
    dictionaries: tuple[pa.Array | None, ...]

    def is_same(self, other: "_Layout") -> bool:
        """Whether both have the same keys in the same order, by the same dictionaries."""
        if self is other:
            return True
        if len(self.columns[0]) != len(other.columns[0]):
            return False
        for mine, its in zip(self.dictionaries, other.dictionaries, strict=True):
            if mine is not its and (mine is None or its is None or not mine.equals(its)):
                return False
        return all(np.array_equal(mine, its) for mine, its in zip(self.columns, other.columns, strict=True))

    def part(self, start: int, stop: int) -> "_Layout":
        """Returns some rows; nothing is copied."""
        return _Layout(tuple(one[start:stop] for one in self.columns), self.dictionaries)

    def copied(self) -> "_Layout":
        """Returns the same, without the memory of the rows that it was cut from."""
        return _Layout(tuple(one.copy() for one in self.columns), self.dictionaries)

    def changes(self, start: int, stop: int, length: int) -> npt.NDArray[np.intp]:
        """Returns which pieces of so many rows of a stretch are not the same as the piece before them."""
        changed = np.zeros((stop - start) // length - 1, np.bool_)
        for one, dictionary in zip(self.columns, self.dictionaries, strict=True):
            # A dictionary of one text has one value.
            if dictionary is None or len(dictionary) > 1:
                later, earlier = one[start + length : stop], one[start : stop - length]
                if not np.array_equal(later, earlier):
                    changed |= (later != earlier).reshape(-1, length).any(axis=1)
        return np.flatnonzero(changed) + 1


class KeyColumns:
    """The key columns of some rows, and what was found out about them (worker or writer thread).

    Whoever meets the same columns in several batches keeps one of these for all of them.

    Args:
        batch: Rows of ``history`` with at least the key columns.
        same_samples: Whether the samples of all batches lie alike, each as many rows, in ascending order.
    """

    def __init__(self, batch: pa.RecordBatch, *, same_samples: bool = False) -> None:
        self._all = _layout(batch)
        self._same_samples = same_samples
        self._found: list[tuple[int, int, int]] | None = None
        self._changes: dict[tuple[int, int, int], list[int]] = {}
        self._samples: dict[tuple[int, int], _Layout] = {}

    def stretches(self, ids: _Integers) -> list[tuple[int, int, int]]:
        """Returns first row, rows, and samples of equal layout; no sample where the rows are no matrix.

        Args:
            ids: Sample of each row of a batch.
        """
        if not self._same_samples:
            return list(_stretches(ids, self))
        if self._found is None:
            self._found = list(_stretches(ids, self))
        return self._found

    def changes(self, start: int, stop: int, length: int) -> list[int]:
        """Returns which pieces of so many rows of a stretch have other keys than the piece before them."""
        place = (start, stop, length)
        found = self._changes.get(place)
        if found is None:
            if len(self._changes) >= _MAX_STRETCHES:
                self._changes.clear()
            found = self._changes[place] = self._all.changes(start, stop, length).tolist()
        return found

    def sample(self, start: int, stop: int) -> _Layout:
        """Returns the keys of some rows; the same object for the same rows, as long as they are few."""
        found = self._samples.get((start, stop))
        if found is None:
            if len(self._samples) >= _MAX_STRETCHES:
                self._samples.clear()
            found = self._samples[start, stop] = self._all.part(start, stop).copied()
        return found


NOTHING = 0
"""Stands for a rank that has met no layout."""


class SharedLayouts:
    """Numbered series by the first layouts of a rank, for other ranks that begin with the same ones (worker).

    Ranks of one run measure the same layers, so that most of them number the same keys. Bounded, and safe to
    use from several threads. What is taken from here is what a rank would have made by itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By what a rank had met before, and the number of what it has met then.
        self._known: OrderedDict[tuple[int, int], tuple[_Layout, SeriesIndex, _Integers]] = OrderedDict()
        self._next = NOTHING + 1

    def find(self, before: int, layout: _Layout) -> tuple[int, SeriesIndex, _Integers] | None:
        """Returns what a rank makes of a layout that is new to it.

        Args:
            before: What the rank made of its layouts before this one, `NOTHING` where there were none.
            layout: The layout.

        Returns:
            The number of this in turn, an index of the rank's own, and the numbers of the rows; None where no
            rank met the same so far.
        """
        with self._lock:
            known = [one for one in self._known.items() if one[0][0] == before]
        for place, (other, index, numbers) in reversed(known):
            if layout.is_same(other):
                with self._lock:
                    if place in self._known:
                        self._known.move_to_end(place)
                return place[1], index.copy(), numbers
        return None

    def add(self, before: int, layout: _Layout, index: SeriesIndex, numbers: _Integers) -> int:
        """Keeps what a layout made of an index, and the numbers of its rows; returns the number of this."""
        index.by_key()
        own = index.copy()
        with self._lock:
            number = self._next
            self._known[before, number] = (layout, own, numbers)
            self._next += 1
            while self._known and sum(len(one) for _, one, _ in self._known.values()) > _MAX_SHARED_SERIES:
                self._known.popitem(last=False)
        return number

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._known.clear()


class NumberedRows:
    """Numbers the series of one rank and cuts its rows into blocks (worker or writer thread).

    Args:
        shared: What other ranks numbered; None where there are none.
        index: Numbers the series; None for a new one without a bound.

    Attributes:
        index: The series so far.
    """

    def __init__(self, shared: SharedLayouts | None = None, index: SeriesIndex | None = None) -> None:
        self.index = SeriesIndex() if index is None else index
        self._shared = shared
        # What the layouts so far made of the index; None once that is this rank's own.
        self._state: int | None = None if shared is None else NOTHING
        self._num_shared = 0
        # Series of the last layouts; None where a sample is no row of a grid.
        self._remembered: deque[tuple[_Layout, _Integers | None]] = deque(maxlen=_MAX_REMEMBERED)

    def blocks(self, batch: pa.RecordBatch, keys: KeyColumns | None = None) -> Iterator[RowBlock]:
        """Yields the rows of a batch of ``history``, in their order.

        Args:
            batch: The rows.
            keys: Their key columns where these were met before; None where they are new.

        Raises:
            TooManySeriesError: As `SeriesIndex.number`.
        """
        for start, rows, numbers, num_samples in self.stretches(batch, keys):
            yield row_block(_slice(batch, start, rows), numbers, num_samples=num_samples)

    def stretches(
        self, batch: pa.RecordBatch, keys: KeyColumns | None = None
    ) -> Iterator[tuple[int, int, _Integers, int]]:
        """Yields first row and rows with what `row_block` takes beside them.

        Only of what is no grid may a number be below 0.

        Raises:
            TooManySeriesError: As `SeriesIndex.number`.
        """
        keys = KeyColumns(batch) if keys is None else keys
        for start, rows, num_samples in keys.stretches(integers(batch, "sample_id")):
            numbers = None
            if num_samples:
                numbers = self._numbers(keys, batch, start, rows // num_samples)
            if numbers is None:
                self._state = None
                yield start, rows, self.index.number(_slice(batch, start, rows)), 0
            else:
                yield start, rows, numbers, num_samples

    def _numbers(self, keys: KeyColumns, batch: pa.RecordBatch, start: int, rows: int) -> _Integers | None:
        """Returns the series of a sample; None where it has several rows of one, or one beyond the bound."""
        layout = keys.sample(start, start + rows)
        for other, numbers in self._remembered:
            if layout is other:
                return numbers
        for other, numbers in self._remembered:
            if layout.is_same(other):
                return numbers
        sample = batch.slice(start, rows)
        found = self._shared_numbers(layout, sample)
        if found is None:
            found = self.index.number(sample)
        is_known = int(found.min()) >= 0
        distinct = found if is_known and int(np.bincount(found).max()) == 1 else None
        self._remembered.append((layout, distinct))
        return distinct

    def _shared_numbers(self, layout: _Layout, sample: pa.RecordBatch) -> _Integers | None:
        """Returns the numbers of a layout as ranks share them; None where this rank goes its own way."""
        before, self._state = self._state, None
        if self._shared is None or before is None or self._num_shared == _MAX_SHARED_LAYOUTS:
            return None
        self._num_shared += 1
        known = self._shared.find(before, layout)
        if known is None:
            numbers = self.index.number(sample)
            self._state = self._shared.add(before, layout, self.index, numbers)
        else:
            self._state, self.index, numbers = known
        return numbers


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """Rows of ``history`` as arrays, from whoever made their columns of them.

    Attributes:
        keys: Their key columns.
        block: The rows, without the series of each.
    """

    keys: KeyColumns
    block: RowBlock


def _slice(batch: pa.RecordBatch, start: int, rows: int) -> pa.RecordBatch:
    return batch if rows == batch.num_rows else batch.slice(start, rows)


def _layout(batch: pa.RecordBatch) -> _Layout:
    """Returns the keys of a batch; nothing is copied."""
    columns: list[npt.NDArray[np.generic]] = []
    dictionaries: list[pa.Array | None] = []
    for name in KEY_COLUMNS:
        column, dictionary = batch.column(name), None
        if name != "call_index":
            encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
            column, dictionary = encoded.indices, encoded.dictionary
        columns.append(column.to_numpy(zero_copy_only=False))
        dictionaries.append(dictionary)
    return _Layout(tuple(columns), tuple(dictionaries))


def _stretches(ids: _Integers, keys: KeyColumns) -> Iterator[tuple[int, int, int]]:
    """Yields first row, rows, and samples of equal layout; no sample where the rows are no matrix."""
    if len(ids) == 0:
        return
    starts = np.append(0, np.flatnonzero(ids[1:] != ids[:-1]) + 1)
    lengths = np.diff(np.append(starts, len(ids)))
    # Samples of one length in a row, as between two evaluations.
    cuts = np.append(0, np.flatnonzero(lengths[1:] != lengths[:-1]) + 1)
    if len(cuts) > _MAX_STRETCHES:
        yield 0, len(ids), 0
        return
    for cut, end in zip(cuts.tolist(), [*cuts[1:].tolist(), len(starts)], strict=True):
        start, length, samples = int(starts[cut]), int(lengths[cut]), end - cut
        stop = start + length * samples
        of_samples = ids[start:stop:length]
        changes = keys.changes(start, stop, length)
        if len(changes) >= _MAX_STRETCHES or not bool((of_samples[1:] > of_samples[:-1]).all()):
            yield start, stop - start, 0
            continue
        # Late gradients of some samples may be as many rows as the outputs of the next ones.
        pieces = [0, *changes, samples]
        for first, last in pairwise(pieces):
            yield start + first * length, (last - first) * length, last - first
