"""What of a model is spread over ranks, in a process group that sends nothing."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchinstruments.observe.sharding import ManagedParameters, PlainScopes
from torchinstruments.records import Scope


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 0 of 4."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_nothing_is_spread_in_a_plain_model() -> None:
    """Its parameters are the optimizer's, and its tensors whole."""
    model = nn.Sequential(nn.Linear(1, 1))
    managed = ManagedParameters.of(model)
    assert (managed.sharded, managed.left_out) == (frozenset(), frozenset())
    assert dict(managed.own_parameters(model[0])) == dict(model[0].named_parameters())
    assert PlainScopes(model).of(model[0]) is Scope.LOCAL


@pytest.mark.usefixtures("world")
def test_sharded_parameters_alone_leave_tensors_whole() -> None:
    """What is beside them is left out of the reduction."""
    inner, outer = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(inner, outer)
    fully_shard(inner)
    managed = ManagedParameters.of(model)
    assert managed.sharded == {id(parameter) for parameter in inner.parameters()}
    assert managed.left_out == {id(parameter) for parameter in outer.parameters()}
    assert PlainScopes(model).of(inner) is Scope.LOCAL


@pytest.mark.usefixtures("world")
def test_a_gathered_parameter_leads_to_its_part() -> None:
    """A root is not sharded again behind its forward."""
    model = nn.Linear(4, 4)
    fully_shard(model)
    parts = dict(model.named_parameters())
    with torch.no_grad():
        model(torch.ones(1, 4))
    gathered = dict(model.named_parameters())
    assert gathered["weight"] is not parts["weight"]
    own = dict(ManagedParameters.of(model).own_parameters(model))
    assert all(own[name] is part for name, part in parts.items())


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("is_sharded_too", [False, True])
def test_spread_layers_and_what_is_around_them_put_out_parts(is_sharded_too: bool) -> None:
    """Beside them nothing is known, also where parameters are sharded on top."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    spread, beside, alone = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
    block = nn.Sequential(spread, beside)
    model = nn.Sequential(block, alone)
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel()})
    if is_sharded_too:
        fully_shard(model, mesh=mesh["dp"])
    scopes = PlainScopes(model)
    assert [scopes.of(module) for module in (spread, block, model)] == [Scope.LOCAL_OF_DTENSOR] * 3
    assert [scopes.of(module) for module in (beside, alone)] == [Scope.UNKNOWN] * 2


@pytest.mark.usefixtures("world")
def test_parameters_that_the_program_spread_itself_are_seen() -> None:
    """Without a plan of torch's."""
    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (4,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    assert PlainScopes(model).of(model) is Scope.LOCAL_OF_DTENSOR
