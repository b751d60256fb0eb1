"""The clock alone: events in, positions and records out."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.ranks import clock as clock_module
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.window import Judgement, Spans, Window
from torchinstruments.records import Amendment, Evidence, GradSync, Outcome, StepProvenance


class _NoDevice:
    """Measures nothing again."""

    def amendments(self, attempts: Sequence[Spans]) -> Sequence[Amendment]:
        assert not attempts
        return ()


class _Loop:
    """A training loop in which every event takes one second."""

    def __init__(self, **options):
        self.clock = StepClock(**options)
        self.now = 0.0
        self.positions = []
        self.records = []

    def tick(self):
        self.now += 1.0
        return self.now

    def forward(self, *, grad=True, sync=GradSync.SYNCED):
        started = self.clock.forward_started(
            grad_enabled=grad, now_s=self.tick(), now_us=int(self.now * 1_000_000)
        )
        self.records += [attempt.resolve() for attempt in started.closed]
        self.positions.append(started.position)
        self.clock.forward_ended(self.tick(), sync)
        return started.position

    def backward(self):
        self.clock.backward_ended(self.tick())

    def step(self, key=0, **details):
        self.clock.step_started(key, self.tick())
        self.clock.step_ended(key, self.tick(), **details)

    def skip(self, key=0):
        self.clock.step_skipped(key, self.tick(), found_inf=1.0)

    def close(self):
        closed = tuple(attempt.resolve() for attempt in self.clock.close(self.tick()))
        self.records += closed
        return closed


def _micro_step(loop, count=1):
    positions = [loop.forward() for _ in range(count)]
    loop.step()
    return positions


def test_an_interrupt_at_any_line_of_an_abort_leaves_no_key_of_a_step_that_is_over():
    """The name of the optimizer that steps goes with its step, and never stays behind it."""
    code, is_stepping = StepClock.step_aborted.__code__, []
    for line in {line for _, _, line in code.co_lines() if line is not None} - {code.co_firstlineno}:
        clock = StepClock()
        clock.forward_started(grad_enabled=True, now_s=1.0, now_us=0)
        clock.step_started(7, 2.0)

        def interrupt(frame: FrameType, event: str, _argument: object, line: int = line) -> Any:
            if frame.f_code is code and event == "line" and frame.f_lineno == line:
                raise KeyboardInterrupt
            return interrupt if frame.f_code is code else None

        tracing = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                clock.step_aborted(3.0)
        finally:
            sys.settrace(tracing)
        assert clock.running_key == (7 if clock.is_stepping else None)
        is_stepping.append(clock.is_stepping)
    assert sorted(is_stepping) == [False] * (len(is_stepping) - 1) + [True]


def test_a_window_that_opens_has_every_field():
    """It is made without a call of its class, whose fields are those of any other window."""
    clock = StepClock(first_attempt=3)
    assert clock._open_window(2.0, 99) == Window(3, 0, 99, None)
    clock.close(5.0)
    assert clock._open_window(7.0, 100) == Window(4, 0, 100, (0.0, 7.0))


def test_a_window_keeps_the_moments_of_its_phases_where_a_device_measures_them():
    """There is nothing in them when it opens."""
    window = StepClock(device=_NoDevice())._open_window(2.0, 99)
    assert window == Window(0, 0, 99, None, forward_spans=[], backward_spans=[])


def test_a_record_is_made_by_who_looks_at_it_first_and_once():
    """The training thread leaves it to the writer's; what comes later is no part of it."""
    loop = _Loop()
    loop.forward()
    loop.step()
    (closed,) = loop.clock.forward_started(grad_enabled=True, now_s=loop.tick(), now_us=0).closed
    loop.step()
    assert closed.record is closed.record
    assert (closed.record.attempt, closed.record.micro_batches, closed.record.optimizer_attempt) == (0, 1, 0)
    assert closed.record.outcome is Outcome.APPLIED


