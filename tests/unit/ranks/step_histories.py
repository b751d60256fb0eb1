"""Training programs as event lists, and what a step clock should make of them, told from the whole list.

The clock sees one event after the other and keeps a state. The reference here has the finished list: it asks
of each forward which completed steps lie between the last opening and it, and of each second what ran in it.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import GradSync, Outcome

NUM_KEYS = 3


@dataclass
class Event:
    """Something that happens at second `at`; `mate` is where what it begins ends, or what it ends began."""

    kind: str
    at: int
    key: int = -1
    grad: bool = False
    sync: GradSync = GradSync.UNKNOWN
    outer: bool = True
    in_backward: bool = False
    declared: int | None = None
    failed: bool = False
    mate: int | None = None


@dataclass
class Expected:
    """One window as the reference sees it."""

    opened: int
    explicit: bool
    closed: int | None = None
    declared: int | None = None
    failed: bool = False
    forwards: list[int] = field(default_factory=list)
    steps: list[tuple[int, str]] = field(default_factory=list)


def programs() -> st.SearchStrategy[list[Any]]:
    """Programs of forwards, backwards, steps with and without closures, skips, failures and blocks."""
    key = st.integers(0, NUM_KEYS - 1)
    sync = st.sampled_from([GradSync.SYNCED, GradSync.LOCAL])
    forward = st.tuples(st.just("forward"), st.booleans(), sync)
    backward = st.tuples(st.just("backward"), st.lists(key, max_size=3))
    inside = st.one_of(forward, st.just(("backward", [])), st.tuples(st.just("step"), key, st.just([])))
    step = st.tuples(st.just("step"), key, st.lists(inside, max_size=4))
    plain_step = st.tuples(st.just("step"), key, st.just([]))
    skip = st.tuples(st.just("skip"), key)
    raised = st.tuples(st.just("raised"), key)
    flat = st.one_of(forward, forward, backward, plain_step, step, skip, raised)
    declared = st.one_of(st.none(), st.integers(1, 4))
    inner_block = st.tuples(st.just("block"), declared, st.just([]), st.just(False))
    block = st.tuples(
        st.just("block"), declared, st.lists(st.one_of(flat, flat, inner_block), max_size=6), st.booleans()
    )
    return st.lists(st.one_of(flat, flat, flat, block), max_size=25)


def events_of(program: list[Any]) -> list[Event]:
    """Flattens a program; each event takes a second."""
    flattening = _Flattening()
    for item in program:
        flattening.play(item)
    return flattening.events


class _Flattening:
    """The events of a program so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, kind: str, begun: Event | None = None, **details: Any) -> Event:
        """Adds an event; one that ends what another began knows it."""
        event = Event(kind, len(self.events), **details)
        self.events.append(event)
        if begun is not None:
            begun.mate, event.mate = event.at, begun.at
        return event

    def play(self, item: Any, *, in_step: bool = False, in_block: bool = False) -> None:
        """Adds the events of one part of a program."""
        kind = item[0]
        if kind == "forward":
            began = self.add("forward", grad=item[1], sync=item[2])
            self.add("forward_end", began, grad=item[1], sync=item[2])
        elif kind == "backward":
            for key in item[1]:
                self.step(key, [], outer=True, in_backward=True)
            self.add("backward_end")
        elif kind == "step":
            self.step(item[1], item[2], outer=not in_step)
        elif kind == "block":
            began = self.add("enter", declared=item[1], outer=not in_block)
            for inner in item[2]:
                self.play(inner, in_block=True)
            self.add("leave", began, failed=item[3], outer=not in_block)
        else:
            self.add(kind, key=item[1])

    def step(self, key: int, body: list[Any], *, outer: bool, in_backward: bool = False) -> None:
        """Adds a step and what runs inside it."""
        began = self.add("step", key=key, outer=outer, in_backward=in_backward)
        for item in body:
            self.play(item, in_step=True)
        self.add("step_end", began, key=key, outer=outer, in_backward=in_backward)


