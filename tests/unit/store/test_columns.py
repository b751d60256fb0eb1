"""Columns of samples, steps and fingerprints, and what every table has in common."""

import io
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.store import layout, schema
from torchinstruments.store.columns import (
    Origin,
    columns_of,
    fingerprints_columns,
    samples_columns,
    steps_columns,
    table_of,
)
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.parts import encode_columns
from unit.store.material import (
    attempt,
    fingerprint,
    forward,
    measurement,
    position,
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


def test_samples_of_nothing_have_the_declared_columns() -> None:
    """No row is no reason for other columns."""
    columns = samples_columns([], ORIGIN)

    assert columns.table.schema.equals(schema.IN_MEMORY["samples"])
    assert columns.table.num_rows == 0


def test_samples_are_stored_where_no_attempt_is_known() -> None:
    """What nobody knows is null, beside rows where it is known."""
    unknown = replace(sample_row(1), position=position(attempt=None, micro_batch=None))
    rows = rows_of(samples_columns([sample_row(0), unknown], ORIGIN))

    assert [(row["attempt"], row["micro_batch"]) for row in rows] == [(0, 0), (None, None)]


def test_the_rows_of_a_matrix_become_columns() -> None:
    """Each row by itself, however the matrix lies in memory."""
    matrix = np.arange(6, dtype=np.int32).reshape(3, 2)

    assert [column.to_pylist() for column in columns_of(matrix.T)] == [[0, 2, 4], [1, 3, 5]]
    assert [column.to_pylist() for column in columns_of(matrix)] == [[0, 1], [2, 3], [4, 5]]


def test_a_table_of_columns_has_the_declared_fields() -> None:
    """Made in the quick way it is the table that Arrow makes and checks."""
    made = samples_columns([sample_row(0), sample_row(1)], ORIGIN).table
    columns = [column.chunk(0) for column in made.columns]

    assert table_of(columns, "samples").equals(
        pa.Table.from_arrays(columns, schema=schema.in_memory(schema.SAMPLES)), check_metadata=True
    )
    made.validate(full=True)
