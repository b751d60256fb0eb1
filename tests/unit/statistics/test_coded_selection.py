"""Order statistics from codes of a byte."""

import numpy as np
import pytest

from torchinstruments.statistics import coded_selection as module
from torchinstruments.statistics.coded_selection import Coded, select_by_codes, select_coded
from torchinstruments.statistics.moments import CHUNK, Array
from torchinstruments.statistics.selection import Selection

SIZE = 100_003


def drawn(kind: str, dtype: str) -> Array:
    """Returns entries of one kind."""
    entries = np.random.default_rng(3).normal(size=SIZE)
    if kind == "peaked":
        entries = np.random.default_rng(3).laplace(size=SIZE)
    elif kind == "in steps":
        entries = np.round(entries * 300) / 300
    elif kind == "far from zero":
        entries += 1000
    elif kind == "denormal":
        entries *= 1e-309 if dtype == "float64" else 1e-40
    elif kind == "huge":
        entries *= 4e307 if dtype == "float64" else 7e37
    elif kind == "ascending":
        entries.sort()
    elif kind == "one outlier":
        entries[77] = 3e38
    return entries.astype(dtype)


def looked_at(entries: Array, ranks: list[int]) -> Selection | None:
    """Selects, and compares with a sort."""
    with np.errstate(all="ignore"):
        found = select_by_codes(entries, entries.min(), entries.max(), ranks)
    if found is not None:
        ordered = np.sort(entries)
        assert dict(found.by_rank) == {rank: ordered[rank] for rank in ranks}
        assert found.num_zero in {None, int(np.count_nonzero(entries == 0))}
    return found


@pytest.mark.parametrize(
    "kind", ["normal", "peaked", "in steps", "far from zero", "ascending", "one outlier"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ranks_are_those_of_a_sort(dtype: str, kind: str) -> None:
    """Of quartiles, which is what the codes are made for, of one rank, and of neighbours that part codes."""
    entries = drawn(kind, dtype)
    assert looked_at(entries, [SIZE // 4, SIZE // 4 + 1, SIZE // 2, 3 * SIZE // 4]) is not None
    assert looked_at(entries, [SIZE // 3]) is not None
    assert looked_at(entries, list(range(SIZE // 2, SIZE // 2 + 200))) is not None


@pytest.mark.parametrize("kind", ["denormal", "huge"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_at_the_ends_of_a_dtype_are_selected_or_left_alone(dtype: str, kind: str) -> None:
    """Where a distance or what it is multiplied by leaves the dtype, nothing wrong is said."""
    looked_at(drawn(kind, dtype), [SIZE // 4, SIZE // 2, 3 * SIZE // 4])


@pytest.mark.parametrize("size", [1, 2, 300, CHUNK - 1, CHUNK + 1, module.MAX_CODED])
def test_any_number_of_entries_is_selected_from(size: int) -> None:
    """In one piece and in several."""
    looked_at(np.random.default_rng(size).random(size), sorted({0, size // 2, size - 1}))


def test_a_rank_that_shares_its_code_with_many_is_left_to_comparisons() -> None:
    """A value that prevails, tails far beyond the rest, a constant, and a sample that misled."""
    entries = np.maximum(drawn("normal", "float32"), 0)
    assert looked_at(entries, [SIZE // 4]) is None
    assert looked_at(drawn("normal", "float64") ** 9, [SIZE // 2]) is None
    assert looked_at(np.ones(SIZE), [5]) is None
    misled = drawn("normal", "float64")
    places = module.sampled_places(SIZE, module._NUM_SAMPLED, module._NUM_SAMPLED)
    misled[places] = 50 + np.arange(places.size)
    assert looked_at(misled, [SIZE // 2]) is None


@pytest.mark.parametrize("number", [0, 40, SIZE // 8])
@pytest.mark.parametrize("shift", [0, 1, 9])
def test_zeros_are_counted_on_the_way(number: int, shift: int) -> None:
    """Both signs, whether their code is one of a rank or not; where they are many it need not be."""
    entries = drawn("normal", "float32") + np.float32(shift)
    entries[:number:2], entries[1:number:2] = 0.0, -0.0
    found = looked_at(entries, [SIZE // 4, 3 * SIZE // 4])
    if number == 40 and shift < 9:
        assert found is not None
        assert found.num_zero == number + int(np.count_nonzero(entries[number:] == 0))


def test_many_entries_of_a_code_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are guessed among, and where a guess misses, selected from."""
    sizes = list[int]()

    def watched(entries: Array, ranks: list[int], low: np.float64, high: np.float64) -> Selection:
        sizes.append(entries.size)
        return select(entries, ranks, low, high)

    select = module.select
    monkeypatch.setattr(module, "select", watched)
    entries = np.random.default_rng(0).random(SIZE)
    lumps = np.where(entries < 0.2, 0.05, entries)
    for one, expected in ((entries, 0), (lumps, 1)):
        codes = (one * 5).astype(np.uint8)
        coded = Coded(codes, np.bincount(codes, minlength=5), 0.0, 0.2, 0)
        monkeypatch.setattr(module, "LEAST_SPARED", 1)
        ranks = [SIZE // 10, SIZE // 2]
        found = select_coded(one, coded, ranks, one.min(), one.max())
        assert found is not None
        assert [found.by_rank[rank] for rank in ranks] == np.sort(one)[ranks].tolist()
        assert len(sizes) == expected
