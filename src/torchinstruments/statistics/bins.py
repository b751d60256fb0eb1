"""The bins of a histogram: where their edges lie, and how many entries stand below each.

Edges are float64. Entries are never converted to meet them: an edge that lies between two entries' possible
values moves up to the next one that their dtype has, which leaves every comparison as it was. So the counts
are exact for every dtype, and a sorted tensor is searched as it is.

Bins are open to the right, the last one closed.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from torchinstruments.statistics.moments import Array

__all__ = [
    "CONSTANT_MARGIN",
    "BinRule",
    "Binned",
    "bin_edges",
    "edges_between",
    "first_values",
    "fixed_edges",
    "float_ends",
    "sorted_counts",
    "thresholds",
]

CONSTANT_MARGIN = 0.01
"""Share of the only value, or of 1, by which the range of a constant tensor is widened on both sides."""


@dataclass(frozen=True, slots=True)
class BinRule:
    """How a histogram places its bins.

    Attributes:
        num_bins: At least 1.
        value_range: First and last edge; None for the lowest and the highest finite entry.
    """

    num_bins: int
    value_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Binned:
    """How many finite entries stand below each edge.

    Attributes:
        edges: float64, one more than there are bins.
        up_to: int64: finite entries below each edge; at or below the last one.
    """

    edges: Array
    up_to: Array


def bin_edges(rule: BinRule, low: Array, high: Array) -> Array:
    """Returns the edges for one or many tensors.

    A range of no width is widened by one part in a hundred of its value, or of 1; one that is too narrow for
    as many float64 numbers, by one unit in the last place for each bin.

    Args:
        rule: How bins are placed.
        low: float64, the first edge for each tensor; not looked at where the range is fixed.
        high: float64, the last edge for each, not below ``low``.

    Returns:
        float64 of shape (tensors, bins + 1).
    """
    if rule.value_range is not None:
        return np.broadcast_to(fixed_edges(rule.num_bins, *rule.value_range), (low.size, rule.num_bins + 1))
    is_constant = low == high
    if is_constant.any():
        margin = np.where(is_constant, CONSTANT_MARGIN * np.maximum(np.abs(low), 1.0), 0.0)
        # What is widened past the ends of float64 has sums that overflow, and so no histogram.
        with np.errstate(over="ignore"):
            low, high = low - margin, high + margin
    edges = _spread(rule.num_bins, low, high)
    is_narrow = ~(edges[:, 1:] > edges[:, :-1]).all(axis=1)
    if is_narrow.any():
        with np.errstate(over="ignore", invalid="ignore"):
            margin = rule.num_bins * np.spacing(np.maximum(np.abs(low), np.abs(high)))
            low, high = low - margin, high + margin
        edges[is_narrow] = _spread(rule.num_bins, low[is_narrow], high[is_narrow])
    return edges


def edges_between(rule: BinRule, low: float, high: float) -> Array:
    """Returns the edges for one tensor; they are kept for a while, and not to be written to.

    Args:
        rule: How bins are placed.
        low: The first edge; not looked at where the range is fixed.
        high: The last edge, not below the first one.
    """
    # Zeros of both signs are one key.
    return _edges_between(rule, low + 0.0, high + 0.0)


@lru_cache(maxsize=16)
def _edges_between(rule: BinRule, low: float, high: float) -> Array:
    """Returns the edges for one tensor."""
    edges: Array | None = None
    if rule.value_range is None and 0.0 < high - low < math.inf:
        # What `bin_edges` comes to for one range of a width, without what it takes to do many at once.
        edges = _ways(rule.num_bins) * (high - low)
        edges += low
        edges[0], edges[-1] = low, high
    if edges is None or not (edges[1:] > edges[:-1]).all():
        edges = bin_edges(rule, np.array([low]), np.array([high]))[0]
    edges.setflags(write=False)
    return edges


@lru_cache(maxsize=32)
def fixed_edges(num_bins: int, low: float, high: float) -> Array:
    """Returns the edges of a fixed range; two of them may be equal where the range is too narrow."""
    edges = _spread(num_bins, np.array([low]), np.array([high]))[0]
    edges.setflags(write=False)
    return edges


def float_ends(low: float, high: float) -> tuple[float, float]:
    """Returns the nearest float64 at or below one number and at or above another, of any whole numbers.

    Equal ones stay equal: they are no range, and will be widened anyway.
    """
    below, above = float(low), float(high)
    if low == high:
        return below, above
    if below > low:
        below = math.nextafter(below, -math.inf)
    if above < high:
        above = math.nextafter(above, math.inf)
    return below, above


def thresholds(edges: Array, dtype: np.dtype) -> Array:
    """Returns values below which lie the entries that are below each edge, at or below the last one.

    Args:
        edges: float64, ascending along the last axis.
        dtype: Floating-point dtype of the entries, and of the result.
    """
    values = edges.astype(dtype)
    is_low = values < edges
    is_low[..., -1] = values[..., -1] <= edges[..., -1]
    return np.where(is_low, np.nextafter(values, dtype.type(np.inf)), values)


def first_values(edges: Array, dtype: np.dtype) -> Array:
    """Returns for each edge the first value of a floating-point dtype that is not below it."""
    values = edges.astype(dtype)
    return np.where(values < edges, np.nextafter(values, dtype.type(np.inf)), values)


def sorted_counts(entries: Array, edges: Array) -> Array:
    """Returns how many entries stand below each edge, at or below the last one.

    Args:
        entries: Ascending and finite, of any real dtype that NumPy knows.
        edges: float64, ascending.
    """
    if entries.dtype.kind == "f":
        return entries.searchsorted(thresholds(edges, entries.dtype))
    below = _whole_number_places(entries, np.ceil(edges[:-1]), "left")
    return np.concatenate((below, _whole_number_places(entries, np.floor(edges[-1:]), "right")))


def _whole_number_places(entries: Array, values: Array, side: Literal["left", "right"]) -> Array:
    """Returns where whole float64 numbers stand among integer entries, which may not reach them."""
    info = np.iinfo(entries.dtype)
    is_beyond, is_before = values >= float(info.max + 1), values < float(info.min)
    # Numbers of another dtype would make NumPy widen the entries first.
    inside = np.where(is_beyond | is_before, 0.0, values).astype(entries.dtype)
    return np.where(is_beyond, entries.size, np.where(is_before, 0, entries.searchsorted(inside, side)))


def _spread(num_bins: int, low: Array, high: Array) -> Array:
    """Returns evenly spaced edges from the low to the high end of each range, which may be infinite."""
    way = _ways(num_bins)
    low, high = low[:, None], high[:, None]
    # Between the ends of float64 the span itself is no float64.
    with np.errstate(over="ignore", invalid="ignore"):
        span = high - low
        edges = span * way
        edges += low
        if not np.isfinite(span).all():
            edges = np.where(np.isfinite(span), edges, low * (1.0 - way) + high * way)
    edges[:, :1], edges[:, -1:] = low, high
    return edges


@lru_cache(maxsize=32)
def _ways(num_bins: int) -> Array:
    """Returns how far along the range each edge lies, from 0 to 1."""
    return np.arange(num_bins + 1, dtype=np.float64) / num_bins
