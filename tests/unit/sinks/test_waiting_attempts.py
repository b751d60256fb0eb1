"""Attempts that wait for what the host does not know yet of them."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from typing_extensions import override

from torchinstruments.records import (
    AttemptRecord,
    ClosedAttempt,
)
from torchinstruments.sinks.delivery import THREAD_NAME, Delivery
from unit.sinks.kept_sinks import (
    WAIT_S,
    KeepingSink,
)
from unit.store.material import attempt, run_record


@dataclass
class Late:
    """An amendment that becomes complete, and says when it is asked."""

    complete: bool = False
    asked: threading.Event = field(default_factory=threading.Event)

    def is_complete(self) -> bool:
        """Returns what the test says."""
        self.asked.set()
        return self.complete

    def amend(self, record: AttemptRecord) -> AttemptRecord:
        """Returns the record with whether it came too early."""
        return replace(record, scale_after=2.0 if self.complete else None)


class AttemptSink(KeepingSink):
    """Keeps the scales of the attempts, and says when some came."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[tuple[int, float | None]] = []
        self.came = threading.Event()

    @override
    def attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Keeps them."""
        self.scales += [(record.attempt, record.scale_after) for record in records]
        self.came.set()


def test_an_attempt_waits_until_it_is_complete_and_those_behind_it_wait_too() -> None:
    """So that a row says the same whenever the writer looked, and rows come in their order."""
    sink, late = AttemptSink(), Late()
    behind = Late(complete=True)
    delivery = Delivery(patience_s=WAIT_S)
    delivery.start(run_record(), [sink])
    delivery.put_attempts([ClosedAttempt(attempt(0), (late,))])
    delivery.put_attempts([ClosedAttempt(attempt(1), (behind,))])
    assert behind.asked.wait(WAIT_S)
    assert late.asked.is_set()
    assert sink.scales == []
    late.complete = True
    assert sink.came.wait(WAIT_S)
    assert delivery.close(WAIT_S)
    assert sink.scales == [(0, 2.0), (1, 2.0)]


def test_an_attempt_that_never_becomes_complete_is_handed_over_after_its_patience() -> None:
    """With what is known of it."""
    sink, late = AttemptSink(), Late()
    delivery = Delivery(patience_s=0.0)
    delivery.start(run_record(), [sink])
    delivery.put_attempts([ClosedAttempt(attempt(0), (late,))])
    assert sink.came.wait(WAIT_S)
    assert sink.scales == [(0, None)]
    assert delivery.close(WAIT_S)


def test_attempts_that_wait_for_their_end_are_fetched_behind_those_that_ended() -> None:
    """In the writer thread, and for an update they have waited long enough."""
    sink = AttemptSink()
    waiting = [[ClosedAttempt(attempt(1), (Late(),))]]
    threads: set[str] = set()

    def fetch(now_s: float) -> Sequence[ClosedAttempt]:
        threads.add(threading.current_thread().name)
        assert now_s <= time.perf_counter()
        return waiting.pop() if waiting else []

    delivery = Delivery(patience_s=WAIT_S)
    delivery.fetch_with(fetch)
    delivery.put_attempts([ClosedAttempt(attempt(0), (Late(complete=True),))])
    delivery.start(run_record(), [sink])
    while len(sink.scales) < 2:
        assert sink.came.wait(WAIT_S)
        sink.came.clear()
    assert sink.scales == [(0, 2.0), (1, None)]
    assert threads == {THREAD_NAME}
    assert delivery.close(WAIT_S)


def test_attempts_that_cannot_be_fetched_are_told_once_and_stop_nothing() -> None:
    """What was put goes on its way."""
    sink = KeepingSink()

    def fail(_: float) -> Sequence[ClosedAttempt]:
        raise RuntimeError("odd")

    delivery = Delivery()
    delivery.fetch_with(fail)
    delivery.start(run_record(), [sink])
    assert delivery.flush(WAIT_S)
    delivery.put_attempts([ClosedAttempt(attempt(0))])
    assert delivery.close(WAIT_S)
    assert ("attempts", (0,)) in sink.seen
    assert [(one.probe, one.message) for one in sink.errors] == [("optimizer", "odd")]


@pytest.mark.parametrize("ends", [Delivery.flush, Delivery.close])
def test_a_flush_and_a_close_wait_for_no_attempt(ends: Callable[[Delivery, float], bool]) -> None:
    """Both answer for everything that was put before."""
    sink = AttemptSink()
    delivery = Delivery(patience_s=WAIT_S)
    delivery.start(run_record(), [sink])
    delivery.put_attempts([ClosedAttempt(attempt(0), (Late(),))])
    assert ends(delivery, WAIT_S)
    assert sink.scales == [(0, None)]
    assert delivery.close(WAIT_S)
