"""Mean, deviation and sums from distances to a pivot, in float64, without overflow.

With ``d = x - pivot`` for a pivot near the middle of the data, ``mean = pivot + sum(d)/n`` and
``variance = sum(d*d)/n - (sum(d)/n)**2``. The median lies within one standard deviation of the mean, so the
subtraction cancels at most half of the squares, and one pass over the data is as good as two; entries that
are all equal give exactly 0. Float64 data of extreme size is first divided by a power of two, which is
exact, so that squares neither overflow nor vanish.

The plain sums, of the entries and of their squares, follow from the same two: all terms of
``sum(x*x) = sum(d*d) + 2*pivot*sum(d) + n*pivot**2`` are of the size of the result, or smaller.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torchinstruments.statistics.spare import LINE_BYTES, borrowed

__all__ = [
    "CHUNK",
    "NO_MOMENTS",
    "Array",
    "Moments",
    "aligned_floats",
    "chunks",
    "exponent_of",
    "exponents_of",
    "moments",
    "resolve",
    "weighted_moments",
]

Array: TypeAlias = npt.NDArray[Any]
"""A NumPy array; its dtype is that of the tensor it came from."""

CHUNK = 65_536
"""Entries that are widened to float64 at a time: they stay in the cache."""

_LARGE, _SMALL = 2.0**500, 2.0**-450
"""Beyond these a square leaves float64, or comes too near to its end for differences to keep their digits."""


class Moments(NamedTuple):
    """Sums of entries and what follows from them. What float64 cannot hold is infinite.

    Attributes:
        mean: Mean.
        std: Population standard deviation.
        total: Sum of the entries.
        total_of_squares: Sum of their squares.
    """

    mean: float
    std: float
    total: float
    total_of_squares: float

    def repeated(self, repeats: int) -> "Moments":
        """Returns the moments of entries each of which counts a number of times."""
        if repeats == 1:
            return self
        return Moments(self.mean, self.std, self.total * repeats, self.total_of_squares * repeats)


NO_MOMENTS = Moments(0.0, 0.0, 0.0, 0.0)
"""Those of no entries at all."""


def chunks(entries: Array) -> Iterable[Array]:
    """Yields a flat array in pieces that fit the cache."""
    for start in range(0, entries.size, CHUNK):
        yield entries[start : start + CHUNK]


def moments(pieces: Iterable[Array], num_entries: int, *, low: float, high: float, pivot: float) -> Moments:
    """Returns the moments of entries.

    Args:
        pieces: All entries, finite, in pieces of one dtype.
        num_entries: Their number, at least 1.
        low: The lowest entry; a whole number where the dtype is one.
        high: The highest entry.
        pivot: A number near the middle, such as the median; a whole number where the dtype is one.
    """
    exponent = 0 if isinstance(low, int) else exponent_of(max(abs(low), abs(high)))
    is_plain = exponent == 0 and pivot == 0.0 and isinstance(low, float)
    sums: list[float] = []
    squares: list[float] = []
    total_of, multiply, copy = np.add.reduce, np.multiply, np.copyto
    with borrowed(8 * min(CHUNK, num_entries)) as block:
        memory = block.view(np.float64)
        for piece in pieces:
            if piece.size > memory.size:
                memory = aligned_floats(piece.size)
            shifted = memory[: piece.size]
            if is_plain:
                copy(shifted, piece)
            else:
                _shift(piece, shifted, low, pivot, exponent)
            sums.append(total_of(shifted))
            multiply(shifted, shifted, shifted)
            squares.append(total_of(shifted))
    scaled_pivot = math.ldexp(pivot, -exponent) if exponent else float(pivot)
    return resolve(math.fsum(sums), math.fsum(squares), num_entries, scaled_pivot, exponent)


def aligned_floats(number: int) -> Array:
    """Returns float64 memory of which no vector of a processor crosses the end of a cache line.

    NumPy's own begins 16 bytes into a line, which makes each pass over it a seventh slower.
    """
    memory = np.empty(8 * number + LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + 8 * number].view(np.float64)


def weighted_moments(values: Array, counts: Array, *, pivot: float) -> Moments:
    """Returns the moments of values that occur a number of times each.

    Args:
        values: float64, of a dtype of at most 16 bits, so that no square leaves float64.
        counts: How often each occurs; int64, at least 1 in all.
        pivot: The median entry.
    """
    shifted = values - pivot
    weighted = shifted * counts
    total = float(np.add.reduce(weighted))
    np.multiply(weighted, shifted, out=weighted)
    return resolve(total, float(np.add.reduce(weighted)), int(counts.sum()), pivot, 0)


def exponent_of(largest: float) -> int:
    """Returns the power of two to divide by; 0, nearly always, for none."""
    return math.frexp(largest)[1] if largest > _LARGE or 0 < largest < _SMALL else 0


def exponents_of(largest: Array) -> Array:
    """Returns the same for many numbers; int32."""
    is_extreme = (largest > _LARGE) | ((largest > 0) & (largest < _SMALL))
    if not is_extreme.any():
        return np.zeros(largest.size, dtype=np.int32)
    return np.where(is_extreme, np.frexp(largest)[1], 0).astype(np.int32)


def resolve(
    total: float, total_squares: float, num_entries: int, scaled_pivot: float, exponent: int
) -> Moments:
    """Returns the moments from sums of distances.

    Args:
        total: Sum of ``x / 2**exponent - scaled_pivot``.
        total_squares: Sum of the squares of these.
        num_entries: Their number, at least 1.
        scaled_pivot: The pivot, divided by the same power of two.
        exponent: The power of two.
    """
    offset = total / num_entries
    variance = max(total_squares / num_entries - offset * offset, 0.0)
    mean, std = scaled_pivot + offset, math.sqrt(variance)
    sum_entries = scaled_pivot * num_entries + total
    sum_squares = total_squares + 2.0 * scaled_pivot * total + scaled_pivot * scaled_pivot * num_entries
    if exponent == 0:
        return Moments(mean, std, sum_entries, sum_squares)
    return Moments(
        _scaled(mean, exponent),
        _scaled(std, exponent),
        _scaled(sum_entries, exponent),
        _scaled(sum_squares, 2 * exponent),
    )


def _scaled(number: float, exponent: int) -> float:
    """Returns the number times a power of two, infinite where that is too large."""
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)


def _shift(piece: Array, shifted: Array, low: float, pivot: float, exponent: int) -> None:
    """Writes the distances from the pivot into a float64 array."""
    if piece.dtype.kind in "iu" and piece.dtype.itemsize == 8:
        # float64 cannot hold every entry, but the distance from the lowest one always fits uint64.
        np.copyto(shifted, piece.view(np.uint64) - np.uint64(int(low) & 0xFFFF_FFFF_FFFF_FFFF), "unsafe")
        shifted -= float(int(pivot) - int(low))
        return
    np.copyto(shifted, piece)
    if exponent:
        np.ldexp(shifted, -exponent, out=shifted)
        shifted -= math.ldexp(pivot, -exponent)
    elif pivot:
        shifted -= pivot
