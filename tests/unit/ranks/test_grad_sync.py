"""The parts of grad_sync that need no process group; DDP is in tests/distributed."""

import pytest
from torch import nn

from torchinstruments.ranks.grad_sync import read_grad_sync
from torchinstruments.records import GradSync


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_an_unwrapped_model_that_is_alone_is_not_distributed(grad_enabled):
    """There is nobody to synchronise with."""
    assert read_grad_sync(nn.Linear(1, 1), grad_enabled, 1) is GradSync.NOT_DISTRIBUTED


def test_an_unwrapped_model_among_ranks_is_unknown():
    """A program may synchronise by hand, or not at all."""
    assert read_grad_sync(nn.Linear(1, 1), True, 2) is GradSync.UNKNOWN
