"""The tensors of an audit: those of a module, or what a mapping holds, nested or not.

The same memory under two names is one entry with an alias: tied parameters, and views that cover the same
entries, ``.data`` for one.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchinstruments.checks.inventory import BUFFER, Inventory
from torchinstruments.errors import ConfigurationError
from torchinstruments.records import storable

__all__ = ["MAPPING", "AuditEntry", "NotATensor", "entries_of"]

MAPPING = "mapping"
"""Kind of a tensor that a mapping holds."""

_MAX_DEPTH = 16
_MAX_VALUES = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class AuditEntry:
    """One tensor.

    Attributes:
        name: Its first name.
        kind: ``parameter``, ``buffer`` or ``mapping``.
        tensor: Itself.
        aliases: Its further names.
        positions: Where its names stand in the inventory that resolves them.
    """

    name: str
    kind: str
    tensor: torch.Tensor
    aliases: tuple[str, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NotATensor:
    """Something else that a mapping holds.

    Attributes:
        name: Its name.
        type_name: Of its class.
    """

    name: str
    type_name: str


def entries_of(target: object) -> tuple[Inventory, list[AuditEntry], list[NotATensor]]:
    """Returns the tensors of a target, with the inventory that resolves names, and what is none.

    Args:
        target: A module, or a mapping from names to tensors; nested mappings and sequences are gone through,
            and their names are joined by dots.

    Raises:
        ConfigurationError: The target is neither.
    """
    others: list[NotATensor] = []
    if isinstance(target, nn.Module):
        inventory = Inventory(target)
    elif isinstance(target, Mapping):
        found: dict[str, torch.Tensor] = {}
        seen: Counter[str] = Counter()
        for dotted, value in _leaves("", target, 0, set()):
            seen[dotted] += 1
            # A mapping may have a name twice, as with a dotted key beside a nested one.
            name = dotted if seen[dotted] == 1 else f"{dotted} ({seen[dotted]})"
            if isinstance(value, torch.Tensor):
                found[name] = value
            else:
                others.append(NotATensor(name, type(value).__name__))
            if len(found) + len(others) > _MAX_VALUES:
                raise ConfigurationError(
                    f"target holds more than {_MAX_VALUES} values; give the mapping of its tensors alone"
                )
        inventory = Inventory(found)
    else:
        raise ConfigurationError(
            f"target={type(target).__name__} has no named tensors; give a module, or a mapping from names to "
            f"tensors such as model.state_dict()"
        )
    return inventory, _without_repeats(inventory, is_mapping=not isinstance(target, nn.Module)), others


def _leaves(prefix: str, value: object, depth: int, above: set[int]) -> Iterator[tuple[str, object]]:
    """Yields each tensor in nested containers, and each value that holds none, under its dotted name."""
    children: Iterator[tuple[object, object]] | None = None
    if isinstance(value, Mapping):
        children = iter(value.items())
    elif isinstance(value, (list, tuple)) and any(
        isinstance(child, (torch.Tensor, Mapping, list, tuple)) for child in value
    ):
        children = iter(enumerate(value))
    if children is None or depth >= _MAX_DEPTH or id(value) in above:
        yield prefix, value
        return
    below = above | {id(value)}
    for key, child in children:
        name = storable(str(key))
        yield from _leaves(f"{prefix}.{name}" if prefix else name, child, depth + 1, below)


def _without_repeats(inventory: Inventory, *, is_mapping: bool) -> list[AuditEntry]:
    """Returns the entries, those of the same memory as one."""
    by_memory: dict[object, list[int]] = {}
    for entry in inventory.entries:
        by_memory.setdefault(_memory_of(entry.tensor), []).append(entry.index)
    entries = []
    for positions in by_memory.values():
        own = [inventory.entries[position] for position in positions]
        names = dict.fromkeys(name for entry in own for name in (entry.name, *entry.aliases))
        first, *aliases = names
        kind = MAPPING if is_mapping else next((one.kind for one in own if one.kind != BUFFER), BUFFER)
        entries.append(AuditEntry(first, kind, own[0].tensor, tuple(aliases), tuple(positions)))
    return entries


def _memory_of(tensor: torch.Tensor) -> object:
    """Returns what is equal for tensors of the same entries in the same memory."""
    try:
        if (
            is_lazy(tensor)
            or type(tensor) not in {torch.Tensor, nn.Parameter}
            or tensor.layout is not torch.strided
            or tensor.is_meta
            or tensor.is_nested
            or tensor.numel() == 0
        ):
            return id(tensor)
        where = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
        strides = sorted(
            (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
        )
        if tensor.data_ptr() == 0:
            return id(tensor)
        next_stride = 1
        for stride, size in strides:
            if stride != next_stride:
                return (*where, *strides)
            next_stride *= size
        return (*where, tensor.numel())
    except RuntimeError:
        # A kind of tensor that has no memory of its own; the scan says why.
        return id(tensor)