def test_each_step_closes_an_attempt_at_the_next_forward():
    """One forward and one step a window, numbered from 0."""
    loop = _Loop()
    positions = [position for _ in range(3) for position in _micro_step(loop)]
    loop.close()
    assert [(p.attempt, p.forward_in_attempt, p.micro_batch, p.forward_index) for p in positions] == [
        (0, 0, 0, 0),
        (1, 0, 0, 1),
        (2, 0, 0, 2),
    ]
    assert [(r.attempt, r.optimizer, r.optimizer_attempt, r.outcome) for r in loop.records] == [
        (n, 0, n, Outcome.APPLIED) for n in range(3)
    ]


def test_accumulation_counts_micro_batches_and_those_that_synchronise():
    """Four forwards, one step: the last forward alone is synchronised."""
    loop = _Loop()
    for sync in (GradSync.LOCAL, GradSync.LOCAL, GradSync.LOCAL, GradSync.SYNCED):
        loop.forward(sync=sync)
    loop.step()
    loop.close()
    (record,) = loop.records
    assert [p.micro_batch for p in loop.positions] == [0, 1, 2, 3]
    assert (record.micro_batches, record.micro_batches_synced) == (4, 1)
    assert record.last_micro_batch_sync is GradSync.SYNCED
    assert (record.first_forward_index, record.last_forward_index) == (0, 3)


def test_evaluation_forwards_belong_to_the_open_window_and_have_no_micro_batch():
    """Also those after the step: only a grad-enabled forward opens the next window."""
    loop = _Loop()
    before = loop.forward(grad=False)
    loop.forward()
    loop.step()
    after = loop.forward(grad=False)
    loop.forward()
    loop.close()
    assert (before.attempt, before.forward_in_attempt, before.micro_batch) == (None, 0, None)
    assert (after.attempt, after.forward_in_attempt, after.micro_batch) == (0, 1, None)
    assert loop.positions[-1].attempt == 1
    assert (loop.records[0].micro_batches, loop.records[0].last_forward_index) == (1, 2)


def test_provenance_is_none_until_a_step_and_inferred_from_then_on():
    """Nothing is claimed before an optimizer was seen."""
    loop = _Loop()
    assert loop.forward().step_provenance is StepProvenance.NONE
    loop.step()
    assert loop.forward().step_provenance is StepProvenance.INFERRED
    assert _Loop(declared_optimizer=True).forward().step_provenance is StepProvenance.INFERRED


def test_without_any_step_everything_is_attempt_0_and_its_outcome_unknown():
    """A model that is trained by hand has no optimizer to see."""
    loop = _Loop()
    assert [loop.forward().attempt for _ in range(3)] == [0, 0, 0]
    (record,) = loop.close()
    assert (record.optimizer, record.outcome, record.evidence) == (-1, Outcome.UNKNOWN, Evidence.NONE)
    assert record.micro_batches == 3


def test_a_last_window_without_its_step_is_abandoned():
    """As when the data end in the middle of an accumulation."""
    loop = _Loop()
    _micro_step(loop)
    loop.forward()
    loop.close()
    assert [(r.attempt, r.optimizer, r.outcome, r.evidence) for r in loop.records] == [
        (0, 0, Outcome.APPLIED, Evidence.OPTIMIZER_HOOK),
        (1, -1, Outcome.ABANDONED, Evidence.NONE),
    ]


def test_a_clock_that_saw_no_training_closes_without_records():
    """Evaluation alone is no attempt."""
    loop = _Loop()
    loop.forward(grad=False)
    assert loop.close() == ()


def test_a_skipped_step_ends_its_attempt_with_the_scalers_evidence():
    """The optimizer was not called and yet the window is over."""
    loop = _Loop()
    loop.forward()
    loop.skip()
    loop.forward()
    loop.step()
    loop.close()
    assert [(r.outcome, r.evidence, r.found_inf, r.optimizer_attempt) for r in loop.records] == [
        (Outcome.SKIPPED, Evidence.FOUND_INF, 1.0, 0),
        (Outcome.APPLIED, Evidence.OPTIMIZER_HOOK, None, 1),
    ]


def test_better_evidence_replaces_the_hooks():
    """The scaler returns after the optimizer's hooks have fired."""
    loop = _Loop()
    loop.forward()
    loop.step(judgement=Judgement(Outcome.UNKNOWN, Evidence.NONE))
    loop.clock.step_resolved(0, Judgement(Outcome.APPLIED, Evidence.FOUND_INF, 0.0))
    (record,) = loop.close()
    assert (record.outcome, record.evidence, record.found_inf) == (Outcome.APPLIED, Evidence.FOUND_INF, 0.0)


