"""When buffered rows are due, without a writer around them."""

from torchinstruments.records import AttemptRecord, SampleState
from torchinstruments.store.buffering import (
    DUE_AFTER_S,
    MAX_REMEMBERED_SAMPLES,
    HistoryBuffer,
    RecordBuffer,
    SampleTallies,
)
from unit.store.material import at_step, attempt, backward, forward, measurement


def test_the_age_of_a_buffer_is_that_of_its_oldest_row() -> None:
    """A steady stream of new rows does not put off the old ones."""
    buffer = HistoryBuffer(1000)
    for second in range(27):
        buffer.add(second, forward(second, measurement()), float(second))
        assert buffer.take_due(float(second)) == []

    assert len(buffer.take_due(27.0)) == 27
    assert buffer.num_rows == 0


def test_an_emptied_buffer_starts_its_age_anew() -> None:
    """What came after the last part waits for as long itself."""
    buffer = HistoryBuffer(1000)
    buffer.add(0, forward(0, measurement()), 0.0)
    buffer.take_all()
    buffer.add(1, forward(1, measurement()), 26.0)

    assert buffer.take_due(52.0) == []
    assert [sample_id for sample_id, _ in buffer.take_due(53.0)] == [1]


def test_the_waiting_forward_of_a_full_buffer_keeps_its_age() -> None:
    """A sample that was held back for its gradients is still durable in time."""
    buffer = HistoryBuffer(6)
    buffer.add(0, forward(0, measurement()), 0.0)
    buffer.add(1, forward(1, measurement(), settled=True), 20.0)

    assert [sample_id for sample_id, _ in buffer.take_due(20.0)] == [1]
    assert [sample_id for sample_id, _ in buffer.take_due(DUE_AFTER_S)] == [0]


def test_attempts_are_due_by_number_or_by_age() -> None:
    """Short steps fill the buffer, long ones wait for their time."""
    buffer = RecordBuffer[AttemptRecord](2)
    buffer.add([attempt(0)], 0.0)
    assert buffer.take_due(1.0) == []
    buffer.add([attempt(1)], 1.0)
    assert len(buffer.take_due(1.0)) == 2

    buffer.add([attempt(2)], 40.0)
    assert buffer.take_due(66.0) == []
    assert len(buffer.take_due(67.0)) == 1


def test_a_sample_that_changes_nothing_gives_no_second_row() -> None:
    """Only a delivery makes a new row due."""
    tallies = SampleTallies(1000)
    tallies.add(0, forward(0, settled=True), 0.0)

    assert len(tallies.take_due(30.0)) == 1
    assert tallies.take_due(100.0) == []
    assert tallies.take_all() == []


def test_a_forgotten_sample_that_was_never_written_keeps_its_sums() -> None:
    """Forgetting is for samples whose row is durable."""
    tallies = SampleTallies(10**6)
    tallies.add(0, forward(0, measurement()), 0.0)
    for sample_id in range(1, MAX_REMEMBERED_SAMPLES + 2):
        tallies.add(sample_id, forward(sample_id), 0.0)

    tallies.add(0, backward(0, measurement()), 1.0)

    (row,) = [row for row in tallies.take_all() if row.sample_id == 0]
    assert (row.rows, row.num_backwards) == (6, 1)


def test_what_a_step_found_adds_rows_and_no_backward() -> None:
    """Its seconds are those behind the forward, and the sample has come as far as before."""
    tallies = SampleTallies(1000)
    tallies.add(0, forward(0, measurement()), 0.0)
    tallies.add(0, backward(0, measurement()), 0.0)
    (before,) = tallies.take_all()
    tallies.add(0, at_step(0, measurement()), 1.0)
    (after,) = tallies.take_all()
    assert (before.rows, after.rows) == (6, 9)
    assert (after.num_backwards, after.state) == (1, SampleState.BACKWARD_OBSERVED)
    assert after.collection_forward_s == before.collection_forward_s
    assert after.collection_backward_s > before.collection_backward_s


def test_a_step_without_a_backward_leaves_the_state_of_the_forward() -> None:
    """Nothing went backwards."""
    tallies = SampleTallies(1000)
    tallies.add(0, forward(0, measurement()), 0.0)
    tallies.add(0, at_step(0, measurement()), 0.0)
    (row,) = tallies.take_all()
    assert (row.num_backwards, row.state) == (0, SampleState.FORWARD_COMPLETE)
