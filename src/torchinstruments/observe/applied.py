"""The gradients that optimizers find, and the parameters of one observer over time.

What a step finds belongs to the last sampled forward of the open attempt: its gradients are in it, together
with those of the attempt's other micro-batches. Each parameter is taken once a sample, by the first step that
has it; of nested optimizers that is the outer one.

A step that runs a closure finds nothing yet when it begins. Where it ran one forward, the gradient is taken
when it ends, as the step left it; where it ran several (LBFGS), what it applied is none of them.
"""

import time
import weakref
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from torchinstruments.observe.engine import graph_task, is_capturing_graph, is_in_backward
from torchinstruments.observe.faults import Faults, Tally
from torchinstruments.observe.observation import (
    Delivery,
    Recipe,
    absence_metrics,
    send_together,
    take_absence,
)
from torchinstruments.observe.parameters import (
    ParameterGradients,
    take_gradient,
)
from torchinstruments.observe.part import Part
from torchinstruments.observe.session_protocol import ScaleSource
from torchinstruments.observe.sharding import ManagedParameters
from torchinstruments.records import GradSync, Position, Reason, ScaleProvenance, Signal, Stage
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.isolation import functions_off, isolated, unintercepted

__all__ = ["ParameterTracker", "StepRelay"]

_PROBE = "gradient"


class ParameterTracker:
    """All parameters of one observer whose gradients are awaited.

    Args:
        recipe: What is computed of each gradient.
        faults: Takes errors.
        scale: Knows the loss scale; None where nobody watches for one.
        deliver: Takes what a step found; it must not raise.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        faults: Faults,
        scale: ScaleSource | None,
        deliver: Callable[[Delivery], None],
    ) -> None:
        self._recipe = recipe
        self._absence_metrics = absence_metrics(recipe.reducers)
        self._faults = faults
        self._scale = scale
        self._deliver = deliver
        self._latest: ParameterGradients | None = None
        self._awaiting: dict[ParameterGradients, None] = {}
        self._is_closed = False
        self._num_forwards = 0
        self._forwards_before: dict[int, int] = {}

    def root_started(self, position: Position) -> None:
        """Takes that a root forward begins (training thread, hot path)."""
        if not position.grad_enabled:
            return
        self._num_forwards += 1
        self._withdraw_all()
        latest = self._latest
        if latest is not None and latest.attempt != position.attempt:
            self._latest = None

    def sampled(
        self, position: Position, grad_sync: GradSync, managed: ManagedParameters
    ) -> ParameterGradients:
        """Returns what takes the gradients of a sampled forward that begins (training thread, hot path)."""
        # Those of other threads' forwards.
        self._withdraw_all()
        self._latest = latest = ParameterGradients(grad_sync, position.attempt, managed)
        self._awaiting[latest] = None
        if self._is_closed:
            # By another thread, meanwhile.
            latest.withdraw()
        return latest

    def close(self) -> None:
        """Takes the hooks out of the parameters and awaits nothing more. Idempotent (any thread)."""
        self._is_closed = True
        self._withdraw_all()
        self._latest = None

    def _withdraw_all(self) -> None:
        """Takes all hooks out of the parameters: threads that begin at once each left theirs (any thread)."""
        while self._awaiting:
            for one in list(self._awaiting):
                one.withdraw()
                self._awaiting.pop(one, None)

    def step_began(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Takes that a step begins; it never raises (training or autograd thread, hot path)."""
        if has_closure:
            self._forwards_before[id(optimizer)] = self._num_forwards
        else:
            self._take(optimizer, "")

    def step_ended(self, optimizer: Optimizer) -> None:
        """Takes that a step is over; it never raises (training or autograd thread, hot path)."""
        before = self._forwards_before.pop(id(optimizer), None)
        if before is not None:
            is_one = self._num_forwards - before <= 1
            self._take(optimizer, "" if is_one else Reason.SEVERAL_EVALUATIONS.value)

    def step_skipped(self, optimizer: Optimizer) -> None:
        """Takes that the loss scaler skipped a step; it never raises (training thread, hot path)."""
        self._take(optimizer, Reason.STEP_SKIPPED.value)

    def _take(self, optimizer: Optimizer, reason: str) -> None:
        """Takes what a step found of the parameters that no step had before."""
        latest = self._latest
        if latest is None or latest.facts is None or not latest.pending:
            return
        try:
            self._take_due(latest, _due(latest, optimizer), optimizer, reason)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._faults.report(_PROBE, "", error)

    def _take_due(
        self, latest: ParameterGradients, due: list[int], optimizer: Optimizer, reason: str
    ) -> None:
        """Takes the gradients of some targets."""
        facts = latest.facts
        if not due or facts is None:
            return
        started_s = time.perf_counter()
        for index in due:
            del latest.pending[index]
        sample = latest.sample
        if is_in_backward() and sample is not None and not sample.closed:
            # An optimizer that steps inside the backward: what it finds is delivered with that.
            traversal = sample.running(graph_task())
            if traversal is not None:
                _add(traversal.part(), latest, due, reason, traversal.tally)
                traversal.collection_s += time.perf_counter() - started_s
                return
        tally = Tally(self._faults)
        part = self._recipe.part(facts.ordinal, tally.fail)
        _add(part, latest, due, reason, tally)
        scale, provenance = self._scale_left(part, optimizer, facts.position.forward_index, tally)
        with functions_off(), isolated("cpu"):
            part.batch.seal(latest.transfer)
        if latest.transfer is not None:
            send_together(latest.transfer, tally.fail)
        self._deliver(
            Delivery(
                facts=facts,
                state=latest.state,
                backward_index=None,
                settled=True,
                collection_s=time.perf_counter() - started_s,
                errors=tally.errors,
                parts=(part,),
                absence_metrics=self._absence_metrics,
                scale_provenance=provenance,
                scale=scale,
                at_step=True,
            )
        )

    def _scale_left(
        self, part: Part, optimizer: Optimizer, forward_index: int, tally: Tally
    ) -> tuple[tuple[ScalarBatch, int] | float | None, ScaleProvenance]:
        """Takes the factor along that is still in the gradients."""
        if self._scale is None:
            return None, ScaleProvenance.UNKNOWN
        try:
            factor, provenance = self._scale.scale_left(optimizer, forward_index)
            if not isinstance(factor, torch.Tensor):
                return factor, provenance
            if is_capturing_graph():
                return None, provenance
            with unintercepted():
                device_type = factor.device.type
            with functions_off(), isolated(device_type):
                return (part.batch, part.batch.add_scalar(factor)), provenance
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            tally.fail("loss_scale", error)
            return None, ScaleProvenance.UNKNOWN


