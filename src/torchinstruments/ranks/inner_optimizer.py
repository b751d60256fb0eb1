"""Finds the optimizer inside an object that a program steps in its place.

Accelerate's ``AcceleratedOptimizer`` is an `Optimizer` that never ran its base class's ``__init__``; others
are no `Optimizer` at all. What torch tells of is the step of the one inside.
"""

from itertools import islice

from torch.optim import Optimizer

__all__ = ["inner_optimizer", "is_hooked"]

_NAMES = ("optimizer", "_optimizer", "optim", "_optim", "base_optimizer")
_MAX_DEPTH = 8
_MAX_ATTRIBUTES = 256


def is_hooked(optimizer: object) -> bool:
    """Returns whether torch calls its step hooks for this optimizer (training thread, hot path)."""
    return bool(getattr(getattr(type(optimizer), "step", None), "hooked", False))


def inner_optimizer(optimizer: object) -> object:
    """Returns the first optimizer with hooks inside an object, the object itself first (hot path).

    Only attributes of instances are looked at, so that no code of the program runs: those under a usual name,
    and an `Optimizer` under any name where it is the only one.

    Args:
        optimizer: What a program steps. Where nothing with hooks is inside, it is returned itself.
    """
    found = optimizer
    for _ in range(_MAX_DEPTH):
        if _is_optimizer(found) and is_hooked(found):
            return found
        found = _held(getattr(found, "__dict__", {}))
        if found is None:
            return optimizer
    return optimizer


def _held(attributes: dict[str, object]) -> object:
    """Returns what an object with these attributes wraps, or None."""
    named = [attributes[name] for name in _NAMES if attributes.get(name) is not None]
    optimizers = [one for one in named if _is_optimizer(one)]
    if optimizers:
        return optimizers[0]
    some = islice(attributes.values(), _MAX_ATTRIBUTES)
    optimizers = list({id(one): one for one in some if _is_optimizer(one)}.values())
    if len(optimizers) == 1:
        return optimizers[0]
    return named[0] if named and not optimizers else None


def _is_optimizer(value: object) -> bool:
    # isinstance would ask the value for its class.
    return issubclass(type(value), Optimizer)
