"""From samples and attempts to Arrow columns, in the order in which a part holds them.

Columns are built at once, never row by row; those of ``history``, which has most rows, in `history_columns`.
Text columns are dictionaries in memory, so that the encoder need not hash a text a row; a file that is
written from them with ``store_schema=False`` reads back as plain text, exactly as `schema` declares.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.ma
import numpy.typing as npt
import pyarrow as pa

# pyarrow imports both at the first column that it builds, in the writer thread and perhaps at the exit. There
# their generated code would make Python forget that an interrupt is what ends the process.
import pyarrow.compute

from torchinstruments.records import (
    AttemptRecord,
    FingerprintRecord,
    Position,
    SampleState,
)
from torchinstruments.store import schema
from torchinstruments.store.texts import encodable_texts

__all__ = [
    "Columns",
    "Origin",
    "SampleRow",
    "dictionary",
    "fingerprints_columns",
    "integers",
    "origin_columns",
    "samples_columns",
    "split_into_groups",
    "steps_columns",
    "text_column",
]

_Integers = npt.NDArray[np.int64]
_Codes = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Origin:
    """Who the rows of a process are of; the same in all of them.

    Attributes:
        generation: Number of the generation.
        rank: Rank in it.
        process: 8 hex digits.
    """

    generation: int
    rank: int
    process: str


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of ``samples``.

    Attributes:
        sample_id: As stored: the generation's first id and the ordinal in the process.
        position: Where its forward stands.
        started_at_us: When its forward began: microseconds since the epoch, UTC.
        state: How far it has come.
        num_backwards: Traversals of its graph that were observed.
        collection_forward_s: Seconds of the training thread for its forward.
        collection_backward_s: Seconds of the training thread for its backwards, and for what steps found.
        rows: Rows of ``history`` that it gave.
        errors: Errors while it was collected.
        modules_expected: Selected modules.
        modules_fired: Those that were called.
    """

    sample_id: int
    position: Position
    started_at_us: int
    state: SampleState
    num_backwards: int
    collection_forward_s: float
    collection_backward_s: float
    rows: int
    errors: int
    modules_expected: int
    modules_fired: int


@dataclass(frozen=True, slots=True)
class Columns:
    """A table in the inner order of a part, and where its row groups end.

    Attributes:
        table: The rows; text columns are dictionaries.
        group_rows: Rows of each row group, in order.
    """

    table: pa.Table
    group_rows: tuple[int, ...]


def samples_columns(rows: Sequence[SampleRow], origin: Origin) -> Columns:
    """Returns rows of ``samples`` by sample id (writer thread)."""
    ordered = sorted(rows, key=attrgetter("sample_id"))
    everyone = np.arange(len(ordered))
    positions = [row.position for row in ordered]
    table = pa.Table.from_arrays(
        [
            *origin_columns(origin, len(ordered)),
            pa.array([row.sample_id for row in ordered], pa.int64()),
            pa.array([position.attempt for position in positions], pa.int64()),
            pa.array([position.forward_in_attempt for position in positions], pa.int32()),
            pa.array([position.micro_batch for position in positions], pa.int32()),
            pa.array([position.forward_index for position in positions], pa.int64()),
            _stamps([row.started_at_us for row in ordered]),
            text_column([row.state for row in ordered], everyone),
            pa.array([row.num_backwards for row in ordered], pa.int32()),
            pa.array([row.collection_forward_s for row in ordered], pa.float64()),
            pa.array([row.collection_backward_s for row in ordered], pa.float64()),
            pa.array([row.rows for row in ordered], pa.int64()),
            pa.array([row.errors for row in ordered], pa.int32()),
            pa.array([row.modules_expected for row in ordered], pa.int32()),
            pa.array([row.modules_fired for row in ordered], pa.int32()),
        ],
        schema=schema.in_memory(schema.SAMPLES),
    )
    return Columns(table, _even_groups(len(ordered)))


