"""Forwards that are called as ``module.forward(x)``: no hook sees them, so they are met at the instance.

With ``capture_direct_forwards=True`` the attached model's ``forward`` is one of these for as long as it is
observed, and a selected layer's for one sampled forward. Called by the module's own ``__call__`` it does
nothing, for the hooks measure that call. So a call is measured once, whichever way it was made, and what is
measured is what the hooks of other tools made of it.

An override that was there before is called in its place and put back afterwards. Copies and pickles of the
model have what they would have without it. A compiler that meets it sees the module's own forward.
"""

import inspect
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from torchinstruments.observe.engine import is_in_backward
from torchinstruments.observe.selection import Layer
from torchinstruments.observe.stack import count_as_call, enclosing_call
from torchinstruments.ranks.tracing import runs_for_a_compiler

__all__ = ["DirectLayer", "DirectRoot", "ForwardOverride", "replicated"]

_FORWARD = "forward"
_STATE = "__getstate__"
_OWN = frozenset(("_function", "_module", "_observer", "_previous"))


class _RootObserver(Protocol):
    """Who sees the calls of the attached model."""

    def root_started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the begin of a call (training thread, hot path)."""
        ...

    def root_ended(self, module: nn.Module, output: object) -> None:
        """Takes the end of a call (training thread, hot path)."""
        ...


class _LayerObserver(Protocol):
    """Who measures the inputs and outputs of layers during one forward."""

    def receive(self, layer: Layer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the arguments of a call; it never raises (training thread, hot path)."""
        ...

    def observe(self, layer: Layer, output: object) -> None:
        """Takes an output; it never raises (training thread, hot path)."""
        ...


class _Observer(Protocol):
    """Who is told of direct forwards of one module."""

    def sees(self) -> bool:
        """Returns whether a forward that begins now is to be told (training thread, hot path)."""
        ...

    def started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the begin of a direct forward (training thread, hot path)."""
        ...

    def ended(self, module: nn.Module, output: object, *, failed: bool) -> None:
        """Takes its end; it never raises (training thread, hot path)."""
        ...


class DirectRoot:
    """Has a direct forward of the attached model count as a call of it."""

    __slots__ = ("_observer",)

    def __init__(self, observer: _RootObserver) -> None:
        self._observer = observer

    def sees(self) -> bool:
        """Returns whether this is a forward of its own and no recomputation (training thread, hot path)."""
        return not is_in_backward()

    def started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the begin of a direct forward (training thread, hot path)."""
        self._observer.root_started(module, args, kwargs)

    def ended(self, module: nn.Module, output: object, *, failed: bool) -> None:  # noqa: ARG002 - seen by the exception
        """Takes its end, by an exception too; it never raises (training thread, hot path)."""
        self._observer.root_ended(module, output)


class DirectLayer:
    """Has a direct forward of a layer measured during one sampled forward of one thread.

    Args:
        forward: Takes its input and its output.
        layer: Whose they are.
        thread: Whose forward it is.
    """

    __slots__ = ("_forward", "_layer", "_thread")

    def __init__(self, forward: _LayerObserver, layer: Layer, thread: int) -> None:
        self._forward = forward
        self._layer = layer
        self._thread = thread

    def sees(self) -> bool:
        """Returns whether the sampled thread runs it and no recomputation (training thread, hot path)."""
        return threading.get_ident() == self._thread and not is_in_backward()

    def started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:  # noqa: ARG002 - part of the seam
        """Has the input measured (training thread, hot path)."""
        self._forward.receive(self._layer, args, kwargs)

    def ended(self, module: nn.Module, output: object, *, failed: bool) -> None:  # noqa: ARG002 - part of the seam
        """Measures the output; a forward that raised has none (training thread, hot path)."""
        if not failed:
            self._forward.observe(self._layer, output)


