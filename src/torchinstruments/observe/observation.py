"""One measured tensor on its way from a hook to a `Measurement`, and the deliveries that carry many of them.

A hook notes at once what belongs to the moment (time, shape, mode) and measures, or starts the work on the
device. It leaves numbers and times side by side in arrays, and one known object for what they are of, so that
the writer thread, which holds the interpreter's lock while it resolves a delivery, has next to nothing to do
for each tensor. No delivery holds a tensor of the model.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from torchinstruments.observe.engine import is_capturing_graph
from torchinstruments.observe.known_frames import KnownFrames
from torchinstruments.observe.observed import Kind, KnownObservations, Observation
from torchinstruments.observe.part import Part
from torchinstruments.observe.selection import Layer
from torchinstruments.ranks.replicas import key_of_layout
from torchinstruments.records import (
    Absent,
    Execution,
    GradSync,
    HistogramRecord,
    MeasurementColumns,
    Position,
    Reason,
    Sample,
    SampleState,
    ScaleProvenance,
    Scope,
    Signal,
    Stage,
)
from torchinstruments.statistics.admission import admit
from torchinstruments.statistics.batching import MeasuredScalars, ScalarBatch
from torchinstruments.statistics.contract import Reducer, known_metrics, reducer_name
from torchinstruments.statistics.histograms import HistogramReducer, absent_histogram, due_histograms
from torchinstruments.statistics.isolation import functions_off, isolated, unintercepted
from torchinstruments.statistics.reading import ScalarTable
from torchinstruments.statistics.transfer import Transfer

__all__ = [
    "DEFAULT_SIGNALS",
    "Call",
    "Delivery",
    "Recipe",
    "SampleFacts",
    "absence_metrics",
    "error_reason",
    "note_absence",
    "note_tensor",
    "send_together",
    "take_absence",
    "take_tensor",
]


DEFAULT_SIGNALS = frozenset((Signal.OUTPUT, Signal.OUTPUT_GRADIENT))
"""What is measured where nobody asked for anything else."""


class Call(NamedTuple):
    """One call of one layer.

    Attributes:
        layer: The layer.
        call_index: Ordinal of the call in its forward.
        mode: ``train`` or ``eval``.
        grad_enabled: Whether gradients were enabled.
        execution: How it ran.
        plain_scope: What a plain tensor covers that the layer puts out.
    """

    layer: Layer
    call_index: int
    mode: str
    grad_enabled: bool
    execution: Execution = Execution.EAGER
    plain_scope: Scope = Scope.LOCAL


_INTEGERS = frozenset({int})


def _always() -> bool:
    """Someone keeps them."""
    return True


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is computed of the tensors of one observer.

    Attributes:
        reducers: Of every tensor.
        histograms: Of the tensors of layers in focus, in samples where they are due.
        focus: Indices of these layers.
        wants_histograms: Asked for each part whether anyone would keep its histograms; must not raise.
        signals: What is measured of the layers.
        known: The observations of earlier samples.
        frames: What the numbers of earlier samples were of (writer thread).
    """

    reducers: tuple[Reducer, ...]
    histograms: tuple[HistogramReducer, ...] = ()
    focus: frozenset[int] = frozenset()
    wants_histograms: Callable[[], bool] = _always
    signals: frozenset[Signal] = DEFAULT_SIGNALS
    known: KnownObservations = field(default_factory=KnownObservations)
    frames: KnownFrames = field(default_factory=KnownFrames)

    def part(self, ordinal: int, on_error: Callable[[str, BaseException], None]) -> Part:
        """Returns an empty part (training or autograd thread, hot path).

        Args:
            ordinal: Of the sample; says which histograms are due.
            on_error: Takes errors of reducers.
        """
        due = due_histograms(self.histograms, ordinal) if self.focus and self.wants_histograms() else ()
        return Part(
            ScalarBatch(self.reducers, on_error, histograms=due),
            self.known,
            self.frames,
            histograms=tuple([histogram.name for histogram in due]),
            focus=self.focus if due else frozenset(),
        )


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What all deliveries of a sample have in common; see `Sample`."""

    ordinal: int
    position: Position
    started_at_us: int
    grad_sync: GradSync
    modules_expected: int
    modules_fired: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A sample whose numbers may still be on their way: a `DeferredSample`.

    Attributes:
        facts: What it shares with the sample's other deliveries.
        state: How far the sample has come.
        backward_index: None for the forward.
        settled: Whether nothing more is expected.
        collection_s: Seconds that it took.
        errors: Errors while it was collected.
        parts: Sealed.
        absence_metrics: Metrics of a tensor that was not measured.
        scale_provenance: How the loss scale is known.
        scale: The loss scale, or batch and place of it, where it has a value.
        at_step: Whether an optimizer's step brought it.
    """

    facts: SampleFacts
    state: SampleState
    backward_index: int | None
    settled: bool
    collection_s: float
    errors: int
    parts: tuple[Part, ...]
    absence_metrics: tuple[str, ...]
    scale_provenance: ScaleProvenance
    scale: tuple[ScalarBatch, int] | float | None = None
    at_step: bool = False

    @property
    def num_scalars(self) -> int:
        """Scalars that it holds, missing ones included (training thread, hot path)."""
        absent = sum([part.indices.count(-1) for part in self.parts])
        return sum(part.batch.num_scalars for part in self.parts) + absent * len(self.absence_metrics)

    def resolve(self) -> Sample:
        """Waits for the copies and returns the sample (writer thread)."""
        sample = Sample(
            ordinal=self.facts.ordinal,
            position=self.facts.position,
            started_at_us=self.facts.started_at_us,
            state=self.state,
            backward_index=self.backward_index,
            grad_sync=self.facts.grad_sync,
            loss_scale=self.scale[0].read_scalar(self.scale[1])
            if isinstance(self.scale, tuple)
            else self.scale,
            scale_provenance=self.scale_provenance,
            collection_s=self.collection_s,
            errors=self.errors,
            modules_expected=self.facts.modules_expected,
            modules_fired=self.facts.modules_fired,
            settled=self.settled,
            histograms=tuple(
                [
                    record
                    for part in self.parts
                    if part.focus
                    for place, observation in enumerate(part.observations)
                    if observation.kind.layer_index in part.focus
                    for record in self._histograms(part, place)
                ]
            ),
            at_step=self.at_step,
        )
        parts = [part for part in self.parts if part.observations]
        if parts:
            sample.take_columns(self._columns(parts))
        return sample

    def _columns(self, parts: Sequence[Part]) -> MeasurementColumns:
        """Returns the observations of parts with their numbers."""
        tables = [self._table(part) for part in parts]
        if len(parts) == 1:
            observations = parts[0].observations
            metrics, values, reasons = tables[0]
            timestamps_us = np.frombuffer(parts[0].timestamps_us, np.int64, len(observations))
        else:
            observations = [one for part in parts for one in part.observations]
            metrics = [names for table in tables for names in table.metrics]
            values = np.concatenate([table.values for table in tables])
            start, reasons = 0, dict[int, str]()
            for table in tables:
                reasons |= {start + place: reason for place, reason in table.reasons.items()}
                start += len(table.values)
            timestamps_us = np.concatenate(
                [np.frombuffer(part.timestamps_us, np.int64, len(part.observations)) for part in parts]
            )
        frame, shapes = parts[0].frames.find(observations, metrics, self.backward_index or 0)
        return MeasurementColumns(frame, shapes, timestamps_us, values, reasons)

    def _table(self, part: Part) -> ScalarTable:
        """Returns the numbers of one part, or why there are none."""

        def absent(place: int) -> MeasuredScalars:
            count = len(self.absence_metrics)
            return MeasuredScalars(
                self.absence_metrics, (None,) * count, (part.observations[place].reason,) * count
            )

        return part.batch.read_all(part.indices[: len(part.observations)], absent)

    def _histograms(self, part: Part, place: int) -> Iterator[HistogramRecord]:
        """Yields the histograms of one observation, or why there are none."""
        observation, index = part.observations[place], part.indices[place]
        if index < 0:
            measured = tuple([absent_histogram(name, observation.reason) for name in part.histograms])
        else:
            measured = part.batch.read_histograms(index)
        kind, timestamp_us = observation.kind, part.timestamps_us[place]
        for one in measured:
            yield HistogramRecord(
                layer=kind.layer,
                layer_index=kind.layer_index,
                call_index=kind.call_index,
                signal=kind.signal,
                tensor_path=kind.tensor_path,
                backward_index=self.backward_index or 0,
                timestamp_us=timestamp_us,
                mode=kind.mode,
                name=one.name,
                edges=one.edges,
                counts=one.counts,
                underflow=one.underflow,
                overflow=one.overflow,
                finite_count=one.finite_count,
                nonfinite_count=one.nonfinite_count,
                minimum=one.minimum,
                maximum=one.maximum,
                total=one.total,
                total_of_squares=one.total_of_squares,
                unavailable_reason=one.unavailable_reason,
                stage=kind.stage.value,
            )


