"""Numbers of a whole sharded tensor, from those of its parts, where that is exact: no deviation, no quantile.

A replica key tells which part of how many a rank has. A number is made only where all parts were measured at
one forward and ranks with the same part hold the same; each part counts once, however many ranks have it.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.comparison_cells import PROVENANCE, Cells
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


@dataclass(slots=True)
class _Whole:
    """The parts of one tensor, for one series at one forward."""

    values: list[float]
    sizes: list[int]
    places: set[tuple[int, ...]]
    num_parts: int
    is_sound: bool = True


def combined_parts(rows: AlignedRows, found: list[tuple[_Integers, RankStatistics]]) -> list[CombinedParts]:
    """Returns the number of the latest forward of each series that has one in a stretch (worker).

    Args:
        rows: The stretch.
        found: Cells of parts that any rank has a value of, with their statistics.
    """
    cells = rows.cells
    columns = np.flatnonzero(cells.whole < 0)
    if len(columns) == 0:
        return []
    lowest, highest = np.full(len(cells), np.nan), np.full(len(cells), np.nan)
    for own, statistics in found:
        lowest[own], highest[own] = statistics.lowest, statistics.highest
    latest: dict[SeriesKey, CombinedParts] = {}
    for (moment, series, mode, backward), whole in _wholes(rows, columns, lowest, highest).items():
        key, at = cells.series[series], cells.moments[moment]
        held = latest.get(key)
        if held is not None and (held.moment, held.backward_index) >= (at, backward):
            continue
        if whole.is_sound and len(whole.places) == len(whole.sizes) == whole.num_parts:
            value = _value(key.metric, whole)
            if value is not None:
                latest[key] = CombinedParts(key, at, mode, backward, value, whole.num_parts)
    return [one for one in latest.values() if one.key.metric != "rms" or _is_all_finite(one, latest)]


def _wholes(
    rows: AlignedRows, columns: _Integers, lowest: _Floats, highest: _Floats
) -> dict[tuple[int, int, str, int], _Whole]:
    cells = rows.cells
    moment, series, variant = (numbers[columns] for numbers in cells.described())
    combined = np.array([key.metric in _NAMES for key in cells.series], np.bool_)
    last = _last_moments(cells, moment, series)
    places = [_place_of(one.replica_key) for one in cells.variants]
    wholes: dict[tuple[int, int, str, int], _Whole] = {}
    for row in np.flatnonzero(combined[series] & last).tolist():
        column, one = int(columns[row]), cells.variants[int(variant[row])]
        place = places[int(variant[row])]
        number = math.prod(size for _, size in place) if place else 0
        name = (int(moment[row]), int(series[row]), one.mode, one.backward_index)
        whole = wholes.setdefault(name, _Whole([], [], set(), number))
        size, low = int(rows.sizes[column]), float(lowest[column])
        whole.sizes.append(size)
        whole.places.add(tuple(part for part, _ in place))
        whole.is_sound &= (
            number == whole.num_parts > 0
            and size >= 0
            and not int(rows.differing[column]) & _SHAPE_BIT
            and (size == 0 if math.isnan(low) else low == float(highest[column]))
            and (math.isnan(low) or not rows.without_value[column])
        )
        whole.values.append(low)
    return wholes


def _last_moments(cells: Cells, moment: _Integers, series: _Integers) -> npt.NDArray[np.bool_]:
    """Returns which cells belong to the last forward of their series in the stretch."""
    ordered = sorted(range(len(cells.moments)), key=cells.moments.__getitem__)
    place = np.empty(len(ordered), np.int64)
    place[ordered] = np.arange(len(ordered))
    last = np.full(len(cells.series), -1, np.int64)
    np.maximum.at(last, series, place[moment])
    return place[moment] == last[series]


def _place_of(replica_key: str) -> list[tuple[int, int]]:
    """Returns which part of how many a key names, on each axis that a tensor is cut along."""
    axes, _, _ = replica_key.partition("ranks=")
    return [(int(part), int(size)) for part, size in _PART.findall(axes)]


def _value(metric: str, whole: _Whole) -> float | None:
    sizes, values = np.array(whole.sizes, np.float64), np.array(whole.values, np.float64)
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


def _is_all_finite(one: CombinedParts, latest: dict[SeriesKey, CombinedParts]) -> bool:
    """Returns whether it is measured that all entries of the tensor are finite; else it has no norm."""
    for metric, value in _ALL_FINITE.items():
        other = latest.get(one.key._replace(metric=metric))
        if other is not None and (other.moment, other.mode, other.backward_index) == (
            one.moment,
            one.mode,
            one.backward_index,
        ):
            return other.value == value
    return False
