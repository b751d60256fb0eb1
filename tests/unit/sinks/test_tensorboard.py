"""Histograms in a caller's logger, and a real one of Lightning beside it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from typing_extensions import override

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Signal
from torchinstruments.sinks.delivery import Delivery
from torchinstruments.sinks.metric_logger import MetricLoggerSink
from torchinstruments.sinks.tensorboard import TensorBoardSink
from unit.sinks.deliveries import Resolved, histogram_record, missing_record, with_histograms
from unit.sinks.event_reading import dashboard_tags, read_histograms
from unit.store.material import START_US, claim, forward, identity, measurement, run_record

TAG = "torchinstruments/modules/block%2F0/call_0/output/histograms/distribution"


class OwnedWriter(SummaryWriter):
    """A writer of the caller's; counts who ends or flushes it."""

    touched = 0

    @override
    def flush(self) -> None:
        """Counts."""
        self.touched += 1
        super().flush()

    @override
    def close(self) -> None:
        """Counts."""
        self.touched += 1
        super().close()


def test_a_writer_gets_tag_moments_buckets_step_and_time(tmp_path: Path) -> None:
    """Read back with TensorBoard's own reader; missing ones are not there."""
    writer = OwnedWriter(str(tmp_path))
    sink = TensorBoardSink(writer)
    sink.place(identity(), claim(1))
    sink.initialize(run_record(), ())
    sink.observe(
        with_histograms(forward(4), histogram_record(timestamp_us=START_US + 5), missing_record(name="no"))
    )
    sink.observe(forward(5))
    sink.close()
    assert writer.touched == 0
    writer.close()

    ((tag, (event,)),) = read_histograms(tmp_path).items()
    assert (tag, event.step) == (TAG, 1_000_000_004)
    assert event.wall_time == pytest.approx((START_US + 5) / 1e6, abs=1e-6)
    value = event.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (-3.0, 9.0, 5.0, 10.0, 96.5)
    assert list(value.bucket_limit) == [math.nextafter(0.0, -math.inf), 1.0, 2.0, 9.0]
    assert list(value.bucket) == [1, 1, 2, 1]


def test_lightnings_logger_takes_scalars_and_histograms_and_stays_open(tmp_path: Path) -> None:
    """Through the writer thread; the caller goes on logging after the observer is closed."""
    logger = TensorBoardLogger(str(tmp_path), name="run", version="v")
    delivery = Delivery()
    delivery.start(
        run_record(),
        [MetricLoggerSink(logger), TensorBoardSink(logger)],
        identity=identity(),
        claim=claim(),
    )
    for ordinal in range(3):
        sample = with_histograms(forward(ordinal, measurement(0)), histogram_record())
        delivery.put_sample(Resolved(sample))
    delivery.close(60.0)
    assert delivery.pending_error() is None

    logger.log_metrics({"mine": 1.0}, 7)
    logger.finalize("success")
    folder = Path(logger.log_dir)
    assert [event.step for event in read_histograms(folder)[TAG]] == [0, 1, 2]
    assert dashboard_tags(folder) == [TAG]
    scalars = EventAccumulator(str(folder)).Reload()
    mean = scalars.Scalars("torchinstruments/modules/layer99/call_0/output/mean")
    assert [(event.step, event.value) for event in mean] == [(0, 1.5), (1, 1.5), (2, 1.5)]
    assert [(event.step, event.value) for event in scalars.Scalars("mine")] == [(7, 1.0)]


def test_making_a_sink_does_not_open_a_loggers_files(tmp_path: Path) -> None:
    """A lazy logger decides by itself when it begins."""
    logger = TensorBoardLogger(str(tmp_path), name="run")
    TensorBoardSink(logger)
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_without_histograms_is_told_at_the_start() -> None:
    """Another logger's experiment may be anything."""

    class Logger:
        @property
        def experiment(self) -> object:
            return object()

    with pytest.raises(TypeError, match="add_histogram_raw"):
        TensorBoardSink(Logger()).initialize(run_record(), ())  # pyrefly: ignore[bad-argument-type]


def test_what_is_no_logger_is_refused() -> None:
    """The message says what is wanted."""
    with pytest.raises(ConfigurationError, match="SummaryWriter"):
        TensorBoardSink(object())  # pyrefly: ignore[bad-argument-type]


def test_an_empty_prefix_is_refused(tmp_path: Path) -> None:
    """Tags would stand among those of the training."""
    logger = TensorBoardLogger(str(tmp_path))
    with pytest.raises(ConfigurationError, match="prefix"):
        TensorBoardSink(logger, prefix="/")


def test_histograms_of_parameters_have_tags_of_their_own(tmp_path: Path) -> None:
    """Each stage of a gradient is a series."""
    logger = TensorBoardLogger(str(tmp_path), name="run", version="v")
    sink = TensorBoardSink(logger)
    record = replace(histogram_record("fc", tensor_path="weight"), signal=Signal.PARAMETER_GRADIENT)
    for stage in ("reduced", "applied"):
        sink.observe(with_histograms(forward(0), replace(record, stage=stage)))
    logger.finalize("success")
    assert sorted(read_histograms(Path(logger.log_dir))) == [
        f"torchinstruments/modules/fc/parameter_gradients/weight/{stage}/histograms/distribution"
        for stage in ("applied", "reduced")
    ]
