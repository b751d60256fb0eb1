"""Looks at a part's footer, and at nothing else, before anybody reads a row of it.

One read of a file's tail decides. Nothing in it is trusted: a footer is bounded before it is parsed (one of
a few megabytes can name a hundred thousand columns), a row group is bounded by what it claims to unpack to,
and table, run, process and rank have to be those that the file's place in the run says. What a footer cannot
show, a damaged page, surfaces when the row group is read.
"""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.errors import StorageDeniedError
from torchinstruments.store import schema
from torchinstruments.store.documents import UnusableFileError
from torchinstruments.store.storage import Storage

__all__ = [
    "MAX_FOOTER_BYTES",
    "MAX_GROUP_BYTES",
    "MAX_PART_BYTES",
    "MAX_PART_ROWS",
    "Expected",
    "PartInfo",
    "check_size",
    "inspect_file",
    "inspect_footer",
    "inspect_metadata",
    "inspect_part",
    "read_tail",
]

MAX_FOOTER_BYTES = 4 * 2**20
"""A footer larger than this is refused unparsed: ours has about 3 KB for each row group."""

MAX_GROUP_BYTES = 64 * 2**20
"""A row group that claims to unpack to more is refused: a full one of ours takes about 2 MB."""

MAX_PART_BYTES = 2**30
"""A part larger than this is refused unread: ours have a few megabytes."""

MAX_PART_ROWS = 16 * 2**20
"""A part of more rows is refused: a row that repeats takes no room in a file, and does in memory."""

_MAGIC = b"PAR1"
_ENCRYPTED_MAGIC = b"PARE"
_FRAME_BYTES = 12
_TAIL_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Expected:
    """What a part has to be, by the place where it lies.

    Attributes:
        table: One of `layout.TABLES`.
        run_id: Run of the folder.
        process: Process in its file name, or None where the name tells none.
        rank: Rank of its folder, or None where the folder tells none.
    """

    table: str
    run_id: str
    process: str | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PartInfo:
    """What the footer of a usable part says.

    Attributes:
        table: One of `layout.TABLES`.
        generation: Generation of its rows.
        rank: Rank of its rows.
        process: Process of its rows.
        world_size: Ranks of that generation.
        num_rows: Its rows.
        group_rows: Rows of each row group, in order.
        first_sample_ids: Lowest sample id of each row group; empty for a table without sample ids.
        last_sample_ids: Highest sample id of each row group; empty for a table without sample ids.
        size_bytes: Size of the file.
    """

    table: str
    generation: int
    rank: int
    process: str
    world_size: int
    num_rows: int
    group_rows: tuple[int, ...]
    first_sample_ids: tuple[int, ...]
    last_sample_ids: tuple[int, ...]
    size_bytes: int


def inspect_part(storage: Storage, path: str, expected: Expected, size_bytes: int) -> PartInfo:
    """Reads and checks the footer of a part (offline).

    Args:
        storage: The run's folder.
        path: The part below it.
        expected: What the part has to be.
        size_bytes: Its size, as the listing told it.

    Raises:
        UnusableFileError: The part is to be left out; its reason says why.
        StorageError: The store did not answer.
    """
    check_size(size_bytes)
    try:
        with storage.open_input(path, size_bytes) as file:
            return inspect_file(file, expected)
    except FileNotFoundError:
        raise UnusableFileError("unreadable", "it is gone") from None
    except StorageDeniedError as error:
        raise UnusableFileError("unreadable", error) from None


def check_size(size_bytes: int) -> None:
    """Refuses a part by the size that a listing told, before anything of it is read.

    Raises:
        UnusableFileError: It is empty or too large.
    """
    if size_bytes == 0:
        raise UnusableFileError("empty_file")
    if size_bytes > MAX_PART_BYTES:
        raise UnusableFileError("too_large", f"{size_bytes} bytes")


def inspect_file(file: BinaryIO, expected: Expected) -> PartInfo:
    """Reads and checks the footer of an open file.

    Raises:
        UnusableFileError: The part is to be left out; its reason says why.
        OSError: It could not be read.
    """
    return inspect_footer(file, expected)[0]


