"""The scalars of many tensors, read out into one array (writer thread).

The writer thread holds the interpreter's lock while it reads, and training waits for it. What most tensors
have in common, one reducer whose values follow from facts, lies in rows already (`NumberRows`). Any other
tensor is read alone.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from torchinstruments.statistics.moments import Array
from torchinstruments.statistics.number_rows import NumberRows, ReadRows

__all__ = ["MeasuredScalars", "ScalarTable", "read_one_by_one", "read_table"]


class MeasuredScalars(NamedTuple):
    """The scalars of one tensor.

    Attributes:
        metrics: Names, each once, in the order of the reducers.
        values: Finite numbers; None where there is a reason.
        reasons: ``""`` beside a value, else a `Reason` with or without detail.
    """

    metrics: tuple[str, ...]
    values: tuple[float | None, ...]
    reasons: tuple[str, ...]


class ScalarTable(NamedTuple):
    """The scalars of many tensors.

    Attributes:
        metrics: Names of the scalars of each tensor.
        values: The scalars of one tensor after those of the other; NaN where one is missing; float64.
        reasons: Why, by the place in `values`.
    """

    metrics: list[tuple[str, ...]]
    values: Array
    reasons: dict[int, str]


def read_table(
    rows: NumberRows, indices: Sequence[int], read_alone: Callable[[int], MeasuredScalars]
) -> ScalarTable:
    """Returns the scalars of tensors, in their order.

    Args:
        rows: What most scalars are in.
        indices: The row of each tensor; negative for what was not measured.
        read_alone: Returns the scalars of the tensor at a place; called for those that need it.
    """
    expected, count = rows.metrics, len(indices)
    metrics = [expected] * count
    is_in_order = count == len(rows) and [*indices] == [*range(count)]
    if is_in_order and rows.is_filled:
        return ScalarTable(metrics, rows.values(), {})
    read = rows.read()
    if is_in_order:
        grid, alone, reasons = read.values, read.unread, read.reasons
    else:
        grid, alone, reasons = _chosen(read, np.array(indices, np.int64))
    others: dict[int, Array] = {}
    for place in alone:
        found = read_alone(place)
        numbers = np.array(found.values, np.float64)  # None becomes NaN
        if found.metrics == expected:
            grid[place] = numbers
        else:
            metrics[place], others[place] = found.metrics, numbers
        reasons |= {(place, column): reason for column, reason in enumerate(found.reasons) if reason}
    values = grid.reshape(-1)
    if others:
        values = np.concatenate([others.get(place, row) for place, row in enumerate(grid)])
    if not reasons:
        return ScalarTable(metrics, values, {})
    first = [0, *accumulate(map(len, metrics))]
    return ScalarTable(
        metrics, values, {first[place] + column: reason for (place, column), reason in reasons.items()}
    )


def read_one_by_one(found: Sequence[MeasuredScalars]) -> ScalarTable:
    """Returns the scalars of tensors that were all read alone."""
    reasons = [*chain.from_iterable([one.reasons for one in found])]
    return ScalarTable(
        [one.metrics for one in found],
        np.array([*chain.from_iterable([one.values for one in found])], np.float64),  # None becomes NaN
        {place: reason for place, reason in enumerate(reasons) if reason} if any(reasons) else {},
    )


def _chosen(read: ReadRows, indices: Array) -> tuple[Array, list[int], dict[tuple[int, int], str]]:
    """Returns rows in another order, which of them have to be read alone, and reasons by row and column."""
    is_measured = indices >= 0
    grid = np.full((indices.size, read.values.shape[1]), math.nan)
    grid[is_measured] = read.values[indices[is_measured]]
    is_alone = ~is_measured
    if read.unread:
        is_alone |= np.isin(indices, read.unread)
    by_row: dict[int, list[tuple[int, str]]] = {}
    for (row, column), reason in read.reasons.items():
        by_row.setdefault(row, []).append((column, reason))
    reasons = {
        (place, column): reason
        for place, row in enumerate(indices.tolist() if by_row else ())
        for column, reason in by_row.get(row, ())
    }
    return grid, np.flatnonzero(is_alone).tolist(), reasons
