"""The messages between rooms: frozen, slotted, free of torch.

Data takes one way: hooks measure tensors on the device, one copy brings the scalars to the host, the
writer thread resolves them into a `Sample`, sinks consume it. What is here is what both sides of that way,
and the offline side, agree upon. Every code that a table can hold stands here once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

__all__ = [
    "Absent",
    "Amendment",
    "AttemptRecord",
    "ChecksRecord",
    "Claim",
    "ClosedAttempt",
    "Counters",
    "DeferredFingerprints",
    "DeferredSample",
    "ErrorRecord",
    "Evidence",
    "Execution",
    "FingerprintRecord",
    "GenerationRecord",
    "GradSync",
    "HistogramRecord",
    "Identity",
    "Measurement",
    "Member",
    "ModuleRecord",
    "Outbox",
    "Outcome",
    "Position",
    "Reason",
    "RunRecord",
    "Sample",
    "SampleState",
    "ScaleProvenance",
    "Scope",
    "Signal",
    "Stage",
    "StepProvenance",
    "error_text",
    "storable",
]


def storable(text: str) -> str:
    """Returns a text as every table and document can hold it: lone surrogates become their escapes.

    File names that are not UTF-8 bring them. It is for wherever a text of the program's comes in (any
    thread, hot path).
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException, max_characters: int = 500) -> str:
    """Returns the message of an exception on one line and storable; it never raises (any thread)."""
    try:
        return storable(" ".join(str(error).split())[:max_characters])
    except Exception:  # noqa: BLE001 - an exception whose text fails is still one that is counted
        return "(its message could not be read)"


class Signal(StrEnum):
    """What was measured of a layer."""

    OUTPUT = "output"
    OUTPUT_GRADIENT = "output_gradient"
    INPUT = "input"
    PARAMETER = "parameter"
    PARAMETER_GRADIENT = "parameter_gradient"


class Stage(StrEnum):
    """At which moment of an attempt a parameter's gradient was measured; other signals have no stage.

    Attributes:
        LOCAL_ACCUMULATED: After a backward had added to it and before any reduction between ranks.
        REDUCED: After the end of the backward, and so of the reduction that belongs to it.
        APPLIED: As the optimizer's step found it.
    """

    NONE = ""
    LOCAL_ACCUMULATED = "local_accumulated"
    REDUCED = "reduced"
    APPLIED = "applied"


class Scope(StrEnum):
    """What a number covers."""

    LOCAL = "local"
    LOCAL_SHARD = "local_shard"
    LOCAL_OF_DTENSOR = "local_of_dtensor"
    UNKNOWN = "unknown"


class Execution(StrEnum):
    """How the program ran that was measured."""

    EAGER = "eager"
    INSIDE_COMPILED = "inside_compiled"
    FORCED_EAGER = "forced_eager"


class StepProvenance(StrEnum):
    """How the attempt of a forward is known."""

    EXPLICIT = "explicit"
    INFERRED = "inferred"
    NONE = "none"


class GradSync(StrEnum):
    """Whether the gradients of a forward were, or will be, synchronised between ranks."""

    SYNCED = "synced"
    LOCAL = "local"
    REDUCED_ONLY = "reduced_only"
    MIXED = "mixed"
    PIPELINED = "pipelined"
    NOT_DISTRIBUTED = "not_distributed"
    UNKNOWN = "unknown"


class ScaleProvenance(StrEnum):
    """How the loss scale beside a number is known."""

    UNSCALED = "unscaled"
    GRADSCALER = "gradscaler"
    EXPLICIT = "explicit"
    NONE_SEEN = "none_seen"
    UNKNOWN = "unknown"


class SampleState(StrEnum):
    """How far a sample came."""

    FORWARD_COMPLETE = "forward_complete"
    BACKWARD_OBSERVED = "backward_observed"
    MISSED = "missed"
    FAILED = "failed"


class Outcome(StrEnum):
    """What became of an attempt at an optimizer step."""

    APPLIED = "applied"
    SKIPPED = "skipped"
    ABANDONED = "abandoned"
    UNKNOWN = "unknown"


