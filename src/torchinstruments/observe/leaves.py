"""The tensors inside what a module returns or is given, each under a path that is the same in every call.

``output`` is a tensor returned as such, ``output.0`` the first of a tuple, ``output.logits`` a field or key.
``input`` is the only positional argument, ``input.0`` the first of several, ``input.mask`` one given by name.
Tensors are found in tuples, lists, mappings (outputs of Hugging Face models are mappings), named tuples and
dataclasses, nested in any way. Anything else is none of the observer's business.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from torchinstruments.records import storable

__all__ = [
    "MAX_DEPTH",
    "MAX_NODES",
    "MAX_TENSORS",
    "Leaves",
    "gradient_path",
    "tensors_given",
    "tensors_in",
]

MAX_DEPTH = 32
"""Levels of nesting that are looked into."""

MAX_TENSORS = 1_000
"""Tensors of one call that are measured."""

MAX_NODES = 20_000
"""Values of one call that are looked at, so that a long list of plain numbers costs little."""

_MAX_KEY_CHARACTERS = 80
_ROOT = "output"
_GIVEN = "input"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaves:
    """What was found in one output, or in the arguments of one call.

    Attributes:
        tensors: Path and tensor, in the order in which they lie there.
        truncated: Which bound was met, as a sentence; ``""`` where all was found.
        unreadable: Path of each container that could not be gone through, and what it raised.
    """

    tensors: tuple[tuple[str, torch.Tensor], ...]
    truncated: str = ""
    unreadable: tuple[tuple[str, Exception], ...] = ()


def tensors_in(output: object) -> Leaves:
    """Returns the tensors of an output (training thread, hot path).

    Two places whose paths read alike (a key ``"a.b"`` beside a key ``"a"`` that holds ``"b"``) are told apart
    by a suffix ``#2``, ``#3``, ... in the order of the output.

    Args:
        output: Whatever a module returned.

    Returns:
        At most `MAX_TENSORS` tensors, not deeper than `MAX_DEPTH`; a container that holds itself is entered
        once.
    """
    if type(output) is torch.Tensor:
        return Leaves(((_ROOT, output),))
    walk = _Walk("output")
    walk.visit(_ROOT, output, 0)
    return walk.leaves()


def tensors_given(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Leaves:
    """Returns the tensors among the arguments of a call (training thread, hot path).

    Args:
        args: Those given by place. A single one is ``input`` itself, whatever is given by name beside it.
        kwargs: Those given by name.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return Leaves(((_GIVEN, args[0]),))
    walk = _Walk("input")
    for place, argument in enumerate(args):
        walk.visit(_GIVEN if len(args) == 1 else f"{_GIVEN}.{place}", argument, 0)
    for name, argument in kwargs.items():
        walk.visit(f"{_GIVEN}.{storable(name)}", argument, 0)
    return walk.leaves()


def gradient_path(path: str) -> str:
    """Returns the path of the gradient of the tensor at a path: ``grad_output.0`` for ``output.0``."""
    return f"grad_{path}"


class _Walk:
    """One walk through one output, or through the arguments of one call."""

    __slots__ = ("found", "full", "inside", "num_nodes", "truncated", "unreadable", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.found: dict[str, torch.Tensor] = {}
        self.full = False
        self.inside: set[int] = set()
        self.num_nodes = 0
        self.truncated = ""
        self.unreadable: dict[str, Exception] = {}

    def leaves(self) -> Leaves:
        """Returns what was found."""
        return Leaves(tuple(self.found.items()), self.truncated, tuple(self.unreadable.items()))

    def visit(self, path: str, value: object, depth: int) -> None:
        """Takes a tensor, or goes through a container; anything else is left."""
        try:
            if isinstance(value, torch.Tensor):
                self._take(path, value)
            else:
                self._enter(path, value, depth)
        except Exception as error:  # noqa: BLE001 - the user's, down to its class; what was found before stays
            self.unreadable[self._free(path)] = error
            self.inside.discard(id(value))

    def _take(self, path: str, tensor: torch.Tensor) -> None:
        """Takes a tensor, where there is room."""
        if len(self.found) < MAX_TENSORS:
            self.found[self._free(path)] = tensor
        else:
            self._stop(f"more than {MAX_TENSORS} tensors in one {self.what}; the rest is not measured")

    def _enter(self, path: str, value: object, depth: int) -> None:
        """Goes through a container.

        Raises:
            Exception: Whatever the container raises.
        """
        children = _children(value)
        if children is None or id(value) in self.inside:
            return
        if depth >= MAX_DEPTH:
            self.truncated = (
                f"one {self.what} nested deeper than {MAX_DEPTH} levels; what lies below is not measured"
            )
            return
        self.inside.add(id(value))
        for key, child in children:
            self.num_nodes += 1
            if self.num_nodes > MAX_NODES:
                self._stop(f"more than {MAX_NODES} values in one {self.what}; the rest is not looked at")
            if self.full:
                break
            self.visit(f"{path}.{storable(key)}", child, depth + 1)
        self.inside.discard(id(value))

    def _stop(self, why: str) -> None:
        """Ends the walk."""
        self.full = True
        self.truncated = why

    def _free(self, path: str) -> str:
        """Returns the path, or one with a suffix where another tensor has it already."""
        candidate, ordinal = path, 2
        while candidate in self.found or candidate in self.unreadable:
            candidate = f"{path}#{ordinal}"
            ordinal += 1
        return candidate


def _children(value: object) -> Iterator[tuple[str, object]] | None:
    """Returns the named parts of a container, or None for anything that is none."""
    if isinstance(value, Mapping):
        return ((_key_text(key), child) for key, child in value.items())
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        if isinstance(names, tuple) and len(names) == len(value):
            return zip(map(str, names), value, strict=True)
        return ((str(index), child) for index, child in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return None


def _key_text(key: object) -> str:
    """Returns a string key as it is and any other by its repr, or its type's name, of bounded length."""
    try:
        return (key if isinstance(key, str) else repr(key))[:_MAX_KEY_CHARACTERS]
    except Exception:  # noqa: BLE001 - a key of the user's
        return f"<{type(key).__name__}>"
