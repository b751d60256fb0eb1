"""Mean and population standard deviation from shifted sums, in float64, without overflow.

With ``d = x - pivot`` for a pivot near the middle of the data, ``mean = pivot + sum(d)/n`` and
``variance = sum(d*d)/n - (sum(d)/n)**2``. The median lies within one standard deviation of the mean, so the
subtraction cancels at most half of the squares, and one pass over the data is as good as two; entries that
are all equal give exactly 0. Float64 data of extreme size is first divided by a power of two, which is
exact, so that squares neither overflow nor vanish.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "chunks", "moments", "weighted_moments"]

Array: TypeAlias = npt.NDArray[Any]
"""A NumPy array; its dtype is that of the tensor it came from."""

_CHUNK = 32_768
"""Entries that are widened to float64 at a time: they stay in the cache."""

_LARGE, _SMALL = 2.0**500, 2.0**-450
"""Beyond these a square leaves float64, or comes too near to its end for differences to keep their digits."""


def chunks(entries: Array) -> Iterable[Array]:
    """Yields a flat array in pieces that fit the cache."""
    for start in range(0, entries.size, _CHUNK):
        yield entries[start : start + _CHUNK]


def moments(
    pieces: Iterable[Array], num_entries: int, *, low: float, high: float, pivot: float
) -> tuple[float, float]:
    """Returns mean and population standard deviation.

    Args:
        pieces: All entries, finite, in pieces of one dtype.
        num_entries: Their number, at least 1.
        low: The lowest entry; a whole number where the dtype is one.
        high: The highest entry.
        pivot: The median entry.
    """
    exponent = _exponent(low, high)
    sums: list[float] = []
    squares: list[float] = []
    for piece in pieces:
        shifted = _shifted(piece, low, pivot, exponent)
        sums.append(float(shifted.sum()))
        np.multiply(shifted, shifted, out=shifted)
        squares.append(float(shifted.sum()))
    return _resolved(math.fsum(sums), math.fsum(squares), num_entries, pivot, exponent)


def weighted_moments(values: Array, counts: Array, *, pivot: float) -> tuple[float, float]:
    """Returns mean and population standard deviation of values that occur a number of times each.

    Args:
        values: float64, of a dtype of at most 16 bits, so that no square leaves float64.
        counts: How often each occurs; int64, at least 1 in all.
        pivot: The median entry.
    """
    shifted = values - pivot
    weighted = shifted * counts
    squares = weighted * shifted
    return _resolved(float(weighted.sum()), float(squares.sum()), int(counts.sum()), pivot, 0)


def _exponent(low: float, high: float) -> int:
    """Returns the power of two to divide by; 0, nearly always, for none."""
    if isinstance(low, int):
        return 0
    largest = max(abs(low), abs(high))
    return math.frexp(largest)[1] if largest > _LARGE or 0 < largest < _SMALL else 0


def _shifted(piece: Array, low: float, pivot: float, exponent: int) -> Array:
    """Returns a fresh float64 array of the distances from the pivot."""
    if piece.dtype.kind in "iu" and piece.dtype.itemsize == 8:
        # float64 cannot hold every entry, but the distance from the lowest one always fits uint64.
        distance = piece.view(np.uint64) - np.uint64(int(low) & 0xFFFF_FFFF_FFFF_FFFF)
        shifted = distance.astype(np.float64)
        shifted -= float(int(pivot) - int(low))
        return shifted
    shifted = piece.astype(np.float64)
    if exponent:
        np.ldexp(shifted, -exponent, out=shifted)
    shifted -= math.ldexp(pivot, -exponent)
    return shifted


def _resolved(
    total: float, total_squares: float, num_entries: int, pivot: float, exponent: int
) -> tuple[float, float]:
    """Returns mean and standard deviation from the sums of distances and of their squares."""
    offset = total / num_entries
    variance = max(total_squares / num_entries - offset * offset, 0.0)
    if exponent == 0:
        return pivot + offset, math.sqrt(variance)
    mean = math.ldexp(math.ldexp(pivot, -exponent) + offset, exponent)
    return mean, math.ldexp(math.sqrt(variance), exponent)
