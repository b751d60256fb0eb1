"""Scalars into a metric logger that the caller owns.

A metric logger knows names, numbers and steps; shapes, reasons, scope and loss scale do not fit into it and
stand in the run's folder only.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import (
    Claim,
    Identity,
    KeptFrames,
    MeasurementFrame,
    ModuleRecord,
    RunRecord,
    Sample,
    SampleState,
    as_columns,
)
from torchinstruments.sinks.tags import DEFAULT_PREFIX, checked_prefix, quoted, tensor_tag

__all__ = ["MetricLogger", "MetricLoggerSink"]

_MAX_REMEMBERED_SAMPLES = 4096
_MAX_NAMED_FRAMES = 4


class MetricLogger(Protocol):
    """What can log numbers, such as a logger of Lightning."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes named numbers of one step (writer thread)."""
        ...


class MetricLoggerSink:
    """Logs every scalar that has a value (a `Sink`).

    Names are ``<prefix>/modules/<layer>/call_<i>/<tensor path>/<metric>``, the root being ``@root``; beside
    them stand ``<prefix>/observer/forward_collection_duration_ms`` with a forward and
    ``<prefix>/observer/total_collection_duration_ms`` with each backward. Names of parameters are as in
    `sinks.tags`. The step is the sample id, since no
    observer knows a step that means the same in every training loop.

    The logger is the caller's: it is never flushed, finalised or closed here. It is called from the writer
    thread, beside the training thread's own calls.

    Args:
        logger: Takes the numbers.
        prefix: What all names begin with.

    Raises:
        ConfigurationError: The logger has no ``log_metrics``, or nothing is left of the prefix.
    """

    def __init__(self, logger: MetricLogger, *, prefix: str = DEFAULT_PREFIX) -> None:
        if not callable(getattr(logger, "log_metrics", None)):
            raise ConfigurationError(
                f"MetricLoggerSink({logger!r}) is not possible, since that has no method "
                f"log_metrics(metrics, step); give a logger that has one"
            )
        self._logger = logger
        self._prefix = checked_prefix(prefix)
        self._first_sample_id = 0
        self._collected_s: OrderedDict[int, float] = OrderedDict()
        self._frames = KeptFrames()
        self._names: OrderedDict[MeasurementFrame, list[str]] = OrderedDict()

    def place(self, identity: Identity, claim: Claim) -> None:  # noqa: ARG002 - part of the seam
        """Takes where the sample ids of this process begin (writer thread)."""
        self._first_sample_id = claim.first_sample_id

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Does nothing: a metric logger has no place for either (writer thread)."""

    def observe(self, sample: Sample) -> None:
        """Logs what one delivery has (writer thread)."""
        if sample.state is SampleState.MISSED:
            return
        metrics = self._metrics(sample)
        if not sample.at_step:
            total_s = self._total_s(sample)
            if sample.backward_index is None:
                name, collected_s = "forward_collection_duration_ms", sample.collection_s
            else:
                name, collected_s = "total_collection_duration_ms", total_s
            metrics[f"{self._prefix}/observer/{name}"] = collected_s * 1e3
        self._logger.log_metrics(metrics, self._first_sample_id + sample.ordinal)

    def close(self) -> None:
        """Leaves the logger alone (writer thread)."""

    def _metrics(self, sample: Sample) -> dict[str, float]:
        columns = sample.columns or as_columns(sample.measurements, self._frames)
        named = zip(self._names_of(columns.frame), columns.values.tolist(), strict=True)
        if bool(np.isnan(columns.values).any()):
            return {name: value for name, value in named if not math.isnan(value)}
        return dict(named)

    def _names_of(self, frame: MeasurementFrame) -> list[str]:
        """Returns the name of each number; those of the last few frames are kept."""
        names = self._names.get(frame, [])
        if not names:
            for one in frame.described:
                tag = tensor_tag(
                    self._prefix,
                    one.layer,
                    one.call_index,
                    one.tensor_path,
                    one.backward_index,
                    one.signal,
                    one.stage,
                )
                names += [f"{tag}/{quoted(metric)}" for metric in one.metrics]
            self._names[frame] = names
            if len(self._names) > _MAX_NAMED_FRAMES:
                self._names.popitem(last=False)
        return names

    def _total_s(self, sample: Sample) -> float:
        total_s = self._collected_s.pop(sample.ordinal, 0.0) + sample.collection_s
        if not sample.settled:
            self._collected_s[sample.ordinal] = total_s
            if len(self._collected_s) > _MAX_REMEMBERED_SAMPLES:
                self._collected_s.popitem(last=False)
        return total_s
