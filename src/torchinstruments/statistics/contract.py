"""What a reducer is: the one seam of this room that users implement.

A reducer is any callable from a tensor to named scalars. It may know its metric names beforehand (an
attribute ``metrics``), which lets them be announced in ``run.json`` and lets a failure say which values it
cost. A reducer that computes on an accelerator may also hand over one packed tensor instead of separate
scalars (`PackedReducer`), with the function that turns the packed numbers into named values once they
have reached the host. That is how the exact profile keeps its reason codes without a single host read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeGuard

import torch

from torchinstruments.records import Absent, storable

__all__ = ["Packed", "PackedReducer", "Reducer", "Scalar", "as_packed", "known_metrics", "reducer_name"]

Scalar: TypeAlias = bool | int | float | torch.Tensor | Absent
"""One value of a reducer. A tensor has one element; an `Absent` says why there is no value."""


class Reducer(Protocol):
    """A callable from a tensor to named scalars.

    It is given a detached plain tensor of its own, a copy, under ``no_grad`` and without autocast. Torch's
    random state and default dtype are put back behind it; Python's and NumPy's random state, and every
    process group, it must leave alone. On an accelerator it should return tensors of one element and read
    nothing on the host: reading makes training wait.

    An attribute ``metrics``, a sequence of names, is optional: the names that every call returns.
    """

    def __call__(self, tensor: torch.Tensor, /) -> Mapping[str, Scalar]:
        """Returns scalars by metric name (training thread, hot path)."""
        ...


@dataclass(frozen=True, slots=True)
class Packed:
    """Scalars of one tensor that are still on their device.

    Attributes:
        scalars: One-dimensional, float64 or (where the device has none) float32.
        finish: Turns the numbers of ``scalars``, read on the host, into named values. It runs on the writer
            thread and must not touch the device.
    """

    scalars: torch.Tensor
    finish: Callable[[Sequence[float]], Mapping[str, float | Absent]]


class PackedReducer(Protocol):
    """A reducer that leaves its result on the device in one tensor."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names that every call returns."""
        ...

    def __call__(self, tensor: torch.Tensor, /) -> Mapping[str, Scalar]:
        """Returns scalars by metric name."""
        ...

    def pack(self, tensor: torch.Tensor, /) -> Packed:
        """Starts the work on the device and returns without a host read (training thread, hot path)."""
        ...


def as_packed(reducer: Reducer) -> TypeGuard[PackedReducer]:
    """Returns whether the reducer can leave its result on the device."""
    return callable(getattr(reducer, "pack", None))


def known_metrics(reducer: Reducer) -> tuple[str, ...]:
    """Returns the metric names that the reducer declares in ``metrics``; empty where it declares none."""
    declared = getattr(reducer, "metrics", ())
    if isinstance(declared, str) or not isinstance(declared, Sequence):
        return ()
    return tuple([storable(name) for name in declared if isinstance(name, str)])


def reducer_name(reducer: Reducer) -> str:
    """Returns a name for the reducer: that of the function, else of its class."""
    name = getattr(reducer, "__name__", None)
    return storable(name) if isinstance(name, str) and name else type(reducer).__name__
