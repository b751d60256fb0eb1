"""From resolved samples to durable parts and documents of one process; used by one thread at a time.

The manifest is written at the start, then at most once a minute and at least every 5 minutes even when
nothing else happens: it is the heartbeat by which readers tell a live process from a dead one.

A target that refuses (a full disk) never stops anything: parts wait in memory within a bound, are tried
again, and are given up and counted beyond it. What a target refuses until the close is given up there, before
the last manifest is written, so that the manifest counts it.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import msgspec

from torchinstruments.config import HistoryConfig
from torchinstruments.records import (
    AttemptRecord,
    ChecksRecord,
    Claim,
    Counters,
    ErrorRecord,
    FingerprintRecord,
    Identity,
    ModuleRecord,
    RunRecord,
    Sample,
)
from torchinstruments.store import layout, schema
from torchinstruments.store.catalog import ModuleCatalog
from torchinstruments.store.checks import ChecksDocument
from torchinstruments.store.clocks import Clock, SystemClock
from torchinstruments.store.manifest import MAX_ERRORS, Manifest, TableState, encode_document
from torchinstruments.store.rank_documents import RankDocuments
from torchinstruments.store.tables import UNSTORABLE, Tables
from torchinstruments.store.target import PartTarget
from torchinstruments.store.texts import encodable, encodable_error, encodable_modules
from torchinstruments.store.waiting import MAX_WAITING_BYTES, WaitingParts

__all__ = ["RankWriter"]

DOCUMENTS_AT_MOST_EVERY_S = 60.0
"""A document that changed is rewritten no sooner than so many seconds after the last time."""

HEARTBEAT_S = 240.0
"""A manifest is rewritten after so many seconds even when nothing changed; readers are promised 300."""

NEXT_WRITE_DUE_S = 300.0
"""What the manifest promises its readers."""

KEEP_ALIVE_EVERY_S = 30.0
"""How often the target is asked to see to whatever carries parts further."""

_MAX_MESSAGE_CHARACTERS = 500
_RETRY_AT_CLOSE_S = 1.0
# The end of the time for a close is for counting what was refused and for the manifest.
_LAST_SHARE = 0.2
_LAST_AT_MOST_S = 1.0


class RankWriter:
    """Writes what one process observed (writer thread only, apart from `counters`).

    Args:
        identity: Who the process is.
        claim: Run, generation and first sample id, as the ranks agreed on them.
        config: When rows are due.
        target: Where they become durable.
        counters: What the training side counted so far; rows, parts and bytes are added here.
        report: Told of each failure to store, as ``("storage", error)``.
        clock: Clocks.
        spool_path: Folder of the spool on this host, where there is one; for the manifest.
        max_waiting_bytes: Encoded bytes that may wait for a target that refuses.
    """

    def __init__(
        self,
        identity: Identity,
        claim: Claim,
        config: HistoryConfig,
        target: PartTarget,
        *,
        counters: Callable[[], Counters] = Counters,
        report: Callable[[str, Exception], None] | None = None,
        clock: Clock | None = None,
        spool_path: str = "",
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._identity = identity
        self._claim = claim
        self._target = target
        self._training_counters = counters
        self._report = report
        self._clock: Clock = SystemClock() if clock is None else clock
        self._documents = RankDocuments(identity, claim, config.window)
        self._waiting = WaitingParts(target, self._note_failure, max_waiting_bytes)
        self._tables = Tables(
            identity,
            claim,
            config.buffer_rows,
            self._waiting,
            self._clock,
            summaries=self._documents,
            part_added=self._part_added,
            failed=self._note_failure,
        )
        self._spool_path = spool_path
        self._modules: tuple[ModuleRecord, ...] = ()
        self._checks: dict[int, bytes] = {}
        self._checks_wait = False
        self._checks_tried_s = float("-inf")
        self._errors: deque[ErrorRecord] = deque(maxlen=MAX_ERRORS)
        self._error_counts: Counter[str] = Counter()
        self._histograms_missing: Counter[str] = Counter()
        self._last_target_error = ""
        self._started_at = _iso(self._clock.wall_us())
        self._status = "running"
        self._was_closed_well: bool | None = None
        self._catalog_due_s: float | None = None
        self._catalog_tried_s = float("-inf")
        self._manifest_changed = True
        self._manifest_tried_s = float("-inf")
        self._losses_told = (0, 0)
        self._kept_alive_s = self._clock.monotonic_s()

    @property
    def direct(self) -> bool:
        """Whether a written part is at once where readers look."""
        return self._target.direct

    def counters(self) -> Counters:
        """Returns the training side's counters with what was stored and given up here (any thread)."""
        training = self._training_counters()
        own = dict(self._error_counts)
        return replace(
            training,
            rows=self._waiting.durable_rows["history"],
            rows_dropped=training.rows_dropped + self._rows_dropped("history"),
            parts=self._waiting.num_parts,
            bytes=self._waiting.num_bytes,
            errors={
                probe: max(own.get(probe, 0), training.errors.get(probe, 0))
                for probe in sorted({*own, *training.errors})
            },
            histograms_missing=dict(self._histograms_missing),
        )

    def start(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Writes all documents for the first time."""
        self._write_manifest()
        self._modules = encodable_modules(modules)
        self._write_catalog()
        self._write_for_people(partial(self._documents.at_attach, run))

    def set_modules(self, modules: Sequence[ModuleRecord]) -> None:
        """Takes the catalog, which is written at the next tick, at most once a minute, and at close.

        Where layers only fired once more it waits for as long as a heartbeat.
        """
        found = encodable_modules(modules)
        if found == self._modules:
            return
        wait_s = HEARTBEAT_S if _differ_in_counts(found, self._modules) else DOCUMENTS_AT_MOST_EVERY_S
        due_s = self._catalog_tried_s + wait_s
        self._modules = found
        self._catalog_due_s = due_s if self._catalog_due_s is None else min(due_s, self._catalog_due_s)

    def write_checks(self, checks: ChecksRecord) -> None:
        """Writes what a session of checks has found so far, beside what others have."""
        self._checks[checks.session] = checks.report
        self._write_checks()

    def _write_checks(self) -> bool:
        document = ChecksDocument(
            schema_version=schema.SCHEMA_VERSION,
            run_id=self._claim.run_id,
            generation=self._claim.generation,
            rank=self._identity.rank,
            process=self._identity.process,
            sessions=tuple([msgspec.Raw(report) for report in self._checks.values()]),
        )
        name = layout.checks_file("", self._identity.process)
        self._checks_tried_s = self._clock.monotonic_s()
        self._checks_wait = not self._write_document(name, document)
        return not self._checks_wait

    def add_sample(self, sample: Sample) -> None:
        """Takes one delivery of a sample."""
        self._documents.count(sample)
        self._tables.add_sample(sample)

    def add_attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Takes the attempts of a window that closed."""
        self._tables.add_attempts(records)

    def add_fingerprints(self, records: Sequence[FingerprintRecord]) -> None:
        """Takes the fingerprints of an attempt."""
        self._tables.add_fingerprints(records)

    def count_missing_histogram(self, reason: str) -> None:
        """Counts a histogram that was due and could not be had of its tensor (writer thread)."""
        self._histograms_missing[reason] += 1
        self._manifest_changed = True

    def add_error(self, error: ErrorRecord, *, listed: bool = True) -> None:
        """Keeps an error for the manifest, which has the last hundred, and counts it by probe.

        Args:
            error: What happened.
            listed: False where it only counts, since it repeats one that was kept.
        """
        if listed:
            error = encodable_error(error)
            stamped = error if error.at else replace(error, at=_iso(self._clock.wall_us()))
            self._errors.append(replace(stamped, message=stamped.message[:_MAX_MESSAGE_CHARACTERS]))
        self._error_counts[error.probe] += 1
        self._manifest_changed = True

    def tick(self) -> None:
        """Does what is due; called about once a second."""
        now_s = self._clock.monotonic_s()
        self._tables.write_due(now_s)
        self._waiting.write(now_s)
        if now_s - self._kept_alive_s >= KEEP_ALIVE_EVERY_S:
            self._kept_alive_s = now_s
            self._keep_alive()
        if self._catalog_due_s is not None and now_s >= self._catalog_due_s:
            self._write_catalog()
        if self._checks_wait and now_s - self._checks_tried_s >= DOCUMENTS_AT_MOST_EVERY_S:
            self._write_checks()
        due_after_s = DOCUMENTS_AT_MOST_EVERY_S if self._manifest_changed else HEARTBEAT_S
        if now_s - self._manifest_tried_s >= due_after_s:
            self._write_manifest()

    def flush(self) -> bool:
        """Makes everything durable that was taken so far, and tells the manifest of new losses and errors.

        Returns:
            False where the target refused and rows wait.
        """
        try:
            self._target.require_in_place()
        except OSError as error:
            self._note_failure(error)
        self._tables.write_all()
        self._waiting.write(self._clock.monotonic_s(), at_once=True)
        if self._losses() != self._losses_told:
            self._write_manifest()
        has_checks = not self._checks_wait or self._write_checks()
        return has_checks and not self._waiting

    def _losses(self) -> tuple[int, int]:
        return self.counters().rows_dropped, self._error_counts.total()

    def close(self, timeout_s: float, *, complete: bool = True) -> bool:
        """Makes everything durable, waits until it is where readers look, and marks the manifest closed.

        Rows that the target refuses are tried again for as long as there is time, then given up and counted
        in the manifest.

        Args:
            timeout_s: How long to try and to wait, and within which ``result.json`` and ``index.md`` are
                made; 0 tries once, waits for nothing and makes neither.
            complete: False at interpreter exit: rows are made durable, but whatever carries them further is
                not waited for, and nothing is made for people.

        Returns:
            False where rows were given up, the manifest could not be written, or something still lies in the
            spool. A further call returns the same.
        """
        if self._was_closed_well is not None:
            return self._was_closed_well
        end_s = self._clock.monotonic_s() + timeout_s
        kept = self._make_durable_or_give_up(end_s - min(_LAST_SHARE * timeout_s, _LAST_AT_MOST_S))
        if self._catalog_due_s is not None:
            self._write_catalog()
        if self._checks_wait:
            kept &= self._write_checks()
        wait_s = self._left_s(end_s) if complete else 0.0
        if wait_s > 0:

            def in_time() -> bool:
                return self._left_s(end_s) > 0

            self._write_for_people(partial(self._documents.at_close, tuple(self._errors), in_time))
            wait_s = self._left_s(end_s)
        arrived = self._target.direct or wait_s <= 0 or self._target.finish(wait_s)
        self._status = "closed"
        told = self._write_manifest()
        arrived = self._target.finish(self._left_s(end_s) if complete else 0.0) and arrived
        self._was_closed_well = kept and told and arrived
        return self._was_closed_well

    def _make_durable_or_give_up(self, end_s: float) -> bool:
        """Tries until `end_s` by the monotonic clock; returns whether nothing had to be given up."""
        self.flush()
        while self._waiting and (left_s := self._left_s(end_s)) > 0:
            retry_s = self._clock.monotonic_s() + min(_RETRY_AT_CLOSE_S, left_s)
            if not self._target.direct:
                self._target.finish(self._left_s(retry_s))  # what is carried on makes room in the spool
            self._clock.sleep(self._left_s(retry_s))
            self._waiting.write(self._clock.monotonic_s(), at_once=True)
        return self._waiting.give_up()

    def _left_s(self, end_s: float) -> float:
        return max(end_s - self._clock.monotonic_s(), 0.0)

    def _keep_alive(self) -> None:
        try:
            self._target.keep_alive()
            self._target.require_in_place()
            # What fails in a folder is raised where it is written.
            last_error = "" if self._target.direct else self._target.state().last_error
        except OSError as error:
            self._note_failure(error)
            return
        if last_error and last_error != self._last_target_error:
            self._note_failure(OSError(last_error))
        self._last_target_error = last_error

    def _write_catalog(self) -> None:
        catalog = ModuleCatalog(
            schema_version=schema.SCHEMA_VERSION,
            run_id=self._claim.run_id,
            generation=self._claim.generation,
            rank=self._identity.rank,
            process=self._identity.process,
            modules=self._modules,
        )
        name = layout.modules_file("", self._identity.process)
        self._catalog_tried_s = self._clock.monotonic_s()
        written = self._write_document(name, catalog)
        self._catalog_due_s = None if written else self._catalog_tried_s + DOCUMENTS_AT_MOST_EVERY_S

    def _write_manifest(self) -> bool:
        self._manifest_tried_s = self._clock.monotonic_s()
        losses = self._losses()
        name = layout.manifest_file("", self._identity.process)
        written = self._write_document(name, self._manifest())
        self._manifest_changed = not written
        if written:
            self._losses_told = losses
        return written

    def _write_for_people(
        self, make: Callable[[Sequence[ModuleRecord], Counters, str], Mapping[str, bytes]]
    ) -> None:
        """Writes ``result.json`` and ``index.md``; rows and manifest never depend on them."""
        try:
            found = make(self._modules, self.counters(), _iso(self._clock.wall_us()))
        except (*UNSTORABLE, MemoryError) as error:
            self._note_failure(error)
            return
        for name, data in found.items():
            self._write_encoded(name, data)

    def _write_document(self, name: str, document: object) -> bool:
        return self._write_encoded(name, encode_document(document))

    def _write_encoded(self, name: str, data: bytes) -> bool:
        try:
            self._target.write_document(name, data)
        except OSError as error:
            self._note_failure(error)
            return False
        return True

    def _manifest(self) -> Manifest:
        identity = self._identity
        last_us = self._waiting.last_sample_us
        return Manifest(
            schema_version=schema.SCHEMA_VERSION,
            run_id=self._claim.run_id,
            generation=self._claim.generation,
            rank=identity.rank,
            world_size=identity.world_size,
            process=identity.process,
            host=identity.host,
            pid=identity.pid,
            local_rank=identity.local_rank,
            node_rank=identity.node_rank,
            launcher=identity.launcher,
            restart_count=identity.restart_count,
            device=identity.device,
            mesh_coordinates=identity.mesh_coordinates,
            mesh_axis_names=identity.mesh_axis_names,
            verified=self._claim.verified,
            first_sample_id=self._claim.first_sample_id,
            last_sample_id=self._waiting.last_sample_id,
            last_sample_at=_iso(last_us) if self._waiting.last_sample_id is not None else "",
            started_at=self._started_at,
            written_at=_iso(self._clock.wall_us()),
            status=self._status,
            next_write_due_s=NEXT_WRITE_DUE_S,
            tables=self._table_states(),
            spool_path=self._spool_path,
            counters=self.counters(),
            errors=tuple(self._errors),
        )

    def _table_states(self) -> dict[str, TableState]:
        states = self._target.state().tables
        return {
            table: replace(
                states.get(table, TableState()),
                rows_dropped=states.get(table, TableState()).rows_dropped + self._rows_dropped(table),
            )
            for table in layout.TABLES
        }

    def _rows_dropped(self, table: str) -> int:
        return self._tables.dropped_rows[table] + self._waiting.dropped_rows[table]

    def _part_added(self) -> None:
        self._manifest_changed = True

    def _note_failure(self, error: Exception) -> None:
        """Counts a failure to store; one that repeats itself is listed once, lest it push out all others."""
        text = encodable(str(error))[:_MAX_MESSAGE_CHARACTERS]
        repeated = any(known.probe == "storage" and known.message == text for known in self._errors)
        if repeated:
            self._error_counts["storage"] += 1
        else:
            self.add_error(ErrorRecord("storage", "", type(error).__name__, text))
        if self._report is not None:
            self._report("storage", error)


def _differ_in_counts(some: Sequence[ModuleRecord], others: Sequence[ModuleRecord]) -> bool:
    """Returns whether two catalogs have the same layers, which fired more or less often."""
    return len(some) == len(others) and all(
        replace(one, fired=other.fired) == other for one, other in zip(some, others, strict=True)
    )


def _iso(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat()
