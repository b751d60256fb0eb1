"""Which gradients `DistributedDataParallel` reduces, and where it does so in place.

It reduces buckets while the backward goes on. By default a gradient stays this rank's until the end of the
backward; where gradients are views of the buckets, they are written by other threads from the moment on at
which they came.
"""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchinstruments.checks.inventory import Inventory

__all__ = ["reduced_by_ddp", "reduced_in_place"]


def reduced_by_ddp(model: nn.Module, inventory: Inventory) -> frozenset[int]:
    """Returns the positions of parameters that a wrapper in the model reduces."""
    return _parameters_of(_wrappers(model), inventory)


def reduced_in_place(model: nn.Module, inventory: Inventory) -> frozenset[int]:
    """Returns the positions of parameters whose gradients are views of buckets."""
    return _parameters_of([one for one in _wrappers(model) if one.gradient_as_bucket_view], inventory)


def _wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _parameters_of(wrappers: list[DistributedDataParallel], inventory: Inventory) -> frozenset[int]:
    found = (inventory.index_of(tensor) for wrapper in wrappers for tensor in wrapper.parameters())
    return frozenset([index for index in found if index is not None])
