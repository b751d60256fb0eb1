"""The facts of a tensor on an accelerator, as one packed tensor that is still there.

Everything here is queued on the device: no host read, no shape that depends on data, no copy from the host,
no operation that does one of these inside (``histc``, ``bincount``, ``quantile``, ``kthvalue``, boolean
indexing). It is written without Python indexing and ``~``, so that it also runs on fake tensors of a device
that the installed torch was not built for.

Order statistics come from a sort where its scratch fits. Larger tensors go through `radix_select`, whose
scratch is bounded, so that the result is exact at any size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch

from torchinstruments.records import Absent
from torchinstruments.statistics.contract import Packed
from torchinstruments.statistics.facts import QUARTERS, Facts, named_values
from torchinstruments.statistics.pieces import flat_pieces, without_repeats
from torchinstruments.statistics.radix import radix_select

__all__ = ["accumulation_dtype", "device_profile", "pack_profile", "working_dtype"]

_HALF_COUNT = 1 << 22
"""Counts travel as two numbers below this one each, which float32 holds exactly."""

_SCANNED_BYTES_EACH = 64
"""Scratch of `radix_select` and of the moments for each entry of a piece."""

_EXPONENT_FIELD = {torch.float64: (torch.int64, 52, 1023, 1000), torch.float32: (torch.int32, 23, 127, 120)}
"""For each accumulation dtype: the integer of its size, bits of the fraction, bias, largest scale used."""


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which entries are compared and sorted on a device; the step there is exact.

    uint64 is the exception: it is rounded to float64, for devices can do little else with it.
    """
    if dtype.is_floating_point:
        return dtype if dtype.itemsize > 1 else torch.float32
    unsigned = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.float64}
    return unsigned.get(dtype, torch.int16 if dtype.itemsize == 1 else dtype)


@lru_cache(maxsize=64)
def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Returns float64 where the device has it, else float32 (Apple's, some of Intel's)."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not getattr(torch.xpu.get_device_properties(device), "has_fp64", True):
        return torch.float32
    return torch.float64


def pack_profile(tensor: torch.Tensor, *, max_scratch_bytes: int) -> Packed:
    """Starts the nine statistics of a tensor on its device (training thread, hot path).

    Args:
        tensor: Detached and strided, of any real dtype and any shape.
        max_scratch_bytes: Bound of the memory that is allocated on the device meanwhile.
    """
    accumulate = accumulation_dtype(tensor.device)
    if tensor.numel() == 0:
        nothing = torch.zeros(0, dtype=accumulate, device=tensor.device)
        return Packed(nothing, partial(_finish, num_distinct=0, repeats=1))
    distinct, repeats = without_repeats(tensor)
    scalars = device_profile(distinct, repeats, accumulate=accumulate, max_scratch_bytes=max_scratch_bytes)
    return Packed(scalars, partial(_finish, num_distinct=distinct.numel(), repeats=repeats))


