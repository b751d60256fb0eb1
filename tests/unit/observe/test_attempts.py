"""Who counts on the attempts of an observer hears of each once, in the training thread, in their order."""

import threading
from collections.abc import Sequence

from torch import nn

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe.attempts import AttemptFeed
from torchinstruments.observe.bypass import Bypass
from torchinstruments.observe.faults import Faults
from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import ClosedAttempt, GradSync
from unit.observe.memory import MemorySession

TOLD_AFTER_S = 20.0


class Tap:
    """Notes what it hears, and in which thread."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self.num_ends = 0

    def attempts_closed(self, closed: Sequence[ClosedAttempt]) -> None:
        """Notes attempt and optimizer."""
        self.threads.add(threading.get_ident())
        self.heard += [(one.record.attempt, one.record.optimizer) for one in closed]

    def observation_ended(self) -> None:
        """Counts."""
        self.num_ends += 1


class Loop:
    """A training loop before a feed; every event takes one second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.session = MemorySession()
        self.clock = StepClock(told_after_s=TOLD_AFTER_S)
        self.root = nn.Linear(1, 1)
        bypass = Bypass(self.root, captures_direct_forwards=False)
        faults = Faults(ErrorPolicy.WARN, self.session.put_error)
        self.feed = AttemptFeed(self.clock, self.session, bypass, faults, self.tick)
        self.early: list[tuple[int, int]] = []

    def tick(self) -> float:
        """Lets a second pass."""
        self.now += 1.0
        return self.now

    def forward(self, *, grad: bool = True) -> None:
        """Runs a root forward."""
        position = self.feed.forward_started(grad_enabled=grad, now_us=0)
        self.feed.forward_ended(GradSync.LOCAL, position)

    def step(self, key: int = 0) -> None:
        """Runs a step."""
        self.clock.step_started(key, self.tick())
        self.clock.step_ended(key, self.tick())

    def fetch(self) -> None:
        """Has another thread ask for what is overdue, as the writer does, a while later."""
        self.now += 2 * TOLD_AFTER_S

        def ask() -> None:
            found = self.feed.overdue(self.now)
            self.early += [(one.record.attempt, one.record.optimizer) for one in found]

        writer = threading.Thread(target=ask)
        writer.start()
        writer.join()

    def rows(self) -> list[tuple[int, int]]:
        """Attempt and optimizer of every row that the session has, early ones included."""
        return [*self.early, *[(one.attempt, one.optimizer) for one in self.session.attempts]]


def tapped() -> tuple[Loop, Tap]:
    """Returns a loop and who listens to it."""
    loop, tap = Loop(), Tap()
    loop.feed.tap(tap)
    return loop, tap


def test_an_attempt_that_was_told_early_is_heard_of_once_with_the_next_forward() -> None:
    """In the training thread, though the writer thread fetched it; the row is the writer's alone."""
    loop, tap = tapped()
    loop.forward()
    loop.step()
    loop.fetch()
    assert loop.early == [(0, 0)]
    assert tap.heard == []
    loop.forward(grad=False)
    assert tap.heard == [(0, 0)]
    loop.forward()
    loop.step()
    loop.feed.close()
    assert tap.heard == [(0, 0), (1, 0)]
    assert tap.threads == {threading.get_ident()}
    assert loop.rows() == [(0, 0), (1, 0)]


def test_the_rest_of_a_window_comes_after_what_was_told_early_of_it() -> None:
    """A further optimizer steps in the window: two rows of one attempt, the early one first."""
    loop, tap = tapped()
    loop.forward()
    loop.step(0)
    loop.fetch()
    loop.step(1)
    loop.forward()
    assert tap.heard == [(0, 0), (0, 1)]


def test_at_close_what_was_told_early_comes_first_and_then_the_end() -> None:
    """No forward comes any more: a job ends after a long evaluation elsewhere."""
    loop, tap = tapped()
    loop.forward()
    loop.step(0)
    loop.fetch()
    loop.step(1)
    loop.feed.close()
    assert (tap.heard, tap.num_ends) == ([(0, 0), (0, 1)], 1)
    assert sorted(loop.rows()) == [(0, 0), (0, 1)]


def test_a_block_tells_what_was_told_early_of_it() -> None:
    """A block that lasts long is told by the writer; its end tells the tap, once."""
    loop, tap = tapped()
    block = object.__new__(Tap)
    assert loop.feed.step_entered(block, 7, None)
    loop.forward()
    loop.step()
    loop.fetch()
    assert loop.early == [(0, 0)]
    loop.feed.step_left(failed=False)
    assert tap.heard == [(0, 0)]


def test_who_comes_later_hears_nothing_of_before_and_who_goes_hears_all_until_then() -> None:
    """What waits is told before somebody joins or leaves."""
    loop, tap = tapped()
    loop.forward()
    loop.step()
    loop.fetch()
    late = Tap()
    loop.feed.tap(late)
    assert (tap.heard, late.heard) == ([(0, 0)], [])
    loop.forward()
    loop.step()
    loop.fetch()
    loop.feed.untap(tap)
    loop.feed.untap(tap)
    assert (tap.heard, late.heard) == ([(0, 0), (1, 0)], [(1, 0)])
    loop.feed.untap(late)
    loop.forward()
    loop.feed.close()
    assert (tap.num_ends, late.num_ends) == (0, 0)
    last = Tap()
    loop.feed.tap(last)
    assert last.heard == []


def test_a_step_never_waits_for_the_writer_and_the_order_holds() -> None:
    """While the writer is about to tell the first attempt, the second one waits too, then both come."""
    loop, tap = tapped()
    loop.forward()
    loop.step(0)
    is_asked, may_go = threading.Event(), threading.Event()
    overdue = loop.clock.overdue

    def held(now_s: float) -> tuple[ClosedAttempt, ...]:
        found = overdue(now_s)
        is_asked.set()
        assert may_go.wait(10.0)
        return found

    loop.clock.overdue = held  # type: ignore[method-assign]
    writer = threading.Thread(target=loop.feed.overdue, args=(loop.now + 2 * TOLD_AFTER_S,))
    writer.start()
    assert is_asked.wait(10.0)
    loop.step(1)
    loop.forward()
    assert tap.heard == []
    may_go.set()
    writer.join()
    loop.clock.overdue = overdue  # type: ignore[method-assign]
    loop.forward(grad=False)
    assert tap.heard == [(0, 0), (0, 1)]


def test_rows_of_a_run_that_is_fetched_all_the_time_are_heard_of_once_each() -> None:
    """A writer fetches at any moment of 300 attempts: each is heard of once, in order, none is missed."""
    loop, tap = tapped()
    is_over = threading.Event()

    def fetch() -> None:
        while not is_over.is_set():
            loop.feed.overdue(loop.now + 2 * TOLD_AFTER_S)

    writer = threading.Thread(target=fetch)
    writer.start()
    for _ in range(300):
        loop.forward()
        loop.step(0)
        loop.step(1)
    is_over.set()
    writer.join()
    loop.feed.close()
    assert tap.heard == [(attempt, optimizer) for attempt in range(300) for optimizer in range(2)]
