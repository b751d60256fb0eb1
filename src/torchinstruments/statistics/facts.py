"""What is found out about a tensor's finite entries, and how that becomes named values.

Both paths, NumPy on the host and torch operations on an accelerator, end here: they gather the same raw
facts (counts, moments, order statistics), and one function turns them into values and reason codes. So the
two cannot differ in what a number means. `fact_columns` does the same for many small tensors at once.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torchinstruments.records import Absent, Reason
from torchinstruments.statistics.moments import NO_MOMENTS, Moments

__all__ = [
    "EMPTY",
    "MOMENT_METRICS",
    "PROFILE_METRICS",
    "QUARTERS",
    "Facts",
    "moment_numbers",
    "moment_values",
    "named_values",
    "profile_numbers",
    "quartile_position",
]

PROFILE_METRICS = (
    "mean",
    "std",
    "min",
    "max",
    "p25",
    "p50",
    "p75",
    "zero_fraction",
    "nonfinite_fraction",
)
"""Names of the nine statistics, in the order in which they are stored."""

MOMENT_METRICS = ("mean", "std", "rms", "max_abs", "finite_fraction")
"""Names of the statistics that need no order of the entries."""

QUARTERS = (1, 2, 3)
"""The quartiles, in quarters of the way from the lowest to the highest entry."""

_OF_FINITE_ENTRIES = PROFILE_METRICS[:7]


class Facts(NamedTuple):
    """What was found out about one tensor.

    Attributes:
        num_entries: Entries of the tensor.
        num_zero: Entries that equal zero, negative zero among them.
        num_nonfinite: Entries that are NaN or infinite.
        moments: Those of the finite entries.
        minimum: Lowest finite entry; a whole number for integer tensors on the host, so that none is rounded.
        maximum: Highest finite entry.
        quartiles: For each of `QUARTERS` the order statistics below and above its position; empty where
            nothing asked for an order.
    """

    num_entries: int
    num_zero: int
    num_nonfinite: int
    moments: Moments
    minimum: float
    maximum: float
    quartiles: tuple[tuple[float, float], ...] = ()

    @property
    def num_finite(self) -> int:
        """Finite entries."""
        return self.num_entries - self.num_nonfinite


EMPTY = Facts(0, 0, 0, NO_MOMENTS, 0.0, 0.0)
"""The facts of a tensor without entries."""


def quartile_position(num_finite: int, quarters: int) -> tuple[int, int, int]:
    """Returns where a quartile lies among sorted entries, by linear interpolation (NumPy's default).

    The position is ``(num_finite - 1) * quarters / 4``, computed in whole numbers.

    Args:
        num_finite: Entries, at least 1.
        quarters: 1, 2 or 3.

    Returns:
        Rank of the entry below, rank of the one above, and the way between them in quarters (0 to 3).
    """
    below, rest = divmod((num_finite - 1) * quarters, 4)
    return below, min(below + 1, num_finite - 1), rest


def named_values(facts: Facts) -> Mapping[str, float | Absent]:
    """Returns the nine statistics by name, each finite or with the reason why it is missing."""
    found = profile_numbers(facts)
    # The sum is finite only where each of them is.
    if found is not None and math.isfinite(sum(found)):
        return dict(zip(PROFILE_METRICS, found, strict=True))
    if facts.num_entries == 0:
        return dict.fromkeys(PROFILE_METRICS, Absent(Reason.EMPTY.value))
    num_finite = facts.num_finite
    values: dict[str, float | Absent]
    if num_finite == 0:
        values = dict.fromkeys(_OF_FINITE_ENTRIES, Absent(Reason.NO_FINITE_ENTRIES.value))
    else:
        ends = (facts.minimum, facts.maximum)
        rests = [(num_finite - 1) * quarters % 4 for quarters in QUARTERS]
        between = [_between(*pair, rest) for pair, rest in zip(facts.quartiles, rests, strict=True)]
        numbers = (_mean(facts), facts.moments.std, *ends, *between)
        values = dict(zip(_OF_FINITE_ENTRIES, map(_value, numbers), strict=True))
    values["zero_fraction"] = facts.num_zero / facts.num_entries
    values["nonfinite_fraction"] = facts.num_nonfinite / facts.num_entries
    return values


def profile_numbers(facts: Facts) -> tuple[float, ...] | None:
    """Returns the values of `named_values` in their order, if nothing is missing (training thread, hot path).

    Written out, since it is made of every tensor.

    Returns:
        None where there is no finite entry, or entries are whole numbers, which are not interpolated in
        floats. What float64 cannot hold is not finite.
    """
    num_entries, num_zero, num_nonfinite, (mean, std, _, _), low, high, quartiles = facts
    if type(low) is not float or not quartiles:
        return None
    (below_25, above_25), (below_50, above_50), (below_75, above_75) = quartiles
    last = num_entries - num_nonfinite - 1
    rest_25, rest_50, rest_75 = last % 4, last * 2 % 4, last * 3 % 4
    return (
        mean if low <= mean <= high else _mean(facts),
        std,
        low,
        high,
        below_25 + (above_25 - below_25) * (rest_25 / 4) if rest_25 else below_25,
        below_50 + (above_50 - below_50) * (rest_50 / 4) if rest_50 else below_50,
        below_75 + (above_75 - below_75) * (rest_75 / 4) if rest_75 else below_75,
        num_zero / num_entries,
        num_nonfinite / num_entries,
    )


def moment_values(facts: Facts) -> Mapping[str, float | Absent]:
    """Returns the five statistics that need no order, each finite or with the reason why it is missing."""
    if facts.num_entries == 0:
        return dict.fromkeys(MOMENT_METRICS, Absent(Reason.EMPTY.value))
    values: dict[str, float | Absent]
    if facts.num_finite == 0:
        values = dict.fromkeys(MOMENT_METRICS[:4], Absent(Reason.NO_FINITE_ENTRIES.value))
    else:
        mean, std = _mean(facts), facts.moments.std
        values = {
            "mean": _value(mean),
            "std": _value(std),
            # The root of mean**2 + std**2, which neither overflows nor vanishes on the way.
            "rms": _value(math.hypot(mean, std)),
            "max_abs": _value(max(abs(facts.minimum), abs(facts.maximum))),
        }
    values["finite_fraction"] = facts.num_finite / facts.num_entries
    return values


def moment_numbers(facts: Facts) -> tuple[float, ...] | None:
    """Returns the values of `moment_values` in their order (training thread, hot path).

    Returns:
        None where there is no finite entry, or entries are whole numbers. What float64 cannot hold is not
        finite.
    """
    num_entries, _, num_nonfinite, (mean, std, _, _), low, high, _ = facts
    if type(low) is not float or num_nonfinite == num_entries:
        return None
    if not low <= mean <= high:
        mean = _mean(facts)
    finite_fraction = (num_entries - num_nonfinite) / num_entries
    return mean, std, math.hypot(mean, std), max(abs(low), abs(high)), finite_fraction


def _mean(facts: Facts) -> float:
    """Returns the mean, between the extremes: the last bit of its rounding may not say otherwise."""
    mean, low, high = facts.moments.mean, float(facts.minimum), float(facts.maximum)
    if low <= mean <= high or not math.isfinite(mean):
        return mean
    return min(max(mean, low), high)


def _between(below: float, above: float, rest: int) -> float:
    """Returns the number that lies ``rest`` quarters of the way from one entry to the next.

    Whole numbers are interpolated as such and rounded once. Floats go by their gap, which leaves equal
    entries as they are; two of opposite sign whose gap overflows are weighed apart.
    """
    if rest == 0:
        return float(below)
    if isinstance(below, int) and isinstance(above, int):
        return (below * (4 - rest) + above * rest) / 4
    gap = above - below
    if math.isfinite(gap):
        return below + gap * (rest / 4)
    return below * (1 - rest / 4) + above * (rest / 4)


def _value(number: float) -> float | Absent:
    """Returns the number if it is one, else that float64 could not hold it."""
    return float(number) if math.isfinite(number) else Absent(Reason.OVERFLOW.value)
