"""Numbers for series: which (layer, call_index, signal, stage, tensor_path, metric) a row belongs to.

A row group carries its keys as dictionaries. Each distinct text gets a number once; the numbers of a row's
six columns are packed into one 64-bit word, and words are numbered in order of first sight. So a row costs a
few vector operations, and texts are compared once a row group instead of once a row.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["SeriesIndex", "SeriesKey", "TooManySeriesError", "codes_of", "texts_of"]

_TEXT_COLUMNS = ("layer", "signal", "stage", "tensor_path", "metric")
_WORD_BITS = 63


class SeriesKey(NamedTuple):
    """What makes a series, in the order of `schema.KEY_COLUMNS`."""

    layer: str
    call_index: int
    signal: str
    stage: str
    tensor_path: str
    metric: str


class TooManySeriesError(ValueError):
    """The distinct keys of one rank do not fit a 64-bit word; no model comes near, a hostile file may."""


def texts_of(column: pa.Array) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Returns a text column as positions, and the texts that they point at.

    Args:
        column: Strings, plain or dictionary-encoded, without nulls.
    """
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    positions = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return positions, [str(text) for text in encoded.dictionary.to_pylist()]


def codes_of(column: pa.Array) -> tuple[npt.NDArray[np.integer], list[str]]:
    """Returns what `texts_of` does, with positions as narrow as they are in the file's own dictionary."""
    if not pa.types.is_dictionary(column.type):
        return texts_of(column)
    return column.indices.to_numpy(zero_copy_only=False), [str(one) for one in column.dictionary.to_pylist()]


