"""What an audit counts in a tensor: signed nonfinite entries, zeros, subnormals, bounds, extremes.

The counts are whole numbers and the extremes are entries of the tensor, so nothing here is rounded: a tensor
goes through in pieces of bounded size, a float in its own dtype, an integer in one that holds it. Zeros and
subnormals are told by their bits, which a processor that flushes subnormals does not change.

Everything stays on the tensor's device as int64 until `read` copies what was collected, once a device. Call
all but `read` and `Scanned` inside `isolated`.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from torchinstruments.statistics.device import accumulation_dtype, working_dtype
from torchinstruments.statistics.device_bins import LOWEST, moved_down
from torchinstruments.statistics.pieces import flat_pieces, without_repeats

__all__ = ["Bounds", "DeviceScan", "Scanned", "dtype_range", "merged", "parts_of", "read", "scan"]

Bounds: TypeAlias = tuple[float | None, float | None]
"""A closed range; None for an open side."""

_PIECE = 1 << 20
"""Entries that are looked at at a time; the scratch is a few copies of so many."""

_NUM_COUNTS = 7
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FRACTION_BITS = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 3,
    torch.float8_e5m2: 2,
    torch.float8_e5m2fnuz: 2,
}
"""Of dtypes with a sign; float8_e8m0fnu has neither sign nor fraction, zero nor subnormals."""

_UNSIGNED_SHIFT = 2**63


@dataclass(frozen=True, slots=True)
class Scanned:
    """What was counted. Of a complex tensor the real and the imaginary parts were, as values apart.

    Attributes:
        num_values: Values that were looked at.
        num_nan: NaN among them.
        num_posinf: Positive infinities.
        num_neginf: Negative infinities.
        num_zero: Values that are zero, negative zero among them.
        num_subnormal: Values between zero and the dtype's smallest normal number.
        num_below: Values below the lower bound; 0 where there is none.
        num_above: Values above the upper bound.
        minimum: Lowest finite value; a whole number for integer dtypes, None where none is finite.
        maximum: Highest finite value.
        is_all_same: Whether all values are one finite value.
    """

    num_values: int
    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0
    num_zero: int = 0
    num_subnormal: int = 0
    num_below: int = 0
    num_above: int = 0
    minimum: float | None = None
    maximum: float | None = None
    is_all_same: bool = False

    @property
    def num_nonfinite(self) -> int:
        """NaN and infinities."""
        return self.num_nan + self.num_posinf + self.num_neginf

    @property
    def max_abs(self) -> float | None:
        """Largest finite magnitude; of int8 -128 it is 128."""
        if self.minimum is None or self.maximum is None:
            return None
        return max(abs(self.minimum), abs(self.maximum))


@dataclass(frozen=True, slots=True)
class DeviceScan:
    """What was counted, still on the device.

    Attributes:
        counts: int64, in the order of `Scanned`: three nonfinite kinds, zeros, subnormals, below, above.
        low: Lowest finite entry, 0-d; float64 (float32 where there is none) or int64.
        high: Highest finite entry.
        num_values: Entries that were looked at.
        is_unsigned: Whether ``low`` and ``high`` stand 2**63 too low, as those of uint64 do.
    """

    counts: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    num_values: int
    is_unsigned: bool = False

    def packed(self) -> torch.Tensor:
        """Returns everything as one int64 tensor, for `read`."""
        ends = torch.stack((self.low, self.high))
        if ends.dtype.is_floating_point:
            ends = ends.view(torch.int64 if ends.itemsize == 8 else torch.int32).to(torch.int64)
        return torch.cat((self.counts, ends))

    def unpacked(self, numbers: Sequence[int]) -> Scanned:
        """Returns what the packed numbers say, on the host.

        Args:
            numbers: What `read` returned for `packed`.
        """
        nan, posinf, neginf, zero, subnormal, below, above, *ends = numbers
        low, high = (self._end(code) for code in ends)
        has_finite = self.num_values > nan + posinf + neginf
        return Scanned(
            num_values=self.num_values,
            num_nan=nan,
            num_posinf=posinf,
            num_neginf=neginf,
            num_zero=zero,
            num_subnormal=subnormal,
            num_below=below,
            num_above=above,
            minimum=low if has_finite else None,
            maximum=high if has_finite else None,
            is_all_same=nan + posinf + neginf == 0 and low == high,
        )

    def _end(self, code: int) -> float:
        """Returns an extreme from its bits."""
        if self.low.dtype is torch.float64:
            return float(struct.unpack("=d", struct.pack("=q", code))[0])
        if self.low.dtype is torch.float32:
            return float(struct.unpack("=f", struct.pack("=i", code))[0])
        return code + _UNSIGNED_SHIFT if self.is_unsigned else code


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns a real tensor, or both parts of a complex one.

    Args:
        tensor: Detached, plain and strided.
    """
    if not tensor.is_complex():
        return (tensor,)
    return torch.view_as_real(tensor.resolve_conj()).unbind(-1)


