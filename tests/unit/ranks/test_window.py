"""What one attempt keeps, and the records it ends as."""

import pickle
from collections.abc import Sequence
from dataclasses import asdict

from torchinstruments.ranks.phases import PhaseTimer
from torchinstruments.ranks.window import MAX_SPANS, Judgement, Spans, Step, Window, keep_span
from torchinstruments.records import (
    Amendment,
    AttemptRecord,
    Evidence,
    GradSync,
    Outcome,
    Position,
    StepProvenance,
)

APPLIED = Judgement(Outcome.APPLIED, Evidence.OPTIMIZER_HOOK)


def test_a_phase_adds_up_and_keeps_a_bounded_number_of_moments():
    """Beyond the bound one more is kept, which says that not all are there; a span backwards is no time."""
    timer = PhaseTimer(keeps_spans=True)
    window = Window(0, 0, 0, None, forward_spans=[], backward_spans=[])
    for begin, end in [*((float(begin), begin + 0.5) for begin in range(MAX_SPANS + 10)), (9.0, 3.0)]:
        timer.forward_began(begin)
        timer.forward_ended(end, window, None, awaits_backward=True)
        timer.backward_ended(end + (end - begin) / 2, window, None)
    assert window.forward_s == (MAX_SPANS + 10) / 2
    assert window.backward_s == (MAX_SPANS + 10) / 4
    assert window.forward_spans is not None
    assert window.backward_spans is not None
    assert len(window.forward_spans) == len(window.backward_spans) == MAX_SPANS + 1


def test_only_the_last_micro_batch_says_how_the_window_ended():
    """An earlier forward that ends later does not take its place."""
    window = Window(0, 0, 0, None)
    for index in range(2):
        window.place(index, grad_enabled=True, provenance=StepProvenance.NONE)
    window.synchronised(GradSync.SYNCED, 1)
    window.synchronised(GradSync.LOCAL, 0)
    assert (window.micro_batches_synced, window.last_sync) == (1, GradSync.SYNCED)


def test_a_place_is_a_position_like_any_other():
    """It compares, hashes, copies and tells its fields by their names, however it was made."""
    placed = Window(4, 7, 99, None).place(7, grad_enabled=True, provenance=StepProvenance.INFERRED)
    position = Position(4, 0, 0, 7, grad_enabled=True, step_provenance=StepProvenance.INFERRED)
    assert type(placed) is Position
    assert placed == position == pickle.loads(pickle.dumps(placed))
    assert hash(placed) == hash(position)
    assert asdict(placed)["forward_index"] == 7


def test_a_window_has_a_record_a_step_once():
    """With everything that the window has in common when it is taken."""
    window = Window(4, 7, 99, (1.0, 3.5))
    window.place(7, grad_enabled=False, provenance=StepProvenance.INFERRED)
    assert window.take_records(None) == ()
    window.steps += [Step(5, n, 0, APPLIED) for n in range(2)]
    records = [attempt.record for attempt in window.take_records(None)]
    assert [(r.attempt, r.optimizer, r.gap_s, r.last_forward_index) for r in records] == [
        (4, 0, 2.5, 7),
        (4, 1, 2.5, 7),
    ]
    window.place(8, grad_enabled=False, provenance=StepProvenance.INFERRED)
    window.steps.append(Step(5, 0, 1, APPLIED))
    (later,) = [attempt.record for attempt in window.take_records(None)]
    assert (later.optimizer_attempt, later.last_forward_index) == (1, 8)
    assert window.take_records(None) == ()


class _Unchanged:
    """Brings nothing."""

    def is_complete(self) -> bool:
        return True

    def amend(self, record: AttemptRecord) -> AttemptRecord:
        return record


class _KeepsSpans:
    """A device's clock that keeps what it is to measure."""

    def __init__(self) -> None:
        self.spans: list[Spans] = []

    def amendments(self, attempts: Sequence[Spans]) -> Sequence[Amendment]:
        self.spans += attempts
        return [_Unchanged() for _ in attempts]


def test_what_a_device_is_to_measure_does_not_grow_with_a_window_that_goes_on():
    """It is measured on another thread, of the row as it was."""
    window = Window(0, 0, 0, None, forward_spans=[], backward_spans=[])
    keep_span(window.forward_spans, 1.0, 2.0)
    keep_span(window.backward_spans, 2.0, 3.0)
    window.steps.append(Step(0, 0, 0, APPLIED))
    device = _KeepsSpans()
    window.take_records(device)
    keep_span(window.forward_spans, 30.0, 31.0)
    (spans,) = device.spans
    assert (spans.forward, spans.backward) == (((1.0, 2.0),), ((2.0, 3.0),))
