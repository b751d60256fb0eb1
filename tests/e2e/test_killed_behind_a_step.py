"""A process that is killed behind a step, before any further forward: the attempt has its row."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from torchinstruments import merge_run, open_run

PROGRAM = """
import functools, sys, time
import torch
from torch import nn
from torchinstruments import HistoryConfig, api, inject_observer

api.StepClock = functools.partial(api.StepClock, told_after_s=0.5)
observers = []

class Training:
    def __init__(self, name, *, fused=False, scaled=True):
        self.model = nn.Linear(4, 2)
        self.observer = inject_observer(
            self.model, output_dir=f"{sys.argv[1]}/{name}", history_config=HistoryConfig(buffer_rows=1)
        )
        observers.append(self.observer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)

    def attempt(self, *, overflow=False, updates=True):
        for _ in range(2):
            entries = torch.full((3, 4), float("inf") if overflow else 1.0)
            self.scaler.scale(self.model(entries).sum()).backward()
        self.scaler.step(self.optimizer)
        if updates:
            self.scaler.update()
        self.optimizer.zero_grad()

trainings = [
    Training("plain", scaled=False),
    Training("applied"),
    Training("skipped"),
    Training("fused", fused=True),
    Training("not_updated"),
    Training("block"),
]
for one in trainings:
    one.attempt()
plain, applied, skipped, fused, not_updated, block = trainings
plain.attempt()
applied.attempt()
skipped.attempt(overflow=True)
fused.attempt(overflow=True)
not_updated.attempt(overflow=True, updates=False)
with block.observer.step(global_step=9, micro_batches=2):
    block.attempt(overflow=True)
    time.sleep(600.0)
"""

LAST = {
    "plain": ("applied", "optimizer_hook", None, None, None, None),
    "applied": ("applied", "found_inf", 0.0, 64.0, 64.0, None),
    "skipped": ("skipped", "found_inf", 1.0, 64.0, 32.0, None),
    "fused": ("skipped", "found_inf", 1.0, 64.0, 32.0, None),
    "not_updated": ("skipped", "found_inf", 1.0, 64.0, None, None),
    "block": ("skipped", "found_inf", 1.0, 64.0, 32.0, 9),
}
"""Outcome, evidence, findings, both scales and the caller's number of each last attempt."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a process that was killed in a long sleep behind its last steps."""
    folder = tmp_path_factory.mktemp("runs")
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        end_s = time.monotonic() + 100.0
        while not all(_num_rows(folder / name) == 2 for name in LAST):
            assert child.poll() is None
            assert time.monotonic() < end_s, {name: _num_rows(folder / name) for name in LAST}
            time.sleep(0.2)
    finally:
        child.kill()
        child.wait()
    return folder


def _num_rows(run: Path) -> int:
    parts = run.glob("steps.parts/*.parquet")
    return sum(pl.scan_parquet(part).select(pl.len()).collect().item() for part in parts)


@pytest.mark.parametrize("name", LAST)
def test_the_last_attempt_is_there_with_its_outcome_and_scales(runs: Path, name: str) -> None:
    """Though no forward came after its step, and nothing was closed."""
    steps = open_run(str(runs / name)).steps().collect().sort("attempt")
    assert steps["attempt"].to_list() == [0, 1]
    assert steps["micro_batches"].to_list() == [2, 2]
    assert steps["lr"].to_list() == [0.5, 0.5]
    columns = ("outcome", "evidence", "found_inf", "scale_before", "scale_after", "global_step")
    assert steps.select(columns).row(1) == LAST[name]


def test_the_merge_counts_it(runs: Path) -> None:
    """As every other attempt of a rank."""
    result: Any = merge_run(str(runs / "skipped")).result
    (rank,) = result["steps"]["ranks"]
    assert (rank["attempts"], rank["applied"], rank["skipped"]) == (2, 1, 1)
