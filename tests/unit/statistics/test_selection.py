"""Order statistics from samples, counts and what lies between."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.statistics import drawn_sample, selection
from torchinstruments.statistics.drawn_sample import num_sampled_of, sampled_places
from torchinstruments.statistics.moments import Array
from torchinstruments.statistics.selection import count_true, select

DTYPES = ("float32", "float64", "int32", "int64", "uint32", "uint64")


def selected(entries: Array, ranks: list[int]) -> list[object]:
    """Returns the entries with these ranks."""
    found = select(entries, ranks, entries.min(), entries.max()).by_rank
    return [found[rank].item() for rank in ranks]


def quartile_ranks(size: int) -> list[int]:
    """Returns the ranks on both sides of the quartiles."""
    return [(size - 1) * quarters // 4 + above for quarters in (1, 2, 3) for above in (0, 1)]


@pytest.mark.parametrize("num_deviations", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_every_rank_is_what_a_sort_puts_there(dtype: str, num_deviations: float, data: st.DataObject) -> None:
    """Whether the sample helps, misleads or holds one value many times, and however many ranks are wanted."""
    size = data.draw(st.integers(1, 700))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    num_values = data.draw(st.sampled_from([1, 2, 5, 100, 10_000]))
    spread = data.draw(st.sampled_from([1, 3, 10]))
    wide = np.abs(generator.normal(size=size)) ** spread * num_values
    entries = np.minimum(wide, 2.0**30).astype(dtype)
    if np.dtype(dtype).kind != "u":
        entries -= entries.dtype.type(num_values)
    ranks = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=9))
    before = entries.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_ENOUGH", 16)
        patch.setattr(selection, "_PIECE", 100)
        patch.setattr(selection, "NUM_DEVIATIONS", num_deviations)
        patch.setattr(drawn_sample, "NUM_DEVIATIONS", num_deviations)
        assert selected(entries, ranks) == np.sort(entries)[ranks].tolist()
    assert entries.tobytes() == before.tobytes()


def data_of(kind: str, size: int) -> Array:
    """Returns float32 entries of one kind."""
    generator = np.random.default_rng(7)
    entries = generator.standard_normal(size, dtype=np.float32)
    if kind == "rectified":
        return np.maximum(entries, np.float32(0))
    if kind == "ascending":
        return np.sort(entries)
    if kind == "periodic":
        return np.tile(entries[:1000], size // 1000 + 1)[:size]
    if kind == "narrow":
        return np.float32(1) + entries * np.float32(1e-6)
    if kind == "heavy":
        return entries**9
    if kind == "whole":
        return np.round(entries * 3)
    return entries


KINDS = ("normal", "rectified", "ascending", "periodic", "narrow", "heavy", "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_few_entries_are_put_into_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many entries of any kind no more than a last few thousand are ordered, and not a fifth is copied."""
    entries = data_of(kind, 300_001)
    ordered: list[int] = []
    collected: list[int] = []
    in_place, collect = selection._in_place, selection._collect

    def watched_in_place(entries: Array, asked: dict[int, int]) -> dict[int, np.number]:
        ordered.append(entries.size if asked else 0)
        return in_place(entries, asked)

    def watched_collect(entries: Array, brackets: list[selection._Bracket]) -> Array | None:
        inside = collect(entries, brackets)
        collected.append(-1 if inside is None else inside.size)
        return inside

    monkeypatch.setattr(selection, "_in_place", watched_in_place)
    monkeypatch.setattr(selection, "_collect", watched_collect)
    ranks = quartile_ranks(entries.size)
    assert selected(entries, ranks) == np.sort(entries)[ranks].tolist()
    assert max(ordered) <= selection._ENOUGH
    assert 0 <= collected[0] < entries.size / 5


