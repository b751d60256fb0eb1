"""Time-based sampling at forwards that all ranks have in common.

Each rank by itself would measure the first forward after its own deadline, and ranks a few milliseconds apart
would measure different forwards. Here the forwards come from a planner instead, as ordinals that lie ahead;
the background thread that hears of them leaves them here, and the training thread meets them. What it hears
of too late it returns as missed. A rank without a planner goes by its own time.
"""

import heapq
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torchinstruments.observe.sampling import SamplingEvent, TimedSampler
from torchinstruments.ranks.schedule import Plan, Progress, Unit
from torchinstruments.records import Position, StepProvenance

__all__ = ["AlignedSampler", "Due", "Place"]

MAX_REMEMBERED = 4096
"""Forwards whose place is known when a target among them is heard of too late."""

_MAX_UNTAKEN = 64


@dataclass(frozen=True, slots=True)
class Place:
    """A forward that began.

    Attributes:
        position: Where it stands.
        started_at_us: Microseconds since the epoch.
    """

    position: Position
    started_at_us: int


@dataclass(frozen=True, slots=True)
class Due:
    """What a forward's start means.

    Attributes:
        sample: Whether to measure it.
        missed: Forwards that were to be measured and were not.
        num_lost: Further ones, whose place is not known any more.
    """

    sample: bool
    missed: tuple[Place, ...] = ()
    num_lost: int = 0


_MEASURE = Due(sample=True)
_PASS = Due(sample=False)


