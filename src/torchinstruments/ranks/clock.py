"""Attempts and micro-batches from events: a pure state machine without torch, threads or a clock of its own.

A *window* opens with the first grad-enabled root forward after an optimizer step and closes with the first
one after the next step; it is one attempt. Evaluation forwards belong to the open window and have no
micro-batch. Several optimizers may step in one window; a step inside another optimizer's step belongs to
the outer one, and a forward inside ``step(closure)`` belongs to the window of that step.

A step that runs a closure is met before its forwards. Where its optimizer has stepped in the open window
already, the closure's first grad-enabled forward opens the next window and the running step moves into it;
otherwise the step belongs to the open window, as one optimizer of several.

A window that was stepped waits for its next window to be told, through evaluations and checkpoints of
minutes. So it is told earlier: where an evaluation forward begins long after its last step, or by the writer
thread, which asks now and then for what is overdue. It is told as it is then, while it stays open for
positions and for further steps. Of a window that may still get micro-batches (a block of the program's, a
step with a closure) or time (a backward in which optimizers step) nothing is overdue before it was quiet for
as long.

A program may say itself where a window begins and ends; then nothing else opens or closes one in between.
Beyond such a boundary no window is open until the next grad-enabled forward or the next boundary.

Times are seconds of one monotonic clock, `time.perf_counter` everywhere in this package; how a window's
time divides into phases is `ranks.phases`'s business. A record repeats its window's phases: of several
optimizers in one attempt each has its own ``optimizer_s`` alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torchinstruments.ranks.bare_objects import new_object, new_tuple
from torchinstruments.ranks.phases import PhaseTimer
from torchinstruments.ranks.stepping import OptimizerOrdinals, RunningStep
from torchinstruments.ranks.window import APPLIED, DeviceClock, Judgement, Prepared, Span, Step, Window
from torchinstruments.records import (
    Amendment,
    ClosedAttempt,
    Evidence,
    GradSync,
    Outcome,
    Position,
    StepProvenance,
)

__all__ = ["MAX_STEPS_IN_WINDOW", "TOLD_AFTER_S", "Boundary", "Started", "StepClock"]

# To look a member of an enumeration up takes as long as to call a function.
_EXPLICIT = StepProvenance.EXPLICIT
_INFERRED = StepProvenance.INFERRED
_NOT_KNOWN = StepProvenance.NONE
_NOT_SYNCED = GradSync.UNKNOWN

MAX_STEPS_IN_WINDOW = 16_384
"""Steps that one window keeps; only a program that bypasses the attached model's hooks comes near it."""

TOLD_AFTER_S = 20.0
"""So many seconds after a window's last step it is told, open as it is."""


