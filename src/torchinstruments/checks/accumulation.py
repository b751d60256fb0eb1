"""Where gradients are added to: which parameters each backward reached, and when it is over.

A hook notes which parameter it was called for and does nothing else; everything that costs is done once, at
the end of the backward, for all of them together. Where nobody has to know which ones those were, it counts,
and the end is not awaited, unless many were counted since the last step: there may be one among them that
goes on around all others. Once they were alike for long, one parameter has a hook and all others have none,
for as long as that one misses nothing (`torchinstruments.checks.lookout`).
Backwards are told apart by the engine's own number, so that two of disjoint parameters are two, and a layer
that is used twice is reached once. The inner backwards that reentrant checkpointing makes of one are counted
as that one.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch._C import _current_graph_task_id as graph_task
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import CheckpointFunction

from torchinstruments.checks.inventory import Entry
from torchinstruments.checks.lookout import Lookout, passed
from torchinstruments.observe.engine import call_at_end_of_backward, latest_graph_task
from torchinstruments.observe.hooks import HookThatStays, put_back, take_out
from torchinstruments.ranks.tracing import runs_for_a_compiler
from torchinstruments.statistics.isolation import unintercepted

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["CROWDED", "AccumulationSite", "BackwardListener"]

CROWDED = 32
"""Backwards that are kept in mind before a step is worth forgetting them."""

_MAX_UNAWAITED = 64
_MAX_OPEN = 128
_RECOMPUTING = CheckpointFunction.backward.__code__


class BackwardListener(Protocol):
    """Is told of backwards that reach a parameter. Nothing raises here."""

    def backward_began(self, *, is_counted: bool) -> None:
        """Takes the first gradient of a backward (autograd thread, hot path).

        Args:
            is_counted: Whether its end will not be told, after `AccumulationSite.counts_only`.
        """
        ...

    def backward_ended(self, fired: Sequence[int]) -> None:
        """Takes which parameters a backward reached, in that order (autograd thread, hot path)."""
        ...

    def accumulated(self, index: int) -> None:
        """Takes that a gradient is there, which will not stay what it is (autograd thread, hot path)."""
        ...


class Reached:
    """What a backward that runs has reached so far.

    Args:
        task: The engine's number of the backward.
        fired: Takes the ids of parameters, since they themselves would be kept alive, and with them whatever
            their hooks hold; None where they are counted.
    """

    __slots__ = ("fired", "number", "task")

    def __init__(self, task: int, fired: list[int] | None) -> None:
        self.task = task
        self.fired = fired
        self.number = 0
        """How many were counted."""


class _Latest:
    """The backward that reached a parameter last.

    Attributes:
        reached: What it has reached; replaced as a whole.
    """

    __slots__ = ("reached",)

    def __init__(self) -> None:
        self.reached = _NO_BACKWARD


_NO_BACKWARD = Reached(-2, None)


def fire_hook(site: "AccumulationSite", latest: _Latest) -> Callable[[torch.Tensor], None]:
    """Returns the post-accumulate hook of all parameters, which does as little as it can: each calls it.

    It is one function, since one for each parameter would have to be fetched from memory each time, as would
    what it holds. Neither a copy nor a pickle of a tensor takes it along.

    Args:
        site: Told of the first gradient of a backward; held weakly.
        latest: What the site knows of the backward that ran last.
    """
    held = weakref.ref(site)

    def fire(parameter: torch.Tensor) -> None:
        try:
            # A compiler that traces this sees true, and an empty hook.
            if is_dynamo_compiling():
                return
            reached = latest.reached
            if graph_task() == reached.task:
                if reached.fired is None:
                    # Nothing lets another thread of the same backward in before it is stored.
                    reached.number += 1
                else:
                    reached.fired.append(id(parameter))
                return
            known = held()
            if known is not None and not runs_for_a_compiler():
                known.accumulated(parameter)
        except RecursionError:
            known = held()
            if known is not None:
                known.num_too_deep += 1

    return fire


class _EarlyHook(HookThatStays):
    """Post-accumulate hook of a parameter whose gradient lies where ranks reduce it: it is looked at here.

    Args:
        site: Told of every gradient; held weakly.
        index: Of the parameter.
    """

    __slots__ = ("_index", "_site")

    def __init__(self, site: "AccumulationSite", index: int) -> None:
        self._index = index
        self._site = weakref.ref(site)

    def __call__(self, parameter: torch.Tensor) -> None:
        site = self._site()
        if site is None:
            return
        try:
            if not (is_dynamo_compiling() or runs_for_a_compiler()):
                site.accumulated(parameter)
                site.look_early(self._index)
        except RecursionError:
            site.num_too_deep += 1


class AccumulationSite:
    """The hooks of a session's parameters.

    Args:
        listener: Told of backwards; held weakly, since parameters outlive every session.
        num_forwards: Returns how many forwards of the model have begun.
        on_error: Takes probe and exception.
    """

    def __init__(
        self,
        listener: BackwardListener,
        num_forwards: Callable[[], int],
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self.num_too_deep = 0
        """Hooks that the stack had no room for."""
        self.num_backwards = 0
        """Backwards that reached a parameter."""
        self.frozen_at_attach: frozenset[int] = frozenset()
        """Positions of parameters without a hook, since they needed no gradient."""
        self._listener = weakref.ref(listener)
        self._num_forwards = num_forwards
        self._on_error = on_error
        self.running: dict[int, Reached] = {}
        """What backwards have reached, by the engine's number: that run, raised, or were only counted."""
        self.counts_only = False
        """Whether of the backwards that begin from here on the number of their gradients is enough."""
        self.lookout = Lookout()
        """Says whether all hooks are needed."""
        self._latest = _Latest()
        self.hook = fire_hook(self, self._latest)
        """Of each parameter."""
        self._num_fires = 0
        self._num_before = 0
        self._positions: dict[int, int] = {}
        self._usual: tuple[list[int], list[int]] = ([], [])
        self._last_nested: int | None = None
        self._is_over = False
        self._placed: list[tuple[weakref.ref[torch.Tensor], Callable[[torch.Tensor], None]]] = []

    @property
    def num_fires(self) -> int:
        """Gradients that came, those of the backwards that run only where they are counted."""
        return self._num_fires + sum(reached.number for reached in list(self.running.values()))

    def go_on_from(self, former: "AccumulationSite") -> None:
        """Takes what was counted by the one of an earlier attach (training thread, at attach)."""
        self.num_too_deep = former.num_too_deep
        self.num_backwards = former.num_backwards
        self._num_fires = former.num_fires
        self.lookout.num_missed = former.lookout.num_missed

    def attach(
        self, entries: Sequence[Entry], early: frozenset[int] = frozenset()
    ) -> list[tuple[Entry, Exception]]:
        """Puts a hook on each parameter that can have a gradient; returns those that take none.

        Args:
            entries: The parameters.
            early: Positions of those whose gradient will not stay what it is until the backward's end.
        """
        refused: list[tuple[Entry, Exception]] = []
        frozen: list[int] = []
        for entry in entries:
            with unintercepted():
                needs_gradient, is_leaf = entry.tensor.requires_grad, entry.tensor.is_leaf
            if not needs_gradient:
                frozen.append(entry.index)
            if not needs_gradient or not is_leaf:
                continue
            hook = _EarlyHook(self, entry.index) if entry.index in early else self.hook
            self._positions[id(entry.tensor)] = entry.index
            # Noted before it is placed, so that an interrupt leaves none that is not known.
            self._placed.append((weakref.ref(entry.tensor), hook))
            try:
                with unintercepted():
                    entry.tensor.register_post_accumulate_grad_hook(hook)
            except Exception as error:  # noqa: BLE001 - the others are watched all the same
                self._placed.pop()
                refused.append((entry, error))
        self.frozen_at_attach = frozenset(frozen)
        if early:
            self.lookout.give_up()
        return refused

    def detach(self) -> None:
        """Takes every hook out again. Idempotent."""
        self._is_over = True
        for reference, hook in list(self._placed):
            tensor = reference()
            if tensor is not None:
                take_out(tensor, hook)
        self._placed.clear()
        self._forget()
        self._usual = [], []

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Notes that a gradient came; it never raises (autograd thread, hot path)."""
        if self._is_over:
            return
        task = graph_task()
        reached = self.running.get(task)
        if reached is None:
            reached = self._begin(task, parameter)
        self._latest.reached = reached
        if reached.fired is None:
            reached.number += 1
        else:
            reached.fired.append(id(parameter))

    def count_from_here(self, named: AbstractSet[int], awaited: AbstractSet[int] | None) -> None:
        """Counts only, if nothing more can be learnt from names (autograd thread, hot path).

        Args:
            named: Positions of the parameters that were reached before: it has to be all that have a hook.
            awaited: Of those for which backwards are looked out for; None where that is any of them.
        """
        if len(named) < len(self._positions):
            return
        hooked = frozenset(self._positions.values())
        self.counts_only = hooked <= named and (awaited is None or hooked <= awaited)

    def look_early(self, index: int) -> None:
        """Has a gradient looked at in its hook; it never raises (autograd thread, hot path)."""
        listener = self._listener()
        if listener is None:
            return
        try:
            listener.accumulated(index)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._on_error("backward", error)

    def stepped(self) -> None:
        """Sees to it that as many parameters have a hook as are needed (training thread, hot path)."""
        lookout = self.lookout
        lookout.stepped(self.num_backwards)
        if lookout.is_one_enough:
            if graph_task() == -1:
                self._leave_one()
        elif lookout.needs_all and graph_task() == -1:
            self._put_all_back()

    def _leave_one(self) -> None:
        self.lookout.left_one()
        for reference, hook in list(self._placed):
            tensor = reference()
            if tensor is not None and id(tensor) != self.lookout.first:
                take_out(tensor, hook)

    def _put_all_back(self) -> None:
        for reference, hook in list(self._placed):
            tensor = reference()
            if tensor is not None:
                put_back(tensor, hook)
                if self._is_over:
                    # What handles a signal, or another thread, detached meanwhile.
                    take_out(tensor, hook)
                    return
        self.lookout.all_back()

    def catch_up(self, *, is_final: bool = False) -> None:
        """Takes what was traversed since the last backward that was heard of; it never raises (any thread).

        Args:
            is_final: Whether hooks tell of nothing from here on.
        """
        try:
            if self.lookout.may_have_missed:
                is_own = graph_task() == -1
                passed(latest_graph_task(), is_own=is_own)
        except Exception as error:  # noqa: BLE001 - a report is made all the same
            self._on_error("backward", error)
        if is_final:
            self.lookout.give_up()

    def forget_unfinished(self) -> None:
        """Drops backwards whose end never came: they raised or were counted (training, outside of any)."""
        if self.running and graph_task() == -1:
            self._forget()

    def _forget(self) -> None:
        """Drops every backward, but what was counted of it."""
        self._num_fires = self.num_fires
        self._num_before = self._latest.reached.number
        self.running.clear()
        self._latest.reached = _NO_BACKWARD

    def _forget_oldest(self) -> None:
        """Drops the backward that began first, but what was counted of it."""
        task = next(iter(self.running), None)
        reached = None if task is None else self.running.pop(task, None)
        if reached is not None:
            self._num_fires += reached.number

    def _begin(self, task: int, parameter: torch.Tensor) -> Reached:
        num_open = len(self.running)
        if num_open >= _MAX_OPEN:
            self._forget_oldest()
        began = Reached(task, None if self.counts_only else [])
        # The engine's threads of two devices may both find that it begins: one of them is the first.
        reached = self.running.setdefault(task, began)
        if reached is not began:
            return reached
        try:
            if began.fired is None and not self.lookout.is_over:
                before = self._latest.reached
                number = self._num_before if before is _NO_BACKWARD else before.number
                self.lookout.began(task, id(parameter), is_whole=number == len(self._positions))
            if began.fired is not None or num_open >= _MAX_UNAWAITED:
                call_at_end_of_backward(partial(self._ended, task))
            self._count()
            listener = self._listener()
            if listener is not None:
                listener.backward_began(is_counted=began.fired is None)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._on_error("backward", error)
        return reached

    def _count(self) -> None:
        """Counts a backward, those that reentrant checkpointing makes inside another one once with it."""
        # It begins behind the hook: each frame that is looked at is made for that.
        frame: FrameType | None = sys._getframe(3).f_back  # noqa: SLF001 - nothing else tells
        while frame is not None and frame.f_code is not _RECOMPUTING:
            frame = frame.f_back
        is_known = self._last_nested is not None and self._last_nested == self._num_forwards()
        if not is_known:
            self.num_backwards += 1
        self._last_nested = None if frame is None else self._num_forwards()

    def _ended(self, task: int) -> None:
        reached = self.running.pop(task, None)
        if self._latest.reached.task == task:
            self._latest.reached = _NO_BACKWARD
        if reached is None:
            return
        listener, fired = self._listener(), reached.fired
        if fired is None:
            # It was told when it began.
            self._num_fires += reached.number
        if fired is None or listener is None:
            return
        self._num_fires += len(fired)
        try:
            # Most backwards reach the same parameters in the same order.
            usual, positions = self._usual
            if fired != usual:
                known = self._positions
                positions = [known[key] for key in fired if key in known]
                self._usual = fired, positions
            listener.backward_ended(positions)
        except Exception as error:  # noqa: BLE001 - nothing may leave a callback
            self._on_error("backward", error)
