"""Columns of samples, steps and fingerprints, and what every table has in common."""

import io
from collections import Counter

import pyarrow.parquet as pq

from torchinstruments.store import layout, schema
from torchinstruments.store.columns import (
    Origin,
    fingerprints_columns,
    samples_columns,
    steps_columns,
)
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.parts import encode_columns
from unit.store.material import (
    attempt,
    fingerprint,
    forward,
    measurement,
    rows_of,
    sample_row,
)

ORIGIN = Origin(3, 7, "1a2b3c4d")
METADATA = schema.metadata(
    schema_version=1, run_id="run-1", generation=3, rank=7, process="1a2b3c4d", world_size=8
)


def test_every_table_reads_back_with_exactly_the_declared_schema() -> None:
    """Dictionaries are a matter of encoding: the file has the declared types and nullability."""
    tables = {
        "history": history_columns([(0, forward(0, measurement()))], ORIGIN),
        "samples": samples_columns([sample_row(0)], ORIGIN),
        "steps": steps_columns([attempt(0)], ORIGIN),
        "fingerprints": fingerprints_columns([fingerprint(0)], ORIGIN),
    }

    assert set(tables) == set(layout.TABLES)
    for name, columns in tables.items():
        found = pq.read_schema(io.BytesIO(encode_columns(columns, METADATA))).remove_metadata()
        assert found.equals(schema.TABLE_SCHEMAS[name]), name


def test_samples_are_stored_by_id_with_all_their_sums() -> None:
    """Rows of ``samples`` hold what was summed, in the order of ids."""
    rows = rows_of(samples_columns([sample_row(2), sample_row(1)], ORIGIN))

    assert [row["sample_id"] for row in rows] == [1, 2]
    assert {name: rows[0][name] for name in ("state", "num_backwards", "collection_backward_s", "rows")} == {
        "state": "backward_observed",
        "num_backwards": 2,
        "collection_backward_s": 0.5,
        "rows": 18,
    }
    assert rows[0]["generation"] == 3
    assert rows[0]["rank"] == 7


def test_steps_are_stored_by_attempt_and_optimizer_with_nulls_where_nothing_is_known() -> None:
    """An attempt without a scaler has null scales; its outcome and learning rate are there."""
    rows = rows_of(steps_columns([attempt(1), attempt(0, 1, lr=None), attempt(0, 0)], ORIGIN))

    assert [(row["attempt"], row["optimizer"], row["lr"]) for row in rows] == [
        (0, 0, 0.1),
        (0, 1, None),
        (1, 0, 0.1),
    ]
    assert Counter(row["outcome"] for row in rows) == {"applied": 3}
    assert {row["scale_before"] for row in rows} == {None}


def test_fingerprints_are_stored_by_attempt_with_digests_of_all_64_bits() -> None:
    """In an attempt they stay in the order of the model; a row group holds whole attempts."""
    records = [fingerprint(at, name) for at in (1, 0) for name in ("0.weight", "0.bias")]
    columns = fingerprints_columns([*records, fingerprint(1, "1.weight", 0)], ORIGIN)

    assert [(row["attempt"], row["tensor"], row["digest"]) for row in rows_of(columns)] == [
        (0, "0.weight", 2**64 - 1),
        (0, "0.bias", 2**64 - 1),
        (1, "0.weight", 2**64 - 1),
        (1, "0.bias", 2**64 - 1),
        (1, "1.weight", 0),
    ]
    first = rows_of(columns)[0]
    assert (first["kind"], first["replica_key"], first["shape"]) == ("parameter", "ddp ranks=0-2", "4x2")
    assert (first["dtype"], first["rank"], columns.group_rows) == ("float32", 7, (5,))
