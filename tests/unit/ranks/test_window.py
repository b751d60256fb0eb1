"""What one attempt keeps, and the records it ends as."""

from torchinstruments.ranks.window import MAX_SPANS, Phase, Step, Window
from torchinstruments.records import Evidence, GradSync, Outcome, StepProvenance


def test_a_phase_adds_up_and_keeps_a_bounded_number_of_moments():
    """Beyond the bound one more is kept, which says that not all are there; a span backwards is no time."""
    phase = Phase(spans=[])
    for begin in range(MAX_SPANS + 10):
        phase.add(float(begin), begin + 0.5)
    phase.add(9.0, 3.0)
    assert phase.seconds == (MAX_SPANS + 10) / 2
    assert phase.spans is not None
    assert len(phase.spans) == MAX_SPANS + 1


def test_only_the_last_micro_batch_says_how_the_window_ended():
    """An earlier forward that ends later does not take its place."""
    window = Window(0, 0, 0, None)
    for index in range(2):
        window.place(index, grad_enabled=True, provenance=StepProvenance.NONE)
    window.synchronised(GradSync.SYNCED, 1)
    window.synchronised(GradSync.LOCAL, 0)
    assert (window.micro_batches_synced, window.last_sync) == (1, GradSync.SYNCED)


def test_a_window_has_a_record_a_step_or_the_one_that_stands_for_none():
    """With everything that the window has in common."""
    window = Window(4, 7, 99, (1.0, 3.5))
    window.place(7, grad_enabled=False, provenance=StepProvenance.INFERRED)
    none = Step(-1, -1, 0, Outcome.ABANDONED, Evidence.NONE)
    (alone,) = window.records(none, None)
    assert (alone.record.optimizer, alone.record.outcome) == (-1, Outcome.ABANDONED)
    window.steps += [Step(5, n, 0, Outcome.APPLIED, Evidence.OPTIMIZER_HOOK) for n in range(2)]
    records = [attempt.record for attempt in window.records(none, None)]
    assert [(r.attempt, r.optimizer, r.gap_s, r.last_forward_index) for r in records] == [
        (4, 0, 2.5, 7),
        (4, 1, 2.5, 7),
    ]
