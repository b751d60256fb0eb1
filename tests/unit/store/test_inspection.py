"""Footers of sound, broken, foreign and hostile files."""

import contextlib
import io
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchinstruments.store import inspection, schema
from torchinstruments.store.columns import Columns, Origin
from torchinstruments.store.documents import UnusableFileError
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.inspection import Expected, inspect_file, inspect_part
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.parts import encode_columns, open_part_writer
from unit.store.material import forward, measurement

EXPECTED = Expected("history", "run-1", process="1a2b3c4d", rank=1)


def metadata(**changed: object) -> dict[bytes, bytes]:
    """Returns the metadata of a part of rank 1, with changes."""
    values = {
        "schema_version": 1,
        "run_id": "run-1",
        "generation": 2,
        "rank": 1,
        "process": "1a2b3c4d",
        "world_size": 4,
    }
    return schema.metadata(**{**values, **changed})


def columns(num_samples: int = 3) -> Columns:
    """Returns a few samples of rank 1."""
    samples = [
        (5 + ordinal, forward(ordinal, measurement(0), measurement(1))) for ordinal in range(num_samples)
    ]
    return history_columns(samples, Origin(2, 1, "1a2b3c4d"))


def part(**changed: object) -> bytes:
    """Returns a sound part, but for what was changed in its metadata."""
    return encode_columns(columns(), metadata(**changed))


def reason(data: bytes, expected: Expected = EXPECTED) -> str:
    """Returns why some bytes are refused."""
    with pytest.raises(UnusableFileError) as caught:
        inspect_file(io.BytesIO(data), expected)
    return caught.value.reason


def test_a_sound_part_tells_what_it_holds_from_its_footer() -> None:
    """Rank, generation, rows and the samples of each row group are known before a row is read."""
    info = inspect_file(io.BytesIO(part()), EXPECTED)

    assert (info.generation, info.rank, info.process, info.world_size) == (2, 1, "1a2b3c4d", 4)
    assert (info.num_rows, info.group_rows) == (18, (18,))
    assert (info.first_sample_ids, info.last_sample_ids) == ((5,), (7,))
    assert info.size_bytes == len(part())


def test_a_footer_longer_than_the_first_look_is_read_whole() -> None:
    """Many row groups make a long footer; it is read with a second look, not refused."""
    sink = pa.BufferOutputStream()
    table = columns(1).table
    with open_part_writer(sink, table.schema) as writer:
        for _ in range(40):
            writer.write_table(table)
        writer.add_key_value_metadata(metadata())
    data = sink.getvalue().to_pybytes()

    assert int.from_bytes(data[-8:-4], "little") > 64 * 2**10
    assert len(inspect_file(io.BytesIO(data), EXPECTED).group_rows) == 40


def test_an_empty_file_is_refused() -> None:
    """Zero bytes are what an interrupted copy leaves."""
    assert reason(b"") == "empty_file"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_part_that_was_cut_off_is_refused_as_truncated(share: float) -> None:
    """Wherever it ends, a beginning of a part is not mistaken for something else."""
    data = part()

    assert reason(data[: int(len(data) * share)]) == "truncated"


def test_a_part_without_its_beginning_is_refused_as_truncated() -> None:
    """A footer that claims to be longer than the file is not looked for."""
    assert reason(part()[-40:]) == "truncated"


@pytest.mark.parametrize("data", [b"x", b"hello, world", b"\x89PNG\r\n" * 100, b"{}" * 5000])
def test_what_never_was_parquet_is_refused_as_such(data: bytes) -> None:
    """Text and pictures among the parts are named as what they are not."""
    assert reason(data) == "not_parquet"


