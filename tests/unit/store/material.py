"""Samples, attempts, identities and targets that the tests of the store and of the sinks are made of."""

import errno
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq

from torchinstruments.records import (
    AttemptRecord,
    Claim,
    Evidence,
    Execution,
    FingerprintRecord,
    GenerationRecord,
    GradSync,
    Identity,
    KeptFrames,
    Measurement,
    Member,
    ModuleRecord,
    Outcome,
    Position,
    RunRecord,
    Sample,
    SampleState,
    ScaleProvenance,
    Scope,
    Signal,
    StepProvenance,
    as_columns,
)
from torchinstruments.store.columns import Columns, SampleRow
from torchinstruments.store.manifest import TableState
from torchinstruments.store.parts import encode_columns
from torchinstruments.store.target import TargetState

START_US = 1_700_000_000_000_000
METRICS = ("zero_fraction", "mean", "std")


def measurement(
    layer: int = 0,
    signal: Signal = Signal.OUTPUT,
    *,
    call_index: int = 0,
    backward_index: int = 0,
    timestamp_us: int = START_US,
    metrics: Sequence[str] = METRICS,
    values: Sequence[float | None] = (0.0, 1.5, -2.25),
    reasons: Sequence[str] | None = None,
    tensor_path: str | None = None,
    shape: tuple[int, ...] = (8, 1024),
    stage: str = "",
) -> Measurement:
    """Returns one tensor's scalars; layer names sort against the catalog's order."""
    default_path = "output" if signal is Signal.OUTPUT else "grad_output"
    return Measurement(
        layer=f"layer{99 - layer:02d}",
        layer_index=layer,
        call_index=call_index,
        signal=signal,
        stage=stage,
        tensor_path=default_path if tensor_path is None else tensor_path,
        backward_index=backward_index,
        timestamp_us=timestamp_us,
        mode="train",
        grad_enabled=True,
        scope=Scope.LOCAL,
        replica_key="",
        execution=Execution.EAGER,
        shape=shape,
        dtype="float32",
        device="cpu",
        metrics=tuple(metrics),
        values=tuple(values),
        reasons=("",) * len(metrics) if reasons is None else tuple(reasons),
    )


def position(index: int = 0, *, attempt: int | None = 0, micro_batch: int | None = 0) -> Position:
    """Returns where a forward stands."""
    return Position(
        attempt=attempt,
        forward_in_attempt=0,
        micro_batch=micro_batch,
        forward_index=index,
        grad_enabled=micro_batch is not None,
        step_provenance=StepProvenance.INFERRED,
    )


def forward(
    ordinal: int, *measurements: Measurement, settled: bool = False, attempt: int | None = 0
) -> Sample:
    """Returns a forward's delivery of a sample."""
    return Sample(
        ordinal=ordinal,
        position=position(10 * ordinal, attempt=attempt, micro_batch=None if attempt is None else 0),
        started_at_us=START_US + ordinal,
        state=SampleState.FORWARD_COMPLETE,
        backward_index=None,
        grad_sync=GradSync.SYNCED,
        loss_scale=None,
        scale_provenance=ScaleProvenance.NONE_SEEN,
        collection_s=0.25,
        errors=1,
        modules_expected=4,
        modules_fired=3,
        settled=settled,
        measurements=measurements,
    )


def at_step(ordinal: int, *measurements: Measurement, loss_scale: float | None = 1.0) -> Sample:
    """Returns the delivery of an optimizer's step, after the backward."""
    return replace(backward(ordinal, *measurements), backward_index=None, at_step=True, loss_scale=loss_scale)


def backward(ordinal: int, *measurements: Measurement, index: int = 0, settled: bool = True) -> Sample:
    """Returns a backward's delivery of a sample."""
    return Sample(
        ordinal=ordinal,
        position=position(10 * ordinal),
        started_at_us=START_US + ordinal,
        state=SampleState.BACKWARD_OBSERVED,
        backward_index=index,
        grad_sync=GradSync.SYNCED,
        loss_scale=1024.0,
        scale_provenance=ScaleProvenance.GRADSCALER,
        collection_s=0.5,
        errors=0,
        modules_expected=4,
        modules_fired=3,
        settled=settled,
        measurements=measurements,
    )


def with_columns(sample: Sample, frames: KeptFrames) -> Sample:
    """Returns the same delivery with its measurements as columns."""
    again = replace(sample)
    again.take_columns(as_columns(sample.measurements, frames))
    return again


def sample_row(sample_id: int, *, rows: int = 18) -> SampleRow:
    """Returns a row of ``samples``."""
    delivery = forward(sample_id)
    return SampleRow(
        sample_id=sample_id,
        position=delivery.position,
        started_at_us=START_US,
        state=SampleState.BACKWARD_OBSERVED,
        num_backwards=2,
        collection_forward_s=0.25,
        collection_backward_s=0.5,
        rows=rows,
        errors=1,
        modules_expected=4,
        modules_fired=3,
    )


