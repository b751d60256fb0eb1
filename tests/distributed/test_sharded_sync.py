"""Whether gradients of sharded models are reduced, as it is stored, and what became of them."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

from torchinstruments import AlwaysSampler, EveryNStepsSampler, inject_observer, open_run, remove_observer
from torchinstruments.ranks.sharded_sync import ShardedSync
from torchinstruments.testing.collectives import no_collectives

FORWARD_AND_BACKWARD = [(forward, backward) for forward in (True, False) for backward in (True, False)]
"""Whether synchronisation is on in the forward, and in the backward."""


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))


def _sharded(mesh: Any = None) -> tuple[FSDPModule, nn.Sequential]:
    inner = _model()
    for layer in (inner[0], inner[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(inner, mesh=mesh), inner


def _run_fsdp2(folder: str, every: int) -> list[bool]:
    """One attempt for each placement of the flag; returns whether this rank got a reduced gradient."""
    root, model = _sharded()
    with no_collectives():
        inject_observer(model, output_dir=folder, run_id="run", sampler=EveryNStepsSampler(every))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        came = []
        for in_forward, in_backward in FORWARD_AND_BACKWARD:
            root.set_requires_gradient_sync(in_forward)
            loss = model(torch.ones(2, 4) + dist.get_rank()).sum()
            root.set_requires_gradient_sync(in_backward)
            loss.backward()
            # By the time of the step it says something else again.
            root.set_requires_gradient_sync(True)
            came.append(model[0].weight.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        remove_observer(model)
    return came


def _accumulate(folder: str, every: int) -> None:
    """Three micro-batches a step, the last one synchronised, as in a training loop; then an evaluation."""
    root, model = _sharded()
    sampler = AlwaysSampler() if every == 1 else EveryNStepsSampler(every)
    inject_observer(model, output_dir=folder, run_id="run", sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for micro_batch in range(3):
            root.set_requires_gradient_sync(micro_batch == 2)
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 4))
    remove_observer(model)


def _backwards_of_one_forward(folder: str) -> None:
    """No backward at all, then two losses of one forward, the first one local."""
    root, model = _sharded()
    inject_observer(model, output_dir=folder, run_id="run", sampler=AlwaysSampler())
    model(torch.ones(2, 4))
    output = model(torch.ones(2, 4))
    for is_synchronised in (False, True):
        root.set_requires_gradient_sync(is_synchronised)
        output.sum().backward(retain_graph=not is_synchronised)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    remove_observer(model)


def _run_fsdp1(folder: str, flat: bool) -> list[tuple[bool, bool]]:
    """A step for each placement of ``no_sync``; returns whether all gradients were this rank's piece alone.

    Also whether the gradient after the backward is the mean of both ranks.
    """
    inner = nn.Sequential(nn.Linear(1, 2, bias=False))
    model = FullyShardedDataParallel(inner, use_orig_params=not flat, device_id=torch.device("cpu"))
    with no_collectives():
        inject_observer(
            model,
            output_dir=folder,
            run_id="run",
            sampler=AlwaysSampler(),
            signals=("output", "output_gradient", "parameter_gradient"),
            # A flat parameter belongs to the module that is wrapped.
            selector=lambda name, module: True,  # noqa: ARG005
        )
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for in_forward, in_backward in FORWARD_AND_BACKWARD:
            with nullcontext() if in_forward else model.no_sync():
                loss = model(torch.full((1, 1), 1.0 + dist.get_rank())).sum()
            with nullcontext() if in_backward else model.no_sync():
                loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            values = torch.cat([gradient.flatten() for gradient in gradients])
            seen.append((values.numel() == 1, bool((values == 1.5).all())))
            # What was not reduced is thrown away: it would be added to the next one.
            for parameter in model.parameters():
                parameter.grad = None
            optimizer.step()
        remove_observer(model)
    return seen


def _settings(replicates: bool) -> dict[str, str]:
    """Returns what is read with each setting of the flags of a model on a mesh of 2 x 2, or of 4."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if replicates else None
    root, model = _sharded(mesh)
    inner = model[0]
    assert isinstance(inner, FSDPModule)
    settings = {
        "fresh": partial(root.set_requires_gradient_sync, True),
        "no sync": partial(root.set_requires_gradient_sync, False),
        "no all-reduce": partial(root.set_requires_all_reduce, False),
        "one differs": partial(inner.set_requires_gradient_sync, False),
    }
    found = {}
    for name, apply in settings.items():
        root.set_requires_gradient_sync(True)
        apply()
        found[name] = ShardedSync(model).read().value
    return found


