"""Compiled models on two ranks: what is seen under every wrapper, and training as it is without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import (
    AlwaysSampler,
    EveryNForwardsSampler,
    EveryNStepsSampler,
    inject_observer,
    open_run,
    remove_observer,
)
from torchinstruments.errors import ConfigurationError
from torchinstruments.testing.collectives import no_collectives
from unit.observe.compiling import INSIDE, Net, counting, equal, stance

NUM_STEPS = 4

WHOLE = {"": "eager", "head": "inside_compiled"} | dict.fromkeys(INSIDE, "inside_compiled")
BLOCKS = {"head": "eager", "blocks.0": "eager", "blocks.1": "eager"} | dict.fromkeys(
    INSIDE, "inside_compiled"
)


def _wrapped(form: str, model: Net, backend: Any) -> Any:
    """Returns what a program calls."""
    match form:
        case "ddp over compiled":
            return DistributedDataParallel(torch.compile(model, backend=backend))
        case "ddp over in place":
            model.compile(backend=backend)
            return DistributedDataParallel(model)
        case "compiled over ddp":
            return torch.compile(DistributedDataParallel(model), backend=backend)
        case "ddp in place":
            wrapper = DistributedDataParallel(model)
            wrapper.compile(backend=backend)
            return wrapper
        case "ddp over blocks":
            for block in model.blocks:
                block.compile(backend=backend)
            return DistributedDataParallel(model)
        case "sharded blocks in place":
            for block in model.blocks:
                block.compile(backend=backend)
                fully_shard(block)
            return fully_shard(model)
        case "sharded compiled blocks":
            for index, block in enumerate(model.blocks):
                compiled = torch.compile(block, backend=backend)
                assert isinstance(compiled, nn.Module)
                model.blocks[index] = compiled
                fully_shard(compiled)
            return fully_shard(model)
        case _:
            fully_shard(model)
            return torch.compile(model, backend=backend)


def _train(model: Any) -> list[torch.Tensor]:
    """Returns outputs and local parameters of every step."""
    torch.manual_seed(11 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        output = model(torch.randn(3, 4))
        output.square().mean().backward()
        optimizer.step()
        seen.append(output.detach().clone())
        parameters = (getattr(p, "to_local", lambda p=p: p)() for p in model.parameters())
        seen.extend(p.detach().clone() for p in parameters)
    return seen


def _build(form: str) -> tuple[Any, Any]:
    """Returns a new model in a form and the backend that counts its graphs."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    backend = counting("eager")
    return _wrapped(form, Net(), backend), backend


def _compare(form: str, folder: str, compiled: str) -> tuple[bool, int, int, str, dict[str, str]]:
    """Trains without and with an observer.

    Returns:
        Whether both are equal, graphs of each, the stance in the end, and how each layer was executed.
    """
    model, bare_backend = _build(form)
    bare = _train(model)
    model, backend = _build(form)
    with no_collectives():
        observer = inject_observer(
            model, output_dir=folder, run_id="compiled", sampler=EveryNStepsSampler(2), compiled=compiled
        )
        observed = _train(model)
        remove_observer(model)
    assert observer.counters.samples == NUM_STEPS // 2
    assert observer.counters.errors == {}
    rows = open_run(folder).history().collect().filter(rank=dist.get_rank(), signal="output", metric="mean")
    executions = dict(rows.select("layer", "execution").unique().iter_rows())
    torch._dynamo.reset()
    return equal(bare, observed), bare_backend.frame_count, backend.frame_count, stance(), executions


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("ddp over compiled", WHOLE),
        ("ddp over in place", WHOLE),
        ("compiled over ddp", WHOLE),
        ("ddp in place", WHOLE),
        ("ddp over blocks", BLOCKS),
        ("sharded blocks in place", BLOCKS),
        ("sharded compiled blocks", BLOCKS),
        ("compiled over sharded", WHOLE),
    ],
)
def test_a_wrapped_and_compiled_model_is_observed(rank_pool, tmp_path: Path, form: str, expected) -> None:
    """At the boundary, or inside where that is forced; bits, graphs and collectives are as without it."""
    for compiled in ("boundary", "force_eager"):
        for same, bare_graphs, graphs, left, executions in rank_pool.run(
            _compare, form, str(tmp_path / compiled), compiled
        ):
            assert same, compiled
            assert graphs == bare_graphs >= 1
            assert left == "default"
            inside = dict.fromkeys((*INSIDE, "head"), "forced_eager")
            assert executions == (inside if compiled == "force_eager" else expected)


def _attach_refused(folder: str) -> list[str]:
    """Returns what each kind of attach that ranks cannot agree on says."""
    said = []
    for sampler, policy in ((EveryNForwardsSampler(2), "all"), (None, "all"), (AlwaysSampler(), "rank0")):
        model = nn.Linear(2, 2)
        try:
            inject_observer(
                model, output_dir=folder, compiled="force_eager", sampler=sampler, rank_policy=policy
            )
        except ConfigurationError as error:
            said.append(str(error))
    return said


def test_ranks_that_might_not_force_the_same_forwards_are_refused(rank_pool, tmp_path: Path) -> None:
    """On all ranks alike, and before anything is written."""
    folder = tmp_path / "refused"
    for said in rank_pool.run(_attach_refused, str(folder)):
        assert len(said) == 3
        assert all("with rank_policy=" in one and "EveryNStepsSampler(n)" in one for one in said)
    assert not folder.exists()
