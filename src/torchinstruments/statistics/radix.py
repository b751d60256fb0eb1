"""Order statistics on a device with bounded scratch, from the most significant 16 bits down.

As `ScannedEntries` does it on the host, but for all ranks at once and without a host read: counts go through
``scatter_add_`` into one table for each rank, and the digit is looked up on the device. Entries that do not
begin with a rank's prefix are counted into slots behind the table, spread over many of them so that the
device's atomic additions do not queue up at one address.
"""

from collections.abc import Callable, Iterable

import torch

__all__ = ["entries_of_keys", "keys_of", "radix_select"]

_DIGIT_BITS = 16
_DIGITS = 1 << _DIGIT_BITS
_ELSEWHERE = 4096
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def radix_select(
    pieces: Callable[[], Iterable[torch.Tensor]], ranks: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the entries with these ranks in ascending order.

    Args:
        pieces: Called once for each 16 bits of the dtype; yields all entries, flat, without NaN.
        ranks: int64, one-dimensional, on the device of the entries.
        dtype: Of the entries: signed integer or floating point, 16 to 64 bits.

    Returns:
        Entries of ``dtype`` in the order of the ranks. Scratch is 64 bytes for each entry of a piece, and
        half a megabyte for each rank.
    """
    integer = _INTEGERS[dtype.itemsize]
    prefixes = torch.zeros_like(ranks)
    top_shift = 8 * dtype.itemsize - _DIGIT_BITS
    for shift in range(top_shift, -1, -_DIGIT_BITS):
        is_first = shift == top_shift
        num_tables = 1 if is_first else ranks.numel()
        counts = torch.zeros((num_tables, _DIGITS + _ELSEWHERE), dtype=torch.int64, device=ranks.device)
        for piece in pieces():
            keys = torch.bitwise_right_shift(keys_of(piece), shift)
            if is_first:
                _count(counts.select(0, 0), keys.to(torch.int64) + _DIGITS // 2)
            else:
                _count_by_prefix(counts, keys, prefixes)
        running = counts.narrow(1, 0, _DIGITS).cumsum(1).expand(ranks.numel(), _DIGITS)
        running = running.clone(memory_format=torch.contiguous_format)
        digits = torch.searchsorted(running, ranks.unsqueeze(1), right=True).clamp(max=_DIGITS - 1)
        before = running.gather(1, (digits - 1).clamp(min=0)).masked_fill(digits == 0, 0)
        ranks = ranks - before.view(-1)
        digits = digits.view(-1)
        if is_first:
            prefixes = digits - _DIGITS // 2
        else:
            prefixes = torch.bitwise_left_shift(prefixes, _DIGIT_BITS) + digits
    return entries_of_keys(prefixes.to(integer), dtype)


def _count(table: torch.Tensor, slots: torch.Tensor) -> None:
    """Adds one to the table for each slot."""
    table.scatter_add_(0, slots, torch.ones((1,), dtype=torch.int64, device=slots.device).expand_as(slots))


def _count_by_prefix(counts: torch.Tensor, keys: torch.Tensor, prefixes: torch.Tensor) -> None:
    """Counts for each rank the digits of those keys that begin with the prefix found so far."""
    heads = torch.bitwise_right_shift(keys, _DIGIT_BITS)
    digits = torch.bitwise_and(keys, _DIGITS - 1).to(torch.int64)
    elsewhere = torch.arange(keys.numel(), dtype=torch.int64, device=keys.device)
    elsewhere = torch.bitwise_and(elsewhere, _ELSEWHERE - 1) + _DIGITS
    for rank in range(counts.shape[0]):
        prefix = prefixes.narrow(0, rank, 1).to(keys.dtype)
        _count(counts.select(0, rank), torch.where(heads == prefix, digits, elsewhere))


def keys_of(entries: torch.Tensor) -> torch.Tensor:
    """Returns signed integers in the order of the entries, of 16 bits or more; they may share memory."""
    if not entries.is_floating_point():
        return entries
    return _turned(entries.view(_INTEGERS[entries.dtype.itemsize]))


def entries_of_keys(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the entries of these keys."""
    return _turned(keys).view(dtype) if dtype.is_floating_point else keys


def _turned(bits: torch.Tensor) -> torch.Tensor:
    """Turns the order of negative floats, whose bits ascend as they descend; it is its own inverse."""
    highest = torch.iinfo(bits.dtype).max
    sign = torch.bitwise_right_shift(bits, 8 * bits.dtype.itemsize - 1)
    return torch.bitwise_xor(bits, torch.bitwise_and(sign, highest))
