"""Wraps the methods of gradient scalers at class level, and tells watches of their calls.

``scale``, ``unscale_``, ``step`` and ``update`` of `torch.amp.GradScaler` and of every subclass that
overrides them (``ShardedGradScaler``) are wrapped while a watch listens: a scaler's own ``__dict__`` stays as
it is, so pickling it still works. The last watch to leave restores the classes exactly; where somebody else
wrapped them in the meantime, the wrapper stays below theirs and passes calls through.

A call is told once, however many classes override the method; the ``unscale_`` that a ``step`` makes is part
of it, and an ``update`` inside a ``step`` is an update.

Functions are wrapped, and `functools.partialmethod` of functions. Whatever else a subclass may have put in
their place (a static or class method, any object that can be called) has no scaler as its first argument and
stays as it is; where it calls its parent's method, that one tells.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any, Protocol

from torch import compiler
from torch.amp.grad_scaler import GradScaler

from torchinstruments.ranks.tracing import runs_for_a_compiler

__all__ = ["USER_CALL_CODE", "ScalerListener", "listen", "stop_listening", "wrap_new_classes"]

_METHODS = {"scale": "outputs", "unscale_": "optimizer", "step": "optimizer", "update": "new_scale"}
"""Method to the name of its first argument."""

_TOLD_BEFORE = frozenset({"step", "update"})
"""Methods of which listeners are told before they run too."""


class ScalerListener(Protocol):
    """Is told of the calls of enabled scalers (training thread, hot path); gets back what it raises."""

    def scaled(self, scaler: GradScaler) -> None:
        """Takes that ``scale`` returned."""
        ...

    def unscaled(self, scaler: GradScaler, optimizer: object) -> None:
        """Takes that the program's own ``unscale_`` returned."""
        ...

    def step_begins(self, scaler: GradScaler, optimizer: object) -> object:
        """Takes that ``step`` begins; what it returns comes back with the end, unless that raises."""
        ...

    def step_returned(self, scaler: GradScaler, optimizer: object, begun: Any) -> None:
        """Takes that ``step`` returned."""
        ...

    def update_begins(self, scaler: GradScaler) -> None:
        """Takes that ``update`` begins, which discards the findings."""
        ...

    def updated(self, scaler: GradScaler, *, is_scale_set: bool) -> None:
        """Takes that ``update`` returned, and whether the program gave it a scale."""
        ...

    def report(self, error: BaseException) -> None:
        """Takes an exception of a listener."""
        ...


class _Inside(threading.local):
    """The methods whose calls a thread is in, the innermost last."""

    names: tuple[str, ...] = ()


