"""Scalars in a metric logger."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import KeptFrames, SampleState, Signal
from torchinstruments.sinks.metric_logger import MetricLoggerSink
from unit.store.material import (
    at_step,
    backward,
    claim,
    forward,
    identity,
    measurement,
    run_record,
    with_columns,
)


class KeepingLogger:
    """Keeps what it is given; fails a test that would end it."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keeps metrics and step."""
        self.logged.append((dict(metrics), step))

    def finalize(self, status: str) -> None:
        """Belongs to the caller."""
        raise AssertionError(status)

    save = close = flush = finalize


def sample_of(ordinal: int = 0):
    """Returns a forward of two layers with a missing value, and its backward."""
    outputs = (
        measurement(0, values=(0.0, 1.5, None), reasons=("", "", "overflow")),
        measurement(1, call_index=2, tensor_path="output.a/b"),
    )
    return forward(ordinal, *outputs), backward(ordinal, measurement(0, Signal.OUTPUT_GRADIENT))


def test_a_sample_is_logged_once_for_its_forward_and_once_for_its_backward() -> None:
    """Names are those of the documentation; the two share none but the step."""
    logger = KeepingLogger()
    sink = MetricLoggerSink(logger)
    sink.initialize(run_record(), ())
    frames = KeptFrames()
    for delivery in (*sample_of(), *(with_columns(one, frames) for one in sample_of())):
        sink.observe(delivery)
    sink.close()

    (outputs, first_step), (gradients, second_step) = logger.logged[:2]
    assert logger.logged[2:] == logger.logged[:2]  # the same of objects and of columns
    assert outputs == {
        "torchinstruments/modules/layer99/call_0/output/zero_fraction": 0.0,
        "torchinstruments/modules/layer99/call_0/output/mean": 1.5,
        "torchinstruments/modules/layer98/call_2/output.a%2Fb/zero_fraction": 0.0,
        "torchinstruments/modules/layer98/call_2/output.a%2Fb/mean": 1.5,
        "torchinstruments/modules/layer98/call_2/output.a%2Fb/std": -2.25,
        "torchinstruments/observer/forward_collection_duration_ms": 250.0,
    }
    assert gradients == {
        "torchinstruments/modules/layer99/call_0/grad_output/zero_fraction": 0.0,
        "torchinstruments/modules/layer99/call_0/grad_output/mean": 1.5,
        "torchinstruments/modules/layer99/call_0/grad_output/std": -2.25,
        "torchinstruments/observer/total_collection_duration_ms": 750.0,
    }
    assert (first_step, second_step) == (0, 0)


def test_steps_are_sample_ids() -> None:
    """A second generation goes on where no id of the first is."""
    logger = KeepingLogger()
    sink = MetricLoggerSink(logger)
    sink.place(identity(), claim(2))
    sink.observe(forward(3))
    assert logger.logged[0][1] == 2_000_000_003


def test_the_prefix_stands_before_every_name() -> None:
    """Blanks and slashes around it are left out."""
    logger = KeepingLogger()
    MetricLoggerSink(logger, prefix="/mine/").observe(sample_of()[0])
    assert {name.partition("/")[0] for name in logger.logged[0][0]} == {"mine"}


def test_a_second_traversal_has_names_of_its_own() -> None:
    """Two losses over one graph do not overwrite each other, and the total goes on."""
    logger = KeepingLogger()
    sink = MetricLoggerSink(logger)
    gradient = measurement(0, Signal.OUTPUT_GRADIENT, backward_index=1)
    sink.observe(forward(0))
    sink.observe(backward(0, measurement(0, Signal.OUTPUT_GRADIENT), settled=False))
    sink.observe(backward(0, gradient, index=1))
    assert "torchinstruments/modules/layer99/call_0/grad_output/backward_1/mean" in logger.logged[2][0]
    totals = [one[0].get("torchinstruments/observer/total_collection_duration_ms") for one in logger.logged]
    assert totals == [None, 750.0, 1250.0]


def test_parameters_and_what_steps_find_have_names_of_their_own() -> None:
    """A step takes no time of the forward or backward, so it says nothing of that."""
    logger = KeepingLogger()
    sink = MetricLoggerSink(logger)
    found = measurement(
        signal=Signal.PARAMETER_GRADIENT,
        tensor_path="weight",
        stage="applied",
        metrics=("mean",),
        values=(2.0,),
    )
    sink.observe(forward(0, replace(found, signal=Signal.PARAMETER, stage=""), settled=True))
    sink.observe(at_step(0, found))
    (of_forward, _), (of_step, _) = logger.logged
    assert of_forward["torchinstruments/modules/layer99/parameters/weight/mean"] == 2.0
    assert of_step == {"torchinstruments/modules/layer99/parameter_gradients/weight/applied/mean": 2.0}


def test_a_missed_sample_logs_nothing() -> None:
    """Nothing was measured."""
    logger = KeepingLogger()
    MetricLoggerSink(logger).observe(replace(forward(0), state=SampleState.MISSED))
    assert logger.logged == []


def test_an_empty_prefix_is_refused() -> None:
    """Names would stand among those of the training."""
    with pytest.raises(ConfigurationError, match="prefix"):
        MetricLoggerSink(KeepingLogger(), prefix=" / ")


def test_what_cannot_log_is_refused() -> None:
    """The message names what is missing."""
    with pytest.raises(ConfigurationError, match="log_metrics"):
        MetricLoggerSink(object())  # pyrefly: ignore[bad-argument-type]
