"""Calls of a module that are seen without a hook.

The slot that ``Module.compile()`` uses for what a call of a module runs is empty in a module that is not
compiled. What is put there runs around the whole call, the module's hooks included, and nothing that asks a
module for its hooks finds it. It costs a dictionary entry, changes nothing of the call, and is left behind by
copies and pickles. In a module that was compiled in place it stands over the compiled call, and so outside of
compiled code, where the module's own hooks are inside.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from typing_extensions import override

from torchinstruments.observe.stack import count_as_call, is_copy
from torchinstruments.ranks.tracing import runs_for_a_compiler

if TYPE_CHECKING:
    from types import FrameType

    from torchinstruments.observe.fused import FusedRegion
    from torchinstruments.observe.selection import Layer

__all__ = ["CallSlot", "LayerSlot", "RegionSlot", "RootSlot", "is_slot_free"]

_SLOT = "_compiled_call_impl"
_WRAPPED_CALL = nn.Module._wrapped_call_impl.__code__  # noqa: SLF001 - what ``Module.__call__`` is


class _RootObserver(Protocol):
    """Who sees the calls of the attached model."""

    def root_started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the begin of a call (training thread, hot path)."""
        ...

    def root_ended(self, module: nn.Module, output: object) -> None:
        """Takes the end of a call (training thread, hot path)."""
        ...

    def root_exported(self) -> None:
        """Takes that ``torch.export`` traces a call; it never raises (exporting thread)."""
        ...

    def root_compiled(self) -> None:
        """Takes that ``torch.compile`` traces a call; it never raises (compiling thread)."""
        ...


