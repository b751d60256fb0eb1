"""The open attempt: what is counted of it, how its time divides into phases, and the records it ends as.

A moment is a number of seconds of one monotonic clock. On an accelerator it is a `float` that also carries a
mark of the device (`ranks.device_times`); nothing here knows that, but a window can keep the moments between
which its phases ran, so that they are measured again by the device's own clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from torchinstruments.ranks.bare_objects import filled_for, new_object
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

__all__ = [
    "APPLIED",
    "MAX_SPANS",
    "DeviceClock",
    "Judgement",
    "Prepared",
    "Span",
    "Spans",
    "Step",
    "Window",
    "keep_span",
]

# To look a member of an enumeration up takes as long as to call a function.
_NOT_KNOWN = GradSync.UNKNOWN
_FilledPosition = filled_for(Position)

MAX_SPANS = 4_096
"""Spans whose moments a window keeps; one with more has the host's times."""

Span: TypeAlias = tuple[float, float]
"""The moments at which something began and ended."""


def keep_span(spans: list[Span] | None, begin_s: float, end_s: float) -> None:
    """Adds the time between two moments to those that are kept, where they are (training thread)."""
    if spans is not None and len(spans) <= MAX_SPANS:
        spans.append((begin_s, end_s))


@dataclass(frozen=True, slots=True)
class Spans:
    """The moments of one attempt's phases.

    Attributes:
        gap: From the end of the attempt before to this one's first forward; None for the first attempt.
        forward: Of its forwards.
        backward: Of its backwards.
        step: Of the step; None where none ran.
        inside_step: Forwards and backwards inside the step, which are no part of its time.
    """

    gap: Span | None
    forward: Sequence[Span]
    backward: Sequence[Span]
    step: Span | None
    inside_step: Sequence[Span]


class DeviceClock(Protocol):
    """Measures spans whose moments carry marks of a device: `ranks.device_times.DeviceTimes`."""

    def amendments(self, attempts: Sequence[Spans]) -> Sequence[Amendment]:
        """Returns for each record of a window what brings its times (training thread, hot path)."""
        ...


class Judgement(NamedTuple):
    """What became of a step. It is replaced as a whole, since another thread may read it.

    Attributes:
        outcome: As in `AttemptRecord`.
        evidence: As in `AttemptRecord`.
        found_inf: What the scaler found, where it is known on the host.
        amendment: Brings what only the device knows of it.
    """

    outcome: Outcome
    evidence: Evidence
    found_inf: float | None = None
    amendment: Amendment | None = None


APPLIED = Judgement(Outcome.APPLIED, Evidence.OPTIMIZER_HOOK)
"""A step that the hooks of its optimizer saw."""


@dataclass(eq=False)
class Step:
    """One step of one optimizer in a window. It is told once, by whichever thread claims it first.

    Attributes:
        key: Names the optimizer.
        optimizer: Ordinal of the optimizer.
        optimizer_attempt: Ordinal of this try among those of the optimizer.
        judgement: What became of it, as far as it is known.
        ended_s: When it was over.
        optimizer_s: What the step itself took.
        lr: Learning rate of the first group, where it is known.
        aborted: Whether it seems to have been left by an exception.
        span: From its begin to its end; None where none was seen to run.
        inside: What ran inside it and is none of its time.
        claims: One for whoever tells it.
    """

    key: int
    optimizer: int
    optimizer_attempt: int
    judgement: Judgement
    ended_s: float = 0.0
    optimizer_s: float = 0.0
    lr: float | None = None
    aborted: bool = False
    span: Span | None = None
    inside: Sequence[Span] = ()
    claims: list[None] = field(default_factory=partial(list, (None,)))

    @property
    def is_told(self) -> bool:
        """Whether its record was taken (any thread)."""
        return not self.claims

    def claim(self) -> bool:
        """Returns True to one caller, who tells it, and False to all others; no lock is held (any thread)."""
        try:
            self.claims.pop()
        except IndexError:
            return False
        return True


@dataclass(slots=True, eq=False)
class Prepared:
    """Gradients that a scaler has unscaled in a window for a step that may come.

    Attributes:
        key: Names the optimizer.
        lr: Learning rate of the first group, where it is known.
        amendment: Brings what only the device knows of it.
        is_over: Whether the step came, or the window was told of as one in which it did not.
    """

    key: int
    lr: float | None
    amendment: Amendment
    is_over: bool = False


