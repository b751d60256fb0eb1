"""Order statistics from the bins of a histogram."""

import numpy as np
import pytest

from torchinstruments.statistics import binned_selection as module
from torchinstruments.statistics import coded_selection
from torchinstruments.statistics.binned_selection import select_among_bins
from torchinstruments.statistics.bins import BinRule, bin_edges, sorted_counts
from torchinstruments.statistics.moments import Array
from torchinstruments.statistics.selection import Selection

SIZE = 140_003


def drawn(kind: str, dtype: str) -> Array:
    """Returns entries of one kind."""
    entries = np.random.default_rng(3).normal(size=SIZE)
    if kind == "even":
        entries = np.random.default_rng(3).random(SIZE) * 50 + 1000
    elif kind == "in steps":
        entries = np.round(entries * 200) / 200
    elif kind == "without zero":
        entries = np.abs(entries) + 1
    if np.dtype(dtype).kind != "f":
        entries = np.abs(entries) * 1e6
    return entries.astype(dtype)


def looked_at(
    entries: Array, ranks: list[int], value_range: tuple[float, float] | None = None, num_bins: int = 64
) -> tuple[Array, Selection | None] | None:
    """Selects, and compares the counts with those of a sort."""
    low, high = np.array([float(entries.min())]), np.array([float(entries.max())])
    edges = bin_edges(BinRule(num_bins, value_range), low, high)[0]
    found = select_among_bins(entries, edges, entries.min(), entries.max(), ranks)
    if found is not None:
        assert found[0].tolist() == sorted_counts(np.sort(entries), edges).tolist()
    return found


def selected(found: tuple[Array, Selection | None] | None) -> Selection:
    """Returns the selection, which is to be there."""
    assert found is not None
    assert found[1] is not None
    return found[1]


@pytest.mark.parametrize("value_range", [None, (-1.0, 1.0), (0.25, 9.0)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "even", "in steps", "without zero"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint32"])
def test_counts_and_ranks_are_those_of_a_sort(
    dtype: str, kind: str, value_range: tuple[float, float] | None
) -> None:
    """For ranks of which some share a bin, and wherever the range lies that bins divide."""
    entries = drawn(kind, dtype)
    ordered = np.sort(entries)
    ranks = [SIZE // 4, SIZE // 4 + 1, SIZE // 2, 3 * SIZE // 4]
    found = looked_at(entries, ranks, value_range)
    if value_range is not None and (found is None or found[1] is None):
        return
    selection = selected(found)
    assert dict(selection.by_rank) == {rank: ordered[rank] for rank in ranks}
    assert selection.num_zero in {None, int(np.count_nonzero(entries == 0))}


def test_the_lowest_of_unsigned_integers_are_selected() -> None:
    """About them are numbers that their dtype does not have."""
    entries = np.random.default_rng(0).integers(0, 2**32, SIZE).astype("uint32")
    ranks = [1, 2, SIZE - 2]
    found = selected(looked_at(entries, ranks))
    assert dict(found.by_rank) == dict(zip(ranks, np.sort(entries)[ranks], strict=True))


@pytest.mark.parametrize(
    "size",
    [300, 2000, coded_selection._BLOCK - 1, coded_selection._BLOCK + 1, 2 * coded_selection._BLOCK + 3],
)
def test_any_number_of_entries_is_selected_from(size: int) -> None:
    """In one block and in several, of which the last one is odd."""
    entries = np.random.default_rng(size).random(size)
    ranks = [0, size // 3, size - 1]
    found = selected(looked_at(entries, ranks))
    assert dict(found.by_rank) == dict(zip(ranks, np.sort(entries)[ranks], strict=True))


def test_no_sample_is_drawn_where_entries_lie_evenly_in_their_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ranks tell about where they are."""
    monkeypatch.setattr(coded_selection, "select", None)
    assert len(selected(looked_at(drawn("normal", "float32"), [SIZE // 4, SIZE // 2])).by_rank) == 2


def test_a_guess_that_misses_costs_a_selection_among_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that repeat stand in lumps: the bins are right nevertheless."""
    sizes = list[int]()

    def watched(entries: Array, ranks: dict[int, int], low: np.float32, high: np.float32) -> Selection:
        sizes.append(entries.size)
        return select(entries, ranks, low, high)

    select = coded_selection.select
    monkeypatch.setattr(coded_selection, "select", watched)
    entries = (np.round(drawn("normal", "float32") * 20) / 20).astype("float32")
    by_rank = selected(looked_at(entries, [SIZE // 4, SIZE // 2])).by_rank
    assert dict(by_rank) == {rank: np.sort(entries)[rank] for rank in (SIZE // 4, SIZE // 2)}
    assert len(sizes) == 1
    assert sizes[0] * 8 <= SIZE


def test_zeros_are_counted_on_the_way() -> None:
    """Those of the bin of the median, both signs; none where their bin is empty."""
    entries = drawn("normal", "float32")
    entries[::40], entries[1::40] = 0.0, -0.0
    assert selected(looked_at(entries, [SIZE // 2])).num_zero == int(np.count_nonzero(entries == 0))
    apart = np.where(entries >= 0, entries + 1, entries - 1)
    assert selected(looked_at(apart, [SIZE // 4])).num_zero == 0


@pytest.mark.parametrize("highest", [0.0, 1e-20])
@pytest.mark.parametrize("rank", [SIZE // 2, SIZE - 20], ids=["median", "near the end"])
def test_zeros_at_the_end_of_the_bins_are_not_missed(rank: int, highest: float) -> None:
    """Rounding may put the highest entries behind the last bin, and zeros with them."""
    entries = -np.abs(drawn("normal", "float32")) - 1
    entries[::40], entries[77] = 0.0, highest
    number = int(np.count_nonzero(entries == 0))
    assert selected(looked_at(entries, [rank])).num_zero in {None, number}


def test_bins_that_hold_too_many_are_left_alone() -> None:
    """A few entries tell beforehand, as a rule; where they mislead, the counts are there all the same."""
    entries = drawn("normal", "float32")
    rectified = np.maximum(entries, 0)
    assert looked_at(rectified, [SIZE // 4]) is None
    misleading = np.full(SIZE, 0.5)
    step = SIZE // module._NUM_LOOKED_AT
    misleading[::step] = np.linspace(0, 1, misleading[::step].size)
    found = looked_at(misleading, [SIZE // 4])
    assert found is not None
    assert found[1] is None


def test_what_cannot_be_counted_is_not_selected_from() -> None:
    """More bins than a byte has numbers, integers that float64 does not hold, and a constant."""
    assert looked_at(drawn("normal", "float32"), [5], num_bins=300) is None
    assert looked_at(np.arange(1000, dtype=np.int64), [5]) is None
    assert looked_at(np.ones(1000), [5]) is None
