"""The parameters of the selected layers: their values, and their gradients in the backwards of a sample.

A value is taken when a sampled forward begins. A gradient is taken at three moments, which are its stages:
right after a backward has added to it, before ranks reduce it (here); after the end of the backward, and so
of the reduction (here); and as the optimizer's step finds it (`observe.applied`).

``p.grad`` knows no forwards: it holds what all backwards since ``zero_grad`` have added. So it is taken for
the last forward with gradients alone, and only in a backward that comes through an output of it.

Hooks stay on parameters from a sampled forward to the next forward with gradients. They hold no parameter and
no sample, and copies and pickles of the model leave them behind.
"""

import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from torchinstruments.observe.engine import graph_task
from torchinstruments.observe.faults import Tally, too_deep
from torchinstruments.observe.flat_parameters import FlatPart, is_flattened
from torchinstruments.observe.gradients import SampleGradients, Traversal
from torchinstruments.observe.hooks import ParameterHook, take_out
from torchinstruments.observe.observation import (
    Call,
    SampleFacts,
    error_reason,
    note_absence,
    note_tensor,
    take_absence,
    take_tensor,
)
from torchinstruments.observe.observed import Observation
from torchinstruments.observe.part import Part
from torchinstruments.observe.sharding import ManagedParameters
from torchinstruments.records import GradSync, Reason, SampleState, Scope, Signal, Stage
from torchinstruments.statistics.isolation import unintercepted

if TYPE_CHECKING:
    from torchinstruments.statistics.transfer import Transfer

__all__ = [
    "ParameterGradients",
    "ParameterTarget",
    "lack_flattened",
    "lack_gradients",
    "take_gradient",
    "take_parameters",
]

_PROBE = "gradient"
_STAGES = (Stage.LOCAL_ACCUMULATED, Stage.REDUCED, Stage.APPLIED)
_REDUCED = (GradSync.SYNCED, GradSync.NOT_DISTRIBUTED)
_LOST = Reason.NO_GRADIENT.with_detail("another forward with gradients began before this one's backward")
_PARTIAL = Reason.NOT_SYNCHRONISED.with_detail(
    "the backward reached only some of the outputs, so that the reduction may not be over"
)
_SPENT = Reason.NOT_SYNCHRONISED.with_detail(
    "DistributedDataParallel reduces once after a forward, and another backward came before this one"
)
_LEFT_OUT = Reason.NOT_SYNCHRONISED.with_detail("the wrapper around it leaves it alone")
_REDUCED_ONLY = Reason.NOT_SYNCHRONISED.with_detail(
    "it was reduced in its replica alone, and is not there yet"
)
_ONCE_REDUCED = Reason.NO_GRADIENT.with_detail(
    "the wrapper hands it out once it is reduced, also where nothing is sharded"
)
_FLATTENED = Reason.INSIDE_FLAT_PARAMETER.with_detail(
    "use_orig_params=False has put it into _flat_param of the module that FSDP wraps: select that module, "
    "or give use_orig_params=True"
)
_NONE_OR_LOCAL = Reason.NO_GRADIENT.with_detail("none came, or it was not reduced")


@dataclass(frozen=True, slots=True)
class ParameterTarget:
    """One parameter of one layer whose gradient may come.

    Attributes:
        call: The layer, as the forward found it.
        name: The parameter's name in its module.
        parameter: Held weakly.
        like: What was observed of it.
        refusal: Why no gradient of it can be measured, else ``""``.
        is_sharded: Whether its gradient is there only after its reduction (FSDP).
        tells: Whether it says by itself when it was reduced.
        is_left_out: Whether the wrapper around it does not reduce it.
    """

    call: Call
    name: str
    parameter: weakref.ref[torch.Tensor]
    like: Observation
    refusal: str
    is_sharded: bool
    tells: bool
    is_left_out: bool