def scan(tensor: torch.Tensor, bounds: Bounds = (None, None)) -> DeviceScan:
    """Counts on the tensor's device; nothing is read.

    Args:
        tensor: Detached, plain, strided and real, with at least one entry.
        bounds: Rounded to the tensor's dtype, and part of the range.
    """
    distinct, repeats = without_repeats(tensor)
    pieces = [_scan_piece(piece, bounds) for piece in flat_pieces(distinct, _PIECE)]
    counts, low, high = pieces[0]
    if len(pieces) > 1:
        counts = torch.stack([piece[0] for piece in pieces]).sum(0)
        low = torch.stack([piece[1] for piece in pieces]).amin()
        high = torch.stack([piece[2] for piece in pieces]).amax()
    counts = counts if repeats == 1 else counts * repeats
    wide = accumulation_dtype(tensor.device) if low.dtype.is_floating_point else torch.int64
    return DeviceScan(
        counts, low.to(wide), high.to(wide), tensor.numel(), is_unsigned=tensor.dtype is torch.uint64
    )


def read(packed: Sequence[torch.Tensor]) -> list[list[int]]:
    """Copies what was packed to the host, once a device.

    Args:
        packed: One-dimensional, int64.
    """
    numbers: list[list[int]] = [[] for _ in packed]
    by_device: dict[torch.device, list[int]] = {}
    for position, tensor in enumerate(packed):
        by_device.setdefault(tensor.device, []).append(position)
    for positions in by_device.values():
        flat: list[int] = torch.cat([packed[position] for position in positions]).tolist()
        start = 0
        for position in positions:
            numbers[position] = flat[start : start + packed[position].numel()]
            start += packed[position].numel()
    return numbers


def merged(scans: Sequence[Scanned]) -> Scanned:
    """Returns what several scans say together: of a tensor's parts, or of several tensors.

    Args:
        scans: At least one.
    """
    if len(scans) == 1:
        return scans[0]
    lows = [one.minimum for one in scans if one.minimum is not None]
    highs = [one.maximum for one in scans if one.maximum is not None]
    return Scanned(
        num_values=sum(one.num_values for one in scans),
        num_nan=sum(one.num_nan for one in scans),
        num_posinf=sum(one.num_posinf for one in scans),
        num_neginf=sum(one.num_neginf for one in scans),
        num_zero=sum(one.num_zero for one in scans),
        num_subnormal=sum(one.num_subnormal for one in scans),
        num_below=sum(one.num_below for one in scans),
        num_above=sum(one.num_above for one in scans),
        minimum=min(lows) if lows else None,
        maximum=max(highs) if highs else None,
        is_all_same=all(one.is_all_same for one in scans),
    )


def dtype_range(dtype: torch.dtype) -> tuple[float, float]:
    """Returns the lowest and the highest finite value of a dtype; of a complex one, of its parts."""
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        limits = torch.finfo(dtype)
        return limits.min, limits.max
    whole = torch.iinfo(dtype)
    return whole.min, whole.max