def test_several_optimizers_in_a_window_have_a_record_each():
    """In the order of first sight, each with its own attempts."""
    loop = _Loop()
    for _ in range(2):
        loop.forward()
        loop.step(7, lr=0.5)
        loop.step(3, lr=0.25)
    loop.close()
    assert [(r.attempt, r.optimizer, r.optimizer_attempt, r.lr) for r in loop.records] == [
        (0, 0, 0, 0.5),
        (0, 1, 0, 0.25),
        (1, 0, 1, 0.5),
        (1, 1, 1, 0.25),
    ]


def test_the_same_optimizer_twice_in_a_window_has_two_records():
    """A critic that steps again without a forward of the attached model."""
    loop = _Loop()
    loop.forward()
    loop.step()
    loop.step()
    loop.close()
    assert [(r.attempt, r.optimizer, r.optimizer_attempt) for r in loop.records] == [(0, 0, 0), (0, 0, 1)]


def test_a_step_inside_another_optimizers_step_belongs_to_the_outer_one():
    """ZeroRedundancyOptimizer: pre outer, pre inner, post inner, post outer."""
    loop = _Loop()
    loop.forward()
    loop.clock.step_started(0, loop.tick())
    loop.clock.step_started(1, loop.tick())
    loop.clock.step_ended(1, loop.tick())
    loop.clock.step_ended(0, loop.tick())
    loop.close()
    assert [(r.optimizer, r.optimizer_s) for r in loop.records] == [(0, 3.0)]


def test_a_subclass_that_calls_its_parents_step_is_one_step():
    """Both fire the hooks under one key."""
    loop = _Loop()
    loop.forward()
    for event in (loop.clock.step_started, loop.clock.step_started):
        event(0, loop.tick())
    for event in (loop.clock.step_ended, loop.clock.step_ended):
        event(0, loop.tick())
    loop.close()
    assert [r.optimizer_attempt for r in loop.records] == [0]


def _closure_step(loop, key, forwards):
    loop.clock.step_started(key, loop.tick())
    positions = [loop.forward() for _ in range(forwards)]
    loop.clock.step_ended(key, loop.tick())
    return positions


def test_forwards_inside_a_closure_belong_to_that_steps_window():
    """LBFGS calls the model several times a step, and before the first one there is no window."""
    loop = _Loop()
    attempts = [[p.attempt for p in _closure_step(loop, 0, 3)] for _ in range(3)]
    loop.close()
    assert attempts == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert [(r.attempt, r.micro_batches) for r in loop.records] == [(0, 3), (1, 3), (2, 3)]


def test_two_optimizers_with_closures_share_a_window():
    """The second one has not stepped in it yet, so its closure does not open the next."""
    loop = _Loop()
    attempts = [[p.attempt for key in (0, 1) for p in _closure_step(loop, key, 1)] for _ in range(2)]
    loop.close()
    assert attempts == [[0, 0], [1, 1]]
    assert [(r.attempt, r.optimizer) for r in loop.records] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_accumulation_before_a_closure_is_in_the_closures_window():
    """The last micro-batch of an accumulation runs inside the step."""
    loop = _Loop()
    attempts = [[loop.forward().attempt, _closure_step(loop, 0, 1)[0].attempt] for _ in range(2)]
    loop.close()
    assert attempts == [[0, 0], [1, 1]]


def test_a_step_that_raised_ends_unknown_and_the_loop_goes_on():
    """The question whether it still runs is answered with no at the next forward."""
    loop = _Loop()
    loop.clock.ask_whether_running(lambda: False)
    loop.forward()
    loop.clock.step_started(0, loop.tick())
    assert loop.forward().attempt == 1
    loop.step()
    loop.close()
    assert [(r.attempt, r.outcome, r.evidence) for r in loop.records] == [
        (0, Outcome.UNKNOWN, Evidence.NONE),
        (1, Outcome.APPLIED, Evidence.OPTIMIZER_HOOK),
    ]


