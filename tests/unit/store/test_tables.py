"""Which rows of which table become durable, and when."""

import io
import json
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchinstruments.records import Sample, SampleState, Signal
from torchinstruments.store import schema
from torchinstruments.store.row_blocks import RowBlock
from torchinstruments.store.running_summary import RunningSummary
from torchinstruments.store.summaries import SummaryBuilder
from unit.store.material import (
    START_US,
    attempt,
    backward,
    fingerprint,
    forward,
    measurement,
    module,
    run_record,
)
from unit.store.rigs import Rig


def test_rows_become_durable_when_the_buffer_is_full() -> None:
    """The sample that fills the buffer goes with those before it, into one part."""
    rig = Rig(buffer_rows=6)

    rig.writer.add_sample(forward(0, measurement(), settled=True))
    assert rig.rows("history") == []
    rig.writer.add_sample(forward(1, measurement(), settled=True))

    assert [row["sample_id"] for row in rig.rows("history")] == [0, 0, 0, 1, 1, 1]
    assert len(rig.target.of("history")) == 1


def test_rows_are_durable_thirty_seconds_after_they_were_observed() -> None:
    """A slow sampler's rows do not wait for a full buffer; queue and ticks take up to a second each."""
    rig = Rig()
    began_s = rig.clock.now_s
    rig.writer.add_sample(forward(0, measurement(), settled=True))
    rig.writer.add_attempts([attempt(0)])
    rig.writer.add_fingerprints([fingerprint(0), fingerprint(0, "0.bias")])

    rig.clock.now_s += 0.9
    rig.writer.tick()
    rig.pass_time(26)
    assert rig.target.parts == []
    rig.pass_time(1)
    assert rig.clock.now_s - began_s + 1.0 <= 29.0

    assert [(table, num_rows) for table, num_rows, _ in rig.target.parts] == [
        ("samples", 1),
        ("history", 3),
        ("steps", 1),
        ("fingerprints", 2),
    ]


def test_a_full_buffer_keeps_an_unsettled_sample_until_its_gradients_come() -> None:
    """An output and its gradient come to lie side by side in one part."""
    rig = Rig(buffer_rows=6)
    rig.writer.add_sample(forward(0, measurement(), settled=True))
    rig.writer.add_sample(forward(1, measurement()))
    assert [row["sample_id"] for row in rig.rows("history")] == [0, 0, 0]

    rig.writer.add_sample(backward(1, measurement(signal=Signal.OUTPUT_GRADIENT)))

    assert [row["signal"] for row in rig.rows("history")[3:]] == ["output"] * 3 + ["output_gradient"] * 3


def test_unsettled_samples_that_fill_the_buffer_alone_are_written() -> None:
    """Gradients that never come do not let the buffer grow."""
    rig = Rig(buffer_rows=6)

    for ordinal in range(10):
        rig.writer.add_sample(forward(ordinal, measurement()))

    assert len(rig.rows("history")) == 30


def test_stored_sample_ids_begin_at_the_generations_first() -> None:
    """A restart's samples come after all earlier ones of the rank."""
    rig = Rig(generation=2)
    rig.writer.add_sample(forward(7, measurement(), settled=True))

    rig.writer.flush()

    assert {row["sample_id"] for row in rig.rows("history")} == {2_000_000_007}
    assert {row["generation"] for row in rig.rows("samples")} == {2}


def test_a_samples_row_sums_its_deliveries() -> None:
    """Rows, backwards, seconds and errors of forward and backwards are added up."""
    rig = Rig()
    rig.writer.add_sample(forward(0, measurement()))
    rig.writer.add_sample(backward(0, measurement(), settled=False))
    rig.writer.add_sample(backward(0, measurement(), index=1))

    rig.writer.flush()

    (row,) = rig.rows("samples")
    names = ("state", "num_backwards", "collection_forward_s", "collection_backward_s", "rows", "errors")
    assert [row[name] for name in names] == ["backward_observed", 2, 0.25, 1.0, 9, 1]


def test_a_sample_without_a_backward_gets_its_row_within_thirty_seconds() -> None:
    """What is known of it does not wait for a backward that may never come."""
    rig = Rig()
    rig.writer.add_sample(forward(0, measurement()))

    rig.pass_time(30)

    assert [row["state"] for row in rig.rows("samples")] == ["forward_complete"]


def test_a_late_backward_gives_a_superseding_row() -> None:
    """The later row has the larger sums, by which readers choose it."""
    rig = Rig()
    rig.writer.add_sample(forward(0, measurement()))
    rig.pass_time(40)
    rig.writer.add_sample(backward(0, measurement()))

    rig.pass_time(30)

    rows = rig.rows("samples")
    assert [(row["sample_id"], row["state"], row["rows"]) for row in rows] == [
        (0, "forward_complete", 3),
        (0, "backward_observed", 6),
    ]


def test_a_sample_without_measurements_has_a_row_all_the_same() -> None:
    """A missed sample leaves no scalars, but is not silent."""
    rig = Rig()
    missed = forward(0, settled=True)
    rig.writer.add_sample(
        Sample(
            **{name: getattr(missed, name) for name in Sample.__slots__ if name != "state"},
            state=SampleState.MISSED,
        )
    )

    rig.pass_time(30)

    assert [(row["state"], row["rows"]) for row in rig.rows("samples")] == [("missed", 0)]
    assert rig.target.of("history") == []


