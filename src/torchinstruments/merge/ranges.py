"""Which stretches of a run have to be looked at closely: those in which the rows of ranks are not the same.

The attempts of a generation are cut into ranges of equal length. Of its rows in each range a rank keeps one
64-bit digest, whatever the order and the parts in which they came. Where the digests of all ranks that have
rows are equal, so are the rows; only the other ranges are read a second time, rank beside rank, in blocks of
bounded size. (Two ranges of different rows share a digest once in 2^64.)
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.sources import Source
from torchinstruments.store.inventory import PartFile

__all__ = [
    "Block",
    "BlockTask",
    "PartSpan",
    "Range",
    "RangeFold",
    "RangeTable",
    "RangeTally",
    "bits_of",
    "row_digests",
    "text_digests",
    "widen",
]

MAX_BLOCK_ROWS = 200_000
"""Rows of all ranks that a block holds: some 250 bytes each while they are compared."""

MAX_TASK_BLOCKS = 4
"""Blocks that are read at once: some 100 bytes a row until they are compared, one block after the other."""

_Integers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MAX_BITS = 62


@dataclass(frozen=True, slots=True)
class PartSpan:
    """The attempts that a part has rows of.

    Attributes:
        part: The part.
        generation: Generation of the rows.
        first: Lowest attempt.
        last: Highest attempt.
    """

    part: PartFile
    generation: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RangeTable:
    """The ranges of one rank; arrays have one entry each, sorted by generation, group and number.

    Attributes:
        groups: Text of each group number.
        generation: Generation.
        group: Group number.
        number: Number of the range in its generation.
        rows: Rows.
        attempts: Distinct attempts.
        bits: Bit ``attempt % size`` of each attempt, where a range is short enough for that.
        first: Lowest attempt.
        last: Highest attempt.
        digest: Of the rows.
    """

    groups: tuple[str, ...]
    generation: _Integers
    group: _Integers
    number: _Integers
    rows: _Integers
    attempts: _Integers
    bits: _Integers
    first: _Integers
    last: _Integers
    digest: _Words


class RangeTally:
    """Gathers the ranges of one rank, block of rows by block of rows (worker).

    Args:
        size: Attempts in a range.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._found: list[tuple[npt.NDArray[np.generic], ...]] = []

    def add(
        self,
        generation: _Integers,
        attempt: _Integers,
        group: _Integers,
        is_new: npt.NDArray[np.bool_],
        digest: _Words,
    ) -> None:
        """Takes rows; `is_new` is true at the first row of each attempt."""
        if len(attempt) == 0:
            return
        bits = np.zeros(len(attempt), np.int64)
        if self._size <= _MAX_BITS:
            bits = np.left_shift(np.int64(1), attempt % self._size)
        ones = np.ones(len(attempt), np.int64)
        columns = (generation, group, attempt // self._size, ones, is_new.astype(np.int64), bits)
        self._found.append(_reduced((*columns, attempt, attempt, digest)))
        if len(self._found) > 64:
            self._found = [self._joined()]

    def finish(self, groups: Sequence[str] = ("",)) -> RangeTable:
        """Returns the ranges; `groups` are the texts of the group numbers."""
        empty = [np.zeros(0, np.int64)] * 8
        columns = self._joined() if self._found else (*empty, np.zeros(0, np.uint64))
        return RangeTable(tuple(groups), *columns)  # type: ignore[arg-type] - nine columns, the last of words

    def _joined(self) -> tuple[npt.NDArray[np.generic], ...]:
        return _reduced(tuple(np.concatenate(column) for column in zip(*self._found, strict=True)))


def _reduced(columns: tuple[npt.NDArray[np.generic], ...]) -> tuple[npt.NDArray[np.generic], ...]:
    generation, group, number, rows, attempts, bits, first, last, digest = columns
    order = np.lexsort((number, group, generation))
    keys = [column[order] for column in (generation, group, number)]
    differs = np.zeros(len(order), np.bool_)
    differs[0] = True
    for key in keys:
        differs[1:] |= key[1:] != key[:-1]
    starts = np.flatnonzero(differs)
    return (
        *(key[starts] for key in keys),
        np.add.reduceat(rows[order], starts),
        np.add.reduceat(attempts[order], starts),
        np.bitwise_or.reduceat(bits[order], starts),
        np.minimum.reduceat(first[order], starts),
        np.maximum.reduceat(last[order], starts),
        np.add.reduceat(digest[order], starts),
    )


@dataclass(slots=True)
class Range:
    """A range over the ranks that have rows in it.

    Attributes:
        generation: Generation.
        group: Text of the group.
        number: Number of the range in its generation.
        digest: Of the rows of the first rank.
        is_uniform: Whether all ranks have that digest.
        rows: Of all ranks.
        attempts: Of the rank that has most; of each rank where the range is uniform.
        bits: As in `RangeTable`, of all ranks.
        first: Lowest attempt.
        last: Highest attempt.
        ranks: Bit i stands for the i-th rank that was folded.
    """

    generation: int
    group: str
    number: int
    digest: int
    is_uniform: bool
    rows: int
    attempts: int
    bits: int
    first: int
    last: int
    ranks: int

    @property
    def num_ranks(self) -> int:
        """Ranks that have rows in it."""
        return self.ranks.bit_count()


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of attempts that is read again.

    Attributes:
        generation: Generation.
        first: Lowest attempt.
        last: Highest attempt.
    """

    generation: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class BlockTask:
    """Stretches of attempts, to be read of every rank (made by the merge, run by a worker).

    Attributes:
        blocks: The stretches, in ascending order; all of one generation.
        run_id: Parts of another run are left out.
        sources: The folders of the run, by `PartFile.source`.
        parts: Rank to its parts with rows in any of the stretches.
        ranks: Ranks that have rows anywhere in the generation.
    """

    blocks: tuple[Block, ...]
    run_id: str
    sources: tuple[Source, ...]
    parts: tuple[tuple[int, tuple[PartFile, ...]], ...]
    ranks: tuple[int, ...]

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """Ranks whose parts are read."""
        return tuple(rank for rank, _ in self.parts)


@dataclass(slots=True)
class RangeFold:
    """Folds the ranges of one rank after the other.

    Attributes:
        ranks: Those that were folded, in that order.
        size: Attempts in a range.
    """

    size: int
    ranks: list[int] = field(default_factory=list)
    _ranges: dict[tuple[int, str, int], Range] = field(default_factory=dict)
    _spans: list[tuple[int, tuple[PartSpan, ...]]] = field(default_factory=list)

    def add(self, rank: int, table: RangeTable, spans: tuple[PartSpan, ...]) -> None:
        """Takes the ranges of a rank and the parts that they lie in; ranks come in ascending order."""
        bit = 1 << len(self.ranks)
        self.ranks.append(rank)
        self._spans.append((rank, spans))
        columns = (
            table.generation,
            table.group,
            table.number,
            table.rows,
            table.attempts,
            table.bits,
            table.first,
            table.last,
            table.digest,
        )
        for row in zip(*(column.tolist() for column in columns), strict=True):
            generation, group, number, rows, attempts, bits, first, last, digest = row
            key = (generation, table.groups[group], number)
            held = self._ranges.get(key)
            if held is None:
                self._ranges[key] = Range(
                    generation=generation,
                    group=key[1],
                    number=number,
                    digest=digest,
                    is_uniform=True,
                    rows=rows,
                    attempts=attempts,
                    bits=bits,
                    first=first,
                    last=last,
                    ranks=bit,
                )
                continue
            held.is_uniform &= digest == held.digest
            held.rows += rows
            held.attempts = max(held.attempts, attempts)
            held.bits |= bits
            held.first, held.last = min(held.first, first), max(held.last, last)
            held.ranks |= bit

    def ranges(self) -> list[Range]:
        """Returns every range, by generation and number, then group."""
        return sorted(self._ranges.values(), key=_by_place)

    def ranks_in(self, bits: int) -> list[int]:
        """Returns the ranks that the bits of a `Range` stand for."""
        return [rank for place, rank in enumerate(self.ranks) if bits >> place & 1]

    def generation_ranks(self) -> dict[int, int]:
        """Returns generation to the bits of the ranks that have rows in it."""
        found: dict[int, int] = {}
        for one in self._ranges.values():
            found[one.generation] = found.get(one.generation, 0) | one.ranks
        return found

    def blocks(self, *, ignored_group: str | None = None) -> tuple[list[Block], set[tuple[int, int]]]:
        """Returns what is to be read again, and the (generation, number) of the ranges that it covers.

        Args:
            ignored_group: Rows of this group are never compared.
        """
        held: dict[tuple[int, int], list[Range]] = {}
        for one in self.ranges():
            held.setdefault((one.generation, one.number), []).append(one)
        blocks: list[Block] = []
        covered: set[tuple[int, int]] = set()
        joined_rows, was_flagged = 0, False
        for place, ranges in held.items():
            is_flagged = any(not one.is_uniform and one.group != ignored_group for one in ranges)
            if is_flagged:
                covered.add(place)
                rows = sum(one.rows for one in ranges)
                block = Block(place[0], min(one.first for one in ranges), max(one.last for one in ranges))
                last = blocks[-1] if was_flagged else None
                if last is not None and last.generation == place[0] and joined_rows + rows <= MAX_BLOCK_ROWS:
                    blocks[-1] = Block(place[0], last.first, block.last)
                    joined_rows += rows
                else:
                    blocks += _cut(block, rows)
                    joined_rows = rows
            was_flagged = is_flagged
        return blocks, covered

    def tasks(self, blocks: Sequence[Block], run_id: str, sources: tuple[Source, ...]) -> Iterator[BlockTask]:
        """Yields what to read, several blocks at once: a part is decoded for all of them together."""
        by_generation = {one: tuple(self.ranks_in(bits)) for one, bits in self.generation_ranks().items()}
        for generation, of_one in groupby(blocks, key=_generation_of):
            rest = tuple(of_one)
            while rest:
                chosen, rest = rest[:MAX_TASK_BLOCKS], rest[MAX_TASK_BLOCKS:]
                parts = tuple(
                    (rank, found)
                    for rank, spans in self._spans
                    if (
                        found := tuple(
                            one.part for one in spans if any(_overlaps(one, block) for block in chosen)
                        )
                    )
                )
                yield BlockTask(chosen, run_id, sources, parts, by_generation[generation])


def _by_place(one: Range) -> tuple[int, int, str]:
    return (one.generation, one.number, one.group)


def _generation_of(block: Block) -> int:
    return block.generation


def _overlaps(span: PartSpan, block: Block) -> bool:
    return span.generation == block.generation and span.first <= block.last and block.first <= span.last


def _cut(block: Block, rows: int) -> Iterator[Block]:
    """Cuts a block that is too large, down to single attempts."""
    attempts = block.last - block.first + 1
    step = max(1, attempts * MAX_BLOCK_ROWS // max(rows, MAX_BLOCK_ROWS))
    for first in range(block.first, block.last + 1, step):
        yield Block(block.generation, first, min(first + step - 1, block.last))


def row_digests(columns: Sequence[npt.NDArray[np.generic]]) -> _Words:
    """Returns a digest of each row, from columns of 64-bit words (worker)."""
    digest = np.full(len(columns[0]), _GOLDEN)
    for column in columns:
        digest = _mixed(digest ^ column.view(np.uint64)) + _GOLDEN
    return _mixed(digest)


def bits_of(values: npt.NDArray[np.float64]) -> _Words:
    """Returns floats as words; every NaN is the same."""
    return np.where(np.isnan(values), np.nan, values + 0.0).view(np.uint64)


def text_digests(texts: Sequence[str]) -> _Words:
    """Returns a digest of each text, the same in every process (worker)."""
    found = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(found), np.dtype("<u8")).astype(np.uint64)


def widen(
    bounds: dict[int, tuple[int, int]], generation: npt.NDArray[np.int64], attempt: npt.NDArray[np.int64]
) -> None:
    """Takes the attempts of some rows into the lowest and highest ones of each generation (worker)."""
    for one in np.unique(generation).tolist():
        of_one = attempt[generation == one]
        low, high = int(of_one.min()), int(of_one.max())
        held = bounds.get(one, (low, high))
        bounds[one] = (min(held[0], low), max(held[1], high))


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
