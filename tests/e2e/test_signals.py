"""All signals of one training under a loss scaler, as every place where a user looks has them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from torchinstruments import (
    AlwaysSampler,
    CompositeSink,
    MetricLoggerSink,
    SnapshotSink,
    inject_observer,
    merge_run,
    open_run,
    remove_observer,
)
from torchinstruments.cli.main import main
from torchinstruments.records import Signal
from unit.sinks.event_reading import read_histograms

KEY = ("sample_id", "layer", "call_index", "signal", "stage", "tensor_path", "backward_index", "metric")
NUM_STEPS = 3
SCALE = 8.0


class Logger:
    """Keeps the names that were logged."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keeps names."""
        assert step >= 0
        self.names.update(metrics)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logger, list[float]]:
    """A run of three steps, the second of which overflows; the gradients' means after each clipping."""
    folder = tmp_path_factory.mktemp("signals")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    logger = Logger()
    inject_observer(
        model,
        output_dir=folder / "run",
        sampler=AlwaysSampler(),
        signals=tuple(Signal),
        sink=CompositeSink(MetricLoggerSink(logger), SnapshotSink(folder / "snapshots")),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=SCALE)
    means: list[float] = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 else 1.0
        scaler.scale(model(torch.rand(2, 4)).sum() * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradient = next(model.parameters()).grad
        assert gradient is not None
        means.append(gradient.double().mean().item())
        scaler.step(optimizer)
        scaler.update()
    remove_observer(model)
    return folder, logger, means


def history_of(folder: Path) -> pl.DataFrame:
    """All rows."""
    return open_run(str(folder / "run")).history().collect()


def test_rows_have_one_place_each_and_are_all_counted(trained: tuple[Path, Logger, list[float]]) -> None:
    """Stages are part of the key, and the samples table counts what steps found later."""
    history = history_of(trained[0])
    assert history.height == history.unique(subset=list(KEY)).height
    samples = open_run(str(trained[0] / "run")).samples().collect().sort("sample_id")
    assert samples["rows"].to_list() == history.group_by("sample_id").len().sort("sample_id")["len"].to_list()
    assert samples["num_backwards"].to_list() == [1] * NUM_STEPS
    assert set(samples["state"].to_list()) == {"backward_observed"}


def test_each_stage_has_its_factor(trained: tuple[Path, Logger, list[float]]) -> None:
    """The scale is in a gradient until the scaler takes it out; a skipped step applied nothing."""
    history = history_of(trained[0]).filter(
        (pl.col("signal") == "parameter_gradient") & (pl.col("metric") == "mean")
    )
    found = {
        stage: rows.sort("sample_id").select("value", "loss_scale", "unavailable_reason").rows()
        for (stage,), rows in history.group_by("stage")
    }
    means = trained[2]
    assert found["applied"] == [
        (pytest.approx(means[0]), 1.0, ""),
        (None, 1.0, "step_skipped"),
        (pytest.approx(means[2]), 1.0, ""),
    ]
    assert [scale for _, scale, _ in found["local_accumulated"]] == [SCALE, SCALE, SCALE / 2]
    assert found["reduced"] == found["local_accumulated"]
    assert set(history["scale_provenance"].to_list()) == {"gradscaler"}


def test_summaries_and_the_merge_keep_stages_apart(
    trained: tuple[Path, Logger, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """In result.json, in the merged result and in what the merge prints."""
    run = trained[0] / "run"
    (linear,) = [one for one in json.loads((run / "result.json").read_text()) if one["layer"] == "0"]
    expected = [
        ("input", None, "input"),
        ("output", None, "output"),
        ("output_gradient", None, "grad_output"),
        ("parameter", None, "weight"),
        ("parameter_gradient", "applied", "weight"),
        ("parameter_gradient", "local_accumulated", "weight"),
        ("parameter_gradient", "reduced", "weight"),
    ]
    assert [(one["signal"], one.get("stage"), one["tensor_path"]) for one in linear["tensors"]] == expected
    merged: Any = merge_run(str(run)).result
    assert merged["run"]["signals"] == [signal.value for signal in Signal]
    (tensors,) = [one["tensors"] for one in merged["layers"] if one["layer"] == "0"]
    assert [(one["signal"], one["stage"] or None, one["tensor_path"]) for one in tensors] == expected
    applied = tensors[4]
    assert applied["loss_scale"] == {"lowest": 1.0, "highest": 1.0}
    assert main(["merge", str(run)]) == 0
    assert "complete" in capsys.readouterr().out
    page = (run / "index.md").read_text()
    assert "parameter_gradient" in page


def test_names_in_loggers_snapshots_and_event_files(trained: tuple[Path, Logger, list[float]]) -> None:
    """Every place keeps signals and stages apart."""
    folder, logger, _ = trained
    stem = "torchinstruments/modules/0"
    gradients = f"{stem}/parameter_gradients/weight"
    assert {
        f"{stem}/call_0/input/mean",
        f"{stem}/parameters/weight/mean",
        *(f"{gradients}/{stage}/mean" for stage in ("local_accumulated", "reduced", "applied")),
    } <= logger.names
    snapshot = json.loads((folder / "snapshots" / "snapshots" / "000000.json").read_text())
    (call,) = snapshot["modules"]["0"]
    assert sorted(call["parameter_gradients"]) == [
        "weight/applied",
        "weight/local_accumulated",
        "weight/reduced",
    ]
    drawn = read_histograms(folder / "run" / "tensorboard")
    assert {tag for tag in drawn if "/parameter" in tag} == {
        f"{stem}/parameters/weight/histograms/distribution",
        *(
            f"{gradients}/{stage}/histograms/distribution"
            for stage in ("local_accumulated", "reduced", "applied")
        ),
    }