class Evidence(StrEnum):
    """What an outcome rests on."""

    OPTIMIZER_HOOK = "optimizer_hook"
    FOUND_INF = "found_inf"
    SCALE_BACKOFF = "scale_backoff"
    EXPLICIT = "explicit"
    NONE = "none"


class Reason(StrEnum):
    """Why a value is missing. A detail may follow after a colon: ``reducer_error: ValueError: ...``."""

    EMPTY = "empty"
    NO_FINITE_ENTRIES = "no_finite_entries"
    OVERFLOW = "overflow"
    NONFINITE_RESULT = "nonfinite_result"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    UNSUPPORTED_LAYOUT = "unsupported_layout"
    META_TENSOR = "meta_tensor"
    PARTIAL_PLACEMENT = "partial_placement"
    ASYNC_COLLECTIVE = "async_collective"
    NO_GRADIENT = "no_gradient"
    NO_TENSOR_OUTPUT = "no_tensor_output"
    NO_TENSOR_INPUT = "no_tensor_input"
    REENTRANT_CHECKPOINT = "reentrant_checkpoint"
    INSIDE_COMPILED = "inside_compiled"
    INSIDE_FUSED = "inside_fused"
    SCRIPTED_MODULE = "scripted_module"
    UNREADABLE_OUTPUT = "unreadable_output"
    UNREADABLE_INPUT = "unreadable_input"
    UNINITIALISED = "uninitialised"
    NOT_SYNCHRONISED = "not_synchronised"
    SHARDED = "sharded"
    STEP_SKIPPED = "step_skipped"
    SEVERAL_EVALUATIONS = "several_evaluations"
    GRAPH_CAPTURE = "graph_capture"
    OVER_DEVICE_BUDGET = "over_device_budget"
    REDUCER_ERROR = "reducer_error"

    def with_detail(self, detail: str) -> str:
        """Returns the code with a detail behind it, on one line, storable, at most 200 characters long."""
        return storable(f"{self.value}: {' '.join(detail.split())}"[:200])

    def with_error(self, error: BaseException) -> str:
        """Returns the code with an exception behind it; it never raises."""
        return self.with_detail(f"{type(error).__name__}: {error_text(error)}")


