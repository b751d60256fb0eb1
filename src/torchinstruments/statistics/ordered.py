"""The finite entries of a CPU tensor in order, in the cheapest of four forms.

* `SortedEntries`: NumPy's vectorised sort of one copy. On most processors it is ten to twenty times faster
  than torch's sort, and everything but mean and deviation follows from it by binary search.
* `SelectedEntries` (its own module): single ranks from samples and counts, for large tensors and for
  processors that sort slowly.
* `CountedEntries`: how often each of the 256 or 65,536 values of a small dtype occurs.
* `ScannedEntries` (its own module): several passes with bounded scratch, where a sorted copy would not fit.

Each knows its counts, answers for order statistics, counts what lies below the edges of a histogram, and
gives the moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from torchinstruments.statistics.bins import sorted_counts
from torchinstruments.statistics.host_memory import as_array
from torchinstruments.statistics.moments import CHUNK, Array, Moments, chunks, moments, weighted_moments
from torchinstruments.statistics.pieces import ONE_THREAD, flat_pieces, replaced_pieces

__all__ = [
    "CountedEntries",
    "MAX_NARROW_COUNT",
    "OrderedEntries",
    "SortedEntries",
    "count_bytes",
    "count_entries",
    "sort_entries",
    "sortable_dtype",
]

_COUNT_PIECE = 1 << 17
"""Entries counted at a time: they are widened to indices, which stay in the cache."""

_LOOK_EVERY = 101
"""One entry of so many, and its neighbour, tell how a piece is counted. A prime, so that no row length of a
tensor makes all of them fall upon the same column."""

_NUM_LOOKED_AT = 200
"""Entries that tell how bytes are counted."""

MAX_NARROW_COUNT = 1 << 31
"""Entries from which the count of one value could leave 32 bits."""

_PAIR_DTYPES = {1: np.dtype(np.uint16), 2: np.dtype(np.uint32)}
"""What holds two codes, by the bytes of one."""


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

    def up_to_edges(self, edges: Array) -> Array:
        """Returns how many finite entries stand below each edge, at or below the last one; int64."""
        ...

    def moments(self, low: float, high: float, pivot: float) -> Moments:
        """Returns the moments; the arguments are lowest, highest and median entry."""
        ...


@dataclass(frozen=True, slots=True)
class SortedEntries:
    """A sorted copy.

    Attributes:
        finite: Finite entries, ascending.
        tensor: The entries in no order, where they are of the same dtype. Sums are taken from them: in this
            order every form of a tensor gives the same last bit.
    """

    finite: Array
    tensor: torch.Tensor | None = None

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
        # Which of the two zeros a sort puts first is chance.
        return [self.finite[rank].item() + 0 for rank in ranks]

    def up_to_edges(self, edges: Array) -> Array:
        """Returns how many finite entries stand below each edge, at or below the last one."""
        return sorted_counts(self.finite, edges)

    def moments(self, low: float, high: float, pivot: float) -> Moments:
        """Returns the moments."""
        pieces = chunks(self.finite)
        if self.tensor is not None:
            is_finite = self.finite.size == self.tensor.numel()
            pieces = replaced_pieces(self.tensor, CHUNK, None if is_finite else pivot)
        return moments(pieces, self.finite.size, low=low, high=high, pivot=pivot)


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
        return (self.values[self.up_to.searchsorted(np.asarray(ranks), "right")] + 0.0).tolist()

    def up_to_edges(self, edges: Array) -> Array:
        """Returns how many finite entries stand below each edge, at or below the last one."""
        num_below = self.values.searchsorted(edges)
        num_below[-1] = self.values.searchsorted(edges[-1], "right")
        return np.concatenate((np.zeros(1, dtype=np.int64), self.up_to))[num_below]

    def moments(self, low: float, high: float, pivot: float) -> Moments:  # noqa: ARG002
        """Returns the moments."""
        return weighted_moments(self.values, self.counts, pivot=pivot)


@dataclass(frozen=True, slots=True)
class _Codes:
    """The finite values of a small dtype, and the bit patterns that mean them.

    Attributes:
        values: Ascending, float64.
        runs: Slices of bit patterns that give them in this order, one behind the other.
    """

    values: Array
    runs: tuple[slice, ...]


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
    return SortedEntries(entries, tensor if tensor.dtype is copy.dtype else None)


def count_entries(tensor: torch.Tensor) -> CountedEntries:
    """Counts every bit pattern.

    Args:
        tensor: On the CPU, of a dtype of 8 or 16 bits. Peak scratch is about 3 MB.
    """
    bits = np.dtype(np.uint8 if tensor.dtype.itemsize == 1 else np.uint16)
    # A table of half the bytes stays nearer to the processor.
    table_dtype = np.int32 if tensor.numel() < MAX_NARROW_COUNT else np.int64
    by_code = np.zeros(1 << (8 * tensor.dtype.itemsize), dtype=table_dtype)
    for piece in flat_pieces(tensor, _COUNT_PIECE):
        count_codes(by_code, as_array(piece, bits))
    known = _codes(tensor.dtype)
    counts = np.concatenate([by_code[run] for run in known.runs])
    occurs = np.flatnonzero(counts != 0)
    counts = counts.take(occurs).astype(np.int64)
    return CountedEntries(known.values.take(occurs), counts, counts.cumsum())


def count_codes(by_code: Array, codes: Array) -> None:
    """Adds to the table how often each code occurs in a piece.

    A processor adds to one place again only after it has added to it before, so that entries which repeat
    one that was counted just now cost up to twice as much as others. Where one value prevails, as zero does
    behind a ReLU or a dropout, most pairs of neighbours consist of it: they are known by one comparison, and
    only the others are counted. Where entries repeat their neighbour, as in sorted data, runs are.
    """
    left, right = codes[:-1:_LOOK_EVERY], codes[1::_LOOK_EVERY]
    num_equal = int(np.count_nonzero(left == right))
    if num_equal * 3 > left.size:
        middle = np.sort(left)[left.size // 2]
        if np.count_nonzero(left == middle) * 5 > left.size * 3:
            _count_beside(by_code, codes, middle)
            return
        if num_equal * 8 > left.size * 7:
            starts = np.concatenate((np.zeros(1, np.intp), np.flatnonzero(codes[1:] != codes[:-1]) + 1))
            lengths = np.diff(starts, append=codes.size)
            _add_counts(by_code, codes[starts], lengths.astype(by_code.dtype))
            return
    _add_counts(by_code, codes, np.ones(1, by_code.dtype))


def count_bytes(codes: Array) -> Array:
    """Returns how many entries of a flat uint8 array, at least one, have each of 256 codes; int64.

    torch counts bytes as they are, where NumPy makes indices of them first. It looks for the highest one
    before it counts, which is the only part of it that it would do in several threads, if it has them. Where
    entries repeat their neighbour two of them are counted at once.
    """
    every = codes.size // _NUM_LOOKED_AT + 1
    left, right = codes[:-1:every], codes[1::every]
    if int(np.count_nonzero(left == right)) * 6 > left.size:
        return _count_pairs(codes)
    step = ONE_THREAD if torch.get_num_threads() > 1 else codes.size
    counts = np.zeros(256, np.int64)
    for start in range(0, codes.size, step):
        piece = torch.from_numpy(codes[start : start + step])
        counts += torch.bincount(piece, minlength=256).numpy()
    return counts


def _count_pairs(codes: Array) -> Array:
    """Does the same by the pairs of neighbours."""
    table = np.zeros(1 << 16, dtype=np.int32 if codes.size < MAX_NARROW_COUNT else np.int64)
    num_paired = codes.size - codes.size % 2
    count_codes(table, codes[:num_paired].view(np.uint16))
    by_pair = table.reshape(256, 256)
    # What holds the counts of pairs holds their sums: without another dtype there is no copy.
    left, right = [np.add.reduce(by_pair, axis=axis, dtype=table.dtype) for axis in (1, 0)]
    counts: Array = left.astype(np.int64) + right
    counts[codes[num_paired:]] += 1
    return counts


def _count_beside(by_code: Array, codes: Array, prevailing: np.integer[Any]) -> None:
    """Adds a piece of which most entries have one code, by the pairs of neighbours that hold another."""
    num_paired = codes.size - codes.size % 2
    pair_dtype = _PAIR_DTYPES[codes.itemsize]
    pairs = codes[:num_paired].view(pair_dtype)
    others = pairs[np.flatnonzero(pairs != np.full(2, prevailing).view(pair_dtype))].view(codes.dtype)
    by_code[prevailing] += num_paired - others.size
    once = np.ones(1, by_code.dtype)
    _add_counts(by_code, others, once)
    _add_counts(by_code, codes[num_paired:], once)


def _add_counts(by_code: Array, codes: Array, counts: Array) -> None:
    """Adds counts, one for each code or one for all, to the places of the codes.

    torch's `index_add_` does so in one thread, in a loop that is shorter than that of `numpy.add.at`, and
    takes indices of 32 bits. `numpy.bincount` and torch's look for the highest value first, and make an array
    for each piece; torch's look is one of several threads.
    """
    indices = torch.from_numpy(codes.astype(np.int32))
    torch.from_numpy(by_code).index_add_(0, indices, torch.from_numpy(counts).expand(codes.size))


@lru_cache(maxsize=16)
def _codes(dtype: torch.dtype) -> _Codes:
    """Returns the finite values of a dtype of 8 or 16 bits with their bit patterns."""
    bits = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    if dtype is torch.bool:
        return _Codes(np.array([0.0, 1.0]), (slice(0, 2),))
    patterns = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32, device="cpu").to(bits)
    values: Array = patterns.view(dtype).to(torch.float64).numpy()
    codes = np.isfinite(values).nonzero()[0]
    codes = codes[values[codes].argsort(kind="stable")]
    return _Codes(values[codes], _runs(codes))


def _runs(codes: Array) -> tuple[slice, ...]:
    """Returns slices whose patterns, one behind the other, are these; a gather of each pattern is slower."""
    steps = np.diff(codes)
    runs: list[slice] = []
    start = 0
    while start < codes.size:
        step = -1 if start < steps.size and steps[start] == -1 else 1
        others = np.flatnonzero(steps[start:] != step)
        end = start + int(others[0]) + 1 if others.size else codes.size
        first, stop = int(codes[start]), int(codes[end - 1]) + step
        runs.append(slice(first, stop if stop >= 0 else None, step))
        start = end
    return tuple(runs)
