"""The summary of every series of one rank, from rows in any number of blocks, in bounded memory.

Rows are ordered by sample, and among equal samples by arrival (the order of parts, and of rows in a part). A
summary depends on that order alone, not on how rows were cut into blocks, so the same parts give the same
bytes on every executor. A block is sorted by series once; everything else is a reduction over its segments.
Where the rows of a block are a grid of samples and series, there is nothing to sort, and the reductions run
down its columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.store.row_blocks import LATEST_COLUMNS, RowBlock
from torchinstruments.store.series import SeriesIndex, SeriesKey, codes_of
from torchinstruments.store.windows import Grid, Segments, WindowRing, Windows

__all__ = [
    "NO_OBSERVATIONS",
    "NO_VALID_OBSERVATIONS",
    "UNSTATED",
    "Points",
    "SeriesSummaries",
    "SummaryBuilder",
]

NO_OBSERVATIONS = "no_observations"
"""Reason of a window without rows."""

NO_VALID_OBSERVATIONS = "no_valid_observations"
"""Reason of an extremum or a mean where every value is missing."""

UNSTATED = "unstated"
"""Reason beside a missing value whose row gives none."""

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Mask = npt.NDArray[np.bool_]
_Texts = npt.NDArray[np.object_]
_Kind = TypeVar("_Kind", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Points:
    """One row of each series; every sequence has one entry a series.

    Attributes:
        sample_id: Its sample, -1 where there is no such row.
        timestamp_us: Microseconds since the epoch, UTC.
        value: NaN where it is missing.
        reason: ``""`` beside a value, else why it is missing.
    """

    sample_id: _Integers
    timestamp_us: _Integers
    value: _Floats
    reason: Sequence[str]


@dataclass(frozen=True, slots=True)
class SeriesSummaries:
    """Summaries of one rank, sorted by key; every sequence has one entry a series.

    Attributes:
        keys: The series.
        observations: Rows.
        unavailable_observations: Those whose value is missing.
        first: Row of the lowest sample.
        latest: Row of the highest sample.
        minimum: Row of the lowest value; of the lowest sample among equals.
        maximum: Row of the highest value; of the lowest sample among equals.
        previous_window: The window before the recent one.
        recent_window: The last rows.
        latest_texts: `LATEST_COLUMNS` to the text of the latest row.
        loss_scale_lowest: Lowest loss scale beside a row, NaN where none was known.
        loss_scale_highest: Highest one.
    """

    keys: tuple[SeriesKey, ...]
    observations: _Integers
    unavailable_observations: _Integers
    first: Points
    latest: Points
    minimum: Points
    maximum: Points
    previous_window: Windows
    recent_window: Windows
    latest_texts: Mapping[str, Sequence[str]]
    loss_scale_lowest: _Floats
    loss_scale_highest: _Floats

    def __len__(self) -> int:
        """Returns the number of series."""
        return len(self.keys)


class _Extremum:
    """The lowest of all values of each series (of negated values: the highest), with its row."""

    def __init__(self) -> None:
        self.sample_id: _Integers = np.zeros(0, np.int64)
        self.timestamp_us: _Integers = np.zeros(0, np.int64)
        self.value: _Floats = np.zeros(0)

    def reserve(self, size: int) -> None:
        self.sample_id = _extended(self.sample_id, size, 0)
        self.timestamp_us = _extended(self.timestamp_us, size, 0)
        self.value = _extended(self.value, size, np.inf)

    def add_grid(
        self, grid: Grid, best: _Floats, num_valid: _Integers | int, is_new: _Mask, *, sign: float
    ) -> None:
        """Takes a grid without a sample older than one that was taken; `best` is the extremum of each column.

        Args:
            grid: The rows.
            best: Lowest value of each column; of the highest ones if `sign` is -1. NaN where there is none.
            num_valid: Values in each column.
            is_new: Whether a column's series had no value before.
            sign: What turns this extremum into a lowest value.
        """
        better = (num_valid > 0) & (is_new | (sign * best < self.value[grid.at]))
        columns = np.flatnonzero(better)
        if len(columns) == 0:
            return
        found, value = best[columns], grid.value
        places = _first_rows((value if len(columns) == len(best) else value[:, columns]) == found)
        series = grid.series[columns]
        # Of zeros with both signs that of the row.
        self.value[series] = sign * value[places, columns]
        self.sample_id[series] = grid.sample_id[places]
        self.timestamp_us[series] = grid.timestamp_us[places, columns]

    def add(
        self,
        rows: Segments,
        values: _Floats,
        timestamps: _Integers,
        has_value: _Mask,
        seen_before: _Integers,
        seen: _Integers,
    ) -> None:
        """Takes rows; `seen_before` and `seen` count values of each segment's series before and in them."""
        filled = np.where(has_value, values, np.inf)
        lowest = np.minimum.reduceat(filled, rows.starts)
        candidates = np.flatnonzero(has_value & (filled == np.repeat(lowest, rows.lengths)))[::-1]
        segment_of = np.searchsorted(rows.starts, candidates, side="right") - 1
        # Backwards, so that of repeated assignments the earliest row of a segment is the last one made.
        place = np.zeros(len(rows.starts), np.int64)
        place[segment_of] = candidates
        series = rows.series[rows.starts]
        held, held_id = self.value[series], self.sample_id[series]
        earlier = (lowest == held) & (rows.sample_id[place] < held_id)
        better = (seen > 0) & ((seen_before == 0) | (lowest < held) | earlier)
        target, source = series[better], place[better]
        self.value[target] = values[source]
        self.sample_id[target] = rows.sample_id[source]
        self.timestamp_us[target] = timestamps[source]


