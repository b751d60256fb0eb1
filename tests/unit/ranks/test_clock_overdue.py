"""Attempts that the writer thread fetches while they wait for their end, beside a training that goes on."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.window import Judgement
from torchinstruments.records import AttemptRecord, ClosedAttempt, Evidence, GradSync, Outcome

APPLIED = (Outcome.APPLIED, Evidence.OPTIMIZER_HOOK)


class Loop:
    """A training loop in which every event takes one second, and what the writer thread fetched of it."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.now = 0.0
        self.told: list[ClosedAttempt] = []

    def tick(self) -> float:
        """Lets a second pass."""
        self.now += 1.0
        return self.now

    def forward(self, *, grad: bool = True) -> None:
        """Runs a root forward."""
        self.told += self.clock.forward_started(grad_enabled=grad, now_s=self.tick(), now_us=0).closed
        self.clock.forward_ended(self.tick(), GradSync.LOCAL)

    def step(self, key: int = 0) -> None:
        """Runs a step."""
        self.clock.step_started(key, self.tick())
        self.clock.step_ended(key, self.tick(), lr=0.5)

    def fetch(self, after_s: float) -> list[tuple[int, int, int]]:
        """Returns attempt, optimizer and micro-batches of what is overdue, so many seconds later."""
        self.now += after_s
        records = self.clock.overdue(self.now)
        self.told += records
        return [(one.record.attempt, one.record.optimizer, one.record.micro_batches) for one in records]

    def rows(self) -> list[AttemptRecord]:
        """Ends the training and returns all rows, in the order in which they were told."""
        self.told += self.clock.close(self.tick())
        return [one.resolve() for one in self.told]


def test_a_stepped_attempt_is_overdue_after_20_s_and_once() -> None:
    """It has all that its end would give it, and the next attempt begins as ever."""
    loop = Loop()
    assert loop.fetch(100.0) == []
    loop.forward()
    loop.forward()
    assert loop.fetch(100.0) == []
    loop.step()
    assert loop.fetch(19.0) == []
    assert loop.fetch(1.0) == [(0, 0, 2)]
    assert loop.fetch(100.0) == []
    loop.forward()
    first, second = loop.rows()
    assert (first.attempt, first.outcome, first.evidence, first.lr) == (0, *APPLIED, 0.5)
    assert (first.forward_s, first.optimizer_s, first.last_forward_index) == (2.0, 1.0, 1)
    assert (second.attempt, second.optimizer) == (1, -1)


def test_an_optimizer_that_steps_after_its_window_was_told_has_a_row_of_its_own() -> None:
    """And one that steps again has a second one, though the first was told long before."""
    loop = Loop()
    loop.forward()
    loop.step(0)
    assert loop.fetch(20.0) == [(0, 0, 1)]
    loop.step(1)
    loop.step(0)
    assert loop.fetch(19.0) == [(0, 1, 1)]
    assert loop.fetch(10.0) == [(0, 0, 1)]
    loop.forward()
    found = [(one.attempt, one.optimizer, one.optimizer_attempt) for one in loop.rows()]
    assert found == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0)]
    assert loop.clock.num_steps_without_forward == 1


def test_an_evaluation_does_not_put_it_off() -> None:
    """One forward of it may last for minutes, and stands in the attempt all the same."""
    loop = Loop()
    loop.forward()
    loop.step()
    loop.clock.forward_started(grad_enabled=False, now_s=loop.tick(), now_us=0)
    assert loop.fetch(20.0) == [(0, 0, 1)]
    loop.clock.forward_ended(loop.tick(), GradSync.LOCAL)
    loop.forward(grad=False)
    assert [(one.attempt, one.last_forward_index) for one in loop.rows()] == [(0, 1)]


def test_a_skipped_attempt_is_overdue_as_any_other() -> None:
    """With what the scaler said."""
    loop = Loop()
    loop.forward()
    loop.clock.step_skipped(0, loop.tick(), lr=0.5, found_inf=1.0)
    assert loop.fetch(20.0) == [(0, 0, 1)]
    (row,) = loop.rows()
    assert (row.outcome, row.evidence, row.found_inf, row.lr) == (
        Outcome.SKIPPED,
        Evidence.FOUND_INF,
        1.0,
        0.5,
    )


def test_a_block_is_overdue_once_nothing_ran_in_it_for_20_s() -> None:
    """Micro-batches may follow a step in it; forwards, and the backwards behind them, say that they do."""
    loop = Loop()
    loop.clock.boundary_entered(loop.tick(), 0)
    loop.forward()
    loop.step()
    loop.now += 15.0
    loop.forward()
    assert loop.fetch(100.0) == []
    loop.step(1)
    assert loop.fetch(19.0) == []
    assert loop.fetch(1.0) == [(0, 0, 2), (0, 1, 2)]
    assert loop.clock.boundary_left(loop.tick()) == ()
    loop.forward(grad=False)
    assert len(loop.rows()) == 2


