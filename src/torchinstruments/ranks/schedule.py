"""Which forwards all ranks measure together, by time: pure state machines without threads, store or clock.

One rank, the *planner*, turns its own deadlines into *targets*: ordinals of attempts at an optimizer step
that lie so far ahead that every rank hears of them before it comes there. What an ordinal counts is the
target's unit: attempts; training forwards, where no optimizer was seen to step; or root forwards, where
none had gradients. All three are counts that every rank makes for itself, so nothing has to be sent but the
number.

The planner leaves one document in the store: its newest plans, and a beat that moves while it lives. The
*listeners* look at it once in a while. A listener that hears of nothing new for long goes by its own time.
"""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

__all__ = [
    "MAX_TARGETS",
    "Heard",
    "News",
    "Plan",
    "Planner",
    "Progress",
    "ScheduleListener",
    "Unit",
    "decode_news",
]

MAX_TARGETS = 128
"""Targets in one plan; of more deadlines within one look an even selection is kept."""

_KEPT_PLANS = 8
_RATE_WINDOWS = 12


class Unit(StrEnum):
    """What the ordinals of a plan count."""

    ATTEMPT = "attempt"
    TRAINING_FORWARD = "training_forward"
    FORWARD = "forward"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come.

    Attributes:
        attempt: The open attempt, -1 before the first.
        training_forward: Ordinal of the last forward with gradients, -1 before the first.
        forward: Ordinal of the last root forward, -1 before the first.
        counts_attempts: Whether an optimizer is known to step.
        first_forward_s: Monotonic seconds of the first root forward.
    """

    attempt: int
    training_forward: int
    forward: int
    counts_attempts: bool
    first_forward_s: float

    @property
    def unit(self) -> Unit:
        """The best unit that this rank can name a target in."""
        if self.training_forward < 0:
            return Unit.FORWARD
        return Unit.ATTEMPT if self.counts_attempts else Unit.TRAINING_FORWARD

    def ordinal(self, unit: Unit) -> int:
        """Returns the last ordinal in a unit."""
        match unit:
            case Unit.ATTEMPT:
                return self.attempt
            case Unit.TRAINING_FORWARD:
                return self.training_forward
            case Unit.FORWARD:
                return self.forward


@dataclass(frozen=True, slots=True)
class Plan:
    """Some targets.

    Attributes:
        first: Ordinal of its first target among all targets of the planner, from 0.
        unit: What the targets count.
        targets: Ordinals, ascending.
    """

    first: int
    unit: Unit
    targets: tuple[int, ...]

    @property
    def end(self) -> int:
        """Ordinal of the first target of the plan that follows."""
        return self.first + len(self.targets)


@dataclass(frozen=True, slots=True)
class News:
    """The planner's document.

    Attributes:
        beat: Grows with each document.
        forwards: Root forwards that the planner has begun.
        plans: The newest ones, oldest first.
        ended: Whether the planner has stopped for good.
    """

    beat: int
    forwards: int
    plans: tuple[Plan, ...] = ()
    ended: bool = False

    def encode(self) -> bytes:
        """Returns the document as ASCII."""
        return json.dumps(asdict(self), allow_nan=False).encode("ascii")


def decode_news(raw: bytes | None) -> News | None:
    """Returns the planner's document, or None where there is none that can be read."""
    if raw is None:
        return None
    try:
        document = json.loads(raw)
    except ValueError:
        return None
    match document:
        case {
            "beat": int(beat),
            "forwards": int(forwards),
            "plans": list(listed),
            "ended": bool(ended),
        }:
            plans = [_as_plan(one) for one in listed]
            return News(beat, forwards, tuple([plan for plan in plans if plan is not None]), ended)
        case _:
            return None


def _as_plan(document: object) -> Plan | None:
    if not isinstance(document, dict):
        return None
    match document:
        case {"first": int(first), "unit": str(unit), "targets": list(targets)}:
            ordinals = [target for target in targets if isinstance(target, int)]
            is_plan = unit in set(Unit) and bool(targets) and len(ordinals) == len(targets)
            return Plan(first, Unit(unit), tuple(ordinals)) if is_plan else None
        case _:
            return None


