"""Feeds the step clock with what the model does, and leaves the attempts that end with the session.

Forwards of several threads may begin at the same time, so that the clock is told under a lock, which guards
nothing but its few additions.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from torchinstruments.observe.bypass import Bypass
from torchinstruments.observe.faults import Faults
from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import ClosedAttempt, GradSync, Outbox, Position

__all__ = ["AttemptFeed", "AttemptTap"]


class AttemptTap(Protocol):
    """Who counts on the attempts of an observer without being one. Nothing raises here."""

    def attempts_closed(self, closed: Sequence[ClosedAttempt]) -> None:
        """Takes attempts that ended, each once and in their order (training thread, hot path)."""
        ...

    def observation_ended(self) -> None:
        """Takes that no more will come, while documents are still taken (training thread)."""
        ...


class AttemptFeed:
    """The attempts of one model.

    Args:
        clock: Counts them.
        session: Takes those that ended.
        bypass: Is told of steps that came without a forward.
        faults: Takes notices.
        now: The moments that the clock is fed with, here and by the companions.
    """

    def __init__(
        self, clock: StepClock, session: Outbox, bypass: Bypass, faults: Faults, now: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._session = session
        self._bypass = bypass
        self._faults = faults
        self._now = now
        # A signal handler may run the model while its thread is in here.
        self._lock = threading.RLock()
        self._noticed: set[str] = set()
        # Whoever could still tell the end of a block holds this: a `with` statement, or the program.
        self._block: weakref.ref[object] | None = None
        self._taps: tuple[AttemptTap, ...] = ()
        # Held while the writer thread is about to tell something; no step of training waits for it.
        self._telling = threading.RLock()
        self._early: deque[ClosedAttempt] = deque()
        self._untapped: deque[ClosedAttempt] = deque()

    @property
    def clock(self) -> StepClock:
        """What counts them; it is only read elsewhere (any thread)."""
        return self._clock

    def tap(self, tap: AttemptTap) -> None:
        """Has somebody told of attempts too, from those on that are not told yet (training thread)."""
        self._tell(waits=True)
        self._taps = (*self._taps, tap)

    def untap(self, tap: AttemptTap) -> None:
        """Tells somebody of what waits, and no more. Idempotent (training thread)."""
        self._tell(waits=True)
        self._taps = tuple([one for one in self._taps if one is not tap])

    def overdue(self, now_s: float) -> tuple[ClosedAttempt, ...]:
        """As `StepClock.overdue` (writer thread); taps hear of it from the training thread, a little later.

        Args:
            now_s: Seconds of the clock that the step clock is fed with.
        """
        with self._telling:
            found = self._clock.overdue(now_s)
            if found and self._taps:
                self._early.extend(found)
        return found

    @property
    def is_before_every_step(self) -> bool:
        """As `StepClock.is_before_every_step` (training thread, hot path)."""
        return self._clock.is_before_every_step

    def forward_started(self, *, grad_enabled: bool, now_us: int) -> Position:
        """Takes the start of a root forward and returns where it stands (training thread, hot path)."""
        now_s = self._now()
        with self._lock:
            started = self._clock.forward_started(grad_enabled=grad_enabled, now_s=now_s, now_us=now_us)
        if started.closed or self._early or self._untapped:
            self._put(started.closed)
        return started.position

    def forward_ended(self, grad_sync: GradSync, position: Position | None) -> None:
        """Takes the end of a root forward (training thread, hot path)."""
        with self._lock:
            self._clock.forward_ended(self._now(), grad_sync, position)

    def backward_synchronises(self, position: Position, grad_sync: GradSync, before: GradSync | None) -> None:
        """Takes what a backward does with its forward's gradients (autograd thread, hot path)."""
        with self._lock:
            self._clock.backward_synchronises(position, grad_sync, before)

    def backward_ended(self) -> None:
        """Takes the end of a backward through a sample (autograd thread, hot path)."""
        with self._lock:
            self._clock.backward_ended(self._now())

    def step_entered(self, block: object, global_step: int | None, micro_batches: int | None) -> bool:
        """Takes that an attempt begins because the program says so (training thread, hot path).

        Args:
            block: Will tell its end. Where it is gone without that, the next block ends it.
            global_step: The caller's number.
            micro_batches: The caller's number.

        Returns:
            Whether its end is to be told, by `step_left`; not that of one inside another one.
        """
        now_us = time.time_ns() // 1000
        if self._clock.in_boundary and self._block is not None and self._block() is None:
            self.step_left(failed=False)
            self.notice(
                "never left",
                "a block of Observer.step was entered and never left; it ended where the next one began",
            )
        with self._lock:
            closed = self._clock.boundary_entered(
                self._now(), now_us, global_step=global_step, micro_batches_declared=micro_batches
            )
        if closed is None:
            self._notice_ignored()
            return False
        self._block = weakref.ref(block)
        self._put(closed)
        return True

    def _notice_ignored(self) -> None:
        """Tells that a block was entered where none can begin."""
        if self._clock.in_boundary:
            self.notice(
                "nested",
                "a block of Observer.step was entered inside another one, which goes on; the inner one is "
                "ignored",
            )
        else:
            self.notice(
                "in step",
                "a block of Observer.step was entered inside optimizer.step(closure), whose attempt goes on "
                "when it is left; it is ignored: put it around the step",
            )

    def step_left(self, *, failed: bool) -> None:
        """Takes that the program's attempt is over, by an exception too (training thread, hot path)."""
        with self._lock:
            boundary = self._clock.boundary
            closed = self._clock.boundary_left(self._now(), failed=failed)
        self._put(closed)
        if boundary is None or failed:
            return
        declared, seen = boundary.micro_batches_declared, boundary.micro_batches
        if declared is not None and declared != seen:
            self.notice(
                "declared",
                f"a block of Observer.step declared micro_batches={declared} and ran {seen} with gradients "
                f"(attempt {boundary.attempt}, global_step {boundary.global_step}); both numbers are in the "
                f"steps table, and of further blocks they are only there",
            )

    def close(self) -> None:
        """Ends the attempt that is open (training thread, or the main thread while the interpreter exits).

        While the interpreter exits, another thread may still train: its next forward opens the next attempt.
        """
        with self._lock:
            closed = self._clock.close(self._now())
        self._put(closed)
        self._tell(waits=True)
        for tap in self._taps:
            tap.observation_ended()

    def tell_what_was_lost(self) -> None:
        """Tells of steps that have no row, or came without a forward (training thread, at the end)."""
        self._bypass.steps_passed(self._clock.num_steps_without_forward)
        self._tell_missing_steps()
        if dropped := self._clock.num_dropped_steps:
            sentence = f"{dropped} steps in one attempt were more than are kept"
            self._faults.report("optimizer", "", OverflowError(sentence))
        if number := self._clock.num_steps_between_boundaries:
            self.notice(
                "outside",
                f"{number} {'step' if number == 1 else 'steps'} of optimizers came after a block of "
                f"Observer.step and before the next forward, and have no row; step them inside the block",
            )

    def _tell_missing_steps(self) -> None:
        if self._clock.lacks_declared_steps:
            self.notice(
                "declared_optimizer",
                "backwards came and no step of the optimizers that were named was seen, so that no row of "
                "the steps table says what became of an attempt; give as optimizer= the one that steps this "
                "model, outside of what torch.compile compiles, or leave it out",
            )

    def notice(self, kind: str, sentence: str) -> None:
        """Tells something of how a program marks its steps, once a kind (training thread)."""
        if kind not in self._noticed:
            self._noticed.add(kind)
            self._faults.notice("step", "", sentence, kind=kind)

    def disarm(self) -> None:
        """Makes it usable in a forked child, where the lock may be held for ever."""
        self._lock = threading.RLock()
        self._telling = threading.RLock()

    def _put(self, closed: Sequence[ClosedAttempt]) -> None:
        """Leaves attempts that ended with the session, and tells taps of them and of those told before."""
        if closed:
            self._session.put_attempts(closed)
        if self._taps:
            self._untapped.extend(closed)
            self._tell()

    def _tell(self, *, waits: bool = False) -> None:
        """Tells taps of what they have not heard of (training thread, hot path unless it waits).

        While the writer thread is about to tell earlier ones, all of them wait for the next call.

        Args:
            waits: Whether to wait for the writer thread instead, which takes it no longer than one window.
        """
        if not self._telling.acquire(blocking=waits):
            return
        told: list[ClosedAttempt] = []
        try:
            for queue in (self._early, self._untapped):
                # A signal handler that runs the model may have taken them meanwhile.
                with suppress(IndexError):
                    while queue:
                        told.append(queue.popleft())
        finally:
            self._telling.release()
        if told:
            told.sort(key=_attempt)
            for tap in self._taps:
                tap.attempts_closed(told)


def _attempt(closed: ClosedAttempt) -> int:
    return closed.record.attempt
