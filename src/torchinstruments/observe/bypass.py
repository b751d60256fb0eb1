"""Whether a program runs parts of the model outside a call of it, where nothing is measured.

``model.encoder(x)``, ``model.forward(x)`` and ``ddp.module(x)`` pass the hooks of the attached model by. To
hook every part for good would make each unsampled forward pay. So parts are watched only while no forward is
expected to need them: from attach to the first forward of the model, and from the end of a sampled forward to
the begin of the next one. What is counted there is told once, at the end, and stands for more.

A part is watched without a hook, through the slot of its call (`observe.slots`), and where direct forwards
are captured through an override of its ``forward`` too (`observe.direct`). Steps of the model's optimizers
without a call of the model are evidence that costs nothing at all.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from torchinstruments.observe.direct import ForwardOverride, replicated
from torchinstruments.observe.engine import is_in_backward, tracing
from torchinstruments.observe.slots import CallSlot
from torchinstruments.observe.stack import callers, runs_for

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["MAX_COUNTED", "MAX_PARTS", "Bypass", "CallSentry", "DirectSentry"]

MAX_PARTS = 4_096
"""Parts of a model that are watched."""

MAX_COUNTED = 10_000
"""Calls that are counted; afterwards nothing is watched any more."""

_SLOT = "_compiled_call_impl"
_MAX_NAMES = 3


class CallSentry(CallSlot):
    """Runs a call of a module as it would run, and tells of it.

    Args:
        name: Of the module, as the program reaches it.
        module: Held weakly.
        tell: Takes the name, and the frame that made the call; it never raises.
    """

    __slots__ = ("_name", "_tell")

    def __init__(self, name: str, module: nn.Module, tell: "Callable[[str, FrameType | None], None]") -> None:
        super().__init__(module)
        self._name = name
        self._tell = tell

    @override
    def run(
        self, module: nn.Module, caller: "FrameType | None", args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs the call (training thread, hot path)."""
        if not self._is_copy(module):
            self._tell(self._name, caller)
        return self._run_below(module, caller, args, kwargs)


class DirectSentry:
    """Tells of the direct forwards of a module.

    Args:
        name: Of the module, as the program reaches it.
        tell: Takes the name, and the frame that made the call; it never raises.
    """

    __slots__ = ("_name", "_override", "_tell")

    def __init__(self, name: str, tell: "Callable[[str, FrameType | None], None]") -> None:
        self._name = name
        self._tell = tell
        self._override: ForwardOverride | None = None

    def install(self, module: nn.Module) -> None:
        """Puts an override into the module, the same as before where that can be (training thread)."""
        override = self._override
        if override is None or not override.renew(self):
            override = self._override = ForwardOverride(module, self)
        override.install(clean_copies=True)

    def remove(self) -> None:
        """Takes it out. Idempotent (any thread)."""
        if self._override is not None:
            self._override.remove()

    def sees(self) -> bool:
        """Returns that it is to be told of every forward (training thread, hot path)."""
        return True

    def started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:  # noqa: ARG002 - known by its name
        """Takes the begin of a direct forward (training thread, hot path)."""
        # Above this frame lie the two of the override, which count as a call of the module already.
        self._tell(self._name, sys._getframe(3))  # noqa: SLF001 - nothing else tells

    def ended(self, module: nn.Module, output: object, *, failed: bool) -> None:
        """Does nothing: it was counted when it began."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A module of the model, and who tells of its calls and, where they are watched, its direct forwards."""

    module: weakref.ref[nn.Module]
    calls: CallSentry
    direct: DirectSentry | None


