"""Sorted, selected, counted and scanned entries answer alike."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from torchinstruments.statistics import ordered
from torchinstruments.statistics.ordered import OrderedEntries, count_entries, sort_entries
from torchinstruments.statistics.scanned import ScannedEntries
from torchinstruments.statistics.selected import SelectedEntries

ENTRIES = torch.tensor([3.0, -math.inf, 0.0, math.nan, -0.0, 3.0, -2.0, math.inf, -math.nan, 0.5])
FORMS: dict[str, Callable[[], OrderedEntries]] = {
    "sorted": lambda: sort_entries(ENTRIES),
    "sorted_half": lambda: sort_entries(ENTRIES.to(torch.float16)),
    "counted": lambda: count_entries(ENTRIES.to(torch.bfloat16)),
    "counted_float8": lambda: count_entries(ENTRIES.to(torch.float8_e5m2)),
    "selected": lambda: SelectedEntries(ENTRIES),
    "selected_wide": lambda: SelectedEntries(ENTRIES.to(torch.float64)),
    "scanned": lambda: ScannedEntries(ENTRIES),
    "scanned_wide": lambda: ScannedEntries(ENTRIES.to(torch.float64)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_knows_counts_order_and_moments(form: Callable[[], OrderedEntries]) -> None:
    """Six of the ten entries are finite, two are zeros, and their order does not depend on the form."""
    ordered = form()
    assert (ordered.num_finite, ordered.num_zero) == (6, 2)
    entries = ordered.at([0, 1, 2, 3, 4, 5])
    assert entries == [-2.0, 0.0, 0.0, 0.5, 3.0, 3.0]
    assert [math.copysign(1.0, entry) for entry in entries] == [-1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    found = ordered.moments(-2.0, 3.0, 0.0)
    assert (found.mean, found.std) == pytest.approx((0.75, (22.25 / 6 - 0.75**2) ** 0.5), rel=1e-15)
    assert (found.total, found.total_of_squares) == (4.5, 22.25)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_counts_what_lies_below_the_edges(form: Callable[[], OrderedEntries]) -> None:
    """An entry on an edge is not below it, unless it is the last one."""
    counts = form().up_to_edges(np.array([-2.0, -1e-300, 0.0, 1e-300, 3.0]))
    assert counts.tolist() == [0, 1, 1, 3, 6]
    assert form().up_to_edges(np.array([-9.0, 2.9])).tolist() == [0, 4]


def test_sorting_leaves_the_tensor_as_it_is() -> None:
    """The copy is sorted, even where the tensor is flat and dense already."""
    tensor = torch.tensor([3.0, 1.0, 2.0])
    sort_entries(tensor)
    assert tensor.tolist() == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (count_entries, torch.float16),
        (sort_entries, torch.float16),
        (sort_entries, torch.float32),
        (SelectedEntries, torch.float32),
        (SelectedEntries, torch.float64),
    ],
    ids=str,
)
def test_nothing_finite_is_nothing(
    form: Callable[[torch.Tensor], OrderedEntries], dtype: torch.dtype
) -> None:
    """Entries without a finite one have no order and no zeros."""
    ordered = form(torch.tensor([math.nan, math.inf], dtype=dtype))
    assert (ordered.num_finite, ordered.num_zero) == (0, 0)


def test_booleans_are_counted_as_zero_and_one() -> None:
    """False is a zero, True is one."""
    ordered = count_entries(torch.tensor([True, False, True]))
    assert (ordered.at([0, 2]), ordered.num_zero) == ([0.0, 1.0], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize(
    "entries",
    [
        torch.ones(200_000),
        torch.arange(200_000) // 3_000,
        torch.cat((torch.zeros(70_000), torch.arange(130_001) % 7)),
        torch.cat((torch.arange(3_000) % 5, torch.full((140_000,), math.nan))),
        torch.tensor([2.0]),
        torch.tensor([2.0, 2.0]),
    ],
    ids=["constant", "sorted", "runs, then none", "none, then runs", "one", "two"],
)
def test_runs_are_counted_like_single_entries(entries: torch.Tensor, dtype: torch.dtype) -> None:
    """However often an entry repeats its neighbour, each value is counted as often as it occurs."""
    tensor = torch.nan_to_num(entries, 1.0).to(dtype) if not dtype.is_floating_point else entries.to(dtype)
    values, counts = torch.unique(tensor[torch.isfinite(tensor)].to(torch.float64), return_counts=True)
    ordered = count_entries(tensor)
    assert (ordered.values.tolist(), ordered.counts.tolist()) == (values.tolist(), counts.tolist())


PIECE = ordered._COUNT_PIECE


def prevailing(share: float, value: float, num_entries: int) -> torch.Tensor:
    """Returns small whole numbers, of which about a share, at random places, is one value."""
    generator = torch.Generator().manual_seed(num_entries)
    entries = torch.randint(0, 9, (num_entries,), generator=generator).to(torch.float32)
    return entries.where(torch.rand(num_entries, generator=generator) >= share, value)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize(
    "entries",
    [
        prevailing(0.9, 0.0, 2 * PIECE + 1),
        prevailing(0.7, 3.0, PIECE + 2),
        torch.cat((prevailing(0.95, 2.0, PIECE), prevailing(0.0, 0.0, PIECE), torch.full((3,), 4.0))),
        prevailing(0.8, math.nan, PIECE + 5),
        prevailing(0.8, 0.0, 4),
    ],
    ids=["zero", "three", "prevailing, then not", "nan", "few"],
)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "wide"])
def test_a_prevailing_value_is_counted_like_others(
    entries: torch.Tensor,
    dtype: torch.dtype,
    first: int,
    step: int,
    narrow: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each value is counted as often as it occurs, wherever pairs lie, in tables of 32 and of 64 bits."""
    if not narrow:
        monkeypatch.setattr(ordered, "MAX_NARROW_COUNT", 0)
    tensor = entries.to(dtype) if dtype.is_floating_point else torch.nan_to_num(entries, 1.0).to(dtype)
    tensor = tensor[first::step]
    wide = tensor.to(torch.float64)
    values, counts = torch.unique(wide[torch.isfinite(wide)], return_counts=True)
    found = count_entries(tensor)
    assert (found.values.tolist(), found.counts.tolist()) == (values.tolist(), counts.tolist())
    assert found.counts.dtype == np.int64