def _scan_piece(piece: torch.Tensor, bounds: Bounds) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the counts of a flat piece, int64, and its lowest and highest finite entry."""
    dtype = piece.dtype
    if dtype is torch.uint64:
        return _scan_integers(moved_down(piece.view(torch.int64)), _moved(_whole(bounds)), LOWEST)
    if not dtype.is_floating_point:
        return _scan_integers(piece.to(working_dtype(dtype)), _whole(bounds), 0)
    entries = piece.to(working_dtype(dtype))
    is_finite = torch.isfinite(entries)
    is_outside = torch.logical_not(is_finite)
    num_zero, num_subnormal = _by_bits(piece)
    num_nan = torch.isnan(entries).sum()
    if dtype in {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}:
        # Their only NaN has the bits of a negative zero, which they do not have.
        num_zero = num_zero - num_nan
    counts = [
        num_nan,
        (entries == math.inf).sum(),
        (entries == -math.inf).sum(),
        num_zero,
        num_subnormal,
        *_outside(entries, bounds),
    ]
    low = entries.masked_fill(is_outside, math.inf).amin()
    high = entries.masked_fill(is_outside, -math.inf).amax()
    return torch.stack(counts), low, high


def _scan_integers(
    entries: torch.Tensor, bounds: tuple[int | None, int | None], zero: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the same of whole numbers.

    Args:
        entries: int16, int32 or int64.
        bounds: Whole numbers.
        zero: What stands for zero.
    """
    none = torch.zeros((), dtype=torch.int64, device=entries.device)
    limits = torch.iinfo(entries.dtype)
    low, high = bounds
    below, above = none, none
    if low is not None and low > limits.min:
        below = none + entries.numel() if low > limits.max else (entries < low).sum()
    if high is not None and high < limits.max:
        above = none + entries.numel() if high < limits.min else (entries > high).sum()
    counts = [none, none, none, (entries == zero).sum(), none, below, above]
    return torch.stack(counts), entries.amin(), entries.amax()


def _by_bits(piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how many floats have the bits of a zero, and how many those of a subnormal number."""
    fraction_bits = _FRACTION_BITS.get(piece.dtype)
    if fraction_bits is None:
        none = torch.zeros((), dtype=torch.int64, device=piece.device)
        return none, none
    sign_free = (1 << (8 * piece.itemsize - 1)) - 1
    bits = torch.bitwise_and(piece.view(_INTEGER_OF_SIZE[piece.itemsize]), sign_free)
    num_zero = (bits == 0).sum()
    return num_zero, (bits < (1 << fraction_bits)).sum() - num_zero


def _outside(entries: torch.Tensor, bounds: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how many floats lie below and above bounds; NaN does neither."""
    none = torch.zeros((), dtype=torch.int64, device=entries.device)
    low, high = bounds
    reach = torch.finfo(entries.dtype).max
    # Where the dtype does not reach so far, infinities lie on the other side of a bound than finite entries.
    if low is not None:
        low = math.inf if low > reach else max(low, -reach)
    if high is not None:
        high = -math.inf if high < -reach else min(high, reach)
    return (
        none if low is None else (entries < _like(entries, low)).sum(),
        none if high is None else (entries > _like(entries, high)).sum(),
    )


def _like(entries: torch.Tensor, bound: float) -> torch.Tensor:
    """Returns a bound in the dtype of the entries."""
    return torch.full((), float(bound), dtype=entries.dtype, device=entries.device)


def _whole(bounds: Bounds) -> tuple[int | None, int | None]:
    """Returns the whole numbers between which a range lies."""
    low, high = bounds
    return None if low is None else math.ceil(low), None if high is None else math.floor(high)


def _moved(bounds: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """Returns bounds as `moved_down` moves the entries of uint64."""
    low, high = (None if bound is None else bound - _UNSIGNED_SHIFT for bound in bounds)
    return low, high
