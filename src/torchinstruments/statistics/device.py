"""The facts of a tensor on an accelerator, and its histograms, as one packed tensor that is still there.

Everything here is queued on the device: no host read, no shape that depends on data, no copy from the host,
no operation that does one of these inside (``histc``, ``bincount``, ``quantile``, ``kthvalue``, boolean
indexing). It is written without Python indexing and ``~``, so that it also runs on fake tensors of a device
that the installed torch was not built for.

Order statistics come from a sort where its scratch fits, and the bins of a histogram from the same sort.
Larger tensors go through `radix_select`, whose scratch is bounded, so that the result is exact at any size.

It is exercised on CPU tensors for its numbers, on fake CUDA tensors, and on a pretended accelerator that
refuses whatever waits. It has not run on a GPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from torchinstruments.statistics.bins import Binned, BinRule
from torchinstruments.statistics.device_bins import (
    LOWEST,
    device_edges,
    device_float_ends,
    device_sorted_counts,
    entries_given,
    moved_down,
)
from torchinstruments.statistics.facts import EMPTY, QUARTERS, Facts
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.moments import NO_MOMENTS, resolve
from torchinstruments.statistics.pieces import flat_pieces, without_repeats
from torchinstruments.statistics.radix import radix_select

__all__ = ["PackedFacts", "accumulation_dtype", "pack_facts", "working_dtype"]

_HALF_COUNT = 1 << 22
"""Counts travel as two numbers below this one each, which float32 holds exactly."""

_SCANNED_BYTES_EACH = 64
"""Scratch of one entry of a piece, in `radix_select`, in the sort of a piece and in the moments."""

_EXPONENT_FIELD = {torch.float64: (torch.int64, 52, 1023, 1000), torch.float32: (torch.int32, 23, 127, 120)}
"""For each accumulation dtype: the integer of its size, bits of the fraction, bias, largest scale used."""

_NUM_FACTS = 10
"""Numbers before the order statistics: four halves of counts, two sums, pivot, exponent and both extremes."""


@dataclass(frozen=True, slots=True)
class PackedFacts:
    """The facts of a tensor that are still on its device.

    Attributes:
        scalars: One-dimensional, of the device's accumulation dtype.
        finish: Turns the numbers of ``scalars``, read on the host, into what was measured.
    """

    scalars: torch.Tensor
    finish: Callable[[Sequence[float]], Measured]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which entries are compared and sorted on a device; the step there is exact.

    uint64, with which devices can do little, goes to int64 moved down by 2**63 (`device_bins.moved_down`).
    """
    if dtype.is_floating_point:
        return dtype if dtype.itemsize > 1 else torch.float32
    unsigned = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
    return unsigned.get(dtype, torch.int16 if dtype.itemsize == 1 else dtype)


@lru_cache(maxsize=64)
def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Returns float64 where the device has it, else float32 (Apple's, some of Intel's)."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not getattr(torch.xpu.get_device_properties(device), "has_fp64", True):
        return torch.float32
    return torch.float64


def pack_facts(
    tensor: torch.Tensor,
    *,
    is_ordered: bool,
    rules: Sequence[BinRule] = (),
    max_scratch_bytes: int,
    accumulate: torch.dtype | None = None,
) -> PackedFacts:
    """Starts the measuring of a tensor on its device (training thread, hot path).

    Args:
        tensor: Detached and strided, of any real dtype and any shape.
        is_ordered: Whether quartiles are wanted. Without them, and without a histogram, nothing is sorted.
        rules: The histograms that are wanted.
        max_scratch_bytes: Bound of the memory that is allocated on the device meanwhile.
        accumulate: float64, or float32 where the device has no other; None for what the device has.
    """
    accumulate = accumulation_dtype(tensor.device) if accumulate is None else accumulate
    if tensor.numel() == 0:
        return PackedFacts(torch.zeros(0, dtype=accumulate, device=tensor.device), _nothing)
    distinct, repeats = without_repeats(tensor)
    is_ordered = is_ordered or bool(rules)
    entries = _Entries(distinct, accumulate, max_scratch_bytes, is_ordered=is_ordered)
    parts = entries.ordered(repeats, rules) if is_ordered else entries.unordered()
    finish = partial(
        _finish, num_distinct=distinct.numel(), repeats=repeats, is_ordered=is_ordered, rules=tuple(rules)
    )
    return PackedFacts(torch.cat([part.view(-1).to(accumulate) for part in parts]), finish)


