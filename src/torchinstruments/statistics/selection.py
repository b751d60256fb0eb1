"""Order statistics of many entries without sorting them.

A spread-out sample says between which two entries a rank most likely lies. One pass counts what is not above
the lower one and collects what lies between; the counts prove whether the rank is there. What was collected
is treated in the same way, until it is little enough. A sample that misled costs time, never a wrong number.
This is the algorithm SELECT of Floyd and Rivest (1975), with several ranks sharing a pass.

It needs comparisons and counts alone, which are fast on every processor.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from torchinstruments.statistics.moments import Array

__all__ = ["count_true", "scattered", "select"]

_SAMPLE = 8192
"""Entries of a sample at most."""

_ENOUGH = 12_000
"""Entries among which ranks are put into place without a further sample."""

_PIECE = 1 << 17
"""Entries that are compared at a time: they and their masks stay in the cache."""

_NUM_DEVIATIONS = 4.0
"""Half of the width of a bracket, in standard deviations of a rank in the sample."""

_RARE = 50
"""One true place of a mask among so many is rare."""


@dataclass(slots=True)
class _Bracket:
    """Two entries between which ranks lie, most likely; one and the same where that one prevails.

    Attributes:
        low: The lower end.
        high: The upper end.
        ranks: Ascending.
        num_at_most_low: Entries that are not above the lower end.
    """

    low: np.number[Any]
    high: np.number[Any]
    ranks: tuple[int, ...]
    num_at_most_low: int = 0


class _Ends:
    """Which ranks the ends of brackets have among entries; each count is made once."""

    def __init__(self, entries: Array) -> None:
        self._entries = entries
        self._counted: dict[tuple[np.ufunc, np.number[Any]], int] = {}

    def at(self, bracket: _Bracket, rank: int) -> np.number[Any] | None:
        """Returns the end of the bracket that has a rank, which lies not inside; None where none has."""
        if rank < bracket.num_at_most_low:
            return bracket.low if self._num_true(np.less, bracket.low) <= rank else None
        return bracket.high if self._num_true(np.less_equal, bracket.high) > rank else None

    def _num_true(self, compare: np.ufunc, value: np.number[Any]) -> int:
        """Returns how many entries compare true with a value."""
        if (compare, value) not in self._counted:
            self._counted[compare, value] = count_true(self._entries, compare, value)
        return self._counted[compare, value]


def select(
    entries: Array, ranks: Iterable[int], low: np.number[Any], high: np.number[Any]
) -> dict[int, np.number[Any]]:
    """Returns the entries with these ranks, by rank.

    Args:
        entries: Flat and finite, of any real dtype that NumPy knows; they are not changed. Peak scratch is
            one copy, and for nearly all data a third of it.
        ranks: From 0 to one less than there are entries.
        low: No entry is below; of the dtype of the entries, as the next one is.
        high: No entry is above.
    """
    found: dict[int, np.number[Any]] = {}
    # By rank among the entries that are left: the rank that was asked for.
    asked = {rank: rank for rank in ranks}
    if low == high:
        return dict.fromkeys(asked, low)
    while asked and entries.size > _ENOUGH:
        ends = _Ends(entries)
        brackets = _brackets(entries, sorted(asked), low, high)
        inside = _collect(entries, brackets)
        if inside is None:
            break
        left: dict[int, int] = {}
        num_before = 0
        for bracket in brackets:
            num_up_to = int(np.count_nonzero(inside < bracket.high))
            for rank in bracket.ranks:
                place = rank - bracket.num_at_most_low
                if 0 <= place < num_up_to - num_before:
                    left[num_before + place] = asked[rank]
                    continue
                value = ends.at(bracket, rank)
                if value is None:
                    return found | _in_place(entries, asked)
                found[asked[rank]] = value
            num_before = num_up_to
        entries, asked = inside, left
    return found | _in_place(entries, asked)


def count_true(entries: Array, compare: np.ufunc, value: np.number[Any]) -> int:
    """Returns how many of any number of flat entries compare true with a value of their dtype."""
    mask = np.empty(min(_PIECE, entries.size), dtype=np.bool_)
    number = 0
    for start in range(0, entries.size, _PIECE):
        piece = entries[start : start + _PIECE]
        number += int(np.count_nonzero(compare(piece, value, out=mask[: piece.size])))
    return number


def _brackets(
    entries: Array, ranks: Sequence[int], low: np.number[Any], high: np.number[Any]
) -> list[_Bracket]:
    """Returns brackets whose insides do not overlap, in ascending order; together they have all ranks."""
    num_sampled = min(_SAMPLE, entries.size // 8)
    places = (np.arange(num_sampled) + _offsets()[:num_sampled]) * (entries.size / num_sampled)
    sample = entries.take(places.astype(np.intp))
    spans: list[tuple[int, int, list[int]]] = []
    for rank in ranks:
        share = (rank + 0.5) / entries.size
        margin = _NUM_DEVIATIONS * math.sqrt(num_sampled * share * (1.0 - share)) + 1.0
        first = max(math.floor(share * num_sampled - margin), -1)
        last = min(math.ceil(share * num_sampled + margin), num_sampled)
        if spans and first <= spans[-1][1]:
            first, _, others = spans.pop()
            spans.append((first, last, [*others, rank]))
        else:
            spans.append((first, last, [rank]))
    ends = sorted({end for first, last, _ in spans for end in (first, last) if 0 <= end < num_sampled})
    if ends:
        sample.partition(ends)
    return [
        _Bracket(
            sample[first] if first >= 0 else low, sample[last] if last < num_sampled else high, tuple(shared)
        )
        for first, last, shared in spans
    ]


def _collect(entries: Array, brackets: Sequence[_Bracket]) -> Array | None:
    """Returns the entries inside of any bracket, and counts for each those not above its lower end.

    Returns:
        The entries; None where they are more than half of all, so that a further sample would not pay.
    """
    collected = [entries[:0]]
    num_collected = 0
    masks = np.empty((3, min(_PIECE, entries.size) * 9 // 8 + 1), dtype=np.bool_)
    wide = [bracket for bracket in brackets if bracket.low < bracket.high]
    for start in range(0, entries.size, _PIECE):
        piece = entries[start : start + _PIECE]
        chosen, before, inside = masks[:, : piece.size]
        for bracket in brackets:
            np.less_equal(piece, bracket.low, out=before)
            bracket.num_at_most_low += int(np.count_nonzero(before))
            if bracket in wide:
                mask = chosen if bracket is wide[0] else inside
                np.less(piece, bracket.high, out=mask)
                np.not_equal(mask, before, out=mask)
                if mask is inside:
                    np.logical_or(chosen, inside, out=chosen)
        if wide:
            collected.append(piece.take(_places(masks[0], piece.size)))
            num_collected += collected[-1].size
            if num_collected > entries.size // 2:
                return None
    return np.concatenate(collected)


def _places(mask: Array, size: int) -> Array:
    """Returns where the first entries of a mask are true; the others are overwritten.

    NumPy looks for the true ones without a branch where they are more than a tenth, and otherwise jumps from
    one to the next, which is faster only where they are rare: no processor foresees where they stand.
    """
    number = int(np.count_nonzero(mask[:size]))
    if size < number * _RARE and number * 10 <= size:
        mask[size:] = True
        return np.flatnonzero(mask[: size * 9 // 8 + 1])[:number]
    return np.flatnonzero(mask[:size])


def _in_place(entries: Array, asked: Mapping[int, int]) -> dict[int, np.number[Any]]:
    """Returns entries by the rank that was asked for, from a copy in which they are in place."""
    if not asked:
        return {}
    ordered = np.partition(entries, sorted(asked))
    return {wanted: ordered[rank] for rank, wanted in asked.items()}


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
