"""One observer's connection to its run: when it starts, what carries its samples, how it ends.

At attach, where rank and store can be known, the session enrols in the calling thread, and what the user
configured wrongly raises there on all ranks alike. Else it waits: the first root forward settles who this
process is, and a thread enrols while samples queue. From then on nothing here raises.
"""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from torchinstruments.config import ErrorPolicy, HistoryConfig
from torchinstruments.enrolment import (
    MAX_DIRECT_WORLD_SIZE,
    Destination,
    Enrolment,
    RunPlan,
    can_agree,
    enrol,
    raise_failure,
    try_destination,
)
from torchinstruments.errors import ConfigurationError, TorchInstrumentsError
from torchinstruments.observe.aligned import AlignedSampler
from torchinstruments.observe.emptiness import likely_reason
from torchinstruments.observe.unseen import CHECKPOINTED, TRACING
from torchinstruments.ranks.identity import configured_run_id, discover, world_of_one
from torchinstruments.ranks.mesh import MeshPlace
from torchinstruments.ranks.rendezvous import Agreement
from torchinstruments.ranks.timetable import ScheduleThread, schedule
from torchinstruments.records import (
    ChecksRecord,
    ClosedAttempt,
    Counters,
    DeferredFingerprints,
    DeferredSample,
    ErrorRecord,
    Identity,
    ModuleRecord,
    error_text,
)
from torchinstruments.sinks.delivery import EXIT_TIMEOUT_S, Delivery, others_may_train
from torchinstruments.sinks.directory import RankFolderSink
from torchinstruments.sinks.event_files import HistogramFiles, open_histogram_files
from torchinstruments.sinks.interrupts import uninterrupted
from torchinstruments.sinks.sink import Sink
from torchinstruments.store.filesystem import redact
from torchinstruments.store.spool_folder import LOG as UPLOADER_LOG
from torchinstruments.store.writer import RankWriter
from torchinstruments.termination import unwatch, watch
from torchinstruments.warning_place import warn_user

__all__ = ["AGREEMENT_TIMEOUT_S", "CLOSE_TIMEOUT_S", "FLUSH_TIMEOUT_S", "RunSession"]

AGREEMENT_TIMEOUT_S = 60.0
"""For which a rank waits for the leader at attach."""

CLOSE_TIMEOUT_S = 60.0
"""For which `RunSession.close` waits where the caller says nothing."""

FLUSH_TIMEOUT_S = 60.0
"""For which `RunSession.flush` waits where the caller says nothing."""

_LOGGER = logging.getLogger("torchinstruments")


