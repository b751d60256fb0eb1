"""What happens when the attached model is called.

A probe sees each call through two permanent hooks, tells the step clock, asks the sampler, and has the chosen
forwards measured. Where samples go is the session's business.

A call of the model inside a call of it belongs to the outer one. A call inside a backward is a recomputation
of activation checkpointing and is none. Calls in several threads are forwards of their own.

``error_policy="raise"`` raises at the begin of a root forward, before anything of it has run, and nowhere
else in a training loop.
"""

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.capture import SampledForward
from torchinstruments.observe.catalog import Catalog
from torchinstruments.observe.counts import Counts
from torchinstruments.observe.engine import is_capturing_graph, is_in_backward, is_traced
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.gradients import GradientTracker
from torchinstruments.observe.hooks import RootPostHook, RootPreHook
from torchinstruments.observe.observation import Delivery, SampleFacts
from torchinstruments.observe.sampling import SamplingEvent, SamplingPolicy
from torchinstruments.observe.selection import Layer, inside_compiled
from torchinstruments.observe.session_protocol import Companion, ScaleSource, Session
from torchinstruments.observe.wrappers import is_compiled_in_place
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.grad_sync import read_grad_sync
from torchinstruments.records import GradSync, Position, SampleState, ScaleProvenance
from torchinstruments.statistics.reducers import Reducer

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

__all__ = ["RootProbe"]


@dataclass(slots=True)
class _RootCall:
    """A root forward that is running.

    Attributes:
        grad_sync: As latched at its start.
        handled: The exception that was being handled when it began.
        depth: Calls of the root that are on the stack, this one included.
        sampled: Measures it, where it was chosen.
    """

    grad_sync: GradSync
    handled: BaseException | None
    depth: int = 1
    sampled: SampledForward | None = None


