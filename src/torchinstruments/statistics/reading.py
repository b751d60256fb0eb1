"""The scalars of many tensors, read out into one array (writer thread).

The writer thread holds the interpreter's lock while it reads, and training waits for it. So what most
tensors have in common, one reducer whose values follow from facts, goes in few steps: rows of matrices by
index, and what was measured by itself as plain numbers. Any other tensor is read alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from torchinstruments.statistics.held import Look, Seen
from torchinstruments.statistics.measuring import FactsReducer
from torchinstruments.statistics.moments import Array
from torchinstruments.statistics.packing import PackedBlock, PackedPlace

__all__ = ["MeasuredScalars", "ScalarTable", "read_table"]


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


@dataclass(frozen=True, slots=True)
class ScalarTable:
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
    reducer: FactsReducer | None, looks: Sequence[Look | None], read_alone: Callable[[int], MeasuredScalars]
) -> ScalarTable:
    """Returns the scalars of tensors, in their order.

    Args:
        reducer: What most scalars are of; None where there is no such reducer.
        looks: What all scalars of each tensor follow from; None where it is something else.
        read_alone: Returns the scalars of the tensor at a place; called for those that need it.
    """
    if reducer is None:
        return _one_by_one([read_alone(place) for place in range(len(looks))])
    expected = reducer.metrics
    reasons: dict[tuple[int, int], str] = {}
    grid, unread = _read_together(reducer, looks, reasons)
    metrics = [expected] * len(looks)
    others: dict[int, Array] = {}
    for place in unread:
        found = read_alone(place)
        numbers = np.array(found.values, np.float64)  # None becomes NaN
        if found.metrics == expected:
            grid[place] = numbers
        else:
            metrics[place], others[place] = found.metrics, numbers
        reasons |= {(place, column): reason for column, reason in enumerate(found.reasons) if reason}
    values = grid.ravel()
    if others:
        values = np.concatenate([others.get(place, row) for place, row in enumerate(grid)])
    if not reasons:
        return ScalarTable(metrics, values, {})
    first = [0, *accumulate(map(len, metrics))]
    return ScalarTable(
        metrics, values, {first[place] + column: reason for (place, column), reason in reasons.items()}
    )


def _one_by_one(found: Sequence[MeasuredScalars]) -> ScalarTable:
    """Returns the scalars of tensors that were all read alone."""
    reasons = [*chain.from_iterable([one.reasons for one in found])]
    return ScalarTable(
        [one.metrics for one in found],
        np.array([*chain.from_iterable([one.values for one in found])], np.float64),  # None becomes NaN
        {place: reason for place, reason in enumerate(reasons) if reason} if any(reasons) else {},
    )


def _read_together(
    reducer: FactsReducer, looks: Sequence[Look | None], reasons: dict[tuple[int, int], str]
) -> tuple[Array, list[int]]:
    """Returns what a reducer makes of tensors, a row each, and which of them have to be read alone.

    Args:
        reducer: The reducer.
        looks: What they follow from.
        reasons: Takes why one is missing, by row and column.
    """
    width = len(reducer.metrics)
    unread: list[int] = []
    places: list[int] = []
    rows: list[Sequence[float]] = []
    packed: dict[PackedBlock, list[tuple[int, int]]] = {}
    for place, look in enumerate(looks):
        if type(look) is PackedPlace:
            packed.setdefault(look.block, []).append((place, look.row))
            continue
        numbers = None
        if look is not None:
            try:
                measured = look.result if type(look) is Seen else look.measured()
                numbers = reducer.numbers(measured.facts)
            except Exception:  # noqa: BLE001 - reading it alone says why
                numbers = None
        if numbers is None:
            unread.append(place)
        else:
            places.append(place)
            rows.append(numbers)
    grid = np.fromiter(chain.from_iterable(rows), np.float64, width * len(rows)).reshape(len(rows), width)
    if not np.isfinite(grid).all():
        unread += np.array(places)[~np.isfinite(grid).all(axis=1)].tolist()
    if len(rows) < len(looks):
        found, grid = grid, np.full((len(looks), width), np.nan)
        grid[places] = found
    for block, several in packed.items():
        if not _read_block(reducer, block, several, grid, reasons):
            unread += [place for place, _ in several]
    return grid, unread


def _read_block(
    reducer: FactsReducer,
    block: PackedBlock,
    several: Sequence[tuple[int, int]],
    grid: Array,
    reasons: dict[tuple[int, int], str],
) -> bool:
    """Fills in rows of a matrix, and returns whether that was possible.

    Args:
        reducer: The reducer.
        block: The matrix.
        several: For each tensor its row in `grid` and in the matrix.
        grid: Takes the values.
        reasons: Takes why one is missing, by row and column of `grid`.
    """
    try:
        table = block.table(reducer)
    except Exception:  # noqa: BLE001 - reading them alone says why
        table = None
    if table is None:
        return False
    places, rows = np.array(several).T
    grid[places] = table.values[rows]
    if table.missing:
        place_of = {row: place for place, row in several}
        for (row, column), absent in table.missing.items():
            if row in place_of:
                reasons[place_of[row], column] = absent.reason
    return True
