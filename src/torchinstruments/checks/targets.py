"""What a session is made for: a model, or a mapping of tensors, and optimizers; checked."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from torchinstruments.errors import ConfigurationError
from torchinstruments.ranks.optimizers import unwrapped

__all__ = ["checked_model", "holder_of", "optimizers_of"]


def checked_model(model: object) -> nn.Module | Mapping[str, torch.Tensor]:
    """Returns what can be watched.

    Raises:
        ConfigurationError: It is no module, and no mapping from names to tensors.
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping) and all(isinstance(tensor, torch.Tensor) for tensor in model.values()):
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
            f"optimizer={optimizer!r} is no torch.optim.Optimizer; give one, or a list of them, or leave it "
            f"out to watch every optimizer of the model"
        )
    return tuple(chosen)


def holder_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Returns a module that has the tensors of a mapping, to be asked whether an optimizer has one."""
    holder = nn.Module()
    for name, tensor in tensors.items():
        holder._parameters[name] = tensor  # type: ignore[assignment]  # noqa: SLF001 - may be no Parameter
    return holder
