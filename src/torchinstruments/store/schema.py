"""The four tables, their columns and their inner order; nothing else defines a column.

Every table begins with generation, rank and process, so that rows of all ranks can lie in one frame.
"""

from collections.abc import Mapping

import pyarrow as pa

__all__ = [
    "AS_STRUCT",
    "FINGERPRINTS",
    "HISTORY",
    "INNER_ORDER",
    "IN_MEMORY",
    "KEY_COLUMNS",
    "MAX_ROW_GROUP_ROWS",
    "METADATA_KEYS",
    "SAMPLES",
    "SCHEMA_VERSION",
    "STEPS",
    "TABLE_SCHEMAS",
    "in_memory",
    "metadata",
    "parse_metadata",
]

SCHEMA_VERSION = 1
"""Version of the tables and of every persisted document. A reader refuses one that it does not know."""

MAX_ROW_GROUP_ROWS = 36_000
"""A row group ends at a sample's end, with at most this many rows: the unit of memory of the merge."""

_TIMESTAMP = pa.timestamp("us", tz="UTC")


def _schema(*columns: tuple[str, pa.DataType, bool]) -> pa.Schema:
    common = (
        ("generation", pa.int32(), False),
        ("rank", pa.int32(), False),
        ("process", pa.string(), False),
    )
    return pa.schema([pa.field(name, kind, nullable) for name, kind, nullable in (*common, *columns)])


HISTORY = _schema(
    ("sample_id", pa.int64(), False),
    ("attempt", pa.int64(), True),
    ("forward_in_attempt", pa.int32(), False),
    ("micro_batch", pa.int32(), True),
    ("step_provenance", pa.string(), False),
    ("forward_index", pa.int64(), False),
    ("timestamp", _TIMESTAMP, False),
    ("layer", pa.string(), False),
    ("call_index", pa.int32(), False),
    ("signal", pa.string(), False),
    ("stage", pa.string(), False),
    ("tensor_path", pa.string(), False),
    ("backward_index", pa.int32(), False),
    ("mode", pa.string(), False),
    ("grad_enabled", pa.bool_(), False),
    ("grad_sync", pa.string(), False),
    ("loss_scale", pa.float64(), True),
    ("scale_provenance", pa.string(), False),
    ("scope", pa.string(), False),
    ("replica_key", pa.string(), False),
    ("execution", pa.string(), False),
    ("shape", pa.string(), False),
    ("dtype", pa.string(), False),
    ("device", pa.string(), False),
    ("metric", pa.string(), False),
    ("value", pa.float64(), True),
    ("unavailable_reason", pa.string(), False),
)
"""One row a scalar. ``shape`` is text, ``8x1024``; ``value`` is null exactly where a reason stands."""

SAMPLES = _schema(
    ("sample_id", pa.int64(), False),
    ("attempt", pa.int64(), True),
    ("forward_in_attempt", pa.int32(), False),
    ("micro_batch", pa.int32(), True),
    ("forward_index", pa.int64(), False),
    ("started_at", _TIMESTAMP, False),
    ("state", pa.string(), False),
    ("num_backwards", pa.int32(), False),
    ("collection_forward_s", pa.float64(), False),
    ("collection_backward_s", pa.float64(), False),
    ("rows", pa.int64(), False),
    ("errors", pa.int32(), False),
    ("modules_expected", pa.int32(), False),
    ("modules_fired", pa.int32(), False),
)
"""One row a sample."""

STEPS = _schema(
    ("attempt", pa.int64(), False),
    ("optimizer", pa.int32(), False),
    ("optimizer_attempt", pa.int64(), False),
    ("global_step", pa.int64(), True),
    ("first_forward_index", pa.int64(), False),
    ("last_forward_index", pa.int64(), False),
    ("micro_batches", pa.int32(), False),
    ("micro_batches_declared", pa.int32(), True),
    ("micro_batches_synced", pa.int32(), False),
    ("last_micro_batch_sync", pa.string(), False),
    ("outcome", pa.string(), False),
    ("evidence", pa.string(), False),
    ("found_inf", pa.float64(), True),
    ("scale_before", pa.float64(), True),
    ("scale_after", pa.float64(), True),
    ("lr", pa.float64(), True),
    ("started_at", _TIMESTAMP, False),
    ("gap_s", pa.float64(), True),
    ("forward_s", pa.float64(), False),
    ("backward_s", pa.float64(), False),
    ("optimizer_s", pa.float64(), False),
    ("clock", pa.string(), False),
)
"""One row an attempt and optimizer."""

FINGERPRINTS = _schema(
    ("attempt", pa.int64(), False),
    ("tensor", pa.string(), False),
    ("kind", pa.string(), False),
    ("replica_key", pa.string(), False),
    ("shape", pa.string(), False),
    ("dtype", pa.string(), False),
    ("digest", pa.uint64(), False),
)
"""One row a parameter or buffer on sampled attempts."""

TABLE_SCHEMAS: Mapping[str, pa.Schema] = {
    "history": HISTORY,
    "samples": SAMPLES,
    "steps": STEPS,
    "fingerprints": FINGERPRINTS,
}

KEY_COLUMNS = ("layer", "call_index", "signal", "stage", "tensor_path", "metric")
"""What makes a series of ``history``."""

INNER_ORDER: Mapping[str, tuple[str, ...]] = {
    "history": (
        "sample_id",
        "layer",
        "call_index",
        "signal",
        "stage",
        "tensor_path",
        "backward_index",
        "metric",
    ),
    "samples": ("sample_id",),
    "steps": ("attempt", "optimizer", "optimizer_attempt"),
    "fingerprints": ("attempt",),
}
"""By which columns the rows of a part are ordered: layers as in the catalog, other texts by code points.

A row group ends where the first of these columns changes.
"""

METADATA_KEYS = ("schema_version", "run_id", "generation", "rank", "process", "world_size")
"""Names in the key-value metadata of every part, each behind the prefix ``torchinstruments.``."""

_PREFIX = "torchinstruments."


def in_memory(declared: pa.Schema) -> pa.Schema:
    """Returns a declared schema with text as dictionaries, so that nothing need look at a text a row."""
    return pa.schema(
        field.with_type(pa.dictionary(pa.int32(), pa.string())) if pa.types.is_string(field.type) else field
        for field in declared
    )


def metadata(**values: object) -> dict[bytes, bytes]:
    """Returns key-value metadata for a part; takes exactly the names of `METADATA_KEYS`."""
    if set(values) != set(METADATA_KEYS):
        raise TypeError(f"metadata takes {METADATA_KEYS}, not {tuple(values)}")
    return {f"{_PREFIX}{name}".encode(): str(values[name]).encode() for name in METADATA_KEYS}


def parse_metadata(raw: Mapping[bytes, bytes] | None) -> dict[str, str]:
    """Returns the package's own entries of a file's key-value metadata, without their prefix."""
    found: dict[str, str] = {}
    for key, value in (raw or {}).items():
        name = key.decode("utf-8", "replace")
        if name.startswith(_PREFIX):
            found[name.removeprefix(_PREFIX)] = value.decode("utf-8", "replace")
    return found


IN_MEMORY: Mapping[str, pa.Schema] = {name: in_memory(declared) for name, declared in TABLE_SCHEMAS.items()}
"""`in_memory` of each table."""

AS_STRUCT: Mapping[str, pa.StructType] = {name: pa.struct(list(one)) for name, one in IN_MEMORY.items()}
"""The same as the type of one value a row."""
