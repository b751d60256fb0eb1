"""Attempts and micro-batches from events: a pure state machine without torch, threads or a clock of its own.

A *window* opens with the first grad-enabled root forward after an optimizer step and closes with the first
one after the next step; it is one attempt. Evaluation forwards belong to the open window and have no
micro-batch. Several optimizers may step in one window; a step inside another optimizer's step belongs to
the outer one, and a forward inside ``step(closure)`` belongs to the window of that step.

A step that runs a closure is met before its forwards. Where its optimizer has stepped in the open window
already, the closure's first grad-enabled forward opens the next window and the running step moves into it;
otherwise the step belongs to the open window, as one optimizer of several.

Times are seconds of one monotonic clock, `time.perf_counter` everywhere in this package. A window's phases
are host time: ``forward_s`` sums root forwards; ``backward_s`` runs from the end of a forward to the end of
its backward where that was observed, else to the next forward or step; ``optimizer_s`` leaves out what a
closure's forwards and observed backwards took. A record repeats its window's phases: of several optimizers in
one attempt each has its own ``optimizer_s`` alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torchinstruments.records import (
    Amendment,
    AttemptRecord,
    ClosedAttempt,
    Evidence,
    GradSync,
    Outcome,
    Position,
    StepProvenance,
)

__all__ = ["MAX_STEPS_IN_WINDOW", "Started", "StepClock"]

MAX_STEPS_IN_WINDOW = 16_384
"""Steps that one window keeps; only a program that bypasses the attached model's hooks comes near it."""


@dataclass(frozen=True, slots=True)
class Started:
    """What a root forward's start means.

    Attributes:
        position: Where the forward stands.
        closed: Attempts of the window that it closed, if it did.
    """

    position: Position
    closed: tuple[ClosedAttempt, ...] = ()


@dataclass(slots=True)
class _Step:
    """One step of one optimizer in a window, not yet told."""

    key: int
    optimizer: int
    optimizer_attempt: int
    outcome: Outcome
    evidence: Evidence
    optimizer_s: float
    lr: float | None = None
    found_inf: float | None = None
    aborted: bool = False
    amendment: Amendment | None = None


@dataclass(slots=True)
class _Running:
    """The outermost step that runs now, and the keys of those inside it."""

    key: int
    started_s: float
    inner_s: float = 0.0
    nested: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Window:
    """The open attempt."""

    attempt: int
    first_forward_index: int
    last_forward_index: int
    started_at_us: int
    gap_s: float
    forwards: int = 0
    micro_batches: int = 0
    micro_batches_synced: int = 0
    last_sync: GradSync = GradSync.UNKNOWN
    forward_s: float = 0.0
    backward_s: float = 0.0
    steps: list[_Step] = field(default_factory=list)
    end_s: float | None = None