class ParameterGradients:
    """The gradients of the parameters in the backwards of one sampled forward.

    Args:
        grad_sync: As latched at the forward's start; where its backwards decide, the last one's from then on.
        attempt: Of the forward.
        managed: What wrappers do with the parameters.
    """

    def __init__(
        self,
        grad_sync: GradSync,
        attempt: int | None,
        managed: ManagedParameters,
    ) -> None:
        self.attempt = attempt
        self.targets: list[ParameterTarget] = []
        self.pending: dict[int, None] = {}
        """Targets that no optimizer's step has found yet."""
        self.facts: SampleFacts | None = None
        """Of the sample, once its forward is over."""
        self.state = SampleState.FORWARD_COMPLETE
        self._grad_sync = grad_sync
        self._managed = managed
        self._sample: weakref.ref[SampleGradients] | None = None
        # Of the sample; a step comes when the graph, and the sample's bookkeeping with it, may be gone.
        self._transfer: Transfer | None = None
        self._alike: dict[int, list[int]] = {}
        self._first: dict[int, int] = {}
        self._hooks: dict[ParameterHook, weakref.ref[torch.Tensor]] = {}
        self._came: dict[int, dict[int, tuple[Part, int]]] = {}
        self._is_withdrawn = False
        # The backward that DDP reduces is the first one after its last forward, of whichever forward it is.
        self._other_task: int | None = None
        self._is_reduced = False
        self.num_too_deep = 0
        """Hooks of it that the stack had no room for."""
        # What the last backward added to before it came to an output of the sample.
        self._early: tuple[int, set[int]] = -1, set()
        self._grads_before: dict[int, tuple[int, int] | None] = {}

    @property
    def sample(self) -> SampleGradients | None:
        """The bookkeeping of the sample's backwards, as long as one may come."""
        return None if self._sample is None else self._sample()

    @property
    def transfer(self) -> "Transfer | None":
        """Takes what is measured of the sample on devices (training thread, hot path)."""
        return self._transfer

    def belongs_to(self, sample: SampleGradients) -> None:
        """Takes the bookkeeping of the sample's backwards (training thread, hot path)."""
        self._sample = weakref.ref(sample)
        self._transfer = sample.transfer

    @property
    def awaits_step(self) -> bool:
        """Whether an optimizer's step may bring more of the sample (autograd thread, hot path)."""
        return bool(self.pending) and not self._is_withdrawn

    def expect(self, call: Call, tally: Tally) -> None:
        """Watches for the gradients of a layer's own parameters (training thread, hot path)."""
        for name, parameter in self._managed.own_parameters(call.layer.module):
            with unintercepted():
                # Of a frozen parameter nothing comes, and a model may have thousands of them.
                may_come = parameter.requires_grad and parameter.is_leaf
            if not may_come:
                continue
            index = len(self.targets)
            target = self._target(call, name, parameter)
            self.targets.append(target)
            self.pending[index] = None
            if target.refusal:
                continue
            first = self._first.setdefault(id(parameter), index)
            self._alike.setdefault(first, []).append(index)
            if first == index:
                try:
                    self._hook(parameter, index)
                except Exception as error:  # noqa: BLE001 - the sample goes on with the next parameter
                    tally.fail(_PROBE, error)
                    self.targets[index] = replace(target, refusal=error_reason(error))

    def forward_ended(self, facts: SampleFacts, *, failed: bool) -> None:
        """Takes what is known after the forward (training thread, hot path)."""
        if failed:
            self.withdraw()
            self.pending.clear()
        self.facts = facts

    def withdraw(self) -> None:
        """Takes the hooks out of the parameters. Idempotent (any thread)."""
        self._is_withdrawn = True
        hooks = self._hooks
        while hooks:
            for hook, reference in list(hooks.items()):
                # It is forgotten after it was taken out, since an interrupt may come between the two.
                parameter = reference()
                if parameter is not None:
                    take_out(parameter, hook)
                hooks.pop(hook, None)

    def accumulated(self, target: int) -> None:
        """Measures a gradient that was just added to; it never raises (autograd thread, hot path)."""
        sample = self.sample
        if self._is_withdrawn or sample is None or sample.closed:
            return
        traversal = sample.running(graph_task())
        if traversal is None:
            # A backward of another forward, or of a loss that knows no forward, a penalty of the weights. Or
            # this sample's own, which has not come to an output of it yet.
            task = graph_task()
            if self._other_task is None:
                self._other_task = task
            if self._early[0] != task:
                self._early = task, set()
            self._early[1].update(self._alike[target])
            return
        started_s = time.perf_counter()
        try:
            for index in self._alike[target]:
                self._take_accumulated(traversal, index)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            traversal.tally.fail(_PROBE, error)
        finally:
            traversal.collection_s += time.perf_counter() - started_s

    def backward_began(self, traversal: Traversal) -> None:
        """Notes which gradients are there already (autograd thread, hot path)."""
        if traversal.backward_index == 0 and self._grad_sync is GradSync.SYNCED:
            self._grads_before = {index: _grad_state(target) for index, target in enumerate(self.targets)}

    def backward_ended(self, traversal: Traversal) -> None:
        """Measures the reduced gradients, and says what did not come (autograd thread, hot path)."""
        came = self._came.pop(traversal.task, {})
        if traversal.grad_sync is not None:
            self._grad_sync = traversal.grad_sync
            if self.facts is not None:
                self.facts = replace(self.facts, grad_sync=traversal.grad_sync)
        if self.num_too_deep:
            traversal.tally.layer = ""
            traversal.tally.fail(_PROBE, too_deep(self.num_too_deep))
            self.num_too_deep = 0
        self.state = SampleState.BACKWARD_OBSERVED
        is_first = traversal.backward_index == 0
        if self._other_task == traversal.task:
            self._other_task = None
        refusal = self._refusal_of_reduced(traversal, came)
        self._is_reduced |= not refusal
        early = self._early[1] if self._early[0] == traversal.task else ()
        for index, target in enumerate(self.targets):
            if not is_first and index not in came:
                continue
            traversal.tally.layer = target.call.layer.name
            part = traversal.part()
            local, reduced = self._reasons(target, refusal, has_come=index in came)
            if local:
                _absent(part, target, Stage.LOCAL_ACCUMULATED, local)
            if reduced:
                _absent(part, target, Stage.REDUCED, reduced)
            elif not (index in came or index in early or self._may_be_reduced(index, target)):
                # What stands in it is an earlier backward's.
                _absent(part, target, Stage.REDUCED, Reason.NO_GRADIENT.value)
            elif not (target.tells and index in came):
                take_gradient(part, target, Stage.REDUCED, traversal.tally)
        self._grads_before = {}

    def _may_be_reduced(self, index: int, target: ParameterTarget) -> bool:
        """Returns whether a backward left a gradient here that this rank added nothing to.

        `DistributedDataParallel` writes the mean into a parameter that only other ranks used. It leaves alone
        what no rank used, except where the gradient is a view of its bucket: that is reduced anew.
        """
        if target.is_sharded:
            return True
        if self._grad_sync is not GradSync.SYNCED:
            return False
        return index not in self._grads_before or self._grads_before[index] != _grad_state(target)

    def _target(self, call: Call, name: str, parameter: torch.Tensor) -> ParameterTarget:
        """Returns what is to be known of a parameter before its gradient comes."""
        like = _note(call, name, parameter, self._managed)
        refusal = like.reason if like.reason.startswith(_TAKES_NO_HOOK) else ""
        tells = id(parameter) in self._managed.sharded
        return ParameterTarget(
            call=call,
            name=name,
            parameter=weakref.ref(parameter),
            like=like,
            refusal=refusal,
            is_sharded=tells or is_flattened(parameter),
            tells=tells,
            is_left_out=id(parameter) in self._managed.left_out,
        )

    def _hook(self, parameter: torch.Tensor, index: int) -> None:
        """Puts the hook of a target before those of the program, which may take the gradient away."""
        hook = ParameterHook(self, index)
        self._hooks[hook] = weakref.ref(parameter)
        with unintercepted():
            handle = parameter.register_post_accumulate_grad_hook(hook)
        if self._is_withdrawn:
            # By another thread's forward, meanwhile.
            take_out(parameter, hook)
            return
        with unintercepted():
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        others = [key for key in hooks if key != handle.id]
        # The engine goes by the order of insertion alone. All in one call, so that no other thread's backward
        # can come upon a moment without them.
        deque(map(hooks.__setitem__, others, map(hooks.pop, others)), maxlen=0)

    def _take_accumulated(self, traversal: Traversal, index: int) -> None:
        """Measures the gradient of one target; of several times in one backward the last one counts."""
        target = self.targets[index]
        part = traversal.part()
        traversal.tally.layer = target.call.layer.name
        take_gradient(
            part, target, Stage.REDUCED if target.tells else Stage.LOCAL_ACCUMULATED, traversal.tally
        )
        came = self._came.setdefault(traversal.task, {})
        before = came.get(index)
        if before is not None and before[0] is part:
            part.move_last_to(before[1])
        else:
            came[index] = part, len(part.observations) - 1

    def _refusal_of_reduced(self, traversal: Traversal, came: dict[int, tuple[Part, int]]) -> str:
        """Returns why no gradient was reduced in a backward as far as that is known, else ``""``."""
        if self._grad_sync is GradSync.LOCAL:
            return Reason.NOT_SYNCHRONISED.value
        if self._grad_sync not in _REDUCED:
            return Reason.NOT_SYNCHRONISED.with_detail(f"the synchronisation is {self._grad_sync.value}")
        if not came and not any(target.is_sharded and not target.tells for target in self.targets):
            # It added to no gradient: torch.autograd.grad.
            return Reason.NO_GRADIENT.value
        if self._grad_sync is GradSync.SYNCED and (self._is_reduced or self._other_task is not None):
            return _SPENT
        is_partial = len(came) < len(self.targets) and traversal.sample.num_missing > 0
        return _PARTIAL if is_partial and self._grad_sync is GradSync.SYNCED else ""

    def _refusal_of_shard(self) -> str:
        """Returns why a parameter that tells when it was reduced did not."""
        match self._grad_sync:
            case GradSync.LOCAL:
                return Reason.NOT_SYNCHRONISED.value
            case GradSync.REDUCED_ONLY:
                return _REDUCED_ONLY
            case GradSync.SYNCED:
                return Reason.NO_GRADIENT.value
            case _:
                return _NONE_OR_LOCAL

    def _reasons(self, target: ParameterTarget, refusal: str, *, has_come: bool) -> tuple[str, str]:
        """Returns why a gradient is missing before the reduction, and after it; ``""`` where it is not."""
        if target.refusal:
            return target.refusal, target.refusal
        if self._is_withdrawn and not has_come:
            return _LOST, _LOST
        not_before = Reason.SHARDED.value if target.like.kind.scope is not Scope.LOCAL else _ONCE_REDUCED
        if target.tells:
            return not_before, "" if has_come else self._refusal_of_shard()
        if target.is_left_out and self._grad_sync is GradSync.SYNCED:
            refusal = _LEFT_OUT
        if target.is_sharded:
            return not_before, refusal
        return "" if has_come else Reason.NO_GRADIENT.value, refusal


