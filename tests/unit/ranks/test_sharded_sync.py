"""What is read where torch keeps its flags, and where it does not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchinstruments.ranks.sharded_sync import ShardedSync
from torchinstruments.records import GradSync


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    """A sharded layer and one that is not, in a process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(inner[0])
    yield inner
    dist.destroy_process_group()


def _state(model: nn.Sequential) -> Any:
    layer: Any = model[0]
    return layer._get_fsdp_state()


def _group(model: nn.Sequential) -> Any:
    return _state(model)._fsdp_param_groups[0]


def test_a_model_that_nobody_sharded_has_nothing_to_read() -> None:
    """It decides nothing in its backward."""
    sync = ShardedSync(nn.Linear(1, 1))
    assert not sync
    assert sync.read() is GradSync.UNKNOWN


def test_flags_are_read_anew_each_time(model: nn.Sequential) -> None:
    """They are found once, and changed by the program between backwards."""
    sync = ShardedSync(model)
    assert sync
    assert sync.read() is GradSync.SYNCED
    _group(model).reduce_grads = False
    assert sync.read() is GradSync.LOCAL


@pytest.mark.parametrize("name", ["reduce_grads", "all_reduce_grads", "mesh_info"])
def test_a_flag_that_is_not_where_it_was_is_no_guess(model: nn.Sequential, name: str) -> None:
    """Another version of torch may keep it elsewhere."""
    sync = ShardedSync(model)
    delattr(_group(model), name)
    assert sync.read() is GradSync.UNKNOWN


def test_a_state_without_groups_is_unknown(model: nn.Sequential) -> None:
    """The attribute is private, and may be gone or be something else."""
    sync = ShardedSync(model)
    _state(model)._fsdp_param_groups = None
    assert sync.read() is GradSync.UNKNOWN


def test_a_model_on_meta_can_be_looked_at() -> None:
    """Nothing of a tensor is asked for."""
    assert not ShardedSync(nn.Linear(1, 1, device=torch.device("meta")))
