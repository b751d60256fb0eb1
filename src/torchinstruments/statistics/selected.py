"""The finite entries of a large CPU tensor, asked for single ranks and counts instead of being sorted.

Every question is answered by comparisons, counts and sums in pieces that fit the cache. What a sort does in
one go takes a few passes here, but none of them lives on an instruction that only some processors have fast.
The answers are those of a sorted copy, to the last bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchinstruments.statistics.bins import sorted_counts
from torchinstruments.statistics.counted_bins import counted_bins
from torchinstruments.statistics.host_memory import NUMPY_DTYPES, as_array
from torchinstruments.statistics.moments import CHUNK, Array, Moments, moments
from torchinstruments.statistics.pieces import finite_pieces, replaced_pieces
from torchinstruments.statistics.selection import count_true, select

__all__ = ["SelectedEntries"]


class SelectedEntries:
    """Finite entries that are read again for every question.

    Args:
        tensor: On the CPU, of a dtype of 32 or 64 bits that NumPy knows, with at least one entry. It must not
            change while this object is in use. Peak scratch is a third of a copy for nearly all data, and
            one copy for the worst; one more where the tensor does not lie densely in memory, or has
            entries that are not finite.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._finite = _finite_copy(tensor) if not tensor.is_contiguous() else as_array(tensor.view(-1))
        self._low, self._high = _ends(self._finite)
        if not (np.isfinite(self._low) and np.isfinite(self._high)):
            self._finite = _finite_copy(tensor)
            self._low, self._high = _ends(self._finite)

    @property
    def num_finite(self) -> int:
        """Entries that are neither NaN nor infinite."""
        return self._finite.size

    @property
    def num_zero(self) -> int:
        """Entries that equal zero."""
        if self._low > 0 or self._high < 0:
            return 0
        return count_true(self._finite, np.equal, self._finite.dtype.type(0))

    def at(self, ranks: Sequence[int]) -> list[float]:
        """Returns the finite entries with these ranks."""
        last = self._finite.size - 1
        found: dict[int, Any] = {0: self._low, last: self._high}
        found |= select(self._finite, [rank for rank in ranks if 0 < rank < last], self._low, self._high)
        # Which of the two zeros a sort puts first is chance.
        return [found[rank].item() + 0 for rank in ranks]

    def up_to_edges(self, edges: Array) -> Array:
        """Returns how many finite entries stand below each edge, at or below the last one."""
        counts = counted_bins(self._finite, edges, float(self._low), float(self._high))
        return sorted_counts(np.sort(self._finite), edges) if counts is None else counts

    def moments(self, low: float, high: float, pivot: float) -> Moments:
        """Returns the moments."""
        is_finite = self._finite.size == self._tensor.numel()
        pieces = replaced_pieces(self._tensor, CHUNK, None if is_finite else pivot)
        return moments(pieces, self._finite.size, low=low, high=high, pivot=pivot)


def _ends(entries: Array) -> tuple[np.number[Any], np.number[Any]]:
    """Returns the lowest and the highest entry, NaN if there is one; zeros of no entries."""
    return (entries.min(), entries.max()) if entries.size else (entries.dtype.type(0), entries.dtype.type(0))


def _finite_copy(tensor: torch.Tensor) -> Array:
    """Returns the finite entries in an array of their own."""
    flat = np.empty(tensor.numel(), dtype=NUMPY_DTYPES[tensor.dtype])
    size = 0
    for piece in finite_pieces(tensor, CHUNK):
        flat[size : size + piece.size] = piece
        size += piece.size
    return flat[:size]