def attempt(number: int, optimizer: int = 0, *, lr: float | None = 0.1) -> AttemptRecord:
    """Returns an attempt that was applied."""
    return AttemptRecord(
        attempt=number,
        optimizer=optimizer,
        optimizer_attempt=number,
        first_forward_index=2 * number,
        last_forward_index=2 * number + 1,
        micro_batches=2,
        micro_batches_synced=1,
        last_micro_batch_sync=GradSync.SYNCED,
        outcome=Outcome.APPLIED,
        evidence=Evidence.OPTIMIZER_HOOK,
        started_at_us=START_US + number,
        gap_s=0.125,
        forward_s=0.25,
        backward_s=0.5,
        optimizer_s=0.0625,
        lr=lr,
    )


def fingerprint(number: int, tensor: str = "0.weight", digest: int = 2**64 - 1) -> FingerprintRecord:
    """Returns the fingerprint of a parameter in an attempt."""
    return FingerprintRecord(number, tensor, "parameter", "ddp ranks=0-2", (4, 2), "float32", digest)


def identity(rank: int = 0, process: str = "1a2b3c4d", world_size: int = 2) -> Identity:
    """Returns who a process is."""
    return Identity(rank, world_size, rank, "node-a", process, launcher="torchrun", pid=4711)


def claim(generation: int = 0, run_id: str = "run-1") -> Claim:
    """Returns what the ranks agreed on."""
    return Claim("/runs/run-1", run_id, generation, generation * 1_000_000_000, verified=True)


def module(layer: int, *, fired: int = 0) -> ModuleRecord:
    """Returns one layer of the catalog."""
    return ModuleRecord(f"layer{99 - layer:02d}", "Linear", (), 12, 12, layer, fired=fired)


def run_record(run_id: str = "run-1", *, schema_version: int = 1, world_size: int = 2) -> RunRecord:
    """Returns what ``run.json`` says."""
    return RunRecord(
        schema_version=schema_version,
        run_id=run_id,
        nonce="0" * 32,
        created_at="2026-01-01T00:00:00+00:00",
        versions={"torchinstruments": "0"},
        sampling={"type": "AlwaysSampler", "settings": {}},
        signals=("output", "output_gradient"),
        statistics=METRICS,
        history={"buffer_rows": 8192, "window": 20},
        rank_policy="all",
        world_size=world_size,
        launcher="torchrun",
    )


def generation_record(number: int = 0, run_id: str = "run-1", *, world_size: int = 2) -> GenerationRecord:
    """Returns what ``generations/NNN.json`` says."""
    members = tuple(Member(rank, f"{rank:08x}", "node-a", rank, observing=True) for rank in range(world_size))
    return GenerationRecord(
        1, run_id, number, world_size, "00000000", "2026-01-01T00:00:00+00:00", number * 10**9, members, True
    )


class HandClock:
    """A clock that stands still until it is moved, or somebody sleeps by it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.on_sleep: Callable[[], None] | None = None

    def monotonic_s(self) -> float:
        """Returns the time that was set."""
        return self.now_s

    def sleep_ten_seconds(self) -> None:
        """Moves it."""
        self.now_s += 10.0

    def wall_us(self) -> int:
        """Returns the time that was set, as a date."""
        return START_US + int(self.now_s * 1e6)

    def sleep(self, seconds: float) -> None:
        """Moves on at once."""
        self.now_s += seconds
        if self.on_sleep is not None:
            self.on_sleep()


class MemoryTarget:
    """A target that keeps parts in memory, and is full when it is told to be."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int, bytes]] = []
        self.documents: list[tuple[str, bytes]] = []
        self.is_full = False
        self.refusal: Exception | None = None
        self.refused_tables: set[str] = set()
        self.max_part_bytes = 2**62
        self.kept_alive = 0
        self.finished_within: list[float] = []
        self.trouble = ""
        self.on_part: Callable[[], None] | None = None

    @property
    def direct(self) -> bool:
        """False, so that it is kept alive and finished."""
        return False

    def write_part(self, table: str, num_rows: int, data: bytes) -> None:
        """Keeps a part."""
        self._require_room()
        if table in self.refused_tables or len(data) > self.max_part_bytes:
            raise OSError(errno.EFBIG, "File too large")
        self.parts.append((table, num_rows, data))
        if self.on_part is not None:
            self.on_part()

    def write_document(self, name: str, data: bytes) -> None:
        """Keeps a document and those before it."""
        self._require_room()
        self.documents.append((name, data))

    def state(self) -> TargetState:
        """Says that everything still lies in the spool."""
        tables: dict[str, TableState] = {}
        for table, num_rows, _ in self.parts:
            before = tables.get(table, TableState())
            tables[table] = TableState(before.next_part + 1, rows_in_spool=before.rows_in_spool + num_rows)
        return TargetState(tables, self.trouble)

    def require_in_place(self) -> None:
        """Nothing was removed."""

    def keep_alive(self) -> None:
        """Counts."""
        self.kept_alive += 1

    def finish(self, timeout_s: float) -> bool:
        """Says yes."""
        self.finished_within.append(timeout_s)
        return True

    def of(self, table: str) -> list[bytes]:
        """Returns the parts of a table, in order."""
        return [data for name, _, data in self.parts if name == table]

    def last(self, prefix: str) -> bytes:
        """Returns the newest document whose name begins so."""
        return [data for name, data in self.documents if name.startswith(prefix)][-1]

    def _require_room(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """Returns the rows of columns as a reader of their file gets them."""
    return pq.read_table(io.BytesIO(encode_columns(columns, {}))).to_pylist()
