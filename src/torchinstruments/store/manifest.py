"""The manifest of one process: constant size, rewritten at least every 5 minutes, which is its heartbeat."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from torchinstruments.records import Counters, ErrorRecord
from torchinstruments.store.texts import encode_json

__all__ = ["MAX_ERRORS", "Manifest", "TableState", "decode_manifest", "encode_document"]

MAX_ERRORS = 100
"""The last errors that a manifest keeps; all of them are counted by kind."""


@dataclass(frozen=True, slots=True)
class TableState:
    """How far one table of one process has come.

    Attributes:
        next_part: Number that the next part will have.
        missing: Numbers below it that were never written, the first hundred.
        rows: Rows in the parts where readers look.
        bytes: Size of those parts.
        rows_in_spool: Durable rows that still lie in the local spool of ``host``.
        rows_dropped: Rows that were given up.
    """

    next_part: int = 0
    missing: tuple[int, ...] = ()
    rows: int = 0
    bytes: int = 0
    rows_in_spool: int = 0
    rows_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``process-<process>.json``.

    Attributes:
        schema_version: Version of everything persisted.
        run_id: The run.
        generation: Generation that this process belongs to.
        rank: Rank of this process in it.
        world_size: Ranks of that generation.
        process: 8 hex digits.
        host: Host name; where the spool lies.
        pid: Process id on that host.
        local_rank: Rank among those of the host.
        node_rank: Which host, where known.
        launcher: Who gave rank and world size, as in `Identity`.
        restart_count: As the launcher of this host counted.
        device: Device of the model.
        mesh_coordinates: Coordinates in the device mesh.
        mesh_axis_names: Names of its axes.
        verified: False where the folder was never claimed together with the leader (``unverified_claim``).
        first_sample_id: First sample id of the generation.
        last_sample_id: Last one that is durable, or None.
        last_sample_at: When that one began, ISO 8601 UTC, or ``""``.
        started_at: When the process attached, ISO 8601 UTC.
        written_at: When this document was made, ISO 8601 UTC, by this host's clock.
        status: ``running`` or ``closed``. A reader judges ``interrupted`` from the store's own times.
        next_write_due_s: Seconds after this one by which the next write of this document is due.
        tables: State per table.
        spool_path: Folder of the spool on ``host``, where there is one.
        counters: What telemetry did and cost.
        errors: The last `MAX_ERRORS` errors.
    """

    schema_version: int
    run_id: str
    generation: int
    rank: int
    world_size: int
    process: str
    host: str
    pid: int
    local_rank: int
    node_rank: int | None
    launcher: str
    restart_count: int | None
    device: str
    mesh_coordinates: tuple[int, ...]
    mesh_axis_names: tuple[str, ...]
    verified: bool
    first_sample_id: int
    last_sample_id: int | None
    last_sample_at: str
    started_at: str
    written_at: str
    status: str
    next_write_due_s: float
    tables: Mapping[str, TableState]
    spool_path: str = ""
    counters: Counters = field(default_factory=Counters)
    errors: tuple[ErrorRecord, ...] = ()


def encode_document(document: object) -> bytes:
    """Returns a persisted document as strict JSON, two spaces deep, with a final newline."""
    return msgspec.json.format(encode_json(document), indent=2) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Returns the manifest that lies in some bytes; unknown fields are ignored.

    Raises:
        msgspec.DecodeError: The bytes are no JSON, or no manifest.
    """
    return msgspec.json.decode(data, type=Manifest)
