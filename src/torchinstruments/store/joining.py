"""Joining small spooled parts of one table and process into the one part that is uploaded.

A small part is mostly footer: 300 rows cost 33 bytes each, 36,000 cost 4.6. Row groups are therefore merged
up to the bound of `schema.MAX_ROW_GROUP_ROWS`. Each spooled row group ends at a sample's end, so the merged
ones do too. A sample whose backward was spooled later has its rows in two of them; where both meet in one row
group they are brought together by a stable sort, which changes nothing else.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.store import schema
from torchinstruments.store.parts import open_part_writer

__all__ = ["UnreadablePartError", "join_parts"]

_SAMPLE_ID = "sample_id"


class UnreadablePartError(Exception):
    """A spooled part that Parquet cannot read.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, detail: object) -> None:
        self.path = path
        super().__init__(f"{path} is not readable: {' '.join(str(detail).split())[:200]}")


def join_parts(table: str, paths: Sequence[Path]) -> bytes:
    """Returns one part with the rows of several, in their order (uploader).

    The same files give the same bytes, so that an upload can be repeated after a crash. A single file is
    returned as it is.

    Args:
        table: One of `layout.TABLES`.
        paths: Spooled parts of one process and table, in the order in which they were written.

    Raises:
        UnreadablePartError: One of them cannot be read.
        OSError: The spool cannot be read.
    """
    if len(paths) == 1:
        _check(paths[0])
        return paths[0].read_bytes()
    table_schema = schema.TABLE_SCHEMAS[table]
    sink = pa.BufferOutputStream()
    key_values: dict[bytes, bytes] = {}
    with open_part_writer(sink, table_schema) as writer:
        waiting: list[pa.Table] = []
        waiting_rows = 0
        for rows, metadata in _row_groups(paths, table_schema):
            key_values = key_values or metadata
            if waiting and waiting_rows + rows.num_rows > schema.MAX_ROW_GROUP_ROWS:
                _write_row_group(writer, waiting)
                waiting.clear()
                waiting_rows = 0
            waiting.append(rows)
            waiting_rows += rows.num_rows
        if waiting:
            _write_row_group(writer, waiting)
        writer.add_key_value_metadata(key_values)
    return sink.getvalue().to_pybytes()


def _row_groups(
    paths: Sequence[Path], table_schema: pa.Schema
) -> Iterator[tuple[pa.Table, dict[bytes, bytes]]]:
    for path in paths:
        try:
            with pq.ParquetFile(path) as file:
                metadata = {
                    key: value
                    for key, value in (file.metadata.metadata or {}).items()
                    if key != b"ARROW:schema"
                }
                for number in range(file.num_row_groups):
                    yield file.read_row_group(number, use_threads=False).cast(table_schema), metadata
        except (pa.ArrowException, ValueError, KeyError) as error:
            raise UnreadablePartError(path, error) from error


def _check(path: Path) -> None:
    try:
        with pq.ParquetFile(path):
            pass
    except (pa.ArrowException, ValueError) as error:
        raise UnreadablePartError(path, error) from error


def _write_row_group(writer: pq.ParquetWriter, pieces: list[pa.Table]) -> None:
    rows = pa.concat_tables(pieces)
    if len(pieces) > 1 and _SAMPLE_ID in rows.column_names:
        ids = rows.column(_SAMPLE_ID).to_numpy()
        if (np.diff(ids) < 0).any():
            rows = rows.take(pa.array(np.argsort(ids, kind="stable")))
    writer.write_table(rows, row_group_size=rows.num_rows)