class RootProbe:
    """Sees the calls of one model and has the chosen ones measured.

    Args:
        model: What is attached, wrapped or not; held weakly.
        layers: What `select_layers` returned for it.
        sampler: Chooses root forwards.
        reducers: What is computed of each tensor.
        session: Takes samples, attempts, catalog and errors.
        clock: Counts attempts; fed with `time.perf_counter`.
        faults: Takes errors.
        scale: Knows the loss scale.
        companions: Attached and detached with it.
        selector_errors: Name of a layer and exception, for each call of the selector that raised.
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
    ) -> None:
        self.session = session
        self.faults = faults
        self._counts = Counts(faults)
        self.counters = self._counts.read
        """Returns what was counted here; it may be kept for longer than the probe."""
        self.owner: object = None
        """Kept alive as long as the model's hooks hold this probe."""
        self._model = weakref.ref(model)
        self._layers = tuple(layers)
        self._root_layer = next((layer for layer in self._layers if layer.is_root), None)
        self._sampler = sampler
        self._clock = clock
        self._companions = tuple(companions)
        self._selector_errors = tuple(selector_errors)
        self._catalog = Catalog(self._layers)
        self._tracker = GradientTracker(
            reducers=reducers,
            faults=faults,
            scale=scale,
            deliver=self._deliver,
            backward_ended=self._backward_ended,
        )
        self._handles: list[RemovableHandle] = []
        self._finalizer: weakref.finalize[..., RootProbe] | None = None
        self._calls: dict[int, _RootCall] = {}
        self._ordinals = itertools.count()
        self._lock = threading.Lock()
        self._num_paused = 0
        self._is_armed = False
        self._has_begun = False
        self._is_finished = False

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
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"model={type(model).__name__} is scripted and takes no forward hooks; "
                f"attach to the module that it was scripted from"
            )
        try:
            # First of the pre-hooks and last of the hooks: what the model returns is what is measured.
            self._handles.append(model.register_forward_pre_hook(RootPreHook(self), prepend=True))
            self._handles.append(model.register_forward_hook(RootPostHook(self), always_call=True))
            for companion in self._companions:
                companion.attach()
        except BaseException:
            self.detach()
            raise
        # Companions hook into the whole process, so they have to go when the model does.
        self._finalizer = weakref.finalize(self, _detach_all, self._companions)
        self._finalizer.atexit = False
        self._is_armed = True
        self.tell_catalog()
        self._report_what_is_out_of_reach(model)

    def detach(self) -> None:
        """Takes every hook out of the model; gradients that are on their way are dropped. Idempotent."""
        self._is_armed = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._finalizer is not None:
            self._finalizer.detach()
        _detach_all(self._companions)
        self._drop_calls()
        self._tracker.close()

    def finish(self) -> None:
        """Detaches and leaves what is still to be told with the session (training thread). Idempotent."""
        if self._is_finished:
            return
        self._is_finished = True
        self.detach()
        if self._has_begun:
            self.session.put_attempts(self._clock.close(time.perf_counter()))
            if self._clock.num_dropped_steps:
                dropped = f"{self._clock.num_dropped_steps} steps in one attempt were more than are kept"
                self.faults.report("optimizer", "", OverflowError(dropped))
            self.tell_catalog()

    def disarm(self) -> None:
        """Makes it do nothing for ever (in a forked child, before anything else runs there)."""
        # A thread of the parent may hold the lock, and is not there to release it.
        self._lock = threading.Lock()
        self._counts.disarm()
        self._is_armed = False
        self._is_finished = True
        self._drop_calls()
        self._tracker.close()

    def pause(self, change: int) -> None:
        """Counts how many pauses are on: +1 or -1 (training thread). None measures while there is one."""
        with self._lock:
            self._num_paused += change

    def tell_catalog(self) -> None:
        """Leaves the catalog with the session (training thread)."""
        self.session.put_modules(self._catalog.records())

    def raise_pending(self) -> None:
        """Raises the first error that was not raised yet, with ``error_policy="raise"`` (training thread)."""
        if self.faults.raises:
            error = self.faults.take_pending() or self.session.pending_error()
            if error is not None:
                raise error

    def root_started(self, module: nn.Module) -> None:
        """Takes the begin of a call of the model (training thread, hot path).

        Raises:
            Exception: With ``error_policy="raise"``, the first error of collection since the last time.
        """
        if not self._is_armed or is_in_backward() or is_traced():
            return
        thread = threading.get_ident()
        call = self._calls.get(thread)
        if call is not None:
            if _num_calls_on_stack(module) > 1:
                call.depth += 1
                return
            self._abandon(thread)
        self.raise_pending()
        try:
            self._start(module)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self.faults.report("forward", "", error)

    def root_ended(self, output: object) -> None:
        """Takes the end of a call, by an exception too; it never raises (training thread, hot path)."""
        if not self._is_armed or is_in_backward():
            return
        thread = threading.get_ident()
        call = self._calls.get(thread)
        if call is None:
            return
        try:
            handled = sys.exception()
            failed = handled is not None and handled is not call.handled
            if call.sampled is not None and self._root_layer is not None and not failed:
                call.sampled.observe(self._root_layer, output)
            call.depth -= 1
            if call.depth == 0:
                del self._calls[thread]
                self._end(call, failed=failed)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self.faults.report("forward", "", error)

    def _start(self, module: nn.Module) -> None:
        """Counts a root forward and has it measured where the sampler chose it."""
        if not self._has_begun:
            if not self.session.begin():
                self.detach()
                return
            self._has_begun = True
        started_s = time.perf_counter()
        started_us = time.time_ns() // 1000
        self._tracker.root_started()
        grad_enabled = torch.is_grad_enabled()
        self._counts.add(forwards=1)
        with self._lock:
            # Forwards of several threads may begin at the same time.
            started = self._clock.forward_started(
                grad_enabled=grad_enabled, now_s=started_s, now_us=started_us
            )
        if started.closed:
            self.session.put_attempts(started.closed)
        call = _RootCall(read_grad_sync(module, grad_enabled, self.session.world_size), sys.exception())
        self._calls[threading.get_ident()] = call
        if self._num_paused == 0 and self._is_chosen(started.position):
            self._sample(call, module, started.position, started_us)

    def _is_chosen(self, position: Position) -> bool:
        """Asks the sampler; one that raises did not choose."""
        event = SamplingEvent(
            attempt=position.attempt,
            forward_in_attempt=position.forward_in_attempt,
            micro_batch=position.micro_batch,
            forward_index=position.forward_index,
            grad_enabled=position.grad_enabled,
            monotonic_s=time.monotonic(),
        )
        try:
            # A sampler of the caller's own may return anything; whether that is true may raise too.
            return True if self._sampler.should_sample(event) else False  # noqa: SIM210
        except Exception as error:  # noqa: BLE001 - the user's code
            self.faults.report("sampler", "", error)
            return False

    def _sample(self, call: _RootCall, module: nn.Module, position: Position, started_us: int) -> None:
        """Begins to measure a root forward."""
        self._abandon_dead_threads()
        ordinal = next(self._ordinals)
        if is_capturing_graph():
            self._miss(SampleFacts(ordinal, position, started_us, call.grad_sync, len(self._layers), 0))
            return
        sampled = SampledForward(
            layers=self._layers,
            tracker=self._tracker,
            faults=self.faults,
            ordinal=ordinal,
            position=position,
            started_at_us=started_us,
            grad_sync=call.grad_sync,
        )
        call.sampled = sampled
        sampled.attach(inside_compiled(module))

    def _end(self, call: _RootCall, *, failed: bool) -> None:
        """Takes the end of the outermost call."""
        with self._lock:
            self._clock.forward_ended(time.perf_counter(), call.grad_sync)
        if call.sampled is not None:
            self._end_sample(call.sampled, failed=failed)

    def _end_sample(self, sampled: SampledForward, *, failed: bool) -> None:
        """Hands over what a sampled forward brought."""
        ended = sampled.end(failed=failed)
        if ended is None:
            return
        delivery, gradients = ended
        self._counts.add(samples=1)
        self._deliver(delivery)
        if gradients is not None:
            gradients.forward_ended(delivery.facts)
        if self._catalog.fired(sampled.order, time.monotonic()):
            self.tell_catalog()

    def _miss(self, facts: SampleFacts) -> None:
        """Delivers a sample that could not be taken."""
        self._counts.add(missed=1)
        self.session.put_sample(
            Delivery(
                facts=facts,
                state=SampleState.MISSED,
                backward_index=None,
                settled=True,
                collection_s=0.0,
                errors=0,
                parts=(),
                absence_metrics=(),
                scale_provenance=ScaleProvenance.UNKNOWN,
            )
        )

    def _deliver(self, delivery: Delivery) -> None:
        """Hands a delivery to the session (training or autograd thread, hot path)."""
        self._counts.add(collection_s=delivery.collection_s)
        self.session.put_sample(delivery)

    def _backward_ended(self) -> None:
        """Tells the clock that a backward through a sample is over (autograd thread, hot path)."""
        with self._lock:
            self._clock.backward_ended(time.perf_counter())

    def _abandon(self, thread: int) -> None:
        """Ends a call that was left by an exception which runs no hooks, KeyboardInterrupt above all."""
        call = self._calls.pop(thread, None)
        if call is not None and call.sampled is not None:
            self._end_sample(call.sampled, failed=True)

    def _abandon_dead_threads(self) -> None:
        """Ends calls of threads that are gone."""
        if len(self._calls) > 1:
            alive = sys._current_frames()  # noqa: SLF001 - the ids of all threads that run Python
            for thread in list(self._calls):
                if thread not in alive:
                    self._abandon(thread)

    def _drop_calls(self) -> None:
        """Takes the hooks of running forwards out of the model and drops what they measured."""
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            if call.sampled is not None:
                call.sampled.detach()

    def _report_what_is_out_of_reach(self, model: nn.Module) -> None:
        """Reports what cannot be observed of a model that was just attached."""
        for layer, error in self._selector_errors:
            self.faults.report("selector", layer, error)
        for layer in self._layers:
            if not layer.takes_hooks:
                self.faults.report(
                    "selector", layer.name, TypeError("a scripted module takes no forward hooks")
                )
        if is_compiled_in_place(model):
            self.faults.warn(
                "the model was compiled in place with Module.compile(), so that its forward cannot be seen; "
                "attach to torch.compile(model) instead, or compile its parts"
            )


def _detach_all(companions: Sequence[Companion]) -> None:
    """Detaches what was attached with a probe."""
    for companion in companions:
        companion.detach()


def _num_calls_on_stack(module: nn.Module) -> int:
    """Returns how many calls of a module the current thread is in, the one that asks included."""
    code = nn.Module._call_impl.__code__  # noqa: SLF001 - every call of a module that has hooks runs it
    num_calls = 0
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else tells
    while frame is not None:
        num_calls += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back
    return num_calls
