"""``history.parquet``: a copy of a rank's history in one file, for people; nothing in this package reads it.

Made beside ``history.parts/`` in a local folder, at an explicit close and up to a size. It is streamed a row
group at a time, covers all processes and generations that left parts in the folder, and appears whole or not
at all. A part that cannot be read is left out: the parts stay the only source.
"""

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.store import layout, schema
from torchinstruments.store.documents import UnusableFileError
from torchinstruments.store.inspection import Expected, PartInfo, inspect_file
from torchinstruments.store.parts import open_part_writer

__all__ = ["MAX_COPY_BYTES", "write_history_copy"]

MAX_COPY_BYTES = 256 * 2**20
"""Parts of more than so many bytes in total are not copied."""

_COPY_NAME = "history.parquet"


def write_history_copy(
    folder: Path, run_id: str, *, max_bytes: int = MAX_COPY_BYTES, timeout_s: float = float("inf")
) -> Path | None:
    """Writes ``history.parquet`` into a rank's local folder, in place of an older one (closing thread).

    Args:
        folder: The rank's folder, which holds ``history.parts``.
        run_id: The run; parts of another one are left out.
        max_bytes: Size of all parts together beyond which there is no copy.
        timeout_s: Seconds after which it is given up.

    Returns:
        The file, or None where there is nothing to copy, too much of it, or too little time.

    Raises:
        OSError: The folder cannot be read or written; an older copy still stands.
    """
    give_up_s = time.monotonic() + timeout_s
    parts = _usable_parts(folder, run_id)
    if not parts or sum(info.size_bytes for _, info in parts) > max_bytes:
        return None
    temporary = folder / f".{_COPY_NAME}.{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as file:
            if not _copy(parts, file, run_id, give_up_s):
                return None
            file.flush()
            os.fsync(file.fileno())
        return temporary.replace(folder / _COPY_NAME)
    finally:
        temporary.unlink(missing_ok=True)


def _usable_parts(folder: Path, run_id: str) -> list[tuple[Path, PartInfo]]:
    """Returns the parts that can be read, in the order of writing."""
    found: list[tuple[int, layout.PartName, Path, PartInfo]] = []
    for path in (folder / "history.parts").glob("part-*.parquet"):
        name = layout.parse_part(path.name)
        if name is None:
            continue
        try:
            with path.open("rb") as file:
                info = inspect_file(file, Expected("history", run_id, process=name.process))
        except UnusableFileError:
            continue
        found.append((info.generation, name, path, info))
    found.sort(key=_by_writing)
    return [(path, info) for _, _, path, info in found]


def _by_writing(entry: tuple[int, layout.PartName, Path, PartInfo]) -> tuple[int, str, int]:
    return (entry[0], entry[1].process, entry[1].sequence)


def _copy(parts: list[tuple[Path, PartInfo]], file: BinaryIO, run_id: str, give_up_s: float) -> bool:
    """Copies all rows, in row groups of a full size; False where the time ran out."""
    text = [field.name for field in schema.HISTORY if pa.types.is_string(field.type)]
    writer: pq.ParquetWriter | None = None
    try:
        for table in _full_groups(parts, text):
            if time.monotonic() > give_up_s:
                return False
            if writer is None:
                writer = open_part_writer(file, table.schema)
            writer.write_table(table, row_group_size=table.num_rows)
        if writer is None:
            return False
        writer.add_key_value_metadata(
            {
                "torchinstruments.schema_version": str(schema.SCHEMA_VERSION),
                "torchinstruments.run_id": run_id,
            }
        )
    finally:
        if writer is not None:
            writer.close()
    return True


def _full_groups(parts: list[tuple[Path, PartInfo]], text: list[str]) -> Iterator[pa.Table]:
    """Yields the rows of all parts, as many small row groups together as make a full one."""
    pending: list[pa.Table] = []
    pending_rows = 0
    for path, _ in parts:
        with pq.ParquetFile(path, read_dictionary=text) as part:
            for index in range(part.num_row_groups):
                try:
                    table = part.read_row_group(index, use_threads=False)
                except (pa.ArrowException, OSError):
                    break  # a damaged page; what the part held before it is kept
                if pending and pending_rows + table.num_rows > schema.MAX_ROW_GROUP_ROWS:
                    yield _joined(pending)
                    pending.clear()
                    pending_rows = 0
                pending.append(table)
                pending_rows += table.num_rows
    if pending:
        yield _joined(pending)


def _joined(tables: list[pa.Table]) -> pa.Table:
    """Returns the rows under one dictionary a column; the encoder gives up dictionaries that differ."""
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks().replace_schema_metadata(None)
