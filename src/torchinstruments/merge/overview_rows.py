"""Rows of ``overview.parquet`` of a stretch: how values lie over ranks at forwards chosen for pictures.

A rank has one number of a series and forward here, whichever part of a sharded tensor it is of; its distance
is that from the median over the ranks that hold the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.comparison_cells import CELL_FIELDS, Cells, Variant
from torchinstruments.merge.comparison_rows import AlignedRows
from torchinstruments.merge.overview_choice import Pictured
from torchinstruments.merge.rank_statistics import RankStatistics, rank_statistics

__all__ = ["OVERVIEW_SCHEMA", "overview_rows"]

SLICE_ROWS = 1024
"""Rows whose values of all ranks are looked at at once."""

_SIGNIFICANT_BITS = 24

OVERVIEW_SCHEMA = pa.schema(
    [
        *CELL_FIELDS,
        pa.field("num_ranks", pa.int32(), nullable=False),
        pa.field("num_ranks_without_value", pa.int32(), nullable=False),
        pa.field("lowest_rank", pa.int32(), nullable=False),
        pa.field("lowest_value", pa.float64(), nullable=False),
        pa.field("highest_rank", pa.int32(), nullable=False),
        pa.field("highest_value", pa.float64(), nullable=False),
        pa.field("median_of_ranks", pa.float64()),
        pa.field("mad_of_ranks", pa.float64()),
        pa.field("all_groups", pa.bool_(), nullable=False),
        pa.field("ranks", pa.list_(pa.int32()), nullable=False),
        pa.field("values", pa.list_(pa.float64()), nullable=False),
        pa.field("distances", pa.list_(pa.float64()), nullable=False),
    ]
)
"""Columns of ``overview.parquet``: one row a series and chosen forward."""

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


def overview_rows(
    rows: AlignedRows, of_parts: Sequence[tuple[_Integers, RankStatistics]], pictured: Pictured
) -> pa.Table:
    """Returns the rows of a stretch, in the order of the run (worker).

    Args:
        rows: The stretch.
        of_parts: Statistics of its cells of parts of tensors.
        pictured: What is chosen.
    """
    medians = np.full(len(rows.cells), np.nan)
    for columns, statistics in of_parts:
        medians[columns] = np.where(statistics.num_ranks > 1, statistics.median, np.nan)
    numbers = _Numbers(rows.cells, pictured)
    tables = [
        _table(rows, numbers, chosen, medians, pictured)
        for place in numbers.moments_in_order()
        for chosen in numbers.slices(place)
    ]
    return pa.concat_tables([OVERVIEW_SCHEMA.empty_table(), *tables])


@dataclass(frozen=True, slots=True)
class _Slice:
    """Some rows.

    Attributes:
        cells: The cells of one row after the other.
        starts: The first of these of each row.
    """

    cells: _Integers
    starts: _Integers

    @property
    def firsts(self) -> _Integers:
        """The first cell of each row."""
        return self.cells[self.starts]

    @property
    def row_of(self) -> _Integers:
        """The row of each cell."""
        return np.repeat(np.arange(len(self.starts)), np.diff(np.append(self.starts, len(self.cells))))


class _Numbers:
    """Which cells make up which rows."""

    def __init__(self, cells: Cells, pictured: Pictured) -> None:
        self.cells = cells
        self._max_rows = pictured.max_rows
        self.moment, self.series, variant = cells.described()
        kinds = {kind: place for place, kind in enumerate(sorted({_kind(one) for one in cells.variants}))}
        self.kinds = list(kinds)
        of_variant = np.array([kinds[_kind(one)] for one in cells.variants], np.int64)
        self.kind = of_variant[variant] if len(variant) else variant
        wanted = set(pictured.moments)
        self._is_wanted = np.array([one in wanted for one in cells.moments], np.bool_)
        names = pictured.metrics
        is_shown = np.array([names is None or key.metric in names for key in cells.series], np.bool_)
        self._is_shown = is_shown[self.series] if len(self.series) else np.zeros(0, np.bool_)
        order = sorted(range(len(cells.series)), key=lambda one: cells.series[one])
        self._place = np.empty(len(order), np.int64)
        self._place[order] = np.arange(len(order))

    def moments_in_order(self) -> list[int]:
        wanted = np.flatnonzero(self._is_wanted).tolist()
        return sorted(wanted, key=lambda one: self.cells.moments[one])

    def slices(self, moment: int) -> Iterator[_Slice]:
        """Yields some rows at a time, in their order."""
        chosen = np.flatnonzero((self.moment == moment) & self._is_shown)
        order = np.lexsort((self._place[self.series[chosen]], self.kind[chosen]))
        chosen = chosen[order]
        row = np.stack([self.kind[chosen], self.series[chosen]])
        starts = np.flatnonzero(np.append(True, (row[:, 1:] != row[:, :-1]).any(axis=0))[: len(chosen)])
        ends = np.append(starts[1:], len(chosen))[: self._max_rows]
        starts = starts[: self._max_rows]
        for first in range(0, len(starts), SLICE_ROWS):
            own = starts[first : first + SLICE_ROWS]
            end = int(ends[first : first + SLICE_ROWS][-1])
            yield _Slice(chosen[int(own[0]) : end], own - own[0])


def _kind(variant: Variant) -> tuple[str, int, str]:
    return (variant.mode, variant.backward_index, variant.scope)


def _table(
    rows: AlignedRows,
    numbers: _Numbers,
    chosen: _Slice,
    medians: _Floats,
    pictured: Pictured,
) -> pa.Table:
    ranks = np.array([one.rank for one in rows.ranks], np.int64)
    firsts = chosen.firsts
    values, distances = _matrices(rows, chosen, medians)
    statistics = rank_statistics(values, ranks)
    is_whole = rows.cells.whole[firsts] >= 0
    has_median = is_whole & (statistics.num_ranks > 1)
    with np.errstate(over="ignore", invalid="ignore"):
        own = values - statistics.median[:, None]
    distances[has_median] = own[has_median]
    moment = rows.cells.moments[int(numbers.moment[firsts[0]])]
    is_detailed = moment in pictured.detailed
    shown = _shown(values, distances, ranks, pictured, is_detailed=is_detailed)
    kept = np.flatnonzero(statistics.num_ranks > 0)
    without = np.add.reduceat(rows.without_value[chosen.cells], chosen.starts)
    series = numbers.cells.series
    keys = [series[one] for one in numbers.series[firsts[kept]].tolist()]
    kinds = [numbers.kinds[one] for one in numbers.kind[firsts[kept]].tolist()]
    size = len(kept)
    has_attempt = moment[1] >= 0
    columns: dict[str, pa.Array] = {
        "generation": pa.array(np.full(size, moment[0])),
        "attempt": pa.array([moment[1] if has_attempt else None] * size, pa.int64()),
        "forward_in_attempt": pa.array([moment[2] if has_attempt else None] * size, pa.int64()),
        "forward_index": pa.array([None if has_attempt else moment[2]] * size, pa.int64()),
        "mode": pa.array([one[0] for one in kinds], pa.string()),
        "layer": pa.array([key.layer for key in keys], pa.string()),
        "call_index": pa.array([key.call_index for key in keys], pa.int64()),
        "signal": pa.array([key.signal for key in keys], pa.string()),
        "stage": pa.array([key.stage for key in keys], pa.string()),
        "tensor_path": pa.array([key.tensor_path for key in keys], pa.string()),
        "backward_index": pa.array([one[1] for one in kinds], pa.int64()),
        "metric": pa.array([key.metric for key in keys], pa.string()),
        "scope": pa.array([one[2] for one in kinds], pa.string()),
        "num_ranks": pa.array(statistics.num_ranks[kept]),
        "num_ranks_without_value": pa.array(without[kept]),
        "lowest_rank": pa.array(statistics.lowest_rank[kept]),
        "lowest_value": pa.array(_rounded(statistics.lowest[kept])),
        "highest_rank": pa.array(statistics.highest_rank[kept]),
        "highest_value": pa.array(_rounded(statistics.highest[kept])),
        "median_of_ranks": _floats(np.where(has_median, statistics.median, np.nan)[kept]),
        "mad_of_ranks": _floats(np.where(is_whole, statistics.mad, np.nan)[kept]),
        "all_groups": pa.array([is_detailed] * size, pa.bool_()),
    }
    row, place = np.nonzero(shown[kept])
    offsets = pa.array(np.searchsorted(row, np.arange(size + 1)).astype(np.int32))
    columns["ranks"] = pa.ListArray.from_arrays(offsets, pa.array(ranks[place]).cast(pa.int32()))
    columns["values"] = pa.ListArray.from_arrays(offsets, _floats(values[kept][row, place]))
    columns["distances"] = pa.ListArray.from_arrays(offsets, _floats(distances[kept][row, place]))
    arrays = [columns[one.name].cast(one.type) for one in OVERVIEW_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=OVERVIEW_SCHEMA)


def _matrices(rows: AlignedRows, chosen: _Slice, medians: _Floats) -> tuple[_Floats, _Floats]:
    """Returns the values of some rows, and of parts their distances: shape ``[rows, ranks]``, else NaN."""
    values = np.full((len(chosen.starts), len(rows.ranks)), np.nan)
    distances = np.full(values.shape, np.nan)
    row_of = np.full(len(rows.cells), -1, np.int64)
    row_of[chosen.cells] = chosen.row_of
    cells = chosen.cells[rows.cells.whole[chosen.cells] >= 0]
    places, targets = rows.cells.whole[cells], row_of[cells]
    for place, one in enumerate(rows.ranks):
        is_there = places < len(one.values)
        values[targets[is_there], place] = one.values[places[is_there]]
        if len(one.part_columns) == 0:
            continue
        own = row_of[one.part_columns]
        in_parts = np.flatnonzero(own >= 0)
        values[own[in_parts], place] = one.part_values[in_parts]
        with np.errstate(over="ignore", invalid="ignore"):
            distances[own[in_parts], place] = one.part_values[in_parts] - medians[one.part_columns[in_parts]]
    return values, distances


def _shown(
    values: _Floats, distances: _Floats, ranks: _Integers, pictured: Pictured, *, is_detailed: bool
) -> _Flags:
    """Returns which ranks of each row stand in the table: those chosen, and the furthest of each group."""
    is_there = ~np.isnan(values)
    shown = is_there & np.isin(ranks, pictured.ranks)
    if is_detailed and len(shown):
        size = np.where(np.isnan(distances), -1.0, np.abs(distances))
        size = np.where(is_there, size, -2.0)
        group = ranks // pictured.group_ranks
        starts = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
        every = np.arange(len(values))
        for low, high in zip(starts, np.append(starts[1:], len(ranks)), strict=True):
            place = low + size[:, low:high].argmax(axis=1)
            shown[every, place] |= is_there[every, place]
    return shown


def _floats(values: _Floats) -> pa.Array:
    return pa.array(_rounded(values), mask=~np.isfinite(values))


def _rounded(values: _Floats) -> _Floats:
    """Returns the values with as many bits as pictures need, so that the table stays small."""
    fraction, exponent = np.frexp(values)
    scale = float(1 << _SIGNIFICANT_BITS)
    with np.errstate(over="ignore"):
        found = np.ldexp(np.round(fraction * scale) / scale, exponent)
    return np.where(np.isfinite(found), found, values)
