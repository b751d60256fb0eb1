"""Rows of ``history`` as cells that ranks have in common: which cell a row belongs to, what stands beside it.

A cell is a series at a forward, in one mode and backward; of a sharded tensor, of one part of it. Rows of the
same rank and cell may lie in different parts, as late gradients do, and ranks may cut their parts in
different places: rows find their cell by its key alone, exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.row_spans import Moment
from torchinstruments.records import Scope
from torchinstruments.store.row_blocks import floats, integers
from torchinstruments.store.series import SeriesIndex, SeriesKey, TooManySeriesError, texts_of

__all__ = [
    "CELL_FIELDS",
    "NOT_COMPARED",
    "PROVENANCE",
    "CellKinds",
    "Cells",
    "Provenances",
    "Variant",
    "differing_texts",
]

PROVENANCE = ("grad_sync", "loss_scale", "scale_provenance", "shape", "dtype", "execution")
"""What may differ between ranks that have a cell, and is said then."""

NOT_COMPARED = ("shard_without_replica_key", "scope_not_known")
"""Why a row with a value belongs to no cell; a column number is -1 minus the place here."""

_MODE_TEXTS = ("mode", "scope", "replica_key")
_PROVENANCE_TEXTS = tuple(name for name in PROVENANCE if name != "loss_scale")
_MOMENT_BITS, _VARIANT_BITS, _SERIES_BITS = 18, 18, 27

_Integers = npt.NDArray[np.int64]
_Places = npt.NDArray[np.int64]


CELL_FIELDS = (
    pa.field("generation", pa.int32(), nullable=False),
    pa.field("attempt", pa.int64()),
    pa.field("forward_in_attempt", pa.int32()),
    pa.field("forward_index", pa.int64()),
    pa.field("mode", pa.string(), nullable=False),
    pa.field("layer", pa.string(), nullable=False),
    pa.field("call_index", pa.int32(), nullable=False),
    pa.field("signal", pa.string(), nullable=False),
    pa.field("stage", pa.string(), nullable=False),
    pa.field("tensor_path", pa.string(), nullable=False),
    pa.field("backward_index", pa.int32(), nullable=False),
    pa.field("metric", pa.string(), nullable=False),
    pa.field("scope", pa.string(), nullable=False),
)
"""Columns that say which cell a row of a merged table is of."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What tells cells of one series and forward apart.

    Attributes:
        mode: ``train`` or ``eval``.
        backward_index: Which traversal of the graph.
        scope: ``local_shard`` for parts of a tensor, else ``local``.
        replica_key: Of parts: which ranks hold this one.
    """

    mode: str
    backward_index: int
    scope: str
    replica_key: str


class CellKinds:
    """Numbers what tells the cells of one forward apart, over all stretches of a task (worker).

    Attributes:
        variants: Of each variant number.
    """

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self._variant_numbers: dict[Variant, int] = {}
        self._series = SeriesIndex()

    @property
    def series(self) -> Sequence[SeriesKey]:
        """Key of each series number."""
        return self._series.keys

    def numbers(self, batch: pa.RecordBatch) -> tuple[_Integers, _Integers]:
        """Returns series and variant number of each row, the latter below 0 where it has no cell."""
        return self._series.number(batch), self._variants_of(batch)

    def _variants_of(self, batch: pa.RecordBatch) -> _Integers:
        """Returns the variant number of each row, below 0 where it belongs to no cell."""
        backward = integers(batch, "backward_index")
        word, texts = _packed(batch, _MODE_TEXTS)
        lowest, highest = int(backward.min()), int(backward.max())
        width = highest - lowest + 1
        word = word * width + (backward - lowest)
        has_value = np.isfinite(floats(batch, "value"))
        distinct, positions = _distinct(word * 2 + has_value)
        numbers: list[int] = []
        for one in distinct.tolist():
            rest, is_value = divmod(one, 2)
            rest, above = divmod(rest, width)
            mode, scope, replica_key = _unpacked(rest, texts)
            numbers.append(self._variant(mode, lowest + above, scope, replica_key, is_value=bool(is_value)))
        return np.array(numbers, np.int64)[positions]

    def _variant(self, mode: str, backward: int, scope: str, replica_key: str, *, is_value: bool) -> int:
        if scope == Scope.LOCAL_SHARD:
            if not replica_key:
                return -1 - NOT_COMPARED.index("shard_without_replica_key")
            variant = Variant(mode, backward, Scope.LOCAL_SHARD.value, replica_key)
        elif scope == Scope.LOCAL or not is_value:
            # What was not measured has no scope of its own, and no number that could be taken for another's.
            variant = Variant(mode, backward, Scope.LOCAL.value, "")
        else:
            return -1 - NOT_COMPARED.index("scope_not_known")
        number = self._variant_numbers.setdefault(variant, len(self.variants))
        if number == len(self.variants):
            self.variants.append(variant)
        return number


class Cells:
    """Numbers the cells of a stretch of a run in the order of first sight (worker).

    Args:
        kinds: Numbers series and variants.

    Attributes:
        moments: `Moment` of each moment number.
        whole: Number of each cell among those of whole tensors, -1 for cells of parts; shape ``[cells]``.
        num_whole: How many cells of whole tensors there are.
    """

    def __init__(self, kinds: CellKinds) -> None:
        self._kinds = kinds
        self.moments: list[Moment] = []
        self._moment_numbers: dict[Moment, int] = {}
        self._keys: _Integers = np.zeros(0, np.int64)
        self._columns: _Integers = np.zeros(0, np.int64)
        self.whole: _Integers = np.zeros(0, np.int64)
        self.num_whole = 0

    def __len__(self) -> int:
        """Returns how many cells were seen."""
        return len(self._keys)

    @property
    def series(self) -> Sequence[SeriesKey]:
        """Key of each series number."""
        return self._kinds.series

    @property
    def variants(self) -> Sequence[Variant]:
        """What each variant number stands for."""
        return self._kinds.variants

    def described(self) -> tuple[_Integers, _Integers, _Integers]:
        """Returns moment, series and variant number of each cell, each of shape ``[cells]``."""
        keys = np.empty(len(self._keys), np.int64)
        keys[self._columns] = self._keys
        return (
            keys >> (_SERIES_BITS + _VARIANT_BITS),
            (keys >> _VARIANT_BITS) & ((1 << _SERIES_BITS) - 1),
            keys & ((1 << _VARIANT_BITS) - 1),
        )

    def moment_number(self, moment: Moment) -> int:
        """Returns the number of a forward of the stretch."""
        number = self._moment_numbers.setdefault(moment, len(self.moments))
        if number == len(self.moments):
            self.moments.append(moment)
        return number

    def columns(self, moment: _Integers, series: _Integers, variant: _Integers) -> _Integers:
        """Returns the cell of each row of the stretch; below 0 where it belongs to none, as its variant is.

        Args:
            moment: The number of each row's forward.
            series: As in `CellKinds.numbers`.
            variant: As in `CellKinds.numbers`.

        Raises:
            TooManySeriesError: There are more cells than a word can number.
        """
        if (
            len(self.moments) >> _MOMENT_BITS
            or len(self.variants) >> _VARIANT_BITS
            or len(self.series) >> _SERIES_BITS
        ):
            raise TooManySeriesError(
                f"{len(self.moments)} forwards of {len(self.series)} series in {len(self.variants)} variants"
            )
        keys = (((moment << _SERIES_BITS) | series) << _VARIANT_BITS) | variant
        is_cell = variant >= 0
        if bool(is_cell.all()):
            return self._columns_of(keys)
        found = variant.copy()
        found[is_cell] = self._columns_of(keys[is_cell])
        return found

    def _columns_of(self, keys: _Integers) -> _Integers:
        is_known, places = self._find(keys)
        if not bool(is_known.all()):
            encoded = pa.array(keys[~is_known]).dictionary_encode()
            new = encoded.dictionary.to_numpy(zero_copy_only=False)
            columns = np.arange(len(self._keys), len(self._keys) + len(new))
            self._number_whole(new)
            joined = np.concatenate([self._keys, new])
            order = np.argsort(joined)
            self._columns = np.concatenate([self._columns, columns])[order]
            self._keys = joined[order]
            _, places = self._find(keys)
        return self._columns[places]

    def _number_whole(self, keys: _Integers) -> None:
        is_part = np.array([one.scope == Scope.LOCAL_SHARD for one in self.variants], np.bool_)
        is_whole = ~is_part[keys & ((1 << _VARIANT_BITS) - 1)]
        numbers = np.where(is_whole, self.num_whole + np.cumsum(is_whole) - 1, -1)
        self.whole = np.concatenate([self.whole, numbers])
        self.num_whole += int(is_whole.sum())

    def _find(self, keys: _Integers) -> tuple[npt.NDArray[np.bool_], _Places]:
        if len(self._keys) == 0:
            return np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.int64)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return self._keys[places] == keys, places


class Provenances:
    """Numbers the distinct combinations of `PROVENANCE` in a stretch (worker)."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str | float | None, ...], int] = {}
        self._codes: list[dict[str | float | None, int]] = [{} for _ in PROVENANCE]
        self._table = np.zeros((0, len(PROVENANCE)), np.int64)
        self._sizes: list[int] = []

    def numbers(self, batch: pa.RecordBatch) -> _Integers:
        """Returns the number of each row's combination."""
        word, texts = _packed(batch, _PROVENANCE_TEXTS)
        scale = floats(batch, "loss_scale")
        scales, positions = _distinct(np.where(np.isnan(scale), np.nan, scale + 0.0).view(np.int64))
        word = word * len(scales) + positions
        scale_values = scales.view(np.float64).tolist()
        distinct, positions = _distinct(word)
        found: list[int] = []
        for one in distinct.tolist():
            rest, place = divmod(one, len(scales))
            by_name: dict[str, str | float | None] = dict(
                zip(_PROVENANCE_TEXTS, _unpacked(rest, texts), strict=True)
            )
            value = scale_values[place]
            by_name["loss_scale"] = None if math.isnan(value) else value
            found.append(self._number(tuple(by_name[name] for name in PROVENANCE)))
        return np.array(found, np.int64)[positions]

    def sizes(self, number: _Integers) -> _Integers:
        """Returns the entries of a tensor of each combination's shape, -1 where there is no shape."""
        return np.array([*self._sizes, -1], np.int64)[number]

    def differing(self, number: _Integers, other: _Integers) -> _Integers:
        """Returns in which columns combinations differ: bit i stands for the i-th of `PROVENANCE`."""
        weights = 1 << np.arange(len(PROVENANCE))
        return (self._table[number] != self._table[other]) @ weights

    def _number(self, combination: tuple[str | float | None, ...]) -> int:
        number = self._numbers.setdefault(combination, len(self._numbers))
        if number == len(self._table):
            codes = [
                known.setdefault(one, len(known)) for known, one in zip(self._codes, combination, strict=True)
            ]
            self._table = np.concatenate([self._table, np.array([codes], np.int64)])
            self._sizes.append(_size_of(str(combination[PROVENANCE.index("shape")])))
        return number