class _Patches:
    """The wrapped methods of this process, and the watches that listen; one instance."""

    def __init__(self) -> None:
        self.listeners: tuple[ScalerListener, ...] = ()
        self._originals: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._classes: set[type] = set()
        # Garbage collection may detach a watch while this thread holds the lock.
        self._lock = threading.RLock()
        self._inside = _Inside()

    def add(self, listener: ScalerListener) -> None:
        with self._lock:
            if not any(one is listener for one in self.listeners):
                self.listeners = (*self.listeners, listener)
            if "torch.distributed.fsdp" in sys.modules:
                import_module("torch.distributed.fsdp.sharded_grad_scaler")
            self._wrap_classes()

    def remove(self, listener: ScalerListener) -> None:
        with self._lock:
            self.listeners = tuple([one for one in self.listeners if one is not listener])
            if self.listeners:
                return
            for (owner, name), (original, wrapper) in self._originals.items():
                if vars(owner).get(name) is wrapper:
                    setattr(owner, name, original)
            self._originals.clear()
            self._classes.clear()

    def forget(self) -> None:
        """Tells nobody of the parent's, and does without what a thread of it may hold (forked child)."""
        self.listeners = ()
        self._lock = threading.RLock()

    def wrap_new_classes(self) -> None:
        """Wraps subclasses that were made since; cheap where there are none, and never waits."""
        if self._classes.issuperset(_family(GradScaler)) or not self._lock.acquire(blocking=False):
            return
        try:
            if self.listeners:
                self._wrap_classes()
        finally:
            self._lock.release()

    def call(
        self,
        name: str,
        original: Callable[..., Any],
        scaler: GradScaler,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a scaler's method and tells the watches, unless a method of the same call does so already."""
        listeners = self.listeners
        running = self._inside.names
        if not listeners or name in running or (name == "unscale_" and "step" in running):
            return original(scaler, *args, **kwargs)
        try:
            is_enabled = scaler.is_enabled()
        except Exception as error:  # noqa: BLE001 - a subclass may be anybody's code
            is_enabled = False
            for listener in listeners:
                listener.report(error)
        if not is_enabled:
            return original(scaler, *args, **kwargs)
        if type(scaler) not in self._classes:
            self.wrap_new_classes()
        subject: object = None
        if args and type(original) is FunctionType:
            subject = args[0]
        elif args or kwargs or type(original) is not FunctionType:
            subject = _subject(name, original, args, kwargs)
        begun = _begin(listeners, name, scaler, subject) if name in _TOLD_BEFORE else ()
        self._inside.names = (*running, name)
        try:
            result = original(scaler, *args, **kwargs)
        finally:
            self._inside.names = running
        _tell(listeners, name, scaler, subject, begun)
        return result

    def _wrap_classes(self) -> None:
        for owner in _family(GradScaler):
            if owner in self._classes:
                continue
            self._classes.add(owner)
            for name in _METHODS:
                original = vars(owner).get(name)
                method = _as_function(original)
                if original is not None and method is not None:
                    wrapper = _pass_through(name, method)
                    self._originals[owner, name] = (original, wrapper)
                    setattr(owner, name, wrapper)


def listen(listener: ScalerListener) -> None:
    """Wraps the scaler classes, or shares the wrapping of another watch (training thread, at attach)."""
    _PATCHES.add(listener)


def stop_listening(listener: ScalerListener) -> None:
    """Tells a watch nothing more; the last to leave restores the classes (any thread). Idempotent."""
    _PATCHES.remove(listener)


def wrap_new_classes() -> None:
    """Wraps subclasses that were imported since; never waits (training thread, hot path)."""
    _PATCHES.wrap_new_classes()


def _as_function(attribute: object) -> Callable[..., Any] | None:
    """Returns what a class's attribute does as a function whose first argument is the scaler, or None."""
    if isinstance(attribute, FunctionType):
        return attribute
    if isinstance(attribute, functools.partialmethod) and isinstance(attribute.func, FunctionType):
        return _Partial(attribute)
    return None


@dataclass(frozen=True, slots=True)
class _Partial:
    """A `functools.partialmethod` as a function of the scaler."""

    method: Any

    def __call__(self, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        return self.method.__get__(scaler, type(scaler))(*args, **kwargs)


def _subject(
    name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Returns the first argument of a scaler's method, wherever it comes from."""
    if isinstance(original, _Partial):
        args, kwargs = (*original.method.args, *args), {**original.method.keywords, **kwargs}
    return args[0] if args else kwargs.get(_METHODS[name])


def _pass_through(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scaler_method(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        # Named by its module: Dynamo runs a frame without tensors that names no module of torch as it is.
        if compiler.is_dynamo_compiling() or runs_for_a_compiler():
            return original(self, *args, **kwargs)
        return _PATCHES.call(name, original, self, args, kwargs)

    return scaler_method


def _begin(
    listeners: tuple[ScalerListener, ...], name: str, scaler: GradScaler, subject: object
) -> tuple[object, ...]:
    begun: list[object] = []
    for listener in listeners:
        token: object = None
        try:
            if name == "step":
                token = listener.step_begins(scaler, subject)
            else:
                listener.update_begins(scaler)
        except Exception as error:  # noqa: BLE001
            listener.report(error)
        begun.append(token)
    return tuple(begun)


def _tell(
    listeners: tuple[ScalerListener, ...],
    name: str,
    scaler: GradScaler,
    subject: object,
    begun: tuple[object, ...],
) -> None:
    for index, listener in enumerate(listeners):
        try:
            if name == "scale":
                listener.scaled(scaler)
            elif name == "unscale_":
                listener.unscaled(scaler, subject)
            elif name == "step":
                listener.step_returned(scaler, subject, begun[index])
            else:
                listener.updated(scaler, is_scale_set=subject is not None)
        except Exception as error:  # noqa: BLE001
            listener.report(error)


def _family(owner: type) -> Iterator[type]:
    yield owner
    for child in owner.__subclasses__():
        yield from _family(child)


_PATCHES = _Patches()

os.register_at_fork(after_in_child=_PATCHES.forget)

USER_CALL_CODE = _Patches.call.__code__
"""Of the frame that calls a scaler's own method: what runs directly below it is the user's program."""
