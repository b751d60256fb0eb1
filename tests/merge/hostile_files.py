"""Files that were made to hurt whoever reads them: small on disk, large in memory, or simply untrue."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.merge.engine import merge_run
from torchinstruments.store import schema

__all__ = ["Outcome", "claim_small", "merge_measured", "nested_footer", "wide_file"]


@dataclass(frozen=True)
class Outcome:
    """What came of a merge in a process of its own.

    Attributes:
        quarantined: File to the reason why it was left out.
        observations: Of each series, by rank.
        expected_ranks_known: Whether all ranks that should be there can be named.
        extra_bytes: The most memory that it held beyond what it began with.
    """

    quarantined: Mapping[str, str]
    observations: Sequence[int]
    expected_ranks_known: bool
    extra_bytes: int


def merge_measured(url: str) -> Outcome:
    """Merges a run and measures the memory that it takes; to be called in a process of its own."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begun = _status_bytes("VmRSS")
    merged = merge_run(url)
    peak = _status_bytes("VmHWM")
    coverage: Any = merged.result["coverage"]
    return Outcome(
        {one["file"]: one["reason"] for one in coverage["quarantined"]},
        merged.summary()["observations"].to_list(),
        coverage["expected_ranks_known"],
        peak - begun,
    )


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [one for one in lines if one.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def zigzag(number: int) -> bytes:
    """Returns a whole number as Parquet's footers hold it."""
    return _varint(number << 1 if number >= 0 else (-number << 1) - 1)


def padded_varint(number: int, length: int) -> bytes:
    """Returns a whole number in more bytes than it needs, which every reader of a footer accepts."""
    found = zigzag(number)
    body = [byte | 0x80 for byte in found] + [0x80] * (length - len(found) - 1) + [0x00]
    return found if len(found) == length else bytes(body)


def claim_small(path: Path, numbers: Mapping[int, int]) -> None:
    """Has the footer of a file tell other numbers, each in the room that the old one took."""
    data = path.read_bytes()
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - footer_bytes], data[-8 - footer_bytes :]
    for true, claimed in numbers.items():
        old = zigzag(true)
        assert old in footer, f"the footer says nowhere {true}"
        footer = footer.replace(old, padded_varint(claimed, len(old)))
    path.write_bytes(body + footer)


def wide_file(num_columns: int) -> bytes:
    """Returns a file of so many columns and one row."""
    sink = io.BytesIO()
    row = pa.table({f"c{number}": pa.array([0], pa.int8()) for number in range(num_columns)})
    own = schema.metadata(
        schema_version=1, run_id="run-a", generation=0, rank=1, process="0000000b", world_size=2
    )
    with pq.ParquetWriter(sink, row.schema, store_schema=False, compression="none") as writer:
        writer.write_table(row)
        writer.add_key_value_metadata(own)
    return sink.getvalue()


def nested_footer(depth: int) -> bytes:
    """Returns a file whose schema is one field in another, so many levels deep."""
    groups = [_group(b"s", 1), *[_group(b"a", 1)] * depth]
    leaf = _field(1) + zigzag(2) + _field(2) + zigzag(0) + b"\x18" + _varint(1) + b"x\x00"
    elements = b"".join((*groups, leaf))
    footer = _field(1) + zigzag(1) + b"\x19\xfc" + _varint(len(groups) + 1) + elements
    footer += b"\x16" + zigzag(0) + b"\x19\x0c\x00"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _group(name: bytes, children: int) -> bytes:
    return b"\x35" + zigzag(0) + b"\x18" + _varint(len(name)) + name + b"\x15" + zigzag(children) + b"\x00"


def _field(delta: int) -> bytes:
    return bytes([delta << 4 | 5])


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
