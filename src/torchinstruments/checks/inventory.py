"""The parameters and buffers that a session watches, and every name that they go by.

A tensor reached under several names is one entry; the first is its own, the others are aliases that resolve
to it. Segments of wrappers are left out of names, and a name with them resolves too.
"""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.wrappers import wrapped_child
from torchinstruments.records import storable

__all__ = ["BUFFER", "PARAMETER", "Entry", "Inventory"]

PARAMETER = "parameter"
BUFFER = "buffer"

_MAX_VISITS = 200_000
_MAX_SHOWN = 5
_PATTERN = frozenset("*?[")


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor.

    Attributes:
        index: Position in the inventory.
        name: In the model, without the segments of wrappers.
        kind: `PARAMETER` or `BUFFER`.
        tensor: As the module holds it.
        aliases: Its further names.
    """

    index: int
    name: str
    kind: str
    tensor: torch.Tensor
    aliases: tuple[str, ...] = ()


class Inventory:
    """The tensors of a model, or of a mapping from names to tensors.

    Args:
        model: What is watched. A mapping's tensors count as parameters.
    """

    def __init__(self, model: nn.Module | Mapping[str, torch.Tensor]) -> None:
        names: dict[int, list[str]] = {}
        found: dict[int, tuple[str, torch.Tensor]] = {}
        taken: dict[str, int] = {}
        self._index: dict[str, int] = {}
        for name, full_name, kind, tensor in _named(model):
            key = id(tensor)
            chosen = full_name if taken.get(name, key) != key else name
            taken[chosen] = key
            found.setdefault(key, (kind, tensor))
            names.setdefault(key, []).extend((chosen, full_name))
        self.entries: tuple[Entry, ...] = tuple(
            [
                Entry(index, own[0], *found[key], tuple(dict.fromkeys(own[1:])))
                for index, (key, own) in enumerate(
                    (key, list(dict.fromkeys(own))) for key, own in names.items()
                )
            ]
        )
        self._by_id = {id(entry.tensor): entry.index for entry in self.entries}
        for entry in self.entries:
            for name in (entry.name, *entry.aliases):
                self._index.setdefault(name, entry.index)

    @property
    def parameters(self) -> tuple[Entry, ...]:
        """Its parameters, in the order of the model."""
        return tuple([entry for entry in self.entries if entry.kind == PARAMETER])

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the position of a tensor, or None for one that is not the model's (hot path)."""
        return self._by_id.get(id(tensor))

    def is_same_as(self, other: "Inventory") -> bool:
        """Returns whether another one has the same tensors under the same names."""
        return [(one.name, id(one.tensor)) for one in self.entries] == [
            (one.name, id(one.tensor)) for one in other.entries
        ]

    def name(self, index: int) -> str:
        """Returns the name of an entry."""
        return self.entries[index].name

    def names(self, indices: Iterable[int]) -> tuple[str, ...]:
        """Returns the names of entries."""
        return tuple([self.entries[index].name for index in indices])

    def resolve(self, names: Sequence[str], argument: str) -> frozenset[int]:
        """Returns the positions that names stand for: own names, aliases, or patterns with ``*``.

        Args:
            names: What the caller gave.
            argument: Whose it is, for the message.

        Raises:
            ConfigurationError: A name stands for nothing.
        """
        chosen: set[int] = set()
        for name in names:
            if name in self._index:
                chosen.add(self._index[name])
                continue
            matched = {
                index
                for known, index in self._index.items()
                if not _PATTERN.isdisjoint(name) and fnmatch.fnmatchcase(known, name)
            }
            if not matched:
                shown = ", ".join(repr(entry.name) for entry in self.entries[:_MAX_SHOWN])
                raise ConfigurationError(
                    f"{argument} has {name!r}, which is no parameter or buffer of the model; give names as "
                    f"in model.named_parameters(), such as {shown}, or patterns with *"
                )
            chosen |= matched
        return frozenset(chosen)


def _named(model: nn.Module | Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """Yields each name of each tensor: without wrapper segments, with them, kind and tensor."""
    if not isinstance(model, nn.Module):
        for name, tensor in model.items():
            yield storable(name), storable(name), PARAMETER, tensor
        return
    num_visits = 0
    waiting: list[tuple[str, str, nn.Module, frozenset[int]]] = [("", "", model, frozenset())]
    while waiting and num_visits < _MAX_VISITS:
        num_visits += 1
        prefix, full_prefix, module, above = waiting.pop()
        if id(module) in above:
            continue
        for kind, held in ((PARAMETER, module._parameters), (BUFFER, module._buffers)):  # noqa: SLF001 - the named_ functions leave aliases out
            for name, tensor in held.items():
                if tensor is not None:
                    yield _join(prefix, name), _join(full_prefix, name), kind, tensor
        wrapped, below = wrapped_child(module), above | {id(module)}
        children = [
            (prefix if name == wrapped else _join(prefix, name), _join(full_prefix, name), child, below)
            for name, child in module._modules.items()  # noqa: SLF001 - as above
            if child is not None
        ]
        waiting.extend(reversed(children))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{storable(name)}" if prefix else storable(name)
