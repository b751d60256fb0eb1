"""What `FullyShardedDataParallel` has put into flat parameters, by the modules that it took it from.

It flattens the parameters of a module and all below it into one, and gives each rank a part of that. With
``use_orig_params=True`` the modules keep their parameters, each of them a piece of the part that may be
empty; without it they have none, and the flat parameter stands in the module that was wrapped. Neither tells
how many entries a layer has. The wrapper's handle does, which has no public name.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["FlatPart", "flat_parts", "is_flattened", "modules_of_unknown_size", "whole_parameters"]


_FLAT_NAME = "_flat_param"


@dataclass(frozen=True, slots=True)
class FlatPart:
    """One parameter of one module that was put into a flat one.

    Attributes:
        name: In its module.
        num_entries: Of the whole parameter, over all ranks.
        requires_grad: Whether it is trained.
        is_registered: Whether its module still has a parameter of that name, its piece.
    """

    name: str
    num_entries: int
    requires_grad: bool
    is_registered: bool


def flat_parts(root: nn.Module) -> Mapping[int, tuple[FlatPart, ...]]:
    """Returns by the ids of modules what of their own was flattened (training thread, at sampled forwards).

    Args:
        root: Looked at with all that is in it; a wrapper around it is not found.
    """
    found: dict[int, list[FlatPart]] = {}
    for handle in _handles(root):
        flat = getattr(handle, "flat_param", None)
        is_registered = bool(getattr(handle, "_use_orig_params", False))
        infos = tuple(getattr(flat, "_param_infos", ()))
        sizes = {}
        kept = getattr(flat, "_params", None) or (flat,) * len(infos)
        for info, shape, parameter in zip(infos, getattr(flat, "_shapes", ()), kept, strict=False):
            is_trained = bool(getattr(parameter, "requires_grad", True))
            part = FlatPart(info.param_name, shape.numel(), is_trained, is_registered)
            sizes[id(info.module), info.param_name] = part
            found.setdefault(id(info.module), []).append(part)
        for info in getattr(flat, "_shared_param_infos", ()):
            first = sizes.get((id(info.prim_module), info.prim_param_name))
            if first is not None:
                part = FlatPart(info.param_name, first.num_entries, first.requires_grad, is_registered)
                found.setdefault(id(info.module), []).append(part)
    return {module: tuple(parts) for module, parts in found.items()}


def whole_parameters(root: nn.Module) -> frozenset[int]:
    """Returns the ids of flattened parameters that every rank holds whole (training thread, hot path).

    That is so with ``ShardingStrategy.NO_SHARD``, and in a group of one rank.
    """
    found: set[int] = set()
    for handle in _handles(root):
        if getattr(handle, "uses_sharded_strategy", True):
            continue
        found.update(_ids_of(getattr(handle, "flat_param", None)))
    return frozenset(found)


def modules_of_unknown_size(root: nn.Module) -> frozenset[int]:
    """Returns the ids of modules whose parameters a wrapper around `root` has flattened (at attach)."""
    known: set[int] = set()
    for handle in _handles(root):
        known.update(_ids_of(getattr(handle, "flat_param", None)))
    unknown: set[int] = set()
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_flattened(parameter) and id(parameter) not in known:
                # A flat parameter may have been made of whatever is below it.
                below = module.modules() if name == _FLAT_NAME else (module,)
                unknown.update(map(id, below))
    return frozenset(unknown)


def is_flattened(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter is a flat one, or a piece of one."""
    return getattr(parameter, "_fsdp_flattened", False) is True


def _ids_of(flat: object) -> Iterator[int]:
    """Yields the ids of a flat parameter and of the pieces of it that modules keep."""
    yield id(flat)
    for kept in ("_params", "_shared_params"):
        yield from map(id, getattr(flat, kept, None) or ())


def _handles(root: nn.Module) -> Iterator[object]:
    """Yields what the wrappers in a model keep of their flat parameters."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if wrapper is None:
        return
    for module in root.modules():
        if isinstance(module, wrapper):
            handle = getattr(module, "_handle", None)
            if handle is not None:
                yield handle
