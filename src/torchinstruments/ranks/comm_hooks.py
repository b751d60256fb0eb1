"""Whether what `DistributedDataParallel` was given in place of its own reduction reduces gradients too.

A communication hook may do anything: that of post-local SGD leaves each rank, or a few of them, their own
gradients. So only those count that are known to leave the mean of all ranks on each.
"""

import sys

from torch.nn.parallel import DistributedDataParallel

__all__ = ["leaves_the_mean"]

_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"
_KNOWN = (
    ("default_hooks", "allreduce_hook"),
    ("default_hooks", "bf16_compress_hook"),
    ("default_hooks", "fp16_compress_hook"),
    # Registered by DDP itself, with mixed precision.
    ("mixed_precision_hooks", "_reducer_allreduce_and_upcast_hook"),
)


def leaves_the_mean(wrapper: DistributedDataParallel) -> bool:
    """Returns whether a synchronised backward provably leaves one gradient on all ranks (hot path).

    Args:
        wrapper: With its own reduction, or communication hooks.
    """
    hooks = wrapper._comm_hooks  # noqa: SLF001 - has no public name
    if not hooks:
        return True
    known = [getattr(sys.modules.get(f"{_PACKAGE}.{module}"), name, None) for module, name in _KNOWN]
    return all(any(hook is one for one in known) for hook, _ in hooks)
