"""From samples and attempts to Arrow columns, in the order in which a part holds them.

Columns are built at once, never row by row; those of ``history``, which has most rows, in `history_columns`.
Text columns are dictionaries in memory, so that the encoder need not hash a text a row; a file that is
written from them with ``store_schema=False`` reads back as plain text, exactly as `schema` declares.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

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
from torchinstruments.store.sample_grids import KeyedRows
from torchinstruments.store.texts import encodable_texts

__all__ = [
    "Columns",
    "NumberKind",
    "Origin",
    "SampleRow",
    "columns_of",
    "dictionary",
    "fingerprints_columns",
    "integers",
    "numbers_column",
    "optional_column",
    "origin_columns",
    "samples_columns",
    "split_into_groups",
    "steps_columns",
    "table_of",
    "text_column",
]

_Integers = npt.NDArray[np.int64]
_Codes = npt.NDArray[np.int32]
NumberKind: TypeAlias = type[np.int32] | type[np.int64] | type[np.float64]


_FEW = 1024
"""Rows of a part for which what it has in common with others is kept."""

_KINDS = {np.dtype(name): pa.from_numpy_dtype(name) for name in ("int32", "int64", "float64")}
_STAMP = schema.SAMPLES.field("started_at").type


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


_SAMPLE_ID = attrgetter("sample_id")
_SAMPLES_NAMES = schema.SAMPLES.names
_IN_POSITION = ("attempt", "forward_in_attempt", "micro_batch", "forward_index")


def _fields_of(names: Sequence[str]) -> Callable[[SampleRow], tuple[float, ...]]:
    """Returns what takes these columns out of a row, more than one."""
    return attrgetter(*[f"position.{name}" if name in _IN_POSITION else name for name in names])


_SAMPLE_NUMBERS: tuple[tuple[type[np.generic], tuple[str, ...]], ...] = (
    (np.int64, ("sample_id", "forward_index", "started_at_us", "rows")),
    (np.int32, ("forward_in_attempt", "num_backwards", "errors", "modules_expected", "modules_fired")),
    (np.float64, ("collection_forward_s", "collection_backward_s")),
)
_SAMPLE_FIELDS = tuple([(kind, names, _fields_of(names)) for kind, names in _SAMPLE_NUMBERS])
"""Columns of ``samples`` that always have a number, by their kind."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A table in the inner order of a part, and where its row groups end.

    Attributes:
        table: The rows; text columns are dictionaries.
        group_rows: Rows of each row group, in order.
        keyed: Rows of ``history`` as whoever folds them takes them; None where they are of another table.
    """

    table: pa.Table
    group_rows: tuple[int, ...]
    keyed: KeyedRows | None = None


def samples_columns(rows: Sequence[SampleRow], origin: Origin) -> Columns:
    """Returns rows of ``samples`` by sample id (writer thread)."""
    count = len(rows)
    ordered = sorted(rows, key=_SAMPLE_ID)
    positions = [row.position for row in ordered]
    states = tuple([row.state for row in ordered])
    is_few = count <= _FEW
    of_origin = _few_of_origin(origin, count) if is_few else origin_columns(origin, count)
    columns = dict(zip(_SAMPLES_NAMES, of_origin, strict=False))
    # Numbers of one kind are made together, since a call takes longer than the few rows of a part.
    for kind, names, fields in _SAMPLE_FIELDS:
        matrix = np.array([*map(fields, ordered)], kind).reshape(count, len(names))
        columns |= zip(names, columns_of(matrix.T), strict=True)
    columns["started_at"] = columns["started_at_us"].view(_STAMP)
    columns["attempt"] = optional_column(np.int64, [position.attempt for position in positions])
    columns["micro_batch"] = optional_column(np.int32, [position.micro_batch for position in positions])
    columns["state"] = _few_texts(states) if is_few else text_column(states, np.arange(count))
    return Columns(table_of([columns[name] for name in _SAMPLES_NAMES], "samples"), _even_groups(count))


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
        schema=schema.IN_MEMORY["steps"],
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
        schema=schema.IN_MEMORY["fingerprints"],
    )
    return Columns(table, split_into_groups(attempts))


def origin_columns(origin: Origin, count: int) -> list[pa.Array]:
    """Returns the columns with which every table begins."""
    return [
        numbers_column(np.full(count, origin.generation, np.int32)),
        numbers_column(np.full(count, origin.rank, np.int32)),
        dictionary(np.zeros(count, np.int32), [origin.process]),
    ]


@functools.lru_cache(maxsize=8)
def _few_of_origin(origin: Origin, count: int) -> tuple[pa.Array, ...]:
    """Returns `origin_columns`, the same ones again for as many rows."""
    return tuple(origin_columns(origin, count))


@functools.lru_cache(maxsize=32)
def _few_texts(texts: tuple[str, ...]) -> pa.Array:
    """Returns texts as a column; parts often have the same few."""
    return text_column(texts, np.arange(len(texts)))


def table_of(columns: Sequence[pa.Array], table: str) -> pa.Table:
    """Returns the rows of a table, of as many columns as it has; their types are the caller's matter.

    As the children of a structure they take half the time in which Arrow makes a table of columns, and what
    it would do beside that is to compare types that follow from the program.
    """
    rows = pa.Array.from_buffers(
        schema.AS_STRUCT[table], len(columns[0]), [None], null_count=0, children=list(columns)
    )
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(rows)])


def numbers_column(values: npt.NDArray[np.generic], kind: pa.DataType | None = None) -> pa.Array:
    """Returns numbers without a missing one as a column that shares their memory.

    Args:
        values: The numbers, side by side.
        kind: Type of the column, as wide as they are; None for the one of their own name.
    """
    kind = _KINDS[values.dtype] if kind is None else kind
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], null_count=0)


def columns_of(matrix: npt.NDArray[np.generic]) -> list[pa.Array]:
    """Returns the rows of a matrix of numbers as columns."""
    num_columns, count = matrix.shape
    kind, memory = _KINDS[matrix.dtype], pa.py_buffer(np.ascontiguousarray(matrix))
    return [
        pa.Array.from_buffers(kind, count, [None, memory], null_count=0, offset=place * count)
        for place in range(num_columns)
    ]


def optional_column(
    kind: NumberKind, values: Sequence[float | None], rows: _Integers | None = None
) -> pa.Array:
    """Returns the numbers at the given indices as a column, all of them for None, with nulls for None."""
    if None not in values:
        known = np.array(values, kind)
        return numbers_column(known if rows is None else known.take(rows))
    is_missing = np.array([value is None for value in values])
    known = np.array([0 if value is None else value for value in values], kind)
    if rows is None:
        return pa.array(known, mask=is_missing)
    return pa.array(known.take(rows), mask=is_missing.take(rows))


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
    gathered = indices.take(rows) if len(codes) > 1 else np.zeros(len(rows), np.int32)
    return dictionary(gathered, list(codes))


def dictionary(indices: _Codes, texts: Sequence[str]) -> pa.Array:
    """Returns a text column from places in its distinct texts."""
    return pa.DictionaryArray.from_arrays(numbers_column(indices), pa.array(texts, pa.string()))


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
