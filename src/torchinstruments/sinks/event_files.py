"""The run's own histograms: TensorBoard event files of one process, in its rank's folder.

Only the message types of TensorBoard are imported, and only once there is something to write. Nothing is
buffered in this process: what one delivery has is one write, so that a killed run keeps all of it.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

from torchinstruments.records import Claim, HistogramRecord, Identity, Reason
from torchinstruments.sinks.buckets import histogram_buckets
from torchinstruments.sinks.record_format import frame
from torchinstruments.sinks.tags import DEFAULT_PREFIX, tensor_tag
from torchinstruments.sinks.tensorboard import histogram_tag
from torchinstruments.store.segments import SegmentFiles, open_segments
from torchinstruments.store.target import PartTarget

__all__ = ["RETRY_AFTER_S", "HistogramFiles", "Missing", "open_histogram_files"]

RETRY_AFTER_S = 5.0
"""After a write that failed, histograms are given up for so many seconds without another try."""

_FILE_VERSION = "brain.Event:2"
# Of a tensor, whose numbers have the same reason. Anything else a histogram came up with by itself.
_REASONS_OF_TENSORS = frozenset(Reason) - {Reason.REDUCER_ERROR}
_UNENCODABLE = (ValueError, TypeError, OverflowError, AttributeError)


@dataclass(frozen=True, slots=True)
class Missing:
    """A histogram that is not in the files, and why.

    Attributes:
        layer: As in `ModuleRecord`.
        tensor_path: As in `Measurement`, with the stage behind it, where there is one.
        name: Name of the histogram.
        reason: A `Reason` with or without detail, or what failed.
        is_failure: Whether the histogram itself failed; else there was nothing to make it of, which the
            tensor's numbers say too.
    """

    layer: str
    tensor_path: str
    name: str
    reason: str
    is_failure: bool = True


class HistogramFiles:
    """Writes the histograms of one process (writer thread).

    Args:
        files: The event files.
        first_sample_id: Sample ids of this generation start here.
        monotonic_s: Seconds that never run backwards.
    """

    def __init__(
        self,
        files: SegmentFiles,
        *,
        first_sample_id: int,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._first_sample_id = first_sample_id
        self._monotonic_s = monotonic_s
        self._retry_at_s = float("-inf")
        self._failure = ""
        self._news: OSError | None = None

    def write(self, ordinal: int, records: Sequence[HistogramRecord]) -> list[Missing]:
        """Writes the histograms of one delivery; returns those that are not in the files."""
        missing: list[Missing] = []
        encoded: list[bytes] = []
        kept: list[HistogramRecord] = []
        for record in records:
            if record.unavailable_reason:
                missing.append(_absent(record))
                continue
            try:
                encoded.append(_encoded(record, self._first_sample_id + ordinal))
                kept.append(record)
            except _UNENCODABLE as error:
                missing.append(_missing(record, f"{type(error).__name__}: {error}"))
        if encoded and not self._append(b"".join(encoded)):
            missing += [_missing(record, self._failure) for record in kept]
        return missing

    def tick(self) -> None:
        """Does what is due (writer thread).

        Raises:
            OSError: What was written may be lost.
        """
        self._files.tick()

    def flush(self) -> None:
        """Makes durable what was written so far.

        Raises:
            OSError: It may be lost.
        """
        self._files.sync()

    def close(self) -> None:
        """Finishes the last file.

        Raises:
            OSError: What was written may be lost.
        """
        self._files.close()

    def take_failure(self) -> OSError | None:
        """Returns a failure to write that was not returned yet; one that goes on is returned once."""
        news, self._news = self._news, None
        return news

    def _append(self, data: bytes) -> bool:
        if self._monotonic_s() < self._retry_at_s:
            return False
        try:
            self._files.append(data)
        except OSError as error:
            text = f"{type(error).__name__}: {error}"
            if text != self._failure:
                self._news = error
            self._failure = text
            self._retry_at_s = self._monotonic_s() + RETRY_AFTER_S
            return False
        self._failure = ""
        return True


def open_histogram_files(
    target: PartTarget, rank_folder: Path | None, identity: Identity, claim: Claim
) -> HistogramFiles | None:
    """Returns where the histograms of one process go; nothing is opened yet.

    Args:
        target: Where its parts go.
        rank_folder: The rank's folder, where it is local.
        identity: Who the process is.
        claim: What the ranks agreed on.

    Returns:
        The files; None where the target keeps no files on this host.
    """
    files = open_segments(
        target, rank_folder, host=identity.host, process=identity.process, header=_file_version
    )
    return None if files is None else HistogramFiles(files, first_sample_id=claim.first_sample_id)


def _absent(record: HistogramRecord) -> Missing:
    reason = record.unavailable_reason
    is_failure = reason.partition(":")[0] not in _REASONS_OF_TENSORS
    return replace(_missing(record, reason), is_failure=is_failure)


def _missing(record: HistogramRecord, reason: str) -> Missing:
    return Missing(record.layer, f"{record.tensor_path} {record.stage}".rstrip(), record.name, reason)


def _encoded(record: HistogramRecord, sample_id: int) -> bytes:
    buckets = histogram_buckets(record)
    tensor = tensor_tag(
        DEFAULT_PREFIX,
        record.layer,
        record.call_index,
        record.tensor_path,
        record.backward_index,
        record.signal,
        record.stage,
    )
    messages = _messages("summary_pb2")
    histogram = messages.HistogramProto(
        min=buckets.minimum,
        max=buckets.maximum,
        num=record.finite_count,
        sum=buckets.total,
        sum_squares=buckets.total_of_squares,
        bucket_limit=buckets.limits,
        bucket=buckets.counts,
    )
    value = messages.Summary.Value(tag=histogram_tag(tensor, record.name), histo=histogram)
    event = _messages("event_pb2").Event(
        wall_time=record.timestamp_us / 1e6, step=sample_id, summary=messages.Summary(value=[value])
    )
    return frame(event.SerializeToString())


def _file_version() -> bytes:
    """Returns the record that every event file begins with."""
    event = _messages("event_pb2").Event(wall_time=time.time(), file_version=_FILE_VERSION)
    return frame(event.SerializeToString())


@cache
def _messages(name: str) -> ModuleType:
    """Returns a module of TensorBoard's messages, which protobuf makes while it is imported."""
    return importlib.import_module(f"tensorboard.compat.proto.{name}")
