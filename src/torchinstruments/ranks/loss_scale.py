"""Knows the loss scale and the skipped steps of a gradient scaler without its handle or a host read.

While a watch is attached, ``scale`` and ``step`` of `torch.amp.GradScaler` and of every subclass that
overrides them (``ShardedGradScaler``) are wrapped at class level: a scaler's own ``__dict__`` stays as it is,
so pickling it still works. The last `detach` restores the classes exactly; where somebody else wrapped them
in the meantime, the wrapper stays below theirs and passes calls through.

A scaler reads its findings on the host before it calls an ordinary optimizer, so that a step which did not
happen was skipped. A fused optimizer is always called and decides on the device: its outcome is left unknown.

A scaler belongs to this model once it has stepped one of its optimizers. Until then a single scaler that was
seen to scale counts as this model's; of several, none does.
"""

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.optimizers import KnownOptimizer, OptimizerWatch, first_lr
from torchinstruments.records import Evidence, Outcome, ScaleProvenance

__all__ = ["USER_CALL_CODE", "ScalerWatch"]

_METHODS = ("scale", "step")


class ScalerWatch:
    """Feeds a `StepClock` from gradient scalers, and knows the current loss scale."""

    def __init__(
        self,
        clock: StepClock,
        optimizers: OptimizerWatch,
        *,
        on_error: Callable[[str, BaseException], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Makes a watch that is not attached yet.

        Args:
            clock: Receives skipped steps, and evidence for applied ones.
            optimizers: Says which optimizers are this model's.
            on_error: Called with the probe ``loss_scale`` and the exception for everything that fails.
            now: Monotonic seconds, the same clock that the `StepClock` is fed with.
        """
        self._clock = clock
        self._optimizers = optimizers
        self._on_error = on_error
        self._now = now
        self._seen: list[weakref.ref[GradScaler]] = []
        self._own: weakref.ref[GradScaler] | None = None
        self._foreign: list[weakref.ref[GradScaler]] = []

    def attach(self) -> None:
        """Wraps the scaler classes, or shares the wrapping of another watch."""
        _PATCHES.add(self)

    def detach(self) -> None:
        """Stops listening; the last watch to leave restores the classes."""
        _PATCHES.remove(self)

    def current_scale(self) -> tuple[torch.Tensor | None, ScaleProvenance]:
        """Returns the tensor that holds the loss scale, and how it is known (training thread, hot path).

        The tensor is the scaler's own, on its device, and changes in place: copy it now, read it later.

        Returns:
            ``(scale, GRADSCALER)``; ``(None, NONE_SEEN)`` where no enabled scaler scaled since `attach`;
            ``(None, UNKNOWN)`` where it cannot be told whether a scaler is this model's.
        """
        own = self._own() if self._own is not None else None
        if own is not None:
            return own._scale, ScaleProvenance.GRADSCALER  # noqa: SLF001
        seen = _alive(self._seen)
        if not seen:
            # A subclass that was imported after attach is not wrapped yet.
            _PATCHES.wrap_new_classes()
            return None, ScaleProvenance.NONE_SEEN
        if len(seen) == 1 and not _holds(self._foreign, seen[0]):
            return seen[0]._scale, ScaleProvenance.GRADSCALER  # noqa: SLF001
        return None, ScaleProvenance.UNKNOWN

    def scale_left(self, optimizer: Optimizer) -> tuple[torch.Tensor | float | None, ScaleProvenance]:
        """Returns the factor by which an optimizer's gradients are still multiplied, and how it is known.

        It is called while the optimizer begins its step, or was skipped (training thread, hot path).

        Returns:
            What `current_scale` returns, but ``(1.0, GRADSCALER)`` once the scaler has unscaled them, and
            ``(None, UNKNOWN)`` where it knows other optimizers alone: one of them may wrap this one.
        """
        scale, provenance = self.current_scale()
        if scale is None:
            return None, provenance
        for scaler in _alive([*self._seen, *([] if self._own is None else [self._own])]):
            if scaler._scale is not scale:  # noqa: SLF001
                continue
            # Asked for with [], it would make an entry.
            states = scaler._per_optimizer_states  # noqa: SLF001
            state = states.get(id(optimizer))
            if state is not None and state["stage"] is not OptState.READY:
                return 1.0, provenance
            if state is None and states:
                return None, ScaleProvenance.UNKNOWN
        return scale, provenance

    def scaled(self, scaler: GradScaler) -> None:
        """Takes that a scaler has scaled something (training thread, hot path)."""
        if not _holds(self._seen, scaler):
            self._seen = [weakref.ref(one) for one in _alive(self._seen)]
            self._seen.append(weakref.ref(scaler))

    def step_begins(self, optimizer: object) -> tuple[KnownOptimizer, int] | None:
        """Returns what `step_returned` compares with, or None for another model's optimizer (hot path)."""
        entry = self._optimizers.known(optimizer)
        return (entry, entry.num_ended) if entry is not None else None

    def step_returned(
        self, scaler: GradScaler, optimizer: object, before: tuple[KnownOptimizer, int] | None
    ) -> None:
        """Takes that a scaler's ``step`` returned without an exception (training thread, hot path).

        Args:
            scaler: The scaler.
            optimizer: What it was to step.
            before: What `step_begins` returned.
        """
        if before is None:
            if not _holds(self._foreign, scaler):
                self._foreign = [weakref.ref(one) for one in _alive(self._foreign)]
                self._foreign.append(weakref.ref(scaler))
            return
        if self._own is None or self._own() is not scaler:
            self._own = weakref.ref(scaler)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return
        entry, num_ended_before = before
        if entry.num_ended > num_ended_before:
            self._clock.step_resolved(
                entry.key, outcome=Outcome.APPLIED, evidence=Evidence.FOUND_INF, found_inf=0.0
            )
        elif getattr(getattr(type(optimizer), "step", None), "hooked", False):
            self._clock.step_skipped(entry.key, self._now(), lr=first_lr(optimizer), found_inf=1.0)
            if self._optimizers.listener is not None and isinstance(optimizer, Optimizer):
                self._optimizers.listener.step_skipped(optimizer)
        else:
            # A step that torch does not wrap has no hooks, so nobody could see whether it ran.
            self._clock.step_skipped(
                entry.key,
                self._now(),
                lr=first_lr(optimizer),
                outcome=Outcome.UNKNOWN,
                evidence=Evidence.NONE,
            )

    def report(self, error: BaseException) -> None:
        """Takes an exception of this package's own code (training thread, hot path)."""
        if self._on_error is not None:
            self._on_error("loss_scale", error)


class _Patches:
    """The wrapped methods of this process, and the watches that listen; one instance."""

    def __init__(self) -> None:
        self.listeners: tuple[ScalerWatch, ...] = ()
        self._originals: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._classes: set[type] = set()
        # Garbage collection may detach a watch while this thread holds the lock.
        self._lock = threading.RLock()
        self._inside = threading.local()
        self._pid = os.getpid()

    def add(self, watch: ScalerWatch) -> None:
        with self._lock:
            if watch not in self.listeners:
                self.listeners = (*self.listeners, watch)
            self._pid = os.getpid()
            if "torch.distributed.fsdp" in sys.modules:
                import_module("torch.distributed.fsdp.sharded_grad_scaler")
            self._wrap_classes()

    def remove(self, watch: ScalerWatch) -> None:
        with self._lock:
            self.listeners = tuple(one for one in self.listeners if one is not watch)
            if self.listeners:
                return
            for (owner, name), (original, wrapper) in self._originals.items():
                if vars(owner).get(name) is wrapper:
                    setattr(owner, name, original)
            self._originals.clear()
            self._classes.clear()

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
        outer = getattr(self._inside, "method", None)
        if not listeners or outer == name or os.getpid() != self._pid:
            return original(scaler, *args, **kwargs)
        self._inside.method = name
        try:
            optimizer = args[0] if args else kwargs.get("optimizer")
            enabled = scaler.is_enabled()
            begun = _begin(listeners, optimizer) if enabled and name == "step" else ()
            result = original(scaler, *args, **kwargs)
            if enabled:
                _tell(listeners, name, scaler, optimizer, begun)
            return result
        finally:
            self._inside.method = outer

    def _wrap_classes(self) -> None:
        for owner in _family(GradScaler):
            if owner in self._classes:
                continue
            self._classes.add(owner)
            for name in _METHODS:
                original = vars(owner).get(name)
                if original is not None:
                    wrapper = _pass_through(name, original)
                    self._originals[owner, name] = (original, wrapper)
                    setattr(owner, name, wrapper)


def _pass_through(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scaler_method(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        return _PATCHES.call(name, original, self, args, kwargs)

    return scaler_method


def _begin(
    listeners: tuple[ScalerWatch, ...], optimizer: object
) -> tuple[tuple[KnownOptimizer, int] | None, ...]:
    begun: list[tuple[KnownOptimizer, int] | None] = []
    for watch in listeners:
        entry = None
        try:
            entry = watch.step_begins(optimizer)
        except Exception as error:  # noqa: BLE001
            watch.report(error)
        begun.append(entry)
    return tuple(begun)


def _tell(
    listeners: tuple[ScalerWatch, ...],
    name: str,
    scaler: GradScaler,
    optimizer: object,
    begun: tuple[tuple[KnownOptimizer, int] | None, ...],
) -> None:
    for index, watch in enumerate(listeners):
        try:
            if name == "step":
                watch.scaled(scaler)
                watch.step_returned(scaler, optimizer, begun[index])
            elif name == "scale":
                watch.scaled(scaler)
        except Exception as error:  # noqa: BLE001
            watch.report(error)


def _family(owner: type) -> Iterator[type]:
    yield owner
    for child in owner.__subclasses__():
        yield from _family(child)


def _alive(references: list[weakref.ref[GradScaler]]) -> list[GradScaler]:
    return [scaler for scaler in (reference() for reference in references) if scaler is not None]


def _holds(references: list[weakref.ref[GradScaler]], scaler: GradScaler) -> bool:
    return any(reference() is scaler for reference in references)


_PATCHES = _Patches()

USER_CALL_CODE = _Patches.call.__code__
"""Of the frame that calls a scaler's own method: what runs directly below it is the user's program."""
