"""The bins of a histogram on an accelerator: `bins`, operation by operation, without a host read.

Edges are computed on the device from extremes that the host does not know yet, in the order of operations in
which the host computes them, so that with float64 both give the same edges and counts. A fixed range goes to
the device as arguments of its kernels, not as a copy.
"""

import torch

from torchinstruments.statistics.bins import CONSTANT_MARGIN, BinRule
from torchinstruments.statistics.radix import entries_of_keys, keys_of

__all__ = [
    "LOWEST",
    "device_edges",
    "device_float_ends",
    "device_sorted_counts",
    "entries_given",
    "moved_down",
]

LOWEST = -(2**63)
"""Where the zero of uint64 stands once it is moved down."""


def moved_down(bits: torch.Tensor) -> torch.Tensor:
    """Returns the entries of a uint64 tensor less 2**63, as int64: in the same order and exact.

    Args:
        bits: The tensor, seen as int64.
    """
    return torch.bitwise_xor(bits, LOWEST)


def entries_given(entries: torch.Tensor) -> torch.Tensor:
    """Returns the uint64 entries that `moved_down` was given, for nothing but a conversion."""
    return torch.bitwise_xor(entries, LOWEST).view(torch.uint64)


def device_edges(rule: BinRule, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Returns the edges of a histogram, one more than there are bins.

    Args:
        rule: How bins are placed.
        low: 0-d, float64 or float32: the first edge; not looked at where the range is fixed.
        high: The same for the last edge.
    """
    if rule.value_range is not None:
        first, last = rule.value_range
        return _spread(rule.num_bins, torch.full_like(low, first), torch.full_like(high, last))
    margin = torch.clamp(low.abs(), min=1.0) * CONSTANT_MARGIN
    margin = torch.where(low == high, margin, torch.zeros_like(margin))
    low, high = low - margin, high + margin
    edges = _spread(rule.num_bins, low, high)
    largest = torch.maximum(low.abs(), high.abs())
    margin = (_next(largest, 1) - largest) * rule.num_bins
    num_edges = edges.numel()
    ascends = torch.all(edges.narrow(0, 1, num_edges - 1) > edges.narrow(0, 0, num_edges - 1))
    return torch.where(ascends, edges, _spread(rule.num_bins, low - margin, high + margin))


def device_float_ends(
    low: torch.Tensor, high: torch.Tensor, accumulate: torch.dtype, *, is_moved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the nearest floats at or below one entry and at or above another; equal ones stay equal.

    Args:
        low: 0-d, of the working dtype.
        high: The same.
        accumulate: float64 or float32.
        is_moved: Whether the entries are those of `moved_down`; the floats are not.
    """
    below, above = ((entries_given(end) if is_moved else end).to(accumulate) for end in (low, high))
    if low.dtype.is_floating_point:
        return below, above
    differs = low != high
    is_too_high = torch.logical_and(differs, _compared(below, low, is_moved=is_moved) > 0)
    is_too_low = torch.logical_and(differs, _compared(above, high, is_moved=is_moved) < 0)
    return torch.where(is_too_high, _next(below, -1), below), torch.where(is_too_low, _next(above, 1), above)


def device_sorted_counts(
    entries: torch.Tensor, edges: torch.Tensor, *, is_moved: bool = False
) -> torch.Tensor:
    """Returns how many entries stand below each edge, at or below the last one; int64.

    Args:
        entries: Ascending, of a working dtype; infinity stands for what is not finite.
        edges: Ascending, float64 or float32.
        is_moved: Whether the entries are those of `moved_down`; edges are not.
    """
    num_inner = edges.numel() - 1
    inner, last = edges.narrow(0, 0, num_inner), edges.narrow(0, num_inner, 1)
    if entries.dtype.is_floating_point:
        above, below = inner.to(entries.dtype), last.to(entries.dtype)
        above = torch.where(above.to(edges.dtype) < inner, _next(above, 1), above)
        below = torch.where(below.to(edges.dtype) > last, _next(below, -1), below)
        num_below = torch.searchsorted(entries, above)
        num_up_to = torch.searchsorted(entries, below, right=True)
    else:
        num_below = _found(entries, inner.ceil(), is_right=False, is_moved=is_moved)
        num_up_to = _found(entries, last.floor(), is_right=True, is_moved=is_moved)
    return torch.cat((num_below, num_up_to))


def _spread(num_bins: int, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Returns evenly spaced edges."""
    way = torch.arange(num_bins + 1, dtype=low.dtype, device=low.device) / num_bins
    span = high - low
    edges = span * way
    edges = edges + low
    edges = torch.where(torch.isfinite(span), edges, low * (1.0 - way) + high * way)
    return torch.cat((low.view(1), edges.narrow(0, 1, num_bins - 1), high.view(1)))


def _found(entries: torch.Tensor, values: torch.Tensor, *, is_right: bool, is_moved: bool) -> torch.Tensor:
    """Returns where whole numbers stand among the entries of an integer dtype."""
    if is_moved:
        exact, is_before, is_beyond = _whole(values, is_moved=True)
        found = torch.searchsorted(entries, exact, right=is_right)
        return found.masked_fill(is_before, 0).masked_fill(is_beyond, entries.numel())
    limit = 2.0 ** (8 * entries.dtype.itemsize - 1)
    is_beyond, is_before = values >= limit, values < -limit
    inside = torch.where(torch.logical_or(is_beyond, is_before), torch.zeros_like(values), values)
    found = torch.searchsorted(entries, inside.to(entries.dtype), right=is_right)
    return found.masked_fill(is_before, 0).masked_fill(is_beyond, entries.numel())


def _compared(number: torch.Tensor, entry: torch.Tensor, *, is_moved: bool) -> torch.Tensor:
    """Returns 1, 0 or -1 as a whole float is above, at or below an integer entry."""
    exact, _, is_beyond = _whole(number, is_moved=is_moved)
    sign = (exact > entry).to(torch.int64) - (exact < entry).to(torch.int64)
    return torch.where(is_beyond, torch.ones_like(sign), sign)


def _whole(numbers: torch.Tensor, *, is_moved: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns whole floats as int64, moved down or not, and which lie before and beyond all entries.

    What cannot be had as int64 is 0 there; where it would overflow the conversion is undefined.
    """
    half = 2.0**63
    is_before = numbers < (0.0 if is_moved else -half)
    is_beyond = numbers >= (2 * half if is_moved else half)
    inside = numbers.masked_fill(torch.logical_or(is_before, is_beyond), 0.0)
    if not is_moved:
        return inside.to(torch.int64), is_before, is_beyond
    # Each half by itself, so that nothing is rounded: a float of 2**63 or more is a multiple of 2,048.
    is_high = inside >= half
    exact = torch.where(is_high, inside - half, inside).to(torch.int64)
    return torch.where(is_high, exact, exact + LOWEST), is_before, is_beyond


def _next(numbers: torch.Tensor, step: int) -> torch.Tensor:
    """Returns the next floats up (1) or down (-1); ``nextafter`` lacks some dtypes on some devices."""
    return entries_of_keys(keys_of(numbers) + step, numbers.dtype)
