"""Rank 7 of 1,024, in a process group that sends nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl

from torchinstruments import open_run
from torchinstruments.environment import SPOOL_DIR

PROGRAM = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchinstruments import AlwaysSampler, inject_observer, remove_observer
from torchinstruments.testing.collectives import no_collectives

dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=1024)
mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
with no_collectives():
    inject_observer(
        model,
        output_dir=sys.argv[1],
        run_id="large",
        sampler=AlwaysSampler(),
        signals=("output", "parameter"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro_batch in range(3):
        model.set_requires_gradient_sync(micro_batch == 2)
        model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    remove_observer(model)
"""


def test_rank_7_of_1024_knows_its_place_and_waits_for_nobody(tmp_path: Path):
    """Its shards, its place in the mesh and what each backward did need no other rank."""
    folder = tmp_path / "run"
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env=os.environ | {SPOOL_DIR: str(tmp_path / "spool")},
        check=True,
        timeout=100,
    )
    (path,) = folder.glob("rank-007/process-*.json")
    manifest = json.loads(path.read_text())
    assert (manifest["rank"], manifest["world_size"]) == (7, 1024)
    assert manifest["mesh_coordinates"] == [0, 7]
    assert manifest["mesh_axis_names"] == ["replicate", "shard"]
    assert manifest["counters"]["errors"] == {}
    run = open_run(str(folder))
    columns = ("micro_batches", "micro_batches_synced", "last_micro_batch_sync")
    assert run.steps().select(columns).collect().rows() == [(3, 1, "synced")]
    rows = run.history().filter((pl.col("signal") == "parameter") & (pl.col("metric") == "mean")).collect()
    found = {
        (layer, path): rest
        for layer, path, *rest in rows.select(
            "layer", "tensor_path", "shape", "scope", "unavailable_reason"
        ).iter_rows()
    }
    assert found == {
        ("0", "weight"): ["4x16", "local_shard", ""],
        ("0", "bias"): ["4", "local_shard", ""],
        # Four rows among eight ranks: the last of those have none.
        ("2", "weight"): ["0x32", "local_shard", "empty"],
        ("2", "bias"): ["0", "local_shard", "empty"],
    }