def _size_of(shape: str) -> int:
    sizes = shape.split("x")
    return math.prod(map(int, sizes)) if all(size.isdecimal() for size in sizes) else -1


def differing_texts() -> list[str]:
    """Returns the text of every set of columns that `Provenances.differing` can tell, by its number."""
    return [
        ",".join(name for place, name in enumerate(PROVENANCE) if bits >> place & 1)
        for bits in range(1 << len(PROVENANCE))
    ]


def _packed(batch: pa.RecordBatch, names: Sequence[str]) -> tuple[_Integers, list[list[str]]]:
    """Returns one word a row for some text columns, and the texts that its digits stand for."""
    word: _Integers = np.zeros(batch.num_rows, np.int64)
    texts: list[list[str]] = []
    for name in names:
        positions, own = texts_of(batch.column(name))
        texts.append(own)
        if len(own) > 1:
            word = word * len(own) + positions
    return word, texts


def _unpacked(word: int, texts: Sequence[list[str]]) -> list[str]:
    found: list[str] = []
    for own in reversed(texts):
        word, place = divmod(word, len(own))
        found.append(own[place])
    return found[::-1]


def _distinct(words: _Integers) -> tuple[_Integers, _Integers]:
    """Returns the distinct words in the order of first sight, and for each word its place among them."""
    if len(words) and bool((words == words[0]).all()):
        return words[:1], np.zeros(len(words), np.int64)
    encoded = pa.array(words).dictionary_encode()
    return (
        encoded.dictionary.to_numpy(zero_copy_only=False),
        encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64, copy=False),
    )
