"""The default reducers, and what is refused as one."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from torchinstruments.errors import ConfigurationError
from torchinstruments.statistics.profile import PROFILE_METRICS
from torchinstruments.statistics.reducers import default_reducers, metric_names, validate_reducers


def spread(tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Returns one scalar."""
    return {"spread": tensor.max() - tensor.min()}


def test_the_default_reducers_give_named_scalars() -> None:
    """They are callables from a tensor to the nine statistics."""
    (profile,) = default_reducers()
    assert profile(torch.tensor([1.0, 3.0]))["mean"] == 2.0
    assert metric_names(default_reducers()) == PROFILE_METRICS


def test_names_are_known_beforehand_only_where_a_reducer_declares_them() -> None:
    """A plain function has none, and is no obstacle to the others."""
    assert metric_names((*default_reducers(), spread)) == PROFILE_METRICS


def test_a_list_of_reducers_is_taken_as_a_tuple() -> None:
    """Any collection will do, and stays in its order."""
    assert validate_reducers([*default_reducers(), spread]) == (*default_reducers(), spread)


@pytest.mark.parametrize(
    ("reducers", "message"),
    [
        (spread, "is not a collection"),
        ("mean", "is not a collection"),
        (5, "is not a collection"),
        ((), "is empty"),
        ((spread, 3), "holds 3, which cannot be called"),
        (default_reducers() * 2, "measure 'mean' twice, in ExactProfile and in ExactProfile"),
    ],
)
def test_reducers_that_cannot_work_are_refused_with_the_way_out(reducers: Any, message: str) -> None:
    """One sentence names the value and what to give instead."""
    with pytest.raises(ConfigurationError, match=message):
        validate_reducers(reducers)
