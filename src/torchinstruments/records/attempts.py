"""What became of an attempt at an optimizer step, and of the bytes that it began with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchinstruments.records.codes import Evidence, GradSync, Outcome

__all__ = [
    "Amendment",
    "AttemptRecord",
    "ClosedAttempt",
    "DeferredFingerprints",
    "FingerprintRecord",
]


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt and optimizer: a row of ``steps``.

    Attributes:
        attempt: Window, from 0.
        optimizer: Ordinal of the optimizer in the order of first sight; -1 where none stepped.
        optimizer_attempt: Ordinal of this try among those of this optimizer.
        first_forward_index: First root forward of the window.
        last_forward_index: Last root forward of the window, or the last one until it was told.
        micro_batches: Grad-enabled root forwards in it.
        micro_batches_synced: Those whose gradients were to be synchronised.
        last_micro_batch_sync: `GradSync` of the last one.
        outcome: What became of it.
        evidence: What that rests on.
        started_at_us: When its first forward began: microseconds since the epoch, UTC.
        gap_s: From the last attempt's end, its evaluation included, to this one's first forward; None where
            an optimizer of another model stepped since that end.
        forward_s: Sum over its root forwards.
        backward_s: Sum over what lies between the end of a forward and the end of its backward.
        optimizer_s: Sum over its optimizer's steps.
        global_step: The caller's number, in boundary mode.
        micro_batches_declared: The caller's number, in boundary mode.
        found_inf: What the scaler found, where known.
        scale_before: Loss scale before the step, where known.
        scale_after: Loss scale after the step, where known.
        lr: Learning rate of the optimizer's first group.
        clock: ``host`` or ``device``.
    """

    attempt: int
    optimizer: int
    optimizer_attempt: int
    first_forward_index: int
    last_forward_index: int
    micro_batches: int
    micro_batches_synced: int
    last_micro_batch_sync: GradSync
    outcome: Outcome
    evidence: Evidence
    started_at_us: int
    gap_s: float | None
    forward_s: float
    backward_s: float
    optimizer_s: float
    global_step: int | None = None
    micro_batches_declared: int | None = None
    found_inf: float | None = None
    scale_before: float | None = None
    scale_after: float | None = None
    lr: float | None = None
    clock: str = "host"


class Amendment(Protocol):
    """What a device knew of an attempt when its window closed, and the host did not yet."""

    def is_complete(self) -> bool:
        """Returns whether nothing more will be known of it on the host; does not raise (writer thread)."""
        ...

    def amend(self, record: AttemptRecord) -> AttemptRecord:
        """Waits for what it needs and returns the record with it (writer thread)."""
        ...


class ClosedAttempt:
    """An attempt of a window that closed, parts of which may still be on their way from a device.

    Args:
        record: What the host knows, or what makes that of things which do not change any more: so the
            training thread leaves it to whoever asks.
        amendments: Applied to the record in this order.
    """

    __slots__ = ("amendments", "source")

    def __init__(
        self, record: AttemptRecord | Callable[[], AttemptRecord], amendments: tuple[Amendment, ...] = ()
    ) -> None:
        self.source = record
        """The record, or what makes it."""
        self.amendments = amendments

    @property
    def record(self) -> AttemptRecord:
        """What the host knows (any thread)."""
        record = self.source
        if not isinstance(record, AttemptRecord):
            record = self.source = record()
        return record

    def is_complete(self) -> bool:
        """Returns whether the host knows all of it, so that a later answer is the same (writer thread)."""
        # Each is asked, for one that is not complete keeps what is known so far.
        complete = [amendment.is_complete() for amendment in self.amendments]
        return all(complete)

    def resolve(self) -> AttemptRecord:
        """Returns the whole record (writer thread)."""
        record = self.record
        for amendment in self.amendments:
            record = amendment.amend(record)
        return record


@dataclass(frozen=True, slots=True)
class FingerprintRecord:
    """What the bytes of a parameter or buffer were when an attempt began: a row of ``fingerprints``.

    Attributes:
        attempt: Window, from 0.
        tensor: Name in the model, without the segments of wrappers.
        kind: ``parameter`` or ``buffer``.
        replica_key: Equal on the ranks that have to hold equal bytes in this attempt; ``""`` where that is
            not known.
        shape: Local shape.
        dtype: Without ``torch.``.
        digest: Of the local bytes, from 0 to 2^64 - 1.
    """

    attempt: int
    tensor: str
    kind: str
    replica_key: str
    shape: tuple[int, ...]
    dtype: str
    digest: int


class DeferredFingerprints(Protocol):
    """The fingerprints of one attempt, whose digests may still be on their way from a device."""

    @property
    def num_rows(self) -> int:
        """Rows that it holds, for the bound of the queue (training thread, hot path)."""
        ...

    def resolve(self) -> Sequence[FingerprintRecord]:
        """Waits for the copies and returns the rows, in the order of the model (writer thread)."""
        ...
