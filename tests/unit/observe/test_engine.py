"""What the engine is asked for its numbers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchinstruments.observe.engine import graph_task, latest_graph_task


def _number_of_backward() -> int:
    """Returns the number that the engine gives to the next backward."""
    numbers: list[int] = []
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 2
    result.register_hook(lambda _gradient: numbers.append(graph_task()))
    result.sum().backward()
    return numbers[0]


@pytest.mark.parametrize(
    "context",
    [nullcontext, torch.no_grad, torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")],
)
def test_the_latest_number_is_the_one_before_the_next(
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Whatever is on in the program; that is as it was then."""
    before = _number_of_backward()
    with context():
        is_on = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert latest_graph_task() == before + 1
        assert is_on == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert _number_of_backward() == before + 2


def test_inside_of_a_backward_it_is_the_one_before_it() -> None:
    """And nothing is traversed for it."""
    numbers: list[int] = []
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 2
    result.register_hook(lambda _gradient: numbers.append(latest_graph_task()))
    before = _number_of_backward()
    result.sum().backward()
    assert numbers == [before]
    assert _number_of_backward() == before + 2
