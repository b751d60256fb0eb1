"""What one sampled forward, or one backward of it, gave."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchinstruments.records.codes import GradSync, SampleState, ScaleProvenance, Signal, StepProvenance
from torchinstruments.records.columns import Measurement, MeasurementColumns

__all__ = [
    "DeferredSample",
    "HistogramRecord",
    "ModuleRecord",
    "Position",
    "Sample",
]


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """One selected layer, as the catalog ``modules-<process>.json`` lists it.

    Attributes:
        layer: Name in the model without wrapper segments; ``""`` is the root.
        type: Class name.
        aliases: Further names of the same module object.
        parameter_count: Entries of its own parameters, children left out, of the whole ones where they are
            sharded; None where a wrapper around the attached model holds pieces of them and nothing tells.
        trainable_parameter_count: Those that require a gradient; None as well.
        execution_order: Position of its first call in the first sampled forward that reached it, else None.
        expected: Whether it was selected and can fire.
        fired: Sampled forwards in which it was called at least once.
    """

    layer: str
    type: str
    aliases: tuple[str, ...]
    parameter_count: int | None
    trainable_parameter_count: int | None
    execution_order: int | None = None
    expected: bool = True
    fired: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """Where a root forward stands among the steps of its process.

    Attributes:
        attempt: Window that it belongs to, from 0; None before the first grad-enabled forward.
        forward_in_attempt: Ordinal among all root forwards of the window.
        micro_batch: Ordinal among the grad-enabled ones; None for an evaluation forward.
        forward_index: Ordinal among all root forwards of the process.
        grad_enabled: Whether gradients were enabled when it began.
        step_provenance: How the attempt is known.
    """

    attempt: int | None
    forward_in_attempt: int
    micro_batch: int | None
    forward_index: int
    grad_enabled: bool
    step_provenance: StepProvenance


@dataclass(frozen=True, slots=True)
class HistogramRecord:
    """One histogram of one tensor at one moment.

    Attributes:
        layer: As in `ModuleRecord`.
        layer_index: Position in the catalog.
        call_index: Ordinal of the layer's call in this forward.
        signal: What was measured.
        tensor_path: As in `Measurement`.
        backward_index: As in `Measurement`.
        timestamp_us: When it was observed: microseconds since the epoch, UTC.
        mode: ``train`` or ``eval``, of the module.
        name: Name of the histogram.
        edges: Edges of the bins, ascending, one more than there are bins; empty where there is a reason.
        counts: Finite entries in each bin. Bins are open to the right, the last one closed.
        underflow: Finite entries below the first edge.
        overflow: Finite entries above the last edge.
        finite_count: Finite entries.
        nonfinite_count: NaN and infinite entries.
        minimum: Lowest finite entry; None where there is a reason.
        maximum: Highest finite entry; None where there is a reason.
        total: Sum of the finite entries in float64; None where there is a reason.
        total_of_squares: Sum of their squares; None where there is a reason.
        unavailable_reason: ``""``, else a `Reason` with or without detail.
        stage: As in `Measurement`.
    """

    layer: str
    layer_index: int
    call_index: int
    signal: Signal
    tensor_path: str
    backward_index: int
    timestamp_us: int
    mode: str
    name: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    underflow: int
    overflow: int
    finite_count: int
    nonfinite_count: int
    minimum: float | None
    maximum: float | None
    total: float | None
    total_of_squares: float | None
    unavailable_reason: str = ""
    stage: str = ""


class _OfColumns:
    """Room beside the fields of a `Sample`, so that nothing that goes by its fields sees it."""

    __slots__ = ("_columns",)


@dataclass(frozen=True, slots=True)
class Sample(_OfColumns):
    """What one sampled forward, or one backward of it, gave; resolved and handed to sinks.

    A sample reaches sinks once for its forward and once for each backward that was observed; and, where
    parameters' gradients are measured, once for each optimizer's step that found them.

    Its measurements may be made when somebody asks for them; `columns` are what they are made of.

    Attributes:
        ordinal: Ordinal of the sample in this process. The stored sample id adds the generation's first id.
        position: Where its forward stands.
        started_at_us: When its forward began: microseconds since the epoch, UTC.
        state: How far it has come with this delivery.
        backward_index: None for the forward's delivery, else which traversal of the graph this is.
        grad_sync: As latched where the framework decides.
        loss_scale: Scale that the loss was multiplied with, where known.
        scale_provenance: How it is known.
        collection_s: Seconds of the training thread that this delivery took.
        errors: Errors while it was collected.
        modules_expected: Selected modules.
        modules_fired: Those that were called in this forward.
        settled: Whether nothing more is expected of it (no gradient can come, or its backward is over). What
            an optimizer's step finds may come later all the same.
        measurements: In execution order.
        histograms: In execution order, of the layers in focus.
        at_step: Whether this delivery was made at an optimizer's step, and at no forward or backward.
    """

    ordinal: int
    position: Position
    started_at_us: int
    state: SampleState
    backward_index: int | None
    grad_sync: GradSync
    loss_scale: float | None
    scale_provenance: ScaleProvenance
    collection_s: float
    errors: int
    modules_expected: int
    modules_fired: int
    settled: bool
    measurements: tuple[Measurement, ...] = ()
    histograms: tuple[HistogramRecord, ...] = ()
    at_step: bool = False

    @property
    def columns(self) -> MeasurementColumns | None:
        """What the measurements are made of; None where they were given as such (writer thread)."""
        return getattr(self, "_columns", None)

    def take_columns(self, columns: MeasurementColumns) -> None:
        """Leaves the measurements to be made of columns, in place (by who has just made the sample)."""
        object.__delattr__(self, "measurements")
        object.__setattr__(self, "_columns", columns)

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> object:
            """Makes the measurements at the first look at them."""
            columns = self.columns if name == "measurements" else None
            if columns is None:
                raise AttributeError(f"a Sample has no attribute {name!r}")
            object.__setattr__(self, name, columns.measurements())
            return self.measurements


class DeferredSample(Protocol):
    """A sample whose scalars may still be on their way from a device.

    Attributes:
        num_scalars: Scalars that it holds, for the bound of the queue.
    """

    @property
    def num_scalars(self) -> int:
        """Scalars that it holds (training thread, hot path)."""
        ...

    def resolve(self) -> Sample:
        """Waits for the copy and returns the sample (writer thread)."""
        ...