class RunSession:
    """Implements `torchinstruments.observe.session_protocol.Session` over a delivery thread and a directory.

    Args:
        process: 8 hex digits of this process.
        device: Device of the model, as torch writes it.
        destination: Where the user wants the run.
        plan: Settings for ``run.json``.
        history: Settings of the history.
        error_policy: Whether trouble is warned about.
        channel: Keeps several observers of one process apart.
        sinks: Take the samples too, beside the run's folder.
        aligned: Measures the same forwards as the other ranks, once they have agreed; None where the sampler
            goes by no time.
        mesh: Asked once where this rank lies in the model's device mesh.
    """

    def __init__(
        self,
        *,
        process: str,
        device: str,
        destination: Destination,
        plan: RunPlan,
        history: HistoryConfig,
        error_policy: ErrorPolicy,
        channel: str,
        sinks: Sequence[Sink] = (),
        aligned: AlignedSampler | None = None,
        mesh: Callable[[], MeshPlace] = MeshPlace,
    ) -> None:
        self._aligned = aligned
        self._mesh = mesh
        self._schedule: ScheduleThread | None = None
        self._sinks = tuple(sinks)
        self._process = process
        self._device = device
        self._destination = destination
        self._plan = plan
        self._history = history
        self._warns = error_policy is not ErrorPolicy.IGNORE
        self._channel = channel
        self._source: Callable[[], Counters] = Counters
        self._finish_counting: Callable[[], Callable[[], None] | None] = _nothing
        self._pause: Callable[[], Callable[[int], None] | None] = _nothing
        self._delivery = Delivery(self._storage_failed)
        self._writer: RankWriter | None = None
        self._identity: Identity | None = None
        self._enrolment: Enrolment | None = None
        self._enrolling: threading.Thread | None = None
        # A thread may close while another one's first forward begins; so may a signal handler in it.
        self._beginning = threading.RLock()
        self._observing = True
        self._wants_histograms = True
        self._warned: set[str] = set()
        self._is_closed = False
        self._is_abandoned = False
        self._is_enrolled = False
        self._end_lock = threading.RLock()  # garbage collection may abandon a session while this is held
        self._attached_s = time.monotonic()
        _ALIVE.add(self)

    @property
    def url(self) -> str:
        """Where the run lies, without secrets; until that is agreed, where it was asked for."""
        enrolment = self._enrolment
        return enrolment.url if enrolment is not None else redact(self._destination.url)

    @property
    def world_size(self) -> int:
        """Ranks of the world; 1 until it is known."""
        identity = self._identity
        return 1 if identity is None else identity.world_size

    @property
    def observing(self) -> bool:
        """Whether this rank observes, as far as that is known."""
        return self._observing

    def count_with(self, source: Callable[[], Counters]) -> None:
        """Takes what tells the training side's counters, for the manifest."""
        self._source = source

    def fetch_with(self, overdue: Callable[[float], Sequence[ClosedAttempt]]) -> None:
        """Takes what returns the attempts that have waited long for their end, called in the writer thread.

        Args:
            overdue: Takes the seconds of `time.perf_counter`.
        """
        self._delivery.fetch_with(overdue)

    def finish_with(self, last_words: Callable[[], Callable[[], None] | None]) -> None:
        """Takes what leaves the attempt that is open here, when the interpreter exits without a close.

        Args:
            last_words: Returns what does that, or None where the observer is gone; a weak reference.
        """
        self._finish_counting = last_words

    def pause_with(self, pause: Callable[[], Callable[[int], None] | None]) -> None:
        """Takes what lets no further sample begin, when SIGTERM is about to end the process.

        Args:
            pause: Returns what takes 1 for that, or None where the observer is gone; a weak reference.
        """
        self._pause = pause

    def open(self) -> bool:
        """Enrols now, where that is possible (attaching thread).

        Returns:
            Whether it was; else the first root forward will do it.

        Raises:
            ConfigurationError: The environment's rank, the policy, the address or the options cannot work.
            StorageError: The store refuses what the user configured; on all ranks alike.
        """
        identity = discover(self._process, self._device)
        if identity is None or not can_agree(identity):
            assumed = identity or world_of_one(self._process, self._device)
            raise_failure(try_destination(self._destination, self._plan, assumed))
            return False
        identity = self._settle(identity)
        self._refuse_shared_folder()
        enrolment = self._enrol(identity)
        raise_failure(enrolment.claim)
        self._start(identity, enrolment)
        if self._observing:
            watch(self)
        return True

    def begin(self) -> bool:
        """Settles who this process is, and has it enrolled; see `Session.begin` (training thread)."""
        with self._beginning:
            return self._observing if self._identity is not None else self._begin()

    def _begin(self) -> bool:
        """Does what `begin` does the first time."""
        try:
            self._settle(discover(self._process, self._device) or world_of_one(self._process, self._device))
            self._refuse_shared_folder()
        except TorchInstrumentsError as error:
            self._observing = False
            self._identity = world_of_one(self._process, self._device)
            self._warn("begin", f"nothing is observed: {error}")
            return False
        enrolling = threading.Thread(
            target=self._enrol_in_background, name="torchinstruments-enrolment", daemon=True
        )
        _WAITING.add(self)
        if self._observing:
            watch(self)
        # Not known before it runs: it cannot be waited for until then.
        enrolling.start()
        self._enrolling = enrolling
        return self._observing

    def wants_histograms(self) -> bool:
        """Returns whether anyone keeps histograms of this rank (training or autograd thread, hot path).

        True until the ranks have agreed who leads: what is taken before that may be kept by nobody.
        """
        return self._wants_histograms

    def put_sample(self, sample: DeferredSample) -> None:
        """Takes one delivery of a sample (training thread, hot path)."""
        self._delivery.put_sample(sample)

    def put_attempts(self, attempts: Sequence[ClosedAttempt]) -> None:
        """Takes the attempts of a window that closed (training thread, hot path)."""
        self._delivery.put_attempts(attempts)

    def put_fingerprints(self, fingerprints: DeferredFingerprints) -> None:
        """Takes the fingerprints of an attempt (training thread, hot path)."""
        self._delivery.put_fingerprints(fingerprints)

    def put_modules(self, modules: tuple[ModuleRecord, ...]) -> None:
        """Takes the catalog, anew whenever it changed (training thread)."""
        self._delivery.put_modules(modules)

    def put_checks(self, checks: ChecksRecord) -> None:
        """Takes what a session of checks has found so far (training thread)."""
        self._delivery.put_checks(checks)

    def put_error(self, error: ErrorRecord) -> None:
        """Takes an error of collection (training thread)."""
        self._delivery.put_error(error)

    def counters(self, observed: Counters) -> Counters:
        """Returns what the observer counted together with what was stored and dropped here (any thread)."""
        writer = self._writer
        return writer.counters() if writer is not None else self._with_delivery(observed)

    def pending_error(self) -> BaseException | None:
        """Returns the first error of a sink or of the storage that was not returned yet (training thread)."""
        return self._delivery.pending_error()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Returns whether everything left so far became durable in time (any thread but the writer)."""
        end_s = time.monotonic() + (FLUSH_TIMEOUT_S if timeout_s is None else timeout_s)
        if self._enrolling is not None:
            # Until the run is known there is nothing to flush into.
            self._enrolling.join(max(end_s - time.monotonic(), 0.0))
        return self._delivery.flush(max(end_s - time.monotonic(), 0.0))

    def close(self, timeout_s: float | None = None) -> bool:
        """Ends the run for this process; returns whether all of it became durable in time. Idempotent.

        A sink that calls it is answered with False at once, and the run ends after the sink's call.
        """
        if self._is_closed:
            return self._delivery.close(CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)
        self._is_closed = True
        try:
            return self._close(timeout_s)
        finally:
            unwatch(self)

    def _close(self, timeout_s: float | None) -> bool:
        """Does what `close` does the first time."""
        if self._schedule is not None:
            self._schedule.stop()
        wait_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        self._say_if_empty()
        self.begin()
        if self._enrolling is not None:
            self._enrolling.join(wait_s)
        enrolment = self._enrolment
        if enrolment is not None and enrolment.agreement.service is not None:
            enrolment.agreement.service.stop()
        arrived = self._delivery.close(wait_s)
        emptiness = self._delivery.emptiness
        if emptiness:
            self._warn("no value", f"the run has samples, but not one value: {emptiness}")
        dropped = self.counters(self._source()).rows_dropped
        if dropped:
            self._warn(
                "dropped", f"{dropped} rows of history were given up; the manifest in {self.url} says why"
            )
        # A sink that ends the run is answered before the end; what fails then is told by itself.
        if not arrived and self._observing and not dropped and not self._delivery.on_writer_thread:
            self._warn("late", self._lateness("" if enrolment is None else enrolment.spool_path))
        return arrived

    def _lateness(self, spool_path: str) -> str:
        """Returns what is said where not everything has arrived at the close."""
        if not spool_path:
            return f"not everything reached {self.url}; its manifest says what was given up"
        log = Path(spool_path).parent / UPLOADER_LOG
        return (
            f"not everything has reached {self.url} yet; the rest lies in {spool_path} and is still carried, "
            f"by an uploader that keeps the endpoint and credentials it was started with; if {log} says that "
            f"they are wrong, carry it with others: torchinstruments upload {spool_path}"
        )

    def abandon(self) -> None:
        """Ends the run without waiting, for a model that is gone without remove_observer (any thread)."""
        if not self._is_closed:
            self._is_closed = True
            if self._schedule is not None:
                self._schedule.stop(0.0)
            with self._end_lock:
                self._is_abandoned = True
                has_begun = self._enrolling is None or self._is_enrolled
            if has_begun:
                self._delivery.close(0.0, complete=False)
            unwatch(self)

    def flush_at_signal(self, timeout_s: float) -> None:
        """Makes durable what there is at a SIGTERM after which the process goes on (a thread of its own)."""
        self.flush(timeout_s)

    def end_at_signal(self, timeout_s: float) -> None:
        """Makes durable what there is and marks the manifest, before SIGTERM ends the process.

        Training may go on meanwhile, and nothing new is measured; what a sample that was under way still
        leaves is lost with the process, and nobody is warned of that (a thread of its own).
        """
        end_s = time.monotonic() + timeout_s
        self._warns = False
        pause = self._pause()
        if pause is not None:
            pause(1)
        if self._enrolling is not None:
            self._enrolling.join(timeout_s)
        self.put_error(
            ErrorRecord(
                "process",
                "",
                "SIGTERM",
                "the process was asked to end by SIGTERM, and everything up to then is here",
                datetime.now(UTC).isoformat(timespec="milliseconds"),
            )
        )
        self.tell_open_attempt()
        self._delivery.flush(max(end_s - time.monotonic(), 0.0))
        self._delivery.close(max(end_s - time.monotonic(), 0.0), complete=False)

    def _say_if_empty(self) -> None:
        counted = self._source()
        if self._observing and counted.samples == 0 and counted.missed == 0:
            elapsed_s = time.monotonic() - self._attached_s
            reason = likely_reason(
                self._plan.sampling,
                forwards=counted.forwards,
                elapsed_s=elapsed_s,
                traced=counted.errors.get(TRACING, 0),
                checkpointed=counted.errors.get(CHECKPOINTED, 0),
                agreeing_s=0.0 if self._schedule is None else self._schedule.agreeing_s,
            )
            self._warn("empty", f"the run has no sample: {reason}")

    def tell_open_attempt(self) -> None:
        """Has the attempt that is open left here; other threads may still train (at interpreter exit)."""
        last_words = self._finish_counting()
        if last_words is not None and not self._is_closed:
            last_words()

    def finish_enrolment(self, timeout_s: float) -> None:
        """Waits for an enrolment that is still going on (at interpreter exit)."""
        if self._enrolling is None:
            return
        self._enrolling.join(timeout_s)
        if self._enrolling.is_alive() and self._source().samples:
            self._warn(
                "exit",
                f"the program ended before the run's folder {self.url} could be claimed, so its "
                f"{self._source().samples} samples are lost; call remove_observer(model) before the end",
            )

    def _settle(self, identity: Identity) -> Identity:
        """Takes who this process is, where it lies in the mesh, and what the rank policy makes of that.

        Returns:
            The identity with its place in the mesh.

        Raises:
            ConfigurationError: The policy cannot be applied.
        """
        place = self._mesh()
        identity = replace(identity, mesh_coordinates=place.coordinates, mesh_axis_names=place.axis_names)
        self._plan.policy.validate(identity.world_size)
        self._observing = self._plan.policy.observes(identity)
        self._identity = identity
        return identity

    def _refuse_shared_folder(self) -> None:
        """Keeps two observers of one process from writing as one run into one folder.

        Without a run id of the user or the launcher each makes its own, and the second goes beside.

        Raises:
            ConfigurationError: Another observer that is still open has the same folder and run id.
        """
        run_id = self._destination.run_id or configured_run_id()
        for other in list(_OPEN):
            if (
                run_id is not None
                and not other._is_closed  # noqa: SLF001 - the class and its list are one
                and other._destination == self._destination  # noqa: SLF001
            ):
                raise ConfigurationError(
                    f"output_dir={redact(self._destination.url)!r} is used by another observer of this "
                    f"process for run {run_id!r}; give each model its own folder, or remove the "
                    f"other observer first"
                )
        _OPEN.add(self)

    def _enrol(self, identity: Identity) -> Enrolment:
        enrolment = enrol(
            identity,
            self._destination,
            self._plan,
            observing=self._observing,
            channel=self._channel,
            timeout_s=AGREEMENT_TIMEOUT_S,
        )
        self._enrolment = enrolment
        return enrolment

    def _enrol_in_background(self) -> None:
        identity = self._identity
        assert identity is not None, "settled before the thread was started"
        try:
            enrolment = self._enrol(identity)
            raise_failure(enrolment.claim)
            self._start(identity, enrolment)
        except Exception as error:  # noqa: BLE001 - training goes on whatever the store says
            self._warn("enrolment", f"nothing is kept of rank {identity.rank}: {error}")
        with self._end_lock:
            self._is_enrolled = True
            is_abandoned = self._is_abandoned
        if is_abandoned:
            # What the model left before it was dropped could not be written any earlier.
            self._delivery.close(0.0, complete=False)

    def _start(self, identity: Identity, enrolment: Enrolment) -> None:
        """Starts the writer thread, on a rank that observes and has a place to write."""
        for notice in enrolment.notices:
            self._warn(notice, notice)
        if not self._observing:
            return
        self._start_schedule(identity, enrolment.agreement)
        if enrolment.target is None:
            return
        self._writer = RankWriter(
            identity,
            enrolment.claim,
            self._history,
            enrolment.target,
            counters=self._training_counters,
            report=self._delivery.report,
            spool_path=enrolment.spool_path,
        )
        histograms = self._open_histogram_files(identity, enrolment)
        # Any sink of the user may read them.
        self._wants_histograms = histograms is not None or bool(self._sinks)
        folder = RankFolderSink(
            self._writer,
            enrolment.copy_folder,
            histograms=histograms,
            report=self._delivery.report,
        )
        self._delivery.start(enrolment.run, [folder, *self._sinks], identity=identity, claim=enrolment.claim)

    def _start_schedule(self, identity: Identity, agreement: Agreement) -> None:
        """Starts the thread that keeps time-based samples at forwards which all ranks have in common."""
        if self._aligned is None:
            return
        if self._plan.policy.chooses_one:
            self._aligned.go_alone()
            return
        self._schedule = schedule(
            self._aligned,
            identity,
            agreement,
            first_rank=self._plan.policy.first_rank,
            on_error=self._schedule_ended,
        )
        if self._schedule is None:
            self._aligned.go_alone()
        elif self._is_closed:
            return
        else:
            self._schedule.start()

    def _schedule_ended(self, error: Exception) -> None:
        self.put_error(
            ErrorRecord(
                "alignment",
                "",
                type(error).__name__,
                f"this rank samples by its own time from here on: {error}"[:500],
                datetime.now(UTC).isoformat(timespec="milliseconds"),
            )
        )

    def _open_histogram_files(self, identity: Identity, enrolment: Enrolment) -> HistogramFiles | None:
        """Returns what writes TensorBoard files; in a large world the leader's alone are kept."""
        if enrolment.target is None or (
            identity.world_size > MAX_DIRECT_WORLD_SIZE and not enrolment.agreement.leader
        ):
            return None
        return open_histogram_files(enrolment.target, enrolment.copy_folder, identity, enrolment.claim)

    def _training_counters(self) -> Counters:
        return self._with_delivery(self._source())

    def _with_delivery(self, observed: Counters) -> Counters:
        return replace(
            observed,
            rows_dropped=observed.rows_dropped + self._delivery.rows_dropped,
            writer_s=self._delivery.writer_s,
        )

    def _storage_failed(self, probe: str, error: BaseException) -> None:
        """Warns once a kind of what failed in the writer thread; it is in the manifest already."""
        kind = f"{probe}:{type(error).__name__}"
        text = error_text(error)
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        self._warn(kind, f"{probe} failed: {what}; training goes on")

    def _warn(self, kind: str, sentence: str) -> None:
        """Warns once a kind; where warnings are errors it is logged instead, for training must go on."""
        if not self._warns or kind in self._warned or len(self._warned) > _MAX_KINDS:
            return
        self._warned.add(kind)
        try:
            warn_user(f"torchinstruments: {sentence}")
        except Exception:  # noqa: BLE001 - a filter turned it into an exception
            _LOGGER.warning("torchinstruments: %s", sentence)


