"""The context in which telemetry computes."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from torchinstruments.statistics.isolation import functions_off, isolated


class CountsDispatches(TorchDispatchMode):
    """Keeps every operation that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


class CountsFunctions(TorchFunctionMode):
    """Keeps every function that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_gradients_are_off_inside_and_on_behind() -> None:
    """Nothing computed inside has a graph, and recording goes on afterwards."""
    weight = torch.ones(2, requires_grad=True)
    with isolated(weight):
        assert not (weight * 2).requires_grad
    assert (weight * 2).requires_grad


def test_gradients_that_were_off_stay_off() -> None:
    """The context puts back what was, not what is usual."""
    with torch.no_grad():
        with isolated("cpu"):
            pass
        assert not torch.is_grad_enabled()


def test_autocast_is_off_inside_and_on_behind() -> None:
    """A product inside keeps its dtype; outside it is autocast again."""
    square = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with isolated(square):
            assert (square @ square).dtype is torch.float32
        assert (square @ square).dtype is torch.bfloat16


def test_autocast_that_was_off_stays_off() -> None:
    """A disabled region inside an enabled one is respected."""
    square = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        with isolated(square):
            pass
        assert (square @ square).dtype is torch.float32


def test_dispatch_modes_see_nothing() -> None:
    """A mode that counts operations counts those of the program alone."""
    with CountsDispatches() as mode:
        with isolated("cpu"):
            torch.ones(2) + 1
        assert mode.operations == []
        torch.ones(2)
    assert len(mode.operations) == 1


def test_function_modes_see_nothing() -> None:
    """So does a mode on functions; the default device, for one, works as such."""
    with CountsFunctions() as mode:
        with functions_off(), isolated("cpu"):
            torch.ones(2) + 1
        assert mode.functions == []
        torch.ones(2)
    assert len(mode.functions) == 1


def test_an_exception_leaves_everything_as_it_was() -> None:
    """Whatever is raised inside, the program goes on as before."""
    with torch.autocast("cpu", dtype=torch.bfloat16), CountsDispatches() as mode:
        with pytest.raises(ValueError, match="inside"), isolated("cpu"):
            raise ValueError("inside")
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        torch.ones(2)
    assert len(mode.operations) == 1


def test_it_can_be_entered_inside_itself() -> None:
    """A nested one changes nothing, and the outer one still puts everything back."""
    with isolated("cpu"):
        with isolated("cpu"):
            pass
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("device_type", ["meta", "cuda", "ipu"])
def test_any_device_type_will_do(device_type: str) -> None:
    """Those that torch was not built for, and those without autocast."""
    with isolated(device_type):
        assert not torch.is_grad_enabled()


def test_inference_mode_is_left_alone() -> None:
    """It stays on inside and behind."""
    with torch.inference_mode():
        with isolated("cpu"):
            assert torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()


def interrupt_at(number: int) -> tuple[bool, list[bool]]:
    """Computes something with an interrupt at the nth line of the context's own code.

    Returns:
        Whether there was such a line, and whether gradients, autocast and the mode are on afterwards.
    """
    left = number

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("statistics/isolation.py"):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    square = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), CountsDispatches() as mode, CountsFunctions():
        sys.settrace(trace)
        try:
            with functions_off(), isolated(square):
                square @ square
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        mode.operations.clear()
        product = square @ square
        on = [product.requires_grad, product.dtype is torch.bfloat16, mode.operations != []]
    return left <= 0, on


def test_an_interrupt_anywhere_leaves_everything_as_it_was() -> None:
    """The way out is no line of Python, and the way in takes back what it had done."""
    number, was_reached = 1, True
    while was_reached:
        was_reached, on = interrupt_at(number)
        assert on == [True, True, True], number
        number += 1
    assert number > 10
