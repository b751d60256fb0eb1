"""What is spread over ranks in a model: its parameters, and so what its layers put out.

``fully_shard`` and `FullyShardedDataParallel` spread parameters alone. They gather them for each forward, so
that what a layer puts out is whole. Tensor parallelism spreads the work: a layer may put out a plain tensor
that is this rank's part of a larger one, and nothing of that tensor tells whether it is.

All of it is read where torch keeps it; a program that never imported sharding has none.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchinstruments.observe.flat_parameters import is_flattened, whole_parameters
from torchinstruments.records import Scope

__all__ = ["NOT_SHARDED", "ManagedParameters", "PlainScopes", "Sharding", "parts_at_rest"]


@dataclass(frozen=True, slots=True)
class ManagedParameters:
    """What wrappers do with the parameters of a model, at the start of a sampled forward.

    Attributes:
        sharded: Ids of those that ``fully_shard`` has spread.
        left_out: Ids of those whose gradients nobody reduces though there is a wrapper.
        at_rest: Of a parameter that is gathered at the moment, by its id, the part that the optimizer knows.
            A root is not sharded again after its forward, but in the backward.
        whole: Ids of those that `FullyShardedDataParallel` has flattened and left whole on every rank.
    """

    sharded: frozenset[int] = frozenset()
    left_out: frozenset[int] = frozenset()
    at_rest: Mapping[int, torch.Tensor] | None = None
    whole: frozenset[int] = frozenset()

    @classmethod
    def of(cls, root: nn.Module) -> "ManagedParameters":
        """Returns it for the attached model (training thread, hot path of sampled forwards).

        Args:
            root: Where it is inside a `DistributedDataParallel`, in a forward of that.
        """
        sharded: set[int] = set()
        at_rest: dict[int, torch.Tensor] = {}
        has_shards = False
        for group in _groups(root):
            has_shards = True
            for part, gathered in _parts(group):
                sharded.add(id(part))
                if gathered is not None:
                    at_rest[id(gathered)] = part
        left_out = set(_left_out_by_ddp(root))
        wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
        if has_shards or (wrapper and any(isinstance(module, wrapper) for module in root.modules())):
            left_out.update(
                id(parameter)
                for parameter in root.parameters()
                if id(parameter) not in sharded
                and id(parameter) not in at_rest
                and not is_flattened(parameter)
            )
        return cls(frozenset(sharded), frozenset(left_out), at_rest, whole_parameters(root))

    def own_parameters(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and parameter of what is registered in a module itself, as the optimizer knows it."""
        at_rest = self.at_rest or {}
        for name, parameter in module.named_parameters(recurse=False):
            yield name, at_rest.get(id(parameter), parameter)

    def is_piece(self, parameter: torch.Tensor) -> bool:
        """Returns whether a plain parameter is this rank's part of what was flattened (hot path)."""
        return is_flattened(parameter) and id(parameter) not in self.whole


class PlainScopes:
    """What a plain tensor covers that a layer of a model puts out (training thread, hot path of samples).

    Args:
        root: The attached model, before its forward; None for one that is not spread.
    """

    __slots__ = ("_spread",)

    def __init__(self, root: nn.Module | None = None) -> None:
        self._spread: frozenset[int] = frozenset()
        if root is None:
            return
        kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        if kind is None:
            return
        axes_of_shards = {id(part): axes for group in _groups(root) for part, axes in _parts_with_axes(group)}
        modules = list(root.modules())
        spread = {id(module) for module in modules if _is_spread(module, kind, axes_of_shards)}
        # A module that has one inside may put out what that did.
        is_growing = bool(spread)
        while is_growing:
            above = {
                id(module)
                for module in modules
                if id(module) not in spread and any(id(child) in spread for child in module.children())
            }
            spread |= above
            is_growing = bool(above)
        self._spread = frozenset(spread)

    def of(self, module: nn.Module) -> Scope:
        """Returns what a plain tensor covers that a module puts out.

        Beside layers that tensor parallelism has spread, a plain tensor may be whole or a part, as the one
        that it was made of.
        """
        if not self._spread:
            return Scope.LOCAL
        return Scope.LOCAL_OF_DTENSOR if id(module) in self._spread else Scope.UNKNOWN


@dataclass(frozen=True, slots=True)
class Sharding:
    """What of a model is spread over ranks, at the start of a sampled forward.

    Attributes:
        managed: What wrappers do with its parameters.
        scopes: What a plain tensor covers that a layer puts out.
    """

    managed: ManagedParameters
    scopes: PlainScopes

    @classmethod
    def of(cls, root: nn.Module, *, with_parameters: bool) -> "Sharding":
        """Returns it for the attached model (training thread, hot path of sampled forwards).

        Args:
            root: The model, before its forward.
            with_parameters: Whether anybody asks for its parameters.
        """
        return cls(ManagedParameters.of(root) if with_parameters else ManagedParameters(), PlainScopes(root))


NOT_SHARDED = Sharding(ManagedParameters(), PlainScopes())
"""Of a model that is not spread at all."""


def _groups(root: nn.Module) -> Iterator[object]:
    """Yields the groups of parameters that ``fully_shard`` has made in a model."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    seen: set[int] = set()
    for module in root.modules():
        if isinstance(module, kind):
            get_state = getattr(module, "_get_fsdp_state", None)
            state = get_state() if callable(get_state) else None
            for group in getattr(state, "_fsdp_param_groups", ()):
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group


def parts_at_rest(root: nn.Module) -> dict[int, torch.Tensor]:
    """Returns `ManagedParameters.at_rest` alone (training thread, hot path of sampled forwards)."""
    return {
        id(gathered): part
        for group in _groups(root)
        for part, gathered in _parts(group)
        if gathered is not None
    }


def _parts(group: object) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yields a group's parts of parameters, each with what it is gathered into, if that is there."""
    for managed in getattr(group, "fsdp_params", ()):
        part = getattr(managed, "sharded_param", None)
        gathered = getattr(managed, "_unsharded_param", None)
        if isinstance(part, torch.Tensor):
            yield part, gathered if isinstance(gathered, torch.Tensor) else None


def _parts_with_axes(group: object) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields a group's parts of parameters, and over how many axes of a mesh it has spread them."""
    mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
    for managed in getattr(group, "fsdp_params", ()):
        yield managed.sharded_param, getattr(mesh, "ndim", 0)


def _is_spread(module: nn.Module, dtensor: type, axes_of_shards: Mapping[int, int]) -> bool:
    """Returns whether tensor parallelism was applied to a module itself."""
    if getattr(module, "_distribute_module_applied", False):
        return True
    return any(
        isinstance(parameter, dtensor)
        and len(getattr(parameter, "placements", ())) > axes_of_shards.get(id(parameter), 0)
        for parameter in module.parameters(recurse=False)
    )


def _left_out_by_ddp(root: nn.Module) -> Iterator[int]:
    """Yields the ids of the parameters that `DistributedDataParallel` was told to leave alone."""
    # Set during the wrapper's forward alone.
    around = DistributedDataParallel._get_active_ddp_module()  # noqa: SLF001 - has no public name
    for wrapper in (*root.modules(), around):
        if isinstance(wrapper, DistributedDataParallel) and wrapper.parameters_to_ignore:
            for name, parameter in wrapper.module.named_parameters():
                if name in wrapper.parameters_to_ignore:
                    yield id(parameter)