def test_a_step_in_another_thread_that_ends_after_all_is_taken_back_as_applied():
    """It was not on the asking thread's stack, which looked like an exception."""
    loop = _Loop()
    loop.clock.ask_whether_running(lambda: False)
    loop.forward()
    loop.clock.step_started(0, loop.tick())
    loop.forward(grad=False)
    loop.clock.step_ended(0, loop.tick(), lr=0.5)
    (record,) = loop.close()
    assert (record.outcome, record.evidence, record.lr) == (Outcome.APPLIED, Evidence.OPTIMIZER_HOOK, 0.5)


def test_a_forward_that_never_ended_leaves_its_synchronisation_unknown():
    """A KeyboardInterrupt skips the end of a forward."""
    loop = _Loop()
    loop.clock.forward_started(grad_enabled=True, now_s=loop.tick(), now_us=0)
    loop.step()
    (record,) = loop.close()
    assert (record.micro_batches, record.micro_batches_synced) == (1, 0)
    assert record.last_micro_batch_sync is GradSync.UNKNOWN


def test_phases_are_told_apart():
    """Gap, forward, backward and optimizer of the second attempt, a second each event."""
    loop = _Loop()
    _micro_step(loop)
    loop.tick()
    loop.forward()  # 1 s
    loop.backward()  # 1 s
    loop.tick()  # clipping
    loop.step(lr=0.1)  # 1 s
    loop.close()
    record = loop.records[-1]
    assert (record.gap_s, record.forward_s, record.backward_s, record.optimizer_s) == (2.0, 1.0, 1.0, 1.0)
    assert (loop.records[0].gap_s, record.started_at_us, record.lr) == (0.0, 6_000_000, 0.1)


def test_a_backward_that_nobody_saw_reaches_to_the_step():
    """An unsampled forward has no hooks that could tell."""
    loop = _Loop()
    loop.forward()
    loop.tick()
    loop.tick()
    loop.step()
    (record,) = loop.close()
    assert record.backward_s == 3.0


def test_the_steps_of_one_window_are_bounded_and_the_rest_is_counted(monkeypatch):
    """A program that bypasses the model's hooks never closes a window."""
    monkeypatch.setattr(clock_module, "MAX_STEPS_IN_WINDOW", 3)
    loop = _Loop()
    loop.forward()
    for _ in range(5):
        loop.step()
    loop.close()
    assert len(loop.records) == 3
    assert loop.clock.num_dropped_steps == 2


def test_an_optimizer_that_is_gone_gives_its_key_to_a_new_one():
    """Keys may be used again; ordinals are not."""
    loop = _Loop()
    loop.forward()
    loop.step(0)
    loop.clock.optimizer_gone(0)
    loop.step(0)
    loop.close()
    assert [(r.optimizer, r.optimizer_attempt) for r in loop.records] == [(0, 0), (1, 0)]


def test_a_critic_that_steps_five_times_as_often_ends_five_windows():
    """GAN with 5:1: each step of the critic ends a window, the generator's own ends one more."""
    loop = _Loop()
    for _ in range(2):
        for _ in range(5):
            loop.forward()
            loop.forward()
            loop.step(0)
        loop.forward()
        loop.step(1)
    loop.close()
    assert [(r.attempt, r.optimizer, r.micro_batches) for r in loop.records] == [
        *((n, 0, 2) for n in range(5)),
        (5, 1, 1),
        *((n, 0, 2) for n in range(6, 11)),
        (11, 1, 1),
    ]


def test_optimizers_that_step_inside_the_backward_share_its_window_and_not_its_time():
    """A small optimizer for each parameter, stepped by its gradient's hook: between them is backward."""
    loop = _Loop()
    for _ in range(2):
        loop.forward()
        loop.tick()
        for key in range(3):
            loop.clock.step_started(key, loop.tick(), in_backward=True)
            loop.clock.step_ended(key, loop.tick())
    loop.tick()
    loop.forward()
    loop.close()
    assert [(r.attempt, r.optimizer, r.optimizer_attempt) for r in loop.records] == [
        *((0, key, 0) for key in range(3)),
        *((1, key, 1) for key in range(3)),
        (2, -1, 0),
    ]
    assert [(r.backward_s, r.optimizer_s) for r in loop.records[:6]] == [(4.0, 1.0)] * 6
    assert loop.records[-1].gap_s == 2.0


