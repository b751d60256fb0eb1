"""The guard against collectives, with modules that pretend to be this package's."""

import types
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.loss_scale import ScalerWatch
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.testing.collectives import CollectiveForbiddenError, no_collectives


@pytest.fixture(autouse=True)
def group():
    """A world of one, in this process."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10)
    )
    yield
    dist.destroy_process_group()


def _module(name, source):
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    return module


CALLS = {
    "dist": "import torch.distributed as dist\ndef call(x): dist.all_reduce(x)",
    "c10d": "from torch.distributed import distributed_c10d as c\ndef call(x): c.broadcast(x, 0)",
    "group": "import torch.distributed as dist\ndef call(x): dist.group.WORLD.allreduce([x]).wait()",
    "object": "import torch.distributed as dist\ndef call(x): dist.all_gather_object([None], 1)",
    "functional": (
        "import torch.distributed as dist\n"
        "from torch.distributed import _functional_collectives as f\n"
        "def call(x): f.wait_tensor(f.all_reduce(x, 'sum', dist.group.WORLD))"
    ),
    "barrier": "import torch.distributed as dist\ndef call(x): dist.barrier()",
}


@pytest.mark.parametrize("kind", CALLS)
def test_every_kind_of_collective_is_forbidden_to_the_package(kind):
    """In the call itself, and once more at the end for those that swallow it."""
    ours = _module("torchinstruments.observe.made_up", CALLS[kind])
    with pytest.raises(CollectiveForbiddenError, match="from"), no_collectives():
        with pytest.raises(CollectiveForbiddenError):
            ours.call(torch.ones(1))


@pytest.mark.parametrize("kind", CALLS)
def test_a_programs_own_collectives_go_through(kind):
    """Also those of the public testing room."""
    for name in ("somebody.elses", "torchinstruments.testing.made_up", "torchinstruments_but_not_really"):
        with no_collectives() as calls:
            _module(name, CALLS[kind]).call(torch.ones(1))
        assert calls == []


def test_a_collective_that_a_hook_of_the_package_causes_deep_inside_torch_is_found():
    """The whole stack counts, not the caller alone."""
    ours = _module("torchinstruments.observe.made_up", "def call(function, x): function(x)")
    with pytest.raises(CollectiveForbiddenError), no_collectives():
        ours.call(dist.all_reduce, torch.ones(1))


def test_a_scalers_own_collective_is_the_programs_though_its_method_is_wrapped():
    """ShardedGradScaler reduces its findings inside ``step``."""
    model = nn.Linear(1, 1)
    clock = StepClock()
    optimizers = OptimizerWatch(clock, weakref.ref(model))
    scalers = ScalerWatch(clock, optimizers)
    optimizers.attach()
    scalers.attach()
    scaler = ShardedGradScaler("cpu", init_scale=2.0)
    optimizer = SGD(model.parameters(), lr=0.1)
    with no_collectives() as calls:
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    scalers.detach()
    optimizers.detach()
    assert calls == []


@pytest.mark.parametrize("name", ["isend", "irecv"])
def test_point_to_point_is_forbidden_to_the_package_below_the_functions_that_torch_compares(name):
    """``P2POp`` takes the very functions of torch and no stand-in."""
    ours = _module(
        "torchinstruments.observe.made_up",
        f"import torch.distributed as dist\ndef call(x): dist.{name}(x, 0)",
    )
    with pytest.raises(CollectiveForbiddenError, match="from"), no_collectives():
        with pytest.raises(CollectiveForbiddenError):
            ours.call(torch.ones(1))


def test_everything_is_as_before_behind_the_guard():
    """Every patched name is restored."""
    before = (dist.all_reduce, dist.ProcessGroup.allreduce, functional.all_reduce)
    with no_collectives():
        assert dist.all_reduce is not before[0]
    assert (dist.all_reduce, dist.ProcessGroup.allreduce, functional.all_reduce) == before