def test_a_sample_that_misleads_costs_no_more_than_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where half of the entries lie between what a sample promised were near, no further sample is taken."""
    generator = np.random.default_rng(3)
    entries = generator.standard_normal(40_000, dtype=np.float32)
    # A sample of the same few places, which hold the ends.
    num_sampled = num_sampled_of(entries.size)
    places = (np.arange(num_sampled) * (entries.size / num_sampled)).astype(np.intp)
    monkeypatch.setattr(selection, "sampled_places", lambda *_: places)
    entries[places] = np.where(np.arange(num_sampled) % 2, np.float32(9), np.float32(-9))
    brackets = selection._brackets(entries, [20_000], np.float32(-9), np.float32(9))
    assert (brackets[0].low, brackets[0].high) == (-9, 9)
    assert selection._collect(entries, brackets) is None
    ranks = [20_000, 1, 39_998]
    assert selected(entries, ranks) == np.sort(entries)[ranks].tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("invalid", [[np.nan], [np.inf], [-np.inf], [np.nan, np.inf, -np.inf]], ids=str)
@pytest.mark.parametrize("every", [2, 7, 5000])
def test_entries_that_are_not_finite_stand_where_a_sort_puts_them(
    dtype: str, invalid: list[float], every: int
) -> None:
    """They are never in the way: ranks count the negative infinite ones, and the others come behind."""
    entries = data_of("normal", 90_001).astype(dtype)
    for start, value in enumerate(invalid):
        entries[start::every] = value
    entries[77] = 1.0
    finite = np.sort(entries[np.isfinite(entries)])
    num_before = int(np.count_nonzero(entries == -np.inf))
    ranks = [num_before + rank for rank in quartile_ranks(finite.size) if rank < finite.size]
    found = select(entries, ranks, finite[0], finite[-1]).by_rank
    assert [found[rank] for rank in ranks] == np.sort(entries)[ranks].tolist()
    assert np.isfinite([found[rank] for rank in ranks]).all()


def test_a_rank_that_is_not_near_its_estimate_is_looked_for_further_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brackets that were drawn too close are replaced by the wide ones, not by a copy of all entries."""
    entries = data_of("normal", 300_001)
    widths: list[float] = []
    collect, in_place, ordered = selection._collect, selection._in_place, list[int]()

    def watched_collect(entries: Array, brackets: list[selection._Bracket]) -> Array | None:
        widths.append(float(sum(bracket.high - bracket.low for bracket in brackets)))
        return collect(entries, brackets)

    def watched_in_place(entries: Array, asked: dict[int, int]) -> dict[int, np.number]:
        ordered.append(entries.size)
        return in_place(entries, asked)

    monkeypatch.setattr(selection, "_NUM_NEAR_DEVIATIONS", -4.0)
    monkeypatch.setattr(selection, "_collect", watched_collect)
    monkeypatch.setattr(selection, "_in_place", watched_in_place)
    ranks = quartile_ranks(entries.size)
    assert selected(entries, ranks) == np.sort(entries)[ranks].tolist()
    assert widths[0] < widths[1] / 2
    assert max(ordered) <= selection._ENOUGH


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [0, 5, -1])
def test_zeros_that_were_met_are_all_zeros(kind: str, shift: int) -> None:
    """Their number is right where it is known, and known where zero is among the ranks or near them."""
    entries = data_of(kind, 200_003) + np.float32(shift)
    found = select(entries, quartile_ranks(entries.size), entries.min(), entries.max())
    assert found.num_zero in (None, np.count_nonzero(entries == 0))
    if shift == 0 and kind in ("normal", "rectified", "whole"):
        assert found.num_zero is not None


def test_brackets_whose_ends_were_all_counted_hold_what_is_between_them() -> None:
    """No further comparison tells what is inside. It happens where many entries share the values of ranks."""
    entries = np.tile(np.arange(10, dtype=np.float32), 20)
    ends = selection._Ends(entries, np.empty(entries.size, np.bool_))
    parity = ends.count(np.less_equal, [np.float32(3), np.float32(8)])
    constant = selection._Bracket(entries[3], entries[3], (70,), entries[3:4], 0, entries[3], 80)
    wide = selection._Bracket(
        entries[3], entries[8], (100,), entries[3:9], 5, entries[8], 180, np.less_equal, parity
    )
    constant.parity = parity
    inside = selection._collect(entries, [constant, wide])
    assert inside is not None
    assert np.sort(inside).tolist() == np.repeat(np.arange(4.0, 9.0), 20).tolist()


def test_zeros_of_both_signs_are_equal() -> None:
    """Neither is below the other."""
    entries = np.tile(np.array([0.0, -0.0, 1.0, -0.0]), 10_000)
    assert selected(entries, quartile_ranks(entries.size)) == [0.0] * 4 + [0.0, 1.0]


def test_the_random_state_of_the_program_is_left_alone() -> None:
    """Places of a sample come from a generator of their own."""
    drawn_sample._offsets.cache_clear()
    sampled_places.cache_clear()
    states = np.random.get_state(legacy=False)["state"], torch.get_rng_state()
    selected(data_of("normal", 20_000), [10_000])
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], states[0]["key"])
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("size", [1, selection._PIECE - 1, selection._PIECE, 2 * selection._PIECE + 5])
def test_comparisons_are_counted_in_pieces(size: int) -> None:
    """Every entry once."""
    entries = np.arange(size, dtype=np.int64)
    assert count_true(entries, np.less, np.int64(size // 2)) == size // 2
    assert count_true(entries, np.equal, np.int64(size - 1)) == 1


@pytest.mark.parametrize("kind", ["normal", "ascending"])
def test_a_second_sample_is_seldom_drawn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was collected lies about evenly in its brackets, which is where ranks are guessed to be."""
    rounds: list[int] = []
    brackets = selection._brackets

    def watched(
        entries: Array, ranks: list[int], low: np.number, high: np.number
    ) -> list[selection._Bracket]:
        rounds.append(entries.size)
        return brackets(entries, ranks, low, high)

    monkeypatch.setattr(selection, "_brackets", watched)
    entries = data_of(kind, 1_000_000)
    ranks = quartile_ranks(entries.size)
    assert selected(entries, ranks) == np.sort(entries)[ranks].tolist()
    assert rounds == [entries.size]