def inspect_footer(file: BinaryIO, expected: Expected) -> tuple[PartInfo, pq.FileMetaData]:
    """Reads and checks the footer of an open file, and returns it too: parsing it again costs as much.

    Raises:
        UnusableFileError: The part is to be left out; its reason says why.
        OSError: It could not be read.
    """
    size_bytes = file.seek(0, os.SEEK_END)
    metadata = _read_metadata(file, size_bytes)
    return inspect_metadata(metadata, size_bytes, expected), metadata


def inspect_metadata(
    metadata: pq.FileMetaData,
    size_bytes: int,
    expected: Expected,
    open_columns: Callable[[], object] | None = None,
) -> PartInfo:
    """Checks a footer that was parsed, of a file whose tail `read_tail` took for one of a part.

    Args:
        metadata: The footer.
        size_bytes: Size of the file.
        expected: What the part has to be.
        open_columns: Opens every column of every row group, and raises where the footer contradicts itself
            about one; None where that would read the file. A look at such a column in the footer ends the
            process.

    Raises:
        UnusableFileError: The part is to be left out; its reason says why.
    """
    own = schema.parse_metadata(metadata.metadata)
    _check_metadata(own, expected)
    _check_schema(metadata, expected.table)
    if open_columns is not None:
        try:
            open_columns()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UnusableFileError("unreadable", error) from None
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    _check_groups(metadata, groups, size_bytes)
    ranges = _sample_id_ranges(groups, expected.table)
    return PartInfo(
        table=expected.table,
        generation=_number(own, "generation"),
        rank=_number(own, "rank"),
        process=own["process"],
        world_size=_number(own, "world_size"),
        num_rows=metadata.num_rows,
        group_rows=tuple(group.num_rows for group in groups),
        first_sample_ids=tuple(first for first, _ in ranges),
        last_sample_ids=tuple(last for _, last in ranges),
        size_bytes=size_bytes,
    )


def read_tail(file: BinaryIO, size_bytes: int) -> tuple[bytes, int]:
    """Returns the last bytes of a file, its bounded footer among them, and how large that footer is.

    Raises:
        UnusableFileError: The part is to be left out; its reason says why.
        OSError: It could not be read.
    """
    if size_bytes == 0:
        raise UnusableFileError("empty_file")
    tail = _read_tail(file, size_bytes, min(size_bytes, _TAIL_BYTES))
    if tail[-4:] != _MAGIC or size_bytes < _FRAME_BYTES:
        raise UnusableFileError(_kind_of_wreck(file, tail))
    footer_bytes = int.from_bytes(tail[-8:-4], "little")
    if footer_bytes > size_bytes - _FRAME_BYTES:
        raise UnusableFileError("truncated")
    if footer_bytes > MAX_FOOTER_BYTES:
        raise UnusableFileError("too_large", f"a footer of {footer_bytes} bytes")
    if footer_bytes + 8 > len(tail):
        tail = _read_tail(file, size_bytes, footer_bytes + 8)
    return tail, footer_bytes


def _read_metadata(file: BinaryIO, size_bytes: int) -> pq.FileMetaData:
    tail, footer_bytes = read_tail(file, size_bytes)
    # The parser looks for a whole file; the footer alone between two magic words is one to it.
    frame = _MAGIC + tail[-8 - footer_bytes :]
    try:
        return pq.read_metadata(io.BytesIO(frame))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnusableFileError("not_parquet", error) from None


def _read_tail(file: BinaryIO, size_bytes: int, length: int) -> bytes:
    file.seek(size_bytes - length)
    tail = file.read(length)
    if len(tail) != length:
        raise UnusableFileError("truncated")
    return tail


def _kind_of_wreck(file: BinaryIO, tail: bytes) -> str:
    """Tells a part that was cut off from something that never was one."""
    file.seek(0)
    began_as_parquet = file.read(4) == _MAGIC
    return "truncated" if began_as_parquet and tail[-4:] != _ENCRYPTED_MAGIC else "not_parquet"


