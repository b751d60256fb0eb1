"""One pair of torch's global step hooks for everything in this process that watches optimizers.

While an optimizer steps, torch iterates over its dictionaries of hooks. Whoever registers or removes one
meanwhile, in another thread or by a garbage collection that ends with a model, has the program's step raise
"OrderedDict mutated during iteration". So what comes and goes is a tuple that is replaced as a whole; the
pair in torch's dictionaries stays until nobody watches and no step runs. In a forked child nobody watches who
has not been attached there.
"""

import os
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import compiler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchinstruments.ranks.tracing import runs_for_a_compiler

__all__ = ["CALLER_DEPTH", "StepHooks", "StepPostHook", "StepPreHook"]

StepPreHook = Callable[
    [Optimizer, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None
]
"""Called before a step; may return other arguments for it, as a hook of torch's own."""

StepPostHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""Called behind a step."""

CALLER_DEPTH = 2
"""Where a hook finds torch's own frame of the step, for `sys._getframe`."""

_STEP_CODES = frozenset(
    one for one in Optimizer.profile_hook_step.__code__.co_consts if isinstance(one, CodeType)
)


class StepHooks:
    """The hooks of one who watches steps.

    Args:
        began: Called before each step of any optimizer, unless a compiler runs it.
        ended: Called behind it.
    """

    def __init__(self, began: StepPreHook | None, ended: StepPostHook) -> None:
        self.began = began
        self.ended = ended

    def attach(self) -> None:
        """Is called from the next step on (any thread). Idempotent."""
        _pair.add(self)

    def detach(self) -> None:
        """Is not called any more (any thread, and in a garbage collection). Idempotent."""
        _pair.discard(self)


class _Pair:
    """The hooks in torch's dictionaries, and who is called by them."""

    def __init__(self) -> None:
        self._watching: tuple[StepHooks, ...] = ()
        self._handles: list[Any] = []
        # A garbage collection may detach in the middle of an attach of the same thread.
        self._lock = threading.RLock()

    def add(self, hooks: StepHooks) -> None:
        with self._lock:
            self._replace(hooks, with_it=True)
            if not self._handles:
                self._handles.append(register_optimizer_step_pre_hook(self._began))
                self._handles.append(register_optimizer_step_post_hook(self._ended))

    def discard(self, hooks: StepHooks) -> None:
        with self._lock:
            self._replace(hooks, with_it=False)
            if not self._watching and self._handles and not _is_stepping():
                while self._handles:
                    self._handles.pop().remove()

    def forget(self) -> None:
        """Calls nobody of the parent's, and does without what a thread of it may hold (forked child)."""
        self._watching = ()
        self._lock = threading.RLock()

    def _replace(self, hooks: StepHooks, *, with_it: bool) -> None:
        while True:
            before = self._watching
            others = tuple([one for one in before if one is not hooks])
            after = (*others, hooks) if with_it else others
            # A collection may have been here meanwhile; from here on nothing is allocated.
            if self._watching is before:
                self._watching = after
                return

    def _began(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Calls who watches (training or autograd thread, hot path)."""
        # Named by its module: Dynamo runs a frame without tensors that names no module of torch as it is.
        if compiler.is_dynamo_compiling() or runs_for_a_compiler():
            return None
        result = None
        for hooks in self._watching:
            if hooks.began is not None:
                changed = hooks.began(optimizer, args, kwargs)
                if changed is not None:
                    args, kwargs = result = changed
        return result

    def _ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls who watches (training or autograd thread, hot path)."""
        if compiler.is_dynamo_compiling() or runs_for_a_compiler():
            return
        for hooks in self._watching:
            hooks.ended(optimizer, args, kwargs)


def _is_stepping() -> bool:
    """Returns whether an optimizer steps in any thread."""
    for top in sys._current_frames().values():  # noqa: SLF001 - has no public name
        frame = top
        while frame is not None:
            if frame.f_code in _STEP_CODES:
                return True
            frame = frame.f_back
    return False


_pair = _Pair()

os.register_at_fork(after_in_child=_pair.forget)
