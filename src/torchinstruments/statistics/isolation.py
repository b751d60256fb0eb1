"""Contexts in which telemetry computes without leaving a trace in the program around it.

Inside a user's forward, gradients may be recorded, autocast may change dtypes, and dispatch or function modes
may count, cache or rewrite every operation: selective activation checkpointing, for one, would take a result
of ours for one of the model's. All of that is off inside ``with functions_off(), isolated(...):`` and back as
it was behind it.

A ``KeyboardInterrupt`` may come between any two instructions of Python, the first of an ``__exit__`` not
excepted, and gradients that stay off would spoil the training after it. So the way out is a call of torch's
own, written in C++, and so is each of these contexts' ``__exit__``.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch._C import (
    DisableTorchFunction,
    DispatchKey,
    _dispatch_tls_is_dispatch_key_included,
    _dispatch_tls_set_dispatch_key_excluded,
    _InferenceMode,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
    _set_grad_enabled,
)

__all__ = ["functions_off", "isolated", "unintercepted"]

unintercepted = DisableTorchFunction
"""A context for questions to a tensor, its device or whether it is a leaf, and for placing hooks.

Function modes and ``__torch_function__`` of subclasses see each of these, and a program of the user's that
counts or refuses some of them would notice the observer. Nothing is computed inside it, and no code of the
user's is run.
"""

_NOTHING = nullcontext()
_OF_DISPATCH_MODES = (DispatchKey.Python, DispatchKey.PreDispatch, DispatchKey.PythonTLSSnapshot)


def functions_off() -> AbstractContextManager[object]:
    """Returns a context that turns function modes off, where there are any (training thread, hot path)."""
    return DisableTorchFunction() if _is_torch_function_mode_enabled() else _NOTHING


class isolated(_InferenceMode):  # noqa: N801 - reads as the verb it is, like torch.no_grad
    """Turns gradient recording, autocast and dispatch modes off (training thread, hot path).

    That of inference is as it was; but its guard, unlike that of ``torch.no_grad``, brings back on its way
    out all that the thread had on, in one call that nothing can interrupt.

    Args:
        device: A tensor or its device type: autocast is turned off for this one and for the CPU.
    """

    def __init__(self, device: torch.Tensor | str) -> None:
        device_types = _with_autocast(device if isinstance(device, str) else _type_of(device))
        is_inference = torch.is_inference_mode_enabled()
        try:
            # The guard holds from here on, and not from ``__enter__``.
            super().__init__(is_inference)
            _set_grad_enabled(False)  # noqa: FBT003
            for kind in device_types:
                if torch.is_autocast_enabled(kind):
                    torch.set_autocast_enabled(kind, False)  # noqa: FBT003
            if _len_torch_dispatch_stack() or _dispatch_tls_is_dispatch_key_included(DispatchKey.PreDispatch):
                for key in _OF_DISPATCH_MODES:
                    _dispatch_tls_set_dispatch_key_excluded(key, True)  # noqa: FBT003
        except BaseException:
            # It ends with the guard, which must not live on in the traceback.
            del self
            raise


def _type_of(tensor: torch.Tensor) -> str:
    """Returns the type of a tensor's device; a subclass is not asked, for its own code may raise."""
    if type(tensor) is torch.Tensor:
        return tensor.device.type
    with unintercepted():
        return tensor.device.type


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