@pytest.mark.parametrize(
    ("share", "value", "most"), [(0.9, 0.0, 0.25), (0.7, 5.0, 0.6), (1.0, 1.0, 0.01), (0.3, 0.0, 1.0)]
)
def test_few_of_the_pairs_of_a_prevailing_value_are_counted_singly(
    share: float, value: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that repeat one counted just now wait for it, so that only the other pairs go one by one."""
    counted: list[int] = []
    add_counts = ordered._add_counts

    def watched(by_code: np.ndarray, codes: np.ndarray, counts: np.ndarray) -> None:
        counted.append(codes.size)
        add_counts(by_code, codes, counts)

    monkeypatch.setattr(ordered, "_add_counts", watched)
    num_entries = 2 * PIECE
    count_entries(prevailing(share, value, num_entries).to(torch.bfloat16))
    assert sum(counted) <= most * num_entries
    assert share >= 0.5 or sum(counted) == num_entries


def test_counting_works_where_torch_has_to_be_deterministic() -> None:
    """A program that refuses operations without a fixed order still has its entries counted."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        found = count_entries(torch.tensor([1.0, 0.0, 1.0], dtype=torch.bfloat16))
    finally:
        torch.use_deterministic_algorithms(mode=before)
    assert (found.values.tolist(), found.counts.tolist()) == ([0.0, 1.0], [1, 2])


@pytest.mark.parametrize("table", ["narrow", "wide"])
@pytest.mark.parametrize("kind", ["drawn", "ascending", "prevailing", "constant"])
@pytest.mark.parametrize("size", [1, 2, 70_000, 70_001])
def test_bytes_are_counted(size: int, kind: str, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not they repeat their neighbour, in tables of 32 and of 64 bits; an odd last one too."""
    if table == "wide":
        monkeypatch.setattr(ordered, "MAX_NARROW_COUNT", 0)
    generator = np.random.default_rng(size)
    codes = generator.integers(0, 256, size, dtype=np.uint8)
    if kind == "ascending":
        codes.sort()
    elif kind == "prevailing":
        codes[generator.random(size) < 0.7] = 255
    elif kind == "constant":
        codes[:] = 3
    counts = ordered.count_bytes(codes)
    assert counts.dtype == np.int64
    assert counts.tolist() == np.bincount(codes, minlength=256).tolist()


def test_bytes_are_counted_alike_by_one_thread_and_by_several() -> None:
    """In pieces that one thread takes where there are several."""
    codes = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    num_threads = torch.get_num_threads()
    counts: list[list[int]] = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            counts.append(ordered.count_bytes(codes).tolist())
    finally:
        torch.set_num_threads(num_threads)
    assert counts[0] == counts[1] == np.bincount(codes, minlength=256).tolist()
