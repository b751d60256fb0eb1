"""Stages of a pipeline on two ranks: what is counted, and what is said of their gradients."""

import json
from pathlib import Path

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer
from torchinstruments.testing.collectives import no_collectives

NUM_STEPS = 3
MICRO_BATCHES = 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def _build() -> nn.Module:
    torch.manual_seed(7 + dist.get_rank())
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def _train(schedule: str, wrapper: str, folder: str) -> list[torch.Tensor]:
    """Trains a pipeline of two stages, of one each; returns gradients and parameters of every step."""
    inner = _build()
    stage: nn.Module = inner
    alone = dist.new_subgroups(1)[0]
    if wrapper == "ddp":
        stage = DistributedDataParallel(inner, process_group=alone)
    elif wrapper == "fully_shard":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
        fully_shard(inner, mesh=mesh["dp"])
    rank = dist.get_rank()
    pipeline = SCHEDULES[schedule](
        PipelineStage(stage, rank, 2, torch.device("cpu")),
        MICRO_BATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    if folder:
        inject_observer(
            stage,
            output_dir=folder,
            run_id="run",
            sampler=AlwaysSampler(),
            signals=("output", "output_gradient", "parameter_gradient"),
        )
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    seen: list[torch.Tensor] = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        x = torch.randn(2 * MICRO_BATCHES, 4, generator=generator)
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=torch.zeros(2 * MICRO_BATCHES, 4))
        for parameter in stage.parameters():
            assert parameter.grad is not None
            seen.append(_local(parameter.grad))
        optimizer.step()
        seen.extend(_local(parameter) for parameter in stage.parameters())
    if folder:
        remove_observer(stage)
    return seen


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return (tensor if to_local is None else to_local()).detach().clone()


def _compare(schedule: str, wrapper: str, folder: str) -> bool:
    """Returns whether a training is the same with and without an observer, which issues no collective."""
    bare = _train(schedule, wrapper, "")
    with no_collectives():
        observed = _train(schedule, wrapper, folder)
    return all(torch.equal(a, b) for a, b in zip(bare, observed, strict=True))


@pytest.mark.parametrize(
    ("schedule", "wrapper"), [("gpipe", "none"), ("1f1b", "none"), ("1f1b", "ddp"), ("gpipe", "fully_shard")]
)
def test_a_stage_has_a_micro_batch_for_each_call_and_says_pipelined(
    rank_pool, tmp_path: Path, schedule: str, wrapper: str
):
    """The forward that learns shapes is none; its schedule reduces gradients, whatever the wrapper says."""
    assert rank_pool.run(_compare, schedule, wrapper, str(tmp_path)) == [True, True]
    run = open_run(str(tmp_path))
    steps = run.steps().select("micro_batches", "micro_batches_synced", "last_micro_batch_sync", "outcome")
    assert steps.collect().rows() == [(MICRO_BATCHES, 0, "pipelined", "applied")] * 2 * NUM_STEPS
    samples = run.samples().collect()
    assert samples.height == 2 * NUM_STEPS * MICRO_BATCHES
    assert set(samples["state"]) == {"backward_observed"}
    assert set(samples["micro_batch"]) == set(range(MICRO_BATCHES))
    history = run.history().collect()
    assert set(history["grad_sync"]) == {"pipelined"}
    assert set(history.filter(pl.col("signal") == "output")["shape"]) == {"2x4"}
    reduced = history.filter(pl.col("stage") == "reduced")
    assert reduced["value"].null_count() == reduced.height > 0
    kinds = {reason.partition(":")[0] for reason in reduced["unavailable_reason"]}
    # Of forwards that run ahead of the backwards, the gradients of parameters belong to the last one.
    assert kinds <= {"not_synchronised", "no_gradient"}
    for path in tmp_path.glob("rank-*/process-*.json"):
        manifest = json.loads(path.read_text())
        assert manifest["counters"]["errors"]["tracing"] == 1
        assert manifest["counters"]["forwards"] == NUM_STEPS * MICRO_BATCHES


def _exchange() -> float:
    """Returns what a rank receives through operations of which one was made before the guard."""
    other = 1 - dist.get_rank()
    received = torch.empty(1)
    receiving = dist.P2POp(dist.irecv, received, other)
    with no_collectives():
        sending = dist.P2POp(dist.isend, torch.full((1,), float(dist.get_rank())), other)
        for work in dist.batch_isend_irecv([receiving, sending]):
            work.wait()
    return received.item()


def test_the_guard_lets_a_programs_point_to_point_operations_through(rank_pool):
    """Torch knows the functions in them by identity."""
    assert rank_pool.run(_exchange) == [1.0, 0.0]