class _Edge:
    """The first or the latest row of each series."""

    def __init__(self) -> None:
        self.sample_id: _Integers = np.zeros(0, np.int64)
        self.timestamp_us: _Integers = np.zeros(0, np.int64)
        self.value: _Floats = np.zeros(0)
        self.reason: _Texts = np.zeros(0, np.object_)
        self._has_reasons = False

    def reserve(self, size: int) -> None:
        self.sample_id = _extended(self.sample_id, size, 0)
        self.timestamp_us = _extended(self.timestamp_us, size, 0)
        self.value = _extended(self.value, size, np.nan)
        self.reason = _extended(self.reason, size, "")

    def put(
        self,
        series: _Integers | slice,
        ids: _Integers | np.int64,
        times: _Integers,
        values: _Floats,
        reasons: _Texts | str,
    ) -> None:
        self.sample_id[series] = ids
        self.timestamp_us[series] = times
        self.value[series] = values
        if self._has_reasons or not isinstance(reasons, str):
            self._has_reasons = True
            self.reason[series] = reasons

    def points(self, order: _Integers) -> Points:
        reasons = tuple(self.reason[order].tolist()) if self._has_reasons else ("",) * len(order)
        return Points(self.sample_id[order], self.timestamp_us[order], self.value[order], reasons)


class _Latest:
    """The text of the latest row of each series, in one column."""

    def __init__(self) -> None:
        self._codes: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._numbers: dict[str, int] = {}

    def reserve(self, size: int) -> None:
        self._codes = _extended(self._codes, size, 0)

    def put(self, series: _Integers | slice, column: pa.Array, places: _Integers | slice) -> None:
        if pa.types.is_dictionary(column.type) and len(column.dictionary) == 1:
            text = str(column.dictionary[0])
            self._codes[series] = self._numbers.setdefault(text, len(self._numbers))
            return
        positions, texts = codes_of(column)
        codes = np.array([self._numbers.setdefault(text, len(self._numbers)) for text in texts], np.int32)
        self._codes[series] = codes[positions[places]]

    def texts(self, order: _Integers) -> tuple[str, ...]:
        if len(self._numbers) == 1:
            return tuple(self._numbers) * len(order)
        texts = np.array(list(self._numbers), np.object_)
        return tuple(texts[self._codes[order]].tolist())


