"""Runs of rows that say the same: samples of one program are alike on all ranks, but for moment and value.

What some columns of a run mean is looked up once, for the first run of its kind, however the row groups of
other ranks are cut. Every row of every other run is compared with that one; nothing is trusted.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torchinstruments.store.row_blocks import floats

__all__ = ["Kind", "RunKinds", "Runs"]

_MAX_LENGTHS = 16
"""Runs of one length are compared at once; with more lengths than these, rows are not worth comparing."""

_MAX_NEW = 4
"""Kinds of one length that a batch may add; with more, its runs are not worth comparing either."""

_MAX_KNOWN, _MAX_KNOWN_ROWS = 12, 262_144
"""Kinds that runs are compared with, and the rows of these: some 80 bytes each."""

_Integers = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Runs:
    """Consecutive rows of a batch, cut where their forward changes.

    Attributes:
        starts: First row of each run, shape ``[runs]``.
        lengths: Rows of each run, shape ``[runs]``.
    """

    starts: _Integers
    lengths: _Integers


@dataclass(frozen=True, slots=True)
class _Words:
    """One column: positions in a dictionary of texts, or numbers."""

    codes: npt.NDArray[np.generic]
    dictionary: pa.Array | None


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What the rows of a run mean; equal to itself alone.

    Attributes:
        numbers: What they were numbered with, each array of shape ``[rows]``.
        is_known: Whether other runs were compared with this one; else it is of one run.
        words: The columns, as they were compared.
    """

    numbers: tuple[npt.NDArray[np.int32], ...]
    is_known: bool
    words: tuple[_Words, ...] = ()

    def __len__(self) -> int:
        """Returns the rows of a run."""
        return len(self.numbers[0])


class RunKinds:
    """Finds the kind of each run, batch after batch (worker).

    Args:
        names: The columns that have to be equal: texts as dictionaries, whole numbers without nulls, floats.
        number: Numbers rows, one array after the other; called with the first run of each kind.
    """

    def __init__(self, names: Sequence[str], number: Callable[[pa.RecordBatch], Sequence[_Integers]]) -> None:
        self._names = names
        self._number = number
        self._known: deque[Kind] = deque()

    def find(self, batch: pa.RecordBatch, runs: Runs, further: _Flags | None = None) -> list[Kind]:
        """Returns the kind of each run.

        Args:
            batch: Rows with the columns, and with whatever else `number` reads.
            runs: All rows of the batch.
            further: What else has to be equal, shape ``[rows]``; None where that is false in all rows.
        """
        words = [_words(batch, name) for name in self._names]
        words.append(_Words(np.zeros(batch.num_rows, np.bool_) if further is None else further, None))
        found: list[Kind | None] = [None] * len(runs.starts)
        lengths = np.unique(runs.lengths)
        for length in lengths.tolist() if len(lengths) <= _MAX_LENGTHS else ():
            self._match(batch, words, runs, length, found)
        lacking = [place for place, kind in enumerate(found) if kind is None]
        for place, kind in zip(lacking, self._of_one_run(batch, runs, lacking), strict=True):
            found[place] = kind
        return [kind for kind in found if kind is not None]

    def _match(
        self,
        batch: pa.RecordBatch,
        words: Sequence[_Words],
        runs: Runs,
        length: int,
        found: list[Kind | None],
    ) -> None:
        places = np.flatnonzero(runs.lengths == length)
        starts = runs.starts[places]
        is_open = np.ones(len(places), np.bool_)

        def settle(kind: Kind) -> bool:
            """Gives the kind to the runs that are of it; returns whether all runs have one now."""
            same = is_open & _same(kind, words, starts, length)
            for place in places[same].tolist():
                found[place] = kind
            is_open[same] = False
            return not bool(is_open.any())

        for kind in reversed(self._known):
            if len(kind) == length and settle(kind):
                return
        for _ in range(_MAX_NEW):
            if settle(self._new(batch, words, int(starts[is_open][0]), length)):
                return

    def _new(self, batch: pa.RecordBatch, words: Sequence[_Words], start: int, length: int) -> Kind:
        own = tuple(_Words(one.codes[start : start + length].copy(), one.dictionary) for one in words)
        kind = Kind(_narrow(self._number(batch.slice(start, length))), is_known=True, words=own)
        self._known.append(kind)
        while len(self._known) > 1 and (
            len(self._known) > _MAX_KNOWN or sum(map(len, self._known)) > _MAX_KNOWN_ROWS
        ):
            self._known.popleft()
        return kind

    def _of_one_run(self, batch: pa.RecordBatch, runs: Runs, places: list[int]) -> list[Kind]:
        """Numbers the rows of some runs all at once, without a look at what they have in common."""
        if not places:
            return []
        starts, lengths = runs.starts[places], runs.lengths[places]
        ends = np.cumsum(lengths)
        rows = batch
        if int(ends[-1]) < batch.num_rows:
            rows = batch.take(pa.array(np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])))
        numbers = _narrow(self._number(rows))
        return [
            Kind(tuple(one[end - length : end] for one in numbers), is_known=False)
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]


def _narrow(numbers: Sequence[_Integers]) -> tuple[npt.NDArray[np.int32], ...]:
    return tuple(one.astype(np.int32) for one in numbers)


def _same(kind: Kind, words: Sequence[_Words], starts: _Integers, length: int) -> _Flags:
    """Returns which runs of a length are of a kind, shape ``[runs]``."""
    is_same: npt.NDArray[np.bool_] | None = None
    is_one_piece = int(starts[-1] - starts[0]) == (len(starts) - 1) * length
    for own, other in zip(words, kind.words, strict=True):
        codes = own.codes
        if own.dictionary is not None and other.dictionary is not None:
            if not own.dictionary.equals(other.dictionary):
                places = _places(own.dictionary, other.dictionary)
                codes = places[codes]
            elif len(own.dictionary) == 1:
                continue
        if is_one_piece:
            own_runs = codes[int(starts[0]) : int(starts[-1]) + length].reshape(-1, length)
        else:
            own_runs = codes[starts[:, None] + np.arange(length)]
        equal = own_runs == other.codes
        if is_same is None:
            is_same = equal
        else:
            is_same &= equal
    if is_same is None:
        return np.ones(len(starts), np.bool_)
    return np.logical_and.reduce(is_same, axis=1)


def _places(texts: pa.Array, dictionary: pa.Array) -> _Integers:
    """Returns where in a dictionary texts stand, -1 where they do not."""
    options = pc.SetLookupOptions(value_set=dictionary)
    return pc.call_function("index_in", [texts], options).fill_null(-1).to_numpy(zero_copy_only=False)


def _words(batch: pa.RecordBatch, name: str) -> _Words:
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        return _Words(column.indices.to_numpy(zero_copy_only=False), column.dictionary)
    if pa.types.is_floating(column.type):
        values = floats(batch, name)
        return _Words(np.where(np.isnan(values), np.nan, values + 0.0).view(np.int64), None)
    return _Words(column.to_numpy(zero_copy_only=False), None)
