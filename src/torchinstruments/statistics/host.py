"""The facts of a CPU tensor, and its histograms, from one sort, one count, single ranks, or sums alone."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

from torchinstruments.statistics.bins import Binned, BinRule, edges_between, float_ends
from torchinstruments.statistics.facts import EMPTY, QUARTERS, Facts, quartile_position
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.moments import CHUNK, NO_MOMENTS, Array, moments
from torchinstruments.statistics.ordered import OrderedEntries, count_entries, sort_entries, sortable_dtype
from torchinstruments.statistics.pieces import finite_pieces, without_repeats
from torchinstruments.statistics.scanned import ScannedEntries
from torchinstruments.statistics.selected import SelectedEntries
from torchinstruments.statistics.ways import prefers_selection

__all__ = ["measure_on_host"]

_COUNT_16_BIT_FROM = 65_536
"""Entries from which counting 65,536 values costs less than sorting."""


def measure_on_host(
    tensor: torch.Tensor, *, is_ordered: bool, rules: Sequence[BinRule] = (), max_scratch_bytes: int
) -> Measured:
    """Returns the facts of a tensor, exact at any size.

    Args:
        tensor: Detached, strided, on the CPU; any real dtype.
        is_ordered: Whether quartiles are wanted. Without them, and without a histogram, nothing is sorted.
        rules: The histograms that are wanted.
        max_scratch_bytes: A copy is sorted only where it fits; a larger tensor is scanned several times.
            Single ranks are selected only where two copies fit, which is what the worst of data would take.
    """
    if tensor.numel() == 0:
        return Measured(EMPTY)
    distinct, repeats = without_repeats(tensor)
    # A program may have asked NumPy to raise where a square of a tiny number vanishes.
    with np.errstate(all="ignore"):
        if not (is_ordered or rules) and distinct.dtype.itemsize >= 4:
            return Measured(_unordered(distinct, repeats))
        ordered = _ordered(distinct, max_scratch_bytes, rules)
        facts = _facts(ordered, distinct.numel(), repeats)
        return Measured(facts, _binned(ordered, facts, repeats, rules))


def _ordered(tensor: torch.Tensor, max_scratch_bytes: int, rules: Sequence[BinRule] = ()) -> OrderedEntries:
    """Returns the finite entries in order, in the form that is cheapest for this dtype and size."""
    bytes_each = tensor.dtype.itemsize
    copy_bytes = tensor.numel() * sortable_dtype(tensor.dtype).itemsize
    fits = copy_bytes <= max_scratch_bytes
    if bytes_each == 1 or (bytes_each == 2 and (tensor.numel() >= _COUNT_16_BIT_FROM or not fits)):
        return count_entries(tensor)
    if bytes_each >= 4 and 2 * copy_bytes <= max_scratch_bytes and prefers_selection(tensor.numel()):
        return SelectedEntries(tensor, rules[0] if rules else None)
    return sort_entries(tensor) if fits else ScannedEntries(tensor)


def _facts(ordered: OrderedEntries, num_distinct: int, repeats: int) -> Facts:
    """Returns the facts of entries in order, each of which counts ``repeats`` times."""
    num_finite = ordered.num_finite
    num_nonfinite = (num_distinct - num_finite) * repeats
    num_entries = num_distinct * repeats
    if num_finite == 0:
        return Facts(num_entries, 0, num_nonfinite, NO_MOMENTS, 0.0, 0.0)
    low, high, *found = ordered.at(_ranks(num_finite, repeats))
    return Facts(
        num_entries=num_entries,
        num_zero=ordered.num_zero * repeats,
        num_nonfinite=num_nonfinite,
        moments=ordered.moments(low, high, _pivot(found)).repeated(repeats),
        minimum=low,
        maximum=high,
        quartiles=(*zip(found[::2], found[1::2], strict=True),),
    )


@lru_cache(maxsize=64)
def _ranks(num_finite: int, repeats: int) -> tuple[int, ...]:
    """Returns the ranks of the lowest and the highest entry and of those around each quartile."""
    ranks = [0, num_finite - 1]
    for quarters in QUARTERS:
        below, above, _ = quartile_position(num_finite * repeats, quarters)
        ranks += [below // repeats, above // repeats]
    return tuple(ranks)


def _pivot(found: Sequence[float]) -> float:
    """Returns the median, or zero where that lies about as near to the middle, and is not subtracted.

    Half of the entries lie outside of the quartiles. So a zero that is no further from the median than half
    of their distance is within three deviations of the mean, and less than four bits of the squares cancel.

    Args:
        found: The entries around each quartile.
    """
    median = found[2]
    return 0.0 if isinstance(median, float) and abs(median) <= (found[-1] - found[0]) / 2 else median


def _binned(
    ordered: OrderedEntries, facts: Facts, repeats: int, rules: Sequence[BinRule]
) -> tuple[Binned, ...]:
    """Returns the histograms of entries in order."""
    if not rules or facts.num_finite == 0:
        return ()
    low, high = float_ends(facts.minimum, facts.maximum)
    every_edges = [edges_between(rule, low, high) for rule in rules]
    return tuple([Binned(edges, ordered.up_to_edges(edges) * repeats) for edges in every_edges])


def _unordered(tensor: torch.Tensor, repeats: int) -> Facts:
    """Returns the facts of a tensor of 32 or 64 bits without putting it in order, in two passes."""
    num_finite, num_zero = 0, 0
    lows: list[float] = []
    highs: list[float] = []
    totals: list[float] = []
    for piece in _chunks(tensor):
        if piece.size == 0:
            continue
        num_finite += piece.size
        num_zero += piece.size - int(np.count_nonzero(piece))
        lows.append(piece.min().item())
        highs.append(piece.max().item())
        totals.append(float(np.add.reduce(piece, dtype=np.float64)))
    num_entries = tensor.numel() * repeats
    num_nonfinite = num_entries - num_finite * repeats
    if num_finite == 0:
        return Facts(num_entries, 0, num_nonfinite, NO_MOMENTS, 0.0, 0.0)
    low, high = min(lows), max(highs)
    pivot = _middle(totals, num_finite, low, high)
    found = moments(_chunks(tensor), num_finite, low=low, high=high, pivot=pivot)
    return Facts(num_entries, num_zero * repeats, num_nonfinite, found.repeated(repeats), low, high)


def _chunks(tensor: torch.Tensor) -> Iterable[Array]:
    """Yields the finite entries in flat pieces that fit the cache."""
    return finite_pieces(tensor, CHUNK)


def _middle(totals: Sequence[float], num_finite: int, low: float, high: float) -> float:
    """Returns about the mean, between the extremes and of their kind: distances are taken from it."""
    total = sum(totals)
    middle = total / num_finite if math.isfinite(total) else low / 2 + high / 2
    middle = int(middle) if isinstance(low, int) else middle
    return min(max(middle, low), high)
