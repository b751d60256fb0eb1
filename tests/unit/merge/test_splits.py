"""Who holds which of several values."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchinstruments.merge.splits import MAX_VALUES, split_of


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40).map(lambda one: [v % 23 for v in one]))
def test_every_rank_is_named_once_the_fewest_first(values: list[int]) -> None:
    """Each rank stands beside its value or among the further ones; groups grow, ties go to low ranks."""
    split = split_of(np.array(values, np.uint64), np.arange(len(values)))
    named = [rank for one in split.values for rank in one.ranks]
    assert sorted([*named, *split.further_ranks]) == list(range(len(values)))
    assert all(values[rank] == one.value for one in split.values for rank in one.ranks)
    order = [(len(one.ranks), one.ranks[0]) for one in split.values]
    assert order == sorted(order)
    assert split.num_values == len(set(values))
    assert len(split.values) == min(MAX_VALUES, split.num_values)
    assert split.num_ranks == len(values)


def test_large_digests_stay_whole() -> None:
    """A 64-bit digest is not rounded to a float."""
    split = split_of(np.array([2**64 - 1, 2**64 - 2], np.uint64), np.array([4, 2]))
    assert [(one.value, one.ranks) for one in split.values] == [(2**64 - 2, (2,)), (2**64 - 1, (4,))]
