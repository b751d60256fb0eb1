"""One sampled root forward: hooks on the selected layers for as long as it runs.

What is measured of them are the signals of the observer: inputs before a layer runs, outputs after it,
parameters before the model does.

The hooks are there for this forward and this thread alone, so that a forward that is not sampled pays for
nothing, and the recomputation of activation checkpointing meets none. A value is reduced inside the hook, for
an in-place operation may change it right afterwards. They come last among a layer's hooks: where another
tool's hook replaces an input or an output, what is measured is what the layer, or the next one, is given.
"""

import itertools
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence

import torch
from torch import nn

from torchinstruments.observe.applied import ParameterTracker
from torchinstruments.observe.backward_sync import BackwardSync
from torchinstruments.observe.compiled import CompiledParts, may_be_called_inside
from torchinstruments.observe.direct import DirectLayer, ForwardOverride
from torchinstruments.observe.engine import is_in_backward
from torchinstruments.observe.faults import Faults, Tally, too_deep
from torchinstruments.observe.fused import FusedRegion
from torchinstruments.observe.gradients import GradientTracker, SampleGradients
from torchinstruments.observe.hooks import LayerHook, LayerPreHook
from torchinstruments.observe.intake import Intake
from torchinstruments.observe.layer_calls import LayerCalls
from torchinstruments.observe.leaves import tensors_given, tensors_in
from torchinstruments.observe.observation import (
    Call,
    Delivery,
    SampleFacts,
    error_reason,
    note_tensor,
)
from torchinstruments.observe.observed import Observation
from torchinstruments.observe.parameters import (
    ParameterGradients,
    lack_flattened,
    lack_gradients,
    take_parameters,
)
from torchinstruments.observe.placement import Placement
from torchinstruments.observe.selection import Layer
from torchinstruments.observe.sharding import NOT_SHARDED, Sharding
from torchinstruments.observe.slots import LayerSlot, RegionSlot
from torchinstruments.observe.stack import is_in_reentrant_checkpoint
from torchinstruments.records import (
    Execution,
    GradSync,
    Position,
    Reason,
    SampleState,
    ScaleProvenance,
    Signal,
)
from torchinstruments.statistics.isolation import functions_off, isolated, unintercepted

__all__ = ["SampledForward"]

