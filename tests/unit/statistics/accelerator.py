"""An accelerator that is made of CPU memory and forbids what would make a real one wait.

Its tensors say that they are on the device ``ipu``, for which torch needs no driver and has no kernels. Each
operation on them runs on the CPU memory behind them, after it was checked: nothing may be read on the host,
no shape may depend on data, and no tensor of the host may take part other than a number. Whole copies to the
host are counted; only the thread that may wait for them should make one.

Fake tensors do not see all of this: ``histc`` and ``linspace`` between tensors, copies in both directions,
``quantile`` and ``kthvalue`` run on them without a word.
"""

from typing import Any, Self

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

DEVICE = torch.device("ipu")

WAITING_OPERATIONS = frozenset(
    {
        "_index_put_impl_",
        "_local_scalar_dense",
        "_unique2",
        "allclose",
        "bincount",
        "equal",
        "histc",
        "histogram",
        "index",
        "index_put",
        "index_put_",
        "is_nonzero",
        "item",
        "kthvalue",
        "lift_fresh",
        "linspace",
        "logspace",
        "masked_scatter",
        "masked_scatter_",
        "masked_select",
        "mode",
        "median",
        "nonzero",
        "quantile",
        "nanmedian",
        "nanquantile",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operations that read from the device, or copy to it, before they return."""


def operation_name(operation: Any) -> str:
    """Returns the name of an operation without its namespace and overload."""
    return operation._schema.name.split("::")[1]


class AcceleratorTensor(torch.Tensor):
    """A tensor on the pretended device."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> Self:
        """Makes a tensor with the shape and strides of its memory."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=DEVICE,
        )

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    @classmethod
    @override
    def __torch_dispatch__(  # pyrefly: ignore
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation on the memory behind its tensors."""
        return run_on_memory(func, args, kwargs or {})


class Accelerator(TorchDispatchMode):
    """While it is active, new tensors can be made on the pretended device.

    Attributes:
        num_host_copies: Copies to the host since the last one was entered; also those that are made where
            modes are disabled.
    """

    num_host_copies = 0

    @override
    def __enter__(self) -> Self:
        """Counts from zero."""
        Accelerator.num_host_copies = 0
        super().__enter__()
        return self

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation on the memory behind its tensors."""
        return run_on_memory(func, args, kwargs or {})


def run_on_memory(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs one operation after it was checked, and wraps what stays on the device."""
    name = operation_name(operation)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    is_there = any(isinstance(tensor, AcceleratorTensor) for tensor in tensors)
    target = kwargs.get("device")
    stays = is_there if target is None else torch.device(target).type == DEVICE.type
    if is_there or stays:
        assert name not in WAITING_OPERATIONS, f"{name} makes the training thread wait for the device"
        is_copied_out = name == "copy_" and not isinstance(args[0], AcceleratorTensor)
        assert not is_copied_out or args[2:] == (True,), "copy_ makes its thread wait for the device"
        strangers = [
            tensor for tensor in tensors if not isinstance(tensor, AcceleratorTensor) and tensor.ndim
        ]
        assert not strangers or is_copied_out, f"{name} mixes tensors of the host and of the device"
        is_to_host = not stays or is_copied_out
        Accelerator.num_host_copies += is_to_host
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}

    def on_memory(leaf: Any) -> Any:
        return leaf.memory if isinstance(leaf, AcceleratorTensor) else leaf

    def on_device(leaf: Any) -> Any:
        return AcceleratorTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = pytree.tree_map(on_memory, (args, kwargs))
    result = operation(*args, **kwargs)
    return pytree.tree_map(on_device, result) if stays else result


def put(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the pretended device with these entries."""
    return AcceleratorTensor(tensor)
