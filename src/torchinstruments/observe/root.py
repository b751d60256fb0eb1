"""Where the calls of the attached model are seen: by two hooks on it, or by the slot of its call.

The slot stands for hooks where those would change the call, or would be compiled: on a module that torch may
run fused, and on one that was compiled in place.

A model that is compiled after it was attached takes its hooks into the compiled code, where they do nothing.
They tell of being traced, and from the next call on the model is seen where its wrapper is called, if that is
a wrapper of this model and of nothing else. The hooks inside stay as they are: to remove them would have the
code compiled anew, and an uncompiled call of the model is still seen by them.

A model that is compiled in place once more loses its slot, and no call tells. So where there is a slot, each
step of an optimizer looks whether it is there.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from torchinstruments.observe.compiled import outermost_call
from torchinstruments.observe.fused import may_be_fused
from torchinstruments.observe.hooks import RootPostHook, RootPreHook, move_to_end, root_pre_hook, take_out
from torchinstruments.observe.slots import RootSlot, is_slot_free
from torchinstruments.observe.stack import callers
from torchinstruments.observe.wrappers import is_compiled_in_place
from torchinstruments.ranks.step_hooks import StepHooks

__all__ = ["RootWatch", "StepLook"]


class _RootObserver(Protocol):
    """Who sees the calls of the attached model."""

    num_too_deep: int
    raised: int

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


class StepLook:
    """Has something looked at behind each step of any optimizer, once there is something to look at.

    Args:
        look: What looks; held weakly, for the hooks of optimizers are global. It never raises.
        is_needed: Returns whether there is; held weakly too.
    """

    def __init__(self, look: Callable[[], None], is_needed: Callable[[], bool]) -> None:
        self._look = weakref.WeakMethod(look)
        self._is_needed = weakref.WeakMethod(is_needed)
        self._hooks = StepHooks(None, self._step_ended)

    def attach(self) -> None:
        """Begins to look where that is needed (training or compiling thread). Idempotent."""
        is_needed = self._is_needed()
        if is_needed is not None and is_needed():
            self._hooks.attach()

    def detach(self) -> None:
        """Leaves no trace. Idempotent (any thread)."""
        self._hooks.detach()

    def _step_ended(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """Takes that a step is over (training or autograd thread, hot path)."""
        look = self._look()
        if look is not None:
            look()


class RootWatch:
    """The permanent hooks and slots of one observer.

    Args:
        model: The attached model; held weakly.
        takes_input: Whether keyword arguments are told too.
        sees_ends: Whether ends of calls are told of modules with hooks; a slot tells them in any case.
    """

    def __init__(self, model: nn.Module, *, takes_input: bool, sees_ends: bool = True) -> None:
        self._model = weakref.ref(model)
        self._outer = self._model
        self._takes_input = takes_input
        self._sees_ends = sees_ends
        self._hooks: list[tuple[weakref.ref[nn.Module], RootPreHook, RootPostHook]] = []
        self._slots: list[RootSlot] = []

    @property
    def model(self) -> nn.Module | None:
        """The outermost module that is watched: the attached model, or a wrapper that it was followed to."""
        outer = self._outer()
        return self._model() if outer is None else outer

    def has_slots(self) -> bool:
        """Returns whether there is a slot that could be displaced (any thread)."""
        return bool(self._slots)

    def attach(self, module: nn.Module, observer: _RootObserver) -> None:
        """Has the calls of a module seen (training thread, at attach, or compiling thread).

        Args:
            module: The attached model, or a wrapper around it.
            observer: Told of them; the module keeps it alive.
        """
        if is_compiled_in_place(module) or (may_be_fused(module) and is_slot_free(module)):
            slot = RootSlot(module, observer)
            # Noted before it is placed, so that an interrupt leaves nothing that is not known.
            self._slots.append(slot)
            slot.install()
            return
        pre_hook, post_hook = root_pre_hook(observer, module), RootPostHook(observer, module)
        self._hooks.append((weakref.ref(module), pre_hook, post_hook))
        # First of the pre-hooks and last of the hooks: what the model returns is what is measured.
        module.register_forward_pre_hook(pre_hook, prepend=True, with_kwargs=self._takes_input)
        if self._sees_ends:
            module.register_forward_hook(post_hook, always_call=True)

    def follow(self, observer: _RootObserver) -> nn.Module | None:
        """Has the model seen where it is called, while it is traced there (compiling thread).

        Args:
            observer: Told of the calls.

        Returns:
            What is watched from the next call on; None where nothing outside of the compiled code is a
            wrapper of the model.
        """
        model = self._model()
        found = None if model is None else outermost_call(model)
        if found is None or (found is model and not is_compiled_in_place(found)):
            return None
        self.put_back()
        if not self._watches(found):
            self.attach(found, observer)
            self._outer = weakref.ref(found)
        return found

    def is_inside_another(self, module: nn.Module) -> bool:
        """Returns whether a call of a watched module is part of one of another: of its wrapper (hot path).

        Args:
            module: What is called.
        """
        if len(self._hooks) + len(self._slots) < 2:
            return False
        frame = sys._getframe(1)  # noqa: SLF001 - nothing else tells
        return any(called is not module and self._watches(called) for called in callers(frame))

    def put_back(self) -> bool:
        """Puts slots over what has taken their places (training thread, hot path of optimizer steps).

        ``Module.compile()`` does not know that the slot of a module is taken, and overwrites it.

        Returns:
            Whether there were any.
        """
        displaced = [slot for slot in self._slots if slot.is_displaced()]
        for slot in displaced:
            slot.install()
        return bool(displaced)

    def is_displaced(self) -> bool:
        """Returns whether calls of the model are not seen, since something has taken a slot's place."""
        return any(slot.is_displaced() for slot in self._slots)

    def put_last(self, module: nn.Module) -> None:
        """Puts the hook of a module behind those of tools that came later (training thread, hot path)."""
        for watched, _, post_hook in self._hooks:
            if watched() is module:
                move_to_end(module, post_hook)

    def remove(self, *, but_ends: bool = False) -> None:
        """Takes everything out again (any thread). Idempotent, and can be called again after an interrupt.

        Args:
            but_ends: Whether to leave the hooks that see the end of a call, for one that runs.
        """
        for watched, pre_hook, post_hook in self._hooks:
            module = watched()
            if module is not None:
                take_out(module, pre_hook)
                if not but_ends:
                    take_out(module, post_hook)
        for slot in self._slots:
            slot.remove()

    def _watches(self, module: nn.Module) -> bool:
        """Returns whether calls of a module are seen already, outside of compiled code."""
        if is_compiled_in_place(module):
            return any(slot.is_met_in(module) for slot in self._slots)
        return any(watched() is module for watched, _, _ in self._hooks)
