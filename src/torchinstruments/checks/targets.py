"""What a session is made for: a model, or a mapping of tensors, and optimizers; checked."""

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.registration import shown
from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.sharding import ManagedParameters
from torchinstruments.ranks.optimizers import unwrapped

__all__ = ["checked_model", "holder_of", "optimizers_of", "refuse_strangers"]


def checked_model(model: object) -> nn.Module | Mapping[str, torch.Tensor]:
    """Returns what can be watched.

    Raises:
        ConfigurationError: It is no module, and no mapping from names to tensors.
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping) and all(isinstance(tensor, torch.Tensor) for tensor in model.values()):
        for key in model:
            if not isinstance(key, str):
                raise ConfigurationError(f"model has the key {shown(key)}, which is no name; give texts")
        return model
    raise ConfigurationError(
        f"model={type(model).__name__} cannot be watched; give a torch.nn.Module, or a mapping from names to "
        f"tensors"
    )


def optimizers_of(optimizer: object) -> tuple[Optimizer, ...] | None:
    """Returns the optimizers that are looked at; None for every one of the model.

    Raises:
        ConfigurationError: One is none.
    """
    if optimizer is None:
        return None
    given = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    found = [unwrapped(one) for one in given]
    chosen = [one for one in found if one is not None]
    if not found or len(chosen) < len(found):
        raise ConfigurationError(
            f"optimizer={_shown(optimizer)} is no torch.optim.Optimizer; give one, a list of them, or leave "
            f"it out to watch every optimizer of the model"
        )
    return tuple(chosen)


def refuse_strangers(optimizers: Sequence[Optimizer] | None, inventory: Inventory, model: nn.Module) -> None:
    """Refuses optimizers that have parameters and none of the model's: their steps say nothing of it.

    Args:
        optimizers: As they were given; None for every one of the model.
        inventory: What the model has now.
        model: The model. While a sharded one has its parameters gathered, it does not show its optimizer's.

    Raises:
        ConfigurationError: There is one.
    """
    for optimizer in optimizers or ():
        own = [tensor for group in optimizer.param_groups for tensor in group.get("params", ())]
        if not own or any(inventory.index_of(tensor) is not None for tensor in own):
            continue
        if _is_flattened(model) or not ManagedParameters.of(model).sharded.isdisjoint(map(id, own)):
            continue
        raise ConfigurationError(
            f"optimizer={type(optimizer).__name__} has no parameter of the model, so that its steps say "
            f"nothing of it; give the optimizer that steps this model, made after everything that replaces "
            f"parameters, or leave it out to watch every optimizer of the model"
        )


def holder_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Returns a module that has the tensors of a mapping, to be asked whether an optimizer has one."""
    holder = nn.Module()
    for name, tensor in tensors.items():
        holder._parameters[name] = tensor  # type: ignore[assignment]  # noqa: SLF001 - may be no Parameter
    return holder


def _is_flattened(model: nn.Module) -> bool:
    """Returns whether `FullyShardedDataParallel` exchanges parameters of the model as it runs."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return wrapper is not None and any(isinstance(module, wrapper) for module in model.modules())


def _shown(given: object) -> str:
    """Returns what was given, without the many lines that an optimizer prints."""
    if isinstance(given, (list, tuple)):
        return f"[{', '.join(_shown(one) for one in given)}]"
    return type(given).__name__ if isinstance(given, Optimizer) else shown(given)
