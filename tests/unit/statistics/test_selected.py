"""Entries that are selected from are measured like sorted ones."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from torchinstruments.statistics import host
from torchinstruments.statistics.bins import BinRule
from torchinstruments.statistics.measured import Measured

RULES = (BinRule(64), BinRule(7, (-1.0, 2.0)), BinRule(300))
SIZE = 140_003


def data_of(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns entries of one kind."""
    generator = torch.Generator().manual_seed(5)
    entries = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    if kind == "rectified":
        entries.clamp_(min=0)
    elif kind == "mostly_zero":
        entries *= torch.rand(SIZE, generator=generator) < 0.1
    elif kind == "constant":
        entries.fill_(-0.3)
    elif kind == "saturated":
        entries.mul_(3).clamp_(-1, 1)
    elif kind == "heavy":
        entries = entries**7
    elif kind == "narrow":
        entries = 1 + entries.abs() * 1e-7
    elif kind == "denormal":
        entries *= 1e-309 if dtype is torch.float64 else 1e-39
    elif kind == "negative_zero":
        entries = torch.where(entries > 0, -0.0, entries)
        entries[::9] = 0.0
    elif kind == "huge":
        entries *= 1e307 if dtype is torch.float64 else 1e37
    elif kind == "invalid":
        entries[::3], entries[1::50], entries[2::7] = math.nan, math.inf, -math.inf
    elif kind == "one_finite":
        entries.fill_(math.nan)
        entries[77] = -0.0
    return entries.to(dtype)


KINDS = (
    "normal",
    "rectified",
    "mostly_zero",
    "constant",
    "saturated",
    "heavy",
    "narrow",
    "denormal",
    "negative_zero",
    "huge",
    "invalid",
    "one_finite",
)
LAYOUTS = {
    "dense": lambda entries: entries,
    "strided": lambda entries: entries[::3],
    "transposed": lambda entries: entries[:140_000].view(1000, 140).t(),
    "columns": lambda entries: entries[:140_000].view(1000, 140)[:, 3:99],
}


def measured(
    tensor: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    *,
    selects: bool,
    rules: tuple[BinRule, ...] = RULES,
) -> Measured:
    """Measures in one of the two ways."""
    monkeypatch.setattr(host, "prefers_selection", lambda _: selects)
    return host.measure_on_host(tensor, is_ordered=True, rules=rules, max_scratch_bytes=1 << 28)


def text_of(one: Measured) -> str:
    """Returns all numbers, to the last bit and with the signs of zeros."""
    binned = [(np.asarray(binned.edges).tolist(), binned.up_to.tolist()) for binned in one.binned]
    return f"{one.facts!r} {binned}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_numbers_are_those_of_a_sort(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums too: which way a machine takes cannot be told from what it stores."""
    tensor = data_of(kind, dtype)
    sorted_one = text_of(measured(tensor, monkeypatch, selects=False))
    assert text_of(measured(tensor, monkeypatch, selects=True)) == sorted_one


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["normal", "invalid"])
def test_the_layout_in_memory_makes_no_difference(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies apart, or is not finite, is left out of a copy; the tensor stays as it is."""
    tensor = LAYOUTS[layout](data_of(kind, torch.float32))
    before = tensor.clone()
    sorted_one = text_of(measured(tensor, monkeypatch, selects=False))
    assert text_of(measured(tensor, monkeypatch, selects=True)) == sorted_one
    assert torch.equal(tensor.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.uint64], ids=str)
def test_whole_numbers_are_measured_like_sorted_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close together near the end of their dtype, where float64 cannot tell those of 64 bits apart."""
    tensor = torch.randint(2**31 - 900, 2**31 - 1, (SIZE,), generator=torch.Generator().manual_seed(1))
    tensor = (tensor << (32 if dtype.itemsize == 8 else 0)).to(dtype)
    sorted_one = text_of(measured(tensor, monkeypatch, selects=False))
    assert text_of(measured(tensor, monkeypatch, selects=True)) == sorted_one


@pytest.mark.parametrize(
    ("kind", "num_rules", "most"),
    [("normal", 2, 0.34), ("rectified", 2, 0.34), ("invalid", 0, 0.34), ("invalid", 2, 1.34)],
)
def test_scratch_is_a_part_of_a_copy(
    kind: str, num_rules: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside three megabytes, and one copy where a histogram leaves entries out."""
    tensor = data_of(kind, torch.float32).repeat(15)
    measured(tensor[:100_000], monkeypatch, selects=True)
    tracemalloc.start()
    try:
        measured(tensor, monkeypatch, selects=True, rules=RULES[:num_rules])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most * tensor.nbytes + 3 * 2**20
