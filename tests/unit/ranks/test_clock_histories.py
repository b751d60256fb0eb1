"""The clock against a reference that reads whole histories, and against events in any order at all."""

import math
from collections import Counter
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from typing_extensions import override

from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.window import Judgement
from torchinstruments.records import Evidence, GradSync, Outcome, StepProvenance
from unit.ranks.step_histories import (
    Driver,
    events_of,
    gap_before,
    labels_of,
    outcome_of,
    programs,
    windows_of,
)


def _play(program, **options):
    """Plays a program; returns its events, the clock's driver, and the reference's windows."""
    events = events_of(program)
    # The reference tells a window at its end, whatever came between.
    driver = Driver(StepClock(**options, told_after_s=math.inf))
    for event in events:
        driver.tell(event)
    driver.close(len(events))
    return events, driver, windows_of(events)


def _records(driver):
    """Records by attempt, in order."""
    found = {}
    for attempt in driver.closed:
        found.setdefault(attempt.record.attempt, []).append(attempt.resolve())
    return found


@settings(max_examples=250, deadline=None)
@given(programs())
def test_every_forward_stands_where_the_whole_history_puts_it(program):
    """Attempt, ordinal, micro-batch without holes and provenance; evaluation forwards have no micro-batch."""
    events, driver, windows = _play(program)
    of_window = {at: index for index, window in enumerate(windows) for at in window.forwards}
    outside = 0
    for index, (at, position) in enumerate(sorted(driver.positions.items())):
        assert position.forward_index == index
        assert position.grad_enabled == events[at].grad
        window = of_window.get(at)
        assert position.attempt == window
        if window is None:
            assert (position.forward_in_attempt, position.micro_batch) == (outside, None)
            outside += 1
            continue
        before = [one for one in windows[window].forwards if one < at]
        assert position.forward_in_attempt == len(before)
        trained = sum(events[one].grad for one in before)
        assert position.micro_batch == (trained if events[at].grad else None)
        explicit = position.step_provenance is StepProvenance.EXPLICIT
        assert explicit == windows[window].explicit


@settings(max_examples=250, deadline=None)
@given(programs(), st.booleans())
def test_every_step_has_one_record_in_the_window_where_it_ended(program, declared):
    """Outcome, ordinals, micro-batches, synchronisation and the caller's numbers are those of the history."""
    events, driver, windows = _play(program, declared_optimizer=declared)
    records = _records(driver)
    assert list(records) == list(range(len(windows)))
    ordinals, tries = {}, {}
    for attempt, window in enumerate(windows):
        trained = [events[at] for at in window.forwards if events[at].grad]
        indices = [driver.positions[at].forward_index for at in window.forwards]
        for record in records[attempt]:
            assert record.micro_batches == len(trained)
            assert record.micro_batches_synced == sum(one.sync is GradSync.SYNCED for one in trained)
            assert record.last_micro_batch_sync is (trained[-1].sync if trained else GradSync.UNKNOWN)
            assert record.micro_batches_declared == window.declared
            assert record.global_step == (window.opened if window.explicit else None)
            first, last = record.first_forward_index, record.last_forward_index
            assert list(range(first, last + 1)) == indices
            assert record.started_at_us == (window.forwards[0] if window.forwards else window.opened)
        told = [(r.optimizer, r.optimizer_attempt, r.outcome.value) for r in records[attempt]]
        if window.steps:
            expected = []
            for key, how in window.steps:
                ordinal = ordinals.setdefault(key, len(ordinals))
                expected.append((ordinal, tries.get(key, 0), how))
                tries[key] = tries.get(key, 0) + 1
            assert told == expected
        else:
            seen = any(one.kind in ("step", "raised", "skip") for one in events[: window.closed])
            outcome, evidence = outcome_of(window, optimizer_known=declared or seen)
            assert told == [(-1, 0, outcome.value)]
            assert records[attempt][0].evidence is Evidence(evidence)


_TRAINED = ("forward", True, GradSync.SYNCED)


@settings(max_examples=250, deadline=None)
@given(programs())
@example([_TRAINED, ("block", None, [_TRAINED], False), _TRAINED])
@example([("block", None, [_TRAINED, ("step", 0, []), _TRAINED], False), _TRAINED])
def test_every_second_is_in_the_phase_that_the_history_gives_it(program):
    """And in no other one: with gaps they never add up to more than the time that passed."""
    events, driver, windows = _play(program)
    labels = labels_of(events, windows)
    records = _records(driver)
    total = 0.0
    for attempt, window in enumerate(windows):
        record = records[attempt][0]
        assert record.forward_s == labels.count(("forward", attempt))
        assert record.backward_s == labels.count(("backward", attempt))
        assert record.gap_s == gap_before(events, windows, attempt)
        total += record.gap_s + record.forward_s + record.backward_s
        total += sum(record.optimizer_s for record in records[attempt])
        assert window.closed is not None
        ended = [
            one
            for one in events
            if one.kind == "step_end" and one.outer and window.opened < one.at < window.closed
        ]
        took = [labels[one.mate : one.at] for one in ended]
        applied = [r.optimizer_s for r in records[attempt] if r.outcome is Outcome.APPLIED]
        assert applied == [sum(not label for label, _ in seconds) for seconds in took]
        assert all(r.optimizer_s == 0.0 for r in records[attempt] if r.outcome is not Outcome.APPLIED)
    assert total <= len(events)


