"""A rank's place in the meshes of a model, in a process group that sends nothing."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchinstruments.ranks.mesh import MeshPlace, mesh_place


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 5 of 8."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def test_a_plain_model_lies_in_no_mesh() -> None:
    """Also where DTensor was imported, as here."""
    assert mesh_place(nn.Linear(1, 1)) == MeshPlace((), ())


@pytest.mark.usefixtures("world")
def test_the_largest_mesh_counts() -> None:
    """A norm may lie in a mesh of fewer axes than the layers beside it."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    norm, layer = nn.LayerNorm(8), nn.Linear(8, 8)
    model = nn.Sequential(norm, layer)
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh["dp"], [Replicate()]))
    assert mesh_place(model) == MeshPlace((1,), ("dp",))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Shard(0)]))
    assert mesh_place(model) == MeshPlace((1, 1), ("dp", "tp"))


@pytest.mark.usefixtures("world")
def test_axes_without_names_have_their_numbers() -> None:
    """In the order of the coordinates."""
    mesh = init_device_mesh("cpu", (4, 2))
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)]))
    assert mesh_place(model) == MeshPlace((2, 1), ("0", "1"))