class Started(NamedTuple):
    """What a root forward's start means.

    Attributes:
        position: Where the forward stands.
        closed: Attempts of the window that it closed, if it did, or that had waited long enough.
    """

    position: Position
    closed: tuple[ClosedAttempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Boundary:
    """What is known of an attempt whose begin the program told.

    Attributes:
        attempt: Its number.
        global_step: The caller's number.
        micro_batches_declared: The caller's number.
        micro_batches: Those seen so far.
    """

    attempt: int
    global_step: int | None
    micro_batches_declared: int | None
    micro_batches: int


class StepClock:
    """Turns the events of one process's training loop into positions and attempt records.

    Not thread-safe by itself, `overdue` excepted: its events come from the training thread, or from an
    autograd thread while the training thread waits for it. Any order of them is taken without an exception.
    """

    def __init__(
        self,
        *,
        declared_optimizer: bool = False,
        device: DeviceClock | None = None,
        told_after_s: float = TOLD_AFTER_S,
        first_attempt: int = 0,
        hears_ends: bool = True,
    ) -> None:
        """Makes a clock that has seen nothing.

        Args:
            declared_optimizer: Whether the caller named an optimizer, so that attempts are known to be
                counted before the first step.
            device: Measures the phases again, where the moments of the events carry a device's marks.
            told_after_s: Seconds after its last step that a window waits for an end before it is told.
            first_attempt: Number of the first window.
            hears_ends: Whether ends of forwards will be told. Without them forwards and backwards have no
                times.
        """
        self._told_after_s = told_after_s
        self._is_declared = declared_optimizer
        self._optimizer_known = declared_optimizer
        self._has_backward = False
        self._has_step = False
        self._device = device
        self._hears_ends = hears_ends
        self._timer = PhaseTimer(keeps_spans=device is not None)
        self._window: Window | None = None
        self._running: RunningStep | None = None
        self.running_key: int | None = None
        """Names the optimizer of the outermost step that seems to run."""
        self._in_boundary = False
        self.num_forwards = 0
        """Root forwards seen so far."""
        self._forwards_outside = 0
        self._first_attempt = self._next_attempt = first_attempt
        self._ordinals = OptimizerOrdinals()
        self._last_position: Position | None = None
        self._is_running: Callable[[], bool] | None = None
        self.num_dropped_steps = 0
        """Steps beyond `MAX_STEPS_IN_WINDOW` in one window, which have no record."""
        self.num_steps_between_boundaries = 0
        """Steps after a boundary while no window was open, which belong to no attempt and have no record."""
        self.num_steps_without_forward = 0
        """Further steps of an optimizer in windows that are over and no block: no forward came in between."""

    @property
    def lacks_declared_steps(self) -> bool:
        """Whether optimizers were named and none has stepped, though a backward was seen."""
        return self._is_declared and self._has_backward and not self._has_step

    @property
    def is_stepping(self) -> bool:
        """Whether a step seems to run."""
        return self._running is not None

    def ordinal_of(self, optimizer_key: int) -> int:
        """Returns the ordinal that an optimizer's records have, or will have if it steps next (hot path)."""
        return self._ordinals.ordinal(optimizer_key)

    @property
    def in_boundary(self) -> bool:
        """Whether the program has said where the open attempt began."""
        return self._in_boundary

    @property
    def attempt(self) -> int | None:
        """The attempt that is open; None where none is."""
        return None if self._window is None else self._window.attempt

    @property
    def next_attempt(self) -> int:
        """The number of the window that opens next."""
        return self._next_attempt

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch that began last in the open attempt; None where none has."""
        return (
            None if self._window is None or not self._window.micro_batches else self._window.micro_batches - 1
        )

    @property
    def global_step(self) -> int | None:
        """The caller's number of the open attempt."""
        return None if self._window is None else self._window.global_step

    @property
    def boundary(self) -> Boundary | None:
        """What is known of the attempt whose begin the program told; None where none is open."""
        window = self._window
        if window is None or not window.explicit:
            return None
        return Boundary(
            window.attempt, window.global_step, window.micro_batches_declared, window.micro_batches
        )

    @property
    def step_provenance(self) -> StepProvenance:
        """How an attempt is known at this moment."""
        window = self._window
        if window is not None and window.explicit:
            return _EXPLICIT
        return _INFERRED if self._optimizer_known else _NOT_KNOWN

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

    def boundary_entered(
        self,
        now_s: float,
        now_us: int,
        *,
        global_step: int | None = None,
        micro_batches_declared: int | None = None,
    ) -> tuple[ClosedAttempt, ...] | None:
        """Takes that an attempt begins because the program says so (training thread, hot path).

        Args:
            now_s: Monotonic seconds.
            now_us: Microseconds since the epoch, UTC.
            global_step: The caller's number.
            micro_batches_declared: The caller's number.

        Returns:
            The records of the window that it closed; None inside another boundary, which goes on, and inside
            a step, whose attempt could not end with it.
        """
        if self._in_boundary:
            return None
        self._drop_aborted_step(now_s)
        if self._running is not None:
            return None
        self._timer.settle_backward(now_s, self._window, self._running)
        closed = self._close_window()
        window = self._open_window(now_s, now_us)
        window.explicit, window.has_begun = True, False
        window.global_step, window.micro_batches_declared = global_step, micro_batches_declared
        self._timer.boundary_entered(now_s)
        self._in_boundary = True
        return closed

    def boundary_left(self, now_s: float, *, failed: bool = False) -> tuple[ClosedAttempt, ...]:
        """Takes that the program's attempt is over (training thread, hot path).

        Args:
            now_s: Monotonic seconds.
            failed: Whether an exception left it.

        Returns:
            Its records. Without any step: one of outcome `ABANDONED`, or `UNKNOWN` where it did not fail and
            no optimizer was ever known to step.
        """
        self._in_boundary = False
        window = self._window
        if window is None or not window.explicit:
            return ()
        self._drop_aborted_step(now_s)
        self._timer.settle_backward(now_s, self._window, self._running)
        return self._close_window(failed=failed)

    def forward_started(self, *, grad_enabled: bool, now_s: float, now_us: int) -> Started:
        """Takes the start of a root forward (training thread, hot path).

        Args:
            grad_enabled: Whether gradients were enabled.
            now_s: Monotonic seconds.
            now_us: Microseconds since the epoch, UTC.

        Returns:
            The forward's position, and records: of the window that it closed, or of the open one where that
            was stepped long before. The latter know nothing of forwards from this one on.
        """
        if self._running is not None:
            self._drop_aborted_step(now_s)
        window, timer = self._window, self._timer
        if timer.waits_since_s is not None:
            timer.settle_backward(now_s, window, self._running)
        closed: tuple[ClosedAttempt, ...] = ()
        if grad_enabled and (
            window is None
            or (
                window.steps
                and not window.explicit
                and (self._running is None or window.last_step(self._running.key) is not None)
            )
        ):
            closed = self._close_window()
            window = self._open_window(now_s, now_us)
        elif window is not None and window.explicit and window.forwards == 0:
            window.started_at_us = now_us
            self._begin_boundary(window, now_s)
        elif window is not None and self._has_waited(window, now_s):
            closed = window.take_records(self._device)
        index = self.num_forwards
        self.num_forwards += 1
        if self._hears_ends:
            timer.forward_began(now_s)
        # As `step_provenance`, which would be a call.
        provenance = _INFERRED if self._optimizer_known else _NOT_KNOWN
        if window is None:
            ordinal = self._forwards_outside
            self._forwards_outside += 1
            position = Position(None, ordinal, None, index, grad_enabled, provenance)
        else:
            if window.explicit:
                provenance = _EXPLICIT
            position = window.place(index, grad_enabled=grad_enabled, provenance=provenance)
        self._last_position = position
        return new_tuple(Started, (position, closed))

    def forward_ended(self, now_s: float, grad_sync: GradSync, position: Position | None = None) -> None:
        """Takes the end of a root forward, also of one that raised (training thread, hot path).

        Args:
            now_s: Monotonic seconds.
            grad_sync: As latched at its start; `UNKNOWN` where its backward decides.
            position: Which forward; None is the last one that began. Of forwards that overlap, in several
                threads, only what lies between the last begin and the next end counts as time.
        """
        window = self._window
        which = self._last_position if position is None else position
        micro_batch = None
        if window is not None and which is not None and which.attempt == window.attempt:
            micro_batch = which.micro_batch
        began = self._timer.forward_ended(
            now_s, window, self._running, awaits_backward=micro_batch is not None
        )
        self._last_position = None
        if window is not None and micro_batch is not None and (began or position is not None):
            window.synchronised(grad_sync, micro_batch)

    def backward_synchronises(
        self, position: Position, grad_sync: GradSync, before: GradSync | None = None
    ) -> None:
        """Takes what a backward does, where that is decided no sooner (autograd thread, hot path).

        Of several backwards through one forward the last one counts.

        Args:
            position: Of the forward.
            grad_sync: What its latest backward does with the gradients.
            before: What the one before did; None for the first.
        """
        window = self._window
        if window is not None and position.micro_batch is not None and position.attempt == window.attempt:
            window.synchronised(grad_sync, position.micro_batch, before)

    def backward_ended(self, now_s: float) -> None:
        """Takes the end of a backward through a root forward (training or autograd thread, hot path).

        Args:
            now_s: Monotonic seconds.
        """
        self._has_backward = True
        window = self._window
        if window is not None:
            # In a boundary without a forward it may have begun at once: the gap is over where it was entered.
            window.has_begun = True
            self._timer.backward_ended(now_s, window, self._running)

    def step_started(self, optimizer_key: int, now_s: float, *, in_backward: bool = False) -> None:
        """Takes the start of an optimizer's step (training or autograd thread, hot path).

        Args:
            optimizer_key: Names the optimizer for as long as it lives.
            now_s: Monotonic seconds.
            in_backward: Whether a backward runs around it, so that it goes on after the step.
        """
        self._optimizer_known = self._has_step = True
        if self._running is not None:
            self._running.nested.append(optimizer_key)
            return
        window = self._window
        if window is not None and not window.has_begun:
            self._begin_boundary(window, now_s)
        self._timer.step_began(now_s, window, in_backward=in_backward)
        running = new_object(RunningStep)
        running.key, running.started_s, running.in_backward = optimizer_key, now_s, in_backward
        running.inner_s, running.inner_spans, running.judgement = 0.0, None, None
        running.nested = []
        self._running, self.running_key = running, optimizer_key
        if self._timer.keeps_spans:
            running.inner_spans = []

    def step_aborted(self, now_s: float) -> None:
        """Takes that the step which runs was left by an exception (training thread, hot path).

        Args:
            now_s: Monotonic seconds, when that was found out.
        """
        # In one line, between whose parts no interrupt comes.
        running, self._running, self.running_key = self._running, None, None
        if running is not None:
            # How far it came before it raised is not known, nor when.
            step = self._new_step(running.key, now_s, Judgement(Outcome.UNKNOWN, Evidence.NONE))
            step.aborted = True
            self._add_step(step)

    def step_ended(
        self,
        optimizer_key: int,
        now_s: float,
        *,
        lr: float | None = None,
        judgement: Judgement = APPLIED,
    ) -> None:
        """Takes the end of a step (training or autograd thread, hot path).

        Args:
            optimizer_key: As given to `step_started`.
            now_s: Monotonic seconds.
            lr: Learning rate of the first group, where it is a number on the host.
            judgement: What became of the attempt, as far as it is known now.
        """
        running = self._running
        if running is None or not (optimizer_key == running.key or running.knows(optimizer_key)):
            self._take_back_abort(optimizer_key, lr, judgement)
            return
        if running.nested and running.ends_nested(optimizer_key):
            self._timer.passed(now_s)
            return
        self._running = self.running_key = None
        window = self._window
        self._timer.step_ended(now_s, window, in_backward=running.in_backward)
        step = new_object(Step)
        step.key, step.optimizer, step.optimizer_attempt = optimizer_key, -1, -1
        step.judgement, step.ended_s, step.lr = running.judgement or judgement, now_s, lr
        step.claims = [None]
        own_s = now_s - running.started_s - running.inner_s
        step.optimizer_s = own_s if own_s > 0.0 else 0.0  # noqa: FURB136 - max takes two microseconds here
        if running.inner_spans is not None:
            step.span, step.inside = (running.started_s, now_s), running.inner_spans
        if window is None or len(window.steps) >= MAX_STEPS_IN_WINDOW:
            self._put_step(step, window)
            return
        step.optimizer, step.optimizer_attempt = self._ordinals.next_attempt(optimizer_key)
        window.steps.append(step)

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
        self._optimizer_known = self._has_step = True
        self._drop_aborted_step(now_s)
        judgement = Judgement(outcome, evidence, found_inf, amendment)
        if self._running is not None:
            self._running.take(judgement)
            return
        self._timer.settle_backward(now_s, self._window, self._running)
        step = self._new_step(optimizer_key, now_s, judgement)
        step.lr = lr
        self._add_step(step)

    def step_prepared(self, optimizer_key: int, *, lr: float | None, amendment: Amendment) -> Prepared:
        """Takes that a scaler has unscaled an optimizer's gradients (training thread, hot path).

        Where no step comes before the window is over, the window has a row of outcome `ABANDONED` of it.

        Args:
            optimizer_key: As given to `step_started`.
            lr: Learning rate of the first group, where it is a number on the host.
            amendment: Brings what only the device knows of it.

        Returns:
            What the caller ends when a step comes, and hands to `step_abandoned` where none will.
        """
        prepared = Prepared(optimizer_key, lr, amendment)
        window = self._window
        if window is None or len(window.prepared) >= MAX_STEPS_IN_WINDOW:
            prepared.is_over = True
        else:
            window.prepared.append(prepared)
        return prepared

    def step_abandoned(self, prepared: Prepared, now_s: float) -> None:
        """Takes that a prepared step will not come (training thread, hot path).

        Args:
            prepared: What `step_prepared` returned. Nothing happens where it is over.
            now_s: Monotonic seconds.
        """
        if prepared.is_over:
            return
        prepared.is_over = True
        self.step_skipped(
            prepared.key,
            now_s,
            lr=prepared.lr,
            outcome=Outcome.ABANDONED,
            evidence=Evidence.NONE,
            amendment=prepared.amendment,
        )

    def step_resolved(self, optimizer_key: int, judgement: Judgement) -> None:
        """Takes better evidence for an optimizer's last step in the window (training thread, hot path).

        Args:
            optimizer_key: As given to `step_started`. A step inside another one has no record: its evidence
                is that of the outer one.
            judgement: What became of it.
        """
        if self._running is not None:
            self._running.take(judgement)
            return
        window = self._window
        step = None if window is None else window.last_step(optimizer_key)
        if step is not None:
            step.judgement, step.aborted = judgement, False

    def other_model_stepped(self, now_s: float) -> None:
        """Takes that an optimizer of another model has stepped (training or autograd thread, hot path).

        Args:
            now_s: Monotonic seconds.
        """
        self._timer.other_model_stepped(now_s)

    def optimizer_gone(self, optimizer_key: int) -> None:
        """Forgets an optimizer that no longer lives; a new one under this key gets a new ordinal.

        Args:
            optimizer_key: As given to `step_started`.
        """
        self._ordinals.forget(optimizer_key)

    def overdue(self, now_s: float) -> tuple[ClosedAttempt, ...]:
        """Returns the records of the open window's steps that have waited long enough (writer thread).

        The training thread may feed the clock meanwhile. It neither waits for this nor does anything for it:
        each step is told once, by whichever of the two claims it first.

        Args:
            now_s: Monotonic seconds of the host.
        """
        window, timer = self._window, self._timer
        if window is None or not window.steps:
            return ()
        until_s, last_event_s = now_s - self._told_after_s, timer.last_event_s
        if window.explicit or self._running is not None or timer.is_in_backward:
            declared = window.micro_batches_declared
            awaits_more = declared is not None and window.micro_batches < declared
            # The gap before a block in which nothing but a skip was seen is not known yet.
            awaits_more |= not window.has_begun
            if awaits_more or timer.is_busy or last_event_s > until_s:
                return ()
        # A record is made of what several events wrote: none may have come in between.
        return window.take_overdue(self._device, until_s, lambda: timer.last_event_s == last_event_s)

    def untold(self) -> tuple[ClosedAttempt, ...]:
        """Returns the records of the open window's steps as they are now (training thread).

        They are told once more, with all that belongs to them, when the window ends.
        """
        return () if self._window is None else self._window.untold_records()

    def close(self, now_s: float) -> tuple[ClosedAttempt, ...]:
        """Closes the open window (training thread, or the main thread while the interpreter exits).

        Args:
            now_s: Monotonic seconds.

        Returns:
            Its records. Without any step: one of outcome `ABANDONED`, or `UNKNOWN` where no optimizer was
            ever known to step.
        """
        self.step_aborted(now_s)
        return self._close_window()

    def _has_waited(self, window: Window, now_s: float) -> bool:
        """Whether an evaluation that begins now may be the first of a long one behind a window's last step.

        In a block micro-batches may follow a step, and its end is told by the program.
        """
        if self._running is not None or window.explicit or not window.steps:
            return False
        last = window.steps[-1]
        return not last.is_told and now_s - last.ended_s > self._told_after_s

    def _open_window(self, now_s: float, now_us: int) -> Window:
        running, timer = self._running, self._timer
        window = new_object(Window)
        window.attempt, window.first_forward_index = self._next_attempt, self.num_forwards
        window.started_at_us = now_us
        # As `PhaseTimer.gap`, which would be a call. Inside a closure the time since the step's start is the
        # step's.
        last_end_s = timer.last_end_s
        begin_s = now_s if running is None else running.started_s
        window.gap = None if last_end_s is None else (last_end_s, begin_s)
        window.is_shared = window.explicit = False
        window.has_begun = True
        window.global_step = window.micro_batches_declared = window.end_s = None
        window.forwards = window.micro_batches = window.micro_batches_synced = 0
        window.last_sync, window.last_forward_index = _NOT_SYNCED, -1
        window.forward_s = window.backward_s = 0.0
        steps: list[Step] = []
        prepared: list[Prepared] = []
        window.steps, window.prepared = steps, prepared
        window.forward_spans = window.backward_spans = None
        if timer.keeps_spans:
            forward_spans: list[Span] = []
            backward_spans: list[Span] = []
            window.forward_spans, window.backward_spans = forward_spans, backward_spans
        self._next_attempt += 1
        self._window = window
        return window

    def _begin_boundary(self, window: Window, now_s: float) -> None:
        """Lets the gap before a boundary's window reach to the first thing that is known to run in it."""
        if not window.has_begun:
            window.has_begun = True
            window.gap = self._timer.gap(now_s if self._running is None else self._running.started_s)

    def _close_window(self, *, failed: bool = False) -> tuple[ClosedAttempt, ...]:
        window, self._window = self._window, None
        if window is None:
            return ()
        self._timer.window_closed(window)
        for prepared in window.prepared:
            if not prepared.is_over and len(window.steps) < MAX_STEPS_IN_WINDOW:
                prepared.is_over = True
                self._optimizer_known = self._has_step = True
                judgement = Judgement(Outcome.ABANDONED, Evidence.NONE, None, prepared.amendment)
                step = Step(prepared.key, *self._ordinals.next_attempt(prepared.key), judgement)
                step.lr = prepared.lr
                window.steps.append(step)
        if window.steps:
            if len(window.steps) > 1 and not window.explicit:
                self.num_steps_without_forward += len(window.steps) - len({one.key for one in window.steps})
            return window.take_records(self._device, is_over=True)
        window.is_shared |= self._timer.is_shared(window)
        outcome, evidence = Outcome.UNKNOWN, Evidence.NONE
        if self._optimizer_known or failed:
            outcome = Outcome.ABANDONED
            evidence = Evidence.EXPLICIT if window.explicit else Evidence.NONE
        window.steps.append(Step(-1, -1, 0, Judgement(outcome, evidence)))
        return window.take_records(self._device, is_over=True)

    def _new_step(self, key: int, now_s: float, judgement: Judgement) -> Step:
        """Returns a step that is over; the window has it once all is known that is known now."""
        return Step(key, -1, -1, judgement, ended_s=now_s)

    def _add_step(self, step: Step) -> None:
        """Puts a step into the open window, where there is one and it has room."""
        self._timer.stepped(step.ended_s, self._window)
        self._put_step(step, self._window)

    def _put_step(self, step: Step, window: Window | None) -> None:
        """Does that where its moment is known already."""
        if window is None:
            self.num_steps_between_boundaries += self._next_attempt > self._first_attempt
            return
        step.optimizer, step.optimizer_attempt = self._ordinals.next_attempt(step.key)
        if len(window.steps) >= MAX_STEPS_IN_WINDOW:
            self.num_dropped_steps += 1
        else:
            window.steps.append(step)

    def _last_step(self, key: int) -> Step | None:
        window = self._window
        return None if window is None else window.last_step(key)

    def _drop_aborted_step(self, now_s: float) -> None:
        if self._running is not None and self._is_running is not None and not self._is_running():
            self.step_aborted(now_s)

    def _take_back_abort(self, key: int, lr: float | None, judgement: Judgement) -> None:
        """A step that seemed to have raised ends after all: it ran in a thread of its own."""
        step = self._last_step(key)
        if step is not None and step.aborted:
            step.lr, step.judgement, step.aborted = lr, judgement, False
