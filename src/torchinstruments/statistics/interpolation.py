"""Order statistics among entries that lie about evenly between some values.

How many of them are below tells about where a rank is. The few entries about there are put in order, and
counts prove whether the rank is among them. A guess that missed costs time, never a wrong number.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchinstruments.statistics.moments import Array

__all__ = ["Stretch", "interpolated", "sorted_few"]

_MAX_ENTRIES = 1 << 16
"""Of more entries it costs less to draw a sample than to look at all for each value."""

_MAX_SORTED = 4096
"""Entries of a stretch that are put in order at most."""

_FEW = 3000
"""Entries all of which are put in order, which takes less time than to guess."""

_UNEVENNESS = 0.01
"""Share of the entries by which a guess may be wrong because they do not lie evenly."""


class Stretch(NamedTuple):
    """Ranks between two values.

    Attributes:
        ranks: Ascending; between the two values, most likely.
        low: A value that the dtype can hold, fractions aside.
        high: Another one, not below.
        num_before: How many entries are below the two values.
        number: How many are between them; at least one.
    """

    ranks: Sequence[int]
    low: float
    high: float
    num_before: int
    number: int


def sorted_few(entries: Array) -> Array | None:
    """Returns a sorted copy; None of too many entries."""
    return np.sort(entries) if entries.size <= _FEW else None


def interpolated(entries: Array, stretches: Sequence[Stretch]) -> dict[int, np.number[Any]]:
    """Returns the entries with the ranks of stretches; without those of a stretch of which a guess missed.

    Args:
        entries: Flat and finite, of a dtype that NumPy knows.
        stretches: Of more than one none reaches into another.
    """
    if entries.size > _MAX_ENTRIES or (entries.dtype.kind != "f" and entries.dtype.itemsize == 8):
        return {}
    kind = entries.dtype.type
    is_wanted: Array | None = None
    hits: list[tuple[Stretch, np.number[Any], int]] = []
    for stretch in stretches:
        ranks, low, high, num_before, number = stretch
        # The deviation of a rank among evenly drawn ones is at most half of this root.
        margin = 2.0 / math.sqrt(number) + _UNEVENNESS
        first = max((ranks[0] - num_before) / number - margin, 0.0)
        last = min((ranks[-1] + 1 - num_before) / number + margin, 1.0)
        end = kind(low + first * (high - low))
        is_about = entries > end
        start = entries.size - int(np.count_nonzero(is_about))
        np.logical_and(is_about, entries <= kind(low + last * (high - low)), out=is_about)
        num_about = int(np.count_nonzero(is_about))
        if num_about <= _MAX_SORTED and start <= ranks[0] <= ranks[-1] < start + num_about:
            hits.append((stretch, end, start))
            is_wanted = is_about if is_wanted is None else np.logical_or(is_wanted, is_about, out=is_wanted)
    if is_wanted is None:
        return {}
    ordered = np.sort(entries.take(is_wanted.nonzero()[0]))
    found: dict[int, np.number[Any]] = {}
    for stretch, end, start in hits:
        place = int(ordered.searchsorted(end, "right")) - start
        for rank in stretch.ranks:
            found[rank] = ordered[place + rank]
    return found