class SummaryBuilder:
    """Folds blocks of rows of one rank into a summary of each series.

    Memory: about 300 bytes a series, the windows, and a few copies of one block.

    Args:
        window: Samples in each of the two windows.
    """

    def __init__(self, window: int) -> None:
        self._size = 0
        self._observations: _Integers = np.zeros(0, np.int64)
        self._valid: _Integers = np.zeros(0, np.int64)
        self._first = _Edge()
        self._latest = _Edge()
        self._minimum = _Extremum()
        self._maximum = _Extremum()
        self._windows = WindowRing(window)
        self._texts = {name: _Latest() for name in LATEST_COLUMNS}
        self._scale_lowest: _Floats = np.zeros(0)
        self._scale_highest: _Floats = np.zeros(0)

    def add(self, block: RowBlock) -> None:
        """Takes a block; blocks come in the order of their parts."""
        if len(block.series) == 0:
            return
        if block.num_samples:
            self.add_following([block])
        else:
            self._add_rows(block)

    def add_following(self, blocks: Sequence[RowBlock]) -> None:
        """Takes blocks that are grids, each followed by the next one, as `add` takes one after the other.

        In one go they take little longer than one of them.
        """
        grid = Grid.of(*blocks)
        if self._windows.has_none_after(grid):
            self._add_grid(blocks, grid)
        else:
            for block in blocks:
                self._add_rows(block.ungridded())

    def _add_rows(self, block: RowBlock) -> None:
        order = _order(block.series, block.sample_id)
        rows = _segments(block, order)
        self._reserve(int(rows.series[-1]) + 1)
        series = rows.series[rows.starts]
        before = self._observations[series]
        has_value = ~np.isnan(rows.value)
        num_valid = np.add.reduceat(has_value.astype(np.int64), rows.starts)
        timestamps = block.timestamp_us[order]
        self._add_edges(block, order, rows, timestamps, before)
        valid_before = self._valid[series]
        self._minimum.add(rows, rows.value, timestamps, has_value, valid_before, num_valid)
        self._maximum.add(rows, -rows.value, timestamps, has_value, valid_before, num_valid)
        self._windows.add(rows)
        self._observations[series] += rows.lengths
        self._valid[series] += num_valid
        self._add_scales(block, order, rows, series)

    def finish(self, index: SeriesIndex) -> SeriesSummaries:
        """Returns the summaries of all series with rows, sorted by key.

        Args:
            index: What numbered the series.
        """
        num = self._size
        keys, order = index.by_key()
        # A series whose only part was set aside has a number and no row.
        is_seen = np.zeros(len(order), np.bool_)
        is_seen[:num] = self._observations[:num] > 0
        if not bool(is_seen.all()):
            places = np.flatnonzero(is_seen[order])
            keys, order = tuple(map(keys.__getitem__, places.tolist())), order[places]
        valid = self._valid[order]
        return SeriesSummaries(
            keys=keys,
            observations=self._observations[order],
            unavailable_observations=self._observations[order] - valid,
            first=self._first.points(order),
            latest=self._latest.points(order),
            minimum=_extremum_points(self._minimum, order, valid, sign=1.0),
            maximum=_extremum_points(self._maximum, order, valid, sign=-1.0),
            previous_window=_ordered(self._windows.previous(num), order),
            recent_window=_ordered(self._windows.recent(num), order),
            latest_texts={name: texts.texts(order) for name, texts in self._texts.items()},
            loss_scale_lowest=self._scale_lowest[order],
            loss_scale_highest=self._scale_highest[order],
        )

    def _add_edges(
        self, block: RowBlock, order: _Integers, rows: Segments, timestamps: _Integers, before: _Integers
    ) -> None:
        series = rows.series[rows.starts]
        ends = rows.starts + rows.lengths - 1
        is_first = (before == 0) | (rows.sample_id[rows.starts] < self._first.sample_id[series])
        is_latest = (before == 0) | (rows.sample_id[ends] >= self._latest.sample_id[series])
        for edge, chosen in ((self._first, rows.starts[is_first]), (self._latest, ends[is_latest])):
            values = rows.value[chosen]
            reasons = _reasons(block.reason, order[chosen], values)
            edge.put(rows.series[chosen], rows.sample_id[chosen], timestamps[chosen], values, reasons)
        chosen = ends[is_latest]
        for name, texts in self._texts.items():
            texts.put(rows.series[chosen], block.latest[name], order[chosen])

    def _add_grid(self, blocks: Sequence[RowBlock], grid: Grid) -> None:
        """Takes a grid without a sample older than one that was taken before, and what it was made of."""
        latest = blocks[-1]
        self._reserve(int(grid.series.max()) + 1)
        at, value = grid.at, grid.value
        rows, columns = value.shape
        is_new, has_none = self._observations[at] == 0, self._valid[at] == 0
        lowest, highest = np.minimum.reduce(value, axis=0), np.maximum.reduce(value, axis=0)
        num_valid: _Integers | int = rows
        if bool(np.isnan(lowest).any()):
            lowest, highest = np.fmin.reduce(value, axis=0), np.fmax.reduce(value, axis=0)
            num_valid = rows - np.isnan(value).sum(axis=0)
        self._minimum.add_grid(grid, lowest, num_valid, has_none, sign=1.0)
        self._maximum.add_grid(grid, highest, num_valid, has_none, sign=-1.0)
        new, last = np.flatnonzero(is_new), slice(-columns, None)
        if len(new):
            reasons = _reasons(blocks[0].reason, new, value[0, new])
            times = grid.timestamp_us[0, new]
            self._first.put(grid.series[new], grid.sample_id[0], times, value[0, new], reasons)
        reasons = _reasons(latest.reason, last, value[-1])
        self._latest.put(at, grid.sample_id[-1], grid.timestamp_us[-1], value[-1], reasons)
        for name, texts in self._texts.items():
            texts.put(at, latest.latest[name], last)
        self._windows.add_grid(grid)
        self._observations[at] += rows
        self._valid[at] += num_valid
        # Most often one and the same array in all of them.
        for scales in {id(block.loss_scale): block.loss_scale for block in blocks}.values():
            scale = scales.reshape(-1, columns)
            lowest, highest = np.fmin.reduce(scale, axis=0), np.fmax.reduce(scale, axis=0)
            self._scale_lowest[at] = np.fmin(self._scale_lowest[at], lowest)
            self._scale_highest[at] = np.fmax(self._scale_highest[at], highest)

    def _add_scales(self, block: RowBlock, order: _Integers, rows: Segments, series: _Integers) -> None:
        scale = block.loss_scale[order]
        if bool(np.isnan(scale).all()):
            return
        # fmin and fmax take the number where one side is NaN.
        lowest = np.fmin.reduceat(scale, rows.starts)
        highest = np.fmax.reduceat(scale, rows.starts)
        self._scale_lowest[series] = np.fmin(self._scale_lowest[series], lowest)
        self._scale_highest[series] = np.fmax(self._scale_highest[series], highest)

    def _reserve(self, num_series: int) -> None:
        if num_series <= self._size:
            return
        self._size = num_series
        if num_series <= len(self._observations):
            return
        size = max(num_series, 2 * len(self._observations))
        self._observations = _extended(self._observations, size, 0)
        self._valid = _extended(self._valid, size, 0)
        for part in (self._first, self._latest, self._minimum, self._maximum, *self._texts.values()):
            part.reserve(size)
        self._scale_lowest = _extended(self._scale_lowest, size, np.nan)
        self._scale_highest = _extended(self._scale_highest, size, np.nan)