def test_a_forward_beside_steps_inside_a_backward_is_forward_and_nothing_else():
    """What lies between two such steps is that forward's time, and counts once."""
    loop = _Loop()
    loop.clock.forward_started(grad_enabled=True, now_s=1.0, now_us=0)
    loop.clock.step_started(0, 2.0, in_backward=True)
    loop.clock.step_ended(0, 3.0)
    loop.clock.step_started(1, 6.0, in_backward=True)
    loop.clock.step_ended(1, 7.0)
    records = [one.resolve() for one in loop.clock.close(8.0)]
    assert [(r.forward_s, r.backward_s, r.optimizer_s) for r in records] == [(4.0, 0.0, 1.0)] * 2


def test_gradients_that_are_thrown_away_leave_their_forwards_in_the_window():
    """No hook tells of a zero_grad without a step: without blocks it cannot be known."""
    loop = _Loop()
    loop.forward()
    loop.backward()
    loop.forward()
    loop.backward()
    loop.step()
    loop.close()
    assert [(r.attempt, r.micro_batches, r.outcome) for r in loop.records] == [(0, 2, Outcome.APPLIED)]


def test_an_evaluation_after_the_step_is_no_part_of_the_gap():
    """The gap begins where the attempt's evaluation ended."""
    loop = _Loop()
    _micro_step(loop)
    loop.tick()
    loop.forward(grad=False)
    loop.tick()
    loop.forward()
    loop.close()
    assert [r.gap_s for r in loop.records] == [0.0, 2.0]
    assert loop.records[0].forward_s == 2.0


def test_forwards_that_overlap_in_threads_each_tell_their_synchronisation():
    """The ends come in any order; only what is surely time of one of them counts as time."""
    loop = _Loop()
    first = loop.clock.forward_started(grad_enabled=True, now_s=loop.tick(), now_us=0).position
    second = loop.clock.forward_started(grad_enabled=True, now_s=loop.tick(), now_us=0).position
    loop.clock.forward_ended(loop.tick(), GradSync.SYNCED, second)
    loop.clock.forward_ended(loop.tick(), GradSync.LOCAL, first)
    loop.step()
    (record,) = loop.close()
    assert (record.micro_batches, record.micro_batches_synced, record.forward_s) == (2, 1, 1.0)
    assert record.last_micro_batch_sync is GradSync.SYNCED


def _enter(loop, **numbers):
    closed = loop.clock.boundary_entered(loop.tick(), int(loop.now * 1_000_000), **numbers)
    loop.records += [attempt.resolve() for attempt in closed or ()]
    return closed


def _leave(loop, *, failed=False):
    left = [attempt.resolve() for attempt in loop.clock.boundary_left(loop.tick(), failed=failed)]
    loop.records += left
    return left


def test_a_block_is_one_attempt_whatever_steps_in_it():
    """All its forwards, evaluation first, and both steps; its numbers stand in every row."""
    loop = _Loop()
    _enter(loop, global_step=70, micro_batches_declared=3)
    positions = [loop.forward(grad=False), loop.forward(), loop.forward()]
    loop.step(0)
    positions.append(loop.forward())
    loop.step(1)
    records = _leave(loop)
    assert [(p.attempt, p.forward_in_attempt, p.micro_batch) for p in positions] == [
        (0, 0, None),
        (0, 1, 0),
        (0, 2, 1),
        (0, 3, 2),
    ]
    assert {p.step_provenance for p in positions} == {StepProvenance.EXPLICIT}
    assert [(r.attempt, r.optimizer, r.global_step, r.micro_batches_declared) for r in records] == [
        (0, 0, 70, 3),
        (0, 1, 70, 3),
    ]
    assert [(r.micro_batches, r.outcome) for r in records] == [(3, Outcome.APPLIED)] * 2


