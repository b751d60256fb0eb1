"""Writes a run's folder file by file, from `schema` alone, for tests of what reads one."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.records import Counters, GenerationRecord, Member, ModuleRecord, RunRecord
from torchinstruments.store import layout, schema
from torchinstruments.store.catalog import ModuleCatalog
from torchinstruments.store.checks import ChecksDocument
from torchinstruments.store.manifest import Manifest, TableState, encode_document

START = datetime(2026, 1, 1, tzinfo=UTC)

HISTORY_DEFAULTS: Mapping[str, object] = {
    "attempt": 0,
    "forward_in_attempt": 0,
    "micro_batch": 0,
    "step_provenance": "inferred",
    "forward_index": 0,
    "layer": "fc",
    "call_index": 0,
    "signal": "output",
    "stage": "",
    "tensor_path": "output",
    "backward_index": 0,
    "mode": "train",
    "grad_enabled": True,
    "grad_sync": "synced",
    "loss_scale": None,
    "scale_provenance": "none_seen",
    "scope": "local",
    "replica_key": "",
    "execution": "eager",
    "shape": "8x4",
    "dtype": "float32",
    "device": "cpu",
    "metric": "mean",
    "value": None,
    "unavailable_reason": "",
}
_SAMPLE_DEFAULTS: Mapping[str, object] = {
    "forward_in_attempt": 0,
    "micro_batch": 0,
    "state": "backward_observed",
    "num_backwards": 1,
    "collection_forward_s": 0.0,
    "collection_backward_s": 0.0,
    "rows": 1,
    "errors": 0,
    "modules_expected": 1,
    "modules_fired": 1,
}
_STEP_DEFAULTS: Mapping[str, object] = {
    "optimizer": 0,
    "global_step": None,
    "micro_batches": 1,
    "micro_batches_declared": None,
    "micro_batches_synced": 1,
    "last_micro_batch_sync": "synced",
    "outcome": "applied",
    "evidence": "optimizer_hook",
    "found_inf": None,
    "scale_before": None,
    "scale_after": None,
    "lr": 0.1,
    "gap_s": 0.01,
    "forward_s": 0.02,
    "backward_s": 0.03,
    "optimizer_s": 0.005,
    "clock": "host",
}
_FINGERPRINT_DEFAULTS: Mapping[str, object] = {
    "tensor": "fc.weight",
    "kind": "parameter",
    "replica_key": "ddp ranks=0-4",
    "shape": "4x8",
    "dtype": "float32",
    "digest": 7,
}


def moment(sample_id: int) -> datetime:
    """When a sample began, in these tests: one a second."""
    return START + timedelta(seconds=sample_id % 1_000_000_000)


@dataclass(frozen=True)
class RunFolder:
    """A run below a folder."""

    root: Path
    world_size: int = 1
    window: int = 3
    run_id: str = "run-a"
    rank_policy: str = "all"
    schema_version: int = schema.SCHEMA_VERSION

    @property
    def url(self) -> str:
        """The folder as a user gives it."""
        return str(self.root)

    def write(self, path: str, data: bytes) -> Path:
        """Writes any file below the folder."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        return target

    def run(self) -> "RunFolder":
        """Writes ``run.json``."""
        record = RunRecord(
            schema_version=self.schema_version,
            run_id=self.run_id,
            nonce="0" * 32,
            created_at=START.isoformat(),
            versions={"torchinstruments": "0"},
            sampling={"type": "always", "settings": {}},
            signals=("output", "output_gradient"),
            statistics=("mean", "std"),
            history={"buffer_rows": 8192, "window": self.window},
            rank_policy=self.rank_policy,
            world_size=self.world_size,
            launcher="torchrun",
        )
        self.write(layout.RUN_FILE, encode_document(record))
        return self

    def generation(
        self,
        number: int = 0,
        members: Sequence[Member] = (),
        *,
        complete: bool = True,
        world_size: int | None = None,
    ) -> None:
        """Writes the record of a generation."""
        record = GenerationRecord(
            schema_version=schema.SCHEMA_VERSION,
            run_id=self.run_id,
            generation=number,
            world_size=self.world_size if world_size is None else world_size,
            leader_process="0" * 8,
            started_at=START.isoformat(),
            first_sample_id=number * 1_000_000_000,
            members=tuple(members),
            members_complete=complete,
        )
        self.write(layout.generation_file(number), encode_document(record))

    def manifest(self, rank: int, process: str = "0000000a", **changes: object) -> Path:
        """Writes a manifest; `changes` replace fields of it."""
        manifest = Manifest(
            schema_version=schema.SCHEMA_VERSION,
            run_id=self.run_id,
            generation=0,
            rank=rank,
            world_size=self.world_size,
            process=process,
            host="host-a",
            pid=1,
            local_rank=rank,
            node_rank=0,
            launcher="torchrun",
            restart_count=0,
            device="cpu",
            mesh_coordinates=(),
            mesh_axis_names=(),
            verified=True,
            first_sample_id=0,
            last_sample_id=None,
            last_sample_at="",
            started_at=START.isoformat(),
            written_at=(START + timedelta(hours=1)).isoformat(),
            status="closed",
            next_write_due_s=300.0,
            tables={},
            counters=Counters(errors={}),
        )
        manifest = dataclasses.replace(manifest, **changes)  # type: ignore[arg-type]
        path = layout.manifest_file(self.folder(rank), process)
        return self.write(path, encode_document(manifest))

    def catalog(self, rank: int, modules: Sequence[ModuleRecord], process: str = "0000000a") -> None:
        """Writes a module catalog."""
        catalog = ModuleCatalog(
            schema_version=schema.SCHEMA_VERSION,
            run_id=self.run_id,
            generation=0,
            rank=rank,
            process=process,
            modules=tuple(modules),
        )
        self.write(layout.modules_file(self.folder(rank), process), encode_document(catalog))

    def checks(
        self,
        rank: int,
        sessions: Sequence[Mapping[str, object]],
        process: str = "0000000a",
        generation: int = 0,
    ) -> None:
        """Writes what training checks found, an entry a session."""
        document = ChecksDocument(
            schema_version=schema.SCHEMA_VERSION,
            run_id=self.run_id,
            generation=generation,
            rank=rank,
            process=process,
            sessions=tuple([msgspec.Raw(msgspec.json.encode(one)) for one in sessions]),
        )
        self.write(layout.checks_file(self.folder(rank), process), encode_document(document))

    def history(
        self,
        rank: int,
        rows: Sequence[Mapping[str, object]],
        process: str = "0000000a",
        sequence: int = 0,
        **changes: object,
    ) -> Path:
        """Writes a part of ``history``; `changes` replace entries of its metadata."""
        filled = [
            {"timestamp": moment(int(str(row["sample_id"])))} | dict(HISTORY_DEFAULTS) | dict(row)
            for row in rows
        ]
        return self.part("history", rank, filled, process, sequence, **changes)

    def samples(
        self,
        rank: int,
        rows: Sequence[Mapping[str, object]],
        process: str = "0000000a",
        sequence: int = 0,
        **changes: object,
    ) -> Path:
        """Writes a part of ``samples``; attempt and forward index are the sample id unless given."""
        filled = []
        for row in rows:
            sample_id = int(str(row["sample_id"]))
            own = {"started_at": moment(sample_id), "attempt": sample_id, "forward_index": sample_id}
            filled.append(own | dict(_SAMPLE_DEFAULTS) | dict(row))
        return self.part("samples", rank, filled, process, sequence, **changes)

    def steps(
        self,
        rank: int,
        rows: Sequence[Mapping[str, object]],
        process: str = "0000000a",
        sequence: int = 0,
        **changes: object,
    ) -> Path:
        """Writes a part of ``steps``; what is counted is the attempt unless given."""
        filled = []
        for row in rows:
            attempt = int(str(row["attempt"]))
            own: dict[str, object] = {"started_at": moment(attempt), "optimizer_attempt": attempt}
            own |= {"first_forward_index": attempt, "last_forward_index": attempt}
            filled.append(own | dict(_STEP_DEFAULTS) | dict(row))
        return self.part("steps", rank, filled, process, sequence, **changes)

    def fingerprints(
        self,
        rank: int,
        rows: Sequence[Mapping[str, object]],
        process: str = "0000000a",
        sequence: int = 0,
        **changes: object,
    ) -> Path:
        """Writes a part of ``fingerprints``."""
        filled = [dict(_FINGERPRINT_DEFAULTS) | dict(row) for row in rows]
        return self.part("fingerprints", rank, filled, process, sequence, **changes)

    def part(
        self,
        table: str,
        rank: int,
        rows: Sequence[Mapping[str, object]],
        process: str = "0000000a",
        sequence: int = 0,
        **changes: object,
    ) -> Path:
        """Writes a part of any table."""
        own = {"generation": changes.get("generation", 0), "rank": rank, "process": process}
        complete = [own | dict(row) for row in rows]
        columns = schema.TABLE_SCHEMAS[table]
        entries = {
            "schema_version": schema.SCHEMA_VERSION,
            "run_id": self.run_id,
            "world_size": self.world_size,
            **own,
            **changes,
        }
        target = self.root / layout.part_file(self.folder(rank), table, process, sequence)
        target.parent.mkdir(parents=True, exist_ok=True)
        arrow = pa.Table.from_pylist(complete, schema=columns)
        with pq.ParquetWriter(
            target, columns, store_schema=False, compression="zstd", write_page_checksum=True
        ) as writer:
            writer.write_table(arrow, row_group_size=30_000)
            writer.add_key_value_metadata(schema.metadata(**entries))
        return target

    def folder(self, rank: int) -> str:
        """Name of a rank's folder."""
        return layout.rank_folder(rank, alone=self.world_size == 1)