def device_profile(
    tensor: torch.Tensor, repeats: int, *, accumulate: torch.dtype, max_scratch_bytes: int
) -> torch.Tensor:
    """Returns the packed facts of a tensor, on its device.

    Args:
        tensor: At least one entry, none of them repeated by stride 0.
        repeats: How often each entry counts for the positions of the quartiles.
        accumulate: float64, or float32 where there is none.
        max_scratch_bytes: Bound of the scratch.

    Returns:
        14 numbers of dtype ``accumulate``: finite entries and zeros as two halves each, mean, standard
        deviation, and the order statistics: lowest, highest, and for each quartile those below and above.
    """
    dtype = working_dtype(tensor.dtype)
    # Flat copy, masked copy, sorted values and their int64 positions, and as much again for the sort itself.
    fits = tensor.numel() * (5 * dtype.itemsize + 16) <= max_scratch_bytes
    if fits:
        tensor = tensor.reshape(-1)
    num_piece = tensor.numel() if fits else max(1, max_scratch_bytes // _SCANNED_BYTES_EACH)
    num_finite = torch.zeros((), dtype=torch.int64, device=tensor.device)
    num_zero = num_finite
    for piece in flat_pieces(tensor, num_piece):
        entries = piece.to(dtype)
        num_finite = num_finite + torch.isfinite(entries).sum()
        num_zero = num_zero + (entries == 0).sum()
    ranks = _ranks(num_finite, repeats)

    def in_order() -> Iterator[torch.Tensor]:
        for piece in flat_pieces(tensor, num_piece):
            yield _nonfinite_last(piece.to(dtype))

    if fits:
        found = torch.sort(next(in_order())).values.index_select(0, ranks)
    else:
        found = radix_select(in_order, ranks, dtype)
    mean, std = _moments(tensor, num_piece, num_finite, found, accumulate)
    counts = torch.stack((*_halves(num_finite), *_halves(num_zero)))
    return torch.cat((counts.to(accumulate), torch.stack((mean, std)), found.to(accumulate)))


def _nonfinite_last(entries: torch.Tensor) -> torch.Tensor:
    """Returns the entries with everything that is not finite replaced by what sorts last."""
    if not entries.is_floating_point():
        return entries
    return entries.masked_fill(torch.logical_not(torch.isfinite(entries)), math.inf)


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


def _moments(
    tensor: torch.Tensor,
    num_piece: int,
    num_finite: torch.Tensor,
    found: torch.Tensor,
    accumulate: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and standard deviation by sums of distances from the median, as the host computes them."""
    dtype = found.dtype
    low, high, pivot = (found.narrow(0, index, 1).view(()) for index in (0, 1, 4))
    is_wide = not dtype.is_floating_point and dtype.itemsize == 8
    scale, unscale = _scales(low, high, accumulate)
    shift = pivot.to(accumulate) * scale
    # Where a difference of two entries cannot overflow int64 it is exact; float64 could not hold the entries.
    is_exact = high.to(accumulate) - low.to(accumulate) < 2.0**62
    total = torch.zeros((), dtype=accumulate, device=tensor.device)
    total_squares = total
    for piece in flat_pieces(tensor, num_piece):
        entries = piece.to(dtype)
        shifted = entries.to(accumulate) * scale - shift
        if is_wide:
            shifted = torch.where(is_exact, (entries - pivot).to(accumulate) * scale, shifted)
        if dtype.is_floating_point:
            shifted = shifted.masked_fill(torch.logical_not(torch.isfinite(entries)), 0.0)
        total = total + shifted.sum()
        total_squares = total_squares + (shifted * shifted).sum()
    # Never divides by zero: without a finite entry the counts say so, and nothing here is looked at.
    count = num_finite.clamp(min=1).to(accumulate)
    offset = total / count
    variance = (total_squares / count - offset * offset).clamp(min=0.0)
    return (shift + offset) * unscale, variance.sqrt() * unscale


def _scales(
    low: torch.Tensor, high: torch.Tensor, accumulate: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a power of two that brings the largest entry near 1, and the one that takes it back.

    Both are put together from bits, for no library's ``exp2`` or ``ldexp`` is exact on every device.
    """
    integer, fraction_bits, bias, limit = _EXPONENT_FIELD[accumulate]
    largest = torch.maximum(low.to(accumulate).abs(), high.to(accumulate).abs())
    exponent = torch.bitwise_right_shift(largest.view(integer), fraction_bits) - bias
    exponent = exponent.clamp(min=-limit, max=limit)
    scale = torch.bitwise_left_shift(bias - exponent, fraction_bits).view(accumulate)
    unscale = torch.bitwise_left_shift(bias + exponent, fraction_bits).view(accumulate)
    return scale, unscale


def _halves(count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a count as two numbers that float32 holds exactly, the higher half first."""
    high = torch.div(count, _HALF_COUNT, rounding_mode="floor")
    return high, count - high * _HALF_COUNT


def _finish(numbers: Sequence[float], *, num_distinct: int, repeats: int) -> Mapping[str, float | Absent]:
    """Returns the nine statistics from the packed numbers, on the host (writer thread)."""
    if num_distinct == 0:
        return named_values(Facts(0, 0, 0, 0.0, 0.0, 0.0, 0.0, ()))
    finite_high, finite_low, zero_high, zero_low, mean, std, low, high, *found = numbers
    num_finite = int(finite_high) * _HALF_COUNT + int(finite_low)
    num_zero = int(zero_high) * _HALF_COUNT + int(zero_low)
    facts = Facts(
        num_entries=num_distinct * repeats,
        num_zero=num_zero * repeats,
        num_nonfinite=(num_distinct - num_finite) * repeats,
        mean=mean,
        std=std,
        minimum=low,
        maximum=high,
        quartiles=tuple(zip(found[::2], found[1::2], strict=True)),
    )
    return named_values(facts)
