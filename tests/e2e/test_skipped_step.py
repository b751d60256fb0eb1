"""A step that overflows on one rank, in float16 with four micro-batches: each column of its tables.

The script keeps its own record: what its layers put out, what its gradients held before each step, which
parameters changed, the scale on both sides, and the time around it all.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from e2e.test_examples import PROJECT, SMALL, run
from torchinstruments import open_run

pytestmark = pytest.mark.timeout(300)

NUM_STEPS = 6
NUM_MICRO_BATCHES = 4
OVERFLOW_AT = 3
OVERFLOWING_RANK = 1
SAMPLED = (1, 3, 5)
RANKS = (0, 1)

FLOAT32_LAYERS = ("characters", "positions", "norm")
"""Embeddings and layer norms; autocast runs everything else in float16."""


_OF_FINITE_ENTRIES: dict[str, Callable[[npt.NDArray[np.float64]], np.float64]] = {
    "mean": np.mean,
    "std": np.std,
    "min": np.min,
    "max": np.max,
    "p25": partial(np.quantile, q=0.25),
    "p50": partial(np.quantile, q=0.5),
    "p75": partial(np.quantile, q=0.75),
}


@dataclass(frozen=True)
class Trained:
    """What a run left, and what its script kept.

    Attributes:
        history: The table.
        samples: The table.
        steps: The table.
        log: Lines of the script's record of steps, by rank.
        tensors: By rank, what its layers put out.
    """

    history: pl.DataFrame
    samples: pl.DataFrame
    steps: pl.DataFrame
    log: dict[int, list[dict[str, Any]]]
    tensors: dict[int, dict[str, npt.NDArray[np.float64]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two ranks, six steps of four micro-batches, every second step sampled."""
    folder = tmp_path_factory.mktemp("overflow")
    run(
        *(PROJECT / "launch" / "local.sh", *SMALL, "--fp16", "--steps", NUM_STEPS),
        *("--micro-batches", NUM_MICRO_BATCHES, "--overflow-at", OVERFLOW_AT, "--sample-every-steps", "2"),
        *("--log-tensors", folder / "log", "--log-steps", folder / "steps"),
        cwd=folder,
        OUTPUT_DIR=str(folder / "out"),
        NPROC="2",
    )
    opened = open_run(str(folder / "out"))
    log = {
        rank: [
            json.loads(line) for line in (folder / f"steps-rank-{rank:03d}.jsonl").read_text().splitlines()
        ]
        for rank in RANKS
    }
    tensors = {}
    for rank in RANKS:
        with np.load(folder / f"log-rank-{rank:03d}.npz") as arrays:
            tensors[rank] = {key: arrays[key] for key in arrays.files}
    return Trained(
        opened.history().collect(),
        opened.samples().collect(),
        opened.steps().collect(),
        log,
        tensors,
    )


def statistics(values: npt.NDArray[np.float64]) -> dict[str, tuple[float | None, str]]:
    """Returns value and reason of each metric, by its definition, in float64."""
    flat = values.ravel()
    finite = flat[np.isfinite(flat)]
    shares = {
        "zero_fraction": float((flat == 0).mean()),
        "nonfinite_fraction": float((~np.isfinite(flat)).mean()),
    }
    numbers: dict[str, float | None] = {**shares}
    for name, function in _OF_FINITE_ENTRIES.items():
        numbers[name] = float(function(finite)) if finite.size else None
    return {name: (value, "no_finite_entries" if value is None else "") for name, value in numbers.items()}


def test_the_script_overflowed_where_it_was_told_to(trained: Trained) -> None:
    """Both ranks found it after the reduction, changed nothing, and halved the scale."""
    for rank in RANKS:
        assert [line["applied"] for line in trained.log[rank]] == [
            step != OVERFLOW_AT for step in range(NUM_STEPS)
        ]
        assert [line["scale_after"] for line in trained.log[rank]] == [65536.0] * 3 + [32768.0] * 3


@pytest.mark.parametrize("rank", RANKS)
def test_every_column_of_steps_is_what_the_script_knows(trained: Trained, rank: int) -> None:
    """One row an attempt, with the outcome, evidence, scale and counts that the script's record gives."""
    rows = trained.steps.filter(pl.col("rank") == rank).sort("attempt")
    assert rows.height == NUM_STEPS
    for line, row in zip(trained.log[rank], rows.iter_rows(named=True), strict=True):
        step = line["step"]
        first = step * NUM_MICRO_BATCHES
        known = {
            "generation": 0,
            "rank": rank,
            "attempt": step,
            "optimizer": 0,
            "optimizer_attempt": step,
            "global_step": None,
            "first_forward_index": first,
            "last_forward_index": first + NUM_MICRO_BATCHES - 1,
            "micro_batches": NUM_MICRO_BATCHES,
            "micro_batches_declared": None,
            "micro_batches_synced": 1,
            "last_micro_batch_sync": "synced",
            "outcome": "applied" if line["applied"] else "skipped",
            "evidence": "found_inf",
            "found_inf": 0.0 if line["is_finite"] else 1.0,
            "scale_before": line["scale_before"],
            "scale_after": line["scale_after"],
            "lr": line["lr"],
            "clock": "host",
        }
        assert {name: row[name] for name in known} == known
        times = {"process", "started_at", "gap_s", "forward_s", "backward_s", "optimizer_s"}
        assert set(row) == set(known) | times
    assert rows["process"].n_unique() == 1