class ForwardOverride:
    """Stands as ``forward`` in one module's ``__dict__``, from `install` to `remove`.

    It passes for the method below it, whose source ``torch.jit.script`` reads.

    Args:
        module: The module; held weakly.
        observer: Told of direct forwards.
    """

    def __init__(self, module: nn.Module, observer: _Observer) -> None:
        self._module = weakref.ref(module)
        self._observer: _Observer | None = observer
        self._previous: Callable[..., Any] | None = module.__dict__.get(_FORWARD)
        # What is no plain function of the class knows better than this how it is bound.
        is_plain = isinstance(getattr(type(module), _FORWARD, None), FunctionType)
        self._function = None if is_plain or self._previous is not None else module.forward
        self.__doc__ = self._below().__doc__

    def install(self, *, clean_copies: bool) -> None:
        """Puts it into the module (training thread).

        Args:
            clean_copies: Whether copies and pickles of the module are to have no trace of it. Without, they
                have the equivalent bound method; for an override that is there for one forward only.
        """
        module = self._module()
        if module is None:
            return
        module.__dict__[_FORWARD] = self
        if clean_copies and _STATE not in module.__dict__:
            module.__dict__[_STATE] = _CleanState(module, self)

    def renew(self, observer: _Observer) -> bool:
        """Has it tell again after `remove`, where nothing stood below it and nothing stands there now.

        Compiled code knows it by its identity, and would be compiled anew for another one each time. But what
        stands there may end in this one, which would then run itself (training thread).

        Args:
            observer: Told of direct forwards.

        Returns:
            Whether it may be installed again.
        """
        module = self._module()
        if module is None or self._previous is not None or self._function is not None:
            return False
        if _FORWARD in module.__dict__:
            return False
        self._observer = observer
        return True

    def remove(self) -> None:
        """Puts back what was there before, unless another tool has put something over it. Idempotent.

        Whoever still holds it, such a tool or a checkpointed function, calls the module's own forward by it.
        """
        self._observer = None
        module = self._module()
        if module is None:
            return
        if isinstance(state := module.__dict__.get(_STATE), _CleanState) and state.belongs_to(self):
            module.__dict__.pop(_STATE, None)
        if module.__dict__.get(_FORWARD) is self:
            previous = self._previous
            # That of another observer, removed while this one stood over it.
            while isinstance(previous, ForwardOverride) and previous.is_removed:
                previous = previous.previous
            if previous is None:
                module.__dict__.pop(_FORWARD, None)
            else:
                module.__dict__[_FORWARD] = previous

    @property
    def is_removed(self) -> bool:
        """Whether it does nothing any more."""
        return self._observer is None

    @property
    def previous(self) -> Callable[..., Any] | None:
        """What stood in its place, if anything did."""
        return self._previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward (training thread, hot path)."""
        module = self._module()
        assert module is not None, "whoever calls a bound method keeps its module alive"
        if torch.compiler.is_dynamo_compiling() or runs_for_a_compiler():
            return self._run(module, args, kwargs)
        # The caller's own frames are looked at, so that this works where other tools wrapped this.
        called = enclosing_call(self, module, sys._getframe(1))  # noqa: SLF001 - nothing else tells
        observer = self._observer
        if called is not None or observer is None or not observer.sees():
            return self._run(module if called is None else called, args, kwargs)
        return self._direct(module, observer, args, kwargs)

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs what would run without this."""
        if self._previous is not None:
            return self._previous(*args, **kwargs)
        if self._function is not None:
            return self._function(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def _direct(
        self, module: nn.Module, observer: _Observer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a forward that no hook sees."""
        observer.started(module, args, kwargs)
        try:
            output = self._run(module, args, kwargs)
        except BaseException:
            observer.ended(module, None, failed=True)
            raise
        observer.ended(module, output, failed=False)
        return output

    @property
    def __class__(self) -> type:
        """That of the forward below, for whoever asks whether this is a method before reading its source."""
        return type(self._below())

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the forward below, for whoever looks at what a model takes."""
        return inspect.signature(self._below())

    def __getattr__(self, name: str) -> Any:
        # Asked for what a method has: __name__, __doc__, __func__, __code__.
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._below(), name)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self._previous is not None:
            return operator.getitem, ((self._previous,), 0)
        return getattr, (self._module(), _FORWARD)

    def _below(self) -> Callable[..., Any]:
        """Returns the forward that would be there without this."""
        module = self._module()
        if self._previous is not None or module is None:
            return self._previous or _gone
        return self._function or type(module).forward.__get__(module)


class _CleanState:
    """Stands as ``__getstate__`` in a module's ``__dict__``: what is copied or pickled has no override."""

    __slots__ = ("_module", "_override")

    def __init__(self, module: nn.Module, override: ForwardOverride) -> None:
        self._module = weakref.ref(module)
        self._override = weakref.ref(override)

    def belongs_to(self, override: ForwardOverride) -> bool:
        """Returns whether it was put there with an override."""
        return self._override() is override

    def __call__(self) -> object:
        """Returns the state that the module has without the override."""
        module, override = self._module(), self._override()
        assert module is not None, "whoever copies a module holds it"
        state = type(module).__getstate__(module)
        if not isinstance(state, dict):
            return state
        clean = {key: value for key, value in state.items() if value is not self}
        if override is not None and clean.get(_FORWARD) is override:
            del clean[_FORWARD]
            if override.previous is not None:
                clean[_FORWARD] = override.previous
        return clean

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, (self._module(), _STATE)


def replicated(root: nn.Module) -> frozenset[int]:
    """Returns the ids of the modules that `torch.nn.DataParallel` copies for several devices.

    A copy has its own parameters and the ``__dict__`` of the module, so that an override would run the
    module's forward in place of the copy's.
    """
    return frozenset(
        id(part)
        for module in root.modules()
        if isinstance(module, DataParallel) and len(module.device_ids) > 1
        for part in module.module.modules()
    )


def _gone(*_args: object, **_kwargs: object) -> None:
    """Stands for the forward of a module that is gone."""


count_as_call(ForwardOverride._direct.__code__)  # noqa: SLF001 - its own method
