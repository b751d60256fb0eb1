"""The finite entries of a CPU tensor in order, in the cheapest of three forms.

* `SortedEntries`: NumPy's vectorised sort of one copy. It is some twenty times faster than torch's sort on
  the CPU, and everything but mean and deviation follows from it by binary search.
* `CountedEntries`: how often each of the 256 or 65,536 values of a small dtype occurs.
* `ScannedEntries` (its own module): several passes with bounded scratch, where a sorted copy would not fit.

Each knows its counts, answers for order statistics, and gives the moments. What else can be read off an
order, such as the counts between the edges of a histogram, belongs in the same three classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from torchinstruments.statistics.moments import Array, chunks, moments, weighted_moments
from torchinstruments.statistics.pieces import flat_pieces

__all__ = [
    "CountedEntries",
    "OrderedEntries",
    "SortedEntries",
    "count_entries",
    "sort_entries",
    "sortable_dtype",
]

_COUNT_PIECE = 1 << 20
"""Entries counted at a time: `numpy.bincount` widens them to int64."""


class OrderedEntries(Protocol):
    """The finite entries of a tensor in order."""

    @property
    def num_finite(self) -> int:
        """Entries that are neither NaN nor infinite."""
        ...

    @property
    def num_zero(self) -> int:
        """Entries that equal zero, negative zero among them."""
        ...

    def at(self, ranks: Sequence[int]) -> list[float]:
        """Returns the finite entries with these ranks, 0 for the lowest; whole numbers for integer dtypes."""
        ...

    def moments(self, low: float, high: float, pivot: float) -> tuple[float, float]:
        """Returns mean and population std; the arguments are lowest, highest and median entry."""
        ...


@dataclass(frozen=True, slots=True)
class SortedEntries:
    """A sorted copy.

    Attributes:
        finite: Finite entries, ascending.
    """

    finite: Array

    @property
    def num_finite(self) -> int:
        """Entries that are neither NaN nor infinite."""
        return self.finite.size

    @property
    def num_zero(self) -> int:
        """Entries that equal zero."""
        # A bare Python zero would make NumPy widen the whole array first.
        zero = self.finite.dtype.type(0)
        return int(self.finite.searchsorted(zero, "right") - self.finite.searchsorted(zero, "left"))

    def at(self, ranks: Sequence[int]) -> list[float]:
        """Returns the finite entries with these ranks."""
        return [self.finite[rank].item() for rank in ranks]

    def moments(self, low: float, high: float, pivot: float) -> tuple[float, float]:
        """Returns mean and population standard deviation."""
        return moments(chunks(self.finite), self.finite.size, low=low, high=high, pivot=pivot)


@dataclass(frozen=True, slots=True)
class CountedEntries:
    """How often each value occurs.

    Attributes:
        values: Values that occur, ascending, float64; zero and negative zero are two of them.
        counts: How often, int64.
        up_to: Running sum of the counts.
    """

    values: Array
    counts: Array
    up_to: Array

    @property
    def num_finite(self) -> int:
        """Entries that are neither NaN nor infinite."""
        return int(self.up_to[-1]) if self.up_to.size else 0

    @property
    def num_zero(self) -> int:
        """Entries that equal zero."""
        return int(self.counts[self.values == 0].sum())

    def at(self, ranks: Sequence[int]) -> list[float]:
        """Returns the finite entries with these ranks."""
        return self.values[self.up_to.searchsorted(np.asarray(ranks), "right")].tolist()

    def moments(self, low: float, high: float, pivot: float) -> tuple[float, float]:  # noqa: ARG002
        """Returns mean and population standard deviation."""
        return weighted_moments(self.values, self.counts, pivot=pivot)


@dataclass(frozen=True, slots=True)
class _Codes:
    """The finite values of a small dtype, ascending, and the bit patterns that mean them."""

    values: Array
    codes: Array


def sortable_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which NumPy sorts tensors of this one; the step there is exact."""
    return torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype


def sort_entries(tensor: torch.Tensor) -> SortedEntries:
    """Sorts a copy.

    Args:
        tensor: On the CPU, of a dtype that NumPy knows, or float16 or bfloat16. Peak scratch is one copy in
            `sortable_dtype`.
    """
    copy = torch.empty(tensor.shape, dtype=sortable_dtype(tensor.dtype), device="cpu")
    entries: Array = copy.copy_(tensor).view(-1).numpy()
    entries.sort()
    if entries.dtype.kind == "f" and not (np.isfinite(entries[0]) and np.isfinite(entries[-1])):
        # Ascending order is -inf, the finite entries, inf, NaN.
        infinity = entries.dtype.type(np.inf)
        first = entries.searchsorted(-infinity, "right")
        entries = entries[first : entries.searchsorted(infinity, "left")]
    return SortedEntries(entries)


def count_entries(tensor: torch.Tensor) -> CountedEntries:
    """Counts every bit pattern.

    Args:
        tensor: On the CPU, of a dtype of 8 or 16 bits. Peak scratch is about 10 MB.
    """
    bits = torch.uint8 if tensor.dtype.itemsize == 1 else torch.uint16
    by_code = np.zeros(1 << (8 * tensor.dtype.itemsize), dtype=np.int64)
    for piece in flat_pieces(tensor, _COUNT_PIECE):
        by_code += np.bincount(piece.view(bits).numpy(), minlength=by_code.size)
    known = _codes(tensor.dtype)
    counts = by_code[known.codes]
    occurs = counts.nonzero()[0]
    counts = counts[occurs]
    return CountedEntries(known.values[occurs], counts, counts.cumsum())


@lru_cache(maxsize=16)
def _codes(dtype: torch.dtype) -> _Codes:
    """Returns the finite values of a dtype of 8 or 16 bits with their bit patterns."""
    bits = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    if dtype is torch.bool:
        return _Codes(np.array([0.0, 1.0]), np.array([0, 1]))
    patterns = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32, device="cpu").to(bits)
    values: Array = patterns.view(dtype).to(torch.float64).numpy()
    codes = np.isfinite(values).nonzero()[0]
    codes = codes[values[codes].argsort(kind="stable")]
    return _Codes(values[codes], codes)
