"""The gradients of a sample's outputs, and the end of the backward that brings them.

Each output that requires a gradient gets a tensor hook at the moment it is seen, so that a later in-place
operation leaves it on the right version. All hooks that fire in one traversal of the graph share its graph
task, and the first of them asks the engine to be called when that task is over: from there once more, since
a callback queued by a callback runs after everything that the framework had queued itself.

What the forward measured on a device goes to the host with what its backward measures there, in one copy; or
with what the optimizer's step finds, where that is still to come. It waits for the next forward at the most.

Several traversals of one graph (``retain_graph``, two losses, a gradient penalty) are told apart by their
tasks and numbered. Hooks hold the sample's bookkeeping and never a tensor, and nothing else holds it: it goes
with the graph when no backward ever comes. A backward that raised never says that it is over; it is given up
when the thread that ran the forward begins another one.
"""

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from torchinstruments.observe.backward_sync import BackwardSync
from torchinstruments.observe.engine import call_at_end_of_backward, graph_task, is_capturing_graph
from torchinstruments.observe.faults import Faults, Tally, too_deep
from torchinstruments.observe.hooks import GradientHook, take_out
from torchinstruments.observe.leaves import gradient_path
from torchinstruments.observe.observation import (
    Call,
    Delivery,
    Recipe,
    SampleFacts,
    absence_metrics,
    error_reason,
    send_together,
    take_absence,
    take_tensor,
)
from torchinstruments.observe.observed import Observation
from torchinstruments.observe.part import Part
from torchinstruments.observe.session_protocol import ScaleSource
from torchinstruments.records import GradSync, Reason, SampleState, ScaleProvenance, Signal
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.isolation import functions_off, isolated, unintercepted
from torchinstruments.statistics.transfer import Transfer

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["MAX_OUTSTANDING", "GradientTracker", "SampleGradients", "Traversal"]

MAX_OUTSTANDING = 256
"""Samples whose graphs may be alive at once; the oldest is given up beyond that."""

MAX_TRAVERSALS = 1_000
"""Traversals of one sample's graph that are measured."""

_PROBE = "gradient"


class BackwardListener(Protocol):
    """Who measures something else in the backwards of a sample: the gradients of its parameters."""

    @property
    def awaits_step(self) -> bool:
        """Whether an optimizer's step may bring more of the sample (autograd thread, hot path)."""
        ...

    def backward_began(self, traversal: "Traversal") -> None:
        """Takes that a backward has come to the first output of the sample (autograd thread, hot path)."""
        ...

    def backward_ended(self, traversal: "Traversal") -> None:
        """Adds what there is once a backward is over (autograd thread, hot path)."""
        ...