def whole_run(root: Path, world_size: int = 2, num_samples: int = 4, **settings: object) -> RunFolder:
    """Writes a run in which nothing is missing: ``value = 10 * rank + sample``."""
    run = RunFolder(root, world_size=world_size, **settings).run()  # type: ignore[arg-type]
    members = [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(world_size)]
    run.generation(0, members)
    for rank in range(world_size):
        whole_rank(run, rank, num_samples)
    return run


def whole_rank(run: RunFolder, rank: int, num_samples: int = 4) -> None:
    """Writes everything of one rank."""
    process = process_of(rank)
    states = {name: TableState(next_part=1, rows=num_samples) for name in ("history", "samples")}
    run.manifest(rank, process, tables=states, last_sample_id=num_samples - 1)
    run.catalog(
        rank, [ModuleRecord("fc", "Linear", (), 10, 10, 0, expected=True, fired=num_samples)], process
    )
    run.history(
        rank, [{"sample_id": one, "value": float(10 * rank + one)} for one in range(num_samples)], process
    )
    run.samples(rank, [{"sample_id": one} for one in range(num_samples)], process)


def counted(run: RunFolder, rank: int, *, history_parts: int = 2, history_rows: int = 4) -> None:
    """Rewrites the manifest of a rank of `whole_run` for what a test added to its history."""
    tables = {
        "history": TableState(next_part=history_parts, rows=history_rows),
        "samples": TableState(next_part=1, rows=4),
    }
    run.manifest(rank, process_of(rank), tables=tables, last_sample_id=3)


def process_of(rank: int) -> str:
    """The process that holds a rank in `whole_run`."""
    return f"{rank + 10:08x}"