@dataclass(frozen=True, slots=True)
class Absent:
    """A value that could not be had, instead of a scalar.

    Attributes:
        reason: A `Reason`, or one with a detail after a colon.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is among the ranks.

    Attributes:
        rank: Rank in the world, from 0.
        world_size: Ranks in the world.
        local_rank: Rank among those of this host.
        host: Host name.
        process: 8 hex digits made at attach. Ranks move between processes at a restart; this does not.
        launcher: Where rank and world size were read: ``process_group``, ``torchrun``, ``slurm`` or ``none``.
        local_world_size: Ranks on this host, where known.
        node_rank: Which host this is, where known.
        restart_count: Restarts that the launcher of this host counted, where it does.
        pid: The operating system's process id.
        device: Device that the model lies on, as torch writes it.
        mesh_coordinates: Coordinates in the device mesh, where there is one.
        mesh_axis_names: Names of the mesh axes, in the order of the coordinates.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    process: str
    launcher: str = "none"
    local_world_size: int | None = None
    node_rank: int | None = None
    restart_count: int | None = None
    pid: int = 0
    device: str = ""
    mesh_coordinates: tuple[int, ...] = ()
    mesh_axis_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """One rank as its generation's leader heard of it.

    Attributes:
        rank: Rank in this generation.
        process: 8 hex digits of the process that held it.
        host: Host name.
        local_rank: Rank among those of its host.
        observing: Whether the rank policy lets it observe.
    """

    rank: int
    process: str
    host: str
    local_rank: int
    observing: bool


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """``generations/NNN.json``: one (re)start of the process group.

    Attributes:
        schema_version: Version of everything persisted.
        run_id: The run that it belongs to.
        generation: Number from 0.
        world_size: Ranks of this generation.
        leader_process: Process that wrote it.
        started_at: ISO 8601, UTC.
        first_sample_id: Sample ids of this generation start here, on every rank.
        members: Those that said hello, by rank; a rank that is not here never called ``inject_observer``.
        members_complete: Whether all ranks had said hello when this was written.
    """

    schema_version: int
    run_id: str
    generation: int
    world_size: int
    leader_process: str
    started_at: str
    first_sample_id: int
    members: tuple[Member, ...] = ()
    members_complete: bool = False


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``run.json``: written once, by exclusive create.

    Attributes:
        schema_version: Version of everything persisted.
        run_id: Safe for a path.
        nonce: 32 hex digits of the writer, to know one's own claim again after a lost response.
        created_at: ISO 8601, UTC.
        versions: Package to version, of this package, Python, torch, pyarrow.
        sampling: ``{"type": ..., "settings": {...}}``.
        signals: What is measured.
        statistics: Metric names of the reducers, where known beforehand.
        history: Settings of the history, ``buffer_rows`` and ``window``.
        rank_policy: Name of the policy, or the ranks it lists, as text.
        world_size: Ranks of generation 0.
        launcher: As in `Identity`.
    """

    schema_version: int
    run_id: str
    nonce: str
    created_at: str
    versions: Mapping[str, str]
    sampling: Mapping[str, object]
    signals: tuple[str, ...]
    statistics: tuple[str, ...]
    history: Mapping[str, int]
    rank_policy: str
    world_size: int
    launcher: str


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """One selected layer, as the catalog ``modules-<process>.json`` lists it.

    Attributes:
        layer: Name in the model without wrapper segments; ``""`` is the root.
        type: Class name.
        aliases: Further names of the same module object.
        parameter_count: Entries of its own parameters, children left out.
        trainable_parameter_count: Those that require a gradient.
        execution_order: Position of its first call in the first sampled forward that reached it, else None.
        expected: Whether it was selected and can fire.
        fired: Sampled forwards in which it was called at least once.
    """

    layer: str
    type: str
    aliases: tuple[str, ...]
    parameter_count: int
    trainable_parameter_count: int
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
class Measurement:
    """All scalars of one tensor at one moment: some rows of ``history``.

    Attributes:
        layer: As in `ModuleRecord`.
        layer_index: Position in the catalog, the order of rows inside a part.
        call_index: Ordinal of the layer's call in this forward.
        signal: What was measured.
        stage: `Stage` of a parameter gradient, else ``""``.
        tensor_path: ``output``, ``output.logits``, ``grad_output.0``, ``input.mask``; of a parameter its own
            name in its module, ``weight``.
        backward_index: Which traversal of the graph; 0 for outputs and the first one.
        timestamp_us: When it was observed: microseconds since the epoch, UTC.
        mode: ``train`` or ``eval``, of the module.
        grad_enabled: Whether gradients were enabled at the call.
        scope: What the numbers cover.
        replica_key: Set where equality between ranks is provable.
        execution: How the program ran.
        shape: Local shape.
        dtype: ``float32``, without ``torch.``.
        device: ``cpu``, ``cuda:0``.
        metrics: Names, in the order of the reducers.
        values: Finite numbers; None where there is a reason.
        reasons: ``""`` beside a value, else a `Reason` with or without detail.
    """

    layer: str
    layer_index: int
    call_index: int
    signal: Signal
    stage: str
    tensor_path: str
    backward_index: int
    timestamp_us: int
    mode: str
    grad_enabled: bool
    scope: Scope
    replica_key: str
    execution: Execution
    shape: tuple[int, ...]
    dtype: str
    device: str
    metrics: tuple[str, ...]
    values: tuple[float | None, ...]
    reasons: tuple[str, ...]


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


