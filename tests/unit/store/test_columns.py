"""Columns against rows that are made one by one."""

import io
from collections import Counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.records import Measurement, Sample, Signal
from torchinstruments.store import layout, schema
from torchinstruments.store.columns import (
    Columns,
    Origin,
    fingerprints_columns,
    samples_columns,
    steps_columns,
)
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.parts import encode_columns
from unit.store.material import (
    METRICS,
    START_US,
    attempt,
    backward,
    fingerprint,
    forward,
    measurement,
    sample_row,
)

ORIGIN = Origin(3, 7, "1a2b3c4d")
METADATA = schema.metadata(
    schema_version=1, run_id="run-1", generation=3, rank=7, process="1a2b3c4d", world_size=8
)


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """Returns the rows as a reader of the file gets them."""
    return pq.read_table(io.BytesIO(encode_columns(columns, METADATA))).to_pylist()


def reference(deliveries: list[tuple[int, Sample]]) -> list[dict[str, object]]:
    """Returns the rows of ``history`` one by one, in the declared order."""
    keyed: list[tuple[tuple[object, ...], dict[str, object]]] = []
    for sample_id, sample in deliveries:
        for one in sample.measurements:
            for metric, value, reason in zip(one.metrics, one.values, one.reasons, strict=True):
                row: dict[str, object] = {
                    "generation": 3,
                    "rank": 7,
                    "process": "1a2b3c4d",
                    "sample_id": sample_id,
                    "attempt": sample.position.attempt,
                    "forward_in_attempt": sample.position.forward_in_attempt,
                    "micro_batch": sample.position.micro_batch,
                    "step_provenance": "inferred",
                    "forward_index": sample.position.forward_index,
                    "timestamp": one.timestamp_us,
                    "layer": one.layer,
                    "call_index": one.call_index,
                    "signal": str(one.signal),
                    "stage": one.stage,
                    "tensor_path": one.tensor_path,
                    "backward_index": one.backward_index,
                    "mode": one.mode,
                    "grad_enabled": one.grad_enabled,
                    "grad_sync": str(sample.grad_sync),
                    "loss_scale": sample.loss_scale,
                    "scale_provenance": str(sample.scale_provenance),
                    "scope": "local",
                    "replica_key": "",
                    "execution": "eager",
                    "shape": "x".join(map(str, one.shape)),
                    "dtype": one.dtype,
                    "device": one.device,
                    "metric": metric,
                    "value": value,
                    "unavailable_reason": reason,
                }
                key = (
                    sample_id,
                    one.layer_index,
                    one.call_index,
                    str(one.signal),
                    one.stage,
                    one.tensor_path,
                )
                keyed.append(((*key, one.backward_index, metric), row))
    return [row for _, row in sorted(keyed, key=_first)]


def _first(entry: tuple[Any, object]) -> Any:
    return entry[0]


