"""Order statistics of many entries without sorting them.

A spread-out sample says between which two entries a rank most likely lies. Where that would still be many
entries, one pass counts how many are not above the likeliest entry, which says on which side of it the rank
lies and how far off. A pass then collects what lies between; the counts prove whether the rank is there. What
was collected is treated in the same way, until it is little enough or the ranks are where they are guessed to
be. A sample that misled costs time, never a wrong number. This is the algorithm SELECT of Floyd and Rivest
(1975), with several ranks sharing a pass.

It needs comparisons and counts alone, which are fast on every processor.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from torchinstruments.statistics.drawn_sample import (
    NUM_DEVIATIONS,
    ROW_BYTES,
    in_order,
    num_sampled_of,
    sampled_places,
)
from torchinstruments.statistics.interpolation import Stretch, interpolated, sorted_few
from torchinstruments.statistics.moments import Array
from torchinstruments.statistics.spare import SPARE_BYTES, borrowed
from torchinstruments.statistics.true_entries import entries_of_true, room_for_mask

__all__ = ["Selection", "count_true", "select"]

_ENOUGH = 12_000
"""Entries among which ranks are put into place without a further sample."""

_PIECE = 1 << 19
"""Entries that are compared at a time: they and their masks stay in the cache."""

_NUM_NEAR_DEVIATIONS = 3.0
"""The same for a bracket around a rank whose distance is known; where it is missed, the wide one is taken."""


@dataclass(slots=True)
class _Bracket:
    """Two entries between which ranks lie, most likely; one and the same where that one prevails.

    Attributes:
        low: The lower end.
        high: The upper end.
        ranks: Ascending.
        sampled: The entries of the sample from the lower end to the upper one, ascending.
        place: Where in the sample the middle one of the ranks lies most likely.
        pivot: An end, or an entry between them, which was counted up to; None where none was.
        num_at_most_low: Entries that are not above the lower end; with a pivot at first those not above it,
            or not in the bracket and below it.
        up_to: Tells by the upper end what is not above the bracket. The upper end itself is inside only where
            it is the pivot, so that the comparisons of the count serve again.
        parity: What the count left behind; the same for all brackets.
    """

    low: np.number[Any]
    high: np.number[Any]
    ranks: tuple[int, ...]
    sampled: Array
    place: int
    pivot: np.number[Any] | None = None
    num_at_most_low: int = 0
    up_to: np.ufunc = np.less
    parity: "_Parity | None" = None

    @property
    def is_wide(self) -> bool:
        """Whether anything can be inside."""
        return bool(self.low < self.high)


class _Span(NamedTuple):
    """A stretch of a sorted sample between whose ends ranks lie, most likely.

    Attributes:
        first: Place of the lower end.
        stop: One behind the place of the upper end.
        ranks: Ascending.
        place: Where in the stretch the middle one of the ranks lies most likely.
        is_lowest: Whether the ranks may lie before the sample.
        is_highest: Whether they may lie behind it.
    """

    first: int
    stop: int
    ranks: tuple[int, ...]
    place: int
    is_lowest: bool
    is_highest: bool


_Comparison: TypeAlias = tuple[np.ufunc, np.number[Any]]
"""With a value."""


@dataclass(frozen=True, slots=True)
class _Parity:
    """What some comparisons say of each entry, in one bit.

    Attributes:
        comparisons: Each of them once.
        is_odd: For each entry whether an odd number of them is true.
    """

    comparisons: frozenset[_Comparison]
    is_odd: Array


@dataclass(frozen=True, slots=True)
class Selection:
    """What is known of entries after ranks were selected.

    Attributes:
        by_rank: The entries by their rank.
        num_zero: Entries that equal zero; None where counting them would have cost a pass.
    """

    by_rank: Mapping[int, np.number[Any]]
    num_zero: int | None = None


class _Ends:
    """Which ranks the ends of brackets have among entries; each count is made once.

    Args:
        entries: Flat.
        memory: Takes the parity of a count, for as long as it is used.
    """

    def __init__(self, entries: Array, memory: Array) -> None:
        self._entries = entries
        self._memory = memory
        self._counted: dict[_Comparison, int] = {}

    def at(self, bracket: _Bracket, rank: int) -> np.number[Any] | None:
        """Returns the end of the bracket that has a rank, which lies not inside; None where none has."""
        if rank < bracket.num_at_most_low:
            self._counted[np.less_equal, bracket.low] = bracket.num_at_most_low
            return bracket.low if self.num_true(np.less, bracket.low) <= rank else None
        return bracket.high if self.num_true(np.less_equal, bracket.high) > rank else None

    def num_true(self, compare: np.ufunc, value: np.number[Any]) -> int:
        """Returns how many entries compare true with a value."""
        if (compare, value) not in self._counted:
            self._counted[compare, value] = count_true(self._entries, compare, value)
        return self._counted[compare, value]

    def count(self, compare: np.ufunc, values: Sequence[np.number[Any]]) -> _Parity | None:
        """Counts how many entries compare true with each value, in one pass.

        Returns:
            The parity of these comparisons; None where the memory is too small for it.
        """
        is_odd = self._memory if self._memory.size >= self._entries.size else None
        distinct = tuple(dict.fromkeys(values))
        numbers = _numbers_true(self._entries, compare, distinct, is_odd)
        comparisons = [(compare, value) for value in distinct]
        self._counted |= dict(zip(comparisons, numbers, strict=True))
        return None if is_odd is None else _Parity(frozenset(comparisons), is_odd)

    def num_equal(self, value: np.number[Any]) -> int | None:
        """Returns how many entries equal a value, where that was counted."""
        at_most, below = [self._counted.get((compare, value)) for compare in (np.less_equal, np.less)]
        return None if at_most is None or below is None else at_most - below


def select(entries: Array, ranks: Iterable[int], low: np.number[Any], high: np.number[Any]) -> Selection:
    """Returns the entries with these ranks.

    Args:
        entries: Flat, of any real dtype that NumPy knows; they are not changed. Peak scratch is one copy,
            and for nearly all data a third of it.
        ranks: From 0 to one less than there are entries, among them all: negative infinity stands before
            numbers, infinity and NaN behind them. No rank of those is asked for.
        low: No finite entry is below; of the dtype of the entries, as the next one is.
        high: No finite entry is above.
    """
    found: dict[int, np.number[Any]] = {}
    # By rank among the entries that are left: the rank that was asked for.
    asked = {rank: rank for rank in ranks}
    everything = entries
    if low == high:
        return Selection(dict.fromkeys(asked, low))
    num_zero: int | None = None
    is_near = True
    while asked and entries.size > _ENOUGH:
        with borrowed(min(entries.size, SPARE_BYTES)) as memory:
            ends = _Ends(entries, memory.view(np.bool_))
            brackets = _brackets(entries, sorted(asked), low, high)
            is_near = is_near and _narrow_all(brackets, ends, entries.size)
            inside = _collect(entries, brackets)
        located = None if inside is None else _locate(brackets, inside, ends)
        if inside is None or located is None:
            if not is_near:
                break
            is_near = False
            continue
        if entries is everything:
            num_zero = _num_zero(brackets, inside, ends)
        places, values = located
        found |= {asked[rank]: value for rank, value in values.items()}
        asked, is_near = {place: asked[rank] for rank, place in places.items()}, True
        entries = inside if asked else inside[:0]
    return Selection(found | _in_place(entries, asked), num_zero)


def count_true(entries: Array, compare: np.ufunc, value: np.number[Any]) -> int:
    """Returns how many of any number of flat entries compare true with a value of their dtype."""
    return _numbers_true(entries, compare, (value,))[0]


def _numbers_true(
    entries: Array, compare: np.ufunc, values: Sequence[np.number[Any]], is_odd: Array | None = None
) -> list[int]:
    """Returns the same for several values.

    Args:
        entries: Flat.
        compare: Two entries.
        values: At least one.
        is_odd: Takes for each entry whether it compares true with an odd number of the values.
    """
    numbers = [0] * len(values)
    with borrowed(min(_PIECE, entries.size)) as memory:
        for start in range(0, entries.size, _PIECE):
            piece = entries[start : start + _PIECE]
            mask = memory[: piece.size].view(np.bool_)
            odd = None if is_odd is None else is_odd[start : start + piece.size]
            for index, value in enumerate(values):
                if odd is None or index:
                    numbers[index] += int(np.count_nonzero(compare(piece, value, mask)))
                    if odd is not None:
                        np.bitwise_xor(odd, mask, odd)
                else:
                    numbers[index] += int(np.count_nonzero(compare(piece, value, odd)))
    return numbers


def _num_zero(brackets: Sequence[_Bracket], inside: Array, ends: _Ends) -> int | None:
    """Returns how many entries equal zero, where they were counted or collected."""
    zero = inside.dtype.type(0)
    if any(bracket.low < zero and bracket.up_to(zero, bracket.high) for bracket in brackets):
        return int(np.count_nonzero(inside == zero))
    return ends.num_equal(zero)


def _brackets(
    entries: Array, ranks: Sequence[int], low: np.number[Any], high: np.number[Any]
) -> list[_Bracket]:
    """Returns brackets whose insides do not overlap, in ascending order; together they have all ranks."""
    num_sampled = num_sampled_of(entries.size)
    sample = entries.take(sampled_places(entries.size, num_sampled, ROW_BYTES // entries.itemsize))
    spans = _spans(entries.size, num_sampled, tuple(ranks), NUM_DEVIATIONS)
    stretches = in_order(sample, [(span.first, span.stop) for span in spans])
    brackets: list[_Bracket] = []
    for span, stretch in zip(spans, stretches, strict=True):
        # Infinities and NaN are no ends.
        if not stretch[0] >= low:
            stretch[: stretch.searchsorted(low)] = low
        if not stretch[-1] <= high:
            stretch[stretch.searchsorted(high, "right") :] = high
        bracket_low = low if span.is_lowest else stretch[0]
        bracket_high = high if span.is_highest else stretch[-1]
        brackets.append(_Bracket(bracket_low, bracket_high, span.ranks, stretch, span.place))
    return brackets


@lru_cache(maxsize=64)
def _spans(
    num_entries: int, num_sampled: int, ranks: tuple[int, ...], num_deviations: float
) -> tuple[_Span, ...]:
    """Returns where in a sorted sample the ranks lie most likely; ranks whose spans meet share one."""
    spans: list[tuple[int, int, list[int]]] = []
    for rank in ranks:
        share = (rank + 0.5) / num_entries
        margin = num_deviations * math.sqrt(num_sampled * share * (1.0 - share)) + 1.0
        first = max(math.floor(share * num_sampled - margin), -1)
        last = min(math.ceil(share * num_sampled + margin), num_sampled)
        if spans and first <= spans[-1][1]:
            first, _, others = spans.pop()
            spans.append((first, last, [*others, rank]))
        else:
            spans.append((first, last, [rank]))
    return tuple(
        [
            _Span(
                first=max(first, 0),
                stop=last + 1,
                ranks=tuple(shared),
                place=int((shared[len(shared) // 2] + 0.5) / num_entries * num_sampled) - max(first, 0),
                is_lowest=first < 0,
                is_highest=last >= num_sampled,
            )
            for first, last, shared in spans
        ]
    )


def _narrow_all(brackets: Sequence[_Bracket], ends: _Ends, num_entries: int) -> bool:
    """Narrows the brackets if too many entries lie inside of them for another way; returns whether it did."""
    wide = [bracket for bracket in brackets if bracket.is_wide]
    spacing = num_entries / num_sampled_of(num_entries)
    if sum([bracket.sampled.size for bracket in wide]) * spacing <= _ENOUGH:
        return False
    parity = ends.count(np.less_equal, [bracket.sampled[bracket.place] for bracket in wide])
    for bracket in brackets:
        bracket.parity = parity
    for bracket in wide:
        _narrow(bracket, ends, spacing)
    return True


def _narrow(bracket: _Bracket, ends: _Ends, spacing: float) -> None:
    """Brings the ends of a bracket closer to its ranks, by the true rank of an entry between them.

    Args:
        bracket: The bracket.
        ends: Counts the entries.
        spacing: Entries for each one of the sample.
    """

    def at(place: float, otherwise: np.number[Any]) -> np.number[Any]:
        return sampled[int(place)] if 0 <= place < sampled.size else otherwise

    def steps(number: int) -> float:
        return number / spacing + _NUM_NEAR_DEVIATIONS * math.sqrt(number / spacing) + 1.0

    sampled = bracket.sampled
    pivot = sampled[bracket.place]
    place, behind = sampled.searchsorted(pivot), sampled.searchsorted(pivot, "right")
    first, last = bracket.ranks[0], bracket.ranks[-1]
    low, high, up_to = bracket.low, bracket.high, bracket.up_to
    num = ends.num_true(np.less_equal, pivot)
    if first >= num:
        low = pivot
    elif behind > place + 1:
        # Many entries equal the pivot: they are told by counts.
        num_below = ends.num_true(np.less, pivot)
        if num_below <= first and last < num:
            low = high = pivot
        elif last < num_below:
            low, high = at(place - steps(num_below - first), low), pivot
        else:
            return
    else:
        low = at(place - steps(num - first), low)
        if last < num and low < pivot:
            high, up_to = pivot, np.less_equal
        elif last < num:
            high = at(behind, high)
    if last >= num:
        high = at(behind + steps(last - num), high)
    if low < high == pivot and up_to is np.less:
        num = ends.num_true(np.less, pivot)
    bracket.low, bracket.high, bracket.up_to = low, high, up_to
    bracket.pivot, bracket.num_at_most_low = pivot, num


def _collect(entries: Array, brackets: Sequence[_Bracket]) -> Array | None:
    """Returns the entries inside of any bracket, and counts for each those not above its lower end.

    Returns:
        The entries; None where they are more than half of all, so that a further sample would not pay.
    """
    collected = [entries[:0]]
    num_collected = 0
    parity = brackets[0].parity
    numbers = {(np.less_equal, bracket.low): 0 for bracket in brackets if bracket.pivot is None}
    is_any_wide = any(bracket.is_wide for bracket in brackets)
    telling = _telling(brackets) if is_any_wide else set[_Comparison]()
    comparisons = telling.union(numbers)
    room = room_for_mask(min(_PIECE, entries.size))
    with borrowed(2 * room) as memory:
        inside, compared = memory.view(np.bool_).reshape(2, room)
        for start in range(0, entries.size, _PIECE):
            piece = entries[start : start + _PIECE]
            mask, other = inside[: piece.size], compared[: piece.size]
            is_odd = np.False_ if parity is None else parity.is_odd[start : start + piece.size]
            for comparison in comparisons:
                compare, value = comparison
                compare(piece, value, out=other)
                if comparison in numbers:
                    numbers[comparison] += int(np.count_nonzero(other))
                if comparison in telling:
                    is_odd = np.bitwise_xor(is_odd, other, out=mask)
            if is_any_wide:
                if not telling:
                    np.copyto(mask, is_odd)
                collected.append(entries_of_true(piece, inside))
                num_collected += collected[-1].size
                if num_collected > entries.size // 2:
                    return None
    for bracket in brackets:
        if bracket.pivot is None:
            bracket.num_at_most_low = numbers[np.less_equal, bracket.low]
    return np.concatenate(collected)


def _telling(brackets: Sequence[_Bracket]) -> set[_Comparison]:
    """Returns comparisons of which an odd number is true for what is inside of a bracket.

    Those of the parity are taken as made: what it has beside the ends of brackets is to be undone. None are
    left where it has just these ends.
    """
    parity = brackets[0].parity
    telling = set() if parity is None else set(parity.comparisons)
    for bracket in brackets:
        if bracket.is_wide:
            telling ^= {(np.less_equal, bracket.low)}
            telling ^= {(bracket.up_to, bracket.high)}
    return telling


def _locate(
    brackets: Sequence[_Bracket], inside: Array, ends: _Ends
) -> tuple[dict[int, int], dict[int, np.number[Any]]] | None:
    """Returns where among the collected entries ranks are, and values of those that are known by that.

    These are ends of brackets, and entries that are where they would be if those of a bracket lay evenly.

    Returns:
        Both by rank; None where a rank is in no bracket.
    """
    places: dict[int, int] = {}
    values: dict[int, np.number[Any]] = {}
    stretches: list[Stretch] = []
    num_before = 0
    for bracket in brackets:
        num_up_to = inside.size
        if bracket is not brackets[-1]:
            num_up_to = int(np.count_nonzero(bracket.up_to(inside, bracket.high)))
        if bracket.pivot is not None and bracket.pivot > bracket.low:
            is_end = bracket.pivot >= bracket.high
            num_up_to_pivot = num_up_to if is_end else int(np.count_nonzero(inside <= bracket.pivot))
            bracket.num_at_most_low -= num_up_to_pivot - num_before
        lying: list[int] = []
        for rank in bracket.ranks:
            place = rank - bracket.num_at_most_low + num_before
            if num_before <= place < num_up_to:
                places[rank] = place
                lying.append(place)
                continue
            value = ends.at(bracket, rank)
            if value is None:
                return None
            values[rank] = value
        if lying:
            low, high = float(bracket.low), float(bracket.high)
            stretches.append(Stretch(lying, low, high, num_before, num_up_to - num_before))
        num_before = num_up_to
    ordered = sorted_few(inside)
    if ordered is not None:
        return {}, values | {rank: ordered[place] for rank, place in places.items()}
    found = interpolated(inside, stretches)
    missed: dict[int, int] = {}
    for rank, place in places.items():
        if place in found:
            values[rank] = found[place]
        else:
            missed[rank] = place
    return missed, values


def _in_place(entries: Array, asked: Mapping[int, int]) -> dict[int, np.number[Any]]:
    """Returns entries by the rank that was asked for, from a copy in which they are in place."""
    if not asked:
        return {}
    ordered = np.partition(entries, sorted(asked))
    return {wanted: ordered[rank] for rank, wanted in asked.items()}