@dataclass(frozen=True, slots=True)
class Sample:
    """What one sampled forward, or one backward of it, gave; resolved and handed to sinks.

    A sample reaches sinks once for its forward and once for each backward that was observed; and, where
    parameters' gradients are measured, once for each optimizer's step that found them.

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


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt and optimizer: a row of ``steps``.

    Attributes:
        attempt: Window, from 0.
        optimizer: Ordinal of the optimizer in the order of first sight; -1 where none stepped.
        optimizer_attempt: Ordinal of this try among those of this optimizer.
        first_forward_index: First root forward of the window.
        last_forward_index: Last root forward of the window, or the last one until it was told.
        micro_batches: Grad-enabled root forwards in it.
        micro_batches_synced: Those whose gradients were to be synchronised.
        last_micro_batch_sync: `GradSync` of the last one.
        outcome: What became of it.
        evidence: What that rests on.
        started_at_us: When its first forward began: microseconds since the epoch, UTC.
        gap_s: From the last attempt's end, its evaluation included, to this one's first forward.
        forward_s: Sum over its root forwards.
        backward_s: Sum over what lies between the end of a forward and the end of its backward.
        optimizer_s: Sum over its optimizer's steps.
        global_step: The caller's number, in boundary mode.
        micro_batches_declared: The caller's number, in boundary mode.
        found_inf: What the scaler found, where known.
        scale_before: Loss scale before the step, where known.
        scale_after: Loss scale after the step, where known.
        lr: Learning rate of the optimizer's first group.
        clock: ``host`` or ``device``.
    """

    attempt: int
    optimizer: int
    optimizer_attempt: int
    first_forward_index: int
    last_forward_index: int
    micro_batches: int
    micro_batches_synced: int
    last_micro_batch_sync: GradSync
    outcome: Outcome
    evidence: Evidence
    started_at_us: int
    gap_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    global_step: int | None = None
    micro_batches_declared: int | None = None
    found_inf: float | None = None
    scale_before: float | None = None
    scale_after: float | None = None
    lr: float | None = None
    clock: str = "host"


class Amendment(Protocol):
    """What a device knew of an attempt when its window closed, and the host did not yet."""

    def is_complete(self) -> bool:
        """Returns whether nothing more will be known of it on the host; does not raise (writer thread)."""
        ...

    def amend(self, record: AttemptRecord) -> AttemptRecord:
        """Waits for what it needs and returns the record with it (writer thread)."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedAttempt:
    """An attempt of a window that closed, parts of which may still be on their way from a device.

    Attributes:
        record: What the host knows.
        amendments: Applied to the record in this order.
    """

    record: AttemptRecord
    amendments: tuple[Amendment, ...] = ()

    def is_complete(self) -> bool:
        """Returns whether the host knows all of it, so that a later answer is the same (writer thread)."""
        # Each is asked, for one that is not complete keeps what is known so far.
        complete = [amendment.is_complete() for amendment in self.amendments]
        return all(complete)

    def resolve(self) -> AttemptRecord:
        """Returns the whole record (writer thread)."""
        record = self.record
        for amendment in self.amendments:
            record = amendment.amend(record)
        return record


@dataclass(frozen=True, slots=True)
class FingerprintRecord:
    """What the bytes of a parameter or buffer were when an attempt began: a row of ``fingerprints``.

    Attributes:
        attempt: Window, from 0.
        tensor: Name in the model, without the segments of wrappers.
        kind: ``parameter`` or ``buffer``.
        replica_key: Equal on the ranks that have to hold equal bytes in this attempt; ``""`` where that is
            not known.
        shape: Local shape.
        dtype: Without ``torch.``.
        digest: Of the local bytes, from 0 to 2^64 - 1.
    """

    attempt: int
    tensor: str
    kind: str
    replica_key: str
    shape: tuple[int, ...]
    dtype: str
    digest: int


class DeferredFingerprints(Protocol):
    """The fingerprints of one attempt, whose digests may still be on their way from a device."""

    @property
    def num_rows(self) -> int:
        """Rows that it holds, for the bound of the queue (training thread, hot path)."""
        ...

    def resolve(self) -> Sequence[FingerprintRecord]:
        """Waits for the copies and returns the rows, in the order of the model (writer thread)."""
        ...


@dataclass(frozen=True, slots=True)
class ChecksRecord:
    """What a session of checks has found so far: an entry of ``checks-<process>.json``.

    Attributes:
        session: Ordinal of the session among those of its observer.
        report: Its report as strict JSON; a later one of the same session replaces it.
    """

    session: int
    report: bytes


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One error of collection, as the manifest keeps the last hundred.

    Attributes:
        probe: ``sampler``, ``selector``, ``reducer``, ``forward``, ``gradient``, ``optimizer``,
            ``loss_scale``, ``step``, ``clock``, ``histogram``, ``fingerprint``, ``alignment``, ``tracing``,
            ``bypassed``, ``scripted_module``, ``compiled``, ``sink`` or ``storage``.
        module: Layer, where there is one.
        type: Class name of the exception.
        message: Its text, at most 500 characters.
        at: ISO 8601, UTC.
    """

    probe: str
    module: str
    type: str
    message: str
    at: str = field(default="")


