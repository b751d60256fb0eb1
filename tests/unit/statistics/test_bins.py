"""Edges of histograms, and how many entries lie below them."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchinstruments.statistics.bins import BinRule, bin_edges, fixed_edges, float_ends, sorted_counts

FINITE = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def whole_numbers(dtype: str) -> st.SearchStrategy[float]:
    """Returns numbers of an integer dtype, its ends often."""
    info = np.iinfo(np.dtype(dtype))
    return st.integers(info.min, info.max) | st.sampled_from([info.min, info.max])


ENTRIES: dict[str, st.SearchStrategy[float]] = {
    "float32": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "float64": FINITE,
    **{dtype: whole_numbers(dtype) for dtype in INTEGERS},
}


def edges_of(low: float, high: float, num_bins: int) -> list[float]:
    """Returns the edges that span one tensor."""
    return bin_edges(BinRule(num_bins), np.array([low]), np.array([high]))[0].tolist()


def test_edges_are_evenly_spaced_from_end_to_end() -> None:
    """The first and the last edge are the ends themselves."""
    assert edges_of(-1.0, 3.0, 4) == [-1.0, 0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("value", "margin"), [(0.0, 0.01), (0.5, 0.01), (-300.0, 3.0), (2.0, 0.02)])
def test_the_range_of_a_constant_is_widened_by_a_hundredth(value: float, margin: float) -> None:
    """On both sides, of the value or of 1, whichever is larger."""
    edges = edges_of(value, value, 2)
    assert edges == pytest.approx([value - margin, value, value + margin], abs=1e-15)


@settings(deadline=None, max_examples=200)
@given(ends=st.tuples(FINITE, FINITE).map(sorted), num_bins=st.integers(1, 70))
@example(ends=[1.0, math.nextafter(1.0, 2.0)], num_bins=64)
@example(ends=[0.0, 5e-324], num_bins=64)
@example(ends=[1e16, 1e16], num_bins=64)
@example(ends=[-1.7e308, 1.7e308], num_bins=3)
@example(ends=[1.79e308, 1.79e308], num_bins=3)
def test_edges_ascend_and_reach_around_any_range(ends: list[float], num_bins: int) -> None:
    """No two edges are equal, however narrow the range; nothing of the range is left outside."""
    low, high = ends
    edges = edges_of(low, high, num_bins)
    if math.isfinite(edges[0]) and math.isfinite(edges[-1]):
        assert all(below < above for below, above in pairwise(edges))
        assert edges[0] <= low
        assert edges[-1] >= high
    else:
        assert max(abs(low), abs(high)) > 1e307, "only the ends of float64 leave no room"


def test_each_of_many_tensors_has_its_own_edges() -> None:
    """A constant, a narrow and an ordinary range beside each other are what they are alone."""
    lows, highs = [1.0, 2.0, -1.0], [1.0, math.nextafter(2.0, 3.0), 1.0]
    together = bin_edges(BinRule(8), np.array(lows), np.array(highs)).tolist()
    assert together == [edges_of(low, high, 8) for low, high in zip(lows, highs, strict=True)]


def test_fixed_edges_are_the_same_for_every_tensor() -> None:
    """What a tensor holds does not move them, and nobody can."""
    edges = bin_edges(BinRule(2, (0.0, 1.0)), np.array([5.0, 6.0]), np.array([7.0, 8.0]))
    assert edges.tolist() == [[0.0, 0.5, 1.0]] * 2
    assert not fixed_edges(2, 0.0, 1.0).flags.writeable


@pytest.mark.parametrize("number", [0, 7, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, -(2**53) - 3])
def test_ends_of_whole_numbers_do_not_cut_them_off(number: int) -> None:
    """A number that float64 does not hold lies between its ends; equal ends stay equal."""
    low, high = float_ends(number - 5, number + 5)
    assert Fraction(low) <= number - 5 < number + 5 <= Fraction(high)
    assert float_ends(number, number) == (float(number), float(number))


@pytest.mark.parametrize("dtype", ENTRIES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_counts_are_those_of_exact_comparison(dtype: str, data: st.DataObject) -> None:
    """An edge between two values of a dtype, outside of it, or on an entry counts right."""
    entries = sorted(data.draw(st.lists(ENTRIES[dtype], min_size=1, max_size=12)))
    near = st.sampled_from(entries).map(float)
    around = st.tuples(near, st.sampled_from([-math.inf, math.inf])).map(lambda pair: math.nextafter(*pair))
    edge = FINITE | near | around.filter(math.isfinite)
    edges = sorted(data.draw(st.lists(edge, min_size=2, max_size=6)))
    with np.errstate(all="ignore"):
        found = sorted_counts(np.array(entries, dtype=dtype), np.array(edges)).tolist()
    exact = [Fraction(entry) for entry in entries]
    expected = [sum(entry < Fraction(edge) for entry in exact) for edge in edges[:-1]]
    assert found == [*expected, sum(entry <= Fraction(edges[-1]) for entry in exact)]
