"""Order statistics among entries that lie about evenly between two values.

How many of them are below tells about where a rank is. The few entries about there are put in order, and
counts prove whether the rank is among them. A guess that missed costs time, never a wrong number.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchinstruments.statistics.moments import Array

__all__ = ["interpolated"]

_MAX_ENTRIES = 1 << 16
"""Of more entries it costs less to draw a sample than to look at all for each value."""

_MAX_SORTED = 4096
"""Entries that are put in order at most."""

_UNEVENNESS = 0.01
"""Share of the entries by which a guess may be wrong because they do not lie evenly."""


def interpolated(
    entries: Array, ranks: Sequence[int], low: float, high: float, num_before: int, number: int
) -> dict[int, np.number[Any]] | None:
    """Returns the entries with these ranks; None where a guess missed, and of too many entries.

    Args:
        entries: Flat and finite, of a dtype that NumPy knows.
        ranks: Ascending; between the two values, most likely.
        low: A value that the dtype can hold, fractions aside.
        high: Another one, not below.
        num_before: How many entries are below the two values.
        number: How many are between them; at least one.
    """
    if entries.size > _MAX_ENTRIES or (entries.dtype.kind != "f" and entries.dtype.itemsize == 8):
        return None
    # The deviation of a rank among evenly drawn ones is at most half of this root.
    margin = 2.0 / math.sqrt(number) + _UNEVENNESS
    first = max((ranks[0] - num_before) / number - margin, 0.0)
    last = min((ranks[-1] + 1 - num_before) / number + margin, 1.0)
    kind = entries.dtype.type
    is_above = entries > kind(low + first * (high - low))
    start = entries.size - int(np.count_nonzero(is_above))
    is_about = np.logical_and(is_above, entries <= kind(low + last * (high - low)), out=is_above)
    about = np.flatnonzero(is_about)
    if about.size > _MAX_SORTED or not start <= ranks[0] <= ranks[-1] < start + about.size:
        return None
    ordered = np.sort(entries.take(about))
    return {rank: ordered[rank - start] for rank in ranks}
