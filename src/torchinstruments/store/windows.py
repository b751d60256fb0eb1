"""The last samples of every series, for the two adjacent windows of its summary.

A ring of ``2 * window`` places a series, all series in one matrix. Rows nearly always arrive in the order of
their samples and are written where the ring stands; rows of an earlier sample (a backward that came out of
order across parts, two processes of one rank) are merged by sorting, for the series that they touch.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from torchinstruments.store.row_blocks import RowBlock

__all__ = ["Grid", "Segments", "Windows", "WindowRing"]

_FIRST_CAPACITY = 40
_Kind = TypeVar("_Kind", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Segments:
    """Rows sorted by series, then by sample, then by arrival; one segment a series.

    Attributes:
        series: Series number of each row, shape ``[rows]``, ascending.
        sample_id: Sample of each row, shape ``[rows]``, ascending in a segment.
        value: Value of each row, shape ``[rows]``, NaN where it is missing.
        starts: First row of each segment, shape ``[segments]``.
        lengths: Rows of each segment, shape ``[segments]``.
    """

    series: npt.NDArray[np.int64]
    sample_id: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows as a matrix: samples in ascending order, each with the same series, none of them twice.

    Attributes:
        series: Series number of each column, shape ``[series]``.
        at: The same, as a slice where they follow each other.
        sample_id: Sample of each row, shape ``[samples]``, strictly ascending.
        value: Shape ``[samples, series]``, NaN where it is missing.
        timestamp_us: Microseconds since the epoch, UTC, shape ``[samples, series]``.
    """

    series: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64] | slice
    sample_id: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    timestamp_us: npt.NDArray[np.int64]

    @classmethod
    def of(cls, *blocks: RowBlock) -> "Grid":
        """Returns the rows of blocks that are grids, each followed by the next one."""
        series = blocks[0].series
        shape = (sum([block.num_samples for block in blocks]), len(series))
        first = int(series[0])
        is_run = bool((series == np.arange(first, first + len(series))).all())
        return cls(
            series=series,
            at=slice(first, first + len(series)) if is_run else series,
            sample_id=_joined([block.sample_id[:: len(series)] for block in blocks]),
            value=_joined([block.value for block in blocks]).reshape(shape),
            timestamp_us=_joined([block.timestamp_us for block in blocks]).reshape(shape),
        )


@dataclass(frozen=True, slots=True)
class Windows:
    """One of the two windows, of every series; each array has shape ``[series]``.

    Attributes:
        observations: Rows in the window; a missing value takes a place too.
        valid_observations: Those with a value.
        mean: Mean of those, NaN where there is none.
    """

    observations: npt.NDArray[np.int64]
    valid_observations: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float64]