def take_tensor(
    part: Part,
    call: Call,
    signal: Signal,
    path: str,
    tensor: torch.Tensor,
    stage: Stage = Stage.NONE,
    *,
    is_piece: bool = False,
) -> Observation:
    """Measures a tensor as it is now (training or autograd thread, hot path).

    The observation is appended to the part, with the reason where the tensor cannot be measured.

    Args:
        part: Takes the observation.
        call: The call.
        signal: What is measured.
        path: Path of the tensor.
        tensor: The tensor.
        stage: Of a parameter's gradient.
        is_piece: Whether it is a part of a larger one where it does not say so itself.
    """
    return _look(part, call, signal, path, tensor, stage, is_piece=is_piece)


def note_tensor(
    call: Call, signal: Signal, path: str, tensor: torch.Tensor, *, is_piece: bool = False
) -> Observation:
    """Returns what a tensor is, without its numbers and in no part (training thread, hot path)."""
    return _look(None, call, signal, path, tensor, Stage.NONE, is_piece=is_piece)


def _look(
    part: Part | None,
    call: Call,
    signal: Signal,
    path: str,
    tensor: torch.Tensor,
    stage: Stage,
    *,
    is_piece: bool,
) -> Observation:
    """Returns the observation of a tensor, with its numbers in the part's batch, if there is one."""
    timestamp_us = time.time_ns() // 1000
    replica_key = ""
    with unintercepted():
        device = tensor.device
    with functions_off(), isolated(device.type):
        # What is computed while a graph is captured would become part of the graph.
        admitted = Absent(Reason.GRAPH_CAPTURE.value) if is_capturing_graph() else admit(tensor)
        if isinstance(admitted, Absent):
            local, scope, index, reason = tensor, Scope.UNKNOWN, -1, admitted.reason
        else:
            local, scope = admitted
            if call.plain_scope is not Scope.LOCAL and scope is Scope.LOCAL:
                scope = _scope_of_plain(call, signal, tensor)
            index, reason = -1, ""
            if part is not None:
                index = part.batch.add(local, histograms=call.layer.index in part.focus)
            if scope is Scope.LOCAL_SHARD:
                replica_key = _key_of_part(tensor)
            elif is_piece and scope is Scope.LOCAL:
                scope = Scope.LOCAL_SHARD
    with unintercepted():
        shape, dtype = _shape(local), _dtype(local)
    kind = _kind(call, signal, stage, path, scope, replica_key, dtype, _device(device))
    if part is None:
        return Observation(Kind._make(kind), shape, reason)
    return part.add(kind, shape, reason, timestamp_us, index)


