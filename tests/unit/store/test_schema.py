"""The declared tables and the metadata of a part."""

import pyarrow as pa
import pytest

from torchinstruments.store import layout, schema


def test_every_table_of_the_layout_has_a_schema() -> None:
    """A folder for parts exists exactly where a schema does."""
    assert set(layout.TABLES) == set(schema.TABLE_SCHEMAS)


@pytest.mark.parametrize("table", layout.TABLES)
def test_every_table_begins_with_who_its_rows_are_of(table: str) -> None:
    """Rows of all ranks can lie in one frame."""
    assert schema.TABLE_SCHEMAS[table].names[:3] == ["generation", "rank", "process"]


def test_what_makes_a_series_is_a_column_of_history_and_never_null() -> None:
    """A key that may be missing is no key."""
    for name in schema.KEY_COLUMNS:
        assert not schema.HISTORY.field(name).nullable


def test_times_are_microseconds_in_utc() -> None:
    """Every timestamp of every table has the same type."""
    found = {
        field.type
        for declared in schema.TABLE_SCHEMAS.values()
        for field in declared
        if pa.types.is_timestamp(field.type)
    }

    assert found == {pa.timestamp("us", tz="UTC")}


def test_metadata_takes_exactly_its_names() -> None:
    """A part without its rank cannot be written."""
    with pytest.raises(TypeError, match="metadata takes"):
        schema.metadata(schema_version=1)


def test_metadata_of_others_is_left_out() -> None:
    """Entries without our prefix, and bytes that are no text, do no harm."""
    raw = {
        b"torchinstruments.rank": b"7",
        b"ARROW:schema": b"x",
        b"\xff": b"\xff",
        b"torchinstruments.x": b"\xff",
    }

    assert schema.parse_metadata(raw) == {"rank": "7", "x": "\ufffd"}
    assert schema.parse_metadata(None) == {}
