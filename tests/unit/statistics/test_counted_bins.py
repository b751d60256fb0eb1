"""Histograms without an order of the entries."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.statistics import counted_bins as module
from torchinstruments.statistics.bins import BinRule, bin_edges, sorted_counts
from torchinstruments.statistics.counted_bins import counted_bins
from torchinstruments.statistics.moments import CHUNK, Array

DTYPES = ("float32", "float64", "int32", "uint32")


def counted(entries: Array, edges: Array) -> list[int] | None:
    """Returns the counts."""
    found = counted_bins(entries, edges, float(entries.min()), float(entries.max()))
    return None if found is None else found.tolist()


def edges_of(entries: Array, num_bins: int, value_range: tuple[float, float] | None = None) -> Array:
    """Returns the edges that a histogram of these entries has."""
    low, high = np.array([float(entries.min())]), np.array([float(entries.max())])
    return bin_edges(BinRule(num_bins, value_range), low, high)[0]


def around(edges: Array, dtype: str) -> Array:
    """Returns for each edge the entries of a dtype that are nearest to it, many times each."""
    if np.dtype(dtype).kind != "f":
        values = np.concatenate((np.floor(edges), np.ceil(edges)))
    else:
        near = edges.astype(dtype)
        values = np.concatenate(
            (near, np.nextafter(near, near.dtype.type(np.inf)), np.nextafter(near, -near))
        )
    return np.repeat(values, 3).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_entries_on_and_beside_edges_are_counted_as_by_comparison(dtype: str, data: st.DataObject) -> None:
    """Rounding puts no entry on the wrong side of an edge, in ranges of their own and in fixed ones."""
    low = data.draw(st.sampled_from([0.0, -1.0, 0.1, -3.3, 700.0, 7e-5]) | st.floats(-1e3, 1e3))
    width = data.draw(st.sampled_from([1.0, 64.0, 0.3, 0.1, 1e4]) | st.floats(0.1, 1e4))
    num_bins = data.draw(st.integers(1, 252))
    if np.dtype(dtype).kind != "f":
        low, width = (abs(low) if dtype == "uint32" else low), max(width, 2.0)
    edges = np.linspace(low, low + width, num_bins + 1)
    entries = around(edges, dtype)
    entries = entries[np.random.default_rng(0).permutation(entries.size)]
    for fixed in (None, (low, low + width), (low + width / 4, low + width / 2)):
        if fixed is None or fixed[0] < fixed[1]:
            of_rule = edges_of(entries, num_bins, fixed)
            assert counted(entries, of_rule) == sorted_counts(np.sort(entries), of_rule).tolist()


@pytest.mark.parametrize("size", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_number_of_entries_is_counted(dtype: str, size: int) -> None:
    """In one piece and in several."""
    entries = np.random.default_rng(size).normal(size=size).astype(dtype)
    for value_range in (None, (-1.0, 0.5), (5.0, 6.0), (-1e30, 1e30)):
        edges = edges_of(entries, 64, value_range)
        assert counted(entries, edges) == sorted_counts(np.sort(entries), edges).tolist()


@pytest.mark.parametrize("entry", [0.0, 0.5, 1.0])
def test_one_prevailing_value_is_counted(entry: float) -> None:
    """On an edge, in the middle and at the ends."""
    entries = np.random.default_rng(1).random(100_001)
    entries[:2] = 0.0, 1.0
    entries[10::2] = entry
    edges = edges_of(entries, 64)
    assert counted(entries, edges) == sorted_counts(np.sort(entries), edges).tolist()


@pytest.mark.parametrize(
    ("entries", "num_bins"),
    [
        (np.array([2**62, 2**62 + 100], dtype=np.int64), 4),
        (np.array([0.0, 1.0]), 253),
        (np.array([1.0, 1.0 + 1e-9]), 64),
        (np.array([2**53, 2**53 + 1], dtype=np.uint64), 4),
        (np.array([-1.7e308, 1.7e308]), 3),
        (np.array([0.0, 5e-310]), 8),
    ],
    ids=["64 bits", "many bins", "narrow", "64 bits without a sign", "wide", "denormal"],
)
def test_what_places_cannot_be_computed_for_is_left_to_a_sort(entries: Array, num_bins: int) -> None:
    """Integers that float64 does not hold, more edges than a byte counts, and bins at the ends of float64."""
    assert counted(entries, edges_of(entries, num_bins)) is None


def test_uneven_edges_are_left_to_a_sort() -> None:
    """Places follow from a width that all bins have."""
    assert counted(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 1.9, 3.0])) is None


def test_a_constant_is_in_one_bin() -> None:
    """Its range is widened, and holds it in the middle."""
    entries = np.full(70_000, 0.1)
    edges = edges_of(entries, 5)
    assert counted(entries, edges) == [0, 0, 0, 70_000, 70_000, 70_000]


@pytest.mark.parametrize(
    ("low", "high", "sure"), [(-4.75, 5.125, True), (0.0, 3.3125, True), (-1.0, 1.0, False)]
)
def test_sides_are_sure_where_rounding_cannot_reach_a_neighbour(low: float, high: float, sure: bool) -> None:
    """For float32 that is so, but for the neighbours of an edge at zero; for float64 it is not."""
    edges = edges_of(np.array([low, high]), 64)
    places = module._Places(low, module._SCALE / ((high - low) / 64), math.inf)
    assert places.tell_sides(edges[1:-1], np.dtype(np.float32)) is sure
    assert not places.tell_sides(edges[1:-1], np.dtype(np.float64))
