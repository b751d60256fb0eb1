"""What DDP decides, read in the root forward's pre-hook and compared with what became of the gradients."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from typing_extensions import override

from torchinstruments.ranks.grad_sync import read_grad_sync
from torchinstruments.records import GradSync


def _run(
    attach_inner: bool, compiled: bool, no_sync_forward: bool, no_sync_backward: bool
) -> tuple[GradSync, bool]:
    """Returns what was read, and whether the gradient really is the mean of all ranks."""
    inner = nn.Linear(1, 1, bias=False)
    wrapper = DistributedDataParallel(inner)
    called: nn.Module = wrapper
    if compiled:
        optimized = torch.compile(wrapper, backend="eager")
        assert isinstance(optimized, nn.Module)
        called = optimized
    attached = inner if attach_inner else called
    read: list[GradSync] = []

    def pre_hook(module: nn.Module, _: object) -> None:
        read.append(read_grad_sync(module, torch.is_grad_enabled(), dist.get_world_size()))

    handle = attached.register_forward_pre_hook(pre_hook)
    # Each rank's own gradient is its rank plus one, and 1.5 their mean.
    x = torch.full((1, 1), float(dist.get_rank() + 1))
    with wrapper.no_sync() if no_sync_forward else nullcontext():
        loss = called(x).sum()
    with wrapper.no_sync() if no_sync_backward else nullcontext():
        loss.backward()
    handle.remove()
    assert inner.weight.grad is not None
    is_mean = inner.weight.grad.item() == 1.5
    dist.barrier()
    return read[0], is_mean


def _evaluate() -> tuple[GradSync, GradSync]:
    """Returns what is read in an evaluation forward, and outside any forward."""
    inner = nn.Linear(1, 1)
    wrapper = DistributedDataParallel(inner)
    read: list[GradSync] = []

    def pre_hook(module: nn.Module, _: object) -> None:
        read.append(read_grad_sync(module, torch.is_grad_enabled(), dist.get_world_size()))

    inner.register_forward_pre_hook(pre_hook)
    with torch.no_grad():
        wrapper(torch.ones(1, 1))
    return read[0], read_grad_sync(nn.Linear(1, 1), True, dist.get_world_size())


def _local(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leaves each rank its own gradients."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _hooked() -> dict[str, tuple[list[str], bool]]:
    """Returns what is read under each hook in two forwards, the first without synchronisation.

    Beside it stands whether the gradient of the second is the mean of all ranks.
    """
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
    hooks: dict[str, tuple[object, Any]] = {
        "allreduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "wrapped": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "noop": (None, noop_hook),
        "own": (None, _local),
        "post_local_sgd": (state, post_localSGD_hook),
    }
    found: dict[str, tuple[list[str], bool]] = {}
    for name in ("none", *hooks):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        if name in hooks:
            model.register_comm_hook(*hooks[name])
        read: list[str] = []

        def pre_hook(module: nn.Module, _: object, read: list[str] = read) -> None:
            read.append(read_grad_sync(module, torch.is_grad_enabled(), dist.get_world_size()).value)

        model.register_forward_pre_hook(pre_hook)
        x = torch.full((1, 1), float(dist.get_rank() + 1))
        with model.no_sync():
            model(x).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        gradient = model.module.weight.grad
        found[name] = read, gradient.item() == 1.5
    return found


class _Unused(nn.Module):
    """A layer that is used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(1, 1, bias=False)
        self.unused = nn.Linear(1, 1, bias=False)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 1) -> the same."""
        return self.used(x)


PLACEMENTS = [(forward, backward) for forward in (False, True) for backward in (False, True)]
"""Whether ``no_sync`` is around the forward, and around the backward."""


def _run_modes(options: dict[str, Any]) -> list[tuple[GradSync, bool]]:
    """Three steps of each placement of no_sync under one wrapper: what was read, and whether ranks are equal.

    The wrapper is the same throughout, as in training, since a static graph is learnt in its first step.
    """
    model = _Unused() if options.get("find_unused_parameters") else nn.Linear(1, 1, bias=False)
    wrapper = DistributedDataParallel(model, **options)
    weight = next(model.parameters())
    seen: list[tuple[GradSync, bool]] = []
    read: list[GradSync] = []

    def pre_hook(module: nn.Module, _: object) -> None:
        read.append(read_grad_sync(module, torch.is_grad_enabled(), dist.get_world_size()))

    wrapper.register_forward_pre_hook(pre_hook)
    for around_forward, around_backward in [(False, False), *PLACEMENTS, *PLACEMENTS]:
        weight.grad = None
        with wrapper.no_sync() if around_forward else nullcontext():
            loss = wrapper(torch.full((1, 1), float(dist.get_rank() + 1))).sum()
        with wrapper.no_sync() if around_backward else nullcontext():
            loss.backward()
        assert weight.grad is not None
        gathered = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(gathered, weight.grad)
        seen.append((read[-1], torch.equal(*gathered)))
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ],
)
def test_the_forward_decides_in_all_placements_of_no_sync_and_all_modes(rank_pool, options):
    """SYNCED where gradients are equal on both ranks afterwards, LOCAL where they differ."""
    first, second = rank_pool.run(_run_modes, options)
    assert first == second
    assert first == [
        (GradSync.SYNCED, True),
        *(
            (GradSync.LOCAL, False) if around_forward else (GradSync.SYNCED, True)
            for around_forward, _ in (*PLACEMENTS, *PLACEMENTS)
        ),
    ]


def test_a_plain_step_is_synchronised_whether_wrapper_or_inner_model_is_attached(rank_pool):
    """The inner model finds the wrapper that runs."""
    for attach_inner in (False, True):
        assert rank_pool.run(_run, attach_inner, False, False, False) == [(GradSync.SYNCED, True)] * 2


def test_no_sync_around_the_forward_decides(rank_pool):
    """Though it is over when the backward runs."""
    for attach_inner in (False, True):
        assert rank_pool.run(_run, attach_inner, False, True, False) == [(GradSync.LOCAL, False)] * 2


def test_no_sync_around_the_backward_alone_changes_nothing(rank_pool):
    """DDP decides at the forward, so the flag in the backward would lie."""
    assert rank_pool.run(_run, False, False, False, True) == [(GradSync.SYNCED, True)] * 2


def test_a_compiled_wrapper_is_seen_through(rank_pool):
    """torch.compile(DDP(model)) is one attribute away."""
    assert rank_pool.run(_run, False, True, False, False) == [(GradSync.SYNCED, True)] * 2
    assert rank_pool.run(_run, False, True, True, False) == [(GradSync.LOCAL, False)] * 2


def test_an_evaluation_forward_is_local_and_an_unwrapped_model_unknown(rank_pool):
    """Nothing is reduced without gradients; and nobody knows what a bare model's program does."""
    assert rank_pool.run(_evaluate) == [(GradSync.LOCAL, GradSync.UNKNOWN)] * 2


def test_a_communication_hook_that_is_not_known_to_synchronise_is_unknown(rank_pool):
    """What DDP's own reduction and torch's plain hooks do is known, and they do it."""
    synced, unknown = ["local", "synced"], ["local", "unknown"]
    expected = {
        "none": (synced, True),
        "allreduce": (synced, True),
        "fp16": (synced, True),
        "wrapped": (unknown, True),
        "noop": (unknown, False),
        "own": (unknown, False),
        "post_local_sgd": (unknown, True),
    }
    assert rank_pool.run(_hooked) == [expected] * 2


def _mixed() -> str:
    """Returns what is read under DDP's mixed precision, whose forwards need an accelerator."""
    precision = _MixedPrecision(param_dtype=torch.bfloat16)
    model = DistributedDataParallel(nn.Linear(1, 1), mixed_precision=precision)
    assert model._comm_hooks
    return read_grad_sync(model, True, dist.get_world_size()).value


def test_the_hook_of_mixed_precision_is_known(rank_pool):
    """DDP registers it by itself."""
    assert rank_pool.run(_mixed) == ["synced"] * 2
