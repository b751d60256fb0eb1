"""``timeline.parquet``: how each rank came through the run, in a bounded number of stretches of it.

A stretch is as many attempts long as a power of two says. A rank begins with stretches of one attempt and
doubles them whenever there are too many, so that memory does not grow with the run; at the end all ranks take
the length of the longest.
"""

import io
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.merge.alignment import SampleKeys
from torchinstruments.records import Outcome

__all__ = ["TIMELINE_FILE", "TIMELINE_SCHEMA", "TimelineFold", "TimelineTally", "outcome_code"]

TIMELINE_FILE = "timeline.parquet"

MAX_STRETCHES = 256
"""Stretches of a rank, of all generations together; one for each generation where there are more of those."""

MAX_TIMELINE_ROWS = 65_536
"""Rows of the table, one a rank and stretch, as long as there are no more ranks than that."""

OUTCOMES = tuple(Outcome)
_CODES = {one.value: place for place, one in enumerate(OUTCOMES)}
_COUNTED = ("samples", *(one.value for one in OUTCOMES))
_SCALES = ("loss_scale_lowest", "loss_scale_highest", "loss_scale_last")
_AXES = ("attempt", "forward_index")

TIMELINE_SCHEMA = pa.schema(
    [
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("counted_in", pa.string(), nullable=False),
        pa.field("first", pa.int64(), nullable=False),
        pa.field("last", pa.int64(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("samples_of_any_rank", pa.int64(), nullable=False),
        *(pa.field(one.value, pa.int64(), nullable=False) for one in OUTCOMES),
        *(pa.field(name, pa.float64()) for name in _SCALES),
    ]
)
"""Columns of ``timeline.parquet``: one row a stretch and rank that left anything of it."""

_PLACE_BITS, _GENERATION_BITS = 40, 20

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


def _no_counts() -> _Integers:
    return np.zeros((len(_COUNTED), 0), np.int64)


def _no_scales() -> _Floats:
    return np.zeros((len(_SCALES), 0))


def outcome_code(text: str) -> int:
    """Returns the place of an outcome in `OUTCOMES`; any other text is an unknown one (worker)."""
    return _CODES.get(text, _CODES[Outcome.UNKNOWN.value])


@dataclass(slots=True)
class TimelineTally:
    """The stretches of one rank (worker, then the merge).

    Attributes:
        keys: Generation, what it is counted in, and number of each stretch, ascending.
        counts: Shape ``[5, stretches]``: samples, then attempts by `OUTCOMES`.
        scales: Shape ``[3, stretches]``: lowest, highest and last loss scale; NaN where none was known.
        shift: A stretch is two to this power long.
    """

    keys: _Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: _Integers = field(default_factory=_no_counts)
    scales: _Floats = field(default_factory=_no_scales)
    shift: int = 0

    def add_steps(
        self, generation: _Integers, attempt: _Integers, outcome: _Integers, before: _Floats, after: _Floats
    ) -> None:
        """Takes rows of ``steps`` in the order of writing.

        Args:
            generation: Of each row.
            attempt: Of each row.
            outcome: Place in `OUTCOMES`.
            before: Loss scale at the step, NaN where none is known.
            after: Loss scale after it, NaN where none is known.
        """
        counts = np.zeros((len(_COUNTED), len(attempt)), np.int64)
        counts[1 + outcome, np.arange(len(attempt))] = 1
        last = np.where(np.isnan(after), before, after)
        scales = np.stack([np.fmin(before, after), np.fmax(before, after), last])
        self._add(_keys(generation, attempt, np.zeros_like(attempt)), counts, scales)

    def add_samples(self, keys: SampleKeys) -> None:
        """Takes the forwards that the rank measured."""
        counts = np.zeros((len(_COUNTED), len(keys)), np.int64)
        counts[0] = 1
        self._add(_sample_places(keys), counts, np.full((len(_SCALES), len(keys)), np.nan))

    def coarsen(self, shift: int) -> None:
        """Makes stretches two to the power of `shift` long, which is no shorter than they are."""
        keys, self.keys = _coarser(self.keys, shift - self.shift), np.zeros(0, np.int64)
        counts, scales, self.shift = self.counts, self.scales, shift
        self.counts, self.scales = _no_counts(), _no_scales()
        self._fold(keys, counts, scales)

    def _add(self, keys: _Integers, counts: _Integers, scales: _Floats) -> None:
        self._fold(_coarser(keys, self.shift), counts, scales)
        while len(self.keys) > MAX_STRETCHES and bool((self.keys & ((1 << _PLACE_BITS) - 1)).any()):
            self.coarsen(self.shift + 1)

    def _fold(self, keys: _Integers, counts: _Integers, scales: _Floats) -> None:
        self.keys, where = np.unique(np.concatenate([self.keys, keys]), return_inverse=True)
        counts = np.concatenate([self.counts, counts], axis=1)
        scales = np.concatenate([self.scales, scales], axis=1)
        size = len(self.keys)
        self.counts = np.stack([_sums(where, one, size) for one in counts])
        lowest, highest, last = (np.full(size, np.nan) for _ in _SCALES)
        np.fmin.at(lowest, where, scales[0])
        np.fmax.at(highest, where, scales[1])
        is_known = ~np.isnan(scales[2])
        last[where[is_known]] = scales[2, is_known]
        self.scales = np.stack([lowest, highest, last])


@dataclass(slots=True)
class TimelineFold:
    """Gathers the stretches of all ranks; memory is that of `MAX_STRETCHES` a rank."""

    _ranks: list[tuple[int, TimelineTally]] = field(default_factory=list)

    def add_rank(self, rank: int, tally: TimelineTally, keys: SampleKeys) -> None:
        """Takes the steps of a rank and the forwards that it measured; ranks come in ascending order."""
        tally.add_samples(keys)
        self._ranks.append((rank, tally))

    def encoded(self, samples: SampleKeys) -> bytes:
        """Returns ``timeline.parquet``; nothing can be added afterwards.

        Args:
            samples: The forwards that any rank measured.
        """
        shift = max((tally.shift for _, tally in self._ranks), default=0)
        while True:
            for _, tally in self._ranks:
                tally.coarsen(shift)
            places = np.concatenate([np.zeros(0, np.int64), *(tally.keys for _, tally in self._ranks)])
            is_single = not bool((places & ((1 << _PLACE_BITS) - 1)).any())
            if len(places) <= MAX_TIMELINE_ROWS or is_single:
                break
            shift += 1
        table = self._table(places, _coarser(_sample_places(samples), shift), shift)
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", store_schema=False)
        return buffer.getvalue()

    def _table(self, places: _Integers, of_any_rank: _Integers, shift: int) -> pa.Table:
        ranks = np.repeat([rank for rank, _ in self._ranks], [len(tally.keys) for _, tally in self._ranks])
        counts = np.concatenate([_no_counts(), *(tally.counts for _, tally in self._ranks)], axis=1)
        scales = np.concatenate([_no_scales(), *(tally.scales for _, tally in self._ranks)], axis=1)
        order = np.lexsort((ranks, places))
        places, ranks, counts, scales = places[order], ranks[order], counts[:, order], scales[:, order]
        any_places, any_counts = np.unique(of_any_rank, return_counts=True)
        found = np.searchsorted(any_places, places)
        found = np.minimum(found, max(0, len(any_places) - 1))
        expected = np.zeros(len(places), np.int64)
        if len(any_places):
            expected = np.where(any_places[found] == places, any_counts[found], 0)
        number = places & ((1 << _PLACE_BITS) - 1)
        axis = (places >> _PLACE_BITS) & 1
        columns: dict[str, pa.Array] = {
            "generation": pa.array(places >> (_PLACE_BITS + 1)),
            "counted_in": pa.array([_AXES[one] for one in axis.tolist()], pa.string()),
            "first": pa.array(number << shift),
            "last": pa.array(((number + 1) << shift) - 1),
            "rank": pa.array(ranks.astype(np.int64)),
            "samples_of_any_rank": pa.array(expected),
            **{name: pa.array(counts[place]) for place, name in enumerate(_COUNTED)},
            **{
                name: pa.array(scales[place], mask=~np.isfinite(scales[place]))
                for place, name in enumerate(_SCALES)
            },
        }
        arrays = [columns[one.name].cast(one.type) for one in TIMELINE_SCHEMA]
        return pa.Table.from_arrays(arrays, schema=TIMELINE_SCHEMA)


def _sample_places(keys: SampleKeys) -> _Integers:
    has_attempt = keys[:, 1] >= 0
    number = np.where(has_attempt, keys[:, 1], keys[:, 2])
    return _keys(keys[:, 0], number, (~has_attempt).astype(np.int64))


def _keys(generation: _Integers, number: _Integers, axis: _Integers) -> _Integers:
    generation = np.clip(generation, 0, (1 << _GENERATION_BITS) - 1)
    number = np.clip(number, 0, (1 << _PLACE_BITS) - 1)
    return (((generation << 1) | axis) << _PLACE_BITS) | number


def _coarser(keys: _Integers, by: int) -> _Integers:
    number = (keys & ((1 << _PLACE_BITS) - 1)) >> by
    return ((keys >> _PLACE_BITS) << _PLACE_BITS) | number


def _sums(where: npt.NDArray[np.intp], values: _Integers, size: int) -> _Integers:
    found = np.zeros(size, np.int64)
    np.add.at(found, where, values)
    return found
