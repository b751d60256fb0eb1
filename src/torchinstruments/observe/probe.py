"""What happens when the attached model is called.

A probe sees each call through two permanent hooks, tells the step clock, asks the sampler, and has the chosen
forwards measured.

A call of the model inside a call of it belongs to the outer one. A call inside a backward is a recomputation
of activation checkpointing and is none. Calls in several threads are forwards of their own.

``error_policy="raise"`` raises at the begin of a root forward, before anything of it has run, and nowhere
else in a training loop.
"""

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.aligned import AlignedSampler
from torchinstruments.observe.applied import ParameterTracker, StepRelay
from torchinstruments.observe.attempts import AttemptFeed
from torchinstruments.observe.backward_sync import Synchronisation
from torchinstruments.observe.bypass import Bypass
from torchinstruments.observe.calls import RootCall, RunningCalls
from torchinstruments.observe.capture import SampledForward
from torchinstruments.observe.choice import Choice
from torchinstruments.observe.compiled import NOTHING_COMPILED, CompiledParts, compiled_parts
from torchinstruments.observe.counts import Counts
from torchinstruments.observe.direct import DirectRoot, ForwardOverride, replicated
from torchinstruments.observe.engine import (
    EXPORT,
    graph_task,
    is_capturing_graph,
    rehearsal,
    run_while_traced,
)
from torchinstruments.observe.faults import Faults, too_deep
from torchinstruments.observe.fingerprints import Fingerprinter
from torchinstruments.observe.gradients import GradientTracker
from torchinstruments.observe.handover import Handover
from torchinstruments.observe.layers import COMPILED, ObservedLayers
from torchinstruments.observe.observation import DEFAULT_SIGNALS, Recipe, SampleFacts
from torchinstruments.observe.root import RootWatch, StepLook
from torchinstruments.observe.sampling import SamplingPolicy
from torchinstruments.observe.selection import Layer, Selector
from torchinstruments.observe.session_protocol import Companion, ScaleSource, Session
from torchinstruments.observe.sharding import NOT_SHARDED, Sharding
from torchinstruments.observe.stack import is_called, is_in_reentrant_checkpoint, num_calls
from torchinstruments.observe.stance import Forcing
from torchinstruments.observe.unseen import (
    report_out_of_reach,
    tell_compiled_late,
    tell_displaced,
    tell_unseen,
)
from torchinstruments.ranks.bare_objects import new_object
from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import Execution, Position, Signal
from torchinstruments.statistics.histograms import HistogramReducer
from torchinstruments.statistics.reducers import Reducer

__all__ = ["RootProbe", "refuse_scripted"]