class StepRelay:
    """Tells the tracker of an observer about optimizer steps, as long as it lives.

    The hooks of optimizers are global and must not keep an observer and its model alive.
    """

    def __init__(self) -> None:
        self._tracker: weakref.ref[ParameterTracker] | None = None

    def connect(self, tracker: ParameterTracker) -> None:
        """Takes who is told from here on (training thread, at attach)."""
        self._tracker = weakref.ref(tracker)

    def step_began(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Takes that a step begins; it never raises (training or autograd thread, hot path)."""
        if (tracker := self._target()) is not None:
            tracker.step_began(optimizer, has_closure=has_closure)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Takes that a step is over; it never raises (training or autograd thread, hot path)."""
        if (tracker := self._target()) is not None:
            tracker.step_ended(optimizer)

    def step_skipped(self, optimizer: Optimizer) -> None:
        """Takes that the loss scaler skipped a step; it never raises (training thread, hot path)."""
        if (tracker := self._target()) is not None:
            tracker.step_skipped(optimizer)

    def _target(self) -> ParameterTracker | None:
        return None if self._tracker is None else self._tracker()


def _due(latest: ParameterGradients, optimizer: Optimizer) -> list[int]:
    """Returns which pending targets an optimizer has."""
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [index for index in latest.pending if id(latest.targets[index].parameter()) in owned]


def _add(part: Part, latest: ParameterGradients, due: list[int], reason: str, tally: Tally) -> None:
    """Measures the gradients of some targets, or says why a step applied none."""
    for index in due:
        target = latest.targets[index]
        tally.layer = target.call.layer.name
        why = reason or target.refusal
        if not why:
            take_gradient(part, target, Stage.APPLIED, tally)
            continue
        take_absence(
            part, target.call, Signal.PARAMETER_GRADIENT, target.name, why, target.like, Stage.APPLIED
        )
