"""How one value lies over ranks: the lowest and highest, the median, and the rank that is furthest from it.

Every median is the lower one of two middle values, so that it is always a value that some rank has: half of
the sum of two ranks' values would be a mean over ranks. Of several ranks that hold the same extremum the
lowest rank is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = ["NONE", "REASONS", "RankStatistics", "Unavailable", "rank_statistics"]

NONE = -1
"""Stands where no rank is named."""

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


class Unavailable(IntEnum):
    """Why a distance in median absolute deviations is missing; `REASONS` has the texts."""

    AVAILABLE = 0
    TWO_RANKS = 1
    ALL_EQUAL = 2
    MAD_IS_ZERO = 3
    OVERFLOW = 4


REASONS = ("", "two_ranks", "all_equal", "mad_is_zero", "overflow")
"""As they stand in the tables, by `Unavailable`."""


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """Of some cells, each array of shape ``[cells]``; of a cell without a value all but `num_ranks` is void.

    Attributes:
        num_ranks: Ranks with a value.
        lowest_rank: Rank with the lowest value.
        lowest: Its value.
        highest_rank: Rank with the highest value.
        highest: Its value.
        median: Median over ranks.
        mad: Median over ranks of the distance from that median; NaN for fewer than three ranks, and where it
            is no finite number.
        furthest_rank: Rank with the largest distance from the median; `NONE` for fewer than three ranks, and
            where all hold the same.
        furthest: Its value, or NaN.
        distance: Its distance, or NaN.
        mads: The distance divided by `mad`; NaN where `unavailable` says why.
        unavailable: `Unavailable`.
    """

    num_ranks: _Integers
    lowest_rank: _Integers
    lowest: _Floats
    highest_rank: _Integers
    highest: _Floats
    median: _Floats
    mad: _Floats
    furthest_rank: _Integers
    furthest: _Floats
    distance: _Floats
    mads: _Floats
    unavailable: _Integers

    def taken(self, places: npt.NDArray[np.intp]) -> "RankStatistics":
        """Returns those of some cells (worker)."""
        return RankStatistics(
            num_ranks=self.num_ranks[places],
            lowest_rank=self.lowest_rank[places],
            lowest=self.lowest[places],
            highest_rank=self.highest_rank[places],
            highest=self.highest[places],
            median=self.median[places],
            mad=self.mad[places],
            furthest_rank=self.furthest_rank[places],
            furthest=self.furthest[places],
            distance=self.distance[places],
            mads=self.mads[places],
            unavailable=self.unavailable[places],
        )

    @classmethod
    def joined(cls, found: Sequence["RankStatistics"]) -> "RankStatistics":
        """Returns those of several groups of cells, one group behind the other (worker)."""
        if not found:
            return rank_statistics(np.zeros((0, 1)), np.zeros(1, np.int64))
        return cls(
            num_ranks=np.concatenate([one.num_ranks for one in found]),
            lowest_rank=np.concatenate([one.lowest_rank for one in found]),
            lowest=np.concatenate([one.lowest for one in found]),
            highest_rank=np.concatenate([one.highest_rank for one in found]),
            highest=np.concatenate([one.highest for one in found]),
            median=np.concatenate([one.median for one in found]),
            mad=np.concatenate([one.mad for one in found]),
            furthest_rank=np.concatenate([one.furthest_rank for one in found]),
            furthest=np.concatenate([one.furthest for one in found]),
            distance=np.concatenate([one.distance for one in found]),
            mads=np.concatenate([one.mads for one in found]),
            unavailable=np.concatenate([one.unavailable for one in found]),
        )


def rank_statistics(values: _Floats, ranks: _Integers) -> RankStatistics:
    """Returns the statistics of some cells (worker).

    Args:
        values: Shape ``[cells, places]``; NaN where a rank has none. Finite otherwise.
        ranks: Which rank holds which place, ascending: shape ``[places]``, or ``[cells, places]``.
    """
    cells = np.arange(len(values))
    is_missing = np.isnan(values)
    num_ranks = values.shape[1] - is_missing.sum(axis=1)
    low = np.where(is_missing, np.inf, values).argmin(axis=1)
    high = np.where(is_missing, -np.inf, values).argmax(axis=1)
    median = _lower_median(values, num_ranks)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        distances = np.abs(values - median[:, None])
        mad = _lower_median(distances, num_ranks)
        far = np.where(is_missing, -1.0, distances).argmax(axis=1)
        distance = distances[cells, far]
        mads = distance / mad
    lowest, highest, furthest = values[cells, low], values[cells, high], values[cells, far]
    unavailable = np.zeros(len(values), np.int64)
    unavailable[~np.isfinite(mads)] = Unavailable.OVERFLOW
    unavailable[mad == 0] = Unavailable.MAD_IS_ZERO
    unavailable[lowest == highest] = Unavailable.ALL_EQUAL
    unavailable[num_ranks < 3] = Unavailable.TWO_RANKS
    is_named = (num_ranks > 2) & (lowest != highest)

    def rank_of(place: npt.NDArray[np.intp]) -> _Integers:
        return ranks[place] if ranks.ndim == 1 else ranks[cells, place]

    return RankStatistics(
        num_ranks=num_ranks,
        lowest_rank=rank_of(low),
        lowest=lowest,
        highest_rank=rank_of(high),
        highest=highest,
        median=median,
        mad=np.where((num_ranks > 2) & np.isfinite(mad), mad, np.nan),
        furthest_rank=np.where(is_named, rank_of(far), NONE),
        furthest=np.where(is_named, furthest, np.nan),
        distance=np.where(is_named, distance, np.nan),
        mads=np.where(unavailable == Unavailable.AVAILABLE, mads, np.nan),
        unavailable=unavailable,
    )


def _lower_median(values: _Floats, counts: _Integers) -> _Floats:
    """Returns the lower median of each row; NaN sorts behind all else, and `counts` leaves it out."""
    middle = np.maximum(counts - 1, 0) // 2
    if len(values) == 0:
        return np.zeros(0)
    if bool((middle == middle[0]).all()):
        one = int(middle[0])
        return np.partition(values, one, axis=1)[:, one]
    return np.sort(values, axis=1)[np.arange(len(values)), middle]