class _LayerObserver(Protocol):
    """Who measures the inputs and outputs of layers during one forward."""

    def receive(self, layer: "Layer", args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the arguments of a call; it never raises (training thread, hot path)."""
        ...

    def observe(self, layer: "Layer", output: object) -> None:
        """Takes an output; it never raises (training thread, hot path)."""
        ...

    def num_calls(self, region: "FusedRegion") -> int:
        """Returns how many calls were seen inside a region so far (training thread, hot path)."""
        ...

    def region_ended(self, region: "FusedRegion", num_calls_before: int) -> None:
        """Takes the end of a region's call; it never raises (training thread, hot path)."""
        ...


class CallSlot:
    """Stands in the slot of one module and runs its calls as they would run.

    Several may stand over each other, in any order of leaving.

    Args:
        module: Held weakly.
    """

    __slots__ = ("_module", "_previous", "is_removed")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._previous: CallSlot | Callable[..., Any] | None = None
        self.is_removed = True
        """Whether it does nothing now."""

    def install(self) -> bool:
        """Puts it into the module; returns whether that is still there (training thread)."""
        module = self._module()
        if module is None:
            return False
        if module.__dict__.get(_SLOT) is self:
            # Another time: it must not stand over itself.
            self.is_removed = False
            return True
        self._previous = module.__dict__.get(_SLOT)
        self.is_removed = False
        module.__dict__[_SLOT] = self
        return True

    def remove(self) -> None:
        """Puts back what was there, unless something was put over it. Idempotent (any thread)."""
        self.is_removed = True
        module = self._module()
        if module is None or module.__dict__.get(_SLOT) is not self:
            return
        previous = self._below()
        if previous is None:
            module.__dict__.pop(_SLOT, None)
        else:
            module.__dict__[_SLOT] = previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the call (training thread, hot path)."""
        module = self._module()
        assert module is not None, "whoever calls a module holds it"
        if torch.compiler.is_dynamo_compiling() or runs_for_a_compiler():
            if torch.compiler.is_exporting():
                self.exported()
            else:
                self.traced()
            return module._call_impl(*args, **kwargs)  # noqa: SLF001 - what an empty slot runs
        caller: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else tells
        if caller is not None and caller.f_code is _WRAPPED_CALL:
            # A replica or a shallow copy of the module has the same entry.
            module = caller.f_locals.get("self", module)
            caller = caller.f_back
        return self.run(module, caller, args, kwargs)

    def run(
        self, module: nn.Module, caller: "FrameType | None", args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs the call of a module (training thread, hot path).

        Args:
            module: What is called.
            caller: The frame that made the call.
            args: Of the call.
            kwargs: Of the call.
        """
        return self._run_below(module, caller, args, kwargs)

    def exported(self) -> None:
        """Takes that ``torch.export`` traces a call of the module; nothing to most (exporting thread)."""

    def traced(self) -> None:
        """Takes that ``torch.compile`` traces a call of the module; nothing to most (compiling thread)."""

    def _run_below(
        self, module: nn.Module, caller: "FrameType | None", args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs what would run without this."""
        below = self._below()
        if isinstance(below, CallSlot):
            return below.run(module, caller, args, kwargs)
        if below is not None:
            return below(*args, **kwargs)
        return module._call_impl(*args, **kwargs)  # noqa: SLF001 - what an empty slot runs

    def _is_copy(self, module: nn.Module) -> bool:
        """Returns whether a module is another one with the entry of this slot's."""
        return is_copy(module, self._module())

    def _below(self) -> "CallSlot | Callable[..., Any] | None":
        """Returns what stands below it and was not removed: another of these, or a compiled call."""
        below = self._previous
        while isinstance(below, CallSlot) and below.is_removed:
            below = below._previous  # noqa: SLF001 - of the same class
        return below

    def is_met_in(self, module: nn.Module) -> bool:
        """Returns whether a call of a module meets it, first or below others of these."""
        found = module.__dict__.get(_SLOT)
        while isinstance(found, CallSlot) and found is not self:
            found = found._previous  # noqa: SLF001 - of the same class
        return found is self

    def is_displaced(self) -> bool:
        """Returns whether something was put in its place that does not run it: another compiled call."""
        module = self._module()
        return module is not None and not self.is_removed and not self.is_met_in(module)

    def compiled(self) -> Callable[..., Any] | None:
        """Returns the compiled call that it stands over, or None."""
        below = self._below()
        return below.compiled() if isinstance(below, CallSlot) else below

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class RootSlot(CallSlot):
    """Sees the calls of an attached model that must not have hooks, for as long as it is observed.

    Args:
        module: The model.
        observer: Told of its calls.
    """

    __slots__ = ("_observer",)

    def __init__(self, module: nn.Module, observer: _RootObserver) -> None:
        super().__init__(module)
        self._observer = observer

    @override
    def run(
        self, module: nn.Module, caller: "FrameType | None", args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a call of the model (training thread, hot path)."""
        if self._is_copy(module):
            return self._run_below(module, caller, args, kwargs)
        self._observer.root_started(module, args, kwargs)
        try:
            output = self._run_below(module, caller, args, kwargs)
        except BaseException:
            self._observer.root_ended(module, None)
            raise
        self._observer.root_ended(module, output)
        return output

    @override
    def exported(self) -> None:
        """Tells that ``torch.export`` traces a call of the model (exporting thread)."""
        self._observer.root_exported()

    @override
    def traced(self) -> None:
        """Tells that ``torch.compile`` traces a call of the model (compiling thread)."""
        self._observer.root_compiled()


class _SampledSlot(CallSlot):
    """A slot of one sampled forward of one thread.

    Args:
        module: Whose calls it sees.
        forward: Takes what is seen.
        thread: Whose forward it is.
    """

    __slots__ = ("_forward", "_thread")

    def __init__(self, module: nn.Module, forward: _LayerObserver, thread: int) -> None:
        super().__init__(module)
        self._forward = forward
        self._thread = thread

    def _sees(self, module: nn.Module) -> bool:
        """Returns whether a call of a module in the current thread is part of the forward."""
        return threading.get_ident() == self._thread and not self.is_removed and not self._is_copy(module)


class LayerSlot(_SampledSlot):
    """Has the input and the output of a layer measured.

    Args:
        module: The layer's, where its output is taken.
        forward: Takes both.
        thread: Whose forward it is.
        layer: Whose they are.
    """

    __slots__ = ("_layer",)

    def __init__(self, module: nn.Module, forward: _LayerObserver, thread: int, layer: "Layer") -> None:
        super().__init__(module, forward, thread)
        self._layer = layer

    @override
    def run(
        self, module: nn.Module, caller: "FrameType | None", args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a call of the layer (training thread, hot path)."""
        if self._sees(module):
            self._forward.receive(self._layer, args, kwargs)
        output = self._run_below(module, caller, args, kwargs)
        if self._sees(module):
            self._forward.observe(self._layer, output)
        return output


class RegionSlot(_SampledSlot):
    """Notices whether a call of a module ran the modules inside it, or one fused operation in their place.

    Args:
        region: The module, and the layers inside and at it.
        forward: Told of it.
        thread: Whose forward it is.
    """

    __slots__ = ("_region",)

    def __init__(self, region: "FusedRegion", forward: _LayerObserver, thread: int) -> None:
        super().__init__(region.module, forward, thread)
        self._region = region

    @override
    def run(
        self, module: nn.Module, caller: "FrameType | None", args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a call of the module (training thread, hot path)."""
        num_calls = 0
        if self._sees(module):
            num_calls = self._forward.num_calls(self._region)
            if self._region.own is not None:
                self._forward.receive(self._region.own, args, kwargs)
        output = self._run_below(module, caller, args, kwargs)
        if self._sees(module):
            self._forward.region_ended(self._region, num_calls)
            if self._region.own is not None:
                self._forward.observe(self._region.own, output)
        return output


def is_slot_free(module: nn.Module) -> bool:
    """Returns whether ``Module.compile()`` has no use for the module's slot."""
    found = module.__dict__.get(_SLOT)
    return found is None or (isinstance(found, CallSlot) and found.compiled() is None)


# Its frame has the module in a local variable of that name, as those of ``Module.__call__`` have.
count_as_call(RootSlot.run.__code__)