@dataclass(slots=True)
class Window:
    """An attempt that is open.

    Attributes:
        attempt: Its number.
        first_forward_index: Of its first root forward, or of the next one while it has none.
        started_at_us: When its first forward began, or the window itself where it has none.
        gap: From the end of the attempt before to its begin; None for the first attempt.
        is_shared: Whether another model was trained in its gap or before its last step: what a rank does by
            itself may then lie anywhere, and the gap holds what is none of it.
        explicit: Whether the program says where it begins and ends.
        has_begun: Whether a forward, backward or step was seen in it; inferred ones begin with a forward.
        global_step: The caller's number.
        micro_batches_declared: The caller's number.
        forwards: Root forwards so far.
        micro_batches: Those with gradients enabled.
        micro_batches_synced: Those of them whose gradients are synchronised.
        last_sync: What became of the last one's.
        forward_s: Time in root forwards.
        backward_s: Time in backwards.
        forward_spans: Its parts; None where they are not kept.
        backward_spans: As above.
        steps: Its steps, in the order of their ends.
        prepared: Steps that are awaited.
        end_s: When its last step, or what came after it, was over; None before the first step.
    """

    attempt: int
    first_forward_index: int
    started_at_us: int
    gap: Span | None
    is_shared: bool = False
    explicit: bool = False
    has_begun: bool = True
    global_step: int | None = None
    micro_batches_declared: int | None = None
    forwards: int = 0
    micro_batches: int = 0
    micro_batches_synced: int = 0
    last_sync: GradSync = GradSync.UNKNOWN
    last_forward_index: int = -1
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_spans: list[Span] | None = None
    backward_spans: list[Span] | None = None
    steps: list[Step] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    end_s: float | None = None

    def place(self, index: int, *, grad_enabled: bool, provenance: StepProvenance) -> Position:
        """Counts a root forward that begins in it (training thread, hot path)."""
        ordinal = self.forwards
        self.forwards += 1
        self.last_forward_index = index
        micro_batch = None
        if grad_enabled:
            micro_batch = self.micro_batches
            self.micro_batches += 1
            self.last_sync = _NOT_KNOWN
        position = new_object(_FilledPosition)
        position.attempt = self.attempt
        position.forward_in_attempt = ordinal
        position.micro_batch = micro_batch
        position.forward_index = index
        position.grad_enabled = grad_enabled
        position.step_provenance = provenance
        position.__class__ = Position
        return position

    def synchronised(self, grad_sync: GradSync, micro_batch: int, before: GradSync | None = None) -> None:
        """Takes what becomes of a micro-batch's gradients (training or autograd thread, hot path).

        Args:
            grad_sync: What becomes of them, by what is known now.
            micro_batch: Which one.
            before: What this took of the same micro-batch before.
        """
        self.micro_batches_synced += (grad_sync is GradSync.SYNCED) - (before is GradSync.SYNCED)
        if micro_batch == self.micro_batches - 1:
            self.last_sync = grad_sync

    def last_step(self, key: int) -> Step | None:
        """Returns the last step of an optimizer in it."""
        for step in reversed(self.steps):
            if step.key == key:
                return step
        return None

    def take_records(self, device: DeviceClock | None, *, is_over: bool = False) -> tuple[ClosedAttempt, ...]:
        """Returns the records of its steps as they are, each step's once (training thread, hot path).

        Args:
            device: Measures its times again.
            is_over: Whether nothing of it changes any more, so that whoever looks at a record makes it.
        """
        if device is not None or not is_over:
            return self._told([step for step in self.steps if step.claim()], device, is_over=is_over)
        # The same without a call of its own for each step: nearly each window ends here.
        told: list[ClosedAttempt] = []
        for step in self.steps:
            try:
                step.claims.pop()
            except IndexError:
                continue
            judgement = step.judgement
            amendments = () if judgement.amendment is None else (judgement.amendment,)
            closed = new_object(ClosedAttempt)
            closed.source, closed.amendments = partial(self._record, step, judgement), amendments
            told.append(closed)
        return tuple(told)

    def take_overdue(
        self, device: DeviceClock | None, until_s: float, is_unchanged: Callable[[], bool]
    ) -> tuple[ClosedAttempt, ...]:
        """Returns the records of its steps that were over at a moment and are not told yet (writer thread).

        The training thread may go on meanwhile. What it would tell at that moment is told by one of the two.

        Args:
            device: Measures its times again.
            until_s: The moment.
            is_unchanged: Asked when the records are made: where it denies, none is taken.
        """
        waiting: list[Step] = []
        for step in reversed(self.steps):
            if step.is_told:
                break
            if step.ended_s <= until_s:
                waiting.append(step)
        waiting.reverse()
        records = self._told(waiting, device)
        if not waiting or not is_unchanged():
            return ()
        return tuple([told for step, told in zip(waiting, records, strict=True) if step.claim()])

    def untold_records(self) -> tuple[ClosedAttempt, ...]:
        """Returns the records that nobody has claimed, as they are, and claims none (training thread)."""
        return self._told([step for step in self.steps if not step.is_told], None)

    def _told(
        self, steps: Sequence[Step], device: DeviceClock | None, *, is_over: bool = False
    ) -> tuple[ClosedAttempt, ...]:
        times: Sequence[Amendment] = ()
        if device is not None:
            # A window that is told before it is over adds to its own.
            forward, backward = tuple(self.forward_spans or ()), tuple(self.backward_spans or ())
            times = device.amendments(
                [Spans(self.gap, forward, backward, step.span, step.inside) for step in steps]
            )
        told: list[ClosedAttempt] = []
        for index, step in enumerate(steps):
            judgement = step.judgement
            amendments = () if judgement.amendment is None else (judgement.amendment,)
            if times:
                amendments = (times[index], *amendments)
            make = partial(self._record, step, judgement)
            told.append(ClosedAttempt(make if is_over else make(), amendments))
        return tuple(told)

    def _record(self, step: Step, judgement: Judgement) -> AttemptRecord:
        gap = self.gap
        return AttemptRecord(
            attempt=self.attempt,
            optimizer=step.optimizer,
            optimizer_attempt=step.optimizer_attempt,
            first_forward_index=self.first_forward_index,
            last_forward_index=self.last_forward_index if self.forwards else self.first_forward_index - 1,
            micro_batches=self.micro_batches,
            micro_batches_synced=self.micro_batches_synced,
            last_micro_batch_sync=self.last_sync,
            outcome=judgement.outcome,
            evidence=judgement.evidence,
            started_at_us=self.started_at_us,
            gap_s=None if self.is_shared else 0.0 if gap is None else max(0.0, gap[1] - gap[0]),
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            optimizer_s=step.optimizer_s,
            global_step=self.global_step,
            micro_batches_declared=self.micro_batches_declared,
            found_inf=judgement.found_inf,
            lr=step.lr,
        )
