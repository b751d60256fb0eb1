"""Real gloo ranks for the tests of this folder: started once, at the first test that asks for them."""

from collections.abc import Iterator

import pytest

from torchinstruments.testing.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Two ranks with an initialised process group."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three ranks with an initialised process group."""
    with RankPool(3) as pool:
        yield pool
