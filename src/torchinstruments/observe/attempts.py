"""Feeds the step clock with what the model does, and leaves the attempts that end with the session.

Forwards of several threads may begin at the same time, so that the clock is told under a lock, which guards
nothing but its few additions.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torchinstruments.observe.bypass import Bypass
from torchinstruments.observe.faults import Faults
from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import ClosedAttempt, GradSync, Outbox, Position

__all__ = ["AttemptFeed", "AttemptTap"]


class AttemptTap(Protocol):
    """Who counts on the attempts of an observer without being one. Nothing raises here."""

    def attempts_closed(self, closed: Sequence[ClosedAttempt]) -> None:
        """Takes attempts that ended (training thread, hot path)."""
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
        self._taps: tuple[AttemptTap, ...] = ()

    @property
    def clock(self) -> StepClock:
        """What counts them; it is only read elsewhere (any thread)."""
        return self._clock

    def tap(self, tap: AttemptTap) -> None:
        """Has somebody told of attempts too (training thread)."""
        self._taps = (*self._taps, tap)

    def untap(self, tap: AttemptTap) -> None:
        """Tells somebody no more. Idempotent (training thread)."""
        self._taps = tuple([one for one in self._taps if one is not tap])

    @property
    def is_before_every_step(self) -> bool:
        """As `StepClock.is_before_every_step` (training thread, hot path)."""
        return self._clock.is_before_every_step

    def forward_started(self, *, grad_enabled: bool, now_us: int) -> Position:
        """Takes the start of a root forward and returns where it stands (training thread, hot path)."""
        now_s = self._now()
        with self._lock:
            started = self._clock.forward_started(grad_enabled=grad_enabled, now_s=now_s, now_us=now_us)
        if started.closed:
            self._leave(started.closed)
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

    def step_entered(self, global_step: int | None, micro_batches: int | None) -> bool:
        """Takes that an attempt begins because the program says so (training thread, hot path).

        Returns:
            Whether its end is to be told, by `step_left`; not that of one inside another one.
        """
        now_us = time.time_ns() // 1000
        with self._lock:
            closed = self._clock.boundary_entered(
                self._now(), now_us, global_step=global_step, micro_batches_declared=micro_batches
            )
        if closed is None:
            self.notice(
                "nested",
                "a block of Observer.step was entered inside another one, which goes on; the inner one is "
                "ignored",
            )
            return False
        self._leave(closed)
        return True

    def step_left(self, *, failed: bool) -> None:
        """Takes that the program's attempt is over, by an exception too (training thread, hot path)."""
        with self._lock:
            closed = self._clock.boundary_left(self._now(), failed=failed)
        if not closed:
            return
        self._put(closed)
        record = closed[0].record
        declared, seen = record.micro_batches_declared, record.micro_batches
        if declared is not None and declared != seen and not failed:
            self.notice(
                "declared",
                f"a block of Observer.step declared micro_batches={declared} and ran {seen} with gradients "
                f"(attempt {record.attempt}, global_step {record.global_step}); both numbers are in the "
                f"steps table, and of further blocks they are only there",
            )

    def close(self) -> None:
        """Ends the attempt that is open (training thread, or the main thread while the interpreter exits).

        While the interpreter exits, another thread may still train: its next forward opens the next attempt.
        """
        with self._lock:
            in_boundary = self._clock.in_boundary
            closed = self._clock.close(self._now())
        if not in_boundary:
            self._leave(closed)
        elif closed:
            self._put(closed)
        for tap in self._taps:
            tap.observation_ended()

    def tell_what_was_lost(self) -> None:
        """Tells of steps that have no row (training thread, at the end)."""
        if dropped := self._clock.num_dropped_steps:
            sentence = f"{dropped} steps in one attempt were more than are kept"
            self._faults.report("optimizer", "", OverflowError(sentence))
        if number := self._clock.num_steps_between_boundaries:
            self.notice(
                "outside",
                f"{number} {'step' if number == 1 else 'steps'} of optimizers came after a block of "
                f"Observer.step and before the next forward, and have no row; step them inside the block",
            )

    def notice(self, kind: str, sentence: str) -> None:
        """Tells something of how a program marks its steps, once a kind (training thread)."""
        if kind not in self._noticed:
            self._noticed.add(kind)
            self._faults.notice("step", "", sentence, kind=kind)

    def disarm(self) -> None:
        """Makes it usable in a forked child, where the lock may be held for ever."""
        self._lock = threading.RLock()

    def _leave(self, closed: Sequence[ClosedAttempt]) -> None:
        """Leaves attempts that no block ended; in one, a model may be called between two steps."""
        if closed:
            self._bypass.attempts_closed(closed)
            self._put(closed)

    def _put(self, closed: Sequence[ClosedAttempt]) -> None:
        self._session.put_attempts(closed)
        for tap in self._taps:
            tap.attempts_closed(closed)
