"""Histograms: what is refused, what is counted, and why one is missing."""

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from torchinstruments.errors import ConfigurationError
from torchinstruments.statistics.histograms import (
    HistogramRange,
    HistogramReducer,
    MeasuredHistogram,
    due_histograms,
    histogram,
    validate_histograms,
)


def test_the_default_histogram_has_64_bins_over_each_tensor_of_every_sample() -> None:
    """Nothing has to be said to get one."""
    made = histogram()
    assert made == HistogramReducer("distribution", 64, HistogramRange.DYNAMIC, 1)
    assert [made.is_due(ordinal) for ordinal in range(3)] == [True, True, True]


def test_bins_are_open_to_the_right_and_the_last_one_is_closed() -> None:
    """Five numbers in four bins: the highest one falls into the last."""
    measured = histogram(bins=4)(torch.arange(5.0))
    assert measured.edges == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert measured.counts == (1, 1, 1, 2)
    assert (measured.underflow, measured.overflow) == (0, 0)


def test_a_fixed_range_keeps_what_lies_outside_and_the_moments_of_everything() -> None:
    """Outliers and invalid entries are counted; sums and extremes are those of all finite entries."""
    tensor = torch.tensor([-2.0, 0.0, 0.25, 0.5, 1.0, 2.5, math.nan, math.inf])
    measured = histogram(name="unit", bins=2, value_range=(0.0, 1.0))(tensor)
    assert measured == MeasuredHistogram(
        name="unit",
        edges=(0.0, 0.5, 1.0),
        counts=(2, 2),
        underflow=1,
        overflow=1,
        finite_count=6,
        nonfinite_count=2,
        minimum=-2.0,
        maximum=2.5,
        total=2.25,
        total_of_squares=11.5625,
    )


def test_cadence_counts_samples() -> None:
    """Every second one begins with the first."""
    seldom, always = histogram(name="seldom", every_n_samples=2), histogram()
    assert [seldom.is_due(ordinal) for ordinal in range(4)] == [True, False, True, False]
    assert due_histograms((seldom, always), 1) == (always,)
    assert due_histograms((seldom, always), 2) == (seldom, always)


def test_a_range_wider_than_float64_is_handled_exactly() -> None:
    """Neither making it nor counting in it warns, and every entry is in its bin."""
    tensor = torch.tensor([-1e150, -1.0, 0.0, 1e100, 1e150], dtype=torch.float64)
    measured = histogram(bins=4, value_range=(-1e308, 1e308))(tensor)
    assert measured.edges == (-1e308, -5e307, 0.0, 5e307, 1e308)
    assert measured.counts == (0, 2, 3, 0)