def test_blocks_and_inferred_windows_follow_each_other():
    """An open window ends where a block begins, and after a block the next training forward opens one."""
    loop = _Loop()
    loop.forward()
    _enter(loop, global_step=5)
    loop.forward()
    loop.step()
    _leave(loop)
    between = loop.forward(grad=False)
    after = loop.forward()
    loop.step()
    loop.close()
    assert (between.attempt, between.micro_batch) == (None, None)
    assert (after.attempt, after.step_provenance) == (2, StepProvenance.INFERRED)
    assert [(r.attempt, r.outcome, r.evidence, r.global_step) for r in loop.records] == [
        (0, Outcome.UNKNOWN, Evidence.NONE, None),
        (1, Outcome.APPLIED, Evidence.OPTIMIZER_HOOK, 5),
        (2, Outcome.APPLIED, Evidence.OPTIMIZER_HOOK, None),
    ]


@pytest.mark.parametrize(
    ("declared", "failed", "outcome", "evidence"),
    [
        (True, False, Outcome.ABANDONED, Evidence.EXPLICIT),
        (True, True, Outcome.ABANDONED, Evidence.EXPLICIT),
        (False, True, Outcome.ABANDONED, Evidence.EXPLICIT),
        (False, False, Outcome.UNKNOWN, Evidence.NONE),
    ],
)
def test_a_block_without_a_step_is_abandoned_where_a_step_could_have_been_seen(
    declared, failed, outcome, evidence
):
    """A program that trains by hand, or with a compiled step, is not told that it did not."""
    loop = _Loop(declared_optimizer=declared)
    _enter(loop)
    loop.forward()
    (record,) = _leave(loop, failed=failed)
    assert (record.optimizer, record.outcome, record.evidence) == (-1, outcome, evidence)


def test_a_block_with_nothing_in_it_has_a_row_with_an_empty_range_of_forwards():
    """The last index is below the first, and the next block's gap does not count the same time again."""
    loop = _Loop(declared_optimizer=True)
    _micro_step(loop)
    _enter(loop)
    (empty,) = _leave(loop)
    _enter(loop)
    loop.forward()
    (full,) = _leave(loop)
    assert (empty.first_forward_index, empty.last_forward_index, empty.micro_batches) == (1, 0, 0)
    assert (full.first_forward_index, full.last_forward_index) == (1, 1)
    assert (empty.gap_s, full.gap_s) == (1.0, 3.0)


def test_a_block_inside_another_one_is_refused_and_the_outer_one_goes_on():
    """None says so, and the outer window stays open."""
    loop = _Loop()
    assert _enter(loop, global_step=1) == ()
    loop.forward()
    assert _enter(loop, global_step=2) is None
    loop.step()
    loop.forward()
    records = _leave(loop)
    assert [(r.global_step, r.micro_batches) for r in records] == [(1, 2)]
    assert _leave(loop) == []


def test_a_forward_that_runs_while_a_block_is_entered_is_in_the_gap_before_it():
    """In another thread, outside any window; the time is not counted twice."""
    loop = _Loop()
    _enter(loop)
    _leave(loop)
    loop.clock.forward_started(grad_enabled=False, now_s=loop.tick(), now_us=0)
    _enter(loop)
    loop.clock.forward_ended(loop.tick(), GradSync.LOCAL)
    (record,) = _leave(loop)
    assert (record.gap_s, record.forward_s) == (3.0, 0.0)


def test_a_step_that_raised_ends_its_block_unknown():
    """How far it came before it raised is not known."""
    loop = _Loop()
    loop.clock.ask_whether_running(lambda: False)
    _enter(loop)
    loop.forward()
    loop.clock.step_started(0, loop.tick())
    (record,) = _leave(loop, failed=True)
    assert (record.optimizer, record.outcome) == (0, Outcome.UNKNOWN)


def test_steps_between_blocks_are_counted_as_belonging_nowhere():
    """A program that steps after its block has rows without steps; those before any window are not meant."""
    loop = _Loop()
    loop.step()
    _enter(loop)
    loop.forward()
    _leave(loop)
    loop.step()
    loop.step()
    assert loop.clock.num_steps_between_boundaries == 2


def test_closing_inside_a_block_ends_it_once():
    """As when the observer is removed there."""
    loop = _Loop(declared_optimizer=True)
    _enter(loop, global_step=3)
    loop.forward()
    (record,) = loop.close()
    assert (record.global_step, record.outcome, record.evidence) == (
        3,
        Outcome.ABANDONED,
        Evidence.EXPLICIT,
    )
    assert _leave(loop) == []