def _order(series: _Integers, sample_id: _Integers) -> _Integers:
    """Returns the order by (series, sample, arrival)."""
    # NumPy sorts 16-bit integers by radix, several times faster than by comparison.
    narrow = series.astype(np.uint16) if int(series.max()) < 2**16 else series
    order = np.argsort(narrow, kind="stable").astype(np.int64, copy=False)
    sorted_series, sorted_ids = series[order], sample_id[order]
    goes_back = (sorted_ids[1:] < sorted_ids[:-1]) & (sorted_series[1:] == sorted_series[:-1])
    if bool(goes_back.any()):
        order = np.lexsort((sample_id, series)).astype(np.int64, copy=False)
    return order


def _first_rows(found: _Mask) -> _Integers:
    """Returns the first true row of each column, the lowest sample; each column has one."""
    rows = len(found)
    if rows > 255:
        return found.argmax(axis=0)
    # Several times faster than a search down each column.
    weights = np.arange(rows, 0, -1, dtype=np.uint8)[:, np.newaxis]
    return rows - (found * weights).max(axis=0).astype(np.int64)


def _segments(block: RowBlock, order: _Integers) -> Segments:
    series = block.series[order]
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(series[1:] != series[:-1]) + 1])
    lengths = np.diff(np.append(starts, len(series)))
    return Segments(series, block.sample_id[order], block.value[order], starts, lengths)


def _reasons(column: pa.Array, places: _Integers | slice, values: _Floats) -> _Texts | str:
    """Returns the reason beside each value; ``""`` where no value is missing."""
    missing = np.isnan(values)
    if not bool(missing.any()):
        return ""
    positions, texts = codes_of(column)
    found = np.array([text or UNSTATED for text in texts], np.object_)[positions[places]]
    return np.where(missing, found, "")


def _extremum_points(extremum: _Extremum, order: _Integers, valid: _Integers, *, sign: float) -> Points:
    there = valid > 0
    reasons = ("",) * len(order)
    if not bool(there.all()):
        reasons = tuple("" if one else NO_VALID_OBSERVATIONS for one in there.tolist())
    return Points(
        sample_id=np.where(there, extremum.sample_id[order], -1),
        timestamp_us=np.where(there, extremum.timestamp_us[order], 0),
        value=np.where(there, sign * extremum.value[order], np.nan),
        reason=reasons,
    )


def _ordered(windows: Windows, order: _Integers) -> Windows:
    return Windows(windows.observations[order], windows.valid_observations[order], windows.mean[order])


def _extended(array: npt.NDArray[_Kind], size: int, fill: object) -> npt.NDArray[_Kind]:
    grown = np.full(size, fill, array.dtype)
    grown[: len(array)] = array
    return grown
