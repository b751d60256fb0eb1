"""Numbers of a whole sharded tensor, from those of its parts, where that is exact: no deviation, no quantile.

A replica key tells which part of how many a rank has. A number is made only where all parts were measured at
one forward and ranks with the same part hold the same; each part counts once, however many ranks have it.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.comparison_cells import PROVENANCE
from torchinstruments.merge.comparison_rows import AlignedRows
from torchinstruments.merge.rank_statistics import RankStatistics
from torchinstruments.merge.row_spans import Moment
from torchinstruments.store.series import SeriesKey

__all__ = ["CombinedParts", "combined_parts"]

_NAMES = {
    "min": "min_of_ranks",
    "max": "max_of_ranks",
    "max_abs": "max_abs_of_ranks",
    "zero_fraction": "zero_fraction_of_ranks_by_size",
    "nonfinite_fraction": "nonfinite_fraction_of_ranks_by_size",
    "finite_fraction": "finite_fraction_of_ranks_by_size",
    "rms": "l2_norm_of_ranks_from_sum_of_squares",
}
_ALL_FINITE = {"nonfinite_fraction": 0.0, "finite_fraction": 1.0}
_PART = re.compile(r"@(\d+)/(\d+)(?= )")
_SHAPE_BIT = 1 << PROVENANCE.index("shape")

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CombinedParts:
    """A number of a whole tensor.

    Attributes:
        key: The series of its parts.
        moment: The forward.
        mode: ``train`` or ``eval``.
        backward_index: Which traversal of the graph.
        value: The number.
        num_parts: Parts of the tensor.
    """

    key: SeriesKey
    moment: Moment
    mode: str
    backward_index: int
    value: float
    num_parts: int

    def record(self) -> dict[str, object]:
        """Returns it as it stands in ``result.json``."""
        generation, attempt, forward = self.moment
        return {
            "statistic": _NAMES[self.key.metric],
            "value": self.value,
            "num_parts": self.num_parts,
            "generation": generation,
            "attempt": attempt if attempt >= 0 else None,
            "forward_in_attempt": forward if attempt >= 0 else None,
            "forward_index": None if attempt >= 0 else forward,
            "mode": self.mode,
            "backward_index": self.backward_index,
        }


@dataclass(frozen=True, slots=True)
class _Wholes:
    """Tensors whose parts were all measured, by series and forward; the cells of one lie together.

    Attributes:
        columns: Cell of each part.
        starts: Where each tensor begins in `columns`, and behind the last one their number.
        series: Series number of each tensor, ascending; of one series the latest forward comes last.
        variants: Any variant number of each tensor.
        moments: Moment number of each tensor.
        traversals: One number for mode and backward of each tensor.
    """

    columns: _Integers
    starts: _Integers
    series: _Integers
    variants: _Integers
    moments: _Integers
    traversals: _Integers


def combined_parts(rows: AlignedRows, found: list[tuple[_Integers, RankStatistics]]) -> list[CombinedParts]:
    """Returns the number of the latest forward of each series that has one in a stretch (worker).

    Args:
        rows: The stretch.
        found: Cells of parts that any rank has a value of, with their statistics.
    """
    cells = rows.cells
    if not bool((cells.whole < 0).any()):
        return []
    lowest, highest = np.full(len(cells), np.nan), np.full(len(cells), np.nan)
    for own, statistics in found:
        lowest[own], highest[own] = statistics.lowest, statistics.highest
    wholes = _wholes(rows, lowest, highest)
    if len(wholes.series) == 0:
        return []

    def number(key: SeriesKey, place: int) -> CombinedParts | None:
        columns = wholes.columns[wholes.starts[place] : wholes.starts[place + 1]]
        value = _value(key.metric, rows.sizes[columns], lowest[columns])
        if value is None:
            return None
        variant = cells.variants[int(wholes.variants[place])]
        at = cells.moments[int(wholes.moments[place])]
        return CombinedParts(key, at, variant.mode, variant.backward_index, value, len(columns))

    combined = [cells.series[one] for one in wholes.series.tolist()]
    finite = {
        (key, int(wholes.moments[place]), int(wholes.traversals[place])): place
        for place, key in enumerate(combined)
        if key.metric in _ALL_FINITE
    }

    def is_all_finite(key: SeriesKey, place: int) -> bool:
        """Whether all entries of the tensor are known to be finite then; else it has no norm."""
        forward = int(wholes.moments[place]), int(wholes.traversals[place])
        for metric, value in _ALL_FINITE.items():
            other = key._replace(metric=metric)
            at = finite.get((other, *forward))
            if at is not None:
                one = number(other, at)
                return one is not None and one.value == value
        return False

    latest: dict[SeriesKey, CombinedParts] = {}
    for place in range(len(combined) - 1, -1, -1):
        key = combined[place]
        if key in latest:
            continue
        one = number(key, place)
        if one is not None and (key.metric != "rms" or is_all_finite(key, place)):
            latest[key] = one
    return list(latest.values())


def _wholes(rows: AlignedRows, lowest: _Floats, highest: _Floats) -> _Wholes:
    cells = rows.cells
    is_combined = np.array([key.metric in _NAMES for key in cells.series], np.bool_)
    moment, series, variant = cells.described()
    columns = np.flatnonzero((cells.whole < 0) & is_combined[series])
    moment, series, variant = moment[columns], series[columns], variant[columns]
    places = [_place_of(one.replica_key) for one in cells.variants]
    splits = [tuple(size for _, size in place) for place in places]
    num_parts = np.array([math.prod(split) if split else 0 for split in splits], np.int64)[variant]
    split, part = _ordinals(splits)[variant], _ordinals([tuple(place) for place in places])[variant]
    traversal = _ordinals([(one.backward_index, one.mode) for one in cells.variants])[variant]
    time = _ordinals(cells.moments)[moment]
    low, size = lowest[columns], rows.sizes[columns]
    is_missing = np.isnan(low)
    is_sound = (
        (num_parts > 0)
        & (size >= 0)
        & (rows.differing[columns] & _SHAPE_BIT == 0)
        & np.where(is_missing, size == 0, low == highest[columns])
        & (is_missing | (rows.without_value[columns] == 0))
    )
    order = np.lexsort((part, traversal, time, series))
    is_first = np.ones(len(order), np.bool_)
    same = [one[order] for one in (series, time, traversal)]
    is_first[1:] = np.any([one[1:] != one[:-1] for one in same], axis=0)
    starts = np.flatnonzero(is_first)
    if len(starts) == 0:
        return _Wholes(columns, np.zeros(1, np.int64), series, variant, moment, traversal)
    is_another = is_first.copy()
    is_another[1:] |= part[order][1:] != part[order][:-1]
    counts = np.diff(np.append(starts, len(order)))
    is_whole = (
        np.logical_and.reduceat(is_sound[order], starts)
        & (np.minimum.reduceat(split[order], starts) == np.maximum.reduceat(split[order], starts))
        & (counts == num_parts[order[starts]])
        & (np.add.reduceat(is_another.astype(np.int64), starts) == counts)
    )
    first = order[starts[is_whole]]
    return _Wholes(
        columns=columns[order[np.repeat(is_whole, counts)]],
        starts=np.append(0, np.cumsum(counts[is_whole])),
        series=series[first],
        variants=variant[first],
        moments=moment[first],
        traversals=traversal[first],
    )


def _ordinals(keys: Sequence[object]) -> _Integers:
    """Returns the place of each key among the distinct keys in ascending order."""
    place = {key: number for number, key in enumerate(sorted(set(keys)))}  # type: ignore[type-var] - of one kind
    return np.array([place[key] for key in keys], np.int64)


def _place_of(replica_key: str) -> list[tuple[int, int]]:
    """Returns which part of how many a key names, on each axis that a tensor is cut along."""
    axes, _, _ = replica_key.partition("ranks=")
    return [(int(part), int(size)) for part, size in _PART.findall(axes)]


def _value(metric: str, sizes: _Integers, values: _Floats) -> float | None:
    sizes, values = sizes[sizes > 0], values[sizes > 0]
    if len(values) == 0:
        return None
    if metric == "min":
        return float(values.min())
    if metric in {"max", "max_abs"}:
        return float(values.max())
    if metric == "rms":
        # Scaled by the largest, so that no square leaves float64.
        largest = float(values.max())
        scaled = values / largest if largest else values
        value = largest * math.sqrt(float((sizes * scaled * scaled).sum()))
        return value if math.isfinite(value) else None
    return float((sizes * values).sum() / sizes.sum())
