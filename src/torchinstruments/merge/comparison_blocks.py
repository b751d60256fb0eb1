"""A stretch of ``history`` compared between ranks: rows of ``comparison.parquet``, and the widest ones."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.cell_widths import widths
from torchinstruments.merge.combined_parts import CombinedParts, combined_parts
from torchinstruments.merge.comparison_cells import CELL_FIELDS, Cells, differing_texts
from torchinstruments.merge.comparison_rows import AlignedRows, ComparisonTask, aligned_stretches
from torchinstruments.merge.mode_splits import ModeSplits, mode_splits
from torchinstruments.merge.overview_choice import Pictured
from torchinstruments.merge.overview_rows import OVERVIEW_SCHEMA, overview_rows
from torchinstruments.merge.rank_statistics import (
    NONE,
    REASONS,
    RankStatistics,
    Unavailable,
    rank_statistics,
)
from torchinstruments.store.series import SeriesKey

__all__ = ["COMPARISON_SCHEMA", "ComparisonBlock", "Widest", "compare_stretches", "picture_stretches"]

SLICE_CELLS = 4096
"""Cells whose values of all ranks are sorted at once."""

COMPARISON_SCHEMA = pa.schema(
    [
        *CELL_FIELDS,
        pa.field("replica_key", pa.string(), nullable=False),
        pa.field("num_ranks", pa.int32(), nullable=False),
        pa.field("num_ranks_without_value", pa.int32(), nullable=False),
        pa.field("lowest_rank", pa.int32(), nullable=False),
        pa.field("lowest_value", pa.float64(), nullable=False),
        pa.field("highest_rank", pa.int32(), nullable=False),
        pa.field("highest_value", pa.float64(), nullable=False),
        pa.field("median_of_ranks", pa.float64(), nullable=False),
        pa.field("mad_of_ranks", pa.float64()),
        pa.field("furthest_rank", pa.int32()),
        pa.field("furthest_value", pa.float64()),
        pa.field("furthest_mads", pa.float64()),
        pa.field("unavailable_reason", pa.string(), nullable=False),
        pa.field("differs_in", pa.string(), nullable=False),
    ]
)
"""Columns of ``comparison.parquet``: one row a cell that at least two ranks have a value of."""

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_DIFFERING = differing_texts()

_AT_ONCE = threading.BoundedSemaphore(os.cpu_count() or 1)
"""So many of the threads of a process compare at once: each holds values of all ranks."""


@dataclass(frozen=True, slots=True)
class Widest:
    """Of each series the row in which ranks lie furthest apart; arrays and lists have one entry a series.

    Attributes:
        keys: The series.
        samples: Rows of it.
        samples_without_mads: Those of them in which one rank differs and the deviation is 0.
        width: `Width` of the row.
        size: Its size in that class.
        rows: The row itself.
    """

    keys: Sequence[SeriesKey]
    samples: _Integers
    samples_without_mads: _Integers
    width: _Integers
    size: _Floats
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class ComparisonBlock:
    """What was found in a stretch.

    Attributes:
        table: Sorted rows, texts as dictionaries.
        widest: Of the series in it.
        combined: Numbers of whole tensors from those of their parts, of the latest forward of each series.
        num_rows: Rows of ``history`` of all ranks.
        num_compared: Those of them that have a value in a row of the table.
        num_without_value: Those of them without a value, in cells of any kind.
        not_compared: Reason to those of them that belong to no cell.
        num_repeated: Those of them that a later row of the same process and cell replaces.
        ambiguous: Rank to rows of forwards that two of its processes have.
        modes: Forwards that ranks ran in different modes.
        overview: What is chosen for pictures.
    """

    table: pa.Table
    widest: Widest
    combined: list[CombinedParts]
    num_rows: int
    num_compared: int
    num_without_value: int
    not_compared: dict[str, int]
    num_repeated: int
    ambiguous: dict[int, int]
    modes: ModeSplits
    overview: pa.Table


def compare_stretches(task: ComparisonTask) -> list[ComparisonBlock]:
    """Compares stretch after stretch (worker: any thread, process or machine).

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: A part cannot be read any more, or not in these columns.
    """
    with _AT_ONCE:
        return [_block(rows, task.pictured) for rows in aligned_stretches(task)]


def picture_stretches(task: ComparisonTask) -> list[pa.Table]:
    """Returns what is chosen of each stretch for pictures, where there is nothing to compare (worker).

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: A part cannot be read any more, or not in these columns.
    """
    with _AT_ONCE:
        return [_overview(rows, list(_of_parts(rows)), task.pictured) for rows in aligned_stretches(task)]


def _block(rows: AlignedRows, pictured: Pictured | None) -> ComparisonBlock:
    found = _Found(rows)
    return ComparisonBlock(
        table=found.table,
        widest=_widest(found, rows.cells),
        combined=found.combined,
        num_rows=rows.num_rows,
        num_compared=int(found.statistics.num_ranks.sum()),
        num_without_value=int(rows.without_value.sum()),
        not_compared=rows.not_compared,
        num_repeated=rows.num_repeated,
        ambiguous=rows.ambiguous,
        modes=mode_splits(rows),
        overview=_overview(rows, found.of_parts, pictured),
    )


def _overview(
    rows: AlignedRows, of_parts: Sequence[tuple[_Integers, RankStatistics]], pictured: Pictured | None
) -> pa.Table:
    return OVERVIEW_SCHEMA.empty_table() if pictured is None else overview_rows(rows, of_parts, pictured)


class _Found:
    """The cells that at least two ranks have a value of, in the order of the table."""

    def __init__(self, rows: AlignedRows) -> None:
        cells: list[_Integers] = [np.zeros(0, np.int64)]
        found: list[RankStatistics] = []
        self.of_parts = of_parts = list(_of_parts(rows))
        self.combined = combined_parts(rows, of_parts)
        for columns, statistics in (*_of_whole(rows), *of_parts):
            kept = np.flatnonzero(statistics.num_ranks > 1)
            cells.append(columns[kept])
            found.append(statistics.taken(kept))
        columns, statistics = np.concatenate(cells), RankStatistics.joined(found)
        moment, series, variant = (numbers[columns] for numbers in rows.cells.described())
        ordered = _in_order(rows.cells, moment, series, variant)
        self.moment, self.series, self.variant = moment[ordered], series[ordered], variant[ordered]
        self.statistics = statistics.taken(ordered)
        columns = columns[ordered]
        self.table = _table(self, rows.cells, rows.without_value[columns], rows.differing[columns])


def _of_whole(rows: AlignedRows) -> Iterator[tuple[_Integers, RankStatistics]]:
    """Yields cells of whole tensors, which every rank may have, with their statistics."""
    ranks = np.array([one.rank for one in rows.ranks], np.int64)
    columns = np.flatnonzero(rows.cells.whole >= 0)
    for start in range(0, len(columns), SLICE_CELLS):
        end = min(start + SLICE_CELLS, len(columns))
        values = np.full((len(ranks), end - start), np.nan)
        for place, one in enumerate(rows.ranks):
            own = one.values[start:end]
            values[place, : len(own)] = own
        yield columns[start:end], rank_statistics(np.ascontiguousarray(values.T), ranks)


def _of_parts(rows: AlignedRows) -> Iterator[tuple[_Integers, RankStatistics]]:
    """Yields cells of parts of tensors, each of which few ranks have, with their statistics."""
    columns = np.concatenate([np.zeros(0, np.int32), *(one.part_columns for one in rows.ranks)])
    if len(columns) == 0:
        return
    values = np.concatenate([one.part_values for one in rows.ranks])
    ranks = np.repeat([one.rank for one in rows.ranks], [len(one.part_columns) for one in rows.ranks])
    order = np.argsort(columns, kind="stable")
    columns, values, ranks = columns[order].astype(np.int64), values[order], ranks[order]
    starts = np.flatnonzero(np.append(True, columns[1:] != columns[:-1]))
    ends = np.append(starts[1:], len(columns))
    for low in range(0, len(starts), SLICE_CELLS):
        high = min(low + SLICE_CELLS, len(starts))
        lengths = ends[low:high] - starts[low:high]
        cell = np.repeat(np.arange(high - low), lengths)
        first, last = int(starts[low]), int(ends[high - 1])
        place = np.arange(first, last) - np.repeat(starts[low:high], lengths)
        own = np.full((high - low, int(lengths.max())), np.nan)
        holders = np.full(own.shape, NONE, np.int64)
        own[cell, place], holders[cell, place] = values[first:last], ranks[first:last]
        yield columns[starts[low:high]], rank_statistics(own, holders)


def _in_order(cells: Cells, moment: _Integers, series: _Integers, variant: _Integers) -> npt.NDArray[np.intp]:
    """Returns the order of the table: by forward, mode, series and backward, texts by code points."""
    moments = _places(cells.moments)[moment]
    modes = _places([one.mode for one in cells.variants])[variant]
    # Of one series, its backwards lie together with the metric last, as in a part.
    tensors = _places([key[:5] for key in cells.series])[series]
    metrics = _places([key.metric for key in cells.series])[series]
    backwards = np.array([one.backward_index for one in cells.variants], np.int64)[variant]
    keys = _places([one.replica_key for one in cells.variants])[variant]
    return np.lexsort((keys, metrics, backwards, tensors, modes, moments))


def _places(keys: Sequence[object]) -> _Integers:
    """Returns the place of each key among the distinct keys in ascending order."""
    place = {key: number for number, key in enumerate(sorted(set(keys)))}  # type: ignore[type-var] - of one kind
    return np.array([place[key] for key in keys], np.int64)


def _table(found: "_Found", cells: Cells, without_value: _Integers, differing: _Integers) -> pa.Table:
    moments = np.array(cells.moments, np.int64).reshape(-1, 3)[found.moment]
    has_attempt = moments[:, 1] >= 0
    statistics = found.statistics
    no_rank = statistics.furthest_rank == NONE

    def of_series(place: int) -> pa.Array:
        return _dictionary([str(key[place]) for key in cells.series], found.series)

    calls = np.array([key.call_index for key in cells.series], np.int64)
    backwards = np.array([one.backward_index for one in cells.variants], np.int64)
    columns: dict[str, pa.Array] = {
        "generation": pa.array(moments[:, 0]),
        "attempt": pa.array(moments[:, 1], mask=~has_attempt),
        "forward_in_attempt": pa.array(moments[:, 2], mask=~has_attempt),
        "forward_index": pa.array(moments[:, 2], mask=has_attempt),
        "mode": _dictionary([one.mode for one in cells.variants], found.variant),
        "layer": of_series(0),
        "call_index": pa.array(calls[found.series]),
        "signal": of_series(2),
        "stage": of_series(3),
        "tensor_path": of_series(4),
        "backward_index": pa.array(backwards[found.variant]),
        "metric": of_series(5),
        "scope": _dictionary([one.scope for one in cells.variants], found.variant),
        "replica_key": _dictionary([one.replica_key for one in cells.variants], found.variant),
        "num_ranks": pa.array(statistics.num_ranks),
        "num_ranks_without_value": pa.array(without_value),
        "lowest_rank": pa.array(statistics.lowest_rank),
        "lowest_value": pa.array(statistics.lowest),
        "highest_rank": pa.array(statistics.highest_rank),
        "highest_value": pa.array(statistics.highest),
        "median_of_ranks": pa.array(statistics.median),
        "mad_of_ranks": _numbers(statistics.mad),
        "furthest_rank": pa.array(statistics.furthest_rank, mask=no_rank),
        "furthest_value": _numbers(statistics.furthest),
        "furthest_mads": _numbers(statistics.mads),
        "unavailable_reason": _dictionary(REASONS, statistics.unavailable),
        "differs_in": _dictionary(_DIFFERING, differing),
    }
    fields = [
        field.with_type(pa.dictionary(pa.int32(), pa.string())) if pa.types.is_string(field.type) else field
        for field in COMPARISON_SCHEMA
    ]
    arrays = [columns[field.name].cast(field.type, safe=True) for field in fields]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _dictionary(texts: Sequence[str], positions: _Integers) -> pa.Array:
    """Returns a text column whose dictionary has the texts that occur, in the order of first sight."""
    known: dict[str, int] = {}
    numbers = np.array([known.setdefault(text, len(known)) for text in texts], np.int64)
    column = pa.array(numbers[positions] if len(positions) else np.zeros(0, np.int64)).dictionary_encode()
    names = list(known)
    seen = [names[number] for number in column.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(column.indices, pa.array(seen, pa.string()))


def _numbers(values: _Floats) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def _widest(found: _Found, cells: Cells) -> Widest:
    """Returns the row of each series in which ranks lie furthest apart; of equal ones the first."""
    statistics = found.statistics
    width, size = widths(statistics)
    order = np.lexsort((np.arange(len(size)), -size, -width, found.series))
    series = found.series[order]
    starts = (
        np.flatnonzero(np.append(True, series[1:] != series[:-1])) if len(series) else np.zeros(0, np.int64)
    )
    best = order[starts]
    ends = np.append(starts[1:], len(order))
    is_zero = (statistics.unavailable == Unavailable.MAD_IS_ZERO)[order].astype(np.int64)
    return Widest(
        keys=[cells.series[one] for one in series[starts].tolist()],
        samples=ends - starts,
        samples_without_mads=np.add.reduceat(is_zero, starts) if len(starts) else starts,
        width=width[best],
        size=size[best],
        rows=found.table.take(pa.array(best)),
    )