@settings(max_examples=250, deadline=None)
@given(programs(), st.integers(0, 5), st.lists(st.floats(0.0, 4.0), max_size=30))
@example([_TRAINED, ("block", None, [("skip", 0), ("forward", False, GradSync.SYNCED)], False)], 0, [0.0] * 4)
def test_windows_that_are_told_early_say_the_same_of_their_steps_and_nothing_twice(
    program, told_after_s, fetches
):
    """But for what comes behind a step: an evaluation, or micro-batches in a block that was quiet before."""
    _, late, _ = _play(program)
    early = Driver(StepClock(told_after_s=told_after_s))
    events = events_of(program)
    for event in events:
        early.tell(event)
        if event.at < len(fetches):
            early.closed += early.clock.overdue(event.at + fetches[event.at])
    early.close(len(events))
    assert early.positions == late.positions
    told, ended = ([one.resolve() for one in driver.closed] for driver in (early, late))
    assert len(told) == len(ended)
    for record, other in zip(told, ended, strict=True):
        assert record.last_forward_index <= other.last_forward_index
        assert record.micro_batches <= other.micro_batches
        shared = ("attempt", "optimizer", "optimizer_attempt", "outcome", "evidence", "optimizer_s", "gap_s")
        assert [getattr(record, name) for name in shared] == [getattr(other, name) for name in shared]


class _AnyOrder(RuleBasedStateMachine):
    """Ends without begins, forwards that overlap or never end, blocks inside steps: any event at any time."""

    def __init__(self):
        super().__init__()
        self.clock = StepClock(told_after_s=3.0)
        self.now = 0.0
        self.closed = []
        self.positions = []
        self.grown = set()

    def tick(self):
        self.now += 1.0
        return self.now

    @rule(grad=st.booleans())
    def forward(self, grad):
        started = self.clock.forward_started(grad_enabled=grad, now_s=self.tick(), now_us=int(self.now))
        self.closed += started.closed
        self.positions.append(started.position)

    @rule(which=st.integers(-3, 0))
    def forward_end(self, which):
        position = self.positions[which] if which and len(self.positions) >= -which else None
        self.clock.forward_ended(self.tick(), GradSync.SYNCED, position)

    @rule()
    def backward_end(self):
        self.clock.backward_ended(self.tick())

    @rule(key=st.integers(0, 2), in_backward=st.booleans())
    def step(self, key, in_backward):
        self.clock.step_started(key, self.tick(), in_backward=in_backward)

    @rule(key=st.integers(0, 2))
    def step_end(self, key):
        self.clock.step_ended(key, self.tick())

    @rule(key=st.integers(0, 2))
    def skip(self, key):
        self.clock.step_skipped(key, self.tick())

    @rule(key=st.integers(0, 2))
    def resolve(self, key):
        self.clock.step_resolved(key, Judgement(Outcome.APPLIED, Evidence.FOUND_INF))

    @rule()
    def abort(self):
        self.clock.step_aborted(self.tick())

    @rule(key=st.integers(0, 2))
    def gone(self, key):
        self.clock.optimizer_gone(key)

    @rule(answer=st.booleans())
    def ask(self, answer):
        self.clock.ask_whether_running(lambda: answer)

    @rule()
    def enter(self):
        self.closed += self.clock.boundary_entered(self.tick(), int(self.now)) or ()

    @rule(failed=st.booleans())
    def leave(self, failed):
        self.closed += self.clock.boundary_left(self.tick(), failed=failed)

    @rule(after_s=st.integers(0, 6))
    def fetch(self, after_s):
        self.now += after_s
        told = self.clock.overdue(self.now)
        self.closed += told
        # In a block and in a closure micro-batches may follow all the same.
        may_grow = self.clock.in_boundary or self.clock.is_stepping
        self.grown.update(one.record.attempt for one in told if may_grow)

    @rule()
    def close(self):
        self.closed += self.clock.close(self.tick())

    @invariant()
    def the_forwards_are_straight(self):
        """Every forward has its own index, and micro-batches count from 0 without holes."""
        assert [p.forward_index for p in self.positions] == list(range(len(self.positions)))
        trained = [p for p in self.positions if p.grad_enabled]
        assert all(p.micro_batch is None for p in self.positions if not p.grad_enabled)
        for one, other in pairwise(trained):
            assert other.micro_batch == (one.micro_batch + 1 if one.attempt == other.attempt else 0)

    @override
    def teardown(self):
        """Attempts go on by one, nothing is lost, and no second is counted twice."""
        records = [one.resolve() for one in (*self.closed, *self.clock.close(self.tick()))]
        attempts = [record.attempt for record in records]
        assert attempts == sorted(attempts)
        by_attempt = {record.attempt: record for record in records}
        assert list(by_attempt) == list(range(len(by_attempt)))
        trained = Counter(p.attempt for p in self.positions if p.grad_enabled)
        for attempt, record in by_attempt.items():
            assert record.micro_batches <= trained[attempt]
            assert attempt in self.grown or record.micro_batches == trained[attempt]
        spent = sum((r.gap_s or 0.0) + r.forward_s + r.backward_s for r in by_attempt.values())
        assert spent + sum(record.optimizer_s for record in records) <= self.now
        assert all(min(r.gap_s or 0.0, r.forward_s, r.backward_s, r.optimizer_s) >= 0.0 for r in records)


TestAnyOrder = _AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