def _check_metadata(own: dict[str, str], expected: Expected) -> None:
    version = own.get("schema_version", "none")
    if version != str(schema.SCHEMA_VERSION):
        raise UnusableFileError("unknown_schema_version", version)
    missing = [name for name in schema.METADATA_KEYS if name not in own]
    if missing:
        raise UnusableFileError("schema_mismatch", f"no {missing[0]} in the metadata")
    if own["run_id"] != expected.run_id:
        raise UnusableFileError("foreign_run")
    if expected.process is not None and own["process"] != expected.process:
        raise UnusableFileError("misplaced", f"it is of process {own['process']}")
    if expected.rank is not None and own["rank"] != str(expected.rank):
        raise UnusableFileError("misplaced", f"it is of rank {own['rank']}")


def _check_schema(metadata: pq.FileMetaData, table: str) -> None:
    declared = schema.TABLE_SCHEMAS[table]
    if metadata.num_columns != len(declared):
        raise UnusableFileError(
            "schema_mismatch", f"{metadata.num_columns} columns where {table} has {len(declared)}"
        )
    try:
        found = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, ValueError) as error:
        raise UnusableFileError("schema_mismatch", error) from None
    if found.equals(declared):
        return
    for has, wants in zip(found, declared, strict=True):
        if has.name != wants.name or has.type != wants.type:
            raise UnusableFileError(
                "schema_mismatch", f"{has.name} {has.type} where {wants.name} {wants.type} is due"
            )


def _check_groups(metadata: pq.FileMetaData, groups: list[pq.RowGroupMetaData], size_bytes: int) -> None:
    """Refuses row groups that are larger than ours, and numbers that contradict each other."""
    if metadata.num_rows > MAX_PART_ROWS:
        raise UnusableFileError("too_large", f"{metadata.num_rows} rows")
    if metadata.num_rows != sum(group.num_rows for group in groups):
        raise UnusableFileError("unreadable", f"{metadata.num_rows} rows are not those of its row groups")
    declared = [metadata.schema.column(place).physical_type for place in range(metadata.num_columns)]
    for index, group in enumerate(groups):
        if group.num_columns != len(declared):
            raise UnusableFileError("schema_mismatch", f"row group {index} has {group.num_columns} columns")
        columns = [group.column(place) for place in range(group.num_columns)]
        unpacked = max(group.total_byte_size, sum(one.total_uncompressed_size for one in columns))
        if group.num_rows > schema.MAX_ROW_GROUP_ROWS or unpacked > MAX_GROUP_BYTES:
            raise UnusableFileError(
                "too_large", f"row group {index} has {group.num_rows} rows, {unpacked} bytes"
            )
        for one, due in zip(columns, declared, strict=True):
            # To ask a column of another type for its statistics would end the process.
            if one.physical_type != due:
                raise UnusableFileError(
                    "schema_mismatch", f"row group {index} has {one.physical_type} where {due} is due"
                )
            packed = one.total_compressed_size
            if min(group.num_rows, one.total_uncompressed_size, packed) < 0 or packed > size_bytes:
                raise UnusableFileError("schema_mismatch", f"row group {index} has impossible sizes")
            if one.num_values != group.num_rows:
                raise UnusableFileError(
                    "schema_mismatch",
                    f"row group {index} has {one.num_values} values of {one.path_in_schema} "
                    f"for {group.num_rows} rows",
                )


def _number(own: dict[str, str], name: str) -> int:
    try:
        return int(own[name])
    except ValueError:
        raise UnusableFileError("schema_mismatch", f"{name} {own[name]!r} in the metadata") from None


def _sample_id_ranges(groups: list[pq.RowGroupMetaData], table: str) -> list[tuple[int, int]]:
    if "sample_id" not in schema.TABLE_SCHEMAS[table].names:
        return []
    column = schema.TABLE_SCHEMAS[table].get_field_index("sample_id")
    ranges: list[tuple[int, int]] = []
    for index, group in enumerate(groups):
        statistics = group.column(column).statistics
        if statistics is None or not statistics.has_min_max:
            raise UnusableFileError("schema_mismatch", f"row group {index} does not tell its sample ids")
        ranges.append((statistics.min, statistics.max))
    return ranges