class StepClock:
    """Turns the events of one process's training loop into positions and attempt records.

    Not thread-safe by itself: its events come from the training thread, or from an autograd thread while
    the training thread waits for it.
    """

    def __init__(self, *, declared_optimizer: bool = False) -> None:
        """Makes a clock that has seen nothing.

        Args:
            declared_optimizer: Whether the caller named an optimizer, so that attempts are known to be
                counted before the first step.
        """
        self._is_declared = declared_optimizer
        self._optimizer_known = declared_optimizer
        self._window: _Window | None = None
        self._running: _Running | None = None
        self._num_forwards = 0
        self._forwards_before = 0
        self._next_attempt = 0
        self._ordinals: dict[int, int] = {}
        self._optimizer_attempts: dict[int, int] = {}
        self._num_optimizers = 0
        self._forward_began_s: float | None = None
        self._forward_has_grad = False
        self._waits_for_backward_since_s: float | None = None
        self._last_event_s = 0.0
        self._last_end_s: float | None = None
        self._is_running: Callable[[], bool] | None = None
        self.num_dropped_steps = 0
        """Steps beyond `MAX_STEPS_IN_WINDOW` in one window, which have no record."""

    @property
    def num_forwards(self) -> int:
        """Root forwards seen so far."""
        return self._num_forwards

    @property
    def step_provenance(self) -> StepProvenance:
        """How an attempt is known at this moment."""
        return StepProvenance.INFERRED if self._optimizer_known else StepProvenance.NONE

    @property
    def is_before_every_step(self) -> bool:
        """Whether every optimizer of the model is watched, and none has begun to step in the open window.

        Then the parameters are those with which the window opened. Beside an optimizer that the caller named
        others may step unseen, and where none was ever seen it may be one that cannot be.
        """
        window = self._window
        is_known = self._optimizer_known and not self._is_declared
        return is_known and window is not None and not window.steps and self._running is None

    def ask_whether_running(self, is_running: Callable[[], bool] | None) -> None:
        """Takes the question whether the outermost step is still on the stack.

        A step that raised never says that it ended. Without this question it would seem to run for ever.

        Args:
            is_running: Called while a step seems to run and a forward begins; None withdraws it.
        """
        self._is_running = is_running

    def forward_started(self, *, grad_enabled: bool, now_s: float, now_us: int) -> Started:
        """Takes the start of a root forward (training thread, hot path).

        Args:
            grad_enabled: Whether gradients were enabled.
            now_s: Monotonic seconds.
            now_us: Microseconds since the epoch, UTC.

        Returns:
            The forward's position, and the records of the window that it closed.
        """
        self._drop_aborted_step(now_s)
        self._account_backward(now_s)
        closed: tuple[ClosedAttempt, ...] = ()
        if grad_enabled and self._opens_window():
            closed = self._close_window()
            self._open_window(now_s, now_us)
        index = self._num_forwards
        self._num_forwards += 1
        self._last_event_s = now_s
        self._forward_began_s = now_s
        self._forward_has_grad = grad_enabled
        return Started(self._position(index, grad_enabled=grad_enabled), closed)

    def forward_ended(self, now_s: float, grad_sync: GradSync) -> None:
        """Takes the end of the last root forward, also of one that raised (training thread, hot path).

        Args:
            now_s: Monotonic seconds.
            grad_sync: As latched at its start.
        """
        began_s, self._forward_began_s = self._forward_began_s, None
        window = self._window
        if began_s is None:
            return
        self._last_event_s = now_s
        if window is None:
            return
        duration_s = max(0.0, now_s - began_s)
        window.forward_s += duration_s
        if self._running is not None:
            self._running.inner_s += duration_s
        if self._forward_has_grad:
            window.last_sync = grad_sync
            window.micro_batches_synced += grad_sync is GradSync.SYNCED
            self._waits_for_backward_since_s = now_s

    def backward_ended(self, now_s: float) -> None:
        """Takes the end of a backward through a root forward (training or autograd thread, hot path).

        Args:
            now_s: Monotonic seconds.
        """
        if self._window is None or self._forward_began_s is not None:
            # One inside a forward is that forward's time.
            return
        if self._waits_for_backward_since_s is None:
            # A further backward, of another outstanding forward or of a kept graph.
            self._waits_for_backward_since_s = self._last_event_s
        self._account_backward(now_s)
        self._last_event_s = now_s
        if self._window.end_s is not None:
            # An optimizer that steps inside the backward ends before it.
            self._window.end_s = now_s

    def step_started(self, optimizer_key: int, now_s: float) -> None:
        """Takes the start of an optimizer's step (training or autograd thread, hot path).

        Args:
            optimizer_key: Names the optimizer for as long as it lives.
            now_s: Monotonic seconds.
        """
        self._optimizer_known = True
        if self._running is not None:
            self._running.nested.append(optimizer_key)
            return
        self._account_backward(now_s)
        self._last_event_s = now_s
        self._running = _Running(optimizer_key, now_s)

    def step_aborted(self, now_s: float) -> None:
        """Takes that the step which runs was left by an exception (training thread, hot path).

        Args:
            now_s: Monotonic seconds, when that was found out.
        """
        running, self._running = self._running, None
        if running is not None:
            # How far it came before it raised is not known, nor when.
            self._add_step(running.key, now_s, 0.0, Outcome.UNKNOWN, Evidence.NONE, aborted=True)

    def step_ended(
        self,
        optimizer_key: int,
        now_s: float,
        *,
        lr: float | None = None,
        outcome: Outcome = Outcome.APPLIED,
        evidence: Evidence = Evidence.OPTIMIZER_HOOK,
    ) -> None:
        """Takes the end of a step (training or autograd thread, hot path).

        Args:
            optimizer_key: As given to `step_started`.
            now_s: Monotonic seconds.
            lr: Learning rate of the first group, where it is a number on the host.
            outcome: What became of the attempt, as far as it is known now.
            evidence: What that rests on.
        """
        running = self._running
        if running is None or (running.key != optimizer_key and optimizer_key not in running.nested):
            self._take_back_abort(optimizer_key, lr, outcome, evidence)
            return
        if optimizer_key in running.nested:
            # The innermost first: a subclass's step may call its parent's, under the same key.
            del running.nested[len(running.nested) - 1 - running.nested[::-1].index(optimizer_key) :]
            return
        self._running = None
        # A closure's backward that nobody saw cannot be told from the step itself.
        self._waits_for_backward_since_s = None
        seconds = max(0.0, now_s - running.started_s - running.inner_s)
        self._add_step(optimizer_key, now_s, seconds, outcome, evidence, lr=lr)

    def step_skipped(
        self,
        optimizer_key: int,
        now_s: float,
        *,
        lr: float | None = None,
        outcome: Outcome = Outcome.SKIPPED,
        evidence: Evidence = Evidence.FOUND_INF,
        found_inf: float | None = None,
        amendment: Amendment | None = None,
    ) -> None:
        """Takes an attempt for which the loss scaler did not call the optimizer (training thread, hot path).

        Args:
            optimizer_key: As given to `step_started`.
            now_s: Monotonic seconds.
            lr: Learning rate of the first group, where it is a number on the host.
            outcome: `SKIPPED`, or `UNKNOWN` where nobody could have seen the call.
            evidence: What that rests on.
            found_inf: What the scaler found, where it is known on the host.
            amendment: Brings what only the device knows of it.
        """
        self._optimizer_known = True
        self._drop_aborted_step(now_s)
        if self._running is not None:
            return
        self._account_backward(now_s)
        self._add_step(
            optimizer_key, now_s, 0.0, outcome, evidence, lr=lr, found_inf=found_inf, amendment=amendment
        )

    def step_resolved(
        self,
        optimizer_key: int,
        *,
        outcome: Outcome,
        evidence: Evidence,
        found_inf: float | None = None,
        amendment: Amendment | None = None,
    ) -> None:
        """Takes better evidence for an optimizer's last step in the window (training thread, hot path).

        Args:
            optimizer_key: As given to `step_started`.
            outcome: What became of it.
            evidence: What that rests on.
            found_inf: What the scaler found, where it is known on the host.
            amendment: Brings what only the device knows of it.
        """
        step = self._last_step(optimizer_key)
        if step is not None:
            step.outcome, step.evidence, step.found_inf, step.aborted = outcome, evidence, found_inf, False
            step.amendment = amendment

    def optimizer_gone(self, optimizer_key: int) -> None:
        """Forgets an optimizer that no longer lives; a new one under this key gets a new ordinal.

        Args:
            optimizer_key: As given to `step_started`.
        """
        self._ordinals.pop(optimizer_key, None)
        self._optimizer_attempts.pop(optimizer_key, None)

    def close(self, now_s: float) -> tuple[ClosedAttempt, ...]:
        """Closes the open window (training thread).

        Args:
            now_s: Monotonic seconds.

        Returns:
            Its records. Without any step: one of outcome `ABANDONED`, or `UNKNOWN` where no optimizer was
            ever known to step.
        """
        self.step_aborted(now_s)
        return self._close_window()

    def _position(self, index: int, *, grad_enabled: bool) -> Position:
        window = self._window
        if window is None:
            ordinal = self._forwards_before
            self._forwards_before += 1
            return Position(None, ordinal, None, index, grad_enabled, self.step_provenance)
        ordinal = window.forwards
        window.forwards += 1
        window.last_forward_index = index
        micro_batch = None
        if grad_enabled:
            micro_batch = window.micro_batches
            window.micro_batches += 1
            window.last_sync = GradSync.UNKNOWN
        return Position(window.attempt, ordinal, micro_batch, index, grad_enabled, self.step_provenance)

    def _opens_window(self) -> bool:
        if self._window is None:
            return True
        if not self._window.steps:
            return False
        return self._running is None or self._last_step(self._running.key) is not None

    def _open_window(self, now_s: float, now_us: int) -> None:
        # Inside a closure the time since the step's start is the step's.
        begin_s = now_s if self._running is None else self._running.started_s
        gap_s = 0.0 if self._last_end_s is None else max(0.0, begin_s - self._last_end_s)
        index = self._num_forwards
        self._window = _Window(self._next_attempt, index, index, now_us, gap_s)
        self._next_attempt += 1

    def _close_window(self) -> tuple[ClosedAttempt, ...]:
        window, self._window = self._window, None
        if window is None:
            return ()
        self._last_end_s = window.end_s if window.end_s is not None else self._last_event_s
        self._waits_for_backward_since_s = None
        if window.steps:
            return tuple(_closed(window, step) for step in window.steps)
        outcome = Outcome.ABANDONED if self._optimizer_known else Outcome.UNKNOWN
        return (_closed(window, _Step(-1, -1, 0, outcome, Evidence.NONE, 0.0)),)

    def _account_backward(self, now_s: float) -> None:
        since_s, self._waits_for_backward_since_s = self._waits_for_backward_since_s, None
        if since_s is None or self._window is None:
            return
        duration_s = max(0.0, now_s - since_s)
        self._window.backward_s += duration_s
        if self._running is not None:
            self._running.inner_s += duration_s

    def _add_step(
        self,
        key: int,
        now_s: float,
        optimizer_s: float,
        outcome: Outcome,
        evidence: Evidence,
        *,
        lr: float | None = None,
        found_inf: float | None = None,
        aborted: bool = False,
        amendment: Amendment | None = None,
    ) -> None:
        self._last_event_s = now_s
        window = self._window
        if window is None:
            return
        window.end_s = now_s
        if key not in self._ordinals:
            self._ordinals[key] = self._num_optimizers
            self._num_optimizers += 1
        attempt = self._optimizer_attempts.get(key, 0)
        self._optimizer_attempts[key] = attempt + 1
        if len(window.steps) >= MAX_STEPS_IN_WINDOW:
            self.num_dropped_steps += 1
            return
        window.steps.append(
            _Step(
                key,
                self._ordinals[key],
                attempt,
                outcome,
                evidence,
                optimizer_s,
                lr=lr,
                found_inf=found_inf,
                aborted=aborted,
                amendment=amendment,
            )
        )

    def _last_step(self, key: int) -> _Step | None:
        if self._window is None:
            return None
        return next((step for step in reversed(self._window.steps) if step.key == key), None)

    def _drop_aborted_step(self, now_s: float) -> None:
        if self._running is not None and self._is_running is not None and not self._is_running():
            self.step_aborted(now_s)

    def _take_back_abort(self, key: int, lr: float | None, outcome: Outcome, evidence: Evidence) -> None:
        """A step that seemed to have raised ends after all: it ran in a thread of its own."""
        step = self._last_step(key)
        if step is not None and step.aborted:
            step.lr, step.outcome, step.evidence, step.aborted = lr, outcome, evidence, False


def _closed(window: _Window, step: _Step) -> ClosedAttempt:
    record = AttemptRecord(
        attempt=window.attempt,
        optimizer=step.optimizer,
        optimizer_attempt=step.optimizer_attempt,
        first_forward_index=window.first_forward_index,
        last_forward_index=window.last_forward_index,
        micro_batches=window.micro_batches,
        micro_batches_synced=window.micro_batches_synced,
        last_micro_batch_sync=window.last_sync,
        outcome=step.outcome,
        evidence=step.evidence,
        started_at_us=window.started_at_us,
        gap_s=window.gap_s,
        forward_s=window.forward_s,
        backward_s=window.backward_s,
        optimizer_s=step.optimizer_s,
        found_inf=step.found_inf,
        lr=step.lr,
    )
    return ClosedAttempt(record, () if step.amendment is None else (step.amendment,))
