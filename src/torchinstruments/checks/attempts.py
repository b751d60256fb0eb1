"""Counts attempts for a session that works alone: the clock of observers, fed by the same adapters.

Micro-batches are forwards of the model with gradients. Where the model is called as a whole they are seen by
a hook on it; where it never is (only parts of it are called, or the call is compiled), each backward stands
for one. Skipped steps come from the loss scaler.

The clock is told when forwards begin and not when they end, which would take a step longer and would tell
nothing but times: no report of checks has the times of an attempt.
"""

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from torchinstruments.observe.engine import graph_task, rehearsal, run_while_traced
from torchinstruments.observe.root import RootWatch
from torchinstruments.observe.stack import is_inside_itself
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.declared_scale import DeclaredScale
from torchinstruments.ranks.loss_scale import ScalerWatch
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.records import ClosedAttempt

__all__ = ["Attempts", "OwnAttempts"]


class Attempts(Protocol):
    """What a session counts with: `OwnAttempts`, or those of an observer of the same model.

    Attributes:
        clock: Says where training stands; only read here.
        optimizers: Knows the model's optimizers.
        scale: Knows the loss scale.
        counts_backwards: Whether each backward stands for a forward, as none has been seen.
    """

    clock: StepClock
    optimizers: OptimizerWatch
    scale: ScalerWatch
    counts_backwards: bool

    def attach(self) -> None:
        """Begins to count (training thread)."""
        ...

    def detach(self) -> None:
        """Leaves no trace. Idempotent (training thread)."""
        ...

    def backward_began(self) -> None:
        """Takes the begin of a backward (autograd thread, hot path)."""
        ...

    def boundary_entered(self, global_step: int | None, micro_batches: int | None) -> bool:
        """Takes that the program says where an attempt begins; False inside another one (training thread)."""
        ...

    def boundary_left(self, *, failed: bool) -> Sequence[ClosedAttempt]:
        """Takes that it is over, and returns its records (training thread, hot path)."""
        ...


class OwnAttempts:
    """The attempts of one model.

    Args:
        model: Whose they are; held weakly.
        optimizers: Those that count; None for every one that steps the model's parameters.
        scaler: What the caller says of the loss scale.
        on_skipped: Told of steps that a scaler skipped.
        on_closed: Takes attempts that ended.
        on_error: Takes probe and exception.
        on_notice: Takes probe and a sentence.
        first_attempt: Number of the first attempt.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] | None,
        scaler: DeclaredScale,
        *,
        on_skipped: Callable[[Optimizer], None],
        on_closed: Callable[[Sequence[ClosedAttempt]], None],
        on_error: Callable[[str, BaseException], None],
        on_notice: Callable[[str, str], None],
        first_attempt: int = 0,
    ) -> None:
        self.clock = StepClock(
            declared_optimizer=optimizers is not None, first_attempt=first_attempt, hears_ends=False
        )
        self.optimizers = OptimizerWatch(self.clock, weakref.ref(model), optimizers, on_error=on_error)
        self.optimizers.on_skipped = (on_skipped,)
        self.scale = ScalerWatch(
            self.clock, self.optimizers, declared=scaler, on_error=on_error, on_notice=on_notice
        )
        self._model = weakref.ref(model)
        self._on_closed = on_closed
        self._on_error = on_error
        self._roots = RootWatch(model, takes_input=False, sees_ends=False)
        self._lock = threading.RLock()
        self.counts_backwards = True
        self._is_attached = False
        self.num_too_deep = 0
        """Hooks of the model that the stack had no room for."""
        self.raised = 0
        """Nothing is raised on purpose here."""

    def attach(self) -> None:
        """Begins to count (training thread)."""
        self._is_attached = True
        self.optimizers.attach()
        self.scale.attach()
        model = self._model()
        if model is not None and not isinstance(model, torch.jit.ScriptModule):
            self._roots.attach(model, self)

    def detach(self) -> None:
        """Leaves no hook, and tells of the attempt that is open. Idempotent."""
        if not self._is_attached:
            return
        self._is_attached = False
        self._roots.remove()
        # First: it tells of gradients that were unscaled and never stepped.
        self.scale.detach()
        self.optimizers.detach()
        with self._lock:
            closed = self.clock.close(time.perf_counter())
        self._leave(closed)

    def backward_began(self) -> None:
        """Takes the begin of a backward (autograd thread, hot path)."""
        if not self.counts_backwards:
            return
        with self._lock:
            started = self.clock.forward_started(
                grad_enabled=True, now_s=time.perf_counter(), now_us=time.time_ns() // 1000
            )
        self._leave(started.closed)

    def boundary_entered(self, global_step: int | None, micro_batches: int | None) -> bool:
        """Takes that the program says where an attempt begins; False inside another one (training thread)."""
        with self._lock:
            closed = self.clock.boundary_entered(
                time.perf_counter(),
                time.time_ns() // 1000,
                global_step=global_step,
                micro_batches_declared=micro_batches,
            )
        if closed is None:
            return False
        self._leave(closed)
        return True

    def boundary_left(self, *, failed: bool) -> Sequence[ClosedAttempt]:
        """Takes that it is over, and returns its records too (training thread, hot path)."""
        with self._lock:
            closed = self.clock.boundary_left(time.perf_counter(), failed=failed)
        self._leave(closed)
        return closed

    def root_started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:  # noqa: ARG002 - the shape of a root observer
        """Takes the begin of a call of the model; it never raises (training thread, hot path)."""
        if not self._is_attached or graph_task() != -1 or rehearsal():
            return
        try:
            if is_inside_itself(module):
                return
            if self._roots.is_inside_another(module):
                # The model inside its wrapper, which runs it uncompiled.
                return
            grad_enabled = torch.is_grad_enabled()
            if grad_enabled:
                self.counts_backwards = False
            with self._lock:
                started = self.clock.forward_started(
                    grad_enabled=grad_enabled, now_s=time.perf_counter(), now_us=time.time_ns() // 1000
                )
            if started.closed:
                self._on_closed(started.closed)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._on_error("forward", error)

    def root_ended(self, module: nn.Module, output: object) -> None:
        """Takes nothing: nobody asks (training thread, hot path)."""

    @run_while_traced
    def root_exported(self) -> None:
        """Takes that ``torch.export`` traces a call, which is none; it never raises (exporting thread)."""

    @run_while_traced
    def root_compiled(self) -> None:
        """Takes that ``torch.compile`` traces a call; it never raises (compiling thread)."""
        if not self._is_attached or torch.compiler.is_dynamo_compiling():
            return
        try:
            self._roots.follow(self)
        except Exception as error:  # noqa: BLE001 - nothing may reach the compiler
            self._on_error("forward", error)

    def _leave(self, closed: Sequence[ClosedAttempt]) -> None:
        if closed:
            self._on_closed(closed)
