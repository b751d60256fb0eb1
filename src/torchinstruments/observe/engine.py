"""What torch knows about the call that is running, where it has no public name for it.

Each of these is a look at the running thread and costs well below a microsecond, beside `tracing` while any
thread makes a program.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
import torch._C._autograd
from torch.autograd import Variable
from torch.fx import _symbolic_trace

from torchinstruments.ranks import pipelining
from torchinstruments.statistics.isolation import isolated, unintercepted

if TYPE_CHECKING:
    from types import FrameType

__all__ = [
    "EXPORT",
    "call_at_end_of_backward",
    "graph_task",
    "is_capturing_graph",
    "is_in_backward",
    "keeps_graph",
    "latest_graph_task",
    "rehearsal",
    "run_while_traced",
    "tracing",
]

EXPORT = "torch.export"
"""What traces where ``torch.compiler.is_exporting()`` is true."""

_FX_TRACE = _symbolic_trace.Tracer.trace.__code__

_Function = TypeVar("_Function", bound=Callable[..., None])


graph_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Returns the id of the traversal that the current thread works on, unique in the process; -1 outside."""


call_at_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback  # noqa: SLF001
"""Has a function called when the current traversal is over; an exception of it would reach the user.

Called from such a function, it calls after everything that was queued before: after the reducer of DDP has
written the gradients, for one. Where no backward is running it raises a `RuntimeError`.
"""


def latest_graph_task() -> int:
    """Returns the last number that the engine gave before it is asked for (any thread).

    Outside of a backward it makes the engine traverse one node of its own, and returns that one's number;
    inside, the one before the current thread's is returned. It takes as long as the least backward.
    """
    current = graph_task()
    if current != -1:
        return current - 1
    numbers: list[int] = []

    def note(_gradient: torch.Tensor) -> None:
        numbers.append(graph_task())

    with unintercepted(), isolated("cpu"), torch.inference_mode(mode=False), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        result = leaf.view_as(leaf)
        result.register_hook(note)
        torch.autograd.grad(result, leaf, torch.zeros((), device="cpu"))
    return numbers[0]


def is_in_backward() -> bool:
    """Returns whether the current thread works on a backward: a forward in it is a recomputation."""
    return graph_task() != -1


def keeps_graph() -> bool:
    """Returns whether the current traversal leaves the graph for another one, as with ``retain_graph``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001


def tracing() -> str:
    """Returns what records the current thread's operations to make a program of them; ``""`` for none.

    Tensors of a recording are not values, and what is computed of them would become part of the program.
    ``torch.export`` and ``torch.compile`` are seen by the hooks themselves (`ranks.tracing`).
    """
    if torch._C._get_tracing_state() is not None:  # noqa: SLF001 - torch.jit.is_tracing asks for scripting first
        return "torch.jit.trace"
    # The flag is the whole process's, and up while another thread compiles.
    if _symbolic_trace._is_fx_tracing_flag and _is_in_fx():  # noqa: SLF001 - its function compiles too
        return "torch.fx"
    return ""


def rehearsal() -> str:
    """Returns what runs the current forward for something else than outputs; ``""`` for nothing (hot path).

    That is what records it (`tracing`), or a stage of a pipeline that learns shapes (`ranks.pipelining`).
    """
    # Both would be calls in each step, and are mostly no.
    if (
        torch._C._get_tracing_state() is None  # noqa: SLF001 - as above
        and not _symbolic_trace._is_fx_tracing_flag  # noqa: SLF001 - as above
        and pipelining.STAGE not in sys.modules
    ):
        return ""
    return tracing() or pipelining.learns_shapes()


def _is_in_fx() -> bool:
    """Returns whether the current thread runs for a tracer of ``torch.fx``."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else tells
    while frame is not None:
        if frame.f_code is _FX_TRACE:
            return True
        frame = frame.f_back
    return False


def run_while_traced(function: _Function) -> _Function:
    """Has a compiler that traces a call of the function run it then and there, as no part of the program.

    It does what ``torch.compiler.assume_constant_result`` does, which would import the compiler. Where torch
    knows nothing of the mark, the function is traced; it has to do nothing then, which
    ``torch.compiler.is_dynamo_compiling()`` tells it: true in what is traced, false in what runs.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def is_capturing_graph() -> bool:
    """Returns whether a CUDA graph is being captured, of which nothing else may become part."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
