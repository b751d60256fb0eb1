"""What tests of the spool write and read: real small parts, and everything that lies in a run's folder."""

import io
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.records import Claim, Identity, RunRecord
from torchinstruments.store import layout, schema
from torchinstruments.store.filesystem import Storage
from torchinstruments.store.manifest import Manifest, TableState, decode_manifest, encode_document
from torchinstruments.store.parts import open_part_writer
from torchinstruments.store.spool import SpoolTarget

__all__ = [
    "make_claim",
    "make_identity",
    "make_manifest",
    "make_part",
    "make_run",
    "make_target",
    "sample_ids",
    "stored_manifest",
]

RUN_ID = "night-7"


def make_run(run_id: str = RUN_ID, *, nonce: str | None = None) -> RunRecord:
    """Returns the record of a run."""
    return RunRecord(
        schema_version=schema.SCHEMA_VERSION,
        run_id=run_id,
        nonce=nonce or uuid.uuid4().hex,
        created_at="2026-01-02T03:04:05+00:00",
        versions={"torchinstruments": "0"},
        sampling={},
        signals=("output",),
        statistics=("mean",),
        history={"buffer_rows": 8192, "window": 20},
        rank_policy="all",
        world_size=2,
        launcher="none",
    )


def make_identity(rank: int = 0, process: str = "1a2b3c4d") -> Identity:
    """Returns who a process is."""
    return Identity(rank=rank, world_size=2, local_rank=rank, host="here", process=process)


def make_claim(url: str, *, verified: bool = True, generation: int = 0) -> Claim:
    """Returns a claim of the folder at an address without secrets."""
    return Claim(url, RUN_ID, generation, generation * 10**9, verified)


def make_target(
    url: str,
    storage_options: Mapping[str, object] | None,
    root: Path,
    *,
    rank: int = 0,
    process: str = "1a2b3c4d",
    claim: Claim | None = None,
    max_bytes: int | None = None,
) -> SpoolTarget:
    """Returns the spool of one process."""
    return SpoolTarget(
        url,
        storage_options,
        identity=make_identity(rank, process),
        claim=make_claim(url) if claim is None else claim,
        run=make_run(),
        folder=layout.rank_folder(rank, alone=False),
        root=root,
        max_bytes=max_bytes,
        started_at="2026-01-02T03:04:05+00:00",
    )


def make_part(ids: Sequence[int], table: str = "samples", *, note: str = "") -> bytes:
    """Returns a part with one row a sample id; of ``history``, `note` is the layer."""
    table_schema = schema.TABLE_SCHEMAS[table]
    columns = []
    for field in table_schema:
        if field.name == "sample_id":
            columns.append(pa.array(ids, field.type))
        elif field.name == "layer":
            columns.append(pa.array([note] * len(ids), field.type))
        elif pa.types.is_string(field.type):
            columns.append(pa.array(["x"] * len(ids), field.type))
        elif pa.types.is_timestamp(field.type):
            columns.append(pa.array([0] * len(ids), pa.int64()).cast(field.type))
        else:
            columns.append(pa.array([0] * len(ids), pa.int64()).cast(field.type))
    sink = pa.BufferOutputStream()
    with open_part_writer(sink, table_schema) as writer:
        writer.write_table(pa.Table.from_arrays(columns, schema=table_schema))
        writer.add_key_value_metadata(
            schema.metadata(
                schema_version=schema.SCHEMA_VERSION,
                run_id=RUN_ID,
                generation=0,
                rank=0,
                process="1a2b3c4d",
                world_size=2,
            )
        )
    return sink.getvalue().to_pybytes()


def make_manifest(target: SpoolTarget, *, status: str, rank: int = 0, process: str = "1a2b3c4d") -> bytes:
    """Returns a manifest as its writer makes it, with the target's own state."""
    return encode_document(
        Manifest(
            schema_version=schema.SCHEMA_VERSION,
            run_id=RUN_ID,
            generation=0,
            rank=rank,
            world_size=2,
            process=process,
            host="here",
            pid=1,
            local_rank=rank,
            node_rank=None,
            launcher="none",
            restart_count=None,
            device="cpu",
            mesh_coordinates=(),
            mesh_axis_names=(),
            verified=True,
            first_sample_id=0,
            last_sample_id=None,
            last_sample_at="",
            started_at="2026-01-02T03:04:05+00:00",
            written_at="2026-01-02T03:04:05+00:00",
            status=status,
            next_write_due_s=300.0,
            tables={**{table: TableState() for table in layout.TABLES}, **target.state().tables},
        )
    )


def sample_ids(storage: Storage, table: str = "samples", folder: str = "rank-000") -> list[int]:
    """Returns the sample ids of a table in a rank's folder, part by part in the order of their numbers."""
    parts = []
    for entry in storage.list(f"{folder}/{table}.parts"):
        name = layout.parse_part(entry.path.rpartition("/")[2])
        assert name is not None
        parts.append((name.process, name.sequence, entry.path))
    found: list[int] = []
    for _, _, path in sorted(parts):
        found += pq.read_table(io.BytesIO(storage.read(path))).column("sample_id").to_pylist()
    return found


def stored_manifest(storage: Storage, folder: str = "rank-000", process: str = "1a2b3c4d") -> Manifest:
    """Returns the manifest that readers see."""
    return decode_manifest(storage.read(layout.manifest_file(folder, process)))
