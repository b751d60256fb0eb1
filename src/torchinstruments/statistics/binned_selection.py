"""Order statistics from the bins of a histogram.

A histogram says in which bin a rank lies. With its bins cut into parts, as many as a byte has numbers for,
few entries share one with a rank, and they are collected by comparing bytes in place of entries. Where in its
bin a rank is follows from the counts as well, as nearly as the entries lie evenly there.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from torchinstruments.statistics.coded_selection import LEAST_SPARED, Coded, select_coded
from torchinstruments.statistics.counted_bins import (
    MAX_EDGES,
    Grid,
    grid_of,
    is_held,
    with_ends,
    write_codes,
)
from torchinstruments.statistics.moments import Array
from torchinstruments.statistics.ordered import count_bytes
from torchinstruments.statistics.selection import Selection
from torchinstruments.statistics.spare import borrowed

__all__ = ["select_among_bins"]

_NUM_LOOKED_AT = 256
"""Entries that tell whether bins will hold too many."""


def select_among_bins(
    entries: Array, edges: Array, low: np.number[Any], high: np.number[Any], ranks: Sequence[int]
) -> tuple[Array, Selection | None] | None:
    """Returns how many entries stand below each edge, as `counted_bins`, and the entries with some ranks.

    Args:
        entries: Flat and finite, of a dtype that NumPy knows. Scratch is a byte for each, about an eighth of
            a copy, and 4 MB.
        edges: float64, ascending.
        low: The lowest entry.
        high: The highest entry.
        ranks: Ascending, from 0 to one less than there are entries; at least one.

    Returns:
        The counts, and the selection, or None in its place where the bins hold too many entries; None where
        that was to be expected, for what cannot be counted, and where all entries are equal.
    """
    num_bins = edges.size - 1
    num_parts = (MAX_EDGES - 1) // num_bins
    if low == high or num_parts == 0 or not is_held(entries.dtype):
        return None
    grid = grid_of(np.interp(*_ways(num_bins, num_parts), edges), float(low), float(high))
    if grid is None or _is_crowded(entries, grid, ranks):
        return None
    with borrowed(entries.size) as codes:
        write_codes(entries, grid, codes)
        counts = count_bytes(codes)[: grid.num_codes]
        coded = Coded(codes, counts, grid.anchor, grid.width, _zero_code(grid, counts))
        selection = select_coded(entries, coded, ranks, low, high)
    first = num_parts - 1 if grid.is_inside else 0
    below = counts.cumsum()[first : grid.edges.size : num_parts]
    return with_ends(entries, edges, float(high), grid, below), selection


@lru_cache(maxsize=16)
def _ways(num_bins: int, num_parts: int) -> tuple[Array, Array]:
    """Returns where the edges of parts lie, and those of bins, in bins."""
    return np.arange(num_bins * num_parts + 1) / num_parts, np.arange(num_bins + 1)


def _is_crowded(entries: Array, grid: Grid, ranks: Sequence[int]) -> bool:
    """Returns whether the bins of ranks most likely hold too many entries."""
    looked_at = entries[:: max(entries.size // _NUM_LOOKED_AT, 1)].astype(np.float64)
    bins = np.floor((looked_at - grid.anchor) / grid.width)
    bins.sort()
    wanted = list({bins.item(rank * bins.size // entries.size) for rank in ranks})
    number = bins.searchsorted(wanted, "right") - bins.searchsorted(wanted)
    return int(number.sum()) * LEAST_SPARED > 2 * bins.size


def _zero_code(grid: Grid, counts: Array) -> int | None:
    """Returns the code of zero; None where rounding may have put some zeros behind the last bin."""
    code = int(grid.edges.searchsorted(0.0, "right"))
    return None if code == grid.edges.size and counts[code + 1] else code