EVENTS = st.lists(
    st.sampled_from(
        ["train", "eval", "backward", "step0", "step1", "skip0", "nested", "closure0", "closure1"]
    ),
    max_size=60,
)


def _play(loop, events):
    """Runs a history of events; returns how many outer steps each optimizer made inside a window."""
    steps = {0: 0, 1: 0}
    for event in events:
        opened = any(p.attempt is not None for p in loop.positions)
        key = int(event[-1]) if event[-1] in "01" else 0
        if event == "train":
            loop.forward()
        elif event == "eval":
            loop.forward(grad=False)
        elif event == "backward":
            loop.backward()
        elif event.startswith("step"):
            loop.step(key)
            steps[key] += opened
        elif event == "skip0":
            loop.skip(0)
            steps[0] += opened
        elif event == "nested":
            loop.clock.step_started(0, loop.tick())
            loop.step(1)
            loop.clock.step_ended(0, loop.tick())
            steps[0] += opened
        else:
            _closure_step(loop, key, 1)
            steps[key] += 1
    loop.close()
    return steps


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_any_interleaving_keeps_the_ledger_straight(events):
    """Windows follow each other, micro-batches count from 0, and nothing is lost or counted twice."""
    loop = _Loop()
    steps = _play(loop, events)
    trained = [p for p in loop.positions if p.grad_enabled]
    assert [p.forward_index for p in loop.positions] == list(range(len(loop.positions)))
    assert all(p.micro_batch is None for p in loop.positions if not p.grad_enabled)
    for one, other in pairwise(loop.positions):
        if one.attempt is not None:
            assert other.attempt in (one.attempt, one.attempt + 1)
        same_window = one.attempt == other.attempt
        assert other.forward_in_attempt == (one.forward_in_attempt + 1 if same_window else 0)
    for one, other in pairwise(trained):
        same_window = one.attempt == other.attempt
        assert other.micro_batch == (one.micro_batch + 1 if same_window else 0)

    windows = {record.attempt: record for record in loop.records}
    assert list(windows) == sorted({p.attempt for p in trained})
    assert [r.attempt for r in loop.records] == sorted(r.attempt for r in loop.records)
    assert sum(record.micro_batches for record in windows.values()) == len(trained)
    for attempt, record in windows.items():
        inside = [p.forward_index for p in loop.positions if p.attempt == attempt]
        assert (record.first_forward_index, record.last_forward_index) == (inside[0], inside[-1])

    stepped = [record for record in loop.records if record.optimizer >= 0]
    assert len(stepped) == sum(steps.values())
    for optimizer in {record.optimizer for record in stepped}:
        attempts = [record.optimizer_attempt for record in stepped if record.optimizer == optimizer]
        assert attempts == list(range(len(attempts)))


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_phases_never_overlap(events):
    """No second is in two phases, so that their sum is never more than the time that passed."""
    loop = _Loop()
    _play(loop, events)
    windows = {record.attempt: record for record in loop.records}
    inside = sum(record.forward_s + record.backward_s for record in windows.values())
    inside += sum(record.optimizer_s for record in loop.records)
    assert all(min(r.gap_s, r.forward_s, r.backward_s, r.optimizer_s) >= 0.0 for r in loop.records), (
        loop.records
    )
    assert inside + sum(record.gap_s for record in windows.values()) <= loop.now


@pytest.mark.parametrize("event", ["backward", "step", "skip", "close"])
def test_events_before_the_first_window_change_nothing(event):
    """A step of an optimizer before any forward has no attempt that it could belong to."""
    loop = _Loop()
    getattr(loop, event)()
    assert loop.forward().attempt == 0
    loop.step()
    loop.close()
    assert [(r.attempt, r.optimizer_attempt) for r in loop.records] == [(0, 0)]


def test_before_every_step_means_that_all_optimizers_are_known_and_none_has_begun():
    """Only then do all forwards of the window see the same parameters."""
    loop = _Loop()
    seen = []
    loop.forward()
    seen.append(loop.clock.is_before_every_step)  # nobody knows yet what steps
    loop.step()
    seen.append(loop.clock.is_before_every_step)
    loop.forward(grad=False)
    seen.append(loop.clock.is_before_every_step)  # an evaluation after the step
    loop.forward()
    loop.forward()
    seen.append(loop.clock.is_before_every_step)
    loop.clock.step_started(0, loop.tick())
    seen.append(loop.clock.is_before_every_step)  # in a closure
    loop.clock.step_aborted(loop.tick())
    seen.append(loop.clock.is_before_every_step)  # how far it came is not known
    loop.forward()
    seen.append(loop.clock.is_before_every_step)
    assert seen == [False, False, False, True, False, False, True]