def take_parameters(part: Part, call: Call, managed: ManagedParameters, tally: Tally) -> None:
    """Measures a layer's own parameters as they are now (training thread, hot path)."""
    for name, parameter in managed.own_parameters(call.layer.module):
        try:
            if is_lazy(parameter):
                take_absence(part, call, Signal.PARAMETER, name, Reason.UNINITIALISED.value)
                continue
            is_piece = managed.is_piece(parameter)
            take_tensor(part, call, Signal.PARAMETER, name, parameter, is_piece=is_piece)
        except Exception as error:  # noqa: BLE001 - the sample goes on with the next parameter
            tally.fail("forward", error)
            take_absence(part, call, Signal.PARAMETER, name, error_reason(error))
    for flat in _hidden(call):
        take_absence(part, call, Signal.PARAMETER, flat.name, _FLATTENED)


def lack_flattened(part: Part, call: Call) -> None:
    """Says of gradients of what a layer has no parameters of any more, where those are (hot path)."""
    for flat in _hidden(call):
        for stage in _STAGES if flat.requires_grad else ():
            take_absence(part, call, Signal.PARAMETER_GRADIENT, flat.name, _FLATTENED, None, stage)


def lack_gradients(part: Part, call: Call, managed: ManagedParameters, reason: str) -> None:
    """Says of all stages of a layer's parameters' gradients why they are not measured (hot path)."""
    for name, parameter in managed.own_parameters(call.layer.module):
        with unintercepted():
            may_come = parameter.requires_grad
        like = _note(call, name, parameter, managed) if may_come else None
        for stage in _STAGES if may_come else ():
            take_absence(part, call, Signal.PARAMETER_GRADIENT, name, reason, like, stage)


