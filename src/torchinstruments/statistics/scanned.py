"""The finite entries of a large CPU tensor in order, without a sorted copy.

Every entry becomes an unsigned key whose order is that of the entries. The key at a given rank is found from
its most significant 16 bits down: count how often each value of these bits occurs, see in which one the rank
falls, and go on among the keys that begin with it. A 32-bit dtype takes two passes, a 64-bit one four; the
scratch is the same for any size.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from torchinstruments.statistics.bins import sorted_counts
from torchinstruments.statistics.host_memory import NUMPY_DTYPES
from torchinstruments.statistics.moments import Array, Moments, chunks, moments
from torchinstruments.statistics.pieces import finite_pieces

__all__ = ["ScannedEntries"]

_PIECE = 1 << 20
_DIGIT_BITS = 16
_DIGITS = 1 << _DIGIT_BITS


class ScannedEntries:
    """Finite entries that are read again for every question.

    Args:
        tensor: On the CPU, of a dtype of 32 or 64 bits that NumPy knows, with at least one entry. It must not
            change while this object is in use. Peak scratch is about 50 MB.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._bits = 8 * tensor.dtype.itemsize
        self._key_type = np.uint32 if self._bits == 32 else np.uint64
        num_finite, num_zero = 0, 0
        for piece in self._finite_pieces():
            num_finite += piece.size
            num_zero += piece.size - int(np.count_nonzero(piece))
        self._num_finite = num_finite
        self._num_zero = num_zero

    @property
    def num_finite(self) -> int:
        """Entries that are neither NaN nor infinite."""
        return self._num_finite

    @property
    def num_zero(self) -> int:
        """Entries that equal zero."""
        return self._num_zero

    def at(self, ranks: Sequence[int]) -> list[float]:
        """Returns the finite entries with these ranks."""
        prefixes = [0] * len(ranks)
        within = list(ranks)
        for shift in range(self._bits - _DIGIT_BITS, -1, -_DIGIT_BITS):
            up_to = {prefix: counts.cumsum() for prefix, counts in self._counts(set(prefixes), shift).items()}
            for position, (prefix, rank) in enumerate(zip(prefixes, within, strict=True)):
                running = up_to[prefix]
                digit = int(running.searchsorted(rank, "right"))
                prefixes[position] = (prefix << _DIGIT_BITS) | digit
                within[position] = rank - (int(running[digit - 1]) if digit else 0)
        keys = np.array(prefixes, dtype=self._key_type)
        # Zero, where a key is that of negative zero.
        return [entry + 0 for entry in self._entries(keys).tolist()]

    def up_to_edges(self, edges: Array) -> Array:
        """Returns how many finite entries stand below each edge, at or below the last one."""
        counts = np.zeros(edges.size, dtype=np.int64)
        for piece in self._finite_pieces():
            counts += sorted_counts(np.sort(piece), edges)
        return counts

    def moments(self, low: float, high: float, pivot: float) -> Moments:
        """Returns the moments."""
        pieces = (chunk for piece in self._finite_pieces() for chunk in chunks(piece))
        return moments(pieces, self._num_finite, low=low, high=high, pivot=pivot)

    def _finite_pieces(self) -> Iterator[Array]:
        """Yields the finite entries in flat pieces."""
        return finite_pieces(self._tensor, _PIECE)

    def _counts(self, prefixes: set[int], shift: int) -> dict[int, Array]:
        """Returns for each prefix how often each 16-bit digit follows it."""
        counts = {prefix: np.zeros(_DIGITS, dtype=np.int64) for prefix in prefixes}
        is_first = shift == self._bits - _DIGIT_BITS
        for piece in self._finite_pieces():
            keys = self._keys(piece)
            keys >>= self._key_type(shift)
            digits = (keys & self._key_type(_DIGITS - 1)).astype(np.int64)
            keys >>= self._key_type(_DIGIT_BITS)
            for prefix, of_prefix in counts.items():
                chosen = digits if is_first else digits[keys == self._key_type(prefix)]
                np.add(of_prefix, np.bincount(chosen, minlength=_DIGITS), out=of_prefix)
        return counts

    def _keys(self, entries: Array) -> Array:
        """Returns fresh unsigned keys in the order of the entries."""
        top = self._key_type(1 << (self._bits - 1))
        bits = entries.view(self._key_type)
        if entries.dtype.kind == "u":
            return bits.copy()
        if entries.dtype.kind == "i":
            return bits ^ top
        # Positive floats are in the order of their bits, negative ones in the opposite order and below.
        return np.where(bits & top, ~bits, bits | top)

    def _entries(self, keys: Array) -> Array:
        """Returns the entries of these keys."""
        top = self._key_type(1 << (self._bits - 1))
        dtype = NUMPY_DTYPES[self._tensor.dtype]
        if dtype.kind == "u":
            return keys
        if dtype.kind == "i":
            return (keys ^ top).view(dtype)
        return np.where(keys & top, keys ^ top, ~keys).view(dtype)