class SeriesIndex:
    """Numbers the series of one rank in order of first sight.

    Args:
        max_series: Series beyond this many get no number, and nothing of them is kept; None for no bound.

    Attributes:
        keys: Key of each number.
    """

    def __init__(self, max_series: int | None = None) -> None:
        self.keys: list[SeriesKey] = []
        self._max_series = max_series
        self._texts: dict[str, dict[str, int]] = {name: {} for name in _TEXT_COLUMNS}
        self._widths: tuple[int, ...] = ()
        # Words in ascending order, and the series number of each; anew whenever the packing widens.
        self._words: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._word_numbers: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._by_key: tuple[tuple[SeriesKey, ...], npt.NDArray[np.int64]] = ((), np.empty(0, np.int64))

    def __len__(self) -> int:
        """Returns how many series were seen."""
        return len(self.keys)

    def copy(self) -> "SeriesIndex":
        """Returns an index of the same series that goes its own way from now on."""
        other = SeriesIndex(self._max_series)
        other.keys = list(self.keys)
        other._texts = {name: dict(numbers) for name, numbers in self._texts.items()}
        other._widths = self._widths
        other._words, other._word_numbers, other._by_key = self._words, self._word_numbers, self._by_key
        return other

    def by_key(self) -> tuple[tuple[SeriesKey, ...], npt.NDArray[np.int64]]:
        """Returns the keys of all series in ascending order, and the number of each."""
        if len(self._by_key[0]) != len(self.keys):
            columns: list[npt.NDArray[np.int64]] = []
            rest = self._words
            for name, width in zip(reversed(SeriesKey._fields), reversed(self._widths), strict=True):
                part, rest = rest & ((1 << width) - 1), rest >> width
                texts = self._texts.get(name)
                columns.append(part if texts is None else _places(list(texts))[part])
            # The last column of a lexsort counts most.
            order = self._word_numbers[np.lexsort(columns)]
            self._by_key = (tuple(map(self.keys.__getitem__, order.tolist())), order)
        return self._by_key

    def number(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Returns the series number of each row, shape ``[rows]``; -1 where its series is beyond the bound.

        Args:
            batch: Rows of ``history`` with at least the key columns.

        Raises:
            TooManySeriesError: The keys seen so far do not fit a word, and there is no bound that they could
                be beyond.
        """
        if batch.num_rows == 0:
            return np.empty(0, np.int64)
        try:
            return self._number(batch)
        except TooManySeriesError:
            if self._max_series is None:
                raise
            return np.full(batch.num_rows, -1, np.int64)

    def _number(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        is_full = self._room() == 0
        columns = {
            name: self._text_numbers(name, batch.column(name), may_grow=not is_full) for name in _TEXT_COLUMNS
        }
        calls = batch.column("call_index").to_numpy(zero_copy_only=False).astype(np.int64)
        if int(calls.min()) < 0:
            raise TooManySeriesError(f"call_index {int(calls.min())} is below 0")
        if not is_full:
            self._widen(int(calls.max()))
        parts = (columns["layer"], calls, *(columns[name] for name in _TEXT_COLUMNS[1:]))
        words = np.zeros(batch.num_rows, np.int64)
        for part, width in zip(parts, self._widths, strict=True):
            words = (words << width) | part
        if is_full:
            # What does not fit the widths of now has never been seen; -1 is no word.
            for part, width in zip(parts, self._widths, strict=True):
                words[(part < 0) | (part >> width != 0)] = -1
        encoded = pa.array(words).dictionary_encode()
        distinct = encoded.dictionary.to_numpy(zero_copy_only=False)
        positions = encoded.indices.to_numpy(zero_copy_only=False)
        return self._numbers_of(distinct)[positions]

    def _room(self) -> int | None:
        return None if self._max_series is None else max(self._max_series - len(self.keys), 0)

    def _text_numbers(self, name: str, column: pa.Array, *, may_grow: bool) -> npt.NDArray[np.int64]:
        positions, texts = texts_of(column)
        known = self._texts[name]
        if may_grow:
            numbers = [known.setdefault(text, len(known)) for text in texts]
        else:
            numbers = [known.get(text, -1) for text in texts]
        return np.array(numbers, np.int64)[positions]

    def _widen(self, largest_call: int) -> None:
        # Widths only grow, and by a power of two of values, so repacking is rare.
        sizes = (
            len(self._texts["layer"]),
            largest_call + 1,
            *(len(self._texts[name]) for name in _TEXT_COLUMNS[1:]),
        )
        needed = tuple(max(size - 1, 0).bit_length() for size in sizes)
        before = self._widths or (0,) * len(needed)
        widths = tuple(max(pair) for pair in zip(before, needed, strict=True))
        if sum(widths) > _WORD_BITS:
            raise TooManySeriesError(f"the keys need {sum(widths)} bits, {_WORD_BITS} are there")
        if widths != self._widths:
            self._widths = widths
            self._repack()

    def _repack(self) -> None:
        """Makes the words of all known series anew, in the widths of now."""
        words = np.zeros(len(self.keys), np.int64)
        for place, (name, width) in enumerate(zip(SeriesKey._fields, self._widths, strict=True)):
            texts = self._texts.get(name)
            column = [key[place] for key in self.keys]
            parts = column if texts is None else [texts[str(text)] for text in column]
            words = (words << width) | np.array(parts, np.int64)
        self._sort(words)

    def _sort(self, words: npt.NDArray[np.int64]) -> None:
        order = np.argsort(words)
        self._words, self._word_numbers = words[order], order.astype(np.int64, copy=False)

    def _add(self, words: npt.NDArray[np.int64]) -> None:
        columns: list[list[str] | list[int]] = []
        rest = words
        for name, width in zip(reversed(SeriesKey._fields), reversed(self._widths), strict=True):
            parts = (rest & ((1 << width) - 1)).tolist()
            rest = rest >> width
            if name in self._texts:
                texts = list(self._texts[name])
                columns.append([texts[part] for part in parts])
            else:
                columns.append(parts)
        self.keys += map(SeriesKey._make, zip(*reversed(columns), strict=True))
        known = np.empty(len(self._words), np.int64)
        known[self._word_numbers] = self._words
        self._sort(np.concatenate([known, words]))

    def _numbers_of(self, distinct: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        is_known, places = self._find(distinct)
        if not bool(is_known.all()) and self._room() != 0:
            self._add(distinct[~is_known][: self._room()])
            is_known, places = self._find(distinct)
        if len(self._words) == 0:
            return np.full(len(distinct), -1, np.int64)
        return np.where(is_known, self._word_numbers[places], -1)

    def _find(self, distinct: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Returns which words are known, and where."""
        if len(self._words) == 0:
            return np.zeros(len(distinct), np.bool_), np.zeros(len(distinct), np.int64)
        places = np.minimum(np.searchsorted(self._words, distinct), len(self._words) - 1)
        return self._words[places] == distinct, places


def _places(texts: list[str]) -> npt.NDArray[np.int64]:
    """Returns the place of each text among all, sorted."""
    places = np.empty(len(texts), np.int64)
    places[sorted(range(len(texts)), key=texts.__getitem__)] = np.arange(len(texts))
    return places
