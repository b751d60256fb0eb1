"""Which of two exact ways to put large tensors in order is the faster one on this machine.

NumPy's sort is vectorised, and very fast on some processors. On others, which lack the instructions or have
them in name only, selecting takes a small part of its time. No list of processors would stay right, so both
are tried once. What a tensor's numbers are does not depend on the answer.
"""

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from torchinstruments.statistics.drawn_sample import scattered
from torchinstruments.statistics.ordered import OrderedEntries, sort_entries
from torchinstruments.statistics.selected import SelectedEntries

__all__ = ["prefers_selection"]

_NUM_TRIED = 1 << 16
"""Entries of the trial."""

_NUM_ROUNDS = 4
"""Trials of each way, of which the faster one counts: it was disturbed less."""

_GROWTH = 4
"""The time of a sort grows with a power of the size that is higher than that of selecting by about a fourth,
so that a lead of the sort lasts up to this power of it in size."""

_LEAST = 8192
"""Entries below which a sort is always fast enough."""


def prefers_selection(num_entries: int) -> bool:
    """Returns whether to select from a tensor of 32 or 64 bits, not to sort it (training thread, hot path).

    The first question about a large tensor takes some milliseconds.

    Args:
        num_entries: Of the tensor.
    """
    return num_entries >= _LEAST and num_entries >= _crossover()


@cache
def _crossover() -> float:
    """Returns the number of entries from which selecting is the faster way."""
    tensor = torch.from_numpy(scattered(_NUM_TRIED).astype(np.float32))
    lead = _least_seconds(SelectedEntries, tensor) / _least_seconds(sort_entries, tensor)
    return _NUM_TRIED * lead**_GROWTH


def _least_seconds(form: Callable[[torch.Tensor], OrderedEntries], tensor: torch.Tensor) -> float:
    """Returns how long one way takes."""
    ranks = [quarters * (tensor.numel() - 1) // 4 for quarters in range(5)]
    least = float("inf")
    for _ in range(_NUM_ROUNDS):
        begin = time.perf_counter()
        ordered = form(tensor)
        low, _, median, _, high = ordered.at(ranks)
        ordered.moments(low, high, median)
        least = min(least, time.perf_counter() - begin)
    return least