@pytest.mark.parametrize("rank", RANKS)
def test_times_of_steps_lie_inside_what_the_script_measured(trained: Trained, rank: int) -> None:
    """An attempt begins inside its step and its phases take no longer; gaps lie between the steps."""
    rows = trained.steps.filter(pl.col("rank") == rank).sort("attempt").to_dicts()
    log = trained.log[rank]
    for line, row in zip(log, rows, strict=True):
        started_at = row["started_at"].timestamp()
        assert line["began_at"] <= started_at + 1e-3
        assert started_at <= line["ended_at"]
        phases = (row["forward_s"], row["backward_s"], row["optimizer_s"])
        assert min(phases) >= 0.0
        assert row["forward_s"] > 0.0
        assert row["backward_s"] > 0.0
        # The clocks are two: of the wall around it, and a monotonic one inside.
        assert sum(phases) <= line["ended_at"] - line["began_at"] + 0.05
    assert rows[0]["gap_s"] == 0.0
    assert all(row["optimizer_s"] > 0.0 for row in rows if row["outcome"] == "applied")
    for earlier, later, row in zip(log, log[1:], rows[1:], strict=False):
        assert 0.0 < row["gap_s"] <= later["ended_at"] - earlier["began_at"]


@pytest.mark.parametrize("rank", RANKS)
def test_every_value_of_history_is_what_the_script_saw(trained: Trained, rank: int) -> None:
    """Gradients are stored scaled, as they were; those without a finite entry say so."""
    rows = trained.history.filter(pl.col("rank") == rank)
    found = {
        (row["attempt"], row["micro_batch"], row["layer"], row["signal"], row["metric"]): row
        for row in rows.iter_rows(named=True)
    }
    assert len(found) == rows.height, "a row is there twice"
    expected: dict[tuple[int, int, str, str, str], tuple[float | None, str]] = {}
    for key, values in trained.tensors[rank].items():
        step, micro_batch, layer, signal = key.split("/")
        for metric, one in statistics(values).items():
            expected[int(step), int(micro_batch), layer, signal, metric] = one
    assert set(found) == set(expected)
    for key, (value, reason) in expected.items():
        row = found[key]
        assert row["unavailable_reason"] == reason, key
        if value is None:
            assert row["value"] is None, key
        else:
            assert row["value"] == pytest.approx(value, rel=1e-9, abs=1e-13), key
    lost = {key for key, (value, _) in expected.items() if value is None}
    assert {key[:2] for key in lost} == ({(OVERFLOW_AT, 0)} if rank == OVERFLOWING_RANK else set())


@pytest.mark.parametrize("rank", RANKS)
def test_every_other_column_of_history_says_where_the_value_belongs(trained: Trained, rank: int) -> None:
    """Attempt, micro-batch, synchronisation, scale, shape and dtype of each row follow from the script."""
    rows = trained.history.filter(pl.col("rank") == rank)
    shapes = {key: values.shape for key, values in trained.tensors[rank].items()}
    scales = {line["step"]: line["scale_before"] for line in trained.log[rank]}
    order = {attempt: index * NUM_MICRO_BATCHES for index, attempt in enumerate(SAMPLED)}
    began = {line["step"]: line["began_at"] for line in trained.log[rank]}
    ended = {line["step"]: line["ended_at"] for line in trained.log[rank]}
    for row in rows.iter_rows(named=True):
        attempt, micro_batch, layer = row["attempt"], row["micro_batch"], row["layer"]
        is_gradient = row["signal"] == "output_gradient"
        is_last = micro_batch == NUM_MICRO_BATCHES - 1
        in_float32 = layer in FLOAT32_LAYERS or layer.endswith("_norm")
        known = {
            "generation": 0,
            "rank": rank,
            "sample_id": order[attempt] + micro_batch,
            "forward_in_attempt": micro_batch,
            "step_provenance": "inferred",
            "forward_index": attempt * NUM_MICRO_BATCHES + micro_batch,
            "call_index": 0,
            "stage": "",
            "tensor_path": "grad_output" if is_gradient else "output",
            "backward_index": 0,
            "mode": "train",
            "grad_enabled": True,
            "grad_sync": "synced" if is_last else "local",
            "loss_scale": scales[attempt] if is_gradient else None,
            "scale_provenance": "gradscaler",
            "scope": "local",
            "replica_key": "",
            "execution": "eager",
            "shape": "x".join(map(str, shapes[f"{attempt}/{micro_batch}/{layer}/{row['signal']}"])),
            "dtype": "float32" if in_float32 else "float16",
            "device": "cpu",
        }
        assert {name: row[name] for name in known} == known
        assert began[attempt] <= row["timestamp"].timestamp() + 1e-3
        assert row["timestamp"].timestamp() <= ended[attempt]
        keys = {"process", "attempt", "micro_batch", "layer", "signal", "metric", "value"}
        assert set(row) == set(known) | keys | {"timestamp", "unavailable_reason"}
    assert set(rows["attempt"]) == set(SAMPLED)
    assert rows["process"].n_unique() == 1


@pytest.mark.parametrize("rank", RANKS)
def test_every_sample_is_whole(trained: Trained, rank: int) -> None:
    """One sample a micro-batch of each sampled attempt, with its backward and all of its layers."""
    samples = trained.samples.filter(pl.col("rank") == rank).sort("sample_id")
    layers = {key.split("/")[2] for key in trained.tensors[rank]}
    per_forward = 9 * sum(key.startswith("1/0/") for key in trained.tensors[rank])
    positions = [(attempt, micro) for attempt in SAMPLED for micro in range(NUM_MICRO_BATCHES)]
    assert list(samples.select("attempt", "micro_batch").iter_rows()) == positions
    for row in samples.iter_rows(named=True):
        assert (row["state"], row["num_backwards"], row["errors"]) == ("backward_observed", 1, 0)
        assert row["modules_expected"] == row["modules_fired"] == len(layers)
        assert row["rows"] == per_forward
