"""Order statistics among entries that lie about evenly."""

import numpy as np
import pytest

from torchinstruments.statistics import interpolation as module
from torchinstruments.statistics.interpolation import interpolated
from torchinstruments.statistics.moments import Array

SIZE = 20_000


def even(dtype: str) -> Array:
    """Returns entries from 0 to a million, and others on both sides of them."""
    generator = np.random.default_rng(0)
    return np.concatenate((generator.random(SIZE) * 1e6, 3e6 + generator.random(500), np.zeros(700))).astype(
        dtype
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint32"])
@pytest.mark.parametrize("ranks", [[700 + SIZE // 3, 701 + SIZE // 3], [800], [699 + SIZE]], ids=str)
def test_even_entries_are_where_they_are_guessed_to_be(ranks: list[int], dtype: str) -> None:
    """Wherever the ranks lie, and whatever lies beside the two values."""
    entries = even(dtype)
    found = interpolated(entries, ranks, 0.0, 1e6, 700, SIZE)
    assert found == dict(zip(ranks, np.sort(entries)[ranks], strict=True))


@pytest.mark.parametrize("rank", [5, SIZE // 2])
def test_a_guess_that_missed_is_none(rank: int) -> None:
    """Entries of a few values lie in lumps, and those of a power are not even."""
    entries = even("float32")[:SIZE]
    assert interpolated(np.float32(7e5) * (entries > 4e5), [rank], 0.0, 1e6, 0, SIZE) is None
    assert interpolated(entries**3, [rank], 0.0, 1e18, 0, SIZE) is None


@pytest.mark.parametrize("bound", ["_MAX_SORTED", "_MAX_ENTRIES"])
def test_no_more_than_a_few_are_put_in_order(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many entries, and many of the value that was guessed, are left to a selection."""
    entries = even("float64")[:SIZE]
    monkeypatch.setattr(module, bound, 10)
    assert interpolated(entries, [SIZE // 2], 0.0, 1e6, 0, SIZE) is None


def test_integers_that_float64_does_not_hold_are_left_alone() -> None:
    """No guess would be a number of their dtype for sure."""
    assert interpolated(np.arange(2**63, 2**63 + 99, dtype=np.uint64), [50], 2.0**63, 2.0**63, 0, 99) is None


def test_a_width_beyond_float64_is_a_miss() -> None:
    """There is no value half way."""
    entries = np.linspace(-0.9, 0.9, 99) * 1.9e308
    with np.errstate(all="ignore"):
        assert interpolated(entries, [50], -1.7e308, 1.7e308, 0, 99) is None