class GradientTracker:
    """All samples of one observer that may still get gradients.

    Args:
        recipe: What is computed of each gradient.
        faults: Takes errors.
        scale: Knows the loss scale; None where nobody watches for one.
        deliver: Takes a finished traversal; it must not raise.
        backward_ended: Told when a backward through a sample is over.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        faults: Faults,
        scale: ScaleSource | None,
        deliver: Callable[[Delivery], None],
        backward_ended: Callable[[], None],
    ) -> None:
        self.recipe = recipe
        self.absence_metrics = absence_metrics(recipe.reducers)
        self.faults = faults
        self.scale = scale
        self.deliver = deliver
        self.backward_ended = backward_ended
        self.running: dict[int, Traversal] = {}
        """Traversals that have begun, by graph task."""
        self.is_closed = False
        self._leaf_handles: dict[RemovableHandle, None] = {}
        self._samples: deque[weakref.ref[SampleGradients]] = deque()
        self._transfers: deque[Transfer] = deque()

    def sample(
        self,
        ordinal: int,
        forward_index: int,
        listener: BackwardListener | None = None,
        backward_sync: BackwardSync | None = None,
    ) -> "SampleGradients":
        """Returns the bookkeeping of a sample that expects gradients (training thread, hot path).

        Args:
            ordinal: Of the sample.
            forward_index: Of the root forward.
            listener: Told of the end of its backwards.
            backward_sync: Reads whether they synchronise gradients, where they decide that.
        """
        thread = threading.get_ident()
        sample = SampleGradients(self, ordinal, forward_index, thread, listener, backward_sync)
        if len(self._samples) >= MAX_OUTSTANDING:
            self._samples = deque(reference for reference in self._samples if reference() is not None)
        if len(self._samples) >= MAX_OUTSTANDING:
            oldest = self._samples.popleft()()
            if oldest is not None:
                oldest.close()
                self.faults.report(
                    _PROBE,
                    "",
                    RuntimeError(
                        f"more than {MAX_OUTSTANDING} sampled forwards wait for a backward; "
                        f"the oldest is given up"
                    ),
                )
        self._samples.append(weakref.ref(sample))
        self._transfers.append(sample.transfer)
        if self.is_closed:
            # By another thread, meanwhile.
            sample.close()
        return sample

    def root_started(self) -> None:
        """Gives up what a root forward of this thread shows to be over (training thread, hot path).

        A hook on a leaf tensor, a parameter say, outlives every graph; it counts only until the next forward.
        """
        if self._leaf_handles:
            self._release_leaves()
        if self.running:
            thread = threading.get_ident()
            for traversal in list(self.running.values()):
                if traversal.sample.thread == thread:
                    traversal.finish(failed=True)
        if self._transfers and not is_capturing_graph():
            # Of another thread's forward too, which then makes more than one copy.
            for _ in range(len(self._transfers)):
                try:
                    transfer = self._transfers.popleft()
                except IndexError:  # another thread sends too
                    break
                send_together(transfer, self._copy_failed)

    def close(self) -> None:
        """Lets no hook do anything any more, for good. Idempotent (any thread)."""
        self.is_closed = True
        for reference in list(self._samples):
            sample = reference()
            if sample is not None:
                sample.close()
        self._samples.clear()
        self.running.clear()
        self._release_leaves()

    def keep_leaf(self, handle: "RemovableHandle") -> None:
        """Takes the hook on a leaf tensor, to be removed at the next forward (training thread)."""
        self._leaf_handles[handle] = None
        if self.is_closed:
            # By another thread, meanwhile.
            self._release_leaves()

    def _copy_failed(self, probe: str, error: BaseException) -> None:
        """Reports that numbers of a forward do not come (training thread)."""
        self.faults.report(probe, "", error)

    def _release_leaves(self) -> None:
        """Removes the hooks on leaf tensors."""
        while self._leaf_handles:
            for handle in list(self._leaf_handles):
                handle.remove()
                self._leaf_handles.pop(handle, None)


@dataclass(frozen=True, slots=True)
class _Target:
    """One output that may get a gradient.

    Attributes:
        call: The call that it came from.
        path: Of the gradient.
        output: What was observed of it.
        is_view: Whether it shares another tensor's memory.
    """

    call: Call
    path: str
    output: Observation
    is_view: bool

    def missing(self) -> str:
        """Returns why a traversal brought no gradient of it."""
        if not self.is_view:
            return Reason.NO_GRADIENT.value
        # Which of the two it was, nothing tells afterwards.
        return Reason.NO_GRADIENT.with_detail(
            "none came, or a view was changed in place, which loses its hook"
        )


class SampleGradients:
    """The gradients of one sampled forward.

    Args:
        tracker: Of the observer.
        ordinal: Of the sample.
        forward_index: Of the root forward.
        thread: Which thread ran the forward.
        listener: Told of the end of its backwards.
        backward_sync: Reads whether they synchronise gradients, where they decide that.
    """

    def __init__(
        self,
        tracker: GradientTracker,
        ordinal: int,
        forward_index: int,
        thread: int,
        listener: BackwardListener | None = None,
        backward_sync: BackwardSync | None = None,
    ) -> None:
        self.tracker = tracker
        self.ordinal = ordinal
        self.forward_index = forward_index
        self.thread = thread
        self.listener = listener
        self.backward_sync = backward_sync
        self.targets: dict[int, _Target] = {}
        self.seen: set[int] = set()
        self.closed = False
        self.transfer = Transfer()
        """Takes what it measures on devices, in the forward and in backwards."""
        self.num_too_deep = 0
        """Hooks of it that the stack had no room for."""
        self._num_watched = 0
        self._numbers = itertools.count()
        self._facts: SampleFacts | None = None
        self._waiting: list[_Finished] = []
        self._traversals: dict[int, Traversal] = {}
        self._indices = itertools.count()

    def expect(self, call: Call, path: str, tensor: torch.Tensor, output: Observation) -> None:
        """Watches for the gradient of an output (training thread, hot path).

        Args:
            call: The call that it came from.
            path: Its path among the outputs.
            tensor: Requires a gradient.
            output: What was observed of it.
        """
        number = next(self._numbers)
        with unintercepted():
            is_view = tensor._is_view()  # noqa: SLF001 - its only name
            # A number is given once: of a hook that was placed while its target was not, nothing is taken.
            self.targets[number] = _Target(call, gradient_path(path), output, is_view)
            hook = GradientHook(self, number)
            try:
                # As an output it is taken now: an in-place operation would move its hook to another version.
                handle = tensor.register_hook(hook)
                if tensor.is_leaf:
                    self.tracker.keep_leaf(handle)
            except BaseException:
                self.targets.pop(number, None)
                take_out(tensor, hook)
                raise

    def watch(self, tensor: torch.Tensor) -> None:
        """Takes a backward through an output for one of this sample, and measures nothing of the output.

        It is called on the training thread, in the hot path.

        Args:
            tensor: Requires a gradient and is no leaf.
        """
        # No target has a number below zero.
        number = -self._num_watched - 1
        with unintercepted():
            tensor.register_hook(GradientHook(self, number))
        self._num_watched += 1

    @property
    def num_missing(self) -> int:
        """How many outputs no backward has reached yet (autograd thread, hot path)."""
        return len(self.targets) + self._num_watched - len(self.seen)

    def forward_ended(self, facts: SampleFacts) -> None:
        """Takes what is known after the forward; traversals inside it were held back (training thread)."""
        self._facts = facts
        for finished in self._waiting:
            self.tracker.deliver(finished.delivery(facts, self.tracker.absence_metrics))
        self._waiting.clear()

    def arrived(self, number: int, gradient: torch.Tensor | None) -> None:
        """Measures a gradient; it never raises (autograd thread, hot path).

        Args:
            number: Of the target, or of what is only watched.
            gradient: None where the traversal came by and brought none: of an operation with several outputs
                autograd leaves those undefined that nothing depends on.
        """
        target = self.targets.get(number)
        if self.closed or (target is None and number >= 0):
            return
        started_s = time.perf_counter()
        traversal: Traversal | None = None
        try:
            traversal = self._traversal(graph_task())
            self.seen.add(number)
            if target is not None:
                traversal.take(target, gradient)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self.tracker.faults.report(_PROBE, "" if target is None else target.call.layer.name, error)
        finally:
            if traversal is not None:
                traversal.collection_s += time.perf_counter() - started_s

    def running(self, task: int) -> "Traversal | None":
        """Returns the traversal that a graph task belongs to (autograd thread, hot path).

        The inner task of reentrant checkpointing belongs to the one that runs around it, in the same thread.
        None where no backward of this sample runs: then the task is another forward's.
        """
        found = self._traversals.get(task)
        if found is not None:
            return found
        thread = threading.get_ident()
        own = [one for one in list(self._traversals.values()) if one.thread == thread]
        return own[-1] if own else None

    def finished(self, finished: "_Finished") -> None:
        """Delivers a traversal, once the forward is over (autograd thread, hot path)."""
        self._traversals.pop(finished.task, None)
        if self.closed:
            return
        if self._facts is None:
            self._waiting.append(finished)
        else:
            self.tracker.deliver(finished.delivery(self._facts, self.tracker.absence_metrics))

    def close(self) -> None:
        """Lets its hooks do nothing any more (any thread)."""
        self.closed = True
        for task in list(self._traversals):
            self.tracker.running.pop(task, None)
        self._traversals.clear()
        self._waiting.clear()

    def _traversal(self, task: int) -> "Traversal":
        """Returns the traversal of a graph task, which begins with its first gradient."""
        traversal = self._traversals.get(task)
        if traversal is not None:
            return traversal
        fresh = Traversal(self, task)
        # Threads of several devices may bring the first gradients of one task at the same time.
        traversal = self._traversals.setdefault(task, fresh)
        if traversal is fresh:
            fresh.backward_index = next(self._indices)
            if fresh.backward_index >= MAX_TRAVERSALS:
                self.close()
                raise RuntimeError(f"more than {MAX_TRAVERSALS} backwards through one sampled forward")
            self.tracker.running[task] = fresh
            if self.backward_sync is not None:
                fresh.grad_sync = self.backward_sync.read()
            call_at_end_of_backward(fresh.engine_ended)
            if self.listener is not None:
                self.listener.backward_began(fresh)
        return traversal


class Traversal:
    """One backward through one sample."""

    def __init__(self, sample: SampleGradients, task: int) -> None:
        self.sample = sample
        self.task = task
        self.thread = threading.get_ident()
        """In which it came to the first output."""
        self.backward_index = 0
        self.grad_sync: GradSync | None = None
        """What it does with the gradients; None where the forward has decided that."""
        self.collection_s = 0.0
        self.tally = Tally(sample.tracker.faults)
        self._parts: dict[int, Part] = {}
        self._is_over = False

    def part(self) -> Part:
        """Returns where the current thread leaves what it measures (autograd thread, hot path)."""
        thread = threading.get_ident()
        part = self._parts.get(thread)
        if part is None:
            recipe = self.sample.tracker.recipe
            part = self._parts[thread] = recipe.part(self.sample.ordinal, self.tally.fail)
        return part

    def take(self, target: _Target, gradient: torch.Tensor | None) -> None:
        """Measures the gradient of an output, or says that it has none (autograd thread, hot path)."""
        part = self.part()
        self.tally.layer = target.call.layer.name
        try:
            if gradient is None:
                reason = Reason.NO_GRADIENT.value
                take_absence(part, target.call, Signal.OUTPUT_GRADIENT, target.path, reason, target.output)
                return
            take_tensor(part, target.call, Signal.OUTPUT_GRADIENT, target.path, gradient)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self.tally.fail(_PROBE, error)
            take_absence(
                part, target.call, Signal.OUTPUT_GRADIENT, target.path, error_reason(error), target.output
            )

    def engine_ended(self) -> None:
        """Is called by the engine after the last gradient of the task (autograd thread, hot path)."""
        try:
            call_at_end_of_backward(self.framework_ended)
        except Exception as error:  # noqa: BLE001 - nothing may leave a callback
            self.tally.fail(_PROBE, error)
            self.framework_ended()

    def framework_ended(self) -> None:
        """Is called by the engine after all that the framework does then (autograd thread, hot path)."""
        try:
            self.finish(failed=False)
        except Exception as error:  # noqa: BLE001 - nothing may leave a callback
            self.tally.fail(_PROBE, error)

    def finish(self, *, failed: bool) -> None:
        """Closes the traversal and hands over what it brought (autograd thread, hot path).

        Args:
            failed: Whether the backward raised, and so never came to its end.
        """
        if self._is_over:
            return
        self._is_over = True
        sample, tracker = self.sample, self.sample.tracker
        tracker.running.pop(self.task, None)
        if sample.closed:
            return
        started_s = time.perf_counter()
        if self.backward_index == 0 and not failed:
            self._note_missing()
        if sample.listener is not None and not failed:
            try:
                sample.listener.backward_ended(self)
            except Exception as error:  # noqa: BLE001 - the gradients of outputs are delivered all the same
                self.tally.fail(_PROBE, error)
        if sample.num_too_deep:
            self.tally.layer = ""
            self.tally.fail(_PROBE, too_deep(sample.num_too_deep))
            sample.num_too_deep = 0
        scale, provenance = self._scale()
        parts = list(self._parts.values())
        with functions_off(), isolated("cpu"):
            for part in parts:
                part.batch.seal(sample.transfer)
        awaits_step = sample.listener is not None and sample.listener.awaits_step
        # Of each sample the first backward waits alone, so that what is left on a device is bounded.
        if failed or not awaits_step or self.backward_index > 0:
            send_together(sample.transfer, self.tally.fail)
        self.collection_s += time.perf_counter() - started_s
        sample.finished(
            _Finished(
                task=self.task,
                backward_index=self.backward_index,
                grad_sync=self.grad_sync,
                failed=failed,
                collection_s=self.collection_s,
                errors=self.tally.errors,
                parts=tuple(parts),
                scale=scale,
                scale_provenance=provenance,
            )
        )
        if not failed:
            tracker.backward_ended()

    def _note_missing(self) -> None:
        """Notes the outputs that the first traversal did not reach."""
        missing = [target for number, target in self.sample.targets.items() if number not in self.sample.seen]
        for target in missing:
            take_absence(
                self.part(),
                target.call,
                Signal.OUTPUT_GRADIENT,
                target.path,
                target.missing(),
                target.output,
            )

    def _scale(self) -> tuple[tuple[ScalarBatch, int] | None, ScaleProvenance]:
        """Takes the loss scale along as it is now."""
        source = self.sample.tracker.scale
        if source is None:
            return None, ScaleProvenance.UNKNOWN
        try:
            scale, provenance = source.current_scale(self.sample.forward_index)
            if scale is None or is_capturing_graph():
                return None, provenance
            part = next(iter(self._parts.values()), None)
            if part is None:
                # Nothing was measured that it would stand beside.
                return None, provenance
            batch = part.batch
            with unintercepted():
                device_type = scale.device.type
            with functions_off(), isolated(device_type):
                return (batch, batch.add_scalar(scale)), provenance
        except Exception as error:  # noqa: BLE001 - nothing may leave a callback
            self.tally.fail("loss_scale", error)
            return None, ScaleProvenance.UNKNOWN


@dataclass(frozen=True, slots=True)
class _Finished:
    """A traversal that is over."""

    task: int
    backward_index: int
    grad_sync: GradSync | None
    failed: bool
    collection_s: float
    errors: int
    parts: tuple[Part, ...]
    scale: tuple[ScalarBatch, int] | None
    scale_provenance: ScaleProvenance

    def delivery(self, facts: SampleFacts, metrics: tuple[str, ...]) -> Delivery:
        """Returns the delivery of this traversal."""
        return Delivery(
            facts=facts if self.grad_sync is None else replace(facts, grad_sync=self.grad_sync),
            state=SampleState.FAILED if self.failed else SampleState.BACKWARD_OBSERVED,
            backward_index=self.backward_index,
            settled=True,
            collection_s=self.collection_s,
            errors=self.errors,
            parts=self.parts,
            absence_metrics=metrics,
            scale_provenance=self.scale_provenance,
            scale=self.scale,
        )
