"""Whether the current thread makes a program of what it runs, for ``torch.compile`` or ``torch.export``.

``torch.compiler.is_compiling()`` is true in every thread while any one of them compiles any model: what is
trained in another thread would not be seen meanwhile. What a compiler reads instead of running it is told
by ``torch.compiler.is_dynamo_compiling()``, which is true there and false wherever it is run. But a
compiler also runs code, with tensors that have no values: a backward that it traces, and a whole model
where ``torch.export`` is not strict. It notes that in the thread, and its modes are the thread's own.
"""

from torch import compiler
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._guards import CompileContext, TracingContext

__all__ = ["runs_for_a_compiler"]

_FAKE = _TorchDispatchModeKey.FAKE
_PROXY = _TorchDispatchModeKey.PROXY


def runs_for_a_compiler() -> bool:
    """Returns whether a compiler runs the current thread's code to learn what it does (any thread, hot path).

    A hook of a model asks ``torch.compiler.is_dynamo_compiling()`` first, and leaves this out where that is
    true, so that nothing of this becomes part of a program.
    """
    if not compiler._is_compiling_flag:  # noqa: SLF001 - its function asks for scripting too, a hook each time
        return False
    # The engine of autograd hands modes on to its threads, and contexts not.
    return (
        TracingContext.try_get() is not None
        or CompileContext.try_get() is not None
        or _get_dispatch_mode(_FAKE) is not None
        or _get_dispatch_mode(_PROXY) is not None
    )