def test_garbage_between_two_magic_words_is_refused() -> None:
    """A footer that does not parse is no reason to fail."""
    footer = b"\xff" * 500

    assert reason(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1").startswith("not_parquet")


@pytest.mark.parametrize("position", range(0, 60, 7))
def test_a_flipped_byte_in_the_footer_never_raises_anything_else(position: int) -> None:
    """A damaged footer is refused or read, but never ends the reader."""
    data = bytearray(part())
    data[-9 - position * 50] ^= 0xFF

    with contextlib.suppress(UnusableFileError):
        assert inspect_file(io.BytesIO(bytes(data)), EXPECTED).process == "1a2b3c4d"


def test_an_unknown_schema_version_is_refused_by_its_number() -> None:
    """A newer writer's part is named as such."""
    assert reason(part(schema_version=99)) == "unknown_schema_version: 99"


def test_parquet_of_somebody_else_is_refused() -> None:
    """A file without our metadata has no schema version."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), sink)

    assert reason(sink.getvalue()) == "unknown_schema_version: none"


def test_a_part_of_another_run_is_refused_as_foreign() -> None:
    """Rows of two runs never mix."""
    assert reason(part(run_id="run-2")) == "foreign_run"


def test_a_part_in_another_ranks_folder_is_refused_as_misplaced() -> None:
    """The metadata and the folder have to agree on the rank."""
    assert reason(part(rank=0)) == "misplaced: it is of rank 0"


def test_a_part_under_another_processs_name_is_refused_as_misplaced() -> None:
    """The metadata and the file name have to agree on the process."""
    assert reason(part(process="ffffffff")) == "misplaced: it is of process ffffffff"


def test_metadata_that_is_no_number_is_refused() -> None:
    """A rank that is text does not become an exception of the reader."""
    assert reason(part(generation="two")) == "schema_mismatch: generation 'two' in the metadata"


def test_a_part_of_another_table_is_refused() -> None:
    """A part of history among the samples is named by what differs."""
    assert reason(part(), Expected("samples", "run-1")).startswith(
        "schema_mismatch: 30 columns where samples"
    )


def test_a_column_of_another_type_is_refused_by_name() -> None:
    """The first column that differs is told."""
    table = columns().table
    place = table.schema.get_field_index("call_index")
    changed = table.set_column(
        place, pa.field("call_index", pa.int64(), nullable=False), table.column(place).cast(pa.int64())
    )

    data = encode_columns(Columns(changed, (18,)), metadata())

    assert reason(data) == "schema_mismatch: call_index int64 where call_index int32 is due"


def test_a_footer_that_names_a_hundred_thousand_columns_is_refused_unparsed() -> None:
    """A few megabytes of footer would take hundreds to parse."""
    footer = b"\0" * (inspection.MAX_FOOTER_BYTES + 1)

    found = reason(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1")

    assert found == f"too_large: a footer of {len(footer)} bytes"


def test_a_row_group_with_more_rows_than_any_of_ours_is_refused() -> None:
    """A file that unpacks to a hundred million constant rows is small on disk."""
    rows = columns().table
    huge = pa.concat_tables([rows] * 2001).unify_dictionaries().combine_chunks()

    data = encode_columns(Columns(huge, (huge.num_rows,)), metadata())

    assert reason(data).startswith("too_large: row group 0 has 36018 rows")


def test_a_row_group_that_unpacks_to_too_much_is_refused() -> None:
    """A few kilobytes on disk may hold one text of a hundred megabytes."""
    one = measurement(metrics=("a",), values=(None,), reasons=("x" * (70 * 2**20),))

    data = encode_columns(history_columns([(5, forward(0, one))], Origin(2, 1, "1a2b3c4d")), metadata())

    assert len(data) < 2**20
    assert reason(data).startswith("too_large: row group 0 has 1 rows")


def test_a_part_that_is_gone_after_the_listing_is_refused(tmp_path: Path) -> None:
    """A file that vanished is set aside like a broken one."""
    with pytest.raises(UnusableFileError, match="unreadable: it is gone"):
        inspect_part(LocalStorage(str(tmp_path)), "part.parquet", EXPECTED, 100)


def test_a_part_is_inspected_through_its_storage(tmp_path: Path) -> None:
    """The bytes of a local file give the same answer as those in memory."""
    (tmp_path / "part.parquet").write_bytes(part())

    info = inspect_part(LocalStorage(str(tmp_path)), "part.parquet", EXPECTED, len(part()))

    assert info == inspect_file(io.BytesIO(part()), EXPECTED)
