"""Encoding of a part: one Parquet file, made whole in memory, so that it can be written in one piece.

Keys are dictionaries, whole numbers among them since they repeat within a tensor's rows; digests do not.
What is nearly constant in a part is not compressed any further.
Floating-point columns are split by byte before compression: values dominate a file, and their exponents
resemble each other.
Statistics stand only where a reader can skip by them; over all columns they would be half the work.
Every page has a checksum: without one, a flipped bit in six changes a number and no decoder notices.
No Arrow schema is stored: with it, readers would see dictionaries where `schema` declares text.
"""

from collections.abc import Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.store import schema
from torchinstruments.store.columns import Columns

__all__ = ["encode_columns", "open_part_writer"]

_COMPRESSION = "zstd"
_COMPRESSION_LEVEL = 1
_FEW = (
    *("generation", "rank", "process", "forward_in_attempt", "micro_batch", "step_provenance", "call_index"),
    *("stage", "backward_index", "mode", "grad_sync", "scale_provenance", "scope", "execution", "dtype"),
    "device",
)
"""Dictionaries of few short entries in long runs: nothing is left to compress, and to try takes its time."""

_SKIPPABLE = ("sample_id", "attempt", "forward_index", "timestamp", "started_at")


def encode_columns(columns: Columns, metadata: Mapping[bytes, bytes]) -> bytes:
    """Returns a part's bytes (writer thread).

    Args:
        columns: Rows in the inner order of a part, and its row groups.
        metadata: From `schema.metadata`.
    """
    sink = pa.BufferOutputStream()
    with open_part_writer(sink, columns.table.schema) as writer:
        start = 0
        for rows in columns.group_rows:
            group = columns.table if rows == columns.table.num_rows else columns.table.slice(start, rows)
            writer.write_table(group, row_group_size=rows)
            start += rows
        writer.add_key_value_metadata(dict(metadata))
    return sink.getvalue().to_pybytes()


def open_part_writer(sink: pa.NativeFile | BinaryIO, table_schema: pa.Schema) -> pq.ParquetWriter:
    """Returns a writer with the encodings of a part; the caller adds key-value metadata and closes it.

    Args:
        sink: Where the bytes go.
        table_schema: One of `schema.TABLE_SCHEMAS`; text columns may be dictionaries.
    """
    known = next((options for one, options in _KNOWN_OPTIONS if one.equals(table_schema)), None)
    return pq.ParquetWriter(sink, table_schema, **(known or _options(table_schema)))


def _options(table_schema: pa.Schema) -> dict[str, Any]:
    """Returns how each column is encoded. A codec stands only for those that have one: it is a call each."""
    names = table_schema.names
    floats = [field.name for field in table_schema if pa.types.is_floating(field.type)]
    compressed = [name for name in names if name not in _FEW]
    return {
        "version": "2.6",
        "compression": dict.fromkeys(compressed, _COMPRESSION),
        "compression_level": dict.fromkeys(compressed, _COMPRESSION_LEVEL),
        "use_dictionary": [name for name in names if name not in (*floats, "digest")],
        "use_byte_stream_split": floats,
        "store_schema": False,
        "write_batch_size": schema.MAX_ROW_GROUP_ROWS,
        "write_page_checksum": True,
        "write_statistics": [name for name in _SKIPPABLE if name in names],
    }


_KNOWN_OPTIONS = tuple([(one, _options(one)) for one in schema.IN_MEMORY.values()])
"""Those of the tables, since to find them out takes longer than to open a writer, and parts are many."""
