"""The finite entries of a large CPU tensor, asked for single ranks and counts instead of being sorted.

Every question is answered by comparisons, counts and sums in pieces that fit the cache. What a sort does in
one go takes a few passes here, but none of them lives on an instruction that only some processors have fast.
The answers are those of a sorted copy, to the last bit.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchinstruments.statistics.binned_selection import select_among_bins
from torchinstruments.statistics.bins import Binned, BinRule, edges_between, float_ends, sorted_counts
from torchinstruments.statistics.coded_selection import MAX_CODED, select_by_codes
from torchinstruments.statistics.counted_bins import counted_bins
from torchinstruments.statistics.host_memory import NUMPY_DTYPES, as_array
from torchinstruments.statistics.moments import CHUNK, Array, Moments, chunks, moments
from torchinstruments.statistics.pieces import finite_pieces, replaced, replaced_pieces
from torchinstruments.statistics.selection import Selection, count_true, select

__all__ = ["SelectedEntries"]


class SelectedEntries:
    """Finite entries that are read again for every question.

    Args:
        tensor: On the CPU, of a dtype of 32 or 64 bits that NumPy knows, with at least one entry. It must not
            change while this object is in use. Peak scratch is a third of a copy for nearly all data, and
            one copy for the worst; one more where the tensor does not lie densely in memory, and for the
            histogram of one that has entries that are not finite.
        rule: A histogram that will be asked for. Its bins tell where single ranks are.
    """

    def __init__(self, tensor: torch.Tensor, rule: BinRule | None = None) -> None:
        self._tensor = tensor
        self._rule = rule
        self._binned: Binned | None = None
        self._is_dense = tensor.is_contiguous()
        self._entries = as_array(tensor) if self._is_dense else _finite_copy(tensor)
        self._num_finite, self._num_before = self._entries.size, 0
        self._num_zero: int | None = None
        self._low, self._high = _ends(self._entries)
        if not (math.isfinite(self._low) and math.isfinite(self._high)):
            self._look_for_finite()

    def _look_for_finite(self) -> None:
        """Sets the numbers of finite entries and of those before them, and their ends."""
        num_finite = 0
        low, high = self._entries.dtype.type(np.inf), self._entries.dtype.type(-np.inf)
        flat = self._tensor.view(-1)
        memory = torch.empty(min(CHUNK, flat.numel()), dtype=flat.dtype, device="cpu")
        for start in range(0, self._entries.size, CHUNK):
            piece = self._entries[start : start + CHUNK]
            finite = np.isfinite(piece)
            number = int(np.count_nonzero(finite))
            if number == 0:
                continue
            if number < piece.size:
                other = piece[finite.argmax()].item()
                piece = as_array(replaced(flat.narrow(0, start, piece.size), other, memory))
            num_finite += number
            low, high = min(low, piece.min()), max(high, piece.max())
        self._num_before = count_true(self._entries, np.equal, self._entries.dtype.type(-np.inf))
        self._num_finite = num_finite
        self._low, self._high = (low, high) if num_finite else _ends(self._entries[:0])

    @property
    def num_finite(self) -> int:
        """Entries that are neither NaN nor infinite."""
        return self._num_finite

    @property
    def num_zero(self) -> int:
        """Entries that equal zero."""
        if self._low > 0 or self._high < 0:
            return 0
        if self._num_zero is None:
            self._num_zero = count_true(self._entries, np.equal, self._entries.dtype.type(0))
        return self._num_zero

    def at(self, ranks: Sequence[int]) -> list[float]:
        """Returns the finite entries with these ranks."""
        before, last = self._num_before, self._num_finite - 1
        inner = _inner_ranks(tuple(ranks), last)
        selection: Selection | None = None
        if inner and self._low < self._high:
            selection = self._selected_by_codes(inner)
        if selection is None:
            selection = select(self._entries, [rank + before for rank in inner], self._low, self._high)
        else:
            before = 0
        self._num_zero = selection.num_zero
        found: dict[int, Any] = {before: self._low, before + last: self._high, **selection.by_rank}
        # Which of the two zeros a sort puts first is chance.
        return [found[rank + before].item() + 0 for rank in ranks]

    def _selected_by_codes(self, ranks: Sequence[int]) -> Selection | None:
        """Selects among the finite entries by bins or other intervals; None where they do not help."""
        selection = None if self._rule is None else self._among_bins(ranks, self._rule)
        entries = self._entries
        if selection is None and self._num_finite == entries.size <= MAX_CODED and entries.dtype.kind == "f":
            selection = select_by_codes(entries, self._low, self._high, ranks)
        return selection

    def _among_bins(self, ranks: Sequence[int], rule: BinRule) -> Selection | None:
        """Counts a histogram and selects among the finite entries; None where its bins do not help."""
        ends: list[Any] = [self._low.item(), self._high.item()]
        low, high = float_ends(*ends)
        edges = edges_between(rule, low, high)
        found = select_among_bins(self._finite_entries(), edges, self._low, self._high, ranks)
        if found is None:
            return None
        up_to, selection = found
        self._binned = Binned(edges, up_to)
        return selection

    def up_to_edges(self, edges: Array) -> Array:
        """Returns how many finite entries stand below each edge, at or below the last one."""
        if self._binned is not None and (
            edges is self._binned.edges or np.array_equal(edges, self._binned.edges)
        ):
            return self._binned.up_to
        entries = self._finite_entries()
        counts = counted_bins(entries, edges, float(self._low), float(self._high))
        return sorted_counts(np.sort(entries), edges) if counts is None else counts

    def _finite_entries(self) -> Array:
        """Returns the finite entries, a copy where there are others."""
        return self._entries if self._num_finite == self._entries.size else _finite_copy(self._tensor)

    def moments(self, low: float, high: float, pivot: float) -> Moments:
        """Returns the moments."""
        is_finite = self._num_finite == self._tensor.numel()
        if is_finite and self._is_dense:
            pieces = chunks(self._entries)
        else:
            pieces = replaced_pieces(self._tensor, CHUNK, None if is_finite else pivot)
        return moments(pieces, self._num_finite, low=low, high=high, pivot=pivot)


@lru_cache(maxsize=64)
def _inner_ranks(ranks: tuple[int, ...], last: int) -> list[int]:
    """Returns the ranks that are not those of the ends, each once, ascending."""
    return sorted({rank for rank in ranks if 0 < rank < last})


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
