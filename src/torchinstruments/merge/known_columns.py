"""Columns of row groups that are the same bytes as some that were decoded before.

Ranks of one run write the same keys and the same texts beside them, part after part, so that all but the
values and their times lies in one file as it lies in the other. Equal bytes under equal headers unpack to
equal columns, checksums of pages included: they are compared, which takes a fraction of decoding them.
"""

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.store.schema import TABLE_SCHEMAS

__all__ = ["DecodedRows", "KnownColumns"]

MAX_KNOWN_BYTES = 32 * 2**20
"""Of decoded columns that are kept: about 2 MB a full row group."""

_ALWAYS_DECODED = frozenset({"value", "timestamp", "started_at"})
"""Columns in which no two row groups are alike."""

MAX_MADE = 96
"""Things made of known columns that are kept."""

_MAX_SCHEMAS = 16

_Chunk = tuple[int, int, int, int, int, str, bytes]
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Rows of a part.

    Attributes:
        batch: The rows.
        known: What decoded them; None where nothing of them is known.
        numbers: Column to a number that stands for all that it holds; not of every column.
    """

    batch: pa.RecordBatch
    known: "KnownColumns | None" = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    def made(self, names: Sequence[str], make: Callable[[pa.RecordBatch], _Made]) -> _Made:
        """Returns what a function makes of some columns: where they are known, what it made of them before.

        Args:
            names: All the columns that the function looks at.
            make: The function; what it returns is not changed by anybody.
        """
        numbers = tuple(self.numbers.get(name, -1) for name in names)
        if self.known is None or -1 in numbers:
            return make(self.batch)
        return self.known.made(self.batch, numbers, make)


class KnownColumns:
    """Reads row groups of a table, and decodes of them what was not decoded before (worker).

    Bounded, and safe to use from several threads.

    Args:
        table: One of `TABLE_SCHEMAS`.
        names: The columns to read.

    Attributes:
        declared: Schema of the table.
        names: The columns.
    """

    def __init__(self, table: str, names: Sequence[str]) -> None:
        self.declared = TABLE_SCHEMAS[table]
        self.names = tuple(names)
        known = [name for name in names if name not in _ALWAYS_DECODED]
        self._places = [(name, self.declared.get_field_index(name)) for name in known]
        self._lock = threading.Lock()
        self._known: OrderedDict[_Chunk, tuple[int, pa.Array]] = OrderedDict()
        self._known_bytes = 0
        # What a function made, by the function and its columns.
        self._made: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        # A number is never given out twice: what another thread holds may outlive `clear`.
        self._schemas: deque[tuple[int, pq.ParquetSchema]] = deque(maxlen=_MAX_SCHEMAS)
        self._numbers = itertools.count()

    def read(
        self,
        file: pq.ParquetFile,
        data: bytes,
        group: int,
        check: Callable[[pa.RecordBatch, pa.RecordBatch], None],
    ) -> DecodedRows:
        """Returns the rows of a row group.

        Args:
            file: The part, whose footer was inspected.
            data: All its bytes.
            group: Number of the row group.
            check: Called with the rows and with those of their columns that were decoded, before these count
                as known; it raises for bad ones.

        Raises:
            Exception: Whatever a decoder trips over.
        """
        metadata = file.metadata
        own, schema = metadata.row_group(group), self._schema_number(metadata.schema)
        chunks = {name: _chunk(schema, place, own, data) for name, place in self._places}
        found = self._find(chunks)
        decoded = self._lacking(file, group, found)
        columns = {name: column for name, (_, column) in found.items()}
        names = decoded.schema.names
        columns |= dict(zip(names, decoded.columns, strict=True))
        batch = pa.RecordBatch.from_arrays([columns[name] for name in self.names], self.names)
        check(batch, decoded)
        if batch.num_rows != own.num_rows:
            return DecodedRows(batch)
        numbers = {name: number for name, (number, _) in found.items() if name not in names}
        for name in names:
            if (chunk := chunks.get(name)) is not None:
                numbers[name] = self._keep(chunk, columns[name])
        return DecodedRows(batch, self, numbers)

    def made(
        self, batch: pa.RecordBatch, numbers: tuple[int, ...], make: Callable[[pa.RecordBatch], _Made]
    ) -> _Made:
        """Returns what a function makes of the columns that these numbers stand for."""
        key = (make, *numbers)
        with self._lock:
            found = self._made.get(key)
            if found is not None:
                self._made.move_to_end(key)
                return found
        made = make(batch)
        with self._lock:
            self._made[key] = made
            while len(self._made) > MAX_MADE:
                self._made.popitem(last=False)
        return made

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._known.clear()
            self._known_bytes = 0
            self._made.clear()
            self._schemas.clear()

    def _lacking(self, file: pq.ParquetFile, group: int, found: Container[str]) -> pa.RecordBatch:
        """Decodes the columns that were not found; where something is wrong, all, so that all tell of it."""
        lacking = [name for name in self.names if name not in found]
        if len(lacking) < len(self.names):
            try:
                decoded = _decoded(file, group, lacking)
            except (pa.ArrowException, OSError, ValueError):
                return _decoded(file, group, self.names)
            if decoded.num_rows == file.metadata.row_group(group).num_rows:
                return decoded
        return _decoded(file, group, self.names)

    def _schema_number(self, schema: pq.ParquetSchema) -> int:
        with self._lock:
            for number, one in self._schemas:
                if one.equals(schema):
                    return number
            number = next(self._numbers)
            self._schemas.append((number, schema))
            return number

    def _find(self, chunks: Mapping[str, _Chunk | None]) -> dict[str, tuple[int, pa.Array]]:
        found: dict[str, tuple[int, pa.Array]] = {}
        with self._lock:
            for name, chunk in chunks.items():
                held = None if chunk is None else self._known.get(chunk)
                if chunk is not None and held is not None:
                    self._known.move_to_end(chunk)
                    found[name] = held
        return found

    def _keep(self, chunk: _Chunk, column: pa.Array) -> int:
        """Keeps a column, and returns its number."""
        with self._lock:
            held = self._known.get(chunk)
            if held is not None:
                return held[0]
            number = next(self._numbers)
            self._known[chunk] = (number, column)
            self._known_bytes += _size_bytes(column, chunk)
            while self._known_bytes > MAX_KNOWN_BYTES:
                oldest, (_, left) = self._known.popitem(last=False)
                self._known_bytes -= _size_bytes(left, oldest)
            return number


def _decoded(file: pq.ParquetFile, group: int, names: Sequence[str]) -> pa.RecordBatch:
    """Returns some columns of a row group; no rows where one of them ends before its first."""
    rows = file.metadata.row_group(group).num_rows
    # One thread: the merge is parallel over ranks, and a worker's memory stays that of one batch.
    batches = list(file.iter_batches(max(rows, 1), [group], list(names), use_threads=False))
    if not batches:
        schema = file.schema_arrow
        return pa.RecordBatch.from_pylist([], pa.schema([schema.field(name) for name in names]))
    (batch,) = batches
    return batch


def _chunk(schema: int, place: int, group: pq.RowGroupMetaData, data: bytes) -> _Chunk | None:
    """Returns all that tells what a column of a row group unpacks to; None where it lies beyond the file."""
    column = group.column(place)
    first = pages = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < first:
        first = column.dictionary_page_offset
    end = first + column.total_compressed_size
    if not 0 <= first <= end <= len(data):
        return None
    sizes = (column.num_values, column.total_uncompressed_size, pages - first)
    return (schema, place, *sizes, column.compression, data[first:end])


def _size_bytes(column: pa.Array, chunk: _Chunk) -> int:
    return column.nbytes + len(chunk[-1])