def steps_columns(records: Sequence[AttemptRecord], origin: Origin) -> Columns:
    """Returns rows of ``steps`` by attempt, optimizer and its own count (writer thread)."""
    ordered = sorted(records, key=attrgetter("attempt", "optimizer", "optimizer_attempt"))
    everyone = np.arange(len(ordered))

    def column(name: str) -> pa.Array:
        return pa.array([getattr(record, name) for record in ordered], schema.STEPS.field(name).type)

    def text(name: str) -> pa.Array:
        return text_column([getattr(record, name) for record in ordered], everyone)

    table = pa.Table.from_arrays(
        [
            *origin_columns(origin, len(ordered)),
            *(column(name) for name in ("attempt", "optimizer", "optimizer_attempt", "global_step")),
            *(column(name) for name in ("first_forward_index", "last_forward_index", "micro_batches")),
            *(column(name) for name in ("micro_batches_declared", "micro_batches_synced")),
            *(text(name) for name in ("last_micro_batch_sync", "outcome", "evidence")),
            *(column(name) for name in ("found_inf", "scale_before", "scale_after", "lr")),
            _stamps([record.started_at_us for record in ordered]),
            *(column(name) for name in ("gap_s", "forward_s", "backward_s", "optimizer_s")),
            text("clock"),
        ],
        schema=schema.in_memory(schema.STEPS),
    )
    return Columns(table, _even_groups(len(ordered)))


def fingerprints_columns(records: Sequence[FingerprintRecord], origin: Origin) -> Columns:
    """Returns rows of ``fingerprints`` by attempt, and in an attempt as they came (writer thread)."""
    ordered = sorted(records, key=attrgetter("attempt"))
    everyone = np.arange(len(ordered))
    attempts = integers(record.attempt for record in ordered)
    texts = ("tensor", "kind", "replica_key")
    table = pa.Table.from_arrays(
        [
            *origin_columns(origin, len(ordered)),
            pa.array(attempts),
            *(text_column([getattr(record, name) for record in ordered], everyone) for name in texts),
            text_column(["x".join(map(str, record.shape)) for record in ordered], everyone),
            text_column([record.dtype for record in ordered], everyone),
            pa.array([record.digest for record in ordered], pa.uint64()),
        ],
        schema=schema.in_memory(schema.FINGERPRINTS),
    )
    return Columns(table, split_into_groups(attempts))


def origin_columns(origin: Origin, count: int) -> list[pa.Array]:
    """Returns the columns with which every table begins."""
    return [
        pa.array(np.full(count, origin.generation, np.int32)),
        pa.array(np.full(count, origin.rank, np.int32)),
        dictionary(np.zeros(count, np.int32), [origin.process]),
    ]


def integers(values: Iterable[int]) -> _Integers:
    """Returns whole numbers as an array."""
    return np.fromiter(values, np.int64)


def _stamps(microseconds: Sequence[int]) -> pa.Array:
    return pa.array(microseconds, pa.timestamp("us", tz="UTC"))


def text_column(values: Sequence[str], rows: _Integers | _Codes) -> pa.Array:
    """Returns the texts at the given indices as a dictionary."""
    codes: dict[str, int] = {}
    texts = encodable_texts(values)
    indices = np.fromiter((codes.setdefault(text, len(codes)) for text in texts), np.int32, len(texts))
    # Most of them are the same in all rows of a part.
    gathered = indices[rows] if len(codes) > 1 else np.zeros(len(rows), np.int32)
    return dictionary(gathered, list(codes))


def dictionary(indices: _Codes, texts: Sequence[str]) -> pa.Array:
    """Returns a text column from places in its distinct texts."""
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(texts, pa.string()))


def split_into_groups(keys: _Integers) -> tuple[int, ...]:
    """Returns rows of each row group: whole samples, as many as fit; a larger one is split by itself.

    Args:
        keys: What the rows are grouped by, equal rows together: sample ids. Shape ``[rows]``.
    """
    starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    lengths = np.diff(starts, append=len(keys))
    groups: list[int] = []
    open_rows = 0
    for length in lengths.tolist():
        if open_rows and open_rows + length > schema.MAX_ROW_GROUP_ROWS:
            groups.append(open_rows)
            open_rows = 0
        open_rows += length
        while open_rows > schema.MAX_ROW_GROUP_ROWS:
            groups.append(schema.MAX_ROW_GROUP_ROWS)
            open_rows -= schema.MAX_ROW_GROUP_ROWS
    if open_rows:
        groups.append(open_rows)
    return tuple(groups)


def _even_groups(count: int) -> tuple[int, ...]:
    full, rest = divmod(count, schema.MAX_ROW_GROUP_ROWS)
    return (schema.MAX_ROW_GROUP_ROWS,) * full + ((rest,) if rest else ())
