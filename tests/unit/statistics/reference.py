"""The nine statistics in exact rational arithmetic, written down without a glance at the implementation."""

import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction

PRECISE = Context(prec=60, Emax=10**6, Emin=-(10**6))

SEVEN = ("mean", "std", "min", "max", "p25", "p50", "p75")


def reference(entries: Sequence[float]) -> dict[str, float | str]:
    """Returns each statistic, rounded once, or the reason why it is missing."""
    if not entries:
        return dict.fromkeys((*SEVEN, "zero_fraction", "nonfinite_fraction"), "empty")
    finite = sorted(Fraction(entry) for entry in entries if math.isfinite(entry))
    values: dict[str, float | str] = dict.fromkeys(SEVEN, "no_finite_entries")
    if finite:
        mean = sum(finite) / Fraction(len(finite))
        variance = sum((entry - mean) ** 2 for entry in finite) / Fraction(len(finite))
        values = {
            "mean": float(mean),
            "std": square_root(variance),
            "min": float(finite[0]),
            "max": float(finite[-1]),
            "p25": float(quantile(finite, Fraction(1, 4))),
            "p50": float(quantile(finite, Fraction(1, 2))),
            "p75": float(quantile(finite, Fraction(3, 4))),
        }
    values["zero_fraction"] = sum(entry == 0 for entry in entries) / len(entries)
    values["nonfinite_fraction"] = sum(not math.isfinite(entry) for entry in entries) / len(entries)
    return values


def quantile(ascending: Sequence[Fraction], share: Fraction) -> Fraction:
    """Returns a quantile by linear interpolation between the two nearest entries."""
    position = (len(ascending) - 1) * share
    below = math.floor(position)
    above = math.ceil(position)
    return ascending[below] + (ascending[above] - ascending[below]) * (position - below)


def square_root(number: Fraction) -> float:
    """Returns the square root of a rational number that may lie far outside of float64."""
    quotient = PRECISE.divide(Decimal(number.numerator), Decimal(number.denominator))
    return float(PRECISE.sqrt(quotient))


def differences(
    found: dict[str, object], expected: dict[str, float | str], entries: Sequence[float]
) -> list[str]:
    """Returns one sentence for each statistic that is further from the exact one than rounding explains.

    Extremes and fractions must be equal. Mean and quartiles may be off by a few units in the last place of
    the largest entry, the deviation by a few in its own.
    """
    largest = max((abs(entry) for entry in entries if math.isfinite(entry)), default=0.0)
    problems = []
    for name, right in expected.items():
        value = found[name]
        if isinstance(right, str):
            wrong = getattr(value, "reason", None) != right
        elif not isinstance(value, float):
            wrong = True
        elif name in {"min", "max", "zero_fraction", "nonfinite_fraction"}:
            wrong = value != right
        else:
            scale = right if name == "std" else largest
            wrong = abs(value - right) > 1e-14 * scale + 4 * math.ulp(0.0)
        if wrong:
            problems.append(f"{name} is {value!r} and should be {right!r}")
    return problems
