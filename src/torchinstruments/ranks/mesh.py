"""Where this rank lies in the device mesh of a sharded model."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MeshPlace", "mesh_place"]


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """A place in a device mesh.

    Attributes:
        coordinates: Of this rank; empty where there is no mesh, or the rank is not in it.
        axis_names: In the order of the coordinates; an axis without a name has its number.
    """

    coordinates: tuple[int, ...] = ()
    axis_names: tuple[str, ...] = ()


def mesh_place(model: nn.Module) -> MeshPlace:
    """Returns where this rank lies in the largest mesh that the model is spread over (training thread).

    It is for the manifest, at attach. Meshes are those of parameters that are a `DTensor`, and those that
    ``fully_shard`` and `FullyShardedDataParallel` were given. Of two that are as large, that with more axes
    counts, and of those the first one.
    """
    meshes = {id(mesh): mesh for mesh in _meshes(model)}.values()
    mesh = max(meshes, key=lambda one: (one.size(), one.ndim), default=None)
    coordinates = None if mesh is None else mesh.get_coordinate()
    if mesh is None or coordinates is None:
        return MeshPlace()
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return MeshPlace(tuple(map(int, coordinates)), tuple(names))


def _meshes(model: nn.Module) -> "Iterator[DeviceMesh]":
    kind = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    if kind is None:
        return
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if isinstance(mesh, kind):
            yield mesh
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if wrapper is None:
        return
    for module in model.modules():
        mesh = getattr(module, "_device_mesh", None) if isinstance(module, wrapper) else None
        if isinstance(mesh, kind):
            yield mesh
