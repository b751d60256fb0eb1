"""The nine statistics as facts about a tensor's finite entries, and their way into named values.

Both paths, NumPy on the host and torch operations on an accelerator, end here: they gather the same raw
facts (counts, moments, order statistics), and one function turns them into values and reason codes. So the
two cannot differ in what a number means.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchinstruments.records import Absent, Reason

__all__ = ["PROFILE_METRICS", "QUARTERS", "Facts", "named_values", "quartile_position"]

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

QUARTERS = (1, 2, 3)
"""The quartiles, in quarters of the way from the lowest to the highest entry."""

_OF_FINITE_ENTRIES = PROFILE_METRICS[:7]


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found out about one tensor.

    Attributes:
        num_entries: Entries of the tensor.
        num_zero: Entries that equal zero, negative zero among them.
        num_nonfinite: Entries that are NaN or infinite.
        mean: Mean of the finite entries.
        std: Population standard deviation of the finite entries.
        minimum: Lowest finite entry; a whole number for integer tensors on the host, so that none is rounded.
        maximum: Highest finite entry.
        quartiles: For each of `QUARTERS` the order statistics below and above its position.
    """

    num_entries: int
    num_zero: int
    num_nonfinite: int
    mean: float
    std: float
    minimum: float
    maximum: float
    quartiles: tuple[tuple[float, float], ...]


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
    if facts.num_entries == 0:
        return dict.fromkeys(PROFILE_METRICS, Absent(Reason.EMPTY.value))
    num_finite = facts.num_entries - facts.num_nonfinite
    values: dict[str, float | Absent]
    if num_finite == 0:
        values = dict.fromkeys(_OF_FINITE_ENTRIES, Absent(Reason.NO_FINITE_ENTRIES.value))
    else:
        low, high = float(facts.minimum), float(facts.maximum)
        values = {
            # The mean lies between the extremes; the last bit of its rounding may not say otherwise.
            "mean": _value(min(max(facts.mean, low), high) if math.isfinite(facts.mean) else facts.mean),
            "std": _value(facts.std),
            "min": _value(low),
            "max": _value(high),
            **_quartiles(facts.quartiles, num_finite),
        }
    values["zero_fraction"] = facts.num_zero / facts.num_entries
    values["nonfinite_fraction"] = facts.num_nonfinite / facts.num_entries
    return values


def _quartiles(found: tuple[tuple[float, float], ...], num_finite: int) -> dict[str, float | Absent]:
    """Returns the three quartiles by name."""
    return {
        f"p{25 * quarters}": _value(_between(below, above, quartile_position(num_finite, quarters)[2]))
        for quarters, (below, above) in zip(QUARTERS, found, strict=True)
    }


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
