"""How one value lies over ranks, against numbers that were worked out by hand."""

import math

import numpy as np
import pytest

from torchinstruments.merge.rank_statistics import NONE, REASONS, RankStatistics, rank_statistics

MISSING = math.nan


def of_cell(*values: float) -> dict[str, float | str]:
    """Returns the statistics of one cell, of ranks 10, 11, 12 and so on."""
    found = rank_statistics(np.array([values]), np.arange(10, 10 + len(values)))
    named = {name: getattr(found, name)[0].item() for name in RankStatistics.__slots__}
    return named | {"unavailable": REASONS[named["unavailable"]]}


@pytest.mark.parametrize(
    ("values", "median", "mad", "furthest", "mads"),
    [
        ((0.0, 1.0, 2.0), 1.0, 1.0, 10, 1.0),  # both ends are as far: the lowest rank
        ((0.0, 1.0, 2.0, 3.0), 1.0, 1.0, 13, 2.0),  # the lower one of two middle values
        ((5.0, MISSING, 4.0, -3.0), 4.0, 1.0, 13, 7.0),
        ((1e300, 2e300, 4e300), 2e300, 1e300, 12, 2.0),
    ],
)
def test_distance_in_median_deviations(
    values: tuple[float, ...], median: float, mad: float, furthest: int, mads: float
) -> None:
    """Medians are lower medians, and of equal distances the lowest rank is named."""
    found = of_cell(*values)
    assert (found["median"], found["mad"], found["furthest_rank"], found["mads"]) == (
        median,
        mad,
        furthest,
        mads,
    )
    assert found["unavailable"] == ""


@pytest.mark.parametrize(
    ("values", "reason", "furthest", "mad"),
    [
        ((1.0, 2.0), "two_ranks", NONE, MISSING),
        ((1.0, MISSING, 1.0), "two_ranks", NONE, MISSING),
        ((1.0, 1.0, 1.0), "all_equal", NONE, 0.0),
        ((0.0, -0.0, 0.0), "all_equal", NONE, 0.0),
        ((1.0, 1.0, 7.0), "mad_is_zero", 12, 0.0),
        ((-1.7e308, 1.7e308, 1.7e308, -1.7e308), "mad_is_zero", 11, 0.0),
        ((0.0, 5e-324, 1e308, 1e308, -5e-324), "overflow", 12, 1e-323),
    ],
)
def test_where_there_is_no_multiple_there_is_a_reason(
    values: tuple[float, ...], reason: str, furthest: int, mad: float
) -> None:
    """Nothing is infinite, and nothing is NaN without a reason beside it."""
    found = of_cell(*values)
    assert (found["unavailable"], found["furthest_rank"]) == (reason, furthest)
    assert math.isnan(float(found["mads"]))
    assert found["mad"] == mad or (math.isnan(mad) and math.isnan(float(found["mad"])))


def test_a_deviation_beyond_double_precision_has_no_number() -> None:
    """Where the median deviation itself overflows it is missing, and so is the multiple of it."""
    found = of_cell(-1.7e308, 1.7e308, 1.7e308, -1.7e308, 1.6e308)
    assert found["median"] == 1.6e308
    assert math.isfinite(float(found["mad"]))
    assert found["unavailable"] == "overflow"
    assert math.isnan(float(found["mads"]))


def test_a_cell_without_a_value_harms_no_other() -> None:
    """A cell that no rank has a value of counts none, and those beside it are right."""
    values = np.array([[MISSING, MISSING, MISSING], [3.0, 1.0, 2.0]])
    found = rank_statistics(values, np.array([0, 1, 5]))
    assert found.num_ranks.tolist() == [0, 3]
    assert (found.lowest_rank[1], found.highest_rank[1], found.median[1]) == (1, 0, 2.0)
