"""The examples with Lightning, with Accelerate, and with a restart: what they print and what they leave."""

import re
from pathlib import Path

import polars as pl
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from e2e.example_runs import run_example
from torchinstruments import open_run

pytestmark = pytest.mark.timeout(300)


def test_lightning_recognises_digits_under_the_eyes_of_a_callback(tmp_path: Path) -> None:
    """Both ranks took the same 72 synchronised steps; the logger has the accuracy beside the telemetry."""
    said = run_example("lightning_digits", "--output-dir", "out", cwd=tmp_path)
    accuracy = re.search(r"validation accuracy (0\.\d+)", said)
    assert accuracy
    assert float(accuracy[1]) > 0.85
    assert "27 forwards, 100.0% common to all ranks" in said
    assert "steps: the same on all ranks" in said

    opened = open_run(str(tmp_path / "out"))
    steps = opened.steps().select("rank", "attempt", "micro_batches", "outcome").collect()
    assert sorted(steps.iter_rows()) == [
        (rank, attempt, 1, "applied") for rank in (0, 1) for attempt in range(72)
    ]
    kinds = opened.history().select("rank", "mode", "grad_enabled", "signal", "grad_sync").unique().collect()
    assert set(kinds.iter_rows()) == {
        kind
        for rank in (0, 1)
        for kind in (
            (rank, "train", True, "output", "synced"),
            (rank, "train", True, "output_gradient", "synced"),
            (rank, "eval", False, "output", "local"),
        )
    }
    events = EventAccumulator(str(tmp_path / "out" / "logger" / "version_0")).Reload()
    assert [round(one.value, 3) for one in events.Scalars("validation_accuracy")][-1] == float(accuracy[1])
    written = events.Scalars("torchinstruments/modules/net.0/call_0/output/mean")
    stored = opened.history().filter(rank=0, layer="net.0", signal="output", metric="mean").collect()
    assert [one.step for one in written] == stored["sample_id"].to_list()
    assert [one.value for one in written] == pytest.approx(stored["value"].to_list())
    tags = events.Tags()["histograms"]
    assert isinstance(tags, list)
    assert any(tag.startswith("torchinstruments/modules/net.0/") for tag in tags)


def test_accelerate_on_two_ranks_accumulates_four_batches_a_step(tmp_path: Path) -> None:
    """Ten batches are two whole attempts and a partial one on each rank, and checks looked at all of them."""
    said = run_example("accelerate_tiny_model", "--output-dir", "out", cwd=tmp_path, ranks=2)
    columns = ("rank", "attempt", "micro_batches", "micro_batches_synced", "last_micro_batch_sync", "outcome")
    opened = open_run(str(tmp_path / "out"))
    assert sorted(opened.steps().select(columns).collect().iter_rows()) == [
        (rank, attempt, batches, 1, "synced", "applied")
        for rank in (0, 1)
        for attempt, batches in enumerate((4, 4, 2))
    ]
    findings = opened.result()["findings"]
    assert isinstance(findings, dict)
    assert findings["checks_run"] == {"nonfinite_grad": "0-1", "update_ratio": "0-1"}
    assert "0 critical, 0 warning" in said


def test_a_restart_is_a_second_generation_that_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """Rank 1 is interrupted in the first; steps 4 to 6 are there in both, attempts count from 0 in each."""
    said = run_example("elastic_restart", "--output-dir", "out", cwd=tmp_path)
    opened = open_run(str(tmp_path / "out" / "telemetry"))
    assert [one.world_size for one in opened.generations] == [2, 2]
    applied = opened.steps().filter(outcome="applied").group_by("generation", "rank")
    found = applied.agg(pl.col("attempt").sort(), pl.col("global_step").sort()).collect()
    second = (list(range(8)), list(range(4, 12)))
    assert sorted(found.iter_rows()) == [
        (0, 0, list(range(7)), list(range(7))),
        (0, 1, list(range(7)), list(range(7))),
        (1, 0, *second),
        (1, 1, *second),
    ]
    # The launcher ends rank 0 by SIGTERM, which may come before its failed backward, or while it closes.
    assert re.search(r"interrupted: (0-)?1[,;]", said)
    rows = [line.split()[1::2] for line in said.splitlines() if re.match(r"│ \d .*[0-9a-f]{8} ", line)]
    assert [(row[0], row[1], row[3], row[4]) for row in rows][1:] == [
        ("0", "1", "0", "interrupted"),
        ("1", "0", "1", "closed"),
        ("1", "1", "1", "closed"),
    ]
