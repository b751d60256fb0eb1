"""A sample of many entries, and the order of parts of it.

Which entries it has does not depend on what they are. They are spread over all, so that no period of the
entries is met and each stretch of them is in it by its share.
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from torchinstruments.statistics.moments import Array

__all__ = ["NUM_DEVIATIONS", "ROW_BYTES", "in_order", "num_sampled_of", "sampled_places", "scattered"]

_SAMPLE = 8192
"""Entries of a sample at most."""

ROW_BYTES = 2048
"""Of entries that NumPy sorts in registers, where it has a vectorised sort."""

_MAX_ROW = ROW_BYTES // 4
"""Entries that these bytes are at most."""

NUM_DEVIATIONS = 4.0
"""Half of the width of a bracket, in standard deviations of a rank in the sample."""


def num_sampled_of(num_entries: int) -> int:
    """Returns the size of a sample: as in the paper, a larger one would cost more than it saves."""
    number = min(_SAMPLE, math.floor(num_entries ** (2 / 3)))
    return number - number % _MAX_ROW if number >= 4 * _MAX_ROW else number


@lru_cache(maxsize=32)
def sampled_places(num_entries: int, number: int, row: int) -> Array:
    """Returns where to sample: in each of equal stretches, of which a row has some from everywhere."""
    stretches = np.arange(number)
    if number % row == 0:
        stretches = stretches.reshape(row, -1).T.ravel()
    return ((stretches + _offsets()[:number]) * (num_entries / number)).astype(np.intp)


@cache
def _offsets() -> Array:
    """Returns where in each of many equal stretches to sample: anywhere, so that no period is met."""
    return scattered(_SAMPLE)


def scattered(number: int) -> Array:
    """Returns float64 from 0 to below 1 as if they were drawn, and the same ones each time.

    They are hashes of the numbers from 0 on: importing NumPy's generators alone takes ten milliseconds.
    """
    bits = np.arange(1, number + 1, dtype=np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(factor)
    bits ^= bits >> np.uint32(16)
    return bits / 2.0**32


def in_order(sample: Array, spans: Sequence[tuple[int, int]]) -> list[Array]:
    """Returns what stands at stretches of places when a sample is sorted, or nearly that, each ascending.

    A sort is very fast as long as the registers of a processor hold all of it. So rows of that size are
    sorted, and for a stretch only what stands in each of them about where it would be. None of the results
    reaches into the next one.

    Args:
        sample: It is put into another order.
        spans: First places and those behind the last ones, ascending.
    """
    row = ROW_BYTES // sample.itemsize
    if sample.size >= 4 * row and sample.size % row == 0:
        rows = sample.reshape(-1, row)
        rows.sort(axis=1)
        stretches = [_stretch(rows, start, stop) for start, stop in spans]
        if all(one[-1] <= other[0] for one, other in pairwise(stretches)):
            return stretches
    sample.sort()
    return [sample[start:stop] for start, stop in spans]


def _stretch(rows: Array, start: int, stop: int) -> Array:
    """Returns what most likely stands at some places among all entries of sorted rows."""
    num_rows, size = rows.shape
    first, last = _window(num_rows, size, start, stop)
    window = rows[:, first:last].ravel()
    window.sort()
    return window[start - first * num_rows : stop - first * num_rows]


@lru_cache(maxsize=64)
def _window(num_rows: int, size: int, start: int, stop: int) -> tuple[int, int]:
    """Returns between which places of each row stands what is at some places among all entries."""
    share = (start + stop) / 2 / (num_rows * size)
    margin = NUM_DEVIATIONS * math.sqrt(size * share * (1.0 - share)) + 1.0
    return max(math.floor(start / num_rows - margin), 0), math.ceil(stop / num_rows + margin)
