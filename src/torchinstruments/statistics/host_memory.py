"""The memory of a CPU tensor as a NumPy array, without a mark on the tensor.

``Tensor.numpy()`` has torch refuse for ever to resize the tensor's storage, and so does all that ends in
it, `numpy.asarray` of a tensor for one. The program may have to: FSDP frees a gathered parameter by a
storage of no bytes, and gathers it into the same one again. Here NumPy is given the address instead, and
holds the tensor for as long as any view of the array is held.
"""

import ctypes
import sys
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchinstruments.statistics.moments import Array

__all__ = ["NUMPY_DTYPES", "as_array", "as_bytes", "as_words"]

NUMPY_DTYPES = MappingProxyType(
    {
        torch.bool: np.dtype(np.bool_),
        torch.uint8: np.dtype(np.uint8),
        torch.uint16: np.dtype(np.uint16),
        torch.uint32: np.dtype(np.uint32),
        torch.uint64: np.dtype(np.uint64),
        torch.int8: np.dtype(np.int8),
        torch.int16: np.dtype(np.int16),
        torch.int32: np.dtype(np.int32),
        torch.int64: np.dtype(np.int64),
        torch.float16: np.dtype(np.float16),
        torch.float32: np.dtype(np.float32),
        torch.float64: np.dtype(np.float64),
    }
)
"""Dtypes that NumPy knows too."""


# A type for each size would be made, and collected, for each tensor.
class _Memory(ctypes.Array[ctypes.c_ubyte]):
    """All that lies behind an address; an array of it reads no further than its own shape."""

    _type_ = ctypes.c_ubyte
    _length_ = sys.maxsize
    __slots__ = ("tensor",)


def as_array(tensor: torch.Tensor, bits: npt.DTypeLike | None = None) -> Array:
    """Returns a tensor's memory as an array that is to be read only (training thread, hot path).

    It shows whatever the tensor holds while it is read. A tensor that is lazily negated is copied.

    Args:
        tensor: Plain and strided, on the CPU, with memory behind all of its entries.
        bits: As what its entries are read, of their size; for dtypes that NumPy does not know.

    Returns:
        Flat if the tensor is contiguous, which costs least, else of the tensor's shape.

    Raises:
        ValueError: The tensor lies elsewhere, or its memory was freed.
        KeyError: NumPy does not know its dtype, and ``bits`` was not given.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    memory = _memory_of(tensor)
    dtype = NUMPY_DTYPES[tensor.dtype] if bits is None else np.dtype(bits)
    if tensor.is_contiguous():
        return np.frombuffer(memory, dtype, tensor.numel())
    width = dtype.itemsize
    strides = tuple([stride * width for stride in tensor.stride()])
    # Of a plain tuple it is made in half the time.
    return np.ndarray(tuple(tensor.shape), dtype, memory, 0, strides)


def as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Returns a tensor's memory as bytes that are to be read only (training thread, hot path).

    Args:
        tensor: As for `as_array`, contiguous, of any dtype, with no negation or conjugation to be applied.

    Raises:
        ValueError: The tensor lies elsewhere, or its memory was freed.
    """
    return np.frombuffer(_memory_of(tensor), np.uint8, tensor.nbytes)


def as_words(tensor: torch.Tensor, num_words: int) -> npt.NDArray[np.uint64]:
    """Returns the same memory as words of 8 bytes, as many as are asked for (training thread, hot path).

    Args:
        tensor: As for `as_bytes`.
        num_words: No more than it has. They need not be aligned.
    """
    return np.frombuffer(_memory_of(tensor), np.uint64, num_words)


def _memory_of(tensor: torch.Tensor) -> Any:
    """Returns what lies behind the address of a tensor, and holds the tensor."""
    if not tensor.is_cpu:
        raise ValueError(f"a tensor on {tensor.device} has no memory that the host reads")
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() != 0:
        raise ValueError("the memory of the tensor was freed")
    # NumPy's annotations know no ctypes array for the buffer that it is.
    memory: Any = _Memory.from_address(address)
    memory.tensor = tensor
    return memory
