"""Tensors as checks measure them, and the one number that most of them need: the L2 norm.

A norm here is zero if and only if every element is, and finite if and only if every element is. Squares of
float32 may leave its range; where one may have, the largest magnitude decides, and the norm is taken in
float64. Of large tensors pieces are added up in float64, for float32 loses digits over millions of squares.

Nothing here is a collective: of a `DTensor` only this rank's part is looked at.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchinstruments.observe.sharding import is_flattened
from torchinstruments.records import Absent, Reason, Scope
from torchinstruments.statistics.admission import COMPLEX, admit

__all__ = [
    "FEW_ALIKE",
    "SCRATCH_ENTRIES",
    "SMALL_ENTRIES",
    "is_distributed",
    "is_freed",
    "local_numel",
    "local_part",
    "measurable",
    "norms",
    "norms_of_rows",
    "scope_of",
    "scope_of_all",
    "sort_out",
]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_REAL = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_PIECE = 1 << 18
"""Elements of which float32 adds up the squares: a relative error of about 1e-6 at most."""

SMALL_ENTRIES = 1 << 14
FEW_ALIKE = 4
SCRATCH_ENTRIES = 1 << 17
"""So many tensors of one shape, and no larger ones, are measured together, in copies of so many elements."""

_RANGE_OF_FLOAT64 = (1e-150, 1e150)
_RANGE_OF_FLOAT32 = (1e-16, 1e18)
_WITHOUT_FLOAT64 = frozenset({"mps"})


def sort_out(tensors: Mapping[int, torch.Tensor]) -> tuple[dict[int, torch.Tensor], dict[int, str]]:
    """Returns which tensors can be measured, as `norms` takes them, and why others cannot (hot path).

    Call it inside `isolated`.

    Args:
        tensors: Parameters, buffers or gradients of any kind.
    """
    ready: dict[int, torch.Tensor] = {}
    reasons: dict[int, str] = {}
    strided, plain, real = torch.strided, _PLAIN, _REAL
    for index, tensor in tensors.items():
        if (
            type(tensor) in plain
            and tensor.layout is strided
            and tensor.dtype in real
            and tensor.numel()
            and not tensor.is_meta
            and not tensor.is_nested
        ):
            ready[index] = tensor
            continue
        found = measurable(tensor)
        if isinstance(found, str):
            reasons[index] = found
        else:
            ready[index] = found
    return ready, reasons


def measurable(tensor: torch.Tensor) -> torch.Tensor | str:
    """Returns a tensor as `norms` takes it, or why that is not possible.

    Call it inside `isolated`.

    Args:
        tensor: A parameter, buffer or gradient of any kind.

    Returns:
        Real, strided, with at least one element; or a `Reason` code.
    """
    if type(tensor) not in _PLAIN:
        if is_lazy(tensor):
            return Reason.UNINITIALISED.value
        admitted = admit(tensor, COMPLEX)
        if isinstance(admitted, Absent):
            return admitted.reason
        tensor = admitted[0]
    if tensor.is_nested:
        return Reason.UNSUPPORTED_LAYOUT.with_detail("nested")
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
    return tensor if tensor.dtype in _REAL else tensor.float()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor; no collective (hot path)."""
    if type(tensor) in _PLAIN:
        return tensor
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def local_numel(tensor: torch.Tensor) -> int:
    """Returns how many elements this rank has of a tensor; 0 for one that waits for its shape (hot path)."""
    return 0 if is_lazy(tensor) else local_part(tensor).numel()


def is_freed(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory was given back, so that reading it would end the process (hot path).

    Sharding does that to gathered parameters.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0 and not tensor.is_meta


def is_distributed(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor knows on which ranks it lies, as a `DTensor` does (hot path)."""
    return type(tensor) not in _PLAIN and getattr(tensor, "to_local", None) is not None


def scope_of(tensor: torch.Tensor) -> Scope:
    """Returns what part of a tensor this rank sees (hot path)."""
    if not is_distributed(tensor):
        return Scope.LOCAL_SHARD if is_flattened(tensor) else Scope.LOCAL
    placements: Sequence[Any] = getattr(tensor, "placements", ())
    is_whole = bool(placements) and all(placement.is_replicate() for placement in placements)
    return Scope.LOCAL if is_whole else Scope.LOCAL_SHARD


def scope_of_all(tensors: Iterable[torch.Tensor]) -> Scope:
    """Returns what one number over several tensors covers; unknown where they are not alike."""
    scopes = {scope_of(tensor) for tensor in tensors}
    return scopes.pop() if len(scopes) == 1 else Scope.UNKNOWN if scopes else Scope.LOCAL


def norms(tensors: Sequence[torch.Tensor]) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Returns the L2 norms of tensors on their devices, in flat tensors of several (hot path).

    Call it inside `isolated`. Of devices nothing is read.

    Args:
        tensors: As `measurable` returns them.

    Returns:
        Positions, and their norms.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        key = tensor.device, tensor.dtype
        if key in alike:
            alike[key].append(position)
        else:
            alike[key] = [position]
    return [
        (positions, _norms([tensors[position] for position in positions], device, dtype))
        for (device, dtype), positions in alike.items()
    ]


def _norms(tensors: list[torch.Tensor], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns the norms of tensors of one device and dtype."""
    if device.type == "cpu":
        return _norms_on_host(tensors)
    if dtype is not torch.float64 and device.type not in _WITHOUT_FLOAT64:
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))  # noqa: SLF001 - as torch's own clipping
    # Squares may leave the range here: the largest magnitude tells zero and nonfinite apart all the same.
    is_wide = dtype in {torch.float32, torch.float64}
    wide = tensors if is_wide else [tensor.float() for tensor in tensors]
    squared = torch.stack(torch._foreach_norm(wide, 2))  # noqa: SLF001 - as above
    largest = torch.stack(torch._foreach_norm(wide, math.inf))  # noqa: SLF001 - as above
    return torch.where((squared > 0) & torch.isfinite(squared), squared, largest)


