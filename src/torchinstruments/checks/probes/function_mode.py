"""What functions return, seen by a mode of torch's while a watched forward runs.

The mode is on for the forward alone, and off around what it would change: compiled code, which would be
compiled anew for it, and modules that torch runs fused only where no such mode is on.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from typing_extensions import override

from torchinstruments.observe.compiled import CompiledParts
from torchinstruments.observe.slots import CallSlot
from torchinstruments.ranks.tracing import runs_for_a_compiler

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["FunctionWatch", "PauseSlot", "may_run_fused", "pause_slots"]

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class _Receiver(Protocol):
    """Who is told of calls."""

    def called(self, function: object, result: object) -> None:
        """Takes what a function returned; it never raises (training thread, hot path)."""
        ...

    def paused(self, module: nn.Module, *, is_compiled: bool) -> None:
        """Takes that nothing inside a call of a module is seen (training thread, hot path)."""
        ...


class FunctionWatch(TorchFunctionMode):
    """Tells of every call of a torch function, which it leaves as it is.

    Args:
        receiver: Told of them.
    """

    def __init__(self, receiver: _Receiver) -> None:
        super().__init__()
        self._receiver = receiver

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a call and tells of its result (training thread, hot path)."""
        result = self._pass_on(func, args, kwargs or {})
        if not (torch.compiler.is_dynamo_compiling() or runs_for_a_compiler()):
            self._receiver.called(func, result)
        return result

    def _pass_on(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Makes the program's own call, and does nothing else."""
        return func(*args, **kwargs)

    @property
    def is_on(self) -> bool:
        """Whether it is on in this thread."""
        return any(mode is self for mode in _get_current_function_mode_stack())

    def switch_on(self) -> None:
        """Puts it over the other modes of this thread (training thread, hot path)."""
        if not self.is_on:
            _push_mode(self)

    def switch_off(self) -> None:
        """Takes it out, and leaves those of the program's that came later (training thread, hot path)."""
        if not self.is_on:
            return
        above: list[Any] = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)


class PauseSlot(CallSlot):
    """Has a function watch off while a module is called.

    Args:
        module: The module.
        watch: Switched off.
        receiver: Told of it.
        is_compiled: Whether compiled code begins here; else it is off where torch may run the module fused.
    """

    __slots__ = ("_is_compiled", "_receiver", "_watch")

    def __init__(
        self, module: nn.Module, watch: FunctionWatch, receiver: _Receiver, *, is_compiled: bool
    ) -> None:
        super().__init__(module)
        self._watch = watch
        self._receiver = receiver
        self._is_compiled = is_compiled

    @override
    def run(
        self, module: nn.Module, caller: "FrameType | None", args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a call of the module (training thread, hot path)."""
        if self.is_removed or not self._watch.is_on or not (self._is_compiled or may_run_fused(module)):
            return self._run_below(module, caller, args, kwargs)
        self._receiver.paused(module, is_compiled=self._is_compiled)
        self._watch.switch_off()
        try:
            return self._run_below(module, caller, args, kwargs)
        finally:
            self._watch.switch_on()


def pause_slots(
    root: nn.Module, parts: CompiledParts, watch: FunctionWatch, receiver: _Receiver
) -> list[PauseSlot]:
    """Returns the slots, not installed yet, around everything that the watch must not be on in.

    Args:
        root: The model.
        parts: What is compiled of it.
        watch: The watch.
        receiver: Told where it is off.
    """
    slots = []
    for module in root.modules():
        is_boundary = id(module) in parts.around or id(module) in parts.in_place
        is_inside = id(module) in parts.inside and not is_boundary
        if isinstance(module, torch.jit.ScriptModule) or is_inside:
            continue
        if is_boundary or isinstance(module, _FUSED):
            slots.append(PauseSlot(module, watch, receiver, is_compiled=is_boundary))
    return slots


def may_run_fused(module: nn.Module) -> bool:
    """Returns whether torch may run a call fused: in evaluation, where no gradient is recorded (hot path)."""
    if module.training or not isinstance(module, _FUSED):
        return False
    return not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()))
