"""Mean and deviation from shifted sums."""

import numpy as np
import pytest

from torchinstruments.statistics.moments import chunks, moments, weighted_moments


def test_many_chunks_give_what_one_gives() -> None:
    """Entries beyond one chunk are summed with the same result as NumPy's over all of them."""
    entries = np.random.default_rng(0).normal(1e6, 1.0, 100_001)
    low, high, pivot = float(entries.min()), float(entries.max()), float(np.median(entries))
    mean, std = moments(chunks(entries), entries.size, low=low, high=high, pivot=pivot)
    assert (mean, std) == pytest.approx((float(entries.mean()), float(entries.std())), rel=1e-14)


def test_the_entries_are_left_as_they_are() -> None:
    """Distances are squared in a copy."""
    entries = np.array([1.0, 2.0, 4.0])
    moments([entries], 3, low=1.0, high=4.0, pivot=2.0)
    assert entries.tolist() == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_whole_numbers_of_64_bits_are_shifted_before_they_are_rounded(dtype: type[np.integer]) -> None:
    """The deviation of neighbours near 2**62 is that of small numbers."""
    entries = np.array([2**62, 2**62 + 1, 2**62 + 2], dtype=dtype)
    _, std = moments([entries], 3, low=2**62, high=2**62 + 2, pivot=2**62 + 1)
    assert std == pytest.approx((2 / 3) ** 0.5, rel=1e-15)


def test_the_whole_range_of_int64_fits() -> None:
    """The distance between its ends does not wrap."""
    ends = np.array([-(2**63), 2**63 - 1])
    _, std = moments([ends], 2, low=-(2**63), high=2**63 - 1, pivot=-(2**63))
    assert std == pytest.approx(2.0**63, rel=1e-15)


def test_counted_values_weigh_as_often_as_they_occur() -> None:
    """Values with counts give what the repeated values give."""
    values, counts = np.array([-1.0, 0.5, 3.0]), np.array([3, 1, 7])
    repeated = np.repeat(values, counts)
    found = weighted_moments(values, counts, pivot=3.0)
    assert found == pytest.approx((float(repeated.mean()), float(repeated.std())), rel=1e-15)