def norms_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the L2 norms of the rows of a tensor in the host's memory, in float64 (hot path).

    Args:
        rows: As `measurable` returns them, together.
    """
    flat, dtype = rows.view(len(rows), -1), rows.dtype
    found = torch.linalg.vector_norm(flat, dim=1, dtype=_of_squares(dtype)).double()
    if _is_in_range(found, dtype).all():
        return found
    if dtype is torch.float64:
        return torch.tensor([_exact(row) for row in flat], dtype=torch.float64)
    return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)


def _norms_on_host(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the same of tensors of one dtype, where a look waits for nothing: small ones together."""
    alike: dict[torch.Size, list[int]] = {}
    for position, tensor in enumerate(tensors):
        alike.setdefault(tensor.shape, []).append(position)
    order: list[int] = []
    parts: list[torch.Tensor] = []
    apart: list[int] = []
    for shape, positions in alike.items():
        num_entries = shape.numel()
        if num_entries > SMALL_ENTRIES or len(positions) < FEW_ALIKE:
            apart += positions
            continue
        # A copy of a small tensor takes less time than an operation of its own.
        num_together = max(1, SCRATCH_ENTRIES // num_entries)
        for start in range(0, len(positions), num_together):
            together = [tensors[position] for position in positions[start : start + num_together]]
            parts.append(norms_of_rows(torch.stack(together)))
        order += positions
    if apart:
        parts.append(_norms_apart([tensors[position] for position in apart]))
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    if len(alike) == 1:
        return found
    in_order = torch.empty_like(found)
    in_order[torch.tensor(order + apart)] = found
    return in_order


def _norms_apart(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the same, of one tensor at a time."""
    dtype = tensors[0].dtype
    found = _added_up(tensors, _of_squares(dtype))
    in_range = _is_in_range(found, dtype)
    if in_range.all():
        return found
    doubtful: list[int] = torch.logical_not(in_range).nonzero().view(-1).tolist()
    again = [tensors[position] for position in doubtful]
    if dtype is torch.float64:
        found[doubtful] = torch.tensor([_exact(tensor) for tensor in again], dtype=torch.float64)
    else:
        found[doubtful] = _added_up(again, torch.float64)
    return found


def _of_squares(dtype: torch.dtype) -> torch.dtype | None:
    """Returns the dtype that squares are added up in; None for that of the tensor."""
    return None if dtype in {torch.float64, torch.float32} else torch.float32


def _is_in_range(found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns of which norms no square has left the range of what they were added up in."""
    low, high = _RANGE_OF_FLOAT64 if dtype is torch.float64 else _RANGE_OF_FLOAT32
    return (found >= low) & (found <= high)


def _added_up(tensors: list[torch.Tensor], in_dtype: torch.dtype | None) -> torch.Tensor:
    """Returns norms whose squares are added up in a dtype, those of large tensors piece by piece."""
    if max([tensor.numel() for tensor in tensors]) <= _PIECE:
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=in_dtype)).double()  # noqa: SLF001 - as above
    pieces: list[torch.Tensor] = []
    owners: list[int] = []
    for position, tensor in enumerate(tensors):
        # A tensor that is not contiguous would be copied as a whole by being flattened.
        own = tensor.view(-1).split(_PIECE) if tensor.is_contiguous() else tensor.unbind(0)
        pieces.extend(own)
        owners.extend([position] * len(own))
    found = torch._foreach_norm(pieces, 2, dtype=in_dtype)  # noqa: SLF001 - as above
    squares = torch.stack(found).double().square_()
    totals = torch.zeros(len(tensors), dtype=torch.float64)
    return totals.index_add_(0, torch.tensor(owners), squares).sqrt_()


def _exact(tensor: torch.Tensor) -> float:
    """Returns the norm of float64 whose squares leave its range; then it is the largest magnitude."""
    low, high = torch.aminmax(tensor)
    largest = math.nan if torch.isnan(low) else max(abs(float(low)), abs(float(high)))
    if largest == 0 or not math.isfinite(largest):
        return largest
    norm = float(torch.linalg.vector_norm(tensor / largest)) * largest
    return norm if 0 < norm < math.inf else largest