class Planner:
    """Turns the deadlines of one rank's clock into targets that every rank hears of in time.

    Deadlines lie on a grid that starts at the first root forward. One that passed while nothing ran is made
    up for once.
    """

    def __init__(self, *, interval_s: float, lead_s: float, look_s: float) -> None:
        """Makes a planner that has seen nothing.

        Args:
            interval_s: Between two deadlines.
            lead_s: How far ahead a target has to lie: at least two looks of the slowest listener.
            look_s: Between two calls of `look`, roughly.
        """
        self._interval_s = interval_s
        self._lead_s = lead_s
        self._look_s = look_s
        self._next_deadline = 1
        self._num_targets = 0
        self._num_beats = 0
        self._rates = {unit: _Rate() for unit in Unit}
        self._pending: dict[Unit, set[int]] = {unit: set() for unit in Unit}
        self._plans: deque[Plan] = deque(maxlen=_KEPT_PLANS)

    def look(self, now_s: float, progress: Progress | None) -> Plan | None:
        """Returns new targets, if it is time to tell of some.

        Args:
            now_s: Monotonic seconds.
            progress: Of the planner's own rank; None before its first root forward.
        """
        if progress is None:
            return None
        for unit, rate in self._rates.items():
            rate.observe(now_s, progress.ordinal(unit))
        unit = progress.unit
        rate = self._rates[unit]
        if rate.num_looks < 2:
            # Nothing is known of the pace yet.
            return None
        here = progress.ordinal(unit)
        pending = self._pending[unit]
        pending.difference_update([target for target in pending if target <= here])
        ahead = {
            # The open attempt may end at once, so that the one after it is no time away.
            here + 1 + max(1, math.ceil(rate.per_s * (moment_s - now_s)))
            for moment_s in self._due(now_s, progress.first_forward_s)
        }
        targets = tuple(sorted(ahead - pending))
        if not targets:
            return None
        pending.update(targets)
        plan = Plan(self._num_targets, unit, targets)
        self._num_targets = plan.end
        self._plans.append(plan)
        return plan

    def news(self, progress: Progress | None, *, ended: bool = False) -> News:
        """Returns the document to leave in the store.

        Args:
            progress: Of the planner's own rank.
            ended: Whether this is the last one.
        """
        self._num_beats += 1
        forwards = 0 if progress is None else progress.forward + 1
        return News(self._num_beats, forwards, tuple(self._plans), ended)

    def _due(self, now_s: float, start_s: float) -> Sequence[float]:
        """Returns the moments to find a target for, and counts their deadlines as used."""
        soonest_s = now_s + self._lead_s
        last = math.floor((soonest_s + self._look_s - start_s) / self._interval_s)
        if last < self._next_deadline:
            return ()
        # All that come too soon to be met are one, as soon as possible.
        first_in_time = max(self._next_deadline, math.floor((soonest_s - start_s) / self._interval_s) + 1)
        stride = max(1, math.ceil((last - first_in_time + 1) / (MAX_TARGETS - 1)))
        moments = [
            start_s + deadline * self._interval_s for deadline in range(first_in_time, last + 1, stride)
        ]
        if first_in_time > self._next_deadline:
            moments.insert(0, soonest_s)
        self._next_deadline = last + 1
        return moments


class _Rate:
    """How many ordinals a second pass, the fastest of late.

    A target that is heard of too late is worse than one that comes later than planned.
    """

    def __init__(self) -> None:
        self.num_looks = 0
        self._windows: deque[float] = deque(maxlen=_RATE_WINDOWS)
        self._since_s = 0.0
        self._ordinal = 0

    @property
    def per_s(self) -> float:
        """Zero where none has passed yet."""
        return max(self._windows, default=0.0)

    def observe(self, now_s: float, ordinal: int) -> None:
        """Takes a look at a clock."""
        self.num_looks += 1
        if self.num_looks > 1:
            if ordinal == self._ordinal or now_s <= self._since_s:
                # A pause says nothing of the pace after it.
                return
            self._windows.append((ordinal - self._ordinal) / (now_s - self._since_s))
        self._since_s, self._ordinal = now_s, ordinal


@dataclass(frozen=True, slots=True)
class Heard:
    """What a listener makes of one look.

    Attributes:
        plans: Those that are new to it.
        num_lost: Targets that came and went between two looks.
        is_led: Whether the planner is alive; else this rank goes by its own time.
    """

    plans: tuple[Plan, ...]
    num_lost: int
    is_led: bool


class ScheduleListener:
    """Follows a planner."""

    def __init__(self, *, now_s: float, patience_s: float) -> None:
        """Begins to listen, and believes in the planner for a while.

        Args:
            now_s: Monotonic seconds.
            patience_s: Silence after which the planner counts as dead.
        """
        self._patience_s = patience_s
        self._heard_at_s = now_s
        self._raw: bytes | None = None
        self._news = News(0, 0)
        self._own_forwards = 0
        self._num_targets = 0

    def hear(self, now_s: float, raw: bytes | None, own_forwards: int) -> Heard:
        """Takes what lies in the store.

        Args:
            now_s: Monotonic seconds.
            raw: The planner's document as it was found; None where nothing was, or the store did not answer.
            own_forwards: Root forwards that this rank has begun.
        """
        news = decode_news(raw) if raw != self._raw else None
        self._raw = raw
        plans: list[Plan] = []
        num_lost = 0
        if news is not None and news.beat > self._news.beat:
            # A planner that stands while this rank runs on will not lead it anywhere.
            if news.forwards != self._news.forwards or own_forwards == self._own_forwards:
                self._heard_at_s = now_s
            self._news, self._own_forwards = news, own_forwards
            for plan in news.plans:
                if plan.first >= self._num_targets:
                    num_lost += plan.first - self._num_targets
                    self._num_targets = plan.end
                    plans.append(plan)
        is_led = not self._news.ended and now_s - self._heard_at_s < self._patience_s
        return Heard(tuple(plans), num_lost, is_led)
