"""Histograms into a TensorBoard logger that the caller owns."""

import inspect
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Claim, Identity, ModuleRecord, RunRecord, Sample
from torchinstruments.sinks.buckets import histogram_buckets
from torchinstruments.sinks.tags import DEFAULT_PREFIX, checked_prefix, quoted, tensor_tag

__all__ = ["HistogramWriter", "TensorBoardLogger", "TensorBoardSink", "histogram_tag"]


@runtime_checkable
class HistogramWriter(Protocol):
    """What writes histograms: a ``torch.utils.tensorboard.SummaryWriter``, or one of tensorboardX."""

    def add_histogram_raw(
        self,
        tag: str,
        min: float,  # noqa: A002 - named by TensorBoard's writers
        max: float,  # noqa: A002 - the same
        num: int,
        sum: float,  # noqa: A002 - the same
        sum_squares: float,
        bucket_limits: Sequence[float],
        bucket_counts: Sequence[int],
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> None:
        """Takes one histogram (writer thread)."""
        ...


class TensorBoardLogger(Protocol):
    """What holds such a writer, as Lightning's ``TensorBoardLogger`` does.

    Attributes:
        experiment: The writer.
    """

    @property
    def experiment(self) -> HistogramWriter:
        """The writer (writer thread)."""
        ...


class TensorBoardSink:
    """Writes the histograms of every sample into a caller's logger (a `Sink`).

    Tags are ``<prefix>/modules/<layer>/call_<i>/<tensor path>/histograms/<name>``, and those of parameters as
    `sinks.tags` has them; the step is the sample id, the time that of the observation. Histograms that are
    missing are not written; the run's folder counts them with their reasons.

    The logger is the caller's: it is never flushed or closed here. It is called from the writer thread,
    beside the training thread's own calls.

    Args:
        logger: A logger with a writer as its ``experiment``, or the writer itself.
        prefix: What all tags begin with.

    Raises:
        ConfigurationError: It is neither, or nothing is left of the prefix.
    """

    def __init__(self, logger: TensorBoardLogger | HistogramWriter, *, prefix: str = DEFAULT_PREFIX) -> None:
        # Asking for the attribute itself would make a lazy logger open its files in this very moment.
        has_experiment = inspect.getattr_static(logger, "experiment", None) is not None
        if not has_experiment and not isinstance(logger, HistogramWriter):
            raise ConfigurationError(
                f"TensorBoardSink({logger!r}) is not possible, since that has neither an experiment nor a "
                f"method add_histogram_raw; give a TensorBoard logger or its SummaryWriter"
            )
        self._logger = logger
        self._prefix = checked_prefix(prefix)
        self._first_sample_id = 0

    def place(self, identity: Identity, claim: Claim) -> None:  # noqa: ARG002 - part of the seam
        """Takes where the sample ids of this process begin (writer thread)."""
        self._first_sample_id = claim.first_sample_id

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:  # noqa: ARG002 - the same
        """Looks whether the logger can take histograms (writer thread).

        Raises:
            TypeError: It cannot.
        """
        self._writer()

    def observe(self, sample: Sample) -> None:
        """Writes the histograms of one delivery (writer thread)."""
        if not sample.histograms:
            return
        writer = self._writer()
        for record in sample.histograms:
            if record.unavailable_reason:
                continue
            buckets = histogram_buckets(record)
            tag = tensor_tag(
                self._prefix,
                record.layer,
                record.call_index,
                record.tensor_path,
                record.backward_index,
                record.signal,
                record.stage,
            )
            writer.add_histogram_raw(
                histogram_tag(tag, record.name),
                min=buckets.minimum,
                max=buckets.maximum,
                num=record.finite_count,
                sum=buckets.total,
                sum_squares=buckets.total_of_squares,
                bucket_limits=list(buckets.limits),
                bucket_counts=list(buckets.counts),
                global_step=self._first_sample_id + sample.ordinal,
                walltime=record.timestamp_us / 1e6,
            )

    def close(self) -> None:
        """Leaves the logger alone (writer thread)."""

    def _writer(self) -> HistogramWriter:
        """Returns the writer that the logger has now; a logger may change it during its life."""
        logger = self._logger
        writer = logger if isinstance(logger, HistogramWriter) else logger.experiment
        if not isinstance(writer, HistogramWriter):
            raise TypeError(f"the experiment of {logger!r} has no method add_histogram_raw")
        return writer


def histogram_tag(tensor: str, name: str) -> str:
    """Returns the tag of a histogram of a tensor that has a `tags.tensor_tag`."""
    return f"{tensor}/histograms/{quoted(name)}"