def test_beside_a_declared_optimizer_others_may_step_unseen():
    """So no window is known to be before every step."""
    loop = _Loop(declared_optimizer=True)
    _micro_step(loop)
    loop.forward()
    assert not loop.clock.is_before_every_step


def test_a_backward_that_decides_is_counted_once_it_has_come():
    """Of several backwards through one forward the last one counts, and before any it is unknown."""
    loop = _Loop()
    first = loop.forward(sync=GradSync.UNKNOWN)
    loop.clock.backward_synchronises(first, GradSync.SYNCED)
    second = loop.forward(sync=GradSync.UNKNOWN)
    loop.clock.backward_synchronises(second, GradSync.SYNCED)
    loop.clock.backward_synchronises(second, GradSync.LOCAL, GradSync.SYNCED)
    loop.step()
    loop.forward(sync=GradSync.UNKNOWN)
    loop.clock.backward_synchronises(second, GradSync.SYNCED, GradSync.LOCAL)
    loop.close()
    found = [(record.micro_batches_synced, record.last_micro_batch_sync) for record in loop.records]
    assert found == [(1, GradSync.LOCAL), (0, GradSync.UNKNOWN)]


def test_a_stepped_window_is_told_where_an_evaluation_begins_long_after_its_step():
    """Once, as it is then; the evaluation stands in it all the same, and the next window begins as ever."""
    loop = _Loop()
    _micro_step(loop, 2)
    stepped_s = loop.now
    loop.forward(grad=False)
    loop.now = stepped_s + 19.0
    assert [loop.forward(grad=False).attempt for _ in range(2)] == [0, 0]
    (record,) = loop.records
    assert (record.attempt, record.micro_batches, record.outcome) == (0, 2, Outcome.APPLIED)
    assert (record.first_forward_index, record.last_forward_index) == (0, 3)
    assert record.forward_s == 4.0
    loop.now += 1000.0
    position = loop.forward(grad=False)
    assert (position.attempt, position.forward_in_attempt, position.forward_index) == (0, 5, 5)
    assert loop.forward().attempt == 1
    assert loop.close() != ()
    assert [(r.attempt, r.optimizer_attempt) for r in loop.records] == [(0, 0), (1, 0)]
    assert loop.records[1].gap_s == 1.0


def test_a_step_behind_a_long_evaluation_is_told_with_its_own_window_and_the_others_once():
    """Two optimizers, between which the program evaluates for minutes."""
    loop = _Loop()
    _micro_step(loop)
    loop.now += 100.0
    loop.forward(grad=False)
    loop.step(key=1)
    assert [(r.attempt, r.optimizer, r.last_forward_index) for r in loop.records] == [(0, 0, 0)]
    loop.forward()
    loop.close()
    assert [(r.attempt, r.optimizer, r.last_forward_index) for r in loop.records] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, -1, 2),
    ]


def test_a_window_without_a_step_a_block_and_a_step_that_runs_are_never_told_early():
    """Micro-batches may still come."""
    loop = _Loop()
    loop.forward()
    loop.now += 100.0
    loop.forward(grad=False)
    assert loop.records == []
    loop.clock.boundary_entered(loop.tick(), 0)
    loop.forward()
    loop.step()
    loop.now += 100.0
    loop.forward(grad=False)
    assert loop.records == []
    assert [one.record.last_forward_index for one in loop.clock.boundary_left(loop.tick())] == [3]
    loop.forward()
    loop.step(key=0)
    loop.clock.step_started(1, loop.tick())
    loop.now += 100.0
    loop.forward(grad=False)
    assert loop.records == []
    loop.clock.step_ended(1, loop.tick())
    loop.close()
    assert [(r.attempt, r.optimizer, r.last_forward_index) for r in loop.records] == [(2, 0, 5), (2, 1, 5)]