_PROBE = "forward"
_OF_OUTPUTS = (Signal.OUTPUT, Signal.OUTPUT_GRADIENT)
_COMPILED_FUNCTION = Reason.INSIDE_COMPILED.with_detail(
    "no hook of it ran, and a module around it has a compiled function, which may have called it"
)
_TAKES_NO_HOOK = (Reason.UNSUPPORTED_LAYOUT.value, Reason.META_TENSOR.value, Reason.GRAPH_CAPTURE.value)
"""Why neither an output nor its gradient is measured: there is no real tensor to hook, or not now."""


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
        execution: How what is measured runs.
        backward_sync: Reads whether its backwards synchronise gradients, where they decide that.
        sharding: What of the model is spread over ranks.
        is_checkpointed: Whether the whole forward runs inside reentrant activation checkpointing.
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
        execution: Execution = Execution.EAGER,
        backward_sync: BackwardSync | None = None,
        sharding: Sharding = NOT_SHARDED,
        is_checkpointed: bool = False,
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
        self._execution = execution
        self._backward_sync = backward_sync
        self._sharding = sharding
        self._is_checkpointed = is_checkpointed
        self._signals = tracker.recipe.signals
        self._follows_outputs = not self._signals.isdisjoint(_OF_OUTPUTS)
        self._part = tracker.recipe.part(ordinal, self._tally.fail)
        self._intake = Intake(self._part, self._signals, self._tally)
        self._placement = Placement()
        self._calls = LayerCalls(execution, sharding, grad_enabled=position.grad_enabled)
        self._unseen: set[int] = set()  # indices of layers of which that is said already
        self._watched_gradients: SampleGradients | None = None
        self._watched_parameters: ParameterGradients | None = None
        self._collection_s = 0.0
        self._ends = itertools.count()
        self.num_too_deep = 0
        """Hooks of it that the stack had no room for."""
        self._is_over = False

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the layers that were called, in the order of their first calls."""
        return tuple(self._calls.fired)

    def attach(self, compiled: CompiledParts, replicated: frozenset[int] | None = None) -> None:
        """Hooks the layers (training thread, hot path).

        Args:
            compiled: Inside of these a hook would be compiled too.
            replicated: Has direct forwards captured too, but for modules with these ids; None: of none.
        """
        started_s = time.perf_counter()
        thread = threading.get_ident()
        own = frozenset(region.own.index for region in self._regions if region.own is not None)
        hookless = frozenset(layer.index for region in self._regions for layer in region.inside) - own
        takes_input = Signal.INPUT in self._signals
        for layer in self._layers:
            if layer.is_root:
                continue
            try:
                if not layer.takes_hooks:
                    self._note_unseen(layer, Reason.SCRIPTED_MODULE)
                    continue
                if compiled.hides(layer.watched):
                    self._note_unseen(layer, Reason.INSIDE_COMPILED, Execution.INSIDE_COMPILED)
                    continue
                if id(layer.watched) in compiled.inside:
                    self._placement.install(LayerSlot(layer.watched, self, thread, layer))
                    continue
                if layer.index in hookless:
                    self._placement.install(LayerSlot(layer.watched, self, thread, layer))
                elif layer.index not in own:
                    pre_hook = LayerPreHook(self, layer, thread) if takes_input else None
                    self._placement.hook(layer.watched, pre_hook, LayerHook(self, layer, thread))
                if replicated is not None and id(layer.watched) not in replicated:
                    self._placement.override(ForwardOverride(layer.watched, DirectLayer(self, layer, thread)))
            except Exception as error:  # noqa: BLE001 - one layer may not cost the others
                self._tally.layer = layer.name
                self._tally.fail(_PROBE, error)
        for region in self._regions:
            if id(region.module) not in compiled.inside and not region.is_root:
                self._placement.install(RegionSlot(region, self, thread))
        self._take_parameters(compiled)
        self._collection_s += time.perf_counter() - started_s

    def _take_parameters(self, compiled: CompiledParts) -> None:
        """Measures the layers' parameters as the forward finds them, and has their gradients watched."""
        wanted = {Signal.PARAMETER, Signal.PARAMETER_GRADIENT} & self._signals
        if not wanted:
            return
        for layer in self._layers:
            self._tally.layer = layer.name
            is_hidden = compiled.hides(layer.watched)
            execution = Execution.INSIDE_COMPILED if is_hidden else self._execution
            call = self._calls.unseen(layer, execution)
            if Signal.PARAMETER in wanted and self._intake.has_room():
                take_parameters(self._part, call, self._sharding.managed, self._tally)
            if self._parameters is None:
                continue
            if self._position.grad_enabled or self._is_checkpointed:
                lack_flattened(self._part, call)
            if self._is_checkpointed:
                lack_gradients(self._part, call, self._sharding.managed, Reason.REENTRANT_CHECKPOINT.value)
            elif self._position.grad_enabled:
                if self._watched_parameters is None:
                    self._watched_parameters = self._parameters.sampled(
                        self._position, self._grad_sync, self._sharding.managed
                    )
                self._watched_parameters.expect(call, self._tally)

    def receive(self, layer: Layer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Measures what a layer is given; it never raises (training thread, hot path)."""
        if Signal.INPUT not in self._signals or self._is_over or is_in_backward():
            return
        started_s = time.perf_counter()
        self._tally.layer = layer.name
        try:
            call = self._calls.begin(layer)
            leaves = tensors_given(args, kwargs)
            self._intake.lack_inputs(call, leaves)
            for path, tensor in leaves.tensors:
                if not self._intake.has_room():
                    break
                self._intake.take(call, Signal.INPUT, path, tensor)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._tally.fail(_PROBE, error)
        finally:
            self._collection_s += time.perf_counter() - started_s

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
            self._collection_s += time.perf_counter() - started_s

    def num_calls(self, region: FusedRegion) -> int:
        """Returns how many calls were seen inside a region so far (training thread, hot path)."""
        return sum(self._calls.numbers.get(layer.index, 0) for layer in region.inside)

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

    def returned(self, output: object, model: nn.Module | None) -> None:
        """Notes of layers why they were not called, where that is known (training thread, hot path).

        Args:
            output: What the model returned.
            model: The model; None where it is gone.
        """
        if self._watched_parameters is not None:
            self._watch_returned(output)
        for region in self._regions:
            # Its slot is the permanent one, which saw the call before this forward began.
            if region.is_root:
                self.region_ended(region, 0)
        try:
            runs_later = isinstance(output, (Iterator, Coroutine, AsyncIterator))
        except Exception as error:  # noqa: BLE001 - an object of the user's may raise at any question
            self._tally.fail(_PROBE, error)
            return
        if runs_later:
            detail = f"the model returned a {type(output).__name__}, which runs after its forward"
            self._note_absences(self._waiting(), Reason.NO_TENSOR_OUTPUT.with_detail(detail))
        elif model is not None and self._execution is Execution.EAGER:
            self._note_compiled_functions(model)

    def _waiting(self) -> list[Layer]:
        """Returns the layers that could have been called, and were not."""
        return [
            layer
            for layer in self._layers
            if layer.takes_hooks
            and not layer.is_root
            and layer.index not in self._calls.numbers
            and layer.index not in self._unseen
        ]

    def _note_compiled_functions(self, model: nn.Module) -> None:
        """Says of layers that were not called whether a compiled function may have called them."""
        waiting = self._waiting()
        if not waiting:
            return
        started_s = time.perf_counter()
        try:
            inside = may_be_called_inside(model)
        except Exception as error:  # noqa: BLE001 - an object of the user's may raise at any question
            self._tally.fail(_PROBE, error)
            return
        self._collection_s += time.perf_counter() - started_s
        self._note_absences(
            [layer for layer in waiting if id(layer.module) in inside],
            _COMPILED_FUNCTION,
            Execution.INSIDE_COMPILED,
        )

    def _note_absences(
        self, layers: Sequence[Layer], reason: str, execution: Execution | None = None
    ) -> None:
        """Says of each layer once why there is no output of it."""
        started_s = time.perf_counter()
        for layer in layers:
            if not self._intake.has_room():
                break
            call = self._calls.next(layer)
            self._intake.lack_call(call if execution is None else call._replace(execution=execution), reason)
        self._collection_s += time.perf_counter() - started_s

    def _watch_returned(self, output: object) -> None:
        """Has a backward through what the model returned taken for one of this sample."""
        started_s = time.perf_counter()
        try:
            for path, tensor in tensors_in(output).tensors:
                with unintercepted():
                    may_come = torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf
                if may_come:
                    seen = note_tensor(self._calls.new(self._layers[0], 0), Signal.OUTPUT, path, tensor)
                    if not seen.reason.startswith(_TAKES_NO_HOOK):
                        self._gradients().watch(tensor)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._tally.fail("gradient", error)
        finally:
            self._collection_s += time.perf_counter() - started_s

    def end(self, *, failed: bool) -> tuple[Delivery, SampleGradients | None]:
        """Unhooks the layers and returns what was measured (training thread, hot path).

        It is called by who was the first to claim its end.

        Args:
            failed: Whether the forward raised.

        Returns:
            The forward's delivery, and the gradients that may still come.
        """
        started_s = time.perf_counter()
        self.detach()
        gradients, self._watched_gradients = self._watched_gradients, None
        if failed and gradients is not None:
            gradients.close()
            gradients = None
        parameters, self._watched_parameters = self._watched_parameters, None
        if parameters is not None:
            if gradients is None:
                parameters.withdraw()
            parameters.forward_ended(self.facts(), failed=failed)
        self._tally.layer = ""
        if self.num_too_deep:
            self._tally.fail(_PROBE, too_deep(self.num_too_deep))
        with functions_off(), isolated("cpu"):
            self._part.batch.seal(None if gradients is None else gradients.transfer)
        self._collection_s += time.perf_counter() - started_s
        delivery = Delivery(
            facts=self.facts(),
            state=SampleState.FAILED if failed else SampleState.FORWARD_COMPLETE,
            backward_index=None,
            settled=gradients is None,
            collection_s=self._collection_s,
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
            modules_fired=len(self._calls.fired),
        )

    def detach(self) -> None:
        """Removes the hooks (any thread). What is measured no more is not delivered either.

        After an interrupt it can be called again.
        """
        self._is_over = True
        self._placement.remove()

    def claim_end(self) -> bool:
        """Returns whether the caller is the first who ends it, and tells what became of it (any thread)."""
        return next(self._ends) == 0

    def _measure(self, layer: Layer, output: object) -> None:
        """Measures all tensors of one output."""
        call = self._calls.end(layer)
        if not self._follows_outputs and self._watched_parameters is None:
            return
        leaves = tensors_in(output)
        self._intake.lack_outputs(call, leaves)
        for path, tensor in leaves.tensors:
            if not self._intake.has_room():
                return
            seen = self._intake.take(call, Signal.OUTPUT, path, tensor)
            try:
                with unintercepted():
                    self._expect_gradient(call, path, tensor, seen)
            except Exception as error:  # noqa: BLE001 - the sample goes on with the next tensor
                self._tally.fail("gradient", error)
                self._intake.lack_gradient(call, path, error_reason(error), seen)

    def _gradients(self) -> SampleGradients:
        """Returns the bookkeeping of what may come in backwards."""
        if self._watched_gradients is None:
            parameters = self._watched_parameters
            self._watched_gradients = self._tracker.sample(
                self._ordinal, self._position.forward_index, parameters, self._backward_sync
            )
            if parameters is not None:
                parameters.belongs_to(self._watched_gradients)
        return self._watched_gradients

    def _expect_gradient(self, call: Call, path: str, tensor: torch.Tensor, output: Observation) -> None:
        """Has the gradient of an output watched, or says why there will be none that can be."""
        if call.grad_enabled and tensor.requires_grad:
            if output.reason.startswith(_TAKES_NO_HOOK):
                self._intake.lack_gradient(call, path, output.reason, output)
            elif Signal.OUTPUT_GRADIENT in self._signals:
                self._gradients().expect(call, path, tensor, output)
            elif self._watched_parameters is not None and not tensor.is_leaf:
                self._gradients().watch(tensor)
        elif (
            not call.grad_enabled
            and (tensor.is_floating_point() or tensor.is_complex())
            and (self._is_checkpointed or (self._position.grad_enabled and is_in_reentrant_checkpoint()))
        ):
            reason = Reason.REENTRANT_CHECKPOINT.value
            self._intake.lack_gradient(call, path, reason, output)

    def _note_unseen(self, layer: Layer, reason: Reason, execution: Execution = Execution.EAGER) -> None:
        """Says of a layer why its calls cannot be seen, whether it is called or not."""
        self._unseen.add(layer.index)
        self._intake.lack_call(self._calls.unseen(layer, execution), reason.value)

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
