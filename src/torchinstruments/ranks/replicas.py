"""Which tensors other ranks have to hold with equal bytes, and which ranks those are.

A key is given only where that can be proved from what the framework itself does: where
`DistributedDataParallel` averages a parameter's gradients on a process group, and where a `DTensor` is
replicated along an axis of its mesh. It names the ranks, and what the part is that they share. Whatever else
might be equal, such as buffers, flat shards of FSDP1, frozen parameters or the experts and stages that a
program spreads by itself, has no key: stored, and never judged.

Replicas of a key do differ where a step was applied to gradients that were not synchronised. That is what
fingerprints are to show.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchinstruments.ranks.comm_hooks import leaves_the_mean

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

__all__ = ["ReplicaKeys", "key_of_layout"]

_MAX_KEYS = 256
_keys: dict[object, str] = {}


class ReplicaKeys:
    """The keys of one model's parameters at one moment (training thread, hot path).

    Args:
        modules: Of the attached model, each once; a `DistributedDataParallel` whose forward runs around it
            counts too.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._of_parameter: dict[int, str] = {}
        self._dtensor: type | None = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        active = DistributedDataParallel._get_active_ddp_module()  # noqa: SLF001 - set in its forward alone
        found: list[DistributedDataParallel] = []
        # Their classes are few, and to ask each module takes as long as to find its tensors.
        if any(issubclass(kind, DistributedDataParallel) for kind in {*map(type, modules)}):
            found = [module for module in modules if isinstance(module, DistributedDataParallel)]
        if isinstance(active, DistributedDataParallel) and active not in found:
            found.append(active)
        for wrapper in found:
            self._add(wrapper)

    def of(self, parameter: torch.Tensor) -> str:
        """Returns the key of a parameter, ``""`` where no other rank is known to hold the same."""
        known = self._of_parameter.get(id(parameter), "")
        if type(parameter) is nn.Parameter:
            return known if known and parameter.requires_grad else ""
        is_spread = self._dtensor is not None and isinstance(parameter, self._dtensor)
        if not (known or is_spread) or not isinstance(parameter, nn.Parameter):
            return ""
        if is_spread:
            return self._of_dtensor(parameter)
        return known if parameter.requires_grad else ""

    def _add(self, wrapper: DistributedDataParallel) -> None:
        """Takes the parameters that a wrapper synchronises."""
        key = _key_of_ddp(wrapper)
        for parameter in wrapper._module_parameters:  # noqa: SLF001 - what it manages, ignored ones left out
            known = self._of_parameter.get(id(parameter), key)
            self._of_parameter[id(parameter)] = key if known == key else ""

    def _of_dtensor(self, tensor: torch.Tensor) -> str:
        mesh, placements = tensor.device_mesh, tensor.placements  # pyrefly: ignore[missing-attribute]
        return key_of_layout(mesh, tuple(placements))


def _key_of_ddp(wrapper: DistributedDataParallel) -> str:
    """Returns the key of what a wrapper synchronises, or ``""``."""
    if wrapper.mixed_precision is not None:
        return ""  # between a forward and its backward a parameter may be its copy of less precision
    if not leaves_the_mean(wrapper):
        return ""
    return f"ddp ranks={_ranks_text(dist.get_process_group_ranks(wrapper.process_group))}"


def key_of_layout(mesh: "DeviceMesh", placements: tuple["Placement", ...]) -> str:
    """Returns the key of the part that a layout gives to this rank, or ``""`` (training thread, hot path).

    It is ``mesh``, each axis with its placement and, where that is not replicated, which part of how many
    this rank has, and the ranks that have the same: ``mesh dp=R tp=S(0)@1/4 ranks=1,5``.
    """
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return ""
    place = (mesh, placements, tuple(coordinates))
    key = _keys.get(place)
    if key is None:
        key = _key_of_place(*place)
        if len(_keys) >= _MAX_KEYS:
            _keys.clear()
        _keys[place] = key
    return key


def _key_of_place(
    mesh: "DeviceMesh", placements: tuple["Placement", ...], coordinates: tuple[int, ...]
) -> str:
    names = mesh.mesh_dim_names or (*map(str, range(mesh.ndim)),)
    axes: list[str] = []
    ranks = mesh.mesh
    # From the last axis, so that those before it keep their places.
    for axis in reversed(range(mesh.ndim)):
        if placements[axis].is_replicate():
            axes.append(f"{names[axis]}={placements[axis]}")
        else:
            axes.append(f"{names[axis]}={placements[axis]}@{coordinates[axis]}/{mesh.size(axis)}")
            ranks = ranks.select(axis, coordinates[axis])
    return f"mesh {' '.join(reversed(axes))} ranks={_ranks_text(ranks.reshape(-1).tolist())}"


def _ranks_text(ranks: Iterable[int]) -> str:
    """Returns ranks as text, ``0-3``, ``0-12:4`` for every fourth one, else ``0,1,5``."""
    ordered = sorted(ranks)
    step = ordered[1] - ordered[0] if len(ordered) > 1 else 1
    last = ordered[-1]
    if len(ordered) > 2 and ordered == list(range(ordered[0], last + 1, step)):
        return f"{ordered[0]}-{last}" if step == 1 else f"{ordered[0]}-{last}:{step}"
    return ",".join(map(str, ordered))
