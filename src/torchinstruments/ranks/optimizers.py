"""Sees optimizers step through torch's global step hooks, and tells the clock about those of this model.

An optimizer counts when at least one of its parameters belongs to the model *at that moment*: ``fully_shard``
and the like replace parameters, and optimizers come and go. `ranks.membership` says so, at microseconds a
step.

What wraps an optimizer and is none to torch (Accelerate's, DeepSpeed's, Lightning's) is seen through to the
one whose steps torch announces.

A fused optimizer is called by a `GradScaler` on a skipped step too and decides on the device. Its hooks prove
nothing there, so its outcome stays unknown until better evidence comes.
"""

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.inner_optimizer import inner_optimizer
from torchinstruments.ranks.membership import Membership, Place
from torchinstruments.ranks.step_hooks import CALLER_DEPTH, StepHooks
from torchinstruments.ranks.window import APPLIED, Judgement
from torchinstruments.records import Evidence, Outcome

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001 - has no public name
_UNDECIDED = Judgement(Outcome.UNKNOWN, Evidence.NONE)

__all__ = ["KnownOptimizer", "OptimizerWatch", "StepListener", "first_lr", "unwrapped"]


class StepListener(Protocol):
    """Who looks at gradients when optimizers step. Nothing raises here."""

    def step_began(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Takes that a step begins (training or autograd thread, hot path)."""
        ...

    def step_ended(self, optimizer: Optimizer) -> None:
        """Takes that a step is over (training or autograd thread, hot path)."""
        ...

    def step_skipped(self, optimizer: Optimizer) -> None:
        """Takes that the loss scaler skipped a step (training thread, hot path)."""
        ...


@dataclass(slots=True)
class KnownOptimizer:
    """One optimizer that stepped while the watch was attached.

    Attributes:
        reference: To the optimizer; it is never kept alive.
        key: Names it to the clock.
        belongs: Whether a parameter of it is the model's, or it was named.
        place: Which one that is; None where none is, or where it was named.
        is_of_other: Whether it holds parameters, none of them the model's, and was not named.
        num_ended: Steps of it that ended.
        decides_on_device: Whether a scaler left it to the last of them to skip, on the device.
        asked_at: Root forwards that had begun when it was last asked whether it belongs.
    """

    reference: weakref.ref[Optimizer]
    key: int
    belongs: bool
    place: Place | None
    is_of_other: bool
    num_ended: int = 0
    decides_on_device: bool = False
    asked_at: int = -1


_Call: TypeAlias = tuple[int, CodeType, weakref.ref[Optimizer]]
"""A step that runs, known by the address of its frame, which is its own for as long as it runs; by its code,
and by the optimizer. A reference to the frame would keep the locals of all its callers alive after an
exception."""


def _is_below(call: _Call, frame: FrameType | None) -> bool:
    """Whether the call is this frame or one of its callers, on this thread's stack."""
    address, code, optimizer = call
    while frame is not None:
        if id(frame) == address and frame.f_code is code:
            return frame.f_locals.get("self", optimizer()) is optimizer()
        frame = frame.f_back
    return False


class OptimizerWatch:
    """Feeds a `StepClock` from the step hooks of all optimizers in the process.

    Nothing raises out of its hooks: errors go to `on_error`, under the probe ``optimizer``.
    """

    def __init__(
        self,
        clock: StepClock,
        model: Callable[[], nn.Module | None],
        only: Optimizer | Sequence[Optimizer] | None = None,
        *,
        on_error: Callable[[str, BaseException], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
        listener: StepListener | None = None,
    ) -> None:
        """Makes a watch that is not attached yet.

        Args:
            clock: Receives the events.
            model: Returns the model, or None where it is gone. It should not keep it alive: the hooks are
                global and live until `detach`.
            only: The optimizers that count, whatever their parameters; None counts those of the model.
            on_error: Called with probe and exception for everything that fails inside a hook.
            now: Monotonic seconds, the same clock that the `StepClock` is fed with.
            listener: Told of every step of this model's optimizers, those inside other steps included.
        """
        self.listener = listener
        self.on_ended: Callable[[KnownOptimizer], None] | None = None
        """Told of every step of this model's optimizers that ended, after the clock was (hot path)."""
        self.asked_for: KnownOptimizer | None = None
        """Which one a scaler asks for as it steps it: where no forward came since, the step asks no more."""
        self.on_skipped: tuple[Callable[[Optimizer], None], ...] = ()
        """Told, beside the listener, of every step that the loss scaler skipped (hot path)."""
        self.on_stepped: tuple[Callable[[KnownOptimizer], None], ...] = ()
        """Told of every step of this model's optimizers that ended, last of all (hot path)."""
        self.on_detached: tuple[Callable[[], None], ...] = ()
        """Told that no step will be seen any more (any thread)."""
        self.latest: KnownOptimizer | None = None
        """The optimizer of this model whose step began last."""
        self._clock = clock
        self._membership = Membership(model)
        self._only = None if only is None else _references(only)
        self._on_error = on_error
        self._now = now
        self._known: dict[int, KnownOptimizer] = {}
        self._next_key = 0
        self._outermost: _Call | None = None
        self._hooks = StepHooks(self._step_started, self._step_ended)
        self._is_attached = False

    def attach(self) -> None:
        """Begins to see steps. Attaching twice is attaching once."""
        if self._is_attached:
            return
        self._is_attached = True
        self._clock.ask_whether_running(self._is_running)
        self._hooks.attach()

    def detach(self) -> None:
        """Sees no step any more and forgets every optimizer."""
        self._hooks.detach()
        self._is_attached = False
        self._clock.ask_whether_running(None)
        self._known.clear()
        self.latest = None
        for told in self.on_detached:
            told()

    def known(self, optimizer: object) -> KnownOptimizer | None:
        """Returns what is known of an optimizer of this model, or None for one of another model.

        Costs microseconds for one that was seen before (training thread, hot path).

        Args:
            optimizer: Any object, a wrapper of an optimizer too; what cannot step a model's parameters is
                none of its optimizers.
        """
        entry = self.latest
        if entry is None or entry.reference() is not optimizer:
            entry = self._known.get(id(optimizer))
        if entry is None or entry.reference() is not optimizer:
            optimizer = unwrapped(optimizer)
            if optimizer is None:
                return None
            entry = self._known.get(id(optimizer))
        if not isinstance(optimizer, Optimizer):
            return None
        num_forwards = self._clock.num_forwards
        if entry is None or entry.reference() is not optimizer:
            entry = self._get_to_know(optimizer)
        elif self._only is None:
            entry.place = place = self._membership.again(optimizer, entry.key, entry.place, num_forwards)
            entry.belongs = place is not None
            entry.is_of_other = place is None and _has_parameters(optimizer)
        entry.asked_at = num_forwards
        return entry if entry.belongs else None

    def _step_started(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            entry, self.asked_for = self.asked_for, None
            if (
                entry is None
                or entry.reference() is not optimizer
                or entry.asked_at != self._clock.num_forwards
            ):
                entry = self.latest
                # Of those that were named nothing changes.
                if self._only is None or entry is None or entry.reference() is not optimizer:
                    entry = self.known(optimizer)
                    if entry is None:
                        return
            self.latest = entry
            caller = sys._getframe(CALLER_DEPTH)  # noqa: SLF001
            # The caller's own frame may have the address of one that an exception has left.
            if self._outermost is not None and not _is_below(self._outermost, caller.f_back):
                self._outermost = None
                self._clock.step_aborted(self._now())
            if self._outermost is None:
                self._outermost = id(caller), caller.f_code, entry.reference
            elif not self._clock.is_stepping:
                # A forward of another thread took the outer step for one that raised: its end tells better.
                return
            if self.listener is not None:
                self.listener.step_began(optimizer, has_closure=_has_closure(args, kwargs))
            self._clock.step_started(entry.key, self._now(), in_backward=_graph_task() != -1)
        except Exception as error:  # noqa: BLE001
            self._report(error)

    def _step_ended(self, optimizer: Optimizer, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            # The verdict of the step's start holds for its end.
            entry = self.latest
            if entry is None or entry.reference() is not optimizer:
                entry = self._known.get(id(optimizer))
            if entry is None or not entry.belongs:
                if entry is not None:
                    self._other_ended(entry)
                return
            entry.num_ended += 1
            if self.listener is not None:
                self.listener.step_ended(optimizer)
            if self._outermost is not None and self._outermost[0] == id(sys._getframe(CALLER_DEPTH)):  # noqa: SLF001
                self._outermost = None
            # Whether a scaler left it to the optimizer to skip, on the device.
            entry.decides_on_device = (
                getattr(optimizer, "found_inf", None) is not None or kwargs.get("grad_scaler") is not None
            )
            judgement = _UNDECIDED if entry.decides_on_device else APPLIED
            self._clock.step_ended(entry.key, self._now(), lr=first_lr(optimizer), judgement=judgement)
            if self.on_ended is not None:
                self.on_ended(entry)
            for told in self.on_stepped:
                told(entry)
        except Exception as error:  # noqa: BLE001
            self._report(error)

    def _other_ended(self, entry: KnownOptimizer) -> None:
        self._membership.stepped(entry.key)
        # One inside a step of the model's is part of it, as an optimizer's own parts are.
        if entry.is_of_other and self._outermost is None:
            # As a bare number it keeps no event of the device.
            self._clock.other_model_stepped(float(self._now()))

    def _is_running(self) -> bool:
        return self._outermost is not None and _is_below(self._outermost, sys._getframe(1))  # noqa: SLF001

    def _get_to_know(self, optimizer: Optimizer) -> KnownOptimizer:
        identity, key = id(optimizer), self._next_key
        self._next_key += 1
        entries, clock = self._known, self._clock

        def forget(_: weakref.ref[Optimizer]) -> None:
            entry = entries.get(identity)
            # The address may belong to a younger optimizer by now.
            if entry is not None and entry.key == key:
                del entries[identity]
            clock.optimizer_gone(key)

        if self._only is None:
            place = self._membership.find(optimizer)
            belongs = place is not None
        else:
            place, belongs = None, any(reference() is optimizer for reference in self._only)
        is_of_other = not belongs and _has_parameters(optimizer)
        if is_of_other and self._only is not None:
            is_of_other = self._membership.find(optimizer) is None
        entry = KnownOptimizer(weakref.ref(optimizer, forget), key, belongs, place, is_of_other)
        self._known[identity] = entry
        return entry

    def _report(self, error: BaseException) -> None:
        if self._on_error is not None:
            self._on_error("optimizer", error)


def unwrapped(optimizer: object) -> Optimizer | None:
    """Returns the optimizer whose steps torch announces, in whatever wrappers, or None (any thread).

    An optimizer of its own whose step torch never wrapped is returned too, though nobody sees it step.

    Args:
        optimizer: Any object.
    """
    found = inner_optimizer(optimizer)
    return found if isinstance(found, Optimizer) else None


def first_lr(optimizer: object) -> float | None:
    """Returns the learning rate of an optimizer's first group, or None.

    A learning rate that is a tensor may lie on a device, and reading it would wait for the device.

    Args:
        optimizer: Anything with ``param_groups``.
    """
    groups = getattr(optimizer, "param_groups", None)
    lr = groups[0].get("lr") if groups else None
    if type(lr) is float:
        return lr
    return float(lr) if isinstance(lr, (int, float)) and not isinstance(lr, bool) else None


def _has_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer steps anything on this rank; of one that is sharded a rank may have no part."""
    return any(group.get("params") for group in optimizer.param_groups)


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a step was given a function that runs forwards; its first argument is the optimizer."""
    return callable(args[1] if len(args) > 1 else kwargs.get("closure"))


def _references(only: Optimizer | Sequence[Optimizer]) -> tuple[weakref.ref[Optimizer], ...]:
    named = (only,) if isinstance(only, Optimizer) else only
    return tuple([weakref.ref(optimizer) for optimizer in named])