class Bypass:
    """Counts calls of a model's parts that are no part of a call of the model.

    Args:
        root: The attached model; it and its parts are held weakly.
        captures_direct_forwards: Whether ``root.forward(x)`` is seen by other means, and direct forwards of
            parts are watched.
    """

    def __init__(self, root: nn.Module, *, captures_direct_forwards: bool) -> None:
        self.muted = False
        """Whether nothing is counted now."""
        self._root = weakref.ref(root)
        self._captures_direct_forwards = captures_direct_forwards
        self._root_code = getattr(getattr(type(root), "forward", None), "__code__", None)
        self._parts: list[_Part] = []
        self._ids: frozenset[int] = frozenset()
        self._lock = threading.RLock()
        self._arming = threading.RLock()
        self.armed: dict[CallSentry | DirectSentry, None] = {}
        """What watches now; it is only read elsewhere."""
        self._is_closed = False
        self._num_calls = 0
        self._names: Counter[str] = Counter()
        self._saw_forward = False
        self._num_steps = 0
        self.look_again()

    def look_again(self) -> None:
        """Takes the parts that the model has now (training thread, at attach and after a change)."""
        root = self._root()
        if root is None:
            return
        left_alone = replicated(root)
        self._parts = [
            _Part(
                weakref.ref(module),
                CallSentry(name, module, self._tell),
                DirectSentry(name, self._tell)
                if self._captures_direct_forwards and id(module) not in left_alone
                else None,
            )
            for (name, module), _ in zip(root.named_modules(), range(MAX_PARTS), strict=False)
            if module is not root and not isinstance(module, torch.jit.ScriptModule)
        ]
        # Not by its truth: a container that is empty, or a compiled module, has another one or none.
        self._ids = frozenset(id(module) for part in self._parts if (module := part.module()) is not None)

    def arm(self, compiled: frozenset[int] = frozenset()) -> None:
        """Begins to watch (training thread).

        Args:
            compiled: Ids of modules inside compiled code, which would be compiled anew.
        """
        if self.armed or self._is_closed or self._num_calls >= MAX_COUNTED:
            return
        if not self._arming.acquire(blocking=False):
            return
        try:
            for part in self._parts:
                module = part.module()
                if module is None or id(module) in compiled or _SLOT in module.__dict__:
                    continue
                # Each is noted before it is there, so that an interrupt leaves nothing that nobody knows of.
                self.armed[part.calls] = None
                part.calls.install()
                if part.direct is not None:
                    self.armed[part.direct] = None
                    part.direct.install(module)
                if self._is_closed:
                    # By another thread, meanwhile.
                    for sentry in filter(None, (part.calls, part.direct)):
                        sentry.remove()
                    return
        finally:
            self._arming.release()

    def disarm(self) -> None:
        """Watches no more; returns at once where nothing is watched (training thread, hot path)."""
        armed = self.armed
        while armed:
            for sentry in list(armed):
                # It is forgotten after it was taken out, since an interrupt may come between the two.
                sentry.remove()
                armed.pop(sentry, None)

    def close(self) -> None:
        """Watches no more, for good. Idempotent (any thread)."""
        self._is_closed = True
        self.disarm()

    def steps_passed(self, number: int) -> None:
        """Takes how many steps of the model's optimizers came without a call of it (training thread)."""
        self._num_steps = number

    def sentence(self) -> str:
        """Returns what was seen, as a sentence; ``""`` where nothing was."""
        seen = []
        if self._num_calls:
            names = ", ".join(repr(name) for name, _ in self._names.most_common(_MAX_NAMES))
            more = ", ..." if len(self._names) > _MAX_NAMES else ""
            # Between sampled forwards nobody watches, and beyond the bound neither.
            seen.append(
                f"at least {self._num_calls} {'call' if self._num_calls == 1 else 'calls'} of parts of the "
                f"model ({names}{more}) ran outside a call of the model"
            )
        if self._num_steps:
            seen.append(
                f"{self._num_steps} {'step' if self._num_steps == 1 else 'steps'} of its optimizers came "
                f"without a call of it since the step before"
            )
        if not seen:
            return ""
        advice = "call the attached model itself, as model(...)"
        if self._saw_forward and not self._captures_direct_forwards:
            advice += ", or give capture_direct_forwards=True, since model.forward(...) was called directly"
        return f"{' and '.join(seen)}; nothing of that is measured: {advice}"

    def _tell(self, name: str, caller: "FrameType | None") -> None:
        """Counts a call that is no part of another one (training thread, hot path)."""
        if self.muted or self._num_calls >= MAX_COUNTED or is_in_backward() or tracing():
            return
        root = self._root()
        if any(called is root or id(called) in self._ids for called in callers(caller)):
            return
        with self._lock:
            self._num_calls += 1
            self._names[name] += 1
        if not self._saw_forward:
            self._saw_forward = self._is_below_forward(root, caller)

    def _is_below_forward(self, root: nn.Module | None, frame: "FrameType | None") -> bool:
        """Returns whether the model's own forward made the call, without a call of the model."""
        while frame is not None:
            if frame.f_code is self._root_code and runs_for(frame, root):
                return True
            frame = frame.f_back
        return False
