"""Parts that a target refuses."""

import errno

from torchinstruments.store.waiting import RETRY_AFTER_S, EncodedPart, WaitingParts
from unit.store.material import MemoryTarget


def part(size: int = 10, sample_id: int | None = None) -> EncodedPart:
    """Returns a part of some size with one row."""
    return EncodedPart("history", 1, b"x" * size, sample_id)


def test_what_is_written_is_counted_as_durable() -> None:
    """Rows, parts, bytes and the highest sample id."""
    waiting = WaitingParts(MemoryTarget(), print)
    for sample_id in (5, 3, None):
        waiting.add(part(10, sample_id))

    waiting.write(0.0)

    assert (waiting.num_parts, waiting.num_bytes, waiting.durable_rows["history"]) == (3, 30, 3)
    assert waiting.last_sample_id == 5
    assert len(waiting) == 0


def test_a_refused_part_is_tried_again_only_after_a_while() -> None:
    """Unless somebody asks for it at once."""
    failures: list[Exception] = []
    target = MemoryTarget()
    target.is_full = True
    waiting = WaitingParts(target, failures.append)
    waiting.add(part())

    waiting.write(0.0)
    waiting.write(RETRY_AFTER_S - 1)
    assert len(failures) == 1
    waiting.write(RETRY_AFTER_S - 1, at_once=True)
    waiting.write(2 * RETRY_AFTER_S)

    assert [getattr(failure, "errno", None) for failure in failures] == [errno.ENOSPC] * 3
    assert len(waiting) == 1


def test_the_oldest_parts_are_given_up_beyond_the_bound() -> None:
    """What is given up is counted by table and told."""
    failures: list[Exception] = []
    target = MemoryTarget()
    target.is_full = True
    waiting = WaitingParts(target, failures.append, max_bytes=25)
    for sample_id in range(4):
        waiting.add(part(10, sample_id))
        waiting.write(0.0)
    target.is_full = False

    waiting.write(RETRY_AFTER_S)

    assert waiting.dropped_rows["history"] == 2
    assert len(target.parts) == 2
    assert str(failures[-1]) == "1 rows of history given up: 25 bytes wait already"


def test_giving_up_tries_each_part_once_more() -> None:
    """What fits is durable, the rest is counted by table and told once a table."""
    failures: list[Exception] = []
    target = MemoryTarget()
    target.max_part_bytes = 20
    waiting = WaitingParts(target, failures.append)
    for size in (30, 10, 40):
        waiting.add(part(size, sample_id=size))

    assert not waiting.give_up()

    assert (waiting.durable_rows["history"], waiting.dropped_rows["history"], len(waiting)) == (1, 2, 0)
    assert waiting.last_sample_id == 10
    assert [str(failure) for failure in failures] == [
        "2 rows of history given up at the close: [Errno 27] File too large"
    ]


def test_giving_up_with_nothing_refused_loses_nothing() -> None:
    """Parts that only waited for their next try are written."""
    target = MemoryTarget()
    waiting = WaitingParts(target, print)
    waiting.add(part())

    assert waiting.give_up()

    assert (len(target.parts), waiting.dropped_rows["history"]) == (1, 0)
