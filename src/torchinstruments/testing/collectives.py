"""Makes every collective fail when this package calls it, and leaves the program's own alone.

Telemetry that issues a collective hangs a job in which one rank does not observe. The guard patches the
public functions of `torch.distributed`, the functional collectives, and the methods of c10d's process groups,
and looks at the stack of each call: the nearest frame of this package makes it forbidden. What a wrapped
scaler method, a stand-in of a module's call or forward, or a function mode passes on is the program's own.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import FrameType, ModuleType
from typing import Any

import torch.distributed as dist

from torchinstruments.checks.probes.function_mode import FunctionWatch
from torchinstruments.checks.stepping import WatchedClosure
from torchinstruments.observe.direct import ForwardOverride
from torchinstruments.observe.slots import CallSlot
from torchinstruments.ranks.scaler_methods import USER_CALL_CODE

__all__ = ["CollectiveForbiddenError", "no_collectives"]

_PACKAGE = "torchinstruments"
_WORDS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "new_group",
    "new_subgroups",
    "recv",
    "reduce",
    "scatter",
    "send",
)
_PASSES_ON = (
    USER_CALL_CODE,
    CallSlot._run_below.__code__,  # noqa: SLF001 - a fact about the package that is guarded
    ForwardOverride._run.__code__,  # noqa: SLF001 - the same
    WatchedClosure.__call__.__code__,
    FunctionWatch._pass_on.__code__,  # noqa: SLF001 - the same
)
# `P2POp` and what runs it know these functions by identity. They are caught in the group's methods below.
_KNOWN_BY_IDENTITY = ("isend", "irecv")
_NOT_BEGINNINGS = ("_is_", "_make_")
_NOT_ENDS = ("_meta", "_setup_context", "_backward")


class CollectiveForbiddenError(AssertionError):
    """Code of this package called a collective."""


@contextmanager
def no_collectives() -> Generator[list[str]]:
    """Patches every collective to raise when it is called from code of this package.

    The package keeps errors out of the training loop, so the calls are kept here as well, and raised at the
    end.

    Yields:
        The forbidden calls so far, ``all_reduce from torchinstruments/...py:12``.

    Raises:
        CollectiveForbiddenError: In the caller of the collective, and at the end if there was any.
    """
    calls: list[str] = []
    with ExitStack() as stack:
        for owner in _owners():
            for name, original in _collectives_of(owner):
                setattr(owner, name, _guarded(name, original, calls))
                stack.callback(setattr, owner, name, original)
        yield calls
    if calls:
        raise CollectiveForbiddenError("; ".join(calls))


def _owners() -> list[Any]:
    c10d: ModuleType = import_module("torch.distributed.distributed_c10d")
    functional: ModuleType = import_module("torch.distributed._functional_collectives")
    bindings: ModuleType = import_module("torch._C._distributed_c10d")
    groups = [bindings.ProcessGroup, *bindings.ProcessGroup.__subclasses__()]
    backends = [bindings.Backend, *bindings.Backend.__subclasses__()]
    return [dist, c10d, functional, *groups, *backends]


def _collectives_of(owner: Any) -> list[tuple[str, Callable[..., Any]]]:
    return [
        (name, member)
        for name, member in list(vars(owner).items())
        if any(word in name for word in _WORDS)
        and name not in _KNOWN_BY_IDENTITY
        and not name.startswith(_NOT_BEGINNINGS)
        and not name.endswith(_NOT_ENDS)
        and callable(member)
        and not inspect.isclass(member)
    ]


def _guarded(name: str, original: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        frame = _nearest_own(sys._getframe(1))  # noqa: SLF001
        if frame is not None:
            calls.append(f"{name} from {frame.f_code.co_filename}:{frame.f_lineno}")
            raise CollectiveForbiddenError(calls[-1])
        return original(*args, **kwargs)

    return guarded


def _nearest_own(frame: FrameType | None) -> FrameType | None:
    """Returns the nearest frame of this package on the stack, or None where the call is the program's own."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code in _PASSES_ON:
            return None
        if module == _PACKAGE or module.startswith(f"{_PACKAGE}."):
            return None if module.startswith(f"{_PACKAGE}.testing") else frame
        frame = frame.f_back
    return None