@dataclass(frozen=True, slots=True)
class Counters:
    """What telemetry did and cost in one process so far; stands in its manifest too.

    Attributes:
        forwards: Root forwards seen.
        samples: Root forwards measured.
        missed: Samples that other ranks took and this one could not.
        rows: Rows of ``history`` that are durable.
        rows_dropped: Rows of ``history`` that were given up, with what they were dropped for in the errors.
        parts: Part files written, of all tables.
        bytes: Their size.
        collection_s: Seconds of the training thread.
        writer_s: Seconds of the writer thread's own work.
        errors: Errors by probe.
        histograms_missing: Histograms that were due and could not be had of their tensors, by reason; one
            that failed by itself is an error.
    """

    forwards: int = 0
    samples: int = 0
    missed: int = 0
    rows: int = 0
    rows_dropped: int = 0
    parts: int = 0
    bytes: int = 0
    collection_s: float = 0.0
    writer_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    histograms_missing: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """What the leader found when it claimed the run's folder; its echo is what every rank believes.

    Attributes:
        url: Folder of the run, without secrets. It may lie beside the one that was asked for.
        run_id: The run's id.
        generation: Number of this (re)start.
        first_sample_id: Sample ids of this generation start here.
        verified: Whether ``run.json`` and the generation were really claimed on the store. Where not, rows
            wait in the spool and the folder records ``unverified_claim``.
        notice: One sentence that every rank's user should read once, else ``""``: a folder that belongs to
            another run, a store that did not answer.
        failure: One sentence that must raise on all ranks alike, else ``""``.
        failure_kind: ``denied``, ``not_found``, ``configuration`` or ``""``; chooses the error class.
        alone: Whether the run began as a world of one, or with rank 0 alone, so that rank 0 uses the run's
            folder itself for ever.
    """

    url: str
    run_id: str
    generation: int
    first_sample_id: int
    verified: bool
    notice: str = ""
    failure: str = ""
    failure_kind: str = ""
    alone: bool = False


class Outbox(Protocol):
    """Where the training thread leaves what it observed. Every method returns at once and never raises.

    The queue behind it is bounded; what does not fit is dropped and counted.
    """

    def put_sample(self, sample: DeferredSample) -> None:
        """Takes one delivery of a sample (training thread, hot path)."""
        ...

    def put_attempts(self, attempts: Sequence[ClosedAttempt]) -> None:
        """Takes the attempts of a window that closed (training thread, hot path)."""
        ...

    def put_fingerprints(self, fingerprints: DeferredFingerprints) -> None:
        """Takes the fingerprints of an attempt (training thread, hot path)."""
        ...

    def put_modules(self, modules: tuple[ModuleRecord, ...]) -> None:
        """Takes the catalog, anew whenever it changed (training thread)."""
        ...

    def put_checks(self, checks: ChecksRecord) -> None:
        """Takes what a session of checks has found so far (training thread)."""
        ...

    def put_error(self, error: ErrorRecord) -> None:
        """Takes an error of collection (training thread)."""
        ...
