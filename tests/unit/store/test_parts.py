"""The encoding of a part."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchinstruments.store import schema
from torchinstruments.store.columns import Columns, Origin
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.parts import encode_columns
from unit.store.material import forward, measurement

METADATA = schema.metadata(
    schema_version=1, run_id="run-1", generation=0, rank=0, process="1a2b3c4d", world_size=2
)


def encoded(num_samples: int = 3) -> bytes:
    """Returns a part with a few samples."""
    samples = [(ordinal, forward(ordinal, measurement(0), measurement(1))) for ordinal in range(num_samples)]
    return encode_columns(history_columns(samples, Origin(0, 0, "1a2b3c4d")), METADATA)


def test_the_metadata_of_a_part_says_whose_rows_it_holds() -> None:
    """Schema version, run, generation, rank, process and world size can be read without reading a row."""
    own = schema.parse_metadata(pq.read_metadata(io.BytesIO(encoded())).metadata)

    assert own == {
        "schema_version": "1",
        "run_id": "run-1",
        "generation": "0",
        "rank": "0",
        "process": "1a2b3c4d",
        "world_size": "2",
    }


def test_no_arrow_schema_is_stored() -> None:
    """Readers see text, not the dictionaries that the writer had in memory."""
    assert b"ARROW:schema" not in (pq.read_metadata(io.BytesIO(encoded())).metadata or {})


def test_keys_are_dictionaries_and_values_are_split_by_byte() -> None:
    """The encodings are those that the size of a part was measured with."""
    group = pq.read_metadata(io.BytesIO(encoded())).row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}

    assert "RLE_DICTIONARY" in columns["layer"].encodings
    assert "RLE_DICTIONARY" in columns["sample_id"].encodings
    assert "BYTE_STREAM_SPLIT" in columns["value"].encodings
    assert columns["value"].compression == "ZSTD"


def test_a_flipped_bit_is_noticed() -> None:
    """A page that does not hold what was written is refused, whichever bit of it differs."""
    data = encoded(20)
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    rows = pq.read_table(io.BytesIO(data))
    random = np.random.default_rng(0)
    noticed = 0
    for place in random.integers(4, len(data) - 8 - footer_bytes, 300).tolist():
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(random.integers(8))
        try:
            found = pq.ParquetFile(io.BytesIO(damaged), page_checksum_verification=True).read()
        except (OSError, pa.ArrowException):
            noticed += 1
        else:
            assert found.equals(rows)
    assert noticed > 200


def test_the_same_rows_give_the_same_bytes() -> None:
    """A part can be encoded again and uploaded again under the same name."""
    assert encoded() == encoded()


def test_a_reader_can_tell_the_samples_of_a_row_group_from_its_statistics() -> None:
    """The lowest and highest sample id stand in the footer."""
    column = pq.read_metadata(io.BytesIO(encoded(5))).row_group(0).column(3)

    assert column.path_in_schema == "sample_id"
    assert (column.statistics.min, column.statistics.max) == (0, 4)


def test_a_full_part_takes_a_few_bytes_a_scalar() -> None:
    """The footer and the keys of a part of 36,000 rows cost less than its values."""
    names = tuple(f"m{index}" for index in range(9))
    samples = [
        (
            ordinal,
            forward(
                ordinal,
                *(
                    measurement(
                        layer, metrics=names, values=[hash((ordinal, layer, n)) / 7 for n in range(9)]
                    )
                    for layer in range(40)
                ),
            ),
        )
        for ordinal in range(100)
    ]
    columns = history_columns(samples, Origin(0, 0, "1a2b3c4d"))

    assert columns.table.num_rows == 36_000
    assert len(encode_columns(columns, METADATA)) / 36_000 < 9


def test_arrow_tables_with_nulls_where_none_may_be_are_refused() -> None:
    """A broken row never becomes a file that lies about its schema."""
    columns = history_columns([(0, forward(0, measurement()))], Origin(0, 0, "1a2b3c4d"))
    broken = columns.table.set_column(
        3, columns.table.schema.field(3), pa.array([None] * columns.table.num_rows, pa.int64())
    )

    with pytest.raises((pa.ArrowInvalid, OSError), match="null"):
        encode_columns(Columns(broken, columns.group_rows), METADATA)


def test_encodings_do_not_depend_on_whether_a_schema_is_a_tables_own() -> None:
    """One that differs in metadata alone is encoded in the same way, into the same pages."""
    samples = [(0, forward(0, measurement(0)))]
    columns = history_columns(samples, Origin(0, 0, "1a2b3c4d"))
    assert columns.table.schema.equals(schema.IN_MEMORY["history"], check_metadata=True)
    nullable = pa.schema([field.with_nullable(True) for field in columns.table.schema])
    other = Columns(columns.table.cast(nullable), columns.group_rows)

    own, others = (
        pq.read_metadata(io.BytesIO(encode_columns(one, METADATA))).row_group(0) for one in (columns, other)
    )

    for place in range(own.num_columns):
        mine, its = own.column(place), others.column(place)
        assert (mine.compression, mine.is_stats_set) == (its.compression, its.is_stats_set)
        assert set(mine.encodings) <= set(its.encodings), mine.path_in_schema
