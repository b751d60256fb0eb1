"""Whether the gradients of a forward will be synchronised, read where the framework decides it.

`DistributedDataParallel` decides at the last grad-enabled *forward*: ``no_sync`` around the backward alone
changes nothing. So its flag is read in the root forward's pre-hook, never in the backward. ``fully_shard``
and `FullyShardedDataParallel` decide in the *backward*, whatever their flags said in the forward
(`ranks.sharded_sync`). A pipeline's schedule decides by itself, after its last backward (`ranks.pipelining`).
"""

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import TypeIs

from torchinstruments.ranks.comm_hooks import leaves_the_mean
from torchinstruments.records import GradSync

__all__ = ["read_grad_sync"]

# To look a member up takes longer than all else that is done for a model that nothing wraps.
_NOT_DISTRIBUTED = GradSync.NOT_DISTRIBUTED


def read_grad_sync(root_module: torch.nn.Module, grad_enabled: bool, world_size: int) -> GradSync:  # noqa: FBT001
    """Returns whether this forward's gradients will be synchronised (training thread, hot path).

    Args:
        root_module: The attached module: a DDP wrapper, a compiled one, or the model inside.
        grad_enabled: Whether gradients are enabled at the root forward's pre-hook.
        world_size: Ranks in the world.

    Returns:
        `SYNCED` or `LOCAL` under DDP, and `UNKNOWN` in place of `SYNCED` where it has a communication hook
        that is not known to synchronise; `NOT_DISTRIBUTED` where nothing wraps the model and it is alone;
        else `UNKNOWN`.
    """
    wrapper = _ddp_of(root_module)
    if wrapper is not None:
        if not grad_enabled or not wrapper.require_backward_grad_sync:
            return GradSync.LOCAL
        return GradSync.SYNCED if leaves_the_mean(wrapper) else GradSync.UNKNOWN
    return _NOT_DISTRIBUTED if world_size == 1 else GradSync.UNKNOWN


def _ddp_of(root_module: torch.nn.Module) -> DistributedDataParallel | None:
    if DistributedDataParallel in type(root_module).__mro__ and _is_ddp(root_module):
        return root_module
    # torch.compile(DDP(model)) keeps the wrapper as its part.
    inner = root_module._modules.get("_orig_mod")  # noqa: SLF001 - getattr takes a microsecond to find nothing
    if inner is not None and _is_ddp(inner):
        return inner
    # Set during the wrapper's forward alone, so it is the wrapper of the model inside.
    active = DistributedDataParallel._active_ddp_module  # noqa: SLF001 - its method is for what is compiled
    return active if active is not None and _is_ddp(active) else None


def _is_ddp(module: object) -> TypeIs[DistributedDataParallel]:
    # It is an abstract base class to Python, of which isinstance asks slowly.
    return DistributedDataParallel in type(module).__mro__
