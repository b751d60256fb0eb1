"""Tensors as checks measure them, and the one number that most of them need: an exact norm.

A norm in float64 is zero if and only if every element is, and finite if and only if every element is: the
squares of float32 neither overflow nor vanish there, and half types are widened by the same call. Of float64
itself the largest magnitude stands in where the squares leave the range.

Nothing here is a collective: of a `DTensor` only this rank's part is looked at.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.parameter import is_lazy

from torchinstruments.records import Reason, Scope

__all__ = ["is_finite", "local_numel", "local_part", "measurable", "norms", "scope_of"]

_WIDENED = frozenset({torch.float32, torch.float16, torch.bfloat16})


def measurable(tensor: torch.Tensor) -> torch.Tensor | str:
    """Returns a tensor as `norms` takes it, or why that is not possible (hot path).

    Call it inside `isolated`.

    Args:
        tensor: A parameter, buffer or gradient of any kind.

    Returns:
        Real, strided, with at least one element; or a `Reason` code.
    """
    if type(tensor) not in _PLAIN:
        if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
            return Reason.PARTIAL_PLACEMENT.value
        if is_lazy(tensor):
            return Reason.UNINITIALISED.value
        tensor = local_part(tensor)
    if tensor.layout is not torch.strided:
        if tensor.layout is not torch.sparse_coo:
            return Reason.UNSUPPORTED_LAYOUT.with_detail(str(tensor.layout))
        tensor = tensor.coalesce().values()
    if tensor.numel() == 0:
        return Reason.EMPTY.value
    if tensor.is_meta:
        return Reason.META_TENSOR.value
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return Reason.UNSUPPORTED_DTYPE.with_detail(str(tensor.dtype))
    return tensor if tensor.itemsize > 1 else tensor.float()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor; no collective (hot path)."""
    if type(tensor) in _PLAIN:
        return tensor
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def local_numel(tensor: torch.Tensor) -> int:
    """Returns how many elements this rank has of a tensor; 0 for one that waits for its shape (hot path)."""
    return 0 if is_lazy(tensor) else local_part(tensor).numel()


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the L2 norm of each tensor as a 0-d tensor on its device; nothing is read (hot path).

    Call it inside `isolated`.

    Args:
        tensors: As `measurable` returns them.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(position)
    if len(alike) == 1:
        return _norms(list(tensors))
    found: dict[int, torch.Tensor] = {}
    for positions in alike.values():
        found.update(zip(positions, _norms([tensors[position] for position in positions]), strict=True))
    return [found[position] for position in range(len(tensors))]


def is_finite(norm: float) -> bool:
    """Returns whether every element of a tensor with this norm is finite."""
    return math.isfinite(norm)


def scope_of(tensor: torch.Tensor) -> Scope:
    """Returns what part of a tensor this rank sees (hot path)."""
    is_whole = type(tensor) in _PLAIN or getattr(tensor, "to_local", None) is None
    return Scope.LOCAL if is_whole else Scope.LOCAL_SHARD


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the norms of tensors of one device and dtype."""
    device, dtype = tensors[0].device, tensors[0].dtype
    if dtype in _WIDENED and device.type not in _WITHOUT_FLOAT64:
        return list(torch._foreach_norm(tensors, 2, dtype=torch.float64))  # noqa: SLF001 - what torch's own clipping calls
    # Squares may overflow or vanish here: the largest magnitude tells zero and nonfinite apart all the same.
    wide = tensors if dtype in {torch.float32, torch.float64} else [tensor.float() for tensor in tensors]
    squared = torch._foreach_norm(wide, 2)  # noqa: SLF001 - as above
    largest = torch._foreach_norm(wide, math.inf)  # noqa: SLF001 - as above
    return [
        torch.where((two > 0) & torch.isfinite(two), two, top)
        for two, top in zip(squared, largest, strict=True)
    ]


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_WITHOUT_FLOAT64 = frozenset({"mps"})
