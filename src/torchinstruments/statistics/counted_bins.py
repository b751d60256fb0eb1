"""The counts of a histogram without an order of the entries.

Where an entry stands among evenly spaced edges follows from a subtraction and a multiplication. Both are
rounded, so that an entry next to an edge may come out on its wrong side. Since neither puts a larger entry
behind a smaller one, the two values of the dtype around each edge tell whether that can happen at all. Where
it can, entries whose distance from an edge is within the error are compared with the edge itself.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchinstruments.statistics.bins import first_values, sorted_counts, thresholds
from torchinstruments.statistics.moments import CHUNK, Array
from torchinstruments.statistics.ordered import count_bytes
from torchinstruments.statistics.selection import count_true
from torchinstruments.statistics.spare import borrowed

__all__ = ["MAX_EDGES", "Grid", "counted_bins", "grid_of", "is_held", "with_ends", "write_codes"]

_BLOCK = 4 * CHUNK
"""Entries whose codes are counted at a time."""

MAX_EDGES = 253
"""Edges whose numbers fit a byte, with one below and one above."""

_MAX_RATIO = 2.0**26
"""Size of the entries in widths of a bin, up to which a distance is right to a hundred-millionth of a bin."""

_NEAR = 1e-6
"""Share of a bin within which the side of an edge is decided by a comparison."""

_SCALE = 1.0 + 2.0**-50
"""An entry of float32 that lies on an edge does not fall short of it by rounding."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Edges that entries are placed among. The code of an entry is the number of them that are not above it.

    Attributes:
        edges: float64, evenly spaced; the first one lies a bin above the anchor.
        anchor: Place 0.
        width: Of a bin.
        is_inside: Whether all entries lie between the anchor and a bin above the last edge.
    """

    edges: Array
    anchor: float
    width: float
    is_inside: bool

    @property
    def num_codes(self) -> int:
        """Codes that can occur; rounding may put the highest entry behind the last bin."""
        return self.edges.size + 2


def counted_bins(entries: Array, edges: Array, low: float, high: float) -> Array | None:
    """Returns how many entries stand below each edge, at or below the last one; int64.

    Args:
        entries: Flat and finite, at least one, of a dtype that NumPy knows. Scratch is about 3 MB.
        edges: float64, ascending.
        low: The lowest entry.
        high: The highest entry.

    Returns:
        The counts, or None for integers that float64 does not hold, for more bins than a byte has numbers,
        for edges that are not evenly spaced, and for bins too narrow beside the size of the entries, or too
        wide for float64.
    """
    if not is_held(entries.dtype):
        return None
    if low == high:
        return sorted_counts(entries[:1], edges) * entries.size
    grid = grid_of(edges, low, high)
    if grid is None:
        return None
    counts = _code_counts(entries, grid)
    return with_ends(entries, edges, high, grid, counts.cumsum()[: grid.edges.size])


def is_held(dtype: np.dtype[Any]) -> bool:
    """Returns whether float64 holds every entry of a dtype."""
    return dtype.kind == "f" or dtype.itemsize < 8


def grid_of(edges: Array, low: float, high: float) -> Grid | None:
    """Returns where to place entries between two ends; None where places are not right to `_NEAR`."""
    width = (float(edges[-1]) - float(edges[0])) / (edges.size - 1)
    if edges.size > MAX_EDGES or not _is_ordinary(edges, width):
        return None
    if low >= edges[0] and high <= edges[-1]:
        return Grid(edges[1:-1], float(edges[0]), width, is_inside=True)
    return Grid(edges[:-1], float(edges[0]) - width, width, is_inside=False)


def with_ends(entries: Array, edges: Array, high: float, grid: Grid, below: Array) -> Array:
    """Returns the counts below all edges from those below the edges between the ends."""
    last = entries.size if high <= edges[-1] else _at_most(entries, float(edges[-1]))
    return np.concatenate((np.zeros(int(grid.is_inside), np.int64), below, np.array([last])))


def _is_ordinary(edges: Array, width: float) -> bool:
    """Returns whether places in bins can be computed to well within `_NEAR`."""
    size = max(abs(float(edges[0])), abs(float(edges[-1])))
    if not (1e-290 < width < math.inf and size <= width * _MAX_RATIO):
        return False
    return bool((np.abs((edges - edges[0]) / width - np.arange(edges.size)) < _NEAR / 4).all())


def _at_most(entries: Array, edge: float) -> int:
    """Returns how many entries are not above an edge."""
    if entries.dtype.kind != "f":
        return entries.size - int(np.count_nonzero(entries > edge))
    value = thresholds(np.array([edge]), entries.dtype)[0]
    return count_true(entries, np.less, value)


def write_codes(entries: Array, grid: Grid, codes: Array) -> None:
    """Writes the code of each entry.

    Args:
        entries: Flat and finite.
        grid: Where to place them.
        codes: uint8, as many.
    """
    _coder(grid, entries.dtype).write(entries, codes)


def _code_counts(entries: Array, grid: Grid) -> Array:
    """Returns how many entries have each code."""
    coder = _coder(grid, entries.dtype)
    counts = np.zeros(256, np.int64)
    with borrowed(min(_BLOCK, entries.size)) as codes:
        for start in range(0, entries.size, _BLOCK):
            block = entries[start : start + _BLOCK]
            coder.write(block, codes[: block.size])
            counts += count_bytes(codes[: block.size])
    return counts[: grid.num_codes]


def _coder(grid: Grid, dtype: np.dtype[Any]) -> "_Coder":
    """Returns what finds the codes of entries of a dtype."""
    places = _Places(grid.anchor, _SCALE / grid.width, math.inf if grid.is_inside else grid.edges.size + 0.5)
    return _Coder(grid, places, is_sure=places.tell_sides(grid.edges, dtype))


@dataclass(frozen=True, slots=True)
class _Coder:
    """Finds the codes of entries.

    Attributes:
        grid: The edges.
        places: Where entries stand among them.
        is_sure: Whether each entry comes out on its own side of each edge.
    """

    grid: Grid
    places: "_Places"
    is_sure: bool

    def write(self, entries: Array, codes: Array) -> None:
        """Writes the codes of entries."""
        with borrowed(9 * min(CHUNK, entries.size)) as memory:
            for start in range(0, entries.size, CHUNK):
                self._write_piece(entries[start : start + CHUNK], codes[start : start + CHUNK], memory)

    def _write_piece(self, piece: Array, codes: Array, memory: Array) -> None:
        """Writes the codes of a piece; the memory has nine bytes for each entry."""
        found = self.places.of(piece, memory[: 8 * piece.size].view(np.float64))
        if self.is_sure:
            np.copyto(codes, found, casting="unsafe")
            return
        above = memory[8 * piece.size : 9 * piece.size]
        found -= _NEAR
        np.copyto(codes, found, casting="unsafe")
        found += 2 * _NEAR
        np.copyto(above, found, casting="unsafe")
        unsure = np.flatnonzero(codes != above)
        if unsure.size:
            next_edge = np.concatenate((self.grid.edges, np.full(2, np.inf)))
            codes[unsure] += piece[unsure].astype(np.float64) >= next_edge[codes[unsure]]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where entries stand among edges, in bins; never further ahead for a smaller entry.

    Attributes:
        anchor: Place 0.
        scale: Bins in one unit of the entries.
        limit: Places beyond are moved here, and negative ones to 0; infinite where there are none.
    """

    anchor: float
    scale: float
    limit: float

    def of(self, entries: Array, out: Array) -> Array:
        """Returns the places in a float64 array."""
        np.copyto(out, entries)
        np.subtract(out, self.anchor, out=out)
        np.multiply(out, self.scale, out=out)
        if self.limit < math.inf:
            np.clip(out, 0.0, self.limit, out=out)
        return out

    def tell_sides(self, edges: Array, dtype: np.dtype[Any]) -> bool:
        """Returns whether every entry of a dtype comes out on its own side of each edge."""
        if dtype.kind == "f":
            first = first_values(edges, dtype)
            last = np.nextafter(first, dtype.type(-np.inf))
        else:
            first = np.ceil(edges)
            last = first - 1.0
        number = np.arange(1, edges.size + 1)
        at_edges = self.of(first, np.empty(edges.size))
        before = self.of(last, np.empty(edges.size))
        return bool((at_edges >= number).all() and (before < number).all())