class RootProbe:
    """Sees the calls of one model and has the chosen ones measured.

    Args:
        model: What is attached, wrapped or not; held weakly.
        layers: What `select_layers` returned for it.
        sampler: Chooses root forwards.
        reducers: What is computed of each tensor.
        session: Takes samples, attempts, catalog and errors.
        clock: Counts attempts.
        faults: Takes errors.
        scale: Knows the loss scale.
        companions: Attached and detached with it.
        selector_errors: Name of a layer and exception, for each call of a selector that raised.
        histograms: Taken of the layers in focus.
        focus: What `select_focus` returned.
        selector: Asked again where modules of the model were replaced; None only reports that.
        capture_direct_forwards: Whether ``module.forward(x)`` of the model and of selected layers is observed
            like ``module(x)``.
        signals: What is measured of the layers.
        steps: Told of optimizer steps, where parameters' gradients are measured.
        fingerprints: Whether parameters and buffers are fingerprinted in sampled attempts.
        now: The moments that the clock is fed with, here and by the companions.
        aligned: Asked in place of the sampler, where ranks measure the same forwards by time.
        forcing: Has sampled forwards of a compiled model run as it is written; None observes compiled
            regions at their boundary.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Sequence[Layer],
        sampler: SamplingPolicy,
        reducers: Sequence[Reducer],
        session: Session,
        clock: StepClock,
        faults: Faults,
        scale: ScaleSource | None = None,
        companions: Sequence[Companion] = (),
        selector_errors: Sequence[tuple[str, BaseException]] = (),
        histograms: Sequence[HistogramReducer] = (),
        focus: frozenset[int] = frozenset(),
        selector: Selector | None = None,
        capture_direct_forwards: bool = False,
        signals: frozenset[Signal] = DEFAULT_SIGNALS,
        steps: StepRelay | None = None,
        fingerprints: bool = False,
        now: Callable[[], float] = time.perf_counter,
        aligned: AlignedSampler | None = None,
        forcing: Forcing | None = None,
    ) -> None:
        self.session = session
        self.faults = faults
        self._counts = Counts(faults, clock)
        self.counters = self._counts.read
        """Returns what was counted here; it may be kept for longer than the probe."""
        self.owner: object = None
        """Kept alive as long as the model's hooks hold this probe."""
        self._model = weakref.ref(model)
        self._forcing = forcing
        self._layers = ObservedLayers(model, layers, selector, faults, self._hidden(compiled_parts(model)))
        self._root_layer = self._layers.root
        self._handover = Handover(session, self._counts, self._layers)
        self._choice = Choice(sampler, aligned, faults, self._handover.miss_planned)
        self._is_chosen = self._choice.is_chosen
        self._watch = RootWatch(model, takes_input=Signal.INPUT in signals)
        self._look = StepLook(self.look_again, self._watch.has_slots)
        self._companions = (*companions, self._look)
        self._selector_errors = tuple(selector_errors)
        recipe = Recipe(tuple(reducers), tuple(histograms), focus, session.wants_histograms, signals)
        self._takes_parameters = not signals.isdisjoint((Signal.PARAMETER, Signal.PARAMETER_GRADIENT))
        self._takes_input = Signal.INPUT in signals
        self._parameters: ParameterTracker | None = None
        if Signal.PARAMETER_GRADIENT in signals:
            self._parameters = ParameterTracker(
                recipe=recipe, faults=faults, scale=scale, deliver=self._handover.deliver
            )
            if steps is not None:
                steps.connect(self._parameters)
        self._bypass = Bypass(model, captures_direct_forwards=capture_direct_forwards)
        self._attempts = AttemptFeed(clock, session, self._bypass, faults, now)
        self._synchronisation = Synchronisation(
            self._attempts.backward_synchronises, partial(faults.report, "gradient", "")
        )
        self._tracker = GradientTracker(
            recipe=recipe,
            faults=faults,
            scale=scale,
            deliver=self._handover.deliver,
            backward_ended=self._attempts.backward_ended,
        )
        self._captures_direct_forwards = capture_direct_forwards
        self._override: ForwardOverride | None = None
        self._replicated: frozenset[int] | None = replicated(model) if capture_direct_forwards else None
        self._fingerprinter = Fingerprinter(faults) if fingerprints else None
        self.num_too_deep = 0
        """Permanent hooks that the stack had no room for."""
        self.raised = 0
        """The id of the error that is raised by `raise_pending`."""
        self._finalizer: weakref.finalize[..., RootProbe] | None = None
        self._calls = RunningCalls(self._handover.give_up)
        self._traced: Counter[str] = Counter()
        self._num_checkpointed = 0
        # A signal handler may run the model while its thread is in here.
        self._lock = threading.RLock()
        self._num_paused = 0
        self._is_armed = False
        self._has_begun = False
        self._has_told_compiled = False
        self._is_finished = False
        self._is_displaced = False

    @property
    def attempts(self) -> AttemptFeed:
        """The attempts of the model."""
        return self._attempts

    @property
    def companions(self) -> tuple[Companion, ...]:
        """What watches training beside it: optimizers, scalers."""
        return self._companions

    @property
    def is_armed(self) -> bool:
        """Whether it is attached and observes."""
        return self._is_armed

    def attach(self) -> None:
        """Puts the permanent hooks into the model, and attaches the companions.

        Raises:
            ConfigurationError: The model takes no hooks.
        """
        model = self._model()
        if model is None:
            raise ConfigurationError("the model is gone; keep it alive while it is observed")
        refuse_scripted(model)
        try:
            self._watch.attach(model, self)
            if self._captures_direct_forwards:
                self._override = ForwardOverride(model, DirectRoot(self))
                self._override.install(clean_copies=True)
            for companion in self._companions:
                companion.attach()
        except BaseException:
            self.detach()
            raise
        # Companions hook into the whole process, so they have to go when the model does.
        self._finalizer = weakref.finalize(self, _detach_all, self._companions, self._bypass, self._forcing)
        self._finalizer.atexit = False
        self._is_armed = True
        self.tell_catalog()
        report_out_of_reach(model, self._layers, self._selector_errors, self.faults)
        self._bypass.arm(compiled_parts(model).inside)

    def detach(self) -> None:
        """Takes every hook out of the model; gradients that are on their way are dropped. Idempotent.

        Nothing is forgotten before it was removed: after an interrupt this can be called again.
        """
        self._is_displaced |= self._is_armed and self._watch.is_displaced()
        self._is_armed = False
        if self._forcing is not None:
            self._forcing.close()
        self._watch.remove(but_ends=self._forcing is not None and self._forcing.is_running)
        if self._override is not None:
            self._override.remove()
        _detach_all(self._companions, self._bypass, self._forcing)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._calls.drop()
        self._close_gradients()

    def finish(self) -> None:
        """Detaches and leaves what is still to be told with the session (training thread). Idempotent."""
        self.detach()
        if self._is_finished:
            return
        self._is_finished = True
        if self._is_displaced:
            tell_displaced(self.faults, "none was seen since then, for no optimizer stepped")
        while self._calls.cut_off:
            self._handover.miss(self._calls.cut_off.pop().facts())
            self.faults.notice(
                "forward",
                "",
                "the observer was removed while a sampled forward ran, which therefore counts as missed",
            )
        self._tell_too_deep()
        if self._has_begun:
            self._choice.finish()
            self._attempts.close()
            self._attempts.tell_what_was_lost()
            self.tell_catalog()
        tell_unseen(self._traced, self._num_checkpointed, self._bypass, self.faults)

    def look_again(self) -> None:
        """Has the model seen again where it was compiled once more; it never raises (hot path)."""
        try:
            if self._is_armed and self._watch.put_back():
                tell_displaced(self.faults, "after an optimizer's step it was seen again")
        except Exception as error:  # noqa: BLE001 - nothing may reach the training loop
            self.faults.report("forward", "", error)

    def tell_open_attempt(self) -> None:
        """Leaves the attempt that is open with the session (main thread, while the interpreter exits)."""
        if self._has_begun and not self._is_finished:
            self._attempts.close()

    def step_entered(self, block: object, global_step: int | None, micro_batches: int | None) -> bool:
        """Takes that the program begins an attempt; it never raises (training thread, hot path).

        Args:
            block: Will tell its end; held weakly.
            global_step: The caller's number.
            micro_batches: The caller's number.

        Returns:
            Whether its end is to be told, by `step_left`.
        """
        try:
            if not self._is_armed or not self._begin():
                return False
            self.look_again()
            return self._attempts.step_entered(block, global_step, micro_batches)
        except Exception as error:  # noqa: BLE001 - nothing may reach the training loop
            self.faults.report("step", "", error)
            return False

    def step_left(self, *, failed: bool) -> None:
        """Takes that the program's attempt is over; it never raises (training thread, hot path)."""
        try:
            if self._is_armed:
                self._attempts.step_left(failed=failed)
        except Exception as error:  # noqa: BLE001 - nothing may reach the training loop
            self.faults.report("step", "", error)

    def notice_of_step(self, kind: str, sentence: str) -> None:
        """Tells something of how a program marks its steps, once a kind (training thread)."""
        self._attempts.notice(kind, sentence)

    def disarm(self) -> None:
        """Makes it do nothing for ever (in a forked child, before anything else runs there)."""
        # A thread of the parent may hold the lock, and is not there to release it.
        self._lock = threading.RLock()
        self._choice.disarm()
        self._counts.disarm()
        if self._fingerprinter is not None:
            self._fingerprinter.disarm()
        self._attempts.disarm()
        if self._forcing is not None:
            self._forcing.disarm()
        self._is_armed = False
        self._is_finished = True
        self._bypass.muted = True
        self._calls.drop()
        self._close_gradients()

    def pause(self, change: int) -> None:
        """Counts how many pauses are on: +1 or -1 (training thread). None measures while there is one."""
        with self._lock:
            self._num_paused += change
            self._bypass.muted = self._num_paused > 0 or self._is_finished

    def tell_catalog(self) -> None:
        """Leaves the catalog with the session (training thread)."""
        self._handover.tell_catalog()

    def raise_pending(self) -> None:
        """Raises the first error that was not raised yet, with ``error_policy="raise"`` (training thread)."""
        if self.faults.raises:
            error = self.faults.take_pending() or self.session.pending_error()
            if error is not None:
                self.raised = id(error)
                raise error

    def root_started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the begin of a call of the model (training thread, hot path).

        Raises:
            Exception: With ``error_policy="raise"``, the first error of collection since the last time.
        """
        # Each call of a function costs a step that is not sampled one or two microseconds, for whatever the
        # model ran has taken its place in the processor's caches. So what is mostly not needed is not called.
        if not self._is_armed or graph_task() != -1:
            return
        try:
            call = self._calls.current()
            if call is not None and self._is_followed(call, module):
                return
            if not self._is_outermost(call, module):
                self._receive(args, kwargs)
                return
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self.faults.report("forward", "", error)
        self.raised = 0
        if self.faults.raises:
            self.raise_pending()
        try:
            self._start(module)
            if self._takes_input:
                self._receive(args, kwargs)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self.faults.report("forward", "", error)

    @run_while_traced
    def root_exported(self) -> None:
        """Takes that ``torch.export`` traces a call of the model; it never raises (exporting thread)."""
        if self._is_armed and not torch.compiler.is_dynamo_compiling():
            self._traced[EXPORT] += 1

    @run_while_traced
    def root_compiled(self) -> None:
        """Takes that ``torch.compile`` traces a call of the model; it never raises (compiling thread)."""
        if not self._is_armed or torch.compiler.is_dynamo_compiling():
            return
        try:
            # What is watched of the parts would become a condition of the compiled code.
            self._bypass.disarm()
            found = self._watch.follow(self)
            self._look.attach()
            if self._has_told_compiled:
                return
            self._has_told_compiled = True
            tell_compiled_late(self.faults, found)
        except Exception as error:  # noqa: BLE001 - nothing may reach the compiler
            self.faults.report("forward", "", error)

    def _is_followed(self, call: RootCall, module: nn.Module) -> bool:
        """Returns whether a call is the inner one of a model that is seen at its wrapper (hot path)."""
        return call.called != id(module) and is_called(call.called)

    def _is_outermost(self, call: RootCall | None, module: nn.Module) -> bool:
        """Returns whether a call of the model is a root forward (training thread, hot path)."""
        if traced := rehearsal():
            self._traced[traced] += 1
            return False
        if call is not None:
            # At a depth of 0 its end was interrupted, or a signal handler calls the model in it.
            if call.depth > 0 and num_calls(module) > 1:
                call.depth += 1
                return False
            self._calls.abandon()
        return True

    def _receive(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Has what the model is given measured, where it is a selected layer (training thread, hot path)."""
        if self._takes_input and self._root_layer is not None:
            call = self._calls.current()
            if call is not None and call.sampled is not None:
                call.sampled.receive(self._root_layer, args, kwargs)

    def root_ended(self, module: nn.Module, output: object) -> None:
        """Takes the end of a call, by an exception too; it never raises (training thread, hot path)."""
        if graph_task() != -1:
            return
        if not self._is_armed:
            self._left_behind_removal(module, output)
            return
        call = self._calls.current()
        if call is None or call.called != id(module):
            return
        try:
            failed = call.has_failed()
            try:
                if call.sampled is not None and not failed:
                    if self._root_layer is not None:
                        call.sampled.observe(self._root_layer, output)
                    if call.depth == 1:
                        call.sampled.returned(output, self._watch.model)
            finally:
                # Whatever became of the sample, a stance that was taken for it has to be left.
                self._leave(call, output, failed=failed)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self.faults.report("forward", "", error)

    def _left_behind_removal(self, module: nn.Module, output: object) -> None:
        """Takes the end of a call in which the observer was removed, where it was forced (hot path)."""
        try:
            if self._forcing is not None and num_calls(module) == 1:
                self._forcing.ended_behind_removal(output)
                self._watch.remove(but_ends=self._forcing.is_running)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self.faults.report("forward", "", error)

    def _leave(self, call: RootCall, output: object, *, failed: bool) -> None:
        """Takes that one call of the root is left, and ends the forward with the outermost one (hot path)."""
        try:
            if call.depth == 1 and call.flight is not None:
                call.flight.ended(output, failed=failed)
            if call.depth == 1 and call.backward_sync is not None and not failed:
                call.backward_sync.watch(output)
        finally:
            call.depth -= 1
            if call.depth == 0:
                # The next call ends it where an interrupt or error cuts in.
                try:
                    self._attempts.forward_ended(call.grad_sync, call.position)
                finally:
                    if call.sampled is not None:
                        self._handover.end_sample(call.sampled, failed=failed)
                    self._calls.end()
                    if call.sampled is not None:
                        self._bypass.arm(call.compiled.inside)

    def _start(self, module: nn.Module) -> None:
        """Counts a root forward and has it measured where the sampler chose it."""
        if not self._has_begun and not self._begin():
            return
        if self._bypass.armed:
            self._bypass.disarm()
        if self.num_too_deep:
            self._tell_too_deep()
        started_us = time.time_ns() // 1000
        self._tracker.root_started()
        grad_enabled = torch.is_grad_enabled()
        position = self._attempts.forward_started(grad_enabled=grad_enabled, now_us=started_us)
        if self._parameters is not None:
            self._parameters.root_started(position)
        grad_sync, backward_sync = self._synchronisation.forward_started(
            module, position, self.session.world_size
        )
        call = new_object(RootCall)
        call.grad_sync, call.handled, call.position = grad_sync, sys.exception(), position
        call.backward_sync, call.called = backward_sync, id(module)
        call.depth, call.sampled, call.flight = 1, None, None
        if not grad_enabled and is_in_reentrant_checkpoint():
            call.is_checkpointed = True
            self._num_checkpointed += 1
        self._calls.begin(call)
        try:
            is_chosen = self._is_chosen(position, started_us, is_paused=self._num_paused > 0)
            if self._forcing is not None:
                # Before anything that may fail on one rank alone.
                call.flight = self._forcing.forward_started(
                    position, id(module), is_chosen=is_chosen, world_size=self.session.world_size
                )
            if is_chosen:
                self._sample(call, module, position, started_us)
        finally:
            if not self._is_armed:
                self._cut_off(call)

    def _tell_too_deep(self) -> None:
        """Reports hooks that the stack had no room for."""
        if self.num_too_deep:
            self.faults.report("forward", "", too_deep(self.num_too_deep))
            self.num_too_deep = 0

    def _begin(self) -> bool:
        """Returns whether this rank observes, which the first call settles (training thread, hot path)."""
        if not self._has_begun:
            if not self.session.begin():
                self.detach()
                return False
            self._has_begun = True
            if self._forcing is not None and not self._forcing.agreed and self.session.world_size > 1:
                self._forcing = None
                self.faults.notice(
                    COMPILED,
                    "",
                    "compiled='force_eager' needs rank_policy='all' and sampler=EveryNStepsSampler(n) in a "
                    "world of several ranks; compiled regions are observed at their boundary instead",
                    kind="disagreement",
                )
                if (model := self._model()) is not None:
                    self._refresh(compiled_parts(model), is_told=True)
        return True

    def _sample(self, call: RootCall, module: nn.Module, position: Position, started_us: int) -> None:
        """Begins to measure a root forward."""
        self._calls.abandon_dead_threads()
        ordinal = next(self._handover.ordinals)
        call.compiled = compiled_parts(module)
        self._refresh(call.compiled)
        layers = self._layers.current
        is_compiled = call.flight is not None and not call.flight.is_forced
        # The sampler itself may have removed the observer.
        if is_compiled or is_capturing_graph() or not self._is_armed:
            self._handover.miss(SampleFacts(ordinal, position, started_us, call.grad_sync, len(layers), 0))
            return
        self._take_fingerprints(position)
        sampled = SampledForward(
            layers=layers,
            regions=self._layers.regions,
            tracker=self._tracker,
            faults=self.faults,
            ordinal=ordinal,
            position=position,
            started_at_us=started_us,
            grad_sync=call.grad_sync,
            parameters=self._parameters,
            execution=Execution.EAGER if call.flight is None else Execution.FORCED_EAGER,
            backward_sync=call.backward_sync,
            sharding=self._sharding(),
            is_checkpointed=call.is_checkpointed,
        )
        call.sampled = sampled
        if self._root_layer is not None:
            self._watch.put_last(module)
        sampled.attach(self._hidden(call.compiled), self._replicated)

    def _hidden(self, parts: CompiledParts) -> CompiledParts:
        """Returns what of the compiled parts is compiled in a forward that is measured."""
        return parts if self._forcing is None else NOTHING_COMPILED

    def _sharding(self) -> Sharding:
        """Returns what of the model is spread over ranks (training thread, hot path)."""
        model = self._watch.model
        if model is None:
            return NOT_SHARDED
        return Sharding.of(model, with_parameters=self._takes_parameters)

    def _cut_off(self, call: RootCall) -> None:
        """Ends a call during whose begin the observer was removed, by the sampler or by another thread."""
        self._calls.end()
        if call.sampled is not None:
            call.sampled.detach()
            if call.sampled.claim_end():
                self._handover.miss(call.sampled.facts())

    def _take_fingerprints(self, position: Position) -> None:
        """Leaves the fingerprints of an attempt with the session, once (training thread, hot path)."""
        if self._fingerprinter is None or position.attempt is None:
            return
        model = self._model()
        before = self._attempts.is_before_every_step
        if model is None or not self._fingerprinter.is_due(position, is_before_every_step=before):
            return
        began_s = time.perf_counter()
        self.session.put_fingerprints(self._fingerprinter.take(model, position.attempt))
        self._counts.add(collection_s=time.perf_counter() - began_s)

    def _close_gradients(self) -> None:
        """Awaits no gradient any more (any thread)."""
        self._tracker.close()
        if self._parameters is not None:
            self._parameters.close()

    def _refresh(self, parts: CompiledParts, *, is_told: bool = False) -> None:
        """Takes the model's modules as they are now (training thread, hot path)."""
        # What was called may be a replica of the model.
        model = self._watch.model
        if model is not None:
            self._synchronisation.look_again(model)
        if model is not None and self._layers.refresh(model, self._hidden(parts), is_told=is_told):
            self._root_layer = self._layers.root
            self._bypass.look_again()
            if self._captures_direct_forwards:
                self._replicated = replicated(model)
            self.tell_catalog()


def refuse_scripted(model: nn.Module) -> None:
    """Does nothing for a model that takes hooks (training thread, at attach).

    Raises:
        ConfigurationError: The model is scripted.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"model={type(model).__name__} is scripted and takes no forward hooks; "
            f"attach to the module that it was scripted from"
        )


def _detach_all(companions: Sequence[Companion], bypass: Bypass, forcing: Forcing | None) -> None:
    """Detaches what was attached with a probe."""
    bypass.close()
    if forcing is not None:
        forcing.close()
    for companion in companions:
        companion.detach()
