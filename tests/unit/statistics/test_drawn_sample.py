"""A sample of many entries, and the order of parts of it."""

from itertools import pairwise

import numpy as np
import pytest

from torchinstruments.statistics.drawn_sample import in_order, scattered


def test_scattered_numbers_fill_their_range_evenly() -> None:
    """A tenth of them is in each tenth of the range, and neighbours have nothing to do with each other."""
    numbers = scattered(8192)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert np.abs(np.histogram(numbers, 10, (0, 1))[0] - 819.2).max() < 120
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_a_sample_tell_nearly_what_a_sort_of_it_tells(dtype: str) -> None:
    """Each stretch ascends, in front of the next one, and holds what stands in the middle of it."""
    sample = np.random.default_rng(0).normal(size=8192).astype(dtype)
    ordered = np.sort(sample)
    spans = [(1890, 2206), (3915, 4277), (5986, 8193)]
    stretches = in_order(sample, spans)
    assert all(np.array_equal(stretch, np.sort(stretch)) for stretch in stretches)
    assert all(one[-1] <= other[0] for one, other in pairwise(stretches))
    for (start, stop), stretch in zip(spans, stretches, strict=True):
        assert stretch.size == min(stop, 8192) - start
        assert np.isin(ordered[start + 60 : stop - 60], stretch).all()


def test_rows_that_have_little_in_common_are_sorted_together() -> None:
    """Each of them would tell of another part of the range."""
    sample = np.arange(8192, dtype=np.float32)
    found = in_order(sample.copy(), [(1000, 1100), (4000, 4100)])
    assert [stretch.tolist() for stretch in found] == [
        sample[1000:1100].tolist(),
        sample[4000:4100].tolist(),
    ]