class AlignedSampler:
    """Stands in for a `TimedSampler` where several ranks measure.

    Until `go_alone` or `follow` says what kind of world this is, nothing but the very first forward is
    chosen, and that only where the sampler begins at once: its ordinal is known to all ranks without a word.

    Args:
        sampler: As the caller gave it; it tells the interval, and times this rank where it is alone.
    """

    def __init__(self, sampler: TimedSampler) -> None:
        self.interval_s = sampler.interval.total_seconds()
        self._interval = sampler.interval
        self._own = sampler
        self._is_led = True
        # A signal handler may run the model while its thread is in here.
        self._lock = threading.RLock()
        self._untaken: deque[Plan] = deque()
        self._num_lost = 0
        self._targets: dict[Unit, list[int]] = {unit: [] for unit in Unit}
        self._remembered: deque[tuple[int, Position, int]] = deque(maxlen=MAX_REMEMBERED)
        self._attempt = self._training_forward = self._forward = -1
        self._num_started = 0
        self._seen: tuple[int, int, int, bool] | None = None
        self._first_forward_s = 0.0

    def go_alone(self) -> None:
        """Goes by this rank's own time, since there is nobody to agree with (enrolling thread)."""
        self._is_led = False

    def follow(self, *, is_led: bool) -> None:
        """Takes whether the planner is alive (background thread).

        A rank that lost its planner measures after one interval of its own.
        """
        if self._is_led and not is_led:
            self._own = TimedSampler(self._interval)
        self._is_led = is_led

    def take(self, plans: Sequence[Plan], num_lost: int = 0) -> None:
        """Takes targets (background thread).

        Args:
            plans: What was heard of.
            num_lost: Targets that passed unheard.
        """
        with self._lock:
            self._num_lost += num_lost
            self._untaken.extend(plans)
            while len(self._untaken) > _MAX_UNTAKEN:
                # This rank runs no forwards at all, while the planner's goes on.
                self._num_lost += len(self._untaken.popleft().targets)

    @property
    def progress(self) -> Progress | None:
        """How far this rank has come; None before its first root forward (background thread)."""
        seen = self._seen
        return None if seen is None else Progress(*seen, self._first_forward_s)

    @property
    def num_forwards(self) -> int:
        """Root forwards begun (background thread)."""
        seen = self._seen
        return 0 if seen is None else seen[2] + 1

    def disarm(self) -> None:
        """Makes it usable in a forked child, where the lock may be held for ever."""
        self._lock = threading.RLock()

    def forward_started(
        self, position: Position, *, started_at_us: int, now_s: float, is_paused: bool
    ) -> Due:
        """Takes the start of a root forward (training thread, hot path).

        Args:
            position: Where it stands.
            started_at_us: Microseconds since the epoch.
            now_s: Seconds of ``time.monotonic``.
            is_paused: Whether nothing may be measured at this moment.
        """
        with self._lock:
            missed = self._take_over() if self._untaken or self._num_lost else _PASS
            is_due = self._advance(position, started_at_us, now_s)
            # This rank's own clock begins with the first forward, though it may never be asked again.
            is_wanted = is_due
            if not is_paused and (not self._is_led or self._num_started == 1):
                is_wanted = self._own_time_is_over(position, now_s) or is_due
        if is_paused and is_due:
            # Other ranks measure it.
            paused = Place(position, started_at_us)
            return Due(sample=False, missed=(*missed.missed, paused), num_lost=missed.num_lost)
        if missed is _PASS:
            return _MEASURE if is_wanted else _PASS
        return Due(is_wanted, missed.missed, missed.num_lost)

    def finish(self) -> Due:
        """Returns what was heard of after the last forward, and lay before it (training thread)."""
        with self._lock:
            return self._take_over()

    def _own_time_is_over(self, position: Position, now_s: float) -> bool:
        event = SamplingEvent(
            position.attempt,
            position.forward_in_attempt,
            position.micro_batch,
            position.forward_index,
            position.grad_enabled,
            now_s,
        )
        return self._own.should_sample(event)

    def _take_over(self) -> Due:
        """Puts new targets where they are met, and finds those that have passed."""
        missed: list[Place] = []
        lost, self._num_lost = self._num_lost, 0
        while self._untaken:
            plan = self._untaken.popleft()
            here = self._ordinal(plan.unit)
            targets = self._targets[plan.unit]
            for target in plan.targets:
                if target > here:
                    heapq.heappush(targets, target)
                elif (place := self._place_of(plan.unit, target)) is not None:
                    missed.append(place)
                else:
                    lost += 1
        return Due(sample=False, missed=tuple(missed), num_lost=lost) if missed or lost else _PASS

    def _advance(self, position: Position, started_at_us: int, now_s: float) -> bool:
        """Counts a forward, and returns whether it is a target."""
        if self._num_started == 0:
            self._first_forward_s = now_s
        self._num_started += 1
        # Forwards of several threads may come in another order than they were counted in.
        self._forward = max(self._forward, position.forward_index)
        is_due = self._meets(Unit.FORWARD, self._forward)
        if position.grad_enabled:
            self._training_forward += 1
            is_due = self._meets(Unit.TRAINING_FORWARD, self._training_forward) or is_due
            if position.attempt is not None and position.attempt > self._attempt:
                self._attempt = position.attempt
                is_due = self._meets(Unit.ATTEMPT, self._attempt) or is_due
        self._remembered.append((self._training_forward, position, started_at_us))
        counts_attempts = position.step_provenance is not StepProvenance.NONE
        self._seen = (self._attempt, self._training_forward, self._forward, counts_attempts)
        return is_due

    def _meets(self, unit: Unit, ordinal: int) -> bool:
        targets = self._targets[unit]
        is_due = False
        while targets and targets[0] <= ordinal:
            heapq.heappop(targets)
            is_due = True
        return is_due

    def _ordinal(self, unit: Unit) -> int:
        match unit:
            case Unit.ATTEMPT:
                return self._attempt
            case Unit.TRAINING_FORWARD:
                return self._training_forward
            case Unit.FORWARD:
                return self._forward

    def _place_of(self, unit: Unit, target: int) -> Place | None:
        """Returns the forward that a target meant, if it is remembered."""
        for training_forward, position, started_at_us in self._remembered:
            match unit:
                case Unit.FORWARD:
                    is_it = position.forward_index == target
                case Unit.TRAINING_FORWARD:
                    is_it = position.grad_enabled and training_forward == target
                case Unit.ATTEMPT:
                    is_it = position.attempt == target and position.micro_batch == 0
            if is_it:
                return Place(position, started_at_us)
        return None
