"""Order statistics from the bins of a histogram.

A histogram says in which bin a rank lies. With its bins cut into parts, as many as a byte has numbers for,
few entries share one with a rank, and they are collected by comparing bytes in place of entries. Where in its
bin a rank is follows from the counts as well, as nearly as the entries lie evenly there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchinstruments.statistics.counted_bins import (
    BLOCK,
    MAX_EDGES,
    Grid,
    code_counts,
    grid_of,
    is_held,
    with_ends,
)
from torchinstruments.statistics.interpolation import interpolated
from torchinstruments.statistics.moments import Array
from torchinstruments.statistics.selection import Selection, entries_of_true, room_for_mask, select
from torchinstruments.statistics.spare import borrowed

__all__ = ["select_among_bins"]

_LEAST_SPARED = 8
"""One entry of so many is collected at most: of more, a sample tells sooner which ones matter."""

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
    ways = np.arange(num_bins * num_parts + 1) / num_parts
    grid = grid_of(np.interp(ways, np.arange(edges.size), edges), float(low), float(high))
    if grid is None or _is_crowded(entries, grid, ranks):
        return None
    with borrowed(entries.size) as codes:
        counts = code_counts(entries, grid, codes)
        selection = _selected(entries, codes, grid, counts, ranks, (low, high))
    first = num_parts - 1 if grid.is_inside else 0
    below = counts.cumsum()[first : grid.edges.size : num_parts]
    return with_ends(entries, edges, float(high), grid, below), selection


def _is_crowded(entries: Array, grid: Grid, ranks: Sequence[int]) -> bool:
    """Returns whether the bins of ranks most likely hold too many entries."""
    looked_at = entries[:: max(entries.size // _NUM_LOOKED_AT, 1)].astype(np.float64)
    bins = np.sort(np.floor((looked_at - grid.anchor) / grid.width))
    wanted = bins[[rank * bins.size // entries.size for rank in ranks]]
    return int(np.count_nonzero(np.isin(bins, wanted))) * _LEAST_SPARED > 2 * bins.size


def _selected(
    entries: Array,
    codes: Array,
    grid: Grid,
    counts: Array,
    ranks: Sequence[int],
    ends: tuple[np.number[Any], np.number[Any]],
) -> Selection | None:
    """Returns the entries with these ranks; None where too many share a code with them."""
    up_to = counts.cumsum()
    by_code: dict[int, list[int]] = {}
    for rank, code in zip(ranks, up_to.searchsorted(ranks, "right").tolist(), strict=True):
        by_code.setdefault(code, []).append(rank)
    if sum([int(counts[code]) for code in by_code]) * _LEAST_SPARED > entries.size:
        return None
    nearby = _with_codes(entries, codes, list(by_code))
    by_rank: dict[int, np.number[Any]] = {}
    missed: dict[int, int] = {}
    num_before = 0
    for code, shared in by_code.items():
        number, start = int(counts[code]), int(up_to[code] - counts[code])
        places = {rank - start + num_before: rank for rank in shared}
        low = max(grid.anchor + code * grid.width, float(ends[0]))
        high = min(grid.anchor + (code + 1) * grid.width, float(ends[1]))
        found = interpolated(nearby, list(places), low, high, num_before, number)
        if found is None:
            missed |= places
        else:
            by_rank |= {places[place]: entry for place, entry in found.items()}
        num_before += number
    if missed:
        found = select(nearby, missed, *ends).by_rank
        by_rank |= {missed[place]: entry for place, entry in found.items()}
    return Selection(by_rank, _num_zero(nearby, list(by_code), grid, counts))


def _num_zero(nearby: Array, chosen: Sequence[int], grid: Grid, counts: Array) -> int | None:
    """Returns how many entries equal zero; None where the counts do not tell and they were not collected."""
    code = int(grid.edges.searchsorted(0.0, "right"))
    if code == grid.edges.size and counts[code + 1]:
        # They may be among the entries that rounding put behind the last bin.
        return None
    if code in chosen:
        return int(np.count_nonzero(nearby == nearby.dtype.type(0)))
    return None if counts[code] else 0


def _with_codes(entries: Array, codes: Array, chosen: Sequence[int]) -> Array:
    """Returns the entries that have one of the chosen codes."""
    collected: list[Array] = []
    room = room_for_mask(min(BLOCK, entries.size))
    with borrowed(2 * room) as memory:
        inside, equal = memory.view(np.bool_).reshape(2, room)
        for start in range(0, entries.size, BLOCK):
            found = codes[start : start + BLOCK]
            mask, other = inside[: found.size], equal[: found.size]
            np.equal(found, np.uint8(chosen[0]), out=mask)
            for code in chosen[1:]:
                np.logical_or(mask, np.equal(found, np.uint8(code), out=other), out=mask)
            collected.append(entries_of_true(entries[start : start + BLOCK], inside))
    return np.concatenate(collected)
