"""Finds the optimizer inside an object that a program steps in its place.

Accelerate's ``AcceleratedOptimizer`` is an `Optimizer` that never ran its base class's ``__init__``; others
are no `Optimizer` at all. What torch tells of is the step of the one inside.
"""

from torch.optim import Optimizer

__all__ = ["inner_optimizer", "is_hooked"]

_NAMES = ("optimizer", "_optimizer", "optim", "_optim", "base_optimizer")
_MAX_DEPTH = 8


def is_hooked(optimizer: object) -> bool:
    """Returns whether torch calls its step hooks for this optimizer (training thread, hot path)."""
    return bool(getattr(getattr(type(optimizer), "step", None), "hooked", False))


def inner_optimizer(optimizer: object) -> object:
    """Returns the first optimizer with hooks inside an object, the object itself first (hot path).

    Only attributes of instances are looked at, so that no code of the program runs.

    Args:
        optimizer: What a program steps. Where nothing with hooks is inside, it is returned itself.
    """
    found = optimizer
    for _ in range(_MAX_DEPTH):
        if isinstance(found, Optimizer) and is_hooked(found):
            return found
        attributes = getattr(found, "__dict__", {})
        found = next((attributes[name] for name in _NAMES if attributes.get(name) is not None), None)
        if found is None:
            return optimizer
    return optimizer