class _Entries:
    """The entries of a tensor on a device, in pieces of a bounded size.

    Args:
        tensor: At least one entry, none of them repeated by stride 0.
        accumulate: float64, or float32 where there is none.
        max_scratch_bytes: Bound of the scratch.
        is_ordered: Whether entries will be sorted.
    """

    def __init__(
        self, tensor: torch.Tensor, accumulate: torch.dtype, max_scratch_bytes: int, *, is_ordered: bool
    ) -> None:
        self._dtype = working_dtype(tensor.dtype)
        self._is_moved = tensor.dtype is torch.uint64
        if self._is_moved:
            tensor = tensor.view(torch.int64)
        self._accumulate = accumulate
        num_entries = tensor.numel()
        # Flat copy, masked copy, sorted values and their int64 positions, and as much again for the sort.
        bytes_each = 5 * self._dtype.itemsize + 16 if is_ordered else _SCANNED_BYTES_EACH
        self._fits = num_entries * bytes_each <= max_scratch_bytes
        self._tensor = tensor.reshape(-1) if self._fits else tensor
        self._num_piece = num_entries if self._fits else max(1, max_scratch_bytes // _SCANNED_BYTES_EACH)
        self._num_finite = torch.zeros((), dtype=torch.int64, device=tensor.device)
        self._num_zero = self._num_finite
        for entries in self._pieces():
            self._num_finite = self._num_finite + torch.isfinite(entries).sum()
            self._num_zero = self._num_zero + (entries == (LOWEST if self._is_moved else 0)).sum()

    def ordered(self, repeats: int, rules: Sequence[BinRule]) -> list[torch.Tensor]:
        """Returns everything that an order of the entries gives, to be packed."""
        ranks = _ranks(self._num_finite, repeats)
        in_order = [torch.sort(next(self._nonfinite_last())).values] if self._fits else None
        if in_order is None:
            found = radix_select(self._nonfinite_last, ranks, self._dtype)
        else:
            found = in_order[0].index_select(0, ranks)
        low, high, pivot = (found.narrow(0, index, 1).view(()) for index in (0, 1, 4))
        quartiles = found.narrow(0, 2, 2 * len(QUARTERS))
        parts = [*self._facts(low, high, pivot), self._floats(quartiles)]
        ends = device_float_ends(low, high, self._accumulate, is_moved=self._is_moved)
        every_edges = [device_edges(rule, *ends) for rule in rules]
        counts = [torch.zeros(edges.shape, dtype=torch.int64, device=edges.device) for edges in every_edges]
        # Radix selection never holds an order as a whole: pieces are sorted one by one, and counts add up.
        for piece in (in_order or self._sorted_pieces()) if rules else ():
            counts = [
                count + device_sorted_counts(piece, edges, is_moved=self._is_moved)
                for count, edges in zip(counts, every_edges, strict=True)
            ]
        for edges, count in zip(every_edges, counts, strict=True):
            parts += [edges, *_halves(count)]
        return parts

    def unordered(self) -> list[torch.Tensor]:
        """Returns the facts that need no order, to be packed."""
        low, high = self._extremes()
        scale, unscale, _ = _scales(low.to(self._accumulate), high.to(self._accumulate))
        total = torch.zeros((), dtype=self._accumulate, device=low.device)
        for entries in self._pieces():
            total = total + _finite_or_zero(entries.to(self._accumulate) * scale, entries).sum()
        mean = total / self._count() * unscale
        if self._dtype.is_floating_point:
            return self._facts(low, high, mean)
        # A whole number near the mean, kept away from where the step to the integer is undefined.
        limit = 2.0 ** (8 * self._dtype.itemsize - 2)
        pivot = mean.clamp(min=-limit, max=limit).to(self._dtype)
        return self._facts(low, high, torch.maximum(torch.minimum(pivot, high), low))

    def _facts(self, low: torch.Tensor, high: torch.Tensor, pivot: torch.Tensor) -> list[torch.Tensor]:
        """Returns the first numbers of the packed tensor, with sums of distances from the pivot."""
        total, total_squares, shift, exponent = self._sums(low, high, pivot)
        counts = (*_halves(self._num_finite), *_halves(self._num_zero))
        return [*counts, total, total_squares, shift, exponent, self._floats(low), self._floats(high)]

    def _sums(
        self, low: torch.Tensor, high: torch.Tensor, pivot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns sums of distances and of their squares, the scaled pivot and the scale's exponent."""
        scale, _, exponent = _scales(self._floats(low), self._floats(high))
        shift = pivot.to(self._accumulate) * scale
        is_wide = not self._dtype.is_floating_point and self._dtype.itemsize == 8
        # Where a difference of two entries cannot overflow int64 it is exact; no float holds the entries.
        is_exact = high.to(self._accumulate) - low.to(self._accumulate) < 2.0**62
        total = torch.zeros((), dtype=self._accumulate, device=low.device)
        total_squares = total
        for entries in self._pieces():
            shifted = entries.to(self._accumulate) * scale - shift
            if is_wide:
                shifted = torch.where(is_exact, (entries - pivot).to(self._accumulate) * scale, shifted)
            shifted = _finite_or_zero(shifted, entries)
            total = total + shifted.sum()
            total_squares = total_squares + (shifted * shifted).sum()
        return total, total_squares, self._floats(pivot) * scale, exponent

    def _floats(self, entries: torch.Tensor) -> torch.Tensor:
        """Returns the nearest floats to some entries as they were given."""
        return (entries_given(entries) if self._is_moved else entries).to(self._accumulate)

    def _count(self) -> torch.Tensor:
        """Returns the finite entries as a divisor: 1 where there is none, when nothing of it is looked at."""
        return self._num_finite.clamp(min=1).to(self._accumulate)

    def _extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the lowest and the highest finite entry, without an order."""
        lows: list[torch.Tensor] = []
        highs: list[torch.Tensor] = []
        for entries in self._pieces():
            if entries.dtype.is_floating_point:
                is_outside = torch.logical_not(torch.isfinite(entries))
                lows.append(entries.masked_fill(is_outside, math.inf).amin())
                highs.append(entries.masked_fill(is_outside, -math.inf).amax())
            else:
                lows.append(entries.amin())
                highs.append(entries.amax())
        return torch.stack(lows).amin(), torch.stack(highs).amax()

    def _pieces(self) -> Iterator[torch.Tensor]:
        """Yields all entries in flat pieces of the working dtype."""
        for piece in flat_pieces(self._tensor, self._num_piece):
            yield moved_down(piece) if self._is_moved else piece.to(self._dtype)

    def _nonfinite_last(self) -> Iterator[torch.Tensor]:
        """Yields the same pieces with everything that is not finite replaced by what sorts last."""
        for entries in self._pieces():
            if entries.dtype.is_floating_point:
                yield entries.masked_fill(torch.logical_not(torch.isfinite(entries)), math.inf)
            else:
                yield entries

    def _sorted_pieces(self) -> Iterator[torch.Tensor]:
        """Yields these in order, each by itself."""
        for entries in self._nonfinite_last():
            yield torch.sort(entries).values


def _finite_or_zero(numbers: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Returns the numbers with zeros where the entry that they come from is not finite."""
    if not entries.dtype.is_floating_point:
        return numbers
    return numbers.masked_fill(torch.logical_not(torch.isfinite(entries)), 0.0)


def _ranks(num_finite: torch.Tensor, repeats: int) -> torch.Tensor:
    """Returns the 8 ranks that are asked for, int64, as `quartile_position` places them."""
    device = num_finite.device
    last = num_finite * repeats - 1
    quarters = torch.arange(QUARTERS[0], QUARTERS[-1] + 1, dtype=torch.int64, device=device)
    below = torch.div(last * quarters, 4, rounding_mode="floor")
    above = torch.minimum(below + 1, last)
    ends = torch.stack((torch.zeros_like(last), last))
    ranks = torch.cat((ends, torch.stack((below, above), dim=1).view(-1))).clamp(min=0)
    return torch.div(ranks, repeats, rounding_mode="floor")


def _scales(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a power of two that brings the largest entry near 1, the one that takes it back, its exponent.

    Both are put together from bits, for no library's ``exp2`` or ``ldexp`` is exact on every device.
    """
    accumulate = low.dtype
    integer, fraction_bits, bias, limit = _EXPONENT_FIELD[accumulate]
    largest = torch.maximum(low.abs(), high.abs())
    exponent = torch.bitwise_right_shift(largest.view(integer), fraction_bits) - bias
    exponent = exponent.clamp(min=-limit, max=limit)
    scale = torch.bitwise_left_shift(bias - exponent, fraction_bits).view(accumulate)
    unscale = torch.bitwise_left_shift(bias + exponent, fraction_bits).view(accumulate)
    return scale, unscale, exponent


def _halves(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns counts as two numbers each that float32 holds exactly, the higher halves first."""
    high = torch.div(counts, _HALF_COUNT, rounding_mode="floor")
    return high, counts - high * _HALF_COUNT


def _nothing(_numbers: Sequence[float]) -> Measured:
    """Returns what an empty tensor gives (writer thread)."""
    return Measured(EMPTY)


def _finish(
    numbers: Sequence[float], *, num_distinct: int, repeats: int, is_ordered: bool, rules: tuple[BinRule, ...]
) -> Measured:
    """Returns what was measured from the packed numbers, on the host (writer thread)."""
    finite_high, finite_low, zero_high, zero_low, total, squares, pivot, exponent, low, high = numbers[
        :_NUM_FACTS
    ]
    num_finite = int(finite_high) * _HALF_COUNT + int(finite_low)
    num_zero = int(zero_high) * _HALF_COUNT + int(zero_low)
    num_entries, num_nonfinite = num_distinct * repeats, (num_distinct - num_finite) * repeats
    if num_finite == 0:
        return Measured(Facts(num_entries, 0, num_nonfinite, NO_MOMENTS, 0.0, 0.0))
    first_bin = _NUM_FACTS + (2 * len(QUARTERS) if is_ordered else 0)
    found = numbers[_NUM_FACTS:first_bin]
    facts = Facts(
        num_entries=num_entries,
        num_zero=num_zero * repeats,
        num_nonfinite=num_nonfinite,
        moments=resolve(total, squares, num_finite, pivot, int(exponent)).repeated(repeats),
        minimum=low,
        maximum=high,
        quartiles=(*zip(found[::2], found[1::2], strict=True),),
    )
    binned = []
    for rule in rules:
        size = rule.num_bins + 1
        edges, halves_high, halves_low = np.array(numbers[first_bin : first_bin + 3 * size]).reshape(3, size)
        counts = halves_high.astype(np.int64) * _HALF_COUNT + halves_low.astype(np.int64)
        binned.append(Binned(edges, counts * repeats))
        first_bin += 3 * size
    return Measured(facts, tuple(binned))
