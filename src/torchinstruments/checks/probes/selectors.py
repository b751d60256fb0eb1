"""Which values of a forward a probe looks at: what a function returns, or what a module does."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from torchinstruments.checks.registration import shown
from torchinstruments.errors import ConfigurationError

__all__ = ["FunctionSelector", "ModuleSelector", "Selector", "func", "module", "plain_name", "selectors_of"]


_NAMESPACES = ("special_", "linalg_", "fft_")
_OPERATORS = {
    "rsub": "sub",
    "rdiv": "div",
    "rpow": "pow",
    "rmatmul": "matmul",
    "rmod": "remainder",
    "floordiv": "floor_divide",
    "rfloordiv": "floor_divide",
    "and": "bitwise_and",
    "iand": "bitwise_and",
    "or": "bitwise_or",
    "ior": "bitwise_or",
    "xor": "bitwise_xor",
    "ixor": "bitwise_xor",
    "invert": "bitwise_not",
}
"""Operators by the names of the functions that they are; torch gives the others these names itself."""


@lru_cache(maxsize=4_096)
def plain_name(name: str) -> str:
    """Returns the name that all spellings of a function share (training thread, hot path).

    Args:
        name: Such as ``relu_``, ``relu.default``, ``special_softmax`` or ``__rsub__``.
    """
    name = name.partition(".")[0]
    if name.startswith("__") and name.endswith("__") and name.strip("_"):
        name = name.strip("_")
        return _OPERATORS.get(name, name)
    for namespace in _NAMESPACES:
        name = name.removeprefix(namespace) or name
    return name.rstrip("_") or name


@dataclass(frozen=True, slots=True)
class FunctionSelector:
    """What calls of a torch function return.

    Attributes:
        name: Its `plain_name`: ``relu`` also stands for ``relu_``, ``Tensor.relu`` and ``aten.relu.default``.
        function: The function itself, where one was given; then no other of its name is meant.
    """

    name: str
    function: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return f"func({self.name!r})"

    def matches(self, function: object, name: str) -> bool:
        """Returns whether a call of a function is meant (training thread, hot path).

        Args:
            function: What is called.
            name: Its `plain_name`.
        """
        return function is self.function if self.function is not None else name == self.name


@dataclass(frozen=True, slots=True)
class ModuleSelector:
    """What modules return.

    Attributes:
        pattern: A name as in ``named_modules()``, or a pattern with ``*``; ``""`` is the model itself.
    """

    pattern: str

    def __str__(self) -> str:
        return f"module({self.pattern!r})"


Selector: TypeAlias = FunctionSelector | ModuleSelector


def func(name: str | Callable[..., Any]) -> FunctionSelector:
    """Selects what calls of a torch function return.

    ``func("relu")`` stands for every function of that name that torch lets be seen: ``torch.relu``,
    ``torch.nn.functional.relu``, ``Tensor.relu``, and those that work in place; an operator has the name of
    its function, ``x - y`` that of ``sub``. A dotted name, or the function itself, stands for that one alone.
    What torch calls inside another function is not seen.

    Args:
        name: Such as ``"softmax"``, ``"torch.nn.functional.softmax"`` or ``torch.relu``.

    Raises:
        ConfigurationError: There is no such function.
    """
    if isinstance(name, str) and name.isidentifier():
        return FunctionSelector(plain_name(name))
    if isinstance(name, str):
        function = _resolved(name)
        if callable(function):
            return FunctionSelector(name, function)
    elif callable(name):
        return FunctionSelector(getattr(name, "__name__", repr(name)), name)
    raise ConfigurationError(
        f"func({shown(name)}) names no function; give a name such as 'relu', a dotted one such as "
        f"'torch.nn.functional.relu', or the function itself"
    )


def module(pattern: str) -> ModuleSelector:
    """Selects what modules return.

    Args:
        pattern: A name as in ``named_modules()`` without segments of wrappers, or a pattern with ``*``, ``?``
            or ``[...]``; ``""`` is the model itself.

    Raises:
        ConfigurationError: It is no text.
    """
    if not isinstance(pattern, str):
        raise ConfigurationError(
            f"module({shown(pattern)}) is not possible; give a name or a pattern such as 'encoder.*'"
        )
    return ModuleSelector(pattern)


def selectors_of(argument: str, value: object) -> tuple[Selector, ...]:
    """Returns the selectors that a caller gave.

    Raises:
        ConfigurationError: They are none, or there are none.
    """
    if isinstance(value, (FunctionSelector, ModuleSelector)):
        return (value,)
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else ()
    if not found or not all(isinstance(one, (FunctionSelector, ModuleSelector)) for one in found):
        raise ConfigurationError(
            f"{argument}={shown(value)} is not possible; give selectors, such as [func('relu'), module('0')]"
        )
    return tuple(dict.fromkeys(found))


def _resolved(name: str) -> object:
    """Returns what a dotted name stands for, or None."""
    first, *rest = name.split(".")
    found: object = torch if first == "torch" else None
    try:
        found = importlib.import_module(first) if found is None and first else found
    except ImportError:
        return None
    for part in rest:
        found = getattr(found, part, None)
    return found
