"""A context in which telemetry computes without leaving a trace in the program around it.

Inside a user's forward, gradients may be recorded, autocast may change dtypes, and dispatch or function modes
may count, cache or rewrite every operation: selective activation checkpointing, for one, would take a result
of ours for one of the model's. All of that is off inside this context and back as it was behind it. What is
off already costs no more than a look, so that the context can be entered in every hook.
"""

from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from types import TracebackType

import torch
from torch._C import (
    DisableTorchFunction,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
    _set_grad_enabled,
)
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["isolated"]


class isolated(AbstractContextManager[None]):  # noqa: N801 - reads as the verb it is, like torch.no_grad
    """Turns gradient recording, autocast and all modes off (training thread, hot path).

    Args:
        device: A tensor or its device type: autocast is turned off for this one and for the CPU.
    """

    __slots__ = ("_autocast", "_device_types", "_grad_enabled", "_modes")

    def __init__(self, device: torch.Tensor | str) -> None:
        self._device_types = _with_autocast(device if isinstance(device, str) else device.device.type)
        self._autocast: tuple[str, ...] = ()
        self._grad_enabled = False
        self._modes: ExitStack | None = None

    def __enter__(self) -> None:
        """Turns off what is on."""
        if (
            _len_torch_dispatch_stack()
            or _len_torch_dispatch_stack_pre_dispatch()
            or _is_torch_function_mode_enabled()
        ):
            with ExitStack() as modes:
                modes.enter_context(DisableTorchFunction())
                modes.enter_context(_disable_current_modes())
                self._modes = modes.pop_all()
        self._grad_enabled = torch.is_grad_enabled()
        if self._grad_enabled:
            _set_grad_enabled(False)  # noqa: FBT003
        self._autocast = tuple([kind for kind in self._device_types if torch.is_autocast_enabled(kind)])
        for kind in self._autocast:
            torch.set_autocast_enabled(kind, False)  # noqa: FBT003

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Puts back what was on."""
        for device_type in self._autocast:
            torch.set_autocast_enabled(device_type, True)  # noqa: FBT003
        if self._grad_enabled:
            _set_grad_enabled(True)  # noqa: FBT003
        if self._modes is not None:
            self._modes.close()


@lru_cache(maxsize=16)
def _with_autocast(device_type: str) -> tuple[str, ...]:
    """Returns those of the CPU and a device type that know autocast."""
    known = []
    for kind in dict.fromkeys(("cpu", device_type)):
        try:
            torch.is_autocast_enabled(kind)
        except RuntimeError:  # torch's answer for a device type without autocast, such as meta
            continue
        known.append(kind)
    return tuple(known)
