"""From facts to named values and reasons."""

import math

import numpy as np
import pytest

from torchinstruments.records import Absent
from torchinstruments.statistics.facts import (
    EMPTY,
    QUARTERS,
    Facts,
    moment_values,
    named_values,
    quartile_position,
)
from torchinstruments.statistics.moments import Moments


@pytest.mark.parametrize("size", [*range(1, 40), 2**53 + 1])
def test_quartiles_stand_where_numpy_puts_them(size: int) -> None:
    """The two entries and the way between them are those of linear interpolation."""
    for quarters in QUARTERS:
        below, above, rest = quartile_position(size, quarters)
        assert below * 4 + rest == (size - 1) * quarters
        assert above == min(below + 1, size - 1)
        if size < 40:
            found = below + (above - below) * rest / 4
            assert found == np.quantile(np.arange(float(size)), quarters / 4)


def facts(**changes: object) -> Facts:
    """Returns the facts of the entries 1, 2, 3, 4 with some of them changed."""
    known: dict[str, object] = {
        "num_entries": 4,
        "num_zero": 0,
        "num_nonfinite": 0,
        "moments": Moments(mean=2.5, std=1.25**0.5, total=10.0, total_of_squares=30.0),
        "minimum": 1.0,
        "maximum": 4.0,
        "quartiles": ((1.0, 2.0), (2.0, 3.0), (3.0, 4.0)),
    }
    return Facts(**{**known, **changes})  # pyrefly: ignore


def test_four_entries_have_nine_statistics() -> None:
    """Each statistic is the one that its name says."""
    assert named_values(facts()) == {
        "mean": 2.5,
        "std": 1.25**0.5,
        "min": 1.0,
        "max": 4.0,
        "p25": 1.75,
        "p50": 2.5,
        "p75": 3.25,
        "zero_fraction": 0.0,
        "nonfinite_fraction": 0.0,
    }


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_an_accumulation_could_not_hold_is_an_overflow(number: float) -> None:
    """A mean or deviation that is not finite, of finite entries, says so."""
    found = named_values(facts(moments=Moments(number, number, number, number)))
    assert (found["mean"], found["std"]) == (Absent("overflow"), Absent("overflow"))


def test_the_mean_stays_between_the_extremes() -> None:
    """The last bit of its rounding does not put it outside."""
    assert named_values(facts(moments=Moments(math.nextafter(4.0, 5.0), 0.0, 0.0, 0.0)))["mean"] == 4.0


def test_whole_numbers_are_interpolated_as_whole_numbers() -> None:
    """Quartiles between large integers are rounded once, at the end."""
    entry = 2**60 + 1
    found = named_values(facts(minimum=entry, maximum=entry, quartiles=((entry, entry + 4),) * 3))
    assert found["p25"] == float(entry + 3)


def test_a_gap_that_overflows_is_interpolated_all_the_same() -> None:
    """Between the ends of float64 a quartile is finite."""
    found = named_values(facts(minimum=-1.7e308, maximum=1.7e308, quartiles=((-1.7e308, 1.7e308),) * 3))
    assert found["p50"] == 0.0


def test_four_entries_have_five_statistics_that_need_no_order() -> None:
    """The root mean square is taken of all finite entries, the largest one whatever its sign."""
    found = moment_values(facts(num_entries=5, num_nonfinite=1, minimum=-4.5))
    assert found == pytest.approx(
        {"mean": 2.5, "std": 1.25**0.5, "rms": 7.5**0.5, "max_abs": 4.5, "finite_fraction": 0.8}, rel=1e-15
    )


def test_what_is_missing_of_the_five_says_why() -> None:
    """Nothing is empty, nothing finite, or too large for float64."""
    assert set(moment_values(EMPTY).values()) == {Absent("empty")}
    nothing = moment_values(facts(num_nonfinite=4))
    assert (nothing["rms"], nothing["finite_fraction"]) == (Absent("no_finite_entries"), 0.0)
    large = moment_values(facts(moments=Moments(1.5e308, 1.5e308, 0.0, 0.0), maximum=1.7e308))
    assert (large["rms"], large["max_abs"]) == (Absent("overflow"), 1.7e308)
