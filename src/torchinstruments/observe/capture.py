"""One sampled root forward: hooks on the selected layers for as long as it runs.

What is measured of them are the signals of the observer: inputs before a layer runs, outputs after it,
parameters before the model does.

The hooks are there for this forward and this thread alone, so that a forward that is not sampled pays for
nothing, and the recomputation of activation checkpointing meets none. A value is reduced inside the hook, for
an in-place operation may change it right afterwards. They come last among a layer's hooks: where another
tool's hook replaces an input or an output, what is measured is what the layer, or the next one, is given.

A call gets its ordinal when its output is seen, and where inputs are measured, when its input is: of a module
that calls itself the numbers differ by that.
"""

import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import CheckpointFunction

from torchinstruments.observe.applied import ParameterTracker
from torchinstruments.observe.direct import DirectLayer, ForwardOverride
from torchinstruments.observe.engine import is_in_backward
from torchinstruments.observe.faults import Faults, Tally
from torchinstruments.observe.fused import FusedRegion
from torchinstruments.observe.gradients import GradientTracker, SampleGradients
from torchinstruments.observe.hooks import LayerHook, LayerPreHook
from torchinstruments.observe.intake import Intake
from torchinstruments.observe.leaves import tensors_given, tensors_in
from torchinstruments.observe.observation import (
    Call,
    Delivery,
    Observation,
    SampleFacts,
    error_reason,
    note_tensor,
)
from torchinstruments.observe.parameters import ParameterGradients, take_parameters
from torchinstruments.observe.selection import Layer
from torchinstruments.observe.slots import CallSlot, LayerSlot, RegionSlot
from torchinstruments.records import (
    Execution,
    GradSync,
    Position,
    Reason,
    SampleState,
    ScaleProvenance,
    Signal,
)

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

__all__ = ["SampledForward"]

_PROBE = "forward"
_OF_OUTPUTS = (Signal.OUTPUT, Signal.OUTPUT_GRADIENT)
_TAKES_NO_HOOK = (Reason.UNSUPPORTED_LAYOUT.value, Reason.META_TENSOR.value, Reason.GRAPH_CAPTURE.value)
"""Why neither an output nor its gradient is measured: there is no real tensor to hook, or not now."""


@dataclass(slots=True)
class _Progress:
    """What a sampled forward has come to.

    Attributes:
        calls: Calls by index of the layer, those among them of which nothing could be seen.
        begun: Calls whose inputs were taken and whose outputs were not yet, innermost last.
        fired: Indices of the layers that were called, in the order of their first calls.
        handles: Hooks on layers.
        overrides: On layers, for direct forwards.
        slots: On layers that must not have hooks.
        gradients: Those that may come.
        parameters: Those whose gradients may come.
        collection_s: Seconds that it took.
    """

    calls: dict[int, int] = field(default_factory=dict)
    begun: dict[int, list[Call]] = field(default_factory=dict)
    fired: dict[int, None] = field(default_factory=dict)
    handles: "list[RemovableHandle]" = field(default_factory=list)
    overrides: list[ForwardOverride] = field(default_factory=list)
    slots: list[CallSlot] = field(default_factory=list)
    gradients: SampleGradients | None = None
    parameters: ParameterGradients | None = None
    collection_s: float = 0.0


