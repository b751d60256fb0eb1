"""Mean and deviation from shifted sums."""

import math

import numpy as np
import pytest

from torchinstruments.statistics.moments import (
    Moments,
    aligned_floats,
    chunks,
    exponent_of,
    exponents_of,
    moments,
    weighted_moments,
)


def test_many_chunks_give_what_one_gives() -> None:
    """Entries beyond one chunk are summed with the same result as NumPy's over all of them."""
    entries = np.random.default_rng(0).normal(1e6, 1.0, 200_001)
    low, high, pivot = float(entries.min()), float(entries.max()), float(np.median(entries))
    found = moments(chunks(entries), entries.size, low=low, high=high, pivot=pivot)
    assert (found.mean, found.std) == pytest.approx((float(entries.mean()), float(entries.std())), rel=1e-14)
    expected = (float(entries.sum()), float(np.square(entries).sum()))
    assert (found.total, found.total_of_squares) == pytest.approx(expected, rel=1e-14)


def test_the_entries_are_left_as_they_are() -> None:
    """Distances are squared in a copy."""
    entries = np.array([1.0, 2.0, 4.0])
    moments([entries], 3, low=1.0, high=4.0, pivot=2.0)
    assert entries.tolist() == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_whole_numbers_of_64_bits_are_shifted_before_they_are_rounded(dtype: type[np.integer]) -> None:
    """The deviation of neighbours near 2**62 is that of small numbers."""
    entries = np.array([2**62, 2**62 + 1, 2**62 + 2], dtype=dtype)
    found = moments([entries], 3, low=2**62, high=2**62 + 2, pivot=2**62 + 1)
    assert found.std == pytest.approx((2 / 3) ** 0.5, rel=1e-15)


def test_the_whole_range_of_int64_fits() -> None:
    """The distance between its ends does not wrap."""
    ends = np.array([-(2**63), 2**63 - 1])
    found = moments([ends], 2, low=-(2**63), high=2**63 - 1, pivot=-(2**63))
    assert found.std == pytest.approx(2.0**63, rel=1e-15)


def test_counted_values_weigh_as_often_as_they_occur() -> None:
    """Values with counts give what the repeated values give."""
    values, counts = np.array([-1.0, 0.5, 3.0]), np.array([3, 1, 7])
    repeated = np.repeat(values, counts)
    found = weighted_moments(values, counts, pivot=3.0)
    assert (found.mean, found.std) == pytest.approx(
        (float(repeated.mean()), float(repeated.std())), rel=1e-15
    )
    assert (found.total, found.total_of_squares) == pytest.approx((18.5, 66.25), rel=1e-15)


@pytest.mark.parametrize(("size", "total_of_squares"), [(1e200, math.inf), (1e-200, 0.0), (3.0, 36.0)])
def test_sums_that_float64_cannot_hold_are_infinite_or_nothing(size: float, total_of_squares: float) -> None:
    """The sum of squares leaves float64 long before mean and deviation do."""
    found = moments([np.array([-size, size, size, size])], 4, low=-size, high=size, pivot=size)
    assert (found.mean, found.std, found.total) == pytest.approx(
        (size / 2, size * 0.75**0.5, 2 * size), rel=1e-15
    )
    assert found.total_of_squares == total_of_squares


def test_a_factor_counts_every_entry_so_often() -> None:
    """Sums grow with the repetitions; mean and deviation stay."""
    once = moments([np.array([1.0, 3.0])], 2, low=1.0, high=3.0, pivot=1.0)
    assert once.repeated(5) == Moments(mean=2.0, std=1.0, total=20.0, total_of_squares=50.0)


def test_the_exponent_of_each_of_many_numbers_is_that_of_the_one() -> None:
    """Ordinary sizes are not scaled, extreme ones are."""
    sizes = [0.0, 1.0, 1e150, 1e200, 1e-200, 5e-324, 1.7e308]
    assert exponents_of(np.array(sizes)).tolist() == [exponent_of(size) for size in sizes]
    assert exponent_of(1.0) == exponent_of(0.0) == 0


@pytest.mark.parametrize("number", [1, 1000])
def test_aligned_memory_begins_with_a_cache_line(number: int) -> None:
    """And has room for so many numbers, which can be written."""
    memory = aligned_floats(number)
    memory[:] = 1.5
    assert (memory.ctypes.data % 64, memory.dtype, memory.sum()) == (0, np.float64, 1.5 * number)
