"""Bins on a device, against those of the host."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchinstruments.statistics.bins import BinRule, bin_edges, float_ends
from torchinstruments.statistics.device_bins import device_edges, device_float_ends, device_sorted_counts

FINITE = st.floats(allow_nan=False, allow_infinity=False)
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int16,
    torch.int32,
    torch.int64,
)


@settings(deadline=None, max_examples=100)
@given(ends=st.tuples(FINITE, FINITE).map(sorted), num_bins=st.integers(1, 20))
@example(ends=[0.1, 0.1], num_bins=4)
@example(ends=[1.0, math.nextafter(1.0, 2.0)], num_bins=16)
@example(ends=[-1.7e308, 1.7e308], num_bins=3)
def test_edges_are_those_of_the_host_to_the_last_bit(ends: list[float], num_bins: int) -> None:
    """The same operations in the same order."""
    low, high = (torch.tensor(end, dtype=torch.float64) for end in ends)
    found = device_edges(BinRule(num_bins), low, high).numpy()
    with np.errstate(all="ignore"):
        expected = bin_edges(BinRule(num_bins), np.array(ends[:1]), np.array(ends[1:]))[0]
    assert np.array_equal(found, expected, equal_nan=True)


@settings(deadline=None, max_examples=100)
@given(ends=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2).map(sorted))
@example(ends=[2**63 - 2, 2**63 - 1])
@example(ends=[-(2**63), -(2**63) + 1])
def test_ends_of_int64_reach_around_it_as_on_the_host(ends: list[int]) -> None:
    """Rounding to float64 goes outward."""
    low, high = torch.tensor(ends)
    below, above = device_float_ends(low, high, torch.float64)
    assert (below.item(), above.item()) == float_ends(*ends)


def test_ends_of_int32_reach_around_it_in_float32() -> None:
    """The same for a device whose floats hold even fewer numbers."""
    low, high = torch.tensor([2**24 + 1, 2**31 - 1], dtype=torch.int32)
    below, above = device_float_ends(low, high, torch.float32)
    assert below.item() == 2.0**24
    assert above.item() == 2.0**31


@pytest.mark.parametrize("accumulate", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_counts_are_those_of_exact_comparison(
    dtype: torch.dtype, accumulate: torch.dtype, data: st.DataObject
) -> None:
    """Edges between two values of a dtype, outside of it, or on an entry count right."""
    if dtype.is_floating_point:
        elements = st.floats(-6e4, 6e4) | st.sampled_from([0.0, -0.0, 1e-30, -1e-30])
    else:
        info = torch.iinfo(dtype)
        elements = st.integers(info.min, info.max) | st.sampled_from([info.min, info.max])
    values = data.draw(st.lists(elements, min_size=1, max_size=10))
    entries = torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)
    entries = entries.sort().values
    edge = FINITE.filter(lambda number: abs(number) < 1e38) | st.sampled_from(entries.tolist())
    edges = torch.tensor(data.draw(st.lists(edge, min_size=2, max_size=5)), dtype=torch.float64)
    edges = edges.to(accumulate).sort().values
    found = device_sorted_counts(entries, edges).tolist()
    exact = [Fraction(entry) for entry in entries.tolist()]
    wanted = [Fraction(edge) for edge in edges.tolist()]
    expected = [sum(entry < edge for entry in exact) for edge in wanted[:-1]]
    assert found == [*expected, sum(entry <= wanted[-1] for entry in exact)]


def test_what_is_not_finite_lies_below_no_edge() -> None:
    """Infinity stands for it, at the end."""
    entries = torch.tensor([1.0, 2.0, math.inf, math.inf], dtype=torch.float16)
    edges = torch.tensor([0.0, 2.0, 1e300], dtype=torch.float64)
    assert device_sorted_counts(entries, edges).tolist() == [0, 1, 2]
