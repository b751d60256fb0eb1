"""What the backwards of one forward do, in a process group that sends nothing."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchinstruments.observe.backward_sync import Synchronisation
from torchinstruments.records import GradSync, Position, StepProvenance

TRAINING = Position(0, 0, 0, 0, True, StepProvenance.NONE)
EVALUATION = Position(0, 0, None, 0, False, StepProvenance.NONE)


class Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.changes: list[tuple[GradSync, GradSync | None]] = []
        self.errors: list[BaseException] = []
        self.synchronisation = Synchronisation(self.changed, self.errors.append)

    def changed(self, position: Position, grad_sync: GradSync, before: GradSync | None) -> None:
        """Takes what a backward does."""
        assert position is TRAINING
        self.changes.append((grad_sync, before))


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 0 of 2."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _sharded() -> tuple[FSDPModule, nn.Module]:
    model = nn.Linear(2, 2)
    return fully_shard(model), model


@pytest.mark.usefixtures("world")
def test_each_backward_is_told_of_where_it_differs_from_the_one_before() -> None:
    """Of two alike the second says nothing new."""
    told = Told()
    sharded, model = _sharded()
    at_forward, sync = told.synchronisation.forward_started(model, TRAINING, 2)
    assert at_forward is GradSync.UNKNOWN
    assert sync is not None
    output = model(torch.ones(1, 2))
    sync.watch(output)
    assert told.changes == []
    for flag in (False, False, True):
        sharded.set_requires_gradient_sync(flag)
        output.sum().backward(retain_graph=True)
    assert told.changes == [(GradSync.LOCAL, None), (GradSync.SYNCED, GradSync.LOCAL)]
    assert told.errors == []


@pytest.mark.usefixtures("world")
def test_a_backward_through_no_output_is_not_seen() -> None:
    """Another forward's tells nothing of this one, and a leaf that is returned is not hooked."""
    told = Told()
    _, model = _sharded()
    _, sync = told.synchronisation.forward_started(model, TRAINING, 2)
    assert sync is not None
    leaf = torch.ones(1, requires_grad=True)
    sync.watch({"leaf": leaf, "text": "none", "constant": torch.ones(1)})
    leaf.sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    assert told.changes == []


@pytest.mark.usefixtures("world")
def test_a_forward_without_gradients_is_local() -> None:
    """It has no backward that could decide."""
    told = Told()
    _, model = _sharded()
    assert told.synchronisation.forward_started(model, EVALUATION, 2) == (GradSync.LOCAL, None)


def test_a_model_that_is_not_sharded_is_read_at_its_forward() -> None:
    """Alone it is not distributed, and among others nobody knows."""
    told = Told()
    model = nn.Linear(1, 1)
    assert told.synchronisation.forward_started(model, TRAINING, 1) == (GradSync.NOT_DISTRIBUTED, None)
    assert told.synchronisation.forward_started(model, TRAINING, 2) == (GradSync.UNKNOWN, None)


@pytest.mark.usefixtures("world")
def test_a_model_that_was_sharded_since_is_found_at_the_next_look() -> None:
    """Between looks nothing is said of it."""
    told = Told()
    model = nn.Linear(2, 2)
    assert told.synchronisation.forward_started(model, TRAINING, 2) == (GradSync.UNKNOWN, None)
    fully_shard(model)
    told.synchronisation.look_again(model)
    assert told.synchronisation.forward_started(model, TRAINING, 2)[1] is not None


class Unhookable(torch.Tensor):
    """A tensor that takes no hook."""

    def register_hook(self, hook: object) -> object:  # noqa: ARG002
        """Refuses."""
        raise RuntimeError("no hook")


@pytest.mark.usefixtures("world")
def test_what_takes_no_hook_raises_nothing() -> None:
    """It is reported, and training goes on."""
    told = Told()
    _, model = _sharded()
    _, sync = told.synchronisation.forward_started(model, TRAINING, 2)
    assert sync is not None
    sync.watch((model(torch.ones(1, 2)) * 1).as_subclass(Unhookable))
    assert [str(error) for error in told.errors] == ["no hook"]