@pytest.mark.parametrize("value", [1.7e308, -1.7e308])
def test_entries_at_the_end_of_float64_have_no_histogram_and_warn_of_nothing(value: float) -> None:
    """The sum of their squares is no float64, whatever their edges."""
    measured = histogram(bins=4)(torch.full((3,), value, dtype=torch.float64))
    assert measured.unavailable_reason == "overflow"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": ""}, "name='' is blank"),
        ({"name": " \t"}, "is blank"),
        ({"name": None}, "name=None is blank or no text"),
        ({"bins": 0}, "bins=0 is not allowed; give a whole number of at least 1"),
        ({"bins": -3}, "bins=-3"),
        ({"bins": True}, "bins=True"),
        ({"bins": 2.5}, "bins=2.5"),
        ({"bins": 65_537}, "bins=65537 is not allowed; give a whole number of at most 65536"),
        ({"bins": 10**9}, "bins=1000000000"),
        ({"bins": 2**40, "value_range": (0.0, 1.0)}, "at most 65536"),
        ({"bins": "64"}, "bins='64'"),
        ({"every_n_samples": 0}, "every_n_samples=0"),
        ({"every_n_samples": False}, "every_n_samples=False"),
        ({"every_n_samples": 1.0}, "every_n_samples=1.0"),
        ({"value_range": "dynamic"}, "value_range='dynamic' is not allowed; give two finite numbers"),
        ({"value_range": None}, "value_range=None"),
        ({"value_range": [0.0, 1.0]}, r"value_range=\[0.0, 1.0\]"),
        ({"value_range": (0.0,)}, "give two finite numbers"),
        ({"value_range": (0.0, 1.0, 2.0)}, "give two finite numbers"),
        ({"value_range": (0.0, math.inf)}, "give two finite numbers"),
        ({"value_range": (math.nan, 1.0)}, "give two finite numbers"),
        ({"value_range": (1.0, 1.0)}, "in ascending order"),
        ({"value_range": (1.0, -1.0)}, "in ascending order"),
        ({"value_range": (False, True)}, "give two finite numbers"),
        ({"value_range": ("0", "1")}, "give two finite numbers"),
        ({"value_range": (0, 10**400)}, "give two finite numbers"),
        ({"value_range": (1.0, math.nextafter(1.0, 2.0))}, "too narrow for 64 bins"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(wrong: dict[str, Any], message: str) -> None:
    """One sentence names the argument, its value, and what to give instead."""
    with pytest.raises(ConfigurationError, match=message):
        histogram(**wrong)


def test_a_histogram_does_not_change_once_it_is_made() -> None:
    """It is a value: frozen, comparable, with whole numbers of a range taken as floats."""
    made = histogram(value_range=(0, 1))
    assert made == histogram(value_range=(0.0, 1.0))
    assert all(isinstance(end, float) for end in made.value_range)  # pyrefly: ignore
    with pytest.raises(FrozenInstanceError):
        made.bins = 3  # pyrefly: ignore


@pytest.mark.parametrize(
    ("given_histograms", "message"),
    [
        (histogram(), "is not a collection"),
        ("distribution", "is not a collection"),
        (7, "is not a collection"),
        ((histogram(), 3), "holds 3, which is no histogram"),
        ((histogram(), histogram(bins=3)), "holds the name 'distribution' twice"),
    ],
)
def test_a_choice_that_cannot_work_is_refused(given_histograms: Any, message: str) -> None:
    """One histogram is no collection, and names tell histograms apart."""
    with pytest.raises(ConfigurationError, match=message):
        validate_histograms(given_histograms)


def test_any_collection_of_histograms_will_do_and_none_is_one() -> None:
    """Order is kept; an empty one turns them off."""
    pair = [histogram(name="a"), histogram(name="b", bins=3)]
    assert validate_histograms(pair) == tuple(pair)
    assert validate_histograms([]) == ()


@pytest.mark.parametrize(
    ("tensor", "reason", "nonfinite_count"),
    [
        (torch.empty(0, 3), "empty", 0),
        (torch.tensor([math.nan, -math.inf]), "no_finite_entries", 2),
        (torch.tensor([1e200, 1.0], dtype=torch.float64), "overflow", 0),
        (torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64), "overflow", 0),
        (torch.tensor([1j]), "unsupported_dtype: complex64", 0),
        (torch.eye(2).to_sparse(), "unsupported_layout: sparse_coo", 0),
        (torch.empty(3, device="meta"), "meta_tensor", 0),
    ],
)
def test_a_histogram_that_cannot_be_had_says_why(
    tensor: torch.Tensor, reason: str, nonfinite_count: int
) -> None:
    """No edges, no counts, no numbers that are none, but the reason and what is known."""
    measured = histogram()(tensor)
    assert measured.unavailable_reason == reason
    assert (measured.edges, measured.counts, measured.nonfinite_count) == ((), (), nonfinite_count)
    assert {measured.minimum, measured.maximum, measured.total, measured.total_of_squares} == {None}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.int32, torch.bool],
    ids=str,
)
@settings(deadline=None, max_examples=30)
@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40),
    num_bins=st.integers(1, 9),
    fixed=st.none() | st.sampled_from([(-1.0, 1.0), (0.0, 0.3), (-1e9, 1e-9)]),
)
def test_every_finite_entry_is_counted_once_and_in_its_bin(
    dtype: torch.dtype, values: list[float], num_bins: int, fixed: tuple[float, float] | None
) -> None:
    """The counts are those of exact comparison with the edges, whatever the dtype."""
    tensor = torch.tensor(values).to(dtype)
    value_range = HistogramRange.DYNAMIC if fixed is None else fixed
    measured = histogram(bins=num_bins, value_range=value_range)(tensor)
    entries = [Fraction(float(entry)) for entry in tensor.to(torch.float64)]
    edges = [Fraction(edge) for edge in measured.edges]
    counts = [sum(low <= entry < high for entry in entries) for low, high in pairwise(edges)]
    counts[-1] += sum(entry == edges[-1] for entry in entries)
    assert measured.counts == tuple(counts)
    assert measured.underflow == sum(entry < edges[0] for entry in entries)
    assert measured.overflow == sum(entry > edges[-1] for entry in entries)
    assert measured.finite_count == len(entries) == sum(counts) + measured.underflow + measured.overflow
    squares = float(sum(entry * entry for entry in entries))
    largest = max(abs(float(entry)) for entry in entries)
    assert measured.total == pytest.approx(float(sum(entries)), rel=1e-13, abs=1e-13 * largest)
    assert measured.total_of_squares == pytest.approx(squares, rel=1e-12, abs=1e-300)


def test_repeated_entries_count_as_often_as_they_stand_there() -> None:
    """An expanded tensor is looked at once and counted in full."""
    tensor = torch.tensor([[1.0], [3.0]]).expand(2, 50)
    measured = histogram(bins=2)(tensor)
    assert (measured.counts, measured.finite_count) == ((50, 50), 100)
    assert (measured.total, measured.total_of_squares) == (200.0, 500.0)


def test_a_subclass_may_compute_its_own_histogram() -> None:
    """Its result is taken as it is."""

    class Signs(HistogramReducer):
        @override
        def __call__(self, tensor: torch.Tensor, /) -> MeasuredHistogram:
            """Counts negative and other entries."""
            num_negative = int((tensor < 0).sum())
            counts = (num_negative, tensor.numel() - num_negative)
            return MeasuredHistogram(
                self.name, (-1.0, 0.0, 1.0), counts, 0, 0, tensor.numel(), 0, -1.0, 1.0, 0.0, 1.0
            )

    assert Signs(name="signs")(torch.tensor([-1.0, 2.0, 3.0])).counts == (1, 2)
    assert validate_histograms((Signs(name="signs"), histogram()))[0].name == "signs"
