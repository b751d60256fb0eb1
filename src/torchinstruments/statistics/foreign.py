"""Code of the program's own, a reducer or a sampler, called so that nothing of it stays behind.

It may draw random numbers, change modes and write into what it is given, on purpose or through a library that
it uses. Training would then be another than without it. Torch's random state, gradient mode and default dtype
are put back behind such a call, and a reducer is given a copy. The random states of Python and NumPy are not
kept: to look at them costs more than most reducers.
"""

import ctypes
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch._C import _set_grad_enabled

__all__ = ["foreign_code", "own_copy"]


class foreign_code(AbstractContextManager[None]):  # noqa: N801 - reads as what it surrounds
    """Puts back torch's random state, gradient mode and default dtype (training thread, hot path).

    The host's random state is looked at, and that of one device; no device is waited for. A state that is
    the same afterwards is not written, so that other threads that draw meanwhile are left alone.

    Args:
        device: Whose random state is kept too.
    """

    __slots__ = ("_dtype", "_generators", "_grad_enabled")

    def __init__(self, device: torch.device | None = None) -> None:
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._grad_enabled = torch.is_grad_enabled()
        self._dtype = torch.get_default_dtype()
        for generator in (torch.default_generator, None if device is None else _generator_of(device)):
            if generator is not None:
                self._generators.append((generator, generator.get_state()))

    def __enter__(self) -> None:
        """Does nothing more."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Puts back what was changed."""
        if torch.is_grad_enabled() is not self._grad_enabled:
            _set_grad_enabled(self._grad_enabled)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        for generator, state in self._generators:
            if _bytes_of(generator.get_state()) != _bytes_of(state):
                generator.set_state(state)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that shares no memory with the tensor (training thread, hot path).

    What an expanded tensor repeats is copied once and expanded again.

    Args:
        tensor: Detached, plain and strided.
    """
    sizes = tensor.shape
    distinct = tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and sizes[dimension] > 1:
            distinct = distinct.narrow(dimension, 0, 1)
    copy = distinct.clone()
    return copy if distinct is tensor else copy.expand(sizes)


def _bytes_of(state: torch.Tensor) -> bytes:
    """Returns a random state as bytes, without an operation that a mode of the program's might see."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _generator_of(device: torch.device) -> torch.Generator | None:
    """Returns the default generator of an accelerator, where it has one by torch's convention."""
    if device.type == "cpu":
        return None
    generators = getattr(getattr(torch, device.type, None), "default_generators", ())
    index = 0 if device.index is None else device.index
    return generators[index] if index < len(generators) else None
