"""The stack says in which calls of modules the program is."""

import sys
import threading

import torch
from torch import nn
from typing_extensions import override

from torchinstruments.observe.stack import callers, enclosing_call, num_calls
from unit.observe.memory import Recorder


def test_callers_are_the_modules_that_run_from_inside_out() -> None:
    """Of this thread alone."""
    seen: list[list[nn.Module]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(list(callers(sys._getframe())))
        thread = threading.Thread(target=lambda: seen.append(list(callers(sys._getframe()))))
        thread.start()
        thread.join()
        return x

    inner = Recorder(look)
    model = nn.Sequential(inner)
    model(torch.ones(1))
    assert [[id(module) for module in found] for found in seen] == [[id(inner), id(model)], []]


def test_calls_of_a_module_are_counted_by_depth() -> None:
    """A direct forward is no call of it."""
    counts: list[int] = []

    class Recursive(nn.Module):
        @override
        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            counts.append(num_calls(self))
            return x if depth == 0 else self(x, depth - 1)

    model = Recursive()
    model(torch.ones(1), 2)
    model.forward(torch.ones(1), 0)
    assert counts == [1, 2, 3, 0]


def test_a_forward_knows_whether_a_call_runs_it() -> None:
    """Through whatever wraps it; a call of another module is none of it."""
    found: list[nn.Module | None] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(enclosing_call(wrapped, model, sys._getframe(1)))
        return x

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        return look(x)

    model = nn.Sequential(nn.ReLU())
    outer = Recorder(wrapped)
    vars(model)["forward"] = wrapped
    model(torch.ones(1))
    model.forward(torch.ones(1))
    outer(torch.ones(1))
    assert found == [model, None, None]
