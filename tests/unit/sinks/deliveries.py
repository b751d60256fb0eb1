"""Samples with histograms, and deliveries that are resolved already, for the tests of the sinks."""

from collections.abc import Sequence
from dataclasses import replace

from torchinstruments.records import HistogramRecord, Sample, Signal
from unit.store.material import START_US

__all__ = ["Resolved", "histogram_record", "missing_record", "with_histograms"]


class Resolved:
    """A sample whose scalars are on the host."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.num_scalars = sum(len(one.metrics) for one in sample.measurements)

    def resolve(self) -> Sample:
        """Returns the sample."""
        return self.sample


def histogram_record(
    layer: str = "block/0",
    *,
    call_index: int = 0,
    tensor_path: str = "output",
    backward_index: int = 0,
    name: str = "distribution",
    timestamp_us: int = START_US,
    edges: Sequence[float] = (0.0, 1.0, 2.0),
) -> HistogramRecord:
    """Returns the entries -3, 0.5, 1.5, 2 and 9 in two bins from 0 to 2, with a NaN beside them."""
    return HistogramRecord(
        layer=layer,
        layer_index=0,
        call_index=call_index,
        signal=Signal.OUTPUT,
        tensor_path=tensor_path,
        backward_index=backward_index,
        timestamp_us=timestamp_us,
        mode="train",
        name=name,
        edges=tuple(edges),
        counts=(1, 2),
        underflow=1,
        overflow=1,
        finite_count=5,
        nonfinite_count=1,
        minimum=-3.0,
        maximum=9.0,
        total=10.0,
        total_of_squares=96.5,
    )


def missing_record(
    reason: str = "empty", layer: str = "block/0", name: str = "distribution"
) -> HistogramRecord:
    """Returns a histogram that could not be had."""
    return replace(
        histogram_record(layer, name=name),
        edges=(),
        counts=(),
        underflow=0,
        overflow=0,
        finite_count=0,
        minimum=None,
        maximum=None,
        total=None,
        total_of_squares=None,
        unavailable_reason=reason,
    )


def with_histograms(sample: Sample, *records: HistogramRecord) -> Sample:
    """Returns a delivery with histograms."""
    return replace(sample, histograms=records)
