"""The stack says in which calls of modules the program is."""

import sys
import threading

import torch
from torch import nn
from typing_extensions import override

from torchinstruments.observe.stack import callers, enclosing_call, is_inside_itself, num_calls
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


def test_a_call_that_begins_knows_whether_it_is_inside_another_one_of_its_module() -> None:
    """Calls of other modules around it, or below it, are none of it."""
    found: list[tuple[str, bool]] = []

    class Recursive(nn.Module):
        def __init__(self, name: str, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.name, self.inner = name, inner

        @override
        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            if self.inner is not None:
                self.inner(x, 0)
            return x if depth == 0 else self(x, depth - 1)

    def begins(module: nn.Module, _args: object) -> None:
        assert isinstance(module, Recursive)
        found.append((module.name, is_inside_itself(module)))

    inner = Recursive("inner")
    outer = Recursive("outer", inner)
    for module in (inner, outer):
        module.register_forward_pre_hook(begins)
    outer(torch.ones(1), 1)
    assert found == [("outer", False), ("inner", False), ("outer", True), ("inner", False)]


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
