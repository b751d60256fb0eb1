"""An infinity on one rank of two, under each way to spread a model: what each rank's ledger says of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer

ATTEMPTS = 3
SCALE = 1024.0


@dataclass(frozen=True)
class Log:
    """What a rank saw of its own training, an entry for each attempt.

    Attributes:
        applied: Whether the weights changed.
        before: The scale at the step.
        after: The scale after the update.
    """

    applied: list[bool]
    before: list[float]
    after: list[float]


def _build() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False))


def _ddp() -> nn.Module:
    return DistributedDataParallel(_build())


def _sharded() -> nn.Module:
    model = _build()
    fully_shard(model)
    return model


def _two_dimensional() -> nn.Module:
    """Tensor parallelism in the second layer; the first one, whose gradients come first, has ``dp`` alone."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(_build(), mesh["tp"], {"1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def _replicated_shards() -> nn.Module:
    model = _build()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return model


def _flat() -> nn.Module:
    return FullyShardedDataParallel(_build(), use_orig_params=True, device_id=torch.device("cpu"))


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "ddp": _ddp,
    "fully_shard": _sharded,
    "two_dimensional": _two_dimensional,
    "replicated_shards": _replicated_shards,
    "flat": _flat,
    "private": _build,
}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _train(model: nn.Module, scaler: GradScaler, *, in_gradient: bool) -> Log:
    """Trains; in attempt 1 an entry of rank 1 is infinite, of its input or of its part of a gradient."""
    log = Log([], [], [])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for attempt in range(ATTEMPTS):
        optimizer.zero_grad()
        is_hit = attempt == 1 and dist.get_rank() == 1
        x = torch.arange(8.0).view(2, 4)
        factor = float("inf") if is_hit and not in_gradient else 1.0
        scaler.scale((model(x).square() * factor).mean()).backward()
        # The last parameter has a part on every rank, and tensor parallelism spreads that one alone.
        gradients = [p.grad for p in model.parameters() if p.grad is not None and _local(p.grad).numel() > 0]
        if is_hit and in_gradient:
            _local(gradients[-1]).view(-1)[0] = float("inf")
        before = [_local(parameter).clone() for parameter in model.parameters()]
        log.before.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        log.after.append(scaler.get_scale())
        after = [_local(parameter) for parameter in model.parameters()]
        log.applied.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return log


def _run(folder: str, wrapper: str, options: dict[str, Any]) -> tuple[Log, bool]:
    """Returns the log of an observed training, and whether an unobserved one was the same."""
    logs = []
    for is_observed in (False, True):
        model = WRAPPERS[wrapper]()
        scaler = (ShardedGradScaler if options["sharded_scaler"] else GradScaler)("cpu", init_scale=SCALE)
        if is_observed:
            inject_observer(model, output_dir=folder, run_id="ledger", sampler=AlwaysSampler())
        logs.append(_train(model, scaler, in_gradient=options["in_gradient"]))
        if is_observed:
            remove_observer(model)
    return logs[1], logs[0] == logs[1]


def _mix(folder: str) -> str:
    """Returns what a scaler says to an optimizer that has sharded and plain parameters."""
    sharded = nn.Linear(4, 4, bias=False)
    fully_shard(sharded)
    model = nn.Sequential(sharded, nn.Linear(4, 1, bias=False))
    inject_observer(model, output_dir=folder, run_id="ledger", sampler=AlwaysSampler())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    said = ""
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        said = str(error)
    remove_observer(model)
    return said


def _ledger(folder: Path, rank: int) -> pl.DataFrame:
    return open_run(str(folder)).steps().filter(pl.col("rank") == rank).sort("attempt").collect()


BOTH, ONE = [True, True], [False, True]


@pytest.mark.parametrize(
    ("wrapper", "sharded_scaler", "in_gradient", "skipping"),
    [
        ("ddp", False, False, BOTH),
        ("fully_shard", False, False, BOTH),
        ("fully_shard", False, True, BOTH),
        ("two_dimensional", False, True, ONE),
        ("replicated_shards", False, True, ONE),
        ("flat", False, True, ONE),
        ("flat", True, True, BOTH),
        ("private", False, False, ONE),
    ],
)
def test_each_ledger_says_what_its_own_rank_did(
    rank_pool: Any,
    tmp_path: Path,
    wrapper: str,
    sharded_scaler: bool,
    in_gradient: bool,
    skipping: list[bool],
) -> None:
    """Where torch does not bring the infinity of one rank to the other, they part; both ledgers show it."""
    options = {"sharded_scaler": sharded_scaler, "in_gradient": in_gradient}
    per_rank = rank_pool.run(_run, str(tmp_path), wrapper, options)
    for rank, (log, is_same) in enumerate(per_rank):
        assert is_same
        assert log.applied == [True, not skipping[rank], True], "torch does what its table says"
        steps = _ledger(tmp_path, rank)
        assert steps["outcome"].to_list() == ["applied" if applied else "skipped" for applied in log.applied]
        assert steps["evidence"].to_list() == ["found_inf"] * ATTEMPTS
        assert steps["found_inf"].to_list() == [0.0, float(skipping[rank]), 0.0]
        assert steps["scale_before"].to_list() == log.before
        assert steps["scale_after"].to_list() == log.after
        assert steps["optimizer_attempt"].to_list() == [0, 1, 2]
    expected = "unknown" if wrapper == "private" else "synced"
    assert set(_ledger(tmp_path, 0)["last_micro_batch_sync"]) == {expected}


def test_a_step_that_torch_refuses_is_no_step(rank_pool: Any, tmp_path: Path) -> None:
    """A scaler raises at an optimizer of sharded and plain parameters before it has stepped."""
    for said in rank_pool.run(_mix, str(tmp_path)):
        assert "mixed torch.Tensor and DTensor" in said
    for rank in (0, 1):
        steps = _ledger(tmp_path, rank)
        assert steps.select("outcome", "evidence", "found_inf").rows() == [("unknown", "none", None)]
