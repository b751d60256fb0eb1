"""Which cell is wider than another: first a rank that is clearly off where the others are equal.

Median deviations cannot order everything: where half of the ranks or more hold the same, the deviation is 0,
and the one rank that is off, the plainest case of all, has no multiple of it.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.rank_statistics import NONE, RankStatistics

__all__ = ["CLEAR_DEVIATION", "Width", "widths"]

CLEAR_DEVIATION = 1e-6
"""Distance from the median, relative to the larger magnitude of value and median, that is more than rounding.

Among equal ones a smaller difference goes behind all that can be counted in median deviations.
"""


class Width(IntEnum):
    """Classes of cells; a higher one goes before a lower one, whatever the sizes in them.

    Attributes:
        UNNAMED: No rank is the furthest; size: highest minus lowest.
        SLIGHT: A rank is, with no number of median deviations, by less than `CLEAR_DEVIATION`; size: the
            relative distance.
        IN_MADS: A rank is, with a number of median deviations; size: that number.
        CLEAR: A rank is, with no such number, by `CLEAR_DEVIATION` or more; size: the relative distance.
    """

    UNNAMED = 0
    SLIGHT = 1
    IN_MADS = 2
    CLEAR = 3


def widths(statistics: RankStatistics) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Returns `Width` and size of each cell, each of shape ``[cells]`` (worker)."""
    value, median = statistics.furthest, statistics.median
    is_named = statistics.furthest_rank != NONE
    has_mads = ~np.isnan(statistics.mads)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        spread = statistics.highest - statistics.lowest
        magnitude = np.maximum(np.abs(value), np.abs(median))
        relative = statistics.distance / magnitude
        # A distance beyond float64 is at most twice the larger magnitude all the same.
        relative = np.where(np.isfinite(relative), relative, np.abs(value / magnitude - median / magnitude))
    width = np.where(
        has_mads,
        Width.IN_MADS,
        np.where(is_named, np.where(relative >= CLEAR_DEVIATION, Width.CLEAR, Width.SLIGHT), Width.UNNAMED),
    )
    size = np.where(has_mads, statistics.mads, np.where(is_named, relative, spread))
    return width.astype(np.int64), size
