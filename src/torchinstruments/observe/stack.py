"""Who is on the stack: whether a module runs as part of a call of it, or of another one.

Nothing else tells. A look at a frame costs some tens of nanoseconds, at the locals of one about a
microsecond, and only frames of module calls are looked into.
"""

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

from torch import nn
from torch.utils.checkpoint import CheckpointFunction

__all__ = [
    "callers",
    "count_as_call",
    "enclosing_call",
    "is_called",
    "is_called_in",
    "is_copy",
    "is_in_reentrant_checkpoint",
    "is_inside_itself",
    "num_calls",
    "runs_for",
]

_CHECKPOINT = CheckpointFunction.forward.__code__
_CALL = nn.Module._call_impl.__code__  # noqa: SLF001 - every call of a module runs it

_calls: dict[int, tuple[CodeType, str]] = {id(_CALL): (_CALL, "self")}
"""By address, since to hash code takes longer than all else: what runs calls, and how it names the module."""


def count_as_call(code: CodeType) -> None:
    """Has the frames of a method count as calls of a module, as those of ``Module.__call__`` do.

    Args:
        code: Of a method that has the module in a local variable ``module``.
    """
    _calls[id(code)] = code, "module"


def callers(frame: FrameType | None) -> Iterator[nn.Module]:
    """Yields the modules that are being called, from a frame outward (training thread, hot path)."""
    while frame is not None:
        call = _calls.get(id(frame.f_code))
        if call is not None:
            called = frame.f_locals.get(call[1])
            if isinstance(called, nn.Module):
                yield called
        frame = frame.f_back


def num_calls(module: nn.Module) -> int:
    """Returns how many calls of a module the current thread is in (training thread, hot path)."""
    return sum(called is module for called in callers(sys._getframe(1)))  # noqa: SLF001 - nothing else tells


def is_inside_itself(module: nn.Module) -> bool:
    """Returns whether a call of a module that begins is inside another one of it (training, hot path)."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else tells
    num_found = 0
    while frame is not None:
        if id(frame.f_code) in _calls:
            num_found += 1
            if num_found > 1:
                # Only now are frames looked into.
                return num_calls(module) > 1
        frame = frame.f_back
    return False


def is_called(key: int) -> bool:
    """Returns whether the thread is in a call of the module with an id (training thread, hot path)."""
    return any(id(called) == key for called in callers(sys._getframe(1)))  # noqa: SLF001 - nothing else tells


def is_called_in(thread: int, key: int) -> bool:
    """Returns whether a thread is in a call of the module with an id (any thread).

    Args:
        thread: Which; False where it is gone.
        key: Id of the module.
    """
    if thread == threading.get_ident():
        return is_called(key)
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - nothing else tells
    return any(id(called) == key for called in callers(frame))


def enclosing_call(forward: object, module: nn.Module, frame: FrameType | None) -> nn.Module | None:
    """Returns whose call runs this forward, or None where the forward was called directly.

    Args:
        forward: What stands in the instance's ``forward``.
        module: The instance; a replica or a shallow copy of it has the same ``forward``.
        frame: The frame that called ``forward``. Between the two may lie whatever wrapped it.
    """
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    while frame is not None:
        if frame.f_code is _CALL:
            called = frame.f_locals.get("self")
            if called is module or (
                isinstance(called, nn.Module) and called.__dict__.get("forward") is forward
            ):
                return called
        elif frame.f_code is code and runs_for(frame, module):
            # The module's own forward calls it again.
            return None
        frame = frame.f_back
    return None


def is_in_reentrant_checkpoint() -> bool:
    """Returns whether a forward of reentrant checkpointing runs that may bring gradients (hot path).

    There gradients are off, and the outputs that belong to the graph are made anew in the backward.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else tells
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            # Without an input that requires a gradient it has none, as an evaluation has none.
            return any(getattr(frame.f_locals.get("ctx"), "needs_input_grad", ()))
        frame = frame.f_back
    return False


def is_copy(called: nn.Module, own: object) -> bool:
    """Returns whether what is called is another module with the hooks of one (training thread, hot path).

    The replicas of `torch.nn.DataParallel` are the module itself.

    Args:
        called: The module that is called.
        own: The one that the hook was placed in.
    """
    return called is not own and not called.__dict__.get("_is_replica", False)


def runs_for(frame: FrameType, module: nn.Module | None) -> bool:
    """Returns whether a method's frame is that of one instance, whatever it calls itself."""
    names = frame.f_code.co_varnames
    return bool(names) and frame.f_locals.get(names[0]) is module
