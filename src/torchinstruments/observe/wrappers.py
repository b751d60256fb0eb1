"""Modules that only wrap another module, known by their type.

A wrapper puts a segment into the names of everything below it (``module.``, ``_orig_mod.``). Series would
then depend on where a run wraps its model, so these segments are left out of names. What is a wrapper is
decided by its class, never by the text of a name: a model of the user's may well have a child ``module``.

Classes of parts of torch that the program has not imported are not imported here either: where the class was
never loaded, no instance of it exists.
"""

import sys
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchinstruments.observe.slots import is_slot_free

__all__ = [
    "child_of_kind",
    "core_of",
    "is_compiled_in_place",
    "is_compiled_wrapper",
    "is_forward_compiled",
    "wrapped_child",
]

_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


# None is kept alive: a class that is made in a function may hold tensors.
_CHILDREN: WeakKeyDictionary[type[nn.Module], str | None] = WeakKeyDictionary()


def wrapped_child(module: nn.Module) -> str | None:
    """Returns the name of the child that the module merely wraps, or None where it is no wrapper."""
    child = child_of_kind(type(module))
    if child is None or not isinstance(module._modules.get(child), nn.Module):  # noqa: SLF001 - children by name
        return None
    return child


def child_of_kind(kind: type[nn.Module]) -> str | None:
    """Returns the name of the child that modules of a class wrap, or None where they are no wrappers."""
    child = _CHILDREN.get(kind, "")
    if child == "":
        child = _CHILDREN[kind] = _found_child(kind)
    return child


def _found_child(kind: type[nn.Module]) -> str | None:
    """Looks for a class among those of wrappers."""
    for home, class_name, child in _WRAPPERS:
        wrapper = getattr(sys.modules.get(home), class_name, None)
        if isinstance(wrapper, type) and issubclass(kind, wrapper):
            return child
    return None


def core_of(module: nn.Module) -> nn.Module:
    """Returns the module inside all wrappers: the same for a model and for its DDP or compiled form."""
    seen: set[int] = set()
    while id(module) not in seen:
        seen.add(id(module))
        name = wrapped_child(module)
        inner = None if name is None else module._modules.get(name)  # noqa: SLF001 - children by name
        if inner is None:
            break
        module = inner
    return module


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Returns whether ``torch.compile(module)`` made this: its own hooks run outside the compiled code."""
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return isinstance(wrapper, type) and isinstance(module, wrapper)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Returns whether ``module.compile()`` was called: its own hooks are part of the compiled code."""
    return not isinstance(module, torch.jit.ScriptModule) and not is_slot_free(module)


def is_forward_compiled(module: nn.Module) -> bool:
    """Returns whether a module's ``forward`` is a compiled function: its own hooks run outside of that."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    forward = vars(module).get("forward") or getattr(type(module), "forward", None)
    return (
        getattr(forward, "_torchdynamo_orig_callable", None) is not None
        and not getattr(forward, "_torchdynamo_disable", False)  # torch.compiler.disable leaves both
    )
