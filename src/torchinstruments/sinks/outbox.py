"""The bounded queue between the threads that observe and the one that writes.

A put costs the training thread an append and a little arithmetic. The lock guards nothing but a few counters,
for the time of an addition; the writer never holds it while it works. It is reentrant, since a signal handler
may run in the middle of a put on the same thread.
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from torchinstruments.records import (
    ChecksRecord,
    ClosedAttempt,
    DeferredFingerprints,
    DeferredSample,
    ErrorRecord,
    ModuleRecord,
)

__all__ = [
    "MAX_DELIVERIES",
    "MAX_FINGERPRINTS",
    "MAX_RECORDS",
    "MAX_SCALARS",
    "Attempts",
    "BoundedOutbox",
    "Dropped",
    "Fingerprints",
    "Item",
    "Modules",
    "describe",
]

MAX_SCALARS = 1_000_000
"""Scalars of samples that may wait."""

MAX_DELIVERIES = 4_096
"""Deliveries of samples that may wait."""

MAX_RECORDS = 65_536
"""Attempts, catalogs and errors that may wait."""


MAX_FINGERPRINTS = 262_144
"""Fingerprints that may wait."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts of a window, in the queue."""

    records: tuple[ClosedAttempt, ...]


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """The fingerprints of an attempt, in the queue."""

    deferred: DeferredFingerprints


@dataclass(frozen=True, slots=True)
class Modules:
    """A catalog, in the queue."""

    records: tuple[ModuleRecord, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What did not fit into the queue so far.

    Attributes:
        deliveries: Deliveries of samples.
        scalars: Their scalars, which would have become rows of ``history``.
        records: Attempts, catalogs and errors.
        fingerprints: Rows of ``fingerprints``.
    """

    deliveries: int = 0
    scalars: int = 0
    records: int = 0
    fingerprints: int = 0


Item: TypeAlias = DeferredSample | Attempts | Fingerprints | Modules | ChecksRecord | ErrorRecord


class BoundedOutbox:
    """Takes what was observed, in order, and drops the newest beyond its bounds.

    Args:
        max_scalars: Scalars that may wait; a single sample larger than that is taken into an empty queue.
        max_deliveries: Deliveries of samples that may wait.
        max_records: Attempts, catalogs and errors that may wait.
        max_fingerprints: Fingerprints that may wait; a larger model's are taken where none waits.
    """

    def __init__(
        self,
        max_scalars: int = MAX_SCALARS,
        max_deliveries: int = MAX_DELIVERIES,
        max_records: int = MAX_RECORDS,
        max_fingerprints: int = MAX_FINGERPRINTS,
    ) -> None:
        self._max_scalars = max_scalars
        self._max_deliveries = max_deliveries
        self._max_records = max_records
        self._max_fingerprints = max_fingerprints
        self._items: deque[tuple[Item, int, int]] = deque()
        self._lock = threading.RLock()
        self._scalars = 0
        self._deliveries = 0
        self._records = 0
        self._fingerprints = 0
        self._dropped = Dropped()

    def put_sample(self, sample: DeferredSample) -> bool:
        """Takes one delivery; returns whether the queue is at least half full (training thread, hot path)."""
        scalars = sample.num_scalars
        with self._lock:
            full = self._deliveries >= self._max_deliveries or (
                self._scalars + scalars > self._max_scalars and self._deliveries > 0
            )
            if full:
                self._drop(deliveries=1, scalars=scalars)
            else:
                self._deliveries += 1
                self._scalars += scalars
                self._items.append((sample, scalars, 0))
            return 2 * self._scalars >= self._max_scalars or 2 * self._deliveries >= self._max_deliveries

    def put_fingerprints(self, item: Fingerprints) -> None:
        """Takes the fingerprints of an attempt (training thread, hot path)."""
        count = item.deferred.num_rows
        with self._lock:
            if self._fingerprints > 0 and self._fingerprints + count > self._max_fingerprints:
                self._drop(fingerprints=count)
            else:
                self._fingerprints += count
                self._items.append((item, 0, count))

    def put_records(self, item: Attempts | Modules | ChecksRecord | ErrorRecord) -> None:
        """Takes something else than a sample (training thread, hot path)."""
        count = len(item.records) if isinstance(item, Attempts) else 1
        with self._lock:
            if self._records + count > self._max_records:
                self._drop(records=count)
            else:
                self._records += count
                self._items.append((item, 0, count))

    def take(self) -> Item | None:
        """Removes and returns the oldest item, or None where there is none (writer thread)."""
        try:
            item, scalars, records = self._items.popleft()
        except IndexError:
            return None
        with self._lock:
            if isinstance(item, Fingerprints):
                self._fingerprints -= records
            else:
                self._scalars -= scalars
                self._records -= records
                self._deliveries -= not records
        return item

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._items)

    @property
    def dropped(self) -> Dropped:
        """What did not fit so far (any thread)."""
        return self._dropped

    def _drop(self, deliveries: int = 0, scalars: int = 0, records: int = 0, fingerprints: int = 0) -> None:
        before = self._dropped
        self._dropped = Dropped(
            before.deliveries + deliveries,
            before.scalars + scalars,
            before.records + records,
            before.fingerprints + fingerprints,
        )


def describe(before: Dropped, after: Dropped) -> str:
    """Returns what was dropped between two looks at the queue, in a sentence."""
    parts = (
        (after.deliveries - before.deliveries, "deliveries of samples"),
        (after.scalars - before.scalars, "scalars"),
        (after.records - before.records, "records of steps, modules, checks or errors"),
        (after.fingerprints - before.fingerprints, "fingerprints"),
    )
    lost = ", ".join(f"{count} {what}" for count, what in parts if count)
    return f"the queue to the writer thread was full: {lost} were dropped"