def test_a_flush_writes_unsettled_samples_too() -> None:
    """Everything that was taken is durable after it."""
    rig = Rig()
    rig.writer.add_sample(forward(0, measurement()))

    assert rig.writer.flush()

    assert len(rig.rows("history")) == 3
    assert [row["state"] for row in rig.rows("samples")] == ["forward_complete"]


def test_a_broken_delivery_does_not_take_its_neighbours_with_it() -> None:
    """Its rows are counted as dropped, the others are stored."""
    rig = Rig()
    rig.writer.add_sample(forward(0, measurement()))
    rig.writer.add_sample(forward(1, measurement(values=(1.0,))))
    rig.writer.add_sample(forward(2, measurement()))

    rig.writer.flush()

    assert {row["sample_id"] for row in rig.rows("history")} == {0, 2}
    assert rig.writer.counters().rows_dropped == 3
    assert rig.reported[0][0] == "storage"


def test_an_attempt_that_cannot_be_stored_is_counted() -> None:
    """A number that does not fit into its column costs its rows, not the writer."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    rig.writer.add_attempts([attempt(2**70)])

    rig.writer.close(0)

    assert rig.manifest().tables["steps"].rows_dropped == 1
    assert rig.manifest().counters.errors == {"storage": 1}


def test_memory_does_not_grow_over_many_samples() -> None:
    """Tallies of samples that are done are forgotten."""
    rig = Rig(buffer_rows=100)

    for ordinal in range(6000):
        rig.writer.add_sample(forward(ordinal, settled=True))
        if ordinal % 100 == 0:
            rig.pass_time(1)

    assert len(rig.writer._tables._tallies._tallies) <= 4096
    assert len(rig.writer._tables._tallies._changed) <= 101


def test_a_part_of_a_writer_holds_what_the_schema_declares() -> None:
    """The metadata names generation, rank, process and world size of the writer."""
    rig = Rig(generation=1)
    rig.writer.add_sample(forward(0, measurement()))
    rig.writer.flush()

    (data,) = rig.target.of("history")
    own = schema.parse_metadata(pq.read_metadata(io.BytesIO(data)).metadata)

    assert own == {
        "schema_version": "1",
        "run_id": "run-1",
        "generation": "1",
        "rank": "0",
        "process": "1a2b3c4d",
        "world_size": "2",
    }


def test_rows_that_cannot_be_summarised_are_stored_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error there is reported, the page says so, and the result keeps the catalog."""

    def fail(_summary: RunningSummary, _table: pa.Table) -> None:
        raise ValueError("odd rows")

    rig = Rig(buffer_rows=1)
    rig.writer.start(run_record(), [module(0)])
    monkeypatch.setattr(RunningSummary, "add", fail)
    for ordinal in range(2):
        rig.writer.add_sample(forward(ordinal, measurement(), settled=True))

    assert rig.writer.close(5.0)

    assert len(rig.rows("history")) == 6
    assert rig.reported == [("storage", "odd rows")]
    assert json.loads(rig.target.last("result.json"))[0]["tensors"] == []
    assert "summarising failed (ValueError: odd rows)" in rig.target.last("index.md").decode()


@pytest.mark.parametrize("kind", [ValueError, IndexError, KeyError, MemoryError])
def test_rows_that_waited_and_cannot_be_summarised_spoil_no_close(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """They are folded long after they were stored; everything else is written and marked closed."""

    def fail(_builder: SummaryBuilder, _blocks: Sequence[RowBlock]) -> None:
        raise kind("odd rows")

    rig = Rig(buffer_rows=3)
    rig.writer.start(run_record(), [module(0)])
    monkeypatch.setattr(SummaryBuilder, "add_following", fail)
    rig.writer.add_sample(forward(0, measurement(), settled=True))
    rig.writer.add_attempts([attempt(0)])
    assert rig.reported == []

    assert rig.writer.close(5.0)

    assert (len(rig.rows("history")), len(rig.rows("steps"))) == (3, 1)
    assert [probe for probe, _ in rig.reported] == ["storage"]
    assert rig.manifest().status == "closed"
    assert f"summarising failed ({kind.__name__}: " in rig.target.last("index.md").decode()


def test_rows_of_one_observation_carry_its_own_time() -> None:
    """A gradient has the time at which it was seen, not that of its forward."""
    rig = Rig()
    rig.writer.add_sample(forward(0, measurement(timestamp_us=START_US + 5)))
    rig.writer.add_sample(backward(0, measurement(signal=Signal.OUTPUT_GRADIENT, timestamp_us=START_US + 9)))
    rig.writer.flush()

    (data,) = rig.target.of("history")
    stamps = pq.read_table(io.BytesIO(data)).column("timestamp").cast(pa.int64()).to_pylist()

    assert stamps == [START_US + 5] * 3 + [START_US + 9] * 3


def test_rows_of_history_never_lie_there_without_their_sample() -> None:
    """Its row as it stands comes before them; another one supersedes it."""
    rig = Rig(buffer_rows=3)
    rig.writer.add_sample(forward(0, measurement()))
    rig.writer.add_sample(backward(0, measurement(signal=Signal.OUTPUT_GRADIENT)))

    assert [table for table, _, _ in rig.target.parts] == ["samples", "history"] * 2
    assert [(row["sample_id"], row["rows"]) for row in rig.rows("samples")] == [(0, 3), (0, 6)]
    assert rig.writer.flush()
    assert len(rig.rows("samples")) == 2
