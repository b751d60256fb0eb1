"""Order statistics among entries that lie about evenly."""

import numpy as np
import pytest

from torchinstruments.statistics import interpolation as module
from torchinstruments.statistics.interpolation import Stretch, interpolated, sorted_few
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
    found = interpolated(entries, [Stretch(ranks, 0.0, 1e6, 700, SIZE)])
    assert found == dict(zip(ranks, np.sort(entries)[ranks], strict=True))


@pytest.mark.parametrize("rank", [5, SIZE // 2])
def test_a_guess_that_missed_is_left_out(rank: int) -> None:
    """Entries of a few values lie in lumps, and those of a power are not even."""
    entries = even("float32")[:SIZE]
    assert interpolated(np.float32(7e5) * (entries > 4e5), [Stretch([rank], 0.0, 1e6, 0, SIZE)]) == {}
    assert interpolated(entries**3, [Stretch([rank], 0.0, 1e18, 0, SIZE)]) == {}


@pytest.mark.parametrize("bound", ["_MAX_SORTED", "_MAX_ENTRIES"])
def test_no_more_than_a_few_are_put_in_order(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many entries, and many of the value that was guessed, are left to a selection."""
    entries = even("float64")[:SIZE]
    monkeypatch.setattr(module, bound, 10)
    assert interpolated(entries, [Stretch([SIZE // 2], 0.0, 1e6, 0, SIZE)]) == {}


def test_integers_that_float64_does_not_hold_are_left_alone() -> None:
    """No guess would be a number of their dtype for sure."""
    entries = np.arange(2**63, 2**63 + 99, dtype=np.uint64)
    assert interpolated(entries, [Stretch([50], 2.0**63, 2.0**63, 0, 99)]) == {}


def test_a_width_beyond_float64_is_a_miss() -> None:
    """There is no value half way."""
    entries = np.linspace(-0.9, 0.9, 99) * 1.9e308
    with np.errstate(all="ignore"):
        assert interpolated(entries, [Stretch([50], -1.7e308, 1.7e308, 0, 99)]) == {}


def test_stretches_are_looked_for_together_and_miss_by_themselves() -> None:
    """Entries of one of them lie in lumps."""
    generator = np.random.default_rng(1)
    parts = [generator.random(SIZE), 2.0 + np.zeros(SIZE), 4.0 + generator.random(SIZE)]
    entries = generator.permutation(np.concatenate(parts))
    ranks = [[SIZE // 4, SIZE // 4 + 1], [SIZE + SIZE // 2], [2 * SIZE + 5]]
    stretches = [
        Stretch(shared, 2.0 * place, 2.0 * place + 1.0, place * SIZE, SIZE)
        for place, shared in enumerate(ranks)
    ]
    ordered = np.sort(entries)
    assert interpolated(entries, stretches) == {rank: ordered[rank] for rank in (*ranks[0], *ranks[2])}


def test_few_entries_are_sorted() -> None:
    """As many as take less time than a guess; a copy of them."""
    entries = np.random.default_rng(2).random(module._FEW)
    before = entries.copy()
    ordered = sorted_few(entries)
    assert ordered is not None
    assert ordered.tolist() == sorted(before.tolist())
    assert entries.tobytes() == before.tobytes()
    assert sorted_few(np.zeros(module._FEW + 1)) is None
