"""The rows of one process's tables, from records to encoded parts.

Rows become durable when ``buffer_rows`` of them are buffered, or within 30 s. A row of ``samples``
is written just before the first rows of ``history`` of its sample, and at the latest when that is settled, or
25 s after its forward; a sample that changes after that gives a further, superseding row.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import pyarrow as pa

from torchinstruments.records import AttemptRecord, Claim, FingerprintRecord, Identity, Sample
from torchinstruments.store import schema
from torchinstruments.store.buffering import HistoryBuffer, RecordBuffer, SampleTallies, num_rows
from torchinstruments.store.clocks import Clock
from torchinstruments.store.columns import (
    Columns,
    Origin,
    SampleRow,
    fingerprints_columns,
    samples_columns,
    steps_columns,
)
from torchinstruments.store.history_columns import HistoryColumns, history_columns
from torchinstruments.store.parts import encode_columns
from torchinstruments.store.waiting import EncodedPart, WaitingParts

__all__ = ["UNSTORABLE", "Tables"]

UNSTORABLE = (ValueError, TypeError, OverflowError, AttributeError, pa.ArrowException)
"""What a row that cannot become a column raises."""


class RowFolder(Protocol):
    """Takes the rows of ``history``, for summaries of them."""

    def add_rows(self, part: Columns) -> None:
        """Takes a part of them, in their order (writer thread)."""
        ...

    def fold_rest(self) -> None:
        """Does what was left undone of the rows so far (writer thread)."""
        ...


class Tables:
    """Buffers rows and encodes those that are due (writer thread).

    Args:
        identity: Who the process is.
        claim: Run, generation and first sample id, as the ranks agreed on them.
        buffer_rows: So many rows of a table are due at once.
        waiting: Takes parts.
        clock: Clocks.
        summaries: Take rows of ``history`` in the order of their part.
        part_added: Told of each part.
        failed: Told of what could not be stored.
    """

    def __init__(
        self,
        identity: Identity,
        claim: Claim,
        buffer_rows: int,
        waiting: WaitingParts,
        clock: Clock,
        *,
        summaries: RowFolder,
        part_added: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._claim = claim
        self._waiting = waiting
        self._clock = clock
        self._summaries = summaries
        self._part_added = part_added
        self._failed = failed
        self._origin = Origin(claim.generation, identity.rank, identity.process)
        self._metadata = schema.metadata(
            schema_version=schema.SCHEMA_VERSION,
            run_id=claim.run_id,
            generation=claim.generation,
            rank=identity.rank,
            process=identity.process,
            world_size=identity.world_size,
        )
        self._history_columns = HistoryColumns(self._origin)
        self._history = HistoryBuffer(buffer_rows)
        self._tallies = SampleTallies(buffer_rows)
        self._steps = RecordBuffer[AttemptRecord](buffer_rows)
        self._fingerprints = RecordBuffer[FingerprintRecord](buffer_rows)
        self.dropped_rows: Counter[str] = Counter()
        """Rows that could not become columns, by table (any thread)."""

    def add_sample(self, sample: Sample) -> None:
        """Takes one delivery of a sample."""
        sample_id = self._claim.first_sample_id + sample.ordinal
        now_s = self._clock.monotonic_s()
        self._history.add(sample_id, sample, now_s)
        self._tallies.add(sample_id, sample, now_s)
        self._write_history(self._history.take_due(now_s))
        self._write_samples(self._tallies.take_due(now_s))

    def add_attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Takes the attempts of a window that closed."""
        now_s = self._clock.monotonic_s()
        self._steps.add(records, now_s)
        self._write_steps(self._steps.take_due(now_s))

    def add_fingerprints(self, records: Sequence[FingerprintRecord]) -> None:
        """Takes the fingerprints of an attempt."""
        now_s = self._clock.monotonic_s()
        self._fingerprints.add(records, now_s)
        self._write_fingerprints(self._fingerprints.take_due(now_s))

    def write_due(self, now_s: float) -> None:
        """Encodes what has waited for long enough."""
        self._write_history(self._history.take_due(now_s))
        self._write_samples(self._tallies.take_due(now_s))
        self._write_steps(self._steps.take_due(now_s))
        self._write_fingerprints(self._fingerprints.take_due(now_s))

    def write_all(self) -> None:
        """Encodes everything that was taken so far."""
        self._write_history(self._history.take_all())
        self._write_samples(self._tallies.take_all())
        self._write_steps(self._steps.take_all())
        self._write_fingerprints(self._fingerprints.take_all())
        self._fold(self._summaries.fold_rest)

    def _write_history(self, deliveries: list[tuple[int, Sample]]) -> None:
        if not deliveries:
            return
        try:
            columns = self._history_columns.make(deliveries)
        except UNSTORABLE:
            deliveries = [entry for entry in deliveries if self._can_be_stored(entry)]
            if not deliveries:
                return
            columns = self._history_columns.make(deliveries)
        # Before them, so that whatever ends the process leaves no measurements of a sample that nobody knows.
        self._write_samples(
            self._tallies.take_of(sample_id for sample_id, _ in deliveries), is_last_durable=False
        )
        last = max(deliveries, key=_sample_id)
        self._write("history", columns, last[0], last[1].started_at_us)
        self._fold(partial(self._summaries.add_rows, columns))

    def _fold(self, fold: Callable[[], None]) -> None:
        try:
            fold()
        # Whatever it is: the rows themselves are safe, and what waited since long ago must not spoil a close.
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def _can_be_stored(self, delivery: tuple[int, Sample]) -> bool:
        """Tells one broken delivery from its neighbours, which must not be lost with it."""
        try:
            history_columns([delivery], self._origin)
        except UNSTORABLE as error:
            self._give_up("history", num_rows(delivery[1]), error)
            return False
        return True

    def _write_samples(self, rows: list[SampleRow], *, is_last_durable: bool = True) -> None:
        if not rows:
            return
        try:
            columns = samples_columns(rows, self._origin)
        except UNSTORABLE as error:
            self._give_up("samples", len(rows), error)
        else:
            last = rows[-1]
            self._write("samples", columns, last.sample_id if is_last_durable else None, last.started_at_us)

    def _write_steps(self, records: list[AttemptRecord]) -> None:
        if not records:
            return
        try:
            columns = steps_columns(records, self._origin)
        except UNSTORABLE as error:
            self._give_up("steps", len(records), error)
        else:
            self._write("steps", columns)

    def _write_fingerprints(self, records: list[FingerprintRecord]) -> None:
        if not records:
            return
        try:
            columns = fingerprints_columns(records, self._origin)
        except UNSTORABLE as error:
            self._give_up("fingerprints", len(records), error)
        else:
            self._write("fingerprints", columns)

    def _write(self, table: str, columns: Columns, sample_id: int | None = None, sample_us: int = 0) -> None:
        try:
            data = encode_columns(columns, self._metadata)
        except UNSTORABLE as error:
            self._give_up(table, columns.table.num_rows, error)
            return
        self._waiting.add(EncodedPart(table, columns.table.num_rows, data, sample_id, sample_us))
        self._waiting.write(self._clock.monotonic_s())
        self._part_added()

    def _give_up(self, table: str, rows: int, error: Exception) -> None:
        self.dropped_rows[table] += rows
        self._failed(error)


def _sample_id(delivery: tuple[int, Sample]) -> int:
    return delivery[0]