class Driver:
    """Tells a clock the events, as the hooks of an optimizer watch and of a probe would."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.is_running = False
        self.closed: list[Any] = []
        self.positions: dict[int, Any] = {}
        clock.ask_whether_running(lambda: self.is_running)

    def tell(self, event: Event) -> None:
        """Tells one event."""
        clock, now = self.clock, float(event.at)
        if event.kind == "forward":
            started = clock.forward_started(grad_enabled=event.grad, now_s=now, now_us=event.at)
            self.closed.extend(started.closed)
            self.positions[event.at] = started.position
        elif event.kind == "forward_end":
            assert event.mate is not None
            clock.forward_ended(now, event.sync, self.positions[event.mate])
        elif event.kind == "backward_end":
            clock.backward_ended(now)
        elif event.kind in ("step", "raised"):
            if event.outer and not self.is_running:
                clock.step_aborted(now)
            clock.step_started(event.key, now, in_backward=event.in_backward)
            self.is_running = event.kind == "step"
        elif event.kind == "step_end":
            clock.step_ended(event.key, now)
            self.is_running = not event.outer
        elif event.kind == "skip":
            clock.step_skipped(event.key, now)
        elif event.kind == "enter":
            closed = clock.boundary_entered(
                now, event.at, global_step=event.at, micro_batches_declared=event.declared
            )
            assert (closed is not None) == event.outer
            self.closed.extend(closed or ())
        elif event.kind == "leave" and event.outer:
            self.closed.extend(clock.boundary_left(now, failed=event.failed))

    def close(self, at: int) -> None:
        """Ends the program."""
        self.closed.extend(self.clock.close(float(at)))


FINDS_OUT = frozenset({"forward", "skip", "step", "raised", "enter", "leave"})


def completions(events: list[Event]) -> list[tuple[float, int, str]]:
    """When outermost steps were over, of which optimizer, and how; one that raised: when that was seen."""
    found: list[tuple[float, int, str]] = []
    for event in events:
        if event.kind == "step_end" and event.outer:
            found.append((event.at, event.key, "applied"))
        elif event.kind == "skip":
            found.append((event.at, event.key, "skipped"))
        elif event.kind == "raised":
            later = (one.at for one in events[event.at + 1 :] if one.kind in FINDS_OUT and one.outer)
            found.append((next(later, len(events)) - 0.5, event.key, "unknown"))
    return found


def windows_of(events: list[Event]) -> list[Expected]:
    """All windows, from the whole list."""
    done = completions(events)
    blocks = {event.at: event for event in events if event.kind == "enter" and event.outer}
    windows: list[Expected] = []
    for event in events:
        last = windows[-1] if windows and windows[-1].closed is None else None
        opens = event.at in blocks
        if event.kind == "forward" and event.grad and not (last is not None and last.explicit):
            around = [
                one
                for one in events
                if one.kind == "step" and one.outer and one.at < event.at < (one.mate or 0)
            ]
            since = [key for at, key, _ in done if last is not None and last.opened < at < event.at]
            opens = last is None or (around[0].key in since if around else bool(since))
        if opens:
            if last is not None:
                last.closed = event.at
            block = blocks.get(event.at)
            windows.append(
                Expected(event.at, block is not None, declared=None if block is None else block.declared)
            )
        if event.kind == "leave" and event.outer:
            windows[-1].closed, windows[-1].failed = event.at, event.failed
    for window in windows:
        closed = len(events) if window.closed is None else window.closed
        window.closed = closed
        window.forwards = [e.at for e in events if e.kind == "forward" and window.opened <= e.at < closed]
        window.steps = [(key, how) for at, key, how in done if window.opened < at < closed]
    return windows


def labels_of(events: list[Event], windows: list[Expected]) -> list[tuple[str, int]]:
    """What ran in each second, ``forward``, ``backward`` or ``""``, and in which window; -1 for none."""
    labels: list[tuple[str, int]] = []
    for at, event in enumerate(events):
        index = next((i for i, w in enumerate(windows) if w.opened <= at < (w.closed or 0)), -1)
        if index < 0 or at + 1 >= len(events):
            labels.append(("", index))
        elif event.kind == "forward":
            labels.append(("forward", index))
        else:
            labels.append(("backward" if _is_backward(events, at, windows[index].opened) else "", index))
    return labels


def _is_reset(event: Event) -> bool:
    """Whether the time that waits for a backward ends here."""
    return event.outer and event.kind != "forward_end"


def _is_backward(events: list[Event], at: int, opened: int) -> bool:
    """Whether the second after an event counts as backward."""
    before, after = events[opened : at + 1], events[at + 1 :]
    ended = max((one.at for one in before if one.kind == "forward_end" and one.grad), default=None)
    if ended is not None and not any(_is_reset(one) for one in events[ended + 1 : at + 1]):
        following = next((one for one in after if _is_reset(one)), None)
        return following is not None and following.kind != "step_end"
    # A block that is ignored is no event.
    upcoming = next(one for one in after if one.outer or one.kind not in ("enter", "leave"))
    event = next(one for one in reversed(before) if one.outer or one.kind not in ("enter", "leave"))
    if upcoming.kind == "backward_end":
        return True
    between_steps = upcoming.kind == "step" and event.kind == "step_end"
    return between_steps and upcoming.in_backward and event.in_backward


def gap_before(events: list[Event], windows: list[Expected], index: int) -> int:
    """Seconds from the end of the window before to the begin of this one."""
    if index == 0:
        return 0
    return max(0, _begin_of(events, windows[index]) - _end_of(events, windows[index - 1]))


def _begin_of(events: list[Event], window: Expected) -> int:
    assert window.closed is not None
    if not window.explicit:
        around = (one for one in events[: window.opened] if one.kind == "step" and one.outer)
        return next((one.at for one in around if (one.mate or 0) > window.opened), window.opened)
    begins = ("forward", "step", "raised", "backward_end")
    inside = (one for one in events[window.opened : window.closed] if one.outer and one.kind in begins)
    first = next(inside, None)
    return window.opened if first is None or first.kind == "backward_end" else first.at


def _end_of(events: list[Event], window: Expected) -> int:
    assert window.closed is not None
    if window.closed < len(events) and _is_backward(events, window.closed - 1, window.opened):
        return window.closed
    done = [at for at, _, _ in completions(events) if window.opened < at < window.closed]
    inside = [one for one in events[window.opened : window.closed] if one.outer]
    if done:
        later = (one for one in inside if one.kind in ("forward_end", "backward_end"))
        return max(math.ceil(max(done)), *(one.at for one in later if one.at > min(done)), 0)
    ends = ("enter", "forward", "forward_end", "backward_end", "step", "raised")
    return max(one.at for one in inside if one.kind in ends)


def outcome_of(window: Expected, *, optimizer_known: bool) -> tuple[Outcome, str]:
    """What a window without a step ends as."""
    if optimizer_known or window.failed:
        return Outcome.ABANDONED, "explicit" if window.explicit else "none"
    return Outcome.UNKNOWN, "none"