def take_absence(
    part: Part,
    call: Call,
    signal: Signal,
    path: str,
    reason: str,
    like: Observation | None = None,
    stage: Stage = Stage.NONE,
) -> Observation:
    """Notes that there is nothing to measure, and why (training or autograd thread, hot path).

    Args:
        part: Takes the observation.
        call: The call.
        signal: What would have been measured.
        path: Where it would have been.
        reason: A `Reason`, with or without detail.
        like: An observation that lends its shape, dtype, device and scope.
        stage: Of a parameter's gradient.
    """
    timestamp_us = time.time_ns() // 1000
    if like is None:
        return part.add(_kind(call, signal, stage, path, *_OF_NOTHING), (), reason, timestamp_us, -1)
    lent = like.kind
    kind = _kind(call, signal, stage, path, lent.scope, lent.replica_key, lent.dtype, lent.device)
    return part.add(kind, like.shape, reason, timestamp_us, -1)


def note_absence(call: Call, signal: Signal, path: str, reason: str) -> Observation:
    """Returns that there is nothing yet, and why, in no part (training thread, hot path)."""
    return Observation(Kind._make(_kind(call, signal, Stage.NONE, path, *_OF_NOTHING)), (), reason)


def absence_metrics(reducers: Sequence[Reducer]) -> tuple[str, ...]:
    """Returns the metrics of a tensor that was not measured: those known, else one a reducer by its name."""
    return tuple(
        [name for reducer in reducers for name in known_metrics(reducer) or (reducer_name(reducer),)]
    )