def take_gradient(part: Part, target: ParameterTarget, stage: Stage, tally: Tally) -> None:
    """Measures the gradient of a parameter as it is now, or says that there is none (hot path)."""
    try:
        parameter = target.parameter()
        with unintercepted():
            gradient = None if parameter is None else parameter.grad
        if parameter is None or gradient is None:
            has_none = parameter is not None and parameter.numel() == 0
            _absent(part, target, stage, (Reason.EMPTY if has_none else Reason.NO_GRADIENT).value)
            return
        is_piece = target.like.kind.scope is Scope.LOCAL_SHARD
        call, name = target.call, target.name
        take_tensor(part, call, Signal.PARAMETER_GRADIENT, name, gradient, stage, is_piece=is_piece)
    except Exception as error:  # noqa: BLE001 - the sample goes on with the next parameter
        tally.fail(_PROBE, error)
        _absent(part, target, stage, error_reason(error))


def _grad_state(target: ParameterTarget) -> tuple[int, int] | None:
    """Returns what tells a gradient from one that was written since, or None where there is none."""
    parameter = target.parameter()
    gradient = None if parameter is None else parameter.grad
    if gradient is None:
        return None
    # A tensor of inference mode counts no versions.
    return id(gradient), -1 if gradient.is_inference() else gradient._version  # noqa: SLF001 - its only name


_TAKES_NO_HOOK = (Reason.UNINITIALISED.value, Reason.META_TENSOR.value, Reason.GRAPH_CAPTURE.value)


def _note(call: Call, name: str, parameter: torch.Tensor, managed: ManagedParameters) -> Observation:
    """Returns what a parameter is."""
    if is_lazy(parameter):
        return note_absence(call, Signal.PARAMETER, name, Reason.UNINITIALISED.value)
    return note_tensor(call, Signal.PARAMETER, name, parameter, is_piece=managed.is_piece(parameter))


def _absent(part: Part, target: ParameterTarget, stage: Stage, reason: str) -> None:
    """Says why a stage of a gradient is missing."""
    take_absence(part, target.call, Signal.PARAMETER_GRADIENT, target.name, reason, target.like, stage)


def _hidden(call: Call) -> list[FlatPart]:
    """Returns what of a layer's own parameters was flattened and has left nothing in its place."""
    return [flat for flat in call.layer.flat_parts or () if not flat.is_registered]
