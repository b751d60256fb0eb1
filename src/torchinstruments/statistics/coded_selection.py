"""Order statistics from codes of a byte.

A code says in which of up to 256 intervals an entry stands, so that how many entries have each code says in
which of them a rank is. What shares its code is collected by comparing bytes, and is little where intervals
are narrow about the ranks.

Of a moderate number of entries this is the quickest way to ranks: to make codes and count them takes about as
long as it takes to compare all entries with a few of them, and less is to be decided on the way.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from torchinstruments.statistics.drawn_sample import sampled_places
from torchinstruments.statistics.interpolation import Stretch, interpolated, sorted_few
from torchinstruments.statistics.moments import CHUNK, Array
from torchinstruments.statistics.ordered import count_bytes
from torchinstruments.statistics.selection import Selection, select
from torchinstruments.statistics.spare import borrowed
from torchinstruments.statistics.true_entries import entries_of_true, room_for_mask

__all__ = ["LEAST_SPARED", "MAX_CODED", "Coded", "select_by_codes", "select_coded"]

MAX_CODED = 3 << 16
"""Entries of more of which ranks are found sooner by comparisons with a few of them."""

LEAST_SPARED = 8
"""One entry of so many is collected at most: of more, a sample tells sooner which ones matter."""

_LEAST_BESIDE_ZERO = 32
"""One entry of so many is collected at most because zeros may be among them."""

_BLOCK = 4 * CHUNK
"""Entries that are collected at a time."""

_NUM_SAMPLED = 512
"""Entries that tell where intervals are wanted: as many as NumPy sorts in registers."""

_NUM_DEVIATIONS = 4.0
"""How far beyond the ranks there are intervals, in standard deviations of a rank in the sample."""

_LEAST_BEYOND = 16
"""One sampled entry of so many is beyond the intervals on each side, or fewer: the counts of codes that very
many entries have take twice as long."""

_LEAST_CROWDED = 48
"""One sampled entry of so many, on each side of a rank, is too many for a code: of three, one of eight."""

_LAST = 255
"""The highest code that a byte holds."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Codes of entries, of which a larger one has no lower code.

    Attributes:
        codes: uint8.
        counts: How many entries have each code; int64 or int32.
        anchor: About where code 0 begins.
        width: About the width of a code. The first code and the last one may be wider.
        zero_code: The code that zero has, or would have; None where that is not known.
    """

    codes: Array
    counts: Array
    anchor: float
    width: float
    zero_code: int | None


class _Span(NamedTuple):
    """Places in a sorted sample.

    Attributes:
        first: Below ranks and all between them, most likely.
        last: Above them.
        around: For each rank two places so far from it that what lies between them is too much for one code.
    """

    first: int
    last: int
    around: tuple[tuple[int, int], ...]


def select_by_codes(
    entries: Array, low: np.number[Any], high: np.number[Any], ranks: Sequence[int]
) -> Selection | None:
    """Returns the entries with some ranks.

    Args:
        entries: Flat and finite, of a floating-point dtype that NumPy knows. Scratch is a byte for each,
            about an eighth of a copy, and 1 MB.
        low: The lowest entry.
        high: The highest entry.
        ranks: Ascending, from 0 to one less than there are entries; at least one.

    Returns:
        The selection; None where too many entries share a code with ranks.
    """
    number = min(_NUM_SAMPLED, entries.size)
    sample = entries.take(sampled_places(entries.size, number, number))
    sample.sort()
    span = _span(entries.size, number, tuple(ranks))
    width = (sample[span.last] - sample[span.first]) / (_LAST - 1)
    scale = 1 / width
    if not 0 < scale < math.inf:
        return None
    for before, behind in span.around:
        if sample[behind] - sample[before] < width:
            return None
    # What is below the span has code 0, what is above it the last code.
    anchor = sample[span.first] - width
    places_bytes = entries.itemsize * min(CHUNK, entries.size)
    with borrowed(places_bytes + entries.size) as memory:
        places, codes = memory[:places_bytes].view(entries.dtype), memory[places_bytes:]
        for start in range(0, entries.size, CHUNK):
            # Each step leaves entries in their order.
            piece = entries[start : start + CHUNK]
            found = np.subtract(piece, anchor, out=places[: piece.size])
            np.multiply(found, scale, out=found)
            found.clip(0, _LAST, out=found)
            np.copyto(codes[start : start + CHUNK], found, casting="unsafe")
        zero_code = int(min(max(float((entries.dtype.type(0) - anchor) * scale), 0.0), _LAST))
        coded = Coded(codes, count_bytes(codes), float(anchor), float(width), zero_code)
        return select_coded(entries, coded, ranks, low, high)


@lru_cache(maxsize=64)
def _span(num_entries: int, number: int, ranks: tuple[int, ...]) -> _Span:
    """Returns where ranks and all between them lie most likely."""
    places = [(rank + 0.5) / num_entries * number for rank in ranks]
    below, above = [
        _NUM_DEVIATIONS * math.sqrt(place * (1.0 - place / number)) + 1.0 for place in (places[0], places[-1])
    ]
    beyond, few = number // _LEAST_BEYOND, number // _LEAST_CROWDED
    return _Span(
        first=min(max(int(places[0] - below), 0), beyond),
        last=max(min(int(places[-1] + above), number - 1), number - 1 - beyond),
        around=tuple(
            dict.fromkeys((max(int(place) - few, 0), min(int(place) + few, number - 1)) for place in places)
        ),
    )


def select_coded(
    entries: Array, coded: Coded, ranks: Sequence[int], low: np.number[Any], high: np.number[Any]
) -> Selection | None:
    """Returns the entries with some ranks; None where too many share a code with them.

    Args:
        entries: Flat and finite, of a dtype that NumPy knows.
        coded: Their codes.
        ranks: Ascending, from 0 to one less than there are entries; at least one.
        low: The lowest entry.
        high: The highest entry.
    """
    up_to: list[int] = coded.counts.cumsum().tolist()
    codes = [bisect_right(up_to, rank) for rank in ranks]
    zero_code, chosen = coded.zero_code, set(codes)
    num_zero = None if zero_code is None else int(coded.counts[zero_code])
    if zero_code is not None and num_zero and num_zero * _LEAST_BESIDE_ZERO < entries.size:
        chosen.add(zero_code)
    # By code: how many entries have lower ones and are not collected.
    skipped: dict[int, int] = {}
    num_collected = 0
    for code in sorted(chosen):
        start = up_to[code - 1] if code else 0
        skipped[code] = start - num_collected
        num_collected += up_to[code] - start
    if num_collected * LEAST_SPARED > entries.size:
        return None
    nearby = _with_codes(entries, coded.codes, list(skipped))
    ordered = sorted_few(nearby)
    if ordered is None:
        by_rank = _guessed(nearby, coded, dict(zip(ranks, codes, strict=True)), up_to, skipped, low, high)
    else:
        by_rank = {rank: ordered[rank - skipped[code]] for rank, code in zip(ranks, codes, strict=True)}
    if num_zero:
        num_zero = int(np.count_nonzero(nearby == 0)) if zero_code in skipped else None
    return Selection(by_rank, num_zero)


def _guessed(
    nearby: Array,
    coded: Coded,
    by_rank: Mapping[int, int],
    up_to: Sequence[int],
    skipped: Mapping[int, int],
    low: np.number[Any],
    high: np.number[Any],
) -> dict[int, np.number[Any]]:
    """Returns entries by their rank, from where they would be among those of their code if these lay evenly.

    Args:
        nearby: Entries of some codes.
        coded: The codes.
        by_rank: The code of each rank.
        up_to: For each code how many entries have none above it.
        skipped: For each code of these entries, how many others have lower ones.
        low: The lowest entry of all.
        high: The highest entry.
    """
    places = {rank: rank - skipped[code] for rank, code in by_rank.items()}
    by_code: dict[int, list[int]] = {}
    for rank, code in by_rank.items():
        by_code.setdefault(code, []).append(places[rank])
    stretches: list[Stretch] = []
    for code, shared in by_code.items():
        start = up_to[code - 1] if code else 0
        begin = coded.anchor + code * coded.width
        stretches.append(
            Stretch(
                ranks=shared,
                low=max(begin, float(low)) if code else float(low),
                high=min(begin + coded.width, float(high)) if code + 1 < len(up_to) else float(high),
                num_before=start - skipped[code],
                number=up_to[code] - start,
            )
        )
    found = interpolated(nearby, stretches)
    missed = [place for place in places.values() if place not in found]
    if missed:
        found |= select(nearby, missed, low, high).by_rank
    return {rank: found[place] for rank, place in places.items()}


def _with_codes(entries: Array, codes: Array, chosen: Sequence[int]) -> Array:
    """Returns the entries that have one of the chosen codes."""
    collected: list[Array] = []
    room = room_for_mask(min(_BLOCK, entries.size))
    with borrowed(2 * room) as memory:
        inside, equal = memory[:room].view(np.bool_), memory[room:].view(np.bool_)
        for start in range(0, entries.size, _BLOCK):
            found = codes[start : start + _BLOCK]
            mask, other = inside[: found.size], equal[: found.size]
            np.equal(found, np.uint8(chosen[0]), out=mask)
            for code in chosen[1:]:
                np.bitwise_or(mask, np.equal(found, np.uint8(code), out=other), out=mask)
            collected.append(entries_of_true(entries[start : start + _BLOCK], inside))
    return collected[0] if len(collected) == 1 else np.concatenate(collected)
