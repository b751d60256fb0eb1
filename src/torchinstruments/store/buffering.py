"""What a process has observed and not yet made durable, and when which of it is due.

A buffer a table. Rows of ``history`` are kept as the samples that they came in, since columns are
built at once. A row of ``samples`` is a tally that grows with each delivery of its sample.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from torchinstruments.records import Position, Sample, SampleState
from torchinstruments.store.columns import SampleRow

__all__ = [
    "DUE_AFTER_S",
    "UNSETTLED_AFTER_S",
    "HistoryBuffer",
    "RecordBuffer",
    "SampleTallies",
    "num_rows",
]

DUE_AFTER_S = 27.0
"""A row has to become durable so many seconds after it was buffered.

It is buffered up to a second after it was observed, and what is due is looked at once a second: with a second
for the writing it is durable 30 s after it was observed.
"""

UNSETTLED_AFTER_S = 25.0
"""A sample whose backward did not come within so many seconds gets its row all the same."""

_Record = TypeVar("_Record")
_METRICS = attrgetter("metrics")

MAX_REMEMBERED_SAMPLES = 4096
"""Tallies that are kept for a late delivery; beyond it the oldest are forgotten."""


class HistoryBuffer:
    """Deliveries of samples whose measurements are not durable yet.

    Args:
        buffer_rows: Rows after which they are due.
    """

    def __init__(self, buffer_rows: int) -> None:
        self._buffer_rows = buffer_rows
        self._deliveries: list[tuple[int, Sample]] = []
        self._oldest_s: float | None = None
        self.num_rows = 0

    def add(self, sample_id: int, sample: Sample, now_s: float) -> None:
        """Takes one delivery; one without measurements leaves nothing."""
        count = num_rows(sample)
        if count == 0:
            return
        if self._oldest_s is None:
            self._oldest_s = now_s
        self._deliveries.append((sample_id, sample))
        self.num_rows += count

    def take_due(self, now_s: float) -> list[tuple[int, Sample]]:
        """Removes and returns what has to become durable now, most often nothing.

        A full buffer gives its settled samples, so that the gradients of the others can still come to lie
        beside their outputs; it gives everything once the unsettled ones alone fill it.
        """
        if self._oldest_s is not None and now_s - self._oldest_s >= DUE_AFTER_S:
            return self.take_all()
        if self.num_rows < self._buffer_rows:
            return []
        settled = {sample_id for sample_id, sample in self._deliveries if sample.settled}
        waiting = [entry for entry in self._deliveries if entry[0] not in settled]
        waiting_rows = sum(num_rows(sample) for _, sample in waiting)
        if not settled or waiting_rows >= self._buffer_rows:
            return self.take_all()
        taken = [entry for entry in self._deliveries if entry[0] in settled]
        self._deliveries = waiting
        self.num_rows = waiting_rows
        if not waiting:
            self._oldest_s = None
        return taken

    def take_all(self) -> list[tuple[int, Sample]]:
        """Removes and returns everything."""
        taken = self._deliveries
        self._deliveries = []
        self._oldest_s = None
        self.num_rows = 0
        return taken


class RecordBuffer(Generic[_Record]):
    """Records that are a row each, as attempts and fingerprints are, and not durable yet.

    Args:
        buffer_rows: Rows after which they are due.
    """

    def __init__(self, buffer_rows: int) -> None:
        self._buffer_rows = buffer_rows
        self._records: list[_Record] = []
        self._oldest_s = 0.0

    def add(self, records: Sequence[_Record], now_s: float) -> None:
        """Takes records, of one moment."""
        if not self._records:
            self._oldest_s = now_s
        self._records.extend(records)

    def take_due(self, now_s: float) -> list[_Record]:
        """Removes and returns what has to become durable now, most often nothing."""
        old = bool(self._records) and now_s - self._oldest_s >= DUE_AFTER_S
        return self.take_all() if old or len(self._records) >= self._buffer_rows else []

    def take_all(self) -> list[_Record]:
        """Removes and returns everything."""
        taken = self._records
        self._records = []
        return taken


@dataclass(slots=True)
class _Tally:
    """One sample, summed over its deliveries.

    Attributes:
        first_s: When its first delivery came, by the monotonic clock.
        changed: Whether it differs from the row that was last written of it.
    """

    sample_id: int
    position: Position
    started_at_us: int
    first_s: float
    state: SampleState
    num_backwards: int = 0
    collection_forward_s: float = 0.0
    collection_backward_s: float = 0.0
    rows: int = 0
    errors: int = 0
    modules_expected: int = 0
    modules_fired: int = 0
    settled: bool = False
    changed: bool = True

    def add(self, sample: Sample) -> None:
        """Adds one delivery."""
        if sample.at_step:
            # What a step found changes nothing of how far the forward and its backwards came.
            self.collection_backward_s += sample.collection_s
        else:
            if sample.backward_index is None:
                self.collection_forward_s += sample.collection_s
            else:
                self.collection_backward_s += sample.collection_s
                self.num_backwards += 1
            state = sample.state
            if self.num_backwards == 0 or state is not SampleState.FORWARD_COMPLETE:
                self.state = state
        self.rows += num_rows(sample)
        self.errors += sample.errors
        if sample.modules_expected > self.modules_expected:
            self.modules_expected = sample.modules_expected
        if sample.modules_fired > self.modules_fired:
            self.modules_fired = sample.modules_fired
        if sample.settled:
            self.settled = True
        self.changed = True

    def row(self) -> SampleRow:
        """Returns the row as it stands."""
        return SampleRow(
            sample_id=self.sample_id,
            position=self.position,
            started_at_us=self.started_at_us,
            state=self.state,
            num_backwards=self.num_backwards,
            collection_forward_s=self.collection_forward_s,
            collection_backward_s=self.collection_backward_s,
            rows=self.rows,
            errors=self.errors,
            modules_expected=self.modules_expected,
            modules_fired=self.modules_fired,
        )


class SampleTallies:
    """Samples and what their deliveries add up to.

    A sample gives its row when rows of ``history`` of it are written, when nothing more is expected of it, or
    `UNSETTLED_AFTER_S` after its forward. If a
    delivery changes it later it gives another row, with larger sums; readers keep the one with the largest.

    Args:
        buffer_rows: Settled samples after which their rows are due.
    """

    def __init__(self, buffer_rows: int) -> None:
        self._buffer_rows = buffer_rows
        self._tallies: OrderedDict[int, _Tally] = OrderedDict()
        self._changed: dict[int, _Tally] = {}

    def add(self, sample_id: int, sample: Sample, now_s: float) -> None:
        """Adds one delivery to its sample."""
        tally = self._tallies.get(sample_id) or self._changed.get(sample_id)
        if tally is None:
            tally = _Tally(sample_id, sample.position, sample.started_at_us, now_s, sample.state)
            self._tallies[sample_id] = tally
            while len(self._tallies) > MAX_REMEMBERED_SAMPLES:
                self._tallies.popitem(last=False)
        if not tally.changed:
            tally.first_s = now_s
        tally.add(sample)
        self._changed[sample_id] = tally

    def take_due(self, now_s: float) -> list[SampleRow]:
        """Returns the rows that have to become durable now, most often none."""
        if not self._changed:
            return []
        oldest_s = next(iter(self._changed.values())).first_s
        if now_s - oldest_s < DUE_AFTER_S and len(self._changed) < self._buffer_rows:
            return []
        due = [
            tally
            for tally in self._changed.values()
            if tally.settled or now_s - tally.first_s >= UNSETTLED_AFTER_S
        ]
        return self._take(due)

    def take_of(self, sample_ids: Iterable[int]) -> list[SampleRow]:
        """Returns the rows of those of the given samples that changed since they were last written."""
        return self._take([self._changed[one] for one in dict.fromkeys(sample_ids) if one in self._changed])

    def take_all(self) -> list[SampleRow]:
        """Returns the rows of all samples that changed since they were last written."""
        return self._take(list(self._changed.values()))

    def _take(self, tallies: Sequence[_Tally]) -> list[SampleRow]:
        for tally in tallies:
            tally.changed = False
            del self._changed[tally.sample_id]
        return [tally.row() for tally in tallies]


def num_rows(sample: Sample) -> int:
    """Returns how many rows of ``history`` a delivery gives."""
    columns = sample.columns
    if columns is not None:
        return columns.frame.num_scalars
    return sum(map(len, map(_METRICS, sample.measurements)))