class SampledForward:
    """Measures the inputs, outputs and parameters of one root forward, and has their gradients watched.

    Args:
        layers: The selected ones.
        regions: What `fused_regions` returned for them.
        tracker: Watches gradients.
        faults: Takes errors.
        ordinal: Of the sample.
        position: Of the forward.
        started_at_us: When it began: microseconds since the epoch, UTC.
        grad_sync: As latched at its start.
        parameters: Watches parameters' gradients; None where they are not asked for.
    """

    def __init__(
        self,
        *,
        layers: Sequence[Layer],
        regions: Sequence[FusedRegion],
        tracker: GradientTracker,
        faults: Faults,
        ordinal: int,
        position: Position,
        started_at_us: int,
        grad_sync: GradSync,
        parameters: ParameterTracker | None = None,
    ) -> None:
        self._layers = layers
        self._regions = regions
        self._tracker = tracker
        self._tally = Tally(faults)
        self._ordinal = ordinal
        self._position = position
        self._started_at_us = started_at_us
        self._grad_sync = grad_sync
        self._parameters = parameters
        self._signals = tracker.recipe.signals
        self._follows_outputs = not self._signals.isdisjoint(_OF_OUTPUTS)
        self._part = tracker.recipe.part(ordinal, self._tally.fail)
        self._intake = Intake(self._part, self._signals, self._tally)
        self._progress = _Progress()
        self._is_over = False

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the layers that were called, in the order of their first calls."""
        return tuple(self._progress.fired)

    def attach(self, compiled: frozenset[int], replicated: frozenset[int] | None = None) -> None:
        """Hooks the layers (training thread, hot path).

        Args:
            compiled: Ids of modules inside compiled code, where a hook would be compiled too.
            replicated: Has direct forwards captured too, but for modules with these ids; None: of none.
        """
        started_s = time.perf_counter()
        thread = threading.get_ident()
        hookless = frozenset(layer.index for region in self._regions for layer in region.hookless)
        own = frozenset(region.own.index for region in self._regions if region.own is not None)
        for layer in self._layers:
            if layer.is_root:
                continue
            try:
                if not layer.takes_hooks:
                    self._note_unseen(layer, Reason.SCRIPTED_MODULE)
                    continue
                if id(layer.watched) in compiled:
                    self._note_unseen(layer, Reason.INSIDE_COMPILED, Execution.INSIDE_COMPILED)
                    continue
                if layer.index not in own:
                    self._watch(layer, thread, takes_hook=layer.index not in hookless)
                if replicated is not None and id(layer.watched) not in replicated:
                    override = ForwardOverride(layer.watched, DirectLayer(self, layer, thread))
                    override.install(clean_copies=False)
                    self._progress.overrides.append(override)
            except Exception as error:  # noqa: BLE001 - one layer may not cost the others
                self._tally.layer = layer.name
                self._tally.fail(_PROBE, error)
        for region in self._regions:
            if id(region.module) not in compiled and not region.is_root:
                self._install(RegionSlot(region, self, thread))
        self._take_parameters(compiled)
        self._progress.collection_s += time.perf_counter() - started_s

    def _watch(self, layer: Layer, thread: int, *, takes_hook: bool) -> None:
        """Has the calls of a layer seen."""
        if takes_hook:
            if Signal.INPUT in self._signals:
                pre_hook = LayerPreHook(self, layer, thread)
                self._progress.handles.append(
                    layer.watched.register_forward_pre_hook(pre_hook, with_kwargs=True)
                )
            hook = LayerHook(self, layer, thread)
            self._progress.handles.append(layer.watched.register_forward_hook(hook))
        else:
            self._install(LayerSlot(layer.watched, self, thread, layer))

    def _install(self, slot: CallSlot) -> None:
        """Puts a slot into its module, to be taken out at the end."""
        if slot.install():
            self._progress.slots.append(slot)

    def _take_parameters(self, compiled: frozenset[int]) -> None:
        """Measures the layers' parameters as the forward finds them, and has their gradients watched."""
        wanted = {Signal.PARAMETER, Signal.PARAMETER_GRADIENT} & self._signals
        if not wanted:
            return
        for layer in self._layers:
            self._tally.layer = layer.name
            is_compiled = id(layer.watched) in compiled
            execution = Execution.INSIDE_COMPILED if is_compiled else Execution.EAGER
            call = self._unseen_call(layer, execution)
            if Signal.PARAMETER in wanted and self._intake.has_room():
                take_parameters(self._part, call, self._tally)
            if self._parameters is not None and self._position.grad_enabled:
                if self._progress.parameters is None:
                    self._progress.parameters = self._parameters.sampled(self._position, self._grad_sync)
                self._progress.parameters.expect(call, self._tally)

    def receive(self, layer: Layer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Measures what a layer is given; it never raises (training thread, hot path)."""
        if Signal.INPUT not in self._signals or self._is_over or is_in_backward():
            return
        started_s = time.perf_counter()
        self._tally.layer = layer.name
        try:
            call = self._call(layer)
            self._progress.begun.setdefault(layer.index, []).append(call)
            leaves = tensors_given(args, kwargs)
            self._intake.lack_inputs(call, leaves)
            for path, tensor in leaves.tensors:
                if not self._intake.has_room():
                    break
                self._intake.take(call, Signal.INPUT, path, tensor)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._tally.fail(_PROBE, error)
        finally:
            self._progress.collection_s += time.perf_counter() - started_s

    def observe(self, layer: Layer, output: object) -> None:
        """Measures an output of a layer; it never raises (training thread, hot path)."""
        if self._is_over or is_in_backward():
            # Inside a backward this is a recomputation of what was measured before.
            return
        started_s = time.perf_counter()
        self._tally.layer = layer.name
        try:
            self._measure(layer, output)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._tally.fail(_PROBE, error)
        finally:
            self._progress.collection_s += time.perf_counter() - started_s

    def num_calls(self, region: FusedRegion) -> int:
        """Returns how many calls were seen inside a region so far (training thread, hot path)."""
        return sum(self._progress.calls.get(layer.index, 0) for layer in region.inside)

    def region_ended(self, region: FusedRegion, num_calls_before: int) -> None:
        """Notes of layers whether a call around them was fused; it never raises (training thread, hot path).

        Args:
            region: What was called.
            num_calls_before: What `num_calls` returned before.
        """
        if self._is_over or is_in_backward() or region.module.training:
            return
        if self.num_calls(region) == num_calls_before:
            self._note_absences(region.inside, Reason.INSIDE_FUSED.value)

    def returned(self, output: object) -> None:
        """Notes of layers why they were not called, where that is known (training thread, hot path).

        Args:
            output: What the model returned.
        """
        if self._progress.parameters is not None:
            self._watch_returned(output)
        for region in self._regions:
            # Its slot is the permanent one, which saw the call before this forward began.
            if region.is_root:
                self.region_ended(region, 0)
        if isinstance(output, (Iterator, Coroutine, AsyncIterator)):
            detail = f"the model returned a {type(output).__name__}, which runs after its forward"
            waiting = [
                layer
                for layer in self._layers
                if layer.takes_hooks and not layer.is_root and layer.index not in self._progress.calls
            ]
            self._note_absences(waiting, Reason.NO_TENSOR_OUTPUT.with_detail(detail))

    def _note_absences(self, layers: Sequence[Layer], reason: str) -> None:
        """Says of each layer once why there is no output of it."""
        started_s = time.perf_counter()
        for layer in layers:
            if not self._intake.has_room():
                break
            self._intake.lack_call(self._call(layer), reason)
        self._progress.collection_s += time.perf_counter() - started_s

    def _watch_returned(self, output: object) -> None:
        """Has a backward through what the model returned taken for one of this sample."""
        started_s = time.perf_counter()
        try:
            for path, tensor in tensors_in(output).tensors:
                if torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf:
                    seen = note_tensor(self._new_call(self._layers[0], 0), Signal.OUTPUT, path, tensor)
                    if not seen.reason.startswith(_TAKES_NO_HOOK):
                        self._gradients().watch(tensor)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._tally.fail("gradient", error)
        finally:
            self._progress.collection_s += time.perf_counter() - started_s

    def _call(self, layer: Layer) -> Call:
        """Returns the next call of a layer."""
        calls = self._progress.calls
        call_index = calls.get(layer.index, 0)
        calls[layer.index] = call_index + 1
        return self._new_call(layer, call_index)

    def _new_call(self, layer: Layer, call_index: int) -> Call:
        """Returns a call of a layer as it is now."""
        return Call(
            layer=layer,
            call_index=call_index,
            mode="train" if layer.module.training else "eval",
            grad_enabled=torch.is_grad_enabled(),
        )

    def end(self, *, failed: bool) -> tuple[Delivery, SampleGradients | None] | None:
        """Unhooks the layers and returns what was measured (training thread, hot path).

        Args:
            failed: Whether the forward raised.

        Returns:
            The forward's delivery, and the gradients that may still come; None if it had ended.
        """
        if self._is_over:
            return None
        started_s = time.perf_counter()
        self.detach()
        gradients, self._progress.gradients = self._progress.gradients, None
        if failed and gradients is not None:
            gradients.close()
            gradients = None
        parameters, self._progress.parameters = self._progress.parameters, None
        if parameters is not None:
            if gradients is None:
                parameters.withdraw()
            parameters.forward_ended(self.facts(), failed=failed)
        self._tally.layer = ""
        self._part.batch.seal()
        self._progress.collection_s += time.perf_counter() - started_s
        delivery = Delivery(
            facts=self.facts(),
            state=SampleState.FAILED if failed else SampleState.FORWARD_COMPLETE,
            backward_index=None,
            settled=gradients is None,
            collection_s=self._progress.collection_s,
            errors=self._tally.errors,
            parts=(self._part,),
            absence_metrics=self._tracker.absence_metrics,
            scale_provenance=self._scale_provenance(),
        )
        return delivery, gradients

    def facts(self) -> SampleFacts:
        """Returns what all deliveries of the sample share."""
        return SampleFacts(
            ordinal=self._ordinal,
            position=self._position,
            started_at_us=self._started_at_us,
            grad_sync=self._grad_sync,
            modules_expected=len(self._layers),
            modules_fired=len(self._progress.fired),
        )

    def detach(self) -> None:
        """Removes the hooks (any thread). What is measured no more is not delivered either."""
        self._is_over = True
        for handle in self._progress.handles:
            handle.remove()
        self._progress.handles.clear()
        for override in self._progress.overrides:
            override.remove()
        self._progress.overrides.clear()
        for slot in reversed(self._progress.slots):
            slot.remove()
        self._progress.slots.clear()

    def _measure(self, layer: Layer, output: object) -> None:
        """Measures all tensors of one output."""
        begun = self._progress.begun.get(layer.index)
        call = begun.pop() if begun else self._call(layer)
        self._progress.fired[layer.index] = None
        if not self._follows_outputs and self._progress.parameters is None:
            return
        leaves = tensors_in(output)
        self._intake.lack_outputs(call, leaves)
        for path, tensor in leaves.tensors:
            if not self._intake.has_room():
                return
            seen = self._intake.take(call, Signal.OUTPUT, path, tensor)
            try:
                self._expect_gradient(call, path, tensor, seen)
            except Exception as error:  # noqa: BLE001 - the sample goes on with the next tensor
                self._tally.fail("gradient", error)
                self._intake.lack_gradient(call, path, error_reason(error), seen)

    def _gradients(self) -> SampleGradients:
        """Returns the bookkeeping of what may come in backwards."""
        if self._progress.gradients is None:
            parameters = self._progress.parameters
            self._progress.gradients = self._tracker.sample(
                self._ordinal, self._position.forward_index, parameters
            )
            if parameters is not None:
                parameters.belongs_to(self._progress.gradients)
        return self._progress.gradients

    def _expect_gradient(self, call: Call, path: str, tensor: torch.Tensor, output: Observation) -> None:
        """Has the gradient of an output watched, or says why there will be none that can be."""
        if call.grad_enabled and tensor.requires_grad:
            if output.reason.startswith(_TAKES_NO_HOOK):
                self._intake.lack_gradient(call, path, output.reason, output)
            elif Signal.OUTPUT_GRADIENT in self._signals:
                self._gradients().expect(call, path, tensor, output)
            elif self._progress.parameters is not None and not tensor.is_leaf:
                self._gradients().watch(tensor)
        elif (
            self._position.grad_enabled
            and not call.grad_enabled
            and (tensor.is_floating_point() or tensor.is_complex())
            and _is_in_reentrant_checkpoint()
        ):
            reason = Reason.REENTRANT_CHECKPOINT.value
            self._intake.lack_gradient(call, path, reason, output)

    def _note_unseen(self, layer: Layer, reason: Reason, execution: Execution = Execution.EAGER) -> None:
        """Says of a layer why its calls cannot be seen, whether it is called or not."""
        self._intake.lack_call(self._unseen_call(layer, execution), reason.value)

    def _unseen_call(self, layer: Layer, execution: Execution) -> Call:
        """Returns the call of a layer to which belongs what is known without one."""
        # A frozen script has no mode, for it is that of evaluation for good.
        mode = "train" if getattr(layer.module, "training", False) else "eval"
        return Call(layer, 0, mode, self._position.grad_enabled, execution)

    def _scale_provenance(self) -> ScaleProvenance:
        """Returns how the loss scale is known at the forward, where it scales nothing yet."""
        try:
            return (
                ScaleProvenance.UNKNOWN
                if self._tracker.scale is None
                else self._tracker.scale.current_scale()[1]
            )
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._tally.fail("loss_scale", error)
            return ScaleProvenance.UNKNOWN


def _is_in_reentrant_checkpoint() -> bool:
    """Returns whether the caller runs inside the forward of reentrant activation checkpointing.

    There gradients are off, and the outputs that belong to the graph are made anew in the backward.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else tells
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False
