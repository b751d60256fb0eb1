"""Which tensors can be measured, as what, and why not.

A tensor is admitted as a detached plain tensor of this rank. Nothing here waits and nothing communicates: a
`DTensor` gives its local part, one that still is a partial sum is refused, and a tensor whose collective is
under way is not touched, since touching it would wait.
"""

import sys

import torch
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_dispatch_impl
from torch._C._functorch import is_functorch_wrapped_tensor

from torchinstruments.records import Absent, Reason, Scope, error_text

__all__ = ["COMPLEX", "admit", "is_readable"]

_MEASURABLE = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
"""Of these there are no statistics, but bytes."""

_BYTES = _MEASURABLE | COMPLEX
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def admit(
    tensor: torch.Tensor, further_dtypes: frozenset[torch.dtype] = frozenset()
) -> tuple[torch.Tensor, Scope] | Absent:
    """Returns what is to be measured of a tensor, and what it covers (training thread, hot path).

    Call it inside `isolated`. It shares memory with the tensor, copies nothing, and never raises.

    Args:
        tensor: Whatever a module returned or a gradient hook was given, a parameter or a buffer.
        further_dtypes: Admitted beside those that statistics are taken of.

    Returns:
        A detached, strided, plain tensor on this rank with its scope, or the reason why there is none.
    """
    try:
        return _admit(tensor, further_dtypes)
    except Exception as error:  # noqa: BLE001 - a foreign subclass may raise anything on any question
        return _refused(
            Reason.UNSUPPORTED_LAYOUT, f"{_kind(tensor)} raised {type(error).__name__}: {error_text(error)}"
        )


def is_readable(tensor: torch.Tensor) -> bool:
    """Returns whether `admit` is sure to give all of a tensor's own bytes (training thread, hot path).

    It is half of what `admit` costs, since the tensor need not be detached for as long as nothing records
    gradients. Where it says no, `admit` may still give them, and else tells why not.
    """
    return (
        type(tensor) in _PLAIN
        and not is_functorch_wrapped_tensor(tensor)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_nested
        and tensor.dtype in _BYTES
        and not tensor.is_meta
        and not tensor.is_neg()
        # The offset of nearly all tensors is 0, and then need not be asked for in bytes.
        and tensor.nbytes + ((first := tensor.storage_offset()) and first * tensor.itemsize)
        <= tensor.untyped_storage().nbytes()
    )


def _admit(
    tensor: torch.Tensor, further_dtypes: frozenset[torch.dtype]
) -> tuple[torch.Tensor, Scope] | Absent:
    """Does the work of `admit`."""
    if is_functorch_wrapped_tensor(tensor):
        return _refused(Reason.UNSUPPORTED_LAYOUT, "inside a torch.func transform")
    scope = Scope.LOCAL
    if type(tensor) not in _PLAIN:
        dtensor = _class("torch.distributed.tensor", "DTensor")
        if dtensor is not None and isinstance(tensor, dtensor):
            placements = tensor.placements
            if any(placement.is_partial() for placement in placements):
                return Absent(Reason.PARTIAL_PLACEMENT.value)
            if not all(placement.is_replicate() for placement in placements):
                scope = Scope.LOCAL_SHARD
            with torch.no_grad():
                tensor = tensor.to_local()
        if type(tensor) not in _PLAIN:
            plain = _plain(tensor)
            if isinstance(plain, Absent):
                return plain
            tensor = plain
    refusal = _unmeasurable(tensor, further_dtypes)
    if refusal is not None:
        return refusal
    local = tensor.detach()
    return (local.resolve_neg() if local.is_neg() else local), scope


def _plain(tensor: torch.Tensor) -> torch.Tensor | Absent:
    """Returns a subclass's tensor as a plain one where its memory is the tensor's own."""
    under_way = _class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if under_way is not None and isinstance(tensor, under_way):
        return Absent(Reason.ASYNC_COLLECTIVE.value)
    # Without it a mere question for the device would call the subclass's own code.
    with DisableTorchFunctionSubclass():
        if tensor.is_meta:
            return Absent(Reason.META_TENSOR.value)
        if type(tensor).__torch_dispatch__ is not _disabled_torch_dispatch_impl:
            return _refused(Reason.UNSUPPORTED_LAYOUT, _kind(tensor))
        return tensor.detach().as_subclass(torch.Tensor)


def _unmeasurable(tensor: torch.Tensor, further_dtypes: frozenset[torch.dtype]) -> Absent | None:
    """Returns why a plain tensor cannot be measured, or None."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return _refused(Reason.UNSUPPORTED_LAYOUT, layout)
    if tensor.dtype not in _MEASURABLE and tensor.dtype not in further_dtypes:
        return _refused(Reason.UNSUPPORTED_DTYPE, str(tensor.dtype).removeprefix("torch."))
    if tensor.is_meta:
        return Absent(Reason.META_TENSOR.value)
    # Sharding frees the memory of gathered parameters in this way; reading it would end the process.
    num_bytes = tensor.untyped_storage().nbytes()
    # Of nearly all tensors no more has to be asked.
    is_within = (
        tensor.is_contiguous() and tensor.storage_offset() * tensor.itemsize + tensor.nbytes <= num_bytes
    )
    if not is_within and num_bytes < _bytes_needed(tensor):
        missing = "its memory was freed" if num_bytes == 0 else "its memory is smaller than its shape"
        return _refused(Reason.UNSUPPORTED_LAYOUT, missing)
    return None


def _bytes_needed(tensor: torch.Tensor) -> int:
    """Returns how far into its storage a strided tensor reaches, in bytes."""
    num_entries = tensor.numel()
    if num_entries == 0:
        return 0
    if not tensor.is_contiguous():
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_entries = 1 + reach
    return (int(tensor.storage_offset()) + num_entries) * tensor.itemsize


def _class(module: str, name: str) -> type | None:
    """Returns a class of a module that may never have been imported; then no tensor can be one."""
    return getattr(sys.modules.get(module), name, None)


def _refused(reason: Reason, detail: str) -> Absent:
    """Returns a reason with its detail."""
    return Absent(reason.with_detail(detail))


def _kind(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor's class."""
    return type(tensor).__name__