def _reduce_only(folder: str) -> tuple[bool, bool]:
    """A micro-batch without the all-reduce between replicas, then one with; returns what came of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    root, model = _sharded(mesh)
    with no_collectives():
        inject_observer(
            model,
            output_dir=folder,
            run_id="run",
            sampler=AlwaysSampler(),
            signals=("output", "output_gradient", "parameter_gradient"),
        )
        came = []
        for is_last in (False, True):
            root.set_requires_all_reduce(is_last)
            model(torch.ones(2, 4) + dist.get_rank()).sum().backward()
            came.append(model[0].weight.grad is not None)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        remove_observer(model)
    return came[0], came[1]


def _steps(folder: Path, rank: int = 0) -> pl.DataFrame:
    return open_run(str(folder)).steps().filter(pl.col("rank") == rank).sort("attempt").collect()


def _of_gradients(folder: Path, rank: int = 0) -> list[str]:
    """Returns how the gradients of outputs say that they were synchronised, a sample."""
    rows = open_run(str(folder)).history().filter(pl.col("rank") == rank).collect()
    gradients = rows.filter(pl.col("signal") == "output_gradient")
    by_sample = gradients.select("sample_id", "backward_index", "grad_sync").unique()
    return by_sample.sort("sample_id", "backward_index")["grad_sync"].to_list()


@pytest.mark.parametrize("every", [1, 100])
def test_the_backward_decides_under_fully_shard(rank_pool, tmp_path: Path, every: int):
    """Whatever the flag was in the forward and is at the step, sampled or not."""
    for came in rank_pool.run(_run_fsdp2, str(tmp_path), every):
        assert came == [backward for _, backward in FORWARD_AND_BACKWARD]
    expected = ["synced" if backward else "local" for _, backward in FORWARD_AND_BACKWARD]
    for rank in (0, 1):
        steps = _steps(tmp_path, rank)
        assert steps["last_micro_batch_sync"].to_list() == expected
        assert steps["micro_batches_synced"].to_list() == [int(sync == "synced") for sync in expected]
        assert _of_gradients(tmp_path, rank) == (expected if every == 1 else [])


@pytest.mark.parametrize("every", [1, 2])
def test_accumulation_counts_what_each_backward_did(rank_pool, tmp_path: Path, every: int):
    """One of three micro-batches is synchronised; what is measured in the forward does not claim to know."""
    rank_pool.run(_accumulate, str(tmp_path), every)
    steps = _steps(tmp_path)
    assert steps["micro_batches"].to_list() == [3, 3, 3]
    assert steps["micro_batches_synced"].to_list() == [1, 1, 1]
    assert steps["last_micro_batch_sync"].to_list() == ["synced"] * 3
    assert _of_gradients(tmp_path) == ["local", "local", "synced"] * (3 if every == 1 else 1)
    history = open_run(str(tmp_path)).history().filter(pl.col("signal") == "output").collect()
    by_mode = history.select("grad_enabled", "grad_sync").unique().sort("grad_enabled")
    assert by_mode.rows() == [(False, "local"), (True, "unknown")][every - 1 :]


def test_of_several_backwards_the_last_one_counts_and_none_is_unknown(rank_pool, tmp_path: Path):
    """Rows of each backward have its own; the forward that had none stays unknown."""
    rank_pool.run(_backwards_of_one_forward, str(tmp_path))
    steps = _steps(tmp_path)
    assert steps.select("micro_batches", "micro_batches_synced", "last_micro_batch_sync").rows() == [
        (2, 1, "synced")
    ]
    assert _of_gradients(tmp_path) == ["local", "synced"]


@pytest.mark.parametrize("flat", [False, True])
def test_the_backward_decides_under_fully_sharded_data_parallel(rank_pool, tmp_path: Path, flat: bool):
    """no_sync round the forward alone changes nothing; a reduced gradient is measured, another one is not."""
    expected = ["synced" if backward else "local" for _, backward in FORWARD_AND_BACKWARD]
    seen = rank_pool.run(_run_fsdp1, str(tmp_path), flat)
    for rank, own in enumerate(seen):
        assert [is_mean for _, is_mean in own] == [backward for _, backward in FORWARD_AND_BACKWARD]
        steps = _steps(tmp_path, rank)
        assert steps["last_micro_batch_sync"].to_list() == expected
        assert _of_gradients(tmp_path, rank) == expected
    rows = open_run(str(tmp_path)).history().filter(pl.col("signal") == "parameter_gradient").collect()
    is_flattened = pl.col("unavailable_reason").str.starts_with("inside_flat_parameter")
    # The layer inside has nothing left of its own, and says so beside the flat parameter's rows.
    assert set(rows.filter(is_flattened)["layer"]) == ({"0"} if flat else set())
    rows = rows.filter(~is_flattened)
    reduced = rows.filter((pl.col("stage") == "reduced") & (pl.col("metric") == "mean"))
    for rank in (0, 1):
        own = reduced.filter(pl.col("rank") == rank).sort("sample_id")
        assert own["value"].to_list() == [1.5 if sync == "synced" else None for sync in expected]
        assert own["grad_sync"].to_list() == expected
        missing = own.filter(pl.col("value").is_null())["unavailable_reason"]
        assert set(missing.to_list()) == {"not_synchronised"}
    assert set(rows["scope"].to_list()) == {"local_shard"}


def test_settings_are_read_group_by_group(four_ranks):
    """Reduced in a replica alone is an answer of its own where there are replicas, and no other place."""
    assert (
        four_ranks.run(_settings, True)
        == [{"fresh": "synced", "no sync": "local", "no all-reduce": "reduced_only", "one differs": "mixed"}]
        * 4
    )
    assert (
        four_ranks.run(_settings, False)
        == [{"fresh": "synced", "no sync": "local", "no all-reduce": "synced", "one differs": "mixed"}] * 4
    )


def test_what_was_reduced_in_its_replica_alone_says_so(four_ranks, tmp_path: Path):
    """Its gradient comes with the micro-batch that is reduced between replicas too."""
    assert four_ranks.run(_reduce_only, str(tmp_path)) == [(False, True)] * 4
    for rank in range(4):
        assert _of_gradients(tmp_path, rank) == ["reduced_only", "synced"]
        steps = _steps(tmp_path, rank)
        assert steps["micro_batches_synced"].to_list() == [1]
    rows = open_run(str(tmp_path)).history().filter(pl.col("stage") == "reduced").collect()
    first = rows.filter(pl.col("micro_batch") == 0)
    assert set(first["unavailable_reason"].to_list()) == {
        "not_synchronised: it was reduced in its replica alone, and is not there yet"
    }
    second = rows.filter(pl.col("micro_batch") == 1)
    assert set(second["unavailable_reason"].to_list()) == {""}
