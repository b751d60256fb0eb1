"""Where optimizers write: the moment before, closures included, and the moment after.

Torch's global step hooks see every optimizer, those made later too. Only one of the session's own is looked
at, and only the outermost of nested steps. A raise from the hook before a step leaves ``optimizer.step()``
with the weights as they were.

A step that is given a closure has no gradients yet when it begins, so the closure is wrapped and the look
comes after each evaluation, before the optimizer goes on.

Where nothing looks at a step, the steps are counted as who feeds the clock has seen them, without hooks of
their own. Where who feeds it ends first, as an observer that is closed, they are counted by hooks from there
on.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer

from torchinstruments.ranks.optimizers import KnownOptimizer, OptimizerWatch
from torchinstruments.ranks.step_hooks import StepHooks

__all__ = ["StepSite", "StepVisitor", "WatchedClosure"]


class StepVisitor(Protocol):
    """Looks at steps."""

    def is_own(self, optimizer: Optimizer) -> bool:
        """Returns whether a step that begins is the outermost of one of its optimizers (hot path)."""
        ...

    def step_counted(self, known: KnownOptimizer) -> None:
        """Takes that a step ended, where none is looked at; it never raises (training thread, hot path)."""
        ...

    def before_write(self, optimizer: Optimizer, evaluation: int) -> None:
        """Looks before the optimizer writes (training thread, hot path).

        Raises:
            CheckViolationError: A check that was asked to raise found something.
        """
        ...

    def after_write(self, optimizer: Optimizer) -> None:
        """Looks after it wrote (training thread, hot path).

        Raises:
            CheckViolationError: A check that was asked to raise found something.
        """
        ...


def _nobody() -> None:
    """Stands where a reference to an optimizer would stand."""


class StepSite:
    """The step hooks of one session.

    Args:
        visitor: Held weakly, since the hooks are the process's.
    """

    def __init__(self, visitor: StepVisitor) -> None:
        self._visitor = weakref.ref(visitor)
        self._hooks = StepHooks(self._began, self._ended)
        self._running: Callable[[], Optimizer | None] = _nobody
        self._latest: Callable[[], Optimizer | None] = _nobody
        self._counting: OptimizerWatch | None = None

    def attach(self, counting: OptimizerWatch | None = None) -> None:
        """Registers the hooks. Attaching twice is attaching once.

        Args:
            counting: Sees the steps that are only counted; None has all looked at.
        """
        if counting is None:
            self._hooks.attach()
        elif self._counting is None:
            self._counting = counting
            counting.on_stepped = (*counting.on_stepped, self._counted)
            counting.on_detached = (*counting.on_detached, self._left_alone)

    def detach(self) -> None:
        """Removes them. Idempotent."""
        self._leave()
        self._hooks.detach()
        self._running = _nobody

    def _leave(self) -> None:
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.on_stepped = tuple([told for told in counting.on_stepped if told != self._counted])
            counting.on_detached = tuple([told for told in counting.on_detached if told != self._left_alone])

    def _left_alone(self) -> None:
        """Takes that nobody else sees steps any more (any thread)."""
        self._leave()
        self._hooks.attach()

    def _counted(self, known: KnownOptimizer) -> None:
        visitor = self._visitor()
        if visitor is not None:
            visitor.step_counted(known)

    def _began(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        visitor = self._visitor()
        if visitor is None or not visitor.is_own(optimizer):
            return None
        if self._latest() is not optimizer:
            self._latest = weakref.ref(optimizer)
        self._running = self._latest
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            visitor.before_write(optimizer, 0)
            return None
        watched = WatchedClosure(closure, visitor, optimizer)
        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    def _ended(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._running() is not optimizer:
            return
        self._running = _nobody
        visitor = self._visitor()
        if visitor is not None:
            visitor.after_write(optimizer)


class WatchedClosure:
    """A closure after whose every evaluation the gradients are looked at.

    Args:
        closure: The program's.
        visitor: Looks at them.
        optimizer: Whose they are.
    """

    def __init__(self, closure: Callable[[], Any], visitor: StepVisitor, optimizer: Optimizer) -> None:
        functools.update_wrapper(self, closure)
        self._closure = closure
        self._visitor = visitor
        self._optimizer = optimizer
        self._num_evaluations = 0

    def __call__(self) -> Any:
        """Evaluates it (training thread, hot path).

        Raises:
            CheckViolationError: A check that was asked to raise found something.
        """
        loss = self._closure()
        self._visitor.before_write(self._optimizer, self._num_evaluations)
        self._num_evaluations += 1
        return loss
