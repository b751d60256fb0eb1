"""Small models and loops that the tests of checks train."""

from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

__all__ = ["INF", "Secretive", "batch", "compiled", "mlp", "poisoned", "scaler", "train"]

INF = float("inf")


class Secretive(torch.Tensor):
    """A tensor whose class answers no question."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Refuses everything."""
        raise ValueError("mine")


def mlp(width: int = 4, depth: int = 2) -> Any:
    """Returns a small network of linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


def compiled(model: nn.Module) -> Any:
    """Returns a model as ``torch.compile`` wraps it, without a compiler behind it."""
    return torch.compile(model, backend="eager")


def batch(width: int = 4) -> torch.Tensor:
    """Returns two rows of ones."""
    return torch.ones(2, width)


def scaler(init_scale: float = 1024.0, **options: Any) -> GradScaler:
    """Returns a gradient scaler of the CPU."""
    return GradScaler("cpu", init_scale=init_scale, **options)


def poisoned(parameter: Any, value: float = INF) -> None:
    """Puts a nonfinite number into a gradient."""
    parameter.grad.view(-1)[0] = value


def train(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    steps: int = 3,
    micro_batches: int = 1,
    grad_scaler: GradScaler | None = None,
    overflows: tuple[int, ...] = (),
) -> Optimizer:
    """Trains for some steps; those in ``overflows`` have an infinite loss.

    Returns:
        The optimizer.
    """
    optimizer = SGD(model.parameters(), lr=0.01) if optimizer is None else optimizer
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            loss = model(batch()).square().mean()
            if step in overflows:
                loss = loss * INF
            (loss if grad_scaler is None else grad_scaler.scale(loss)).backward()
        if grad_scaler is None:
            optimizer.step()
        else:
            grad_scaler.step(optimizer)
            grad_scaler.update()
    return optimizer
