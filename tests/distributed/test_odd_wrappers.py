"""On two ranks: parts that are called directly, wrapped anew after attach, or called past their wrapper."""

import copy
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer

NUM_STEPS = 3


class Model(nn.Module):
    """Calls its trunk directly and its head as it should be called."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.block: nn.Module = nn.Sequential(nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the head."""
        return self.head(self.block(self.trunk.forward(x)))


def _build() -> Model:
    torch.manual_seed(7)
    return Model()


def _train(model: nn.Module) -> list[torch.Tensor]:
    """Returns outputs, gradients and parameters of every step, local parts of sharded ones."""
    torch.manual_seed(11 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    seen: list[torch.Tensor] = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        output = model(torch.randn(5, 8))
        output.square().mean().backward()
        seen.append(output.detach().clone())
        seen.extend(_local(p.grad) for p in model.parameters() if p.grad is not None)
        optimizer.step()
        seen.extend(_local(p) for p in model.parameters())
    return seen


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return (tensor if to_local is None else to_local()).detach().clone()


def _wrap(inner: Model, sharded: bool) -> nn.Module:
    if not sharded:
        return DistributedDataParallel(inner)
    # What is called directly gets no parameters gathered for it alone: the root gathers them.
    fully_shard(inner.block)
    fully_shard(inner)
    return inner


def _compare(folder: str, sharded: bool) -> bool:
    """Returns whether training is the same with direct forwards captured; DDP has a part wrapped late."""
    inner = _build()
    twin = copy.deepcopy(inner)
    bare = _train(_wrap(inner, sharded))
    model = _wrap(twin, sharded)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inject_observer(
            model, output_dir=folder, run_id="odd", sampler=AlwaysSampler(), capture_direct_forwards=True
        )
        first = _train(model)
        if not sharded:
            twin.block = checkpoint_wrapper(twin.block)
            model(torch.randn(5, 8)).sum().backward()
        remove_observer(model)
    replaced = [str(w.message) for w in caught if "were replaced" in str(w.message)]
    return len(replaced) == (0 if sharded else 1) and all(
        torch.equal(a, b) for a, b in zip(bare, first, strict=True)
    )


def _evaluate_past_the_wrapper(folder: str) -> list[str]:
    """Returns what is warned of where an evaluation unwraps the model."""
    model = DistributedDataParallel(_build())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inject_observer(model, output_dir=folder, run_id="past", sampler=AlwaysSampler())
        _train(model)
        with torch.no_grad():
            for _ in range(4):
                model.module(torch.ones(5, 8))
        remove_observer(model)
    return [str(warning.message) for warning in caught]


def test_direct_forwards_under_ddp_are_captured_and_training_is_the_same(rank_pool, tmp_path: Path):
    """Each layer has one row set a sample, before and after a checkpoint wrapper came round a part."""
    folder = str(tmp_path / "run")
    assert rank_pool.run(_compare, folder, False) == [True, True]
    rows = open_run(folder).history().collect()
    means = rows.filter((rows["metric"] == "mean") & (rows["signal"] == "output"))
    for rank in (0, 1):
        layers = means.filter(means["rank"] == rank).sort("sample_id")["layer"].to_list()
        assert sorted(layers) == sorted(["trunk", "block.0", "block.1", "head"] * (NUM_STEPS + 1))
    assert set(rows["unavailable_reason"]) == {""}


def test_direct_forwards_under_fsdp_are_captured_and_training_is_the_same(rank_pool, tmp_path: Path):
    """With sharded parameters, on their class that sharding made."""
    folder = str(tmp_path / "run")
    assert rank_pool.run(_compare, folder, True) == [True, True]
    rows = open_run(folder).history().collect()
    assert set(rows["layer"]) == {"trunk", "block.0", "block.1", "head"}
    assert set(rows["unavailable_reason"]) == {""}


def test_an_evaluation_past_the_wrapper_is_told_once_on_each_rank(rank_pool, tmp_path: Path):
    """With the number of calls and the part that was called."""
    for told in rank_pool.run(_evaluate_past_the_wrapper, str(tmp_path / "run")):
        (sentence,) = told
        assert "4 calls of parts of the model ('module') ran outside a call of the model" in sentence
