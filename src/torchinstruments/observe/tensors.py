"""The parameters and buffers of a model under the names that they have without wrappers."""

from collections.abc import Iterator

import torch
from torch import nn

from torchinstruments.observe.wrappers import child_of_kind
from torchinstruments.records import storable

__all__ = ["BUFFER", "PARAMETER", "named_tensors"]

PARAMETER = "parameter"
BUFFER = "buffer"


def named_tensors(root: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields each tensor once, in the order of the model: first name, kind, and itself as the module has it.

    Names are without the segments of wrappers. Where such a segment is all that tells two names apart, the
    later one keeps it (training thread, hot path).

    Args:
        root: The attached model, wrapped or not.
    """
    seen: set[int] = set()
    taken: set[str] = set()
    for prefix, full_prefix, module in _modules(root):
        # As `named_parameters` and `named_buffers` do, in a fifth of their time.
        for kind, own in ((PARAMETER, module._parameters), (BUFFER, module._buffers)):  # noqa: SLF001
            for name, tensor in own.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                own_name = storable(name)
                chosen = prefix + own_name
                if chosen in taken:
                    chosen = full_prefix + own_name
                taken.add(chosen)
                yield chosen, kind, tensor


def _modules(root: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yields each module once, depth first: what names in it begin with, that with wrappers, and itself."""
    seen: set[int] = set()
    waiting: list[tuple[str, str, nn.Module]] = [("", "", root)]
    wrapped_by: dict[type[nn.Module], str | None] = {}
    while waiting:
        entry = waiting.pop()
        prefix, full_prefix, module = entry
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield entry
        children = module._modules  # noqa: SLF001 - as above
        if not children:
            continue
        kind = type(module)
        if kind not in wrapped_by:
            wrapped_by[kind] = child_of_kind(kind)
        wrapped = wrapped_by[kind]
        for name, child in reversed(children.items()):
            if child is not None:
                segment = f"{storable(name)}."
                full = full_prefix + segment
                if name == wrapped:
                    waiting.append((prefix, full, child))
                else:
                    waiting.append((full if prefix == full_prefix else prefix + segment, full, child))
