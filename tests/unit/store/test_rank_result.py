"""The shape of a process's ``result.json``."""

import dataclasses
import json
from typing import Any

import pytest

from torchinstruments.records import ModuleRecord, Sample, Signal
from torchinstruments.store.columns import Origin
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.rank_result import encode_catalog, encode_result
from torchinstruments.store.running_summary import RunningSummary
from torchinstruments.store.summaries import SeriesSummaries
from unit.store.material import backward, forward, measurement, module


def summaries_of(*deliveries: Sample) -> SeriesSummaries:
    """Returns the summaries of some deliveries."""
    summary = RunningSummary(20)
    for one in deliveries:
        summary.add(history_columns([(one.ordinal, one)], Origin(0, 0, "1a2b3c4d")).table)
    return summary.finish()


def decoded(data: bytes) -> Any:
    """Returns what strict JSON holds."""
    return json.loads(data, parse_constant=pytest.fail)


def test_all_selected_layers_are_listed_by_name() -> None:
    """One that was never called has no tensors, and aliases stand beside a name."""
    modules = [module(0), module(1), ModuleRecord("a", "ReLU", ("b", "c"), 0, 0)]

    found = decoded(encode_result(modules, summaries_of(forward(0, measurement(0))), {}))

    assert [(one["layer"], len(one["tensors"])) for one in found] == [
        ("a", 0),
        ("layer98", 0),
        ("layer99", 1),
    ]
    assert found[0] == {"layer": "a", "type": "ReLU", "aliases": ["b", "c"], "tensors": []}


def test_at_attach_nothing_is_measured() -> None:
    """The catalog has the same records without tensors."""
    assert decoded(encode_catalog([module(1), module(0)])) == decoded(
        encode_result([module(0), module(1)], summaries_of(), {})
    )


def test_a_tensor_has_the_fields_of_the_specification_in_their_order() -> None:
    """Names, order and types are those that programs read."""
    (layer,) = decoded(encode_result([module(0)], summaries_of(forward(0, measurement(0))), {}))

    assert list(layer) == ["layer", "type", "aliases", "tensors"]
    (tensor,) = layer["tensors"]
    assert list(tensor) == ["call_index", "signal", "tensor_path", "latest_shape", "dtype", "statistics"]
    assert (tensor["latest_shape"], tensor["dtype"]) == ([8, 1024], "float32")
    assert [one["metric"] for one in tensor["statistics"]] == ["mean", "std", "zero_fraction"]
    assert list(tensor["statistics"][0]) == [
        "metric",
        "observations",
        "unavailable_observations",
        "first",
        "latest",
        "minimum",
        "maximum",
        "previous_window",
        "recent_window",
    ]
    assert list(tensor["statistics"][0]["first"]) == ["sample_id", "timestamp", "value", "unavailable_reason"]
    assert list(tensor["statistics"][0]["recent_window"]) == [
        "observations",
        "valid_observations",
        "mean",
        "unavailable_reason",
    ]


def test_tensors_are_sorted_by_call_signal_and_path() -> None:
    """Calls come one after another, outputs before gradients, paths by name."""
    outputs = [
        measurement(0, call_index=call, tensor_path=path)
        for call in (1, 0)
        for path in ("output.b", "output.a")
    ]
    summaries = summaries_of(forward(0, *outputs), backward(0, measurement(0, Signal.OUTPUT_GRADIENT)))

    (layer,) = decoded(encode_result([module(0)], summaries, {}))

    assert [(one["call_index"], one["signal"], one["tensor_path"]) for one in layer["tensors"]] == [
        (0, "output", "output.a"),
        (0, "output", "output.b"),
        (0, "output_gradient", "grad_output"),
        (1, "output", "output.a"),
        (1, "output", "output.b"),
    ]


def test_a_stage_is_told_where_there_is_one() -> None:
    """Outputs have none, and no field for it."""
    staged = dataclasses.replace(measurement(0), stage="reduced")

    (layer,) = decoded(encode_result([module(0)], summaries_of(forward(0, measurement(0), staged)), {}))

    assert [one.get("stage") for one in layer["tensors"]] == [None, "reduced"]


def test_the_shape_is_that_of_the_newest_row_of_any_statistic() -> None:
    """A statistic that was last seen earlier does not bring its old shape; a scalar has none."""
    early = measurement(0, metrics=("extra",), values=(1.0,), shape=(2, 3))
    late = measurement(0, metrics=("mean",), values=(1.0,), shape=())

    (layer,) = decoded(encode_result([module(0)], summaries_of(forward(0, early), forward(1, late)), {}))

    (tensor,) = layer["tensors"]
    assert tensor["latest_shape"] == []
    assert len(tensor["statistics"]) == 2


def test_rows_without_a_summary_are_told_by_layer() -> None:
    """A layer with none left out has no such field."""
    summaries = summaries_of(forward(0, measurement(0)))

    found = decoded(encode_result([module(0), module(1)], summaries, {"layer98": 7}))

    assert [one.get("rows_left_out") for one in found] == [7, None]


def test_it_is_given_up_when_time_is_over() -> None:
    """Half a document is never returned."""
    answers = iter([True, False])

    with pytest.raises(TimeoutError, match="1 of 2 layers"):
        encode_result([module(0), module(1)], summaries_of(), {}, lambda: next(answers))


def test_a_layer_that_cannot_be_written_does_not_cost_the_others() -> None:
    """It stands there with its rows as left out, and who asked is told which it was and why."""
    odd = dataclasses.replace(measurement(1), shape=("j1", 2))  # type: ignore[arg-type]
    told: list[tuple[str, str]] = []

    found = decoded(
        encode_result(
            [module(0), module(1)],
            summaries_of(forward(0, measurement(0), odd), forward(1, odd)),
            {"layer98": 4},
            on_error=lambda layer, error: told.append((layer, type(error).__name__)),
        )
    )

    assert [(one["layer"], len(one["tensors"]), one.get("rows_left_out")) for one in found] == [
        ("layer98", 0, 4 + 2 * len(odd.metrics)),
        ("layer99", 1, None),
    ]
    assert told == [("layer98", "ValueError")]