_MAX_KINDS = 100
_ALIVE: "weakref.WeakSet[RunSession]" = weakref.WeakSet()
_OPEN: "weakref.WeakSet[RunSession]" = weakref.WeakSet()
_WAITING: "weakref.WeakSet[RunSession]" = weakref.WeakSet()


def _nothing() -> None:
    """Stands for an observer that is not there yet."""


@uninterrupted()
def _finish_after_main() -> None:
    """Lets what a first forward began come to its end, before the writer threads are asked to finish.

    The open attempt is left to `_finish_at_exit` where a thread may still train.
    """
    if not others_may_train():
        _tell_open_attempts()
    _finish_enrolments()


@uninterrupted()
def _finish_at_exit() -> None:
    """Does the same for what threads did that outlived the main one."""
    _tell_open_attempts()
    _finish_enrolments()


def _tell_open_attempts() -> None:
    """Has the attempts that are open left with the writer threads."""
    for session in list(_ALIVE):
        try:
            session.tell_open_attempt()
        except Exception as error:  # noqa: BLE001 - the other sessions have theirs to tell
            _LOGGER.warning("torchinstruments: the last attempt of %s is lost: %s", session.url, error)


def _finish_enrolments() -> None:
    """Waits for enrolments that are still going on."""
    end_s = time.monotonic() + EXIT_TIMEOUT_S
    for session in list(_WAITING):
        session.finish_enrolment(max(end_s - time.monotonic(), 0.0))


# Hooks run in the reverse order of their registration: these before those of the delivery threads.
atexit.register(_finish_at_exit)
try:
    threading._register_atexit(_finish_after_main)  # type: ignore[attr-defined]  # noqa: SLF001
except (AttributeError, RuntimeError):
    # Not every Python has it, and after the main thread's end it takes none.
    atexit.register(_finish_after_main)