def send_together(transfer: Transfer, on_error: Callable[[str, BaseException], None]) -> None:
    """Starts the copy of what a sampled step has left on its devices (training or autograd thread, hot path).

    While a graph is captured, of which the copy would become part, it is left to who comes later.
    """
    if not is_capturing_graph():
        with functions_off(), isolated("cpu"):
            transfer.send(on_error)


def error_reason(error: BaseException) -> str:
    """Returns the reason code of an exception while a tensor was measured."""
    return Reason.REDUCER_ERROR.with_error(error)


_OF_NOTHING = (Scope.UNKNOWN, "", "", "")


def _kind(
    call: Call,
    signal: Signal,
    stage: Stage,
    path: str,
    scope: Scope,
    replica_key: str,
    dtype: str,
    device: str,
) -> tuple[Any, ...]:
    """Returns the fields of a `Kind`."""
    layer, call_index, mode, grad_enabled, execution, _ = call
    return (
        layer.name,
        layer.index,
        call_index,
        signal,
        stage,
        path,
        mode,
        grad_enabled,
        scope,
        replica_key,
        execution,
        dtype,
        device,
    )


def _scope_of_plain(call: Call, signal: Signal, tensor: torch.Tensor) -> Scope:
    """Returns what a whole or a plain tensor covers in a model whose layers share their work among ranks."""
    if getattr(tensor, "placements", None) is not None:
        return Scope.LOCAL
    match signal:
        case Signal.OUTPUT | Signal.OUTPUT_GRADIENT:
            return call.plain_scope
        case Signal.INPUT:
            # It may be what a layer before put out.
            return Scope.UNKNOWN
        case _:
            return Scope.LOCAL


def _key_of_part(tensor: torch.Tensor) -> str:
    """Returns which part of a sharded tensor this rank has, and which ranks have the same."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    return "" if mesh is None or placements is None else key_of_layout(mesh, tuple(placements))


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape as plain numbers; empty where the tensor has no such shape."""
    try:
        shape = tuple(tensor.shape)
    except Exception:  # noqa: BLE001 - nested tensors of the older kind have none
        return ()
    # Jagged tensors have symbolic lengths, and to make a number of one may add a guard to a program.
    return shape if _INTEGERS.issuperset(map(type, shape)) else ()


def _dtype(tensor: torch.Tensor) -> str:
    """Returns the dtype without its module."""
    return _dtype_name(tensor.dtype)


@lru_cache(maxsize=128)
def _dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype without its module."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=128)
def _device(device: torch.device) -> str:
    """Returns a device as torch writes it."""
    return str(device)