def _joined(arrays: list[npt.NDArray[_Kind]]) -> npt.NDArray[_Kind]:
    """Returns arrays one after the other; a single one as it is."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class WindowRing:
    """The last ``2 * window`` rows of every series by (sample_id, arrival); one column a series.

    Memory: ``16 * series * min(2 * window, longest series)`` bytes, at most twice that while growing.

    Args:
        window: Samples in each of the two windows.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._places = 2 * window
        self._count: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._last_id: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._ids: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._values: npt.NDArray[np.float64] = np.zeros((0, 0), np.float64)

    def add(self, rows: Segments) -> None:
        """Takes rows; for equal samples, those that came before stay before."""
        series = rows.series[rows.starts]
        self._reserve(int(series[-1]) + 1, series, rows.lengths)
        is_late = (self._count[series] > 0) & (rows.sample_id[rows.starts] < self._last_id[series])
        if bool(is_late.any()):
            late_rows = np.repeat(is_late, rows.lengths)
            self._merge(series[is_late], rows.lengths[is_late], rows, late_rows)
            in_order = ~late_rows
            self._append(rows, in_order, series[~is_late], rows.lengths[~is_late])
        else:
            self._append(rows, np.ones(len(rows.series), np.bool_), series, rows.lengths)

    def has_none_after(self, grid: Grid) -> bool:
        """Whether no row that was taken is of a later sample than the first of a grid, series by series."""
        known = grid.series[grid.series < len(self._count)]
        return not bool(((self._count[known] > 0) & (self._last_id[known] > grid.sample_id[0])).any())

    def add_grid(self, grid: Grid) -> None:
        """Takes a grid of which `has_none_after` is true."""
        at, rows = grid.at, len(grid.sample_id)
        self._reserve(int(grid.series.max()) + 1, grid.series, np.full(len(grid.series), rows))
        count = self._count[at]
        first = int(count[0])
        # Column by column they stand at one place as long as each sample had all of them.
        is_even = isinstance(at, slice) and bool((count == first).all())
        kept = min(rows, self._places)
        ids, values = grid.sample_id[-kept:, np.newaxis], grid.value[-kept:]
        if is_even:
            place = (first + rows - kept) % self._places
            ahead = min(kept, self._places - place)
            for ring, new in ((self._ids, ids), (self._values, values)):
                ring[place : place + ahead, at] = new[:ahead]
                ring[: kept - ahead, at] = new[ahead:]
        else:
            places = (count + np.arange(rows - kept, rows)[:, np.newaxis]) % self._places
            self._ids[places, grid.series] = ids
            self._values[places, grid.series] = values
        self._count[at] += rows
        self._last_id[at] = grid.sample_id[-1]

    def recent(self, num_series: int) -> Windows:
        """Returns the window of the last rows of each series."""
        return self._summarise(num_series, self._window)

    def previous(self, num_series: int) -> Windows:
        """Returns the window just before the recent one."""
        return self._summarise(num_series, 2 * self._window)

    def _append(
        self,
        rows: Segments,
        chosen: npt.NDArray[np.bool_],
        series: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> None:
        within = np.arange(len(rows.series)) - np.repeat(rows.starts, rows.lengths)
        from_end = np.repeat(rows.lengths, rows.lengths) - within
        kept = chosen & (from_end <= self._places)
        who = rows.series[kept]
        places = (self._count[who] + within[kept]) % self._places
        self._ids[places, who] = rows.sample_id[kept]
        self._values[places, who] = rows.value[kept]
        self._count[series] += lengths
        # The last row of a segment has its largest sample.
        ends = (rows.starts + rows.lengths - 1)[chosen[rows.starts]]
        self._last_id[series] = rows.sample_id[ends]

    def _merge(
        self,
        series: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        rows: Segments,
        chosen: npt.NDArray[np.bool_],
    ) -> None:
        held = np.minimum(self._count[series], self._places)
        who = np.repeat(series, held)
        within = np.arange(len(who)) - np.repeat(np.cumsum(held) - held, held)
        places = (np.repeat(self._count[series] - held, held) + within) % self._places
        all_series = np.concatenate([who, rows.series[chosen]])
        all_ids = np.concatenate([self._ids[places, who], rows.sample_id[chosen]])
        all_values = np.concatenate([self._values[places, who], rows.value[chosen]])
        order = np.lexsort((all_ids, all_series))  # stable: what was held comes first among equals
        totals = held + lengths
        from_end = np.repeat(np.cumsum(totals), totals) - np.arange(len(order))
        kept = order[from_end <= self._places]
        self._count[series] += lengths
        after = self._count[all_series[kept]]
        places = (after - from_end[from_end <= self._places]) % self._places
        self._ids[places, all_series[kept]] = all_ids[kept]
        self._values[places, all_series[kept]] = all_values[kept]
        self._last_id[series] = np.maximum(self._last_id[series], all_ids[order[np.cumsum(totals) - 1]])

    def _reserve(
        self, num_series: int, series: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> None:
        places, columns = self._ids.shape
        if num_series > columns:
            columns = max(num_series, 2 * columns)
        longest = min(self._places, int((self._extended(self._count, columns)[series] + lengths).max()))
        if longest > places:
            places = min(self._places, max(longest, 2 * places, _FIRST_CAPACITY))
        if (places, columns) == self._ids.shape:
            return
        # While a ring is shorter than it may become, no series has wrapped, so growing keeps every place.
        # Of a place without a row nothing is ever read.
        ids = np.empty((places, columns), np.int64)
        values = np.empty((places, columns), np.float64)
        old_places, old_columns = self._ids.shape
        ids[:old_places, :old_columns] = self._ids
        values[:old_places, :old_columns] = self._values
        self._ids, self._values = ids, values
        self._count = self._extended(self._count, columns)
        self._last_id = self._extended(self._last_id, columns)

    @staticmethod
    def _extended(array: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
        return np.concatenate([array, np.zeros(size - len(array), np.int64)])

    def _summarise(self, num_series: int, back: int) -> Windows:
        observations = np.zeros(num_series, np.int64)
        valid = np.zeros(num_series, np.int64)
        total = np.zeros(num_series, np.float64)
        # Place by place, so that the order of every sum is the order of the samples on any machine.
        with np.errstate(over="ignore", invalid="ignore"):
            count = self._count[:num_series]
            longest = int(count.max(initial=0))
            is_even = bool((count == longest).all())
            offsets = self._offsets(num_series, back)
            if is_even:
                total = self._sum(num_series, longest - back, offsets)
            # A missing value shows in a sum of all.
            if is_even and not bool(np.isnan(total).any()):
                observations += len(offsets)
                valid += len(offsets)
            else:
                total = np.zeros(num_series, np.float64)
                for offset in offsets:
                    there, value = self._place(num_series, back - offset)
                    observations += there
                    has_value = there & ~np.isnan(value)
                    valid += has_value
                    total += np.where(has_value, value, 0.0)
            mean = np.where(valid > 0, total / np.maximum(valid, 1), np.nan)
            overflown = (valid > 0) & ~np.isfinite(mean)
            if bool(overflown.any()):
                mean = np.where(overflown, self._careful_mean(num_series, back, valid), mean)
        return Windows(observations, valid, mean)

    def _sum(self, num_series: int, first: int, offsets: range) -> npt.NDArray[np.float64]:
        """Returns the sum of some rows, where every series has its row at the same place."""
        total = np.zeros(num_series, np.float64)
        for offset in offsets:
            total += self._values[(first + offset) % self._places, :num_series]
        return total

    def _careful_mean(
        self, num_series: int, back: int, valid: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        # A mean of finite values is finite even where their sum is not: divide first, then add.
        mean = np.zeros(num_series, np.float64)
        divisor = np.maximum(valid, 1)
        for offset in self._offsets(num_series, back):
            there, value = self._place(num_series, back - offset)
            mean += np.where(there & ~np.isnan(value), value / divisor, 0.0)
        return mean

    def _offsets(self, num_series: int, back: int) -> range:
        """Returns the places of a window that any series has a row at; a window may be wider than the run."""
        longest = int(self._count[:num_series].max(initial=0))
        return range(min(max(back - longest, 0), self._window), self._window)

    def _place(self, num_series: int, back: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
        position = self._count[:num_series] - back
        there = position >= 0
        first = int(position[0]) if num_series else 0
        if first >= 0 and bool((position == first).all()):
            return there, self._values[first % self._places, :num_series]
        slots = np.where(there, position % self._places, 0)
        return there, self._values[slots, np.arange(num_series)]