def test_a_block_that_declared_more_micro_batches_than_came_is_not_overdue() -> None:
    """The program says itself that more will come; the block's end tells all."""
    loop = Loop()
    loop.clock.boundary_entered(loop.tick(), 0, global_step=7, micro_batches_declared=2)
    loop.forward()
    loop.step()
    assert loop.fetch(100.0) == []
    boundary = loop.clock.boundary
    assert boundary is not None
    assert (boundary.global_step, boundary.micro_batches_declared, boundary.micro_batches) == (7, 2, 1)
    assert [one.record.micro_batches for one in loop.clock.boundary_left(loop.tick())] == [1]
    assert loop.clock.boundary is None


def test_beside_a_step_that_runs_the_others_of_its_window_are_overdue_where_nothing_runs_in_it() -> None:
    """A closure brings micro-batches; a step that hangs brings none."""
    loop = Loop()
    loop.forward()
    loop.step(0)
    loop.clock.step_started(1, loop.tick())
    loop.now += 15.0
    loop.forward()
    assert loop.fetch(100.0) == []
    loop.clock.backward_ended(loop.tick())
    assert loop.fetch(19.0) == []
    assert loop.fetch(1.0) == [(0, 0, 2)]
    loop.clock.step_ended(1, loop.tick())
    assert [(one.optimizer, one.micro_batches) for one in loop.rows()] == [(0, 2), (1, 2)]


def test_optimizers_inside_a_backward_are_overdue_once_it_is_quiet() -> None:
    """Their rows have the time of one backward in common."""
    loop = Loop()
    loop.forward()
    for key in range(2):
        loop.now += 15.0
        loop.clock.step_started(key, loop.tick(), in_backward=True)
        loop.clock.step_ended(key, loop.tick())
    assert loop.fetch(10.0) == []
    loop.clock.backward_ended(loop.tick())
    assert loop.fetch(10.0) == [(0, 0, 1), (0, 1, 1)]
    assert {one.backward_s for one in loop.rows()} == {15.0 + 1.0 + 15.0 + 1.0 + 11.0}


def test_records_between_whose_parts_something_happened_are_not_taken() -> None:
    """Nor is any of their steps lost: the next look has them."""
    loop = Loop()
    loop.forward()
    loop.step()
    window = loop.clock._window
    assert window is not None
    assert window.take_overdue(None, loop.now, lambda: False) == ()
    assert loop.fetch(20.0) == [(0, 0, 1)]


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads that take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _train(clock: StepClock, num_windows: int, tell: "list[ClosedAttempt]") -> None:
    """Two micro-batches, an evaluation and two optimizers a window; each optimizer has its own rate."""
    now = 0.0
    for window in range(num_windows):
        for grad in (True, True, False):
            now += 1.0
            tell += clock.forward_started(grad_enabled=grad, now_s=now, now_us=0).closed
            clock.forward_ended(now + 0.5, GradSync.SYNCED)
        for key in range(2):
            now += 1.0
            clock.step_started(key, now)
            clock.step_ended(key, now + 0.25, lr=float(key))
            clock.step_resolved(key, Judgement(Outcome.SKIPPED, Evidence.FOUND_INF, 1.0))
            if window % 8 == key:
                time.sleep(0)
        now += 1.0
        tell += clock.forward_started(grad_enabled=False, now_s=now, now_us=0).closed
        clock.forward_ended(now + 0.5, GradSync.UNKNOWN)
    tell += clock.close(now + 1.0)


def _is_whole(one: AttemptRecord) -> bool:
    """Whether a record is of one moment, and a step's verdict of one word."""
    judged = (one.outcome, one.evidence, one.found_inf)
    return (
        one.lr == float(one.optimizer)
        and one.optimizer_s == 0.25
        and (one.micro_batches, one.micro_batches_synced, one.last_micro_batch_sync)
        == (2, 2, GradSync.SYNCED)
        and judged in {(*APPLIED, None), (Outcome.SKIPPED, Evidence.FOUND_INF, 1.0)}
    )


@pytest.mark.usefixtures("frequent_switches")
def test_beside_a_thread_that_fetches_all_the_time_every_step_is_told_once_and_whole() -> None:
    """Whatever both do at the same moment: not one row twice, none lost, none of two moments."""
    clock = StepClock(told_after_s=-1e9)
    trained: list[ClosedAttempt] = []
    fetched: list[ClosedAttempt] = []
    trainer = threading.Thread(target=_train, args=(clock, 2000, trained))
    trainer.start()
    while trainer.is_alive():
        fetched += clock.overdue(0.0)
    trainer.join()
    keys = sorted((one.record.attempt, one.record.optimizer) for one in (*trained, *fetched))
    assert keys == [(attempt, key) for attempt in range(2000) for key in range(2)]
    assert fetched != []
    assert all(_is_whole(one.record) for one in (*trained, *fetched))
    assert _is_sorted(fetched)
    assert _is_sorted(trained)


def _is_sorted(told: Sequence[ClosedAttempt]) -> bool:
    keys = [(one.record.attempt, one.record.optimizer) for one in told]
    return all(one < other for one, other in pairwise(keys))
