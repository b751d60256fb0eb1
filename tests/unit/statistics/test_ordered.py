"""Sorted and counted entries answer alike."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from torchinstruments.statistics.ordered import OrderedEntries, count_entries, sort_entries
from torchinstruments.statistics.scanned import ScannedEntries

ENTRIES = torch.tensor([3.0, -math.inf, 0.0, math.nan, -0.0, 3.0, -2.0, math.inf, -math.nan, 0.5])
FORMS: dict[str, Callable[[], OrderedEntries]] = {
    "sorted": lambda: sort_entries(ENTRIES),
    "sorted_half": lambda: sort_entries(ENTRIES.to(torch.float16)),
    "counted": lambda: count_entries(ENTRIES.to(torch.bfloat16)),
    "counted_float8": lambda: count_entries(ENTRIES.to(torch.float8_e5m2)),
    "scanned": lambda: ScannedEntries(ENTRIES),
    "scanned_wide": lambda: ScannedEntries(ENTRIES.to(torch.float64)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_knows_counts_order_and_moments(form: Callable[[], OrderedEntries]) -> None:
    """Six of the ten entries are finite, two are zeros, and their order does not depend on the form."""
    ordered = form()
    assert (ordered.num_finite, ordered.num_zero) == (6, 2)
    assert ordered.at([0, 1, 2, 3, 4, 5]) == [-2.0, 0.0, 0.0, 0.5, 3.0, 3.0]
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


@pytest.mark.parametrize("form", [count_entries, sort_entries], ids=["counted", "sorted"])
def test_nothing_finite_is_nothing(form: Callable[[torch.Tensor], OrderedEntries]) -> None:
    """Entries without a finite one have no order and no zeros."""
    ordered = form(torch.tensor([math.nan, math.inf], dtype=torch.float16))
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
