"""The facts of a CPU tensor."""

import numpy as np
import torch

from torchinstruments.statistics.facts import QUARTERS, Facts, quartile_position
from torchinstruments.statistics.ordered import OrderedEntries, count_entries, sort_entries, sortable_dtype
from torchinstruments.statistics.pieces import without_repeats
from torchinstruments.statistics.scanned import ScannedEntries

__all__ = ["host_facts"]

_COUNT_16_BIT_FROM = 32_768
"""Entries from which counting 65,536 values costs less than sorting."""


def host_facts(tensor: torch.Tensor, *, max_scratch_bytes: int) -> Facts:
    """Returns what the nine statistics are made of, exact at any size.

    Args:
        tensor: Detached, strided, on the CPU; any real dtype.
        max_scratch_bytes: A copy is sorted only where it fits; a larger tensor is scanned several times.
    """
    if tensor.numel() == 0:
        return Facts(0, 0, 0, 0.0, 0.0, 0.0, 0.0, ())
    distinct, repeats = without_repeats(tensor)
    # A program may have asked NumPy to raise where a square of a tiny number vanishes.
    with np.errstate(all="ignore"):
        return _facts(_ordered(distinct, max_scratch_bytes), distinct.numel(), repeats)


def _ordered(tensor: torch.Tensor, max_scratch_bytes: int) -> OrderedEntries:
    """Returns the finite entries in order, in the form that is cheapest for this dtype and size."""
    bytes_each = tensor.dtype.itemsize
    fits = tensor.numel() * sortable_dtype(tensor.dtype).itemsize <= max_scratch_bytes
    if bytes_each == 1 or (bytes_each == 2 and (tensor.numel() >= _COUNT_16_BIT_FROM or not fits)):
        return count_entries(tensor)
    return sort_entries(tensor) if fits else ScannedEntries(tensor)


def _facts(ordered: OrderedEntries, num_distinct: int, repeats: int) -> Facts:
    """Returns the facts of entries in order, each of which counts ``repeats`` times."""
    num_finite = ordered.num_finite
    num_nonfinite = (num_distinct - num_finite) * repeats
    num_entries = num_distinct * repeats
    if num_finite == 0:
        return Facts(num_entries, 0, num_nonfinite, 0.0, 0.0, 0.0, 0.0, ())
    ranks = [0, num_finite - 1]
    for quarters in QUARTERS:
        below, above, _ = quartile_position(num_finite * repeats, quarters)
        ranks += [below // repeats, above // repeats]
    low, high, *found = ordered.at(ranks)
    mean, std = ordered.moments(low, high, found[2])
    quartiles = tuple(zip(found[::2], found[1::2], strict=True))
    return Facts(num_entries, ordered.num_zero * repeats, num_nonfinite, mean, std, low, high, quartiles)
