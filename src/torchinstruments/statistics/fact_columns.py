"""The facts of many small tensors as columns, and the statistics that follow from them, all rows at once.

Each number is the one that `facts` derives from the same facts of one tensor, to the last bit: the same
operations in the same order, on arrays. In Python one tensor by itself costs ten times as much.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchinstruments.records import Absent, Reason
from torchinstruments.statistics.facts import MOMENT_METRICS, PROFILE_METRICS, QUARTERS, Facts
from torchinstruments.statistics.moments import NO_MOMENTS, Array, resolve

__all__ = ["FactColumns", "ValueTable", "moment_table", "profile_table"]

_OVERFLOW = Absent(Reason.OVERFLOW.value)
_NONE_FINITE = Absent(Reason.NO_FINITE_ENTRIES.value)


@dataclass(frozen=True, slots=True)
class FactColumns:
    """Facts of tensors of at least one entry each, one a row.

    Attributes:
        num_entries: Entries; int64.
        num_zero: Entries that equal zero; int64.
        num_finite: Finite entries; int64. Where there are none, what follows is of no meaning.
        total: As `resolve` takes it, and so the next three; float64.
        total_squares: Sum of squared distances from the pivot.
        scaled_pivot: The pivot.
        exponent: The power of two; int32.
        ordered: Lowest and highest entry, then for each of `QUARTERS` the ones below and above; float64.
    """

    num_entries: Array
    num_zero: Array
    num_finite: Array
    total: Array
    total_squares: Array
    scaled_pivot: Array
    exponent: Array
    ordered: Array

    def facts(self, row: int) -> Facts:
        """Returns the facts of one tensor (writer thread)."""
        num_entries, num_finite = int(self.num_entries[row]), int(self.num_finite[row])
        if num_finite == 0:
            return Facts(num_entries, 0, num_entries, NO_MOMENTS, 0.0, 0.0)
        low, high, *found = self.ordered[row].tolist()
        return Facts(
            num_entries=num_entries,
            num_zero=int(self.num_zero[row]),
            num_nonfinite=num_entries - num_finite,
            moments=resolve(
                float(self.total[row]),
                float(self.total_squares[row]),
                num_finite,
                float(self.scaled_pivot[row]),
                int(self.exponent[row]),
            ),
            minimum=low,
            maximum=high,
            quartiles=(*zip(found[::2], found[1::2], strict=True),),
        )


@dataclass(frozen=True, slots=True)
class ValueTable:
    """What a reducer makes of many tensors, one a row.

    Attributes:
        values: A column a metric; NaN where a value is missing; float64.
        missing: Why, for each of the values that are missing, by row and column.
    """

    values: Array
    missing: Mapping[tuple[int, int], Absent]

    def row(self, row: int) -> list[float | Absent]:
        """Returns the values of one tensor."""
        return [
            self.missing.get((row, place), value) for place, value in enumerate(self.values[row].tolist())
        ]

    def column(self, place: int) -> "ValueTable":
        """Returns one metric alone."""
        missing = {(row, 0): absent for (row, column), absent in self.missing.items() if column == place}
        return ValueTable(self.values[:, place : place + 1], missing)


def profile_table(columns: FactColumns) -> ValueTable:
    """Returns the nine statistics of each row, as `named_values` does of one (writer thread)."""
    with np.errstate(all="ignore"):
        mean, std = _mean_and_std(columns)
        quartiles = _quartiles(columns)
        return _table(
            columns,
            (
                mean,
                std,
                columns.ordered[:, 0],
                columns.ordered[:, 1],
                *quartiles.T,
                columns.num_zero / columns.num_entries,
                (columns.num_entries - columns.num_finite) / columns.num_entries,
            ),
            num_of_finite=len(PROFILE_METRICS) - 2,
        )


def moment_table(columns: FactColumns) -> ValueTable:
    """Returns the five statistics that need no order, as `moment_values` does of one (writer thread)."""
    with np.errstate(all="ignore"):
        mean, std = _mean_and_std(columns)
        low, high = np.abs(columns.ordered[:, 0]), np.abs(columns.ordered[:, 1])
        return _table(
            columns,
            (
                mean,
                std,
                # NumPy's own rounds otherwise.
                np.array(list(map(math.hypot, mean.tolist(), std.tolist()))),
                np.maximum(low, high),
                columns.num_finite / columns.num_entries,
            ),
            num_of_finite=len(MOMENT_METRICS) - 1,
        )


def _mean_and_std(columns: FactColumns) -> tuple[Array, Array]:
    """Returns both; the mean lies between the extremes."""
    num_finite = columns.num_finite
    offset = columns.total / num_finite
    std = np.sqrt(np.maximum(columns.total_squares / num_finite - offset * offset, 0.0))
    mean = columns.scaled_pivot + offset
    if columns.exponent.any():
        mean, std = np.ldexp(mean, columns.exponent), np.ldexp(std, columns.exponent)
    low, high = columns.ordered[:, 0], columns.ordered[:, 1]
    within = np.where(low > mean, low, mean)
    within = np.where(high < within, high, within)
    return np.where(np.isfinite(mean), within, mean), std


def _quartiles(columns: FactColumns) -> Array:
    """Returns the three quartiles, one a column: by the gap, or weighed apart where that overflows."""
    rest = (columns.num_finite[:, None] - 1) * np.array(QUARTERS) % 4
    way = rest / 4
    below, above = columns.ordered[:, 2::2], columns.ordered[:, 3::2]
    gap = above - below
    between = np.where(np.isfinite(gap), below + gap * way, below * (1 - way) + above * way)
    return np.where(rest == 0, below, between)


def _table(columns: FactColumns, values: Sequence[Array], *, num_of_finite: int) -> ValueTable:
    """Returns columns as a table, with a reason where there is no number.

    Args:
        columns: What the values follow from.
        values: One array a metric.
        num_of_finite: How many of them, from the first on, are of finite entries.
    """
    table = np.stack(values, axis=1)
    none_finite = columns.num_finite == 0
    of_finite = table[:, :num_of_finite]
    is_missing = ~np.isfinite(of_finite) | none_finite[:, None]
    if not is_missing.any():
        return ValueTable(table, {})
    of_finite[is_missing] = np.nan
    missing = {
        (row, place): _NONE_FINITE if none_finite[row] else _OVERFLOW
        for row, place in np.argwhere(is_missing).tolist()
    }
    return ValueTable(table, missing)