def with_integer_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with their timestamps as microseconds."""
    for row in rows:
        row["timestamp"] = int(np.datetime64(row["timestamp"].replace(tzinfo=None), "us").astype(np.int64))
    return rows


def _with_values(one: Measurement) -> Measurement:
    values = [
        float(len(one.layer) + index) if (index + one.layer_index) % 3 else None
        for index in range(len(one.metrics))
    ]
    reasons = ["" if value is not None else f"empty: {one.call_index}" for value in values]
    return measurement(
        one.layer_index,
        one.signal,
        call_index=one.call_index,
        backward_index=one.backward_index,
        timestamp_us=one.timestamp_us,
        tensor_path=one.tensor_path,
        shape=one.shape,
        metrics=one.metrics,
        values=values,
        reasons=reasons,
    )


measurements = st.builds(
    measurement,
    layer=st.integers(0, 20),
    signal=st.sampled_from(list(Signal)),
    call_index=st.integers(0, 3),
    backward_index=st.integers(0, 2),
    timestamp_us=st.integers(0, 2 * START_US),
    tensor_path=st.sampled_from(["output", "output.0", "output.logits"]),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    metrics=st.sampled_from([METRICS, ("rms",), ("b", "a")]),
).map(_with_values)


def _distinct(found: list[Measurement]) -> list[Measurement]:
    seen: set[tuple[object, ...]] = set()
    kept: list[Measurement] = []
    for one in found:
        key = (one.layer, one.call_index, one.signal, one.tensor_path, one.backward_index)
        if key not in seen:
            seen.add(key)
            kept.append(one)
    return kept


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(measurements, max_size=6)), max_size=4))
def test_history_equals_rows_made_one_by_one_and_sorted(drawn: list[tuple[int, list[Measurement]]]) -> None:
    """Whatever was measured, the columns hold the same rows as a plain loop, in the declared order."""
    per_sample: dict[int, list[Measurement]] = {}
    for ordinal, found in drawn:
        per_sample.setdefault(ordinal, []).extend(found)
    deliveries: list[tuple[int, Sample]] = []
    for ordinal, found in per_sample.items():
        distinct = _distinct(found)
        half = len(distinct) // 2
        deliveries.append(
            (ordinal, forward(ordinal, *distinct[:half], attempt=None if ordinal == 2 else ordinal))
        )
        deliveries.append((ordinal, backward(ordinal, *distinct[half:])))

    rows = rows_of(history_columns(deliveries, ORIGIN))

    assert with_integer_times(rows) == reference(deliveries)


def test_history_of_nothing_has_no_rows_and_no_row_group() -> None:
    """A buffer without measurements gives an empty table of the declared columns."""
    columns = history_columns([], ORIGIN)

    assert columns.group_rows == ()
    assert columns.table.schema.names == schema.HISTORY.names


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


def test_the_backward_of_a_sample_lies_beside_its_forward() -> None:
    """Deliveries that came apart are together in the part, an output before its gradient."""
    deliveries = [
        (0, forward(0, measurement(0), measurement(1))),
        (1, forward(1, measurement(0))),
        (0, backward(0, measurement(1, Signal.OUTPUT_GRADIENT), measurement(0, Signal.OUTPUT_GRADIENT))),
    ]

    rows = rows_of(history_columns(deliveries, ORIGIN))

    assert [(row["sample_id"], row["layer"], row["signal"]) for row in rows[::3]] == [
        (0, "layer99", "output"),
        (0, "layer99", "output_gradient"),
        (0, "layer98", "output"),
        (0, "layer98", "output_gradient"),
        (1, "layer99", "output"),
    ]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_a_missing_or_nonfinite_value_without_a_reason_gets_one(value: float | None) -> None:
    """No null stands bare, and no NaN or infinity is stored."""
    one = measurement(metrics=("mean", "std"), values=(value, 1.0))

    rows = rows_of(history_columns([(0, forward(0, one))], ORIGIN))

    assert [(row["value"], row["unavailable_reason"]) for row in rows] == [
        (None, "nonfinite_result"),
        (1.0, ""),
    ]


def test_a_value_beside_a_reason_is_not_stored() -> None:
    """A reason says that there is no value, so that a reader need look at one of the two only."""
    one = measurement(metrics=("mean",), values=(1.0,), reasons=("overflow",))

    rows = rows_of(history_columns([(0, forward(0, one))], ORIGIN))

    assert [(row["value"], row["unavailable_reason"]) for row in rows] == [(None, "overflow")]


def test_a_measurement_with_too_few_values_is_refused() -> None:
    """A shifted column would be worse than a lost row."""
    one = measurement(values=(1.0,))

    with pytest.raises(ValueError, match="one value and one reason for each"):
        history_columns([(0, forward(0, one))], ORIGIN)


def test_row_groups_end_at_a_samples_end() -> None:
    """As many whole samples as fit into 36,000 rows make a row group."""
    names = tuple(f"m{index}" for index in range(1000))
    large = [measurement(layer, metrics=names, values=(1.0,) * 1000) for layer in range(17)]

    columns = history_columns([(ordinal, forward(ordinal, *large)) for ordinal in range(5)], ORIGIN)

    assert columns.group_rows == (34_000, 34_000, 17_000)


def test_a_sample_larger_than_a_row_group_is_split_by_itself() -> None:
    """Only such a sample crosses a row group's end."""
    names = tuple(f"m{index}" for index in range(1000))
    huge = [measurement(layer, metrics=names, values=(1.0,) * 1000) for layer in range(40)]

    columns = history_columns([(0, forward(0, measurement())), (1, forward(1, *huge))], ORIGIN)

    assert columns.group_rows == (3, 36_000, 4_000)
    assert sum(columns.group_rows) == columns.table.num_rows


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
