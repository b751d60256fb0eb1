"""Columns that were decoded before stand for equal bytes alone, and for all that was made of them."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchinstruments.merge import known_columns
from torchinstruments.merge.known_columns import DecodedRows, KnownColumns
from torchinstruments.store.parts import open_part_writer
from torchinstruments.store.schema import SAMPLES

NAMES = ("rank", "sample_id", "attempt", "state", "started_at")
ROWS = 6


class Reader:
    """Reads parts of ``samples``, and remembers which columns were decoded for it."""

    def __init__(self) -> None:
        self.known = KnownColumns("samples", NAMES)
        self.decoded: list[str] = []
        self.refuses = ""

    def check(self, _: pa.RecordBatch, decoded: pa.RecordBatch) -> None:
        """Takes note; raises where a column that is refused is among those that were decoded."""
        self.decoded = decoded.schema.names
        if self.refuses in self.decoded:
            raise ValueError(self.refuses)

    def read(self, data: bytes, group: int = 0) -> DecodedRows:
        """Returns a row group."""
        self.decoded = []
        with pq.ParquetFile(pa.BufferReader(data), read_dictionary=["state"]) as file:
            return self.known.read(file, data, group, self.check)


def part(*, schema: pa.Schema = SAMPLES, groups: int = 1, **changed: Any) -> bytes:
    """Returns a part in which all but the named columns are always the same."""
    columns: dict[str, Any] = {name: [0] * ROWS for name in schema.names}
    columns |= {"process": ["1a2b3c4d"] * ROWS, "state": list("ababab")}
    columns |= {"sample_id": list(range(ROWS)), "attempt": [None, *range(1, ROWS)]} | changed
    table = pa.table(
        {field.name: pa.array(columns[field.name], field.type) for field in schema}, schema=schema
    )
    sink = io.BytesIO()
    with open_part_writer(sink, schema) as writer:
        for _ in range(groups):
            writer.write_table(table)
    return sink.getvalue()


def whole(data: bytes, group: int = 0) -> list[dict[str, Any]]:
    """Returns the rows as pyarrow reads them."""
    return pq.ParquetFile(io.BytesIO(data)).read_row_group(group, list(NAMES)).to_pylist()


def test_equal_bytes_are_decoded_once() -> None:
    """Of a second part only what differs is decoded, and what is always new; the rows are its own."""
    reader = Reader()
    first, second = part(), part(rank=[1] * ROWS)
    assert reader.read(first).batch.to_pylist() == whole(first)
    assert reader.decoded == list(NAMES)
    found = reader.read(second)
    assert found.batch.to_pylist() == whole(second)
    assert found.batch.schema.names == list(NAMES)
    assert reader.decoded == ["rank", "started_at"]
    assert reader.read(part(groups=2), 1).batch.to_pylist() == whole(first)
    assert reader.decoded == ["started_at"]
    reader.known.clear()
    assert reader.read(first).batch.to_pylist() == whole(first)
    assert reader.decoded == list(NAMES)


@pytest.mark.parametrize("nullable", [False, True])
def test_equal_bytes_of_another_kind_are_decoded(nullable: bool) -> None:
    """Columns of a file with other declarations are never taken for known, however equal their bytes."""
    reader = Reader()
    reader.read(part())
    place = SAMPLES.get_field_index("rank")
    other = part(schema=SAMPLES.set(place, SAMPLES.field(place).with_nullable(nullable)))
    assert reader.read(other).batch.to_pylist() == whole(other)
    assert ("sample_id" in reader.decoded) == nullable


def test_a_column_that_was_refused_is_not_known() -> None:
    """What a check raises for is decoded, and checked, each time."""
    reader = Reader()
    reader.refuses = "attempt"
    for _ in range(2):
        with pytest.raises(ValueError, match="attempt"):
            reader.read(part())
        assert reader.decoded == list(NAMES)
    reader.refuses = "started_at"
    reader.known.clear()
    with pytest.raises(ValueError, match="started_at"):
        reader.read(part())
    reader.refuses = ""
    reader.read(part())
    assert reader.decoded == list(NAMES)


def test_damage_shows_in_known_columns_too() -> None:
    """A byte that changed in a page makes other bytes, which are decoded and do not pass their checksum."""
    reader = Reader()
    data = part()
    reader.read(data)
    place = SAMPLES.get_field_index("sample_id")
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(place)
    damaged = bytearray(data)
    damaged[column.dictionary_page_offset + column.total_compressed_size - 1] ^= 1
    with (
        pq.ParquetFile(
            pa.BufferReader(bytes(damaged)), read_dictionary=["state"], page_checksum_verification=True
        ) as file,
        pytest.raises(OSError, match=r"(?i)crc|checksum"),
    ):
        reader.known.read(file, bytes(damaged), 0, reader.check)


@pytest.mark.parametrize("name", ["started_at", "sample_id"])
def test_what_is_damaged_is_told_as_of_a_part_of_which_nothing_is_known(name: str) -> None:
    """A column that its footer cuts off leaves no row, and no trace, whatever else is known."""
    reader = Reader()
    data = part()
    reader.read(data)
    place = SAMPLES.get_field_index(name)
    cut = without_bytes(data, name, pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(place))
    assert reader.read(cut).batch.num_rows == Reader().read(cut).batch.num_rows == 0
    assert reader.read(data).batch.to_pylist() == whole(data)


def without_bytes(data: bytes, name: str, column: pq.ColumnChunkMetaData) -> bytes:
    """Returns a part whose footer says of a column that it takes no bytes."""
    size = varint(column.total_compressed_size)
    path = b"\x19\x18" + bytes([len(name)]) + name.encode() + b"\x15"
    place = data.index(b"\x16" + size, data.index(path, data.rindex(b"PAR1", 0, -4)) + len(path) + 4)
    found = bytes([0x80] * (len(size) - 1)) + b"\x00"
    return data[: place + 1] + found + data[place + 1 + len(size) :]


def varint(number: int) -> bytes:
    """Returns a number as the footer has it."""
    rest, found = 2 * number, b""
    while rest >= 128:
        rest, found = rest >> 7, found + bytes([rest & 127 | 128])
    return found + bytes([rest])


def test_offsets_beyond_the_file_are_left_to_the_decoder() -> None:
    """A column that its footer places beyond the bytes is not compared with anything."""
    reader = Reader()
    data = part()
    reader.read(data)
    with pq.ParquetFile(pa.BufferReader(data), read_dictionary=["state"]) as file:
        rows = reader.known.read(file, data[:8], 0, reader.check)
    assert rows.batch.to_pylist() == whole(data)
    assert reader.decoded == list(NAMES)
    assert rows.made(("rank",), count) is not rows.made(("rank",), count)


def count(batch: pa.RecordBatch) -> list[int]:
    """Returns a new object."""
    return [batch.num_rows]


def count_again(batch: pa.RecordBatch) -> list[int]:
    """Returns what `count` does."""
    return count(batch)


def test_what_is_made_of_known_columns_is_made_once() -> None:
    """The same columns give the same object; others, another function and unknown columns a new one."""
    reader = Reader()
    first, second = reader.read(part()), reader.read(part(rank=[1] * ROWS))
    made = first.made(("sample_id", "state"), count)
    assert second.made(("sample_id", "state"), count) is made
    assert second.made(("sample_id", "rank"), count) is not first.made(("sample_id", "rank"), count)
    assert second.made(("sample_id", "state"), count_again) is not made
    assert second.made(("started_at",), count) is not second.made(("started_at",), count)


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that were longest not met are decoded again, and things made of them are made again."""
    reader = Reader()
    first = reader.read(part())
    made = first.made(("rank",), count)
    monkeypatch.setattr(known_columns, "MAX_MADE", 2)
    monkeypatch.setattr(known_columns, "MAX_KNOWN_BYTES", 1000)
    for rank in range(1, 40):
        reader.read(part(rank=[rank] * ROWS)).made(("rank",), count)
    assert first.made(("rank",), count) is not made
    again = reader.read(part())
    assert "rank" in reader.decoded
    assert "sample_id" not in reader.decoded
    assert again.batch.to_pylist() == whole(part())
