"""Digests of rows by ranges, and the blocks that have to be read again."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchinstruments.merge import ranges
from torchinstruments.merge.ranges import (
    Block,
    PartSpan,
    RangeFold,
    RangeTable,
    RangeTally,
    bits_of,
    row_digests,
    text_digests,
)
from torchinstruments.store.inventory import PartFile


def tallied(attempts: list[int], values: list[float], cuts: int = 1, size: int = 4) -> RangeTable:
    """The ranges of one rank of one generation, taken in so many pieces."""
    tally = RangeTally(size)
    attempt, value = np.array(attempts, np.int64), np.array(values)
    for piece in np.array_split(np.arange(len(attempts)), cuts):
        own = attempt[piece]
        zeros = np.zeros(len(own), np.int64)
        tally.add(zeros, own, zeros, np.ones(len(own), np.bool_), row_digests([own, bits_of(value[piece])]))
    return tally.finish()


def part(rank: int) -> PartFile:
    """A part that is only named."""
    return PartFile("steps", rank, "0000000a", 0, 0, f"rank-{rank}", 1, None)


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(allow_nan=True)), min_size=1))
def test_neither_order_nor_cuts_count(rows: list[tuple[int, float]]) -> None:
    """The same rows in another order and in other pieces have the same digests and bounds."""
    shuffled = sorted(rows, key=lambda row: (row[0] * 7919) % 41)
    first = tallied([row[0] for row in rows], [row[1] for row in rows])
    second = tallied([row[0] for row in shuffled], [row[1] for row in shuffled], cuts=3)
    for name in ("generation", "number", "rows", "bits", "first", "last", "digest"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    assert first.number.tolist() == sorted({row[0] // 4 for row in rows})
    assert first.rows.sum() == len(rows)
    assert sum(bits.bit_count() for bits in first.bits.tolist()) == len({row[0] for row in rows})


def test_many_pieces_are_joined() -> None:
    """A rank of many batches keeps one entry a range."""
    table = tallied(list(range(1000)), [0.0] * 1000, cuts=300, size=100)
    assert table.rows.tolist() == [100] * 10
    assert (table.first.tolist(), table.last.tolist()) == (
        list(range(0, 1000, 100)),
        list(range(99, 1000, 100)),
    )


def test_one_changed_value_changes_one_digest() -> None:
    """A value that differs by one bit changes the digest of its range, and of no other."""
    values = [1.0] * 12
    changed = [*values[:5], np.nextafter(1.0, 2.0), *values[6:]]
    attempts = list(range(12))
    differs = tallied(attempts, values).digest != tallied(attempts, changed).digest
    assert differs.tolist() == [False, True, False]


def test_digests_do_not_depend_on_the_process() -> None:
    """A text has the digest of its bytes, rows that swap columns differ, and zero has no sign."""
    digest = hashlib.blake2b(b"applied", digest_size=8).digest()
    assert text_digests(["", "applied"])[1] == int.from_bytes(digest, "little")
    one, two = np.array([1], np.int64), np.array([2], np.int64)
    assert row_digests([one, two]) != row_digests([two, one])
    assert bits_of(np.array([-0.0])) == bits_of(np.array([0.0]))


def test_only_what_differs_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring ranges that differ make one block, up to the bound; a too large one is cut."""
    attempts = list(range(40))
    changed = [float(attempt in {9, 13, 30}) for attempt in attempts]
    fold = RangeFold(4)
    for rank, values in ((3, [0.0] * 40), (5, changed)):
        fold.add(rank, tallied(attempts, values), (PartSpan(part(rank), 0, 0, 39),))
    blocks, covered = fold.blocks()
    assert blocks == [Block(0, 8, 15), Block(0, 28, 31)]
    assert covered == {(0, 2), (0, 3), (0, 7)}
    monkeypatch.setattr(ranges, "MAX_BLOCK_ROWS", 8)
    assert fold.blocks()[0] == [Block(0, 8, 11), Block(0, 12, 15), Block(0, 28, 31)]
    monkeypatch.setattr(ranges, "MAX_BLOCK_ROWS", 4)
    assert fold.blocks()[0][:2] == [Block(0, 8, 9), Block(0, 10, 11)]
    monkeypatch.setattr(ranges, "MAX_TASK_BLOCKS", 2)
    blocks = [Block(0, 8, 9), Block(0, 12, 12), Block(0, 100, 110)]
    tasks = list(fold.tasks(blocks, "run", ()))
    assert [task.blocks for task in tasks] == [tuple(blocks[:2]), tuple(blocks[2:])]
    assert [[rank for rank, _ in task.parts] for task in tasks] == [[3, 5], []]
    assert tasks[0].ranks == (3, 5)


def test_ranks_that_are_not_there_are_no_difference() -> None:
    """A range that one rank lacks is uniform, and its bits tell who has it."""
    fold = RangeFold(4)
    fold.add(0, tallied(list(range(8)), [0.0] * 8), ())
    fold.add(7, tallied(list(range(4)), [0.0] * 4), ())
    assert fold.blocks() == ([], set())
    assert [fold.ranks_in(one.ranks) for one in fold.ranges()] == [[0, 7], [0]]
    assert [one.num_ranks for one in fold.ranges()] == [2, 1]
