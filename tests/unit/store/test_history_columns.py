"""Columns of ``history`` against rows that are made one by one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.records import KeptFrames, Measurement, Sample, Signal
from torchinstruments.store import schema
from torchinstruments.store.columns import Origin
from torchinstruments.store.history_columns import HistoryColumns, history_columns
from torchinstruments.store.row_blocks import row_block
from unit.store.material import METRICS, START_US, backward, forward, measurement, rows_of, with_columns

ORIGIN = Origin(3, 7, "1a2b3c4d")


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


def _deliveries(drawn: list[tuple[int, list[Measurement]]]) -> list[tuple[int, Sample]]:
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
    return deliveries


def _later(deliveries: list[tuple[int, Sample]]) -> list[tuple[int, Sample]]:
    """Returns the same measurements of later samples: other numbers and times, all of them there."""
    return [
        (
            sample_id + 10,
            replace(
                sample,
                ordinal=sample.ordinal + 10,
                loss_scale=2.0,
                measurements=tuple(
                    replace(
                        one,
                        timestamp_us=one.timestamp_us + 1,
                        shape=(*one.shape, 7),
                        values=tuple(range(len(one.values))),
                        reasons=("",) * len(one.reasons),
                    )
                    for one in sample.measurements
                ),
            ),
        )
        for sample_id, sample in deliveries
    ]


_parts = st.lists(st.tuples(st.integers(0, 3), st.lists(measurements, max_size=6)), max_size=4).map(
    _deliveries
)


@settings(deadline=None)
@given(st.lists(_parts, min_size=1, max_size=3))
def test_history_equals_rows_made_one_by_one_and_sorted(parts: list[list[tuple[int, Sample]]]) -> None:
    """Whatever was measured before, as objects or as columns, there are the rows of a plain loop."""
    made, frames = HistoryColumns(ORIGIN), KeptFrames()

    for part in (*parts, *map(_later, parts), *parts):
        found = with_integer_times(rows_of(made.make(part)))
        assert found == reference(part)
        as_columns = [(sample_id, with_columns(sample, frames)) for sample_id, sample in part]
        assert with_integer_times(rows_of(made.make(as_columns))) == found


def test_what_parts_have_in_common_is_bounded() -> None:
    """Of parts that all differ only the last few are kept, and of very large ones none."""
    made = HistoryColumns(ORIGIN)
    for layer in range(10):
        made.make([(0, forward(0, measurement(layer)))])
    assert len(made._layouts) == 4

    names = tuple(f"m{index}" for index in range(73_000))
    made.make([(0, forward(0, measurement(metrics=names, values=(1.0,) * len(names))))])
    assert len(made._layouts) == 0


def test_history_of_nothing_has_no_rows_and_no_row_group() -> None:
    """A buffer without measurements gives an empty table of the declared columns."""
    columns = history_columns([], ORIGIN)

    assert columns.group_rows == ()
    assert columns.table.schema.names == schema.HISTORY.names


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


@pytest.mark.parametrize("what", ["values", "reasons"])
def test_one_with_too_few_is_refused_beside_one_with_too_many(what: str) -> None:
    """All together they are as many as the metrics, and would stand in the wrong rows."""
    whole = [measurement(layer, metrics=("a", "b", "c")) for layer in (1, 2)]
    pair = [
        replace(one, values=(1.0,) * (2 * one.layer_index))
        if what == "values"
        else replace(one, reasons=("empty",) * (2 * one.layer_index))
        for one in whole
    ]

    with pytest.raises(ValueError, match="one value and one reason for each"):
        history_columns([(0, forward(0, *pair))], ORIGIN)


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


def test_rows_as_arrays_are_those_of_the_table() -> None:
    """What summaries fold is what a reader of the part folds, where values are missing too."""
    odd = measurement(values=(1.0, None, float("inf")))
    part = [(0, forward(0, odd)), (1, replace(forward(1, odd), loss_scale=float("inf")))]
    columns = history_columns(part, ORIGIN)

    assert columns.keyed is not None
    found, expected = columns.keyed.block, row_block(columns.table.to_batches()[0], np.zeros(0, np.int64))
    for name in ("sample_id", "timestamp_us", "value", "loss_scale"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), strict=True)
    assert found.reason.to_pylist() == expected.reason.to_pylist()
    assert {name: column.to_pylist() for name, column in found.latest.items()} == {
        name: column.to_pylist() for name, column in expected.latest.items()
    }


def test_scales_of_zero_with_different_signs_are_not_taken_for_each_other() -> None:
    """A column is used again only for the same bits."""
    made = HistoryColumns(ORIGIN)
    for scale in (0.0, -0.0, None, 0.0):
        part = [(0, replace(forward(0, measurement()), loss_scale=scale))]
        scales = made.make(part).table.column("loss_scale").to_pylist()
        assert [repr(one) for one in scales] == [repr(scale)] * len(METRICS)
