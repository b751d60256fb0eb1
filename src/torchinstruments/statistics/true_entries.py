"""Entries that a mask tells, where few of it are true and they stand anywhere."""

import numpy as np

from torchinstruments.statistics.moments import Array

__all__ = ["entries_of_true", "room_for_mask"]


def room_for_mask(size: int) -> int:
    """Returns how large a mask of so many entries must be for `entries_of_true`, which appends to it."""
    return size * 9 // 64 * 8 + 16


def entries_of_true(entries: Array, mask: Array) -> Array:
    """Returns the entries for which a mask is true; what it has behind them is overwritten.

    Eight are looked at together first, and those of which none is wanted are left out, unless there are so
    few that this rules out little.
    """
    size = entries.size
    whole = size - size % 8
    eights = mask[:whole].view(np.uint64)
    is_any = np.empty(room_for_mask(eights.size), np.bool_)
    np.not_equal(eights, 0, out=is_any[: eights.size])
    num_any = int(np.count_nonzero(is_any[: eights.size]))
    if num_any * 2 < eights.size:
        chosen = _places_of_true(is_any, eights.size, num_any)
        near = entries[:whole].reshape(-1, 8).take(chosen, axis=0).reshape(-1)
        found = near.take(eights.take(chosen).view(np.bool_).nonzero()[0])
        return found if size == whole else np.concatenate((found, entries[whole:][mask[whole:size]]))
    return entries.take(_places_of_true(mask, size, int(np.count_nonzero(mask[:size]))))


def _places_of_true(mask: Array, size: int, number: int) -> Array:
    """Returns where the first entries of a mask are true; what it has behind them is overwritten.

    NumPy looks for true ones without a branch only where they are more than a tenth, and otherwise jumps from
    one to the next, though no processor foresees where they stand: true ones are appended until it does not.

    Args:
        mask: As large as `room_for_mask` says.
        size: Entries of it.
        number: How many of them are true.
    """
    if number * 10 > size:
        return mask[:size].nonzero()[0]
    mask[size:] = True
    return mask[: size * 9 // 8 + 1].nonzero()[0][:number]
