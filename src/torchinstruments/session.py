"""One observer's connection to its run: when it starts, what carries its samples, how it ends.

At attach, where rank and store can be known, the session enrols in the calling thread, and what the user
configured wrongly raises there on all ranks alike. Else it waits: the first root forward settles who this
process is, and a thread enrols while samples queue. From then on nothing here raises.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from torchinstruments.config import ErrorPolicy, HistoryConfig
from torchinstruments.enrolment import (
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
from torchinstruments.rank_place import Destination
from torchinstruments.ranks.identity import configured_run_id, discover, world_of_one
from torchinstruments.ranks.mesh import MeshPlace
from torchinstruments.records import (
    ChecksRecord,
    ClosedAttempt,
    Counters,
    DeferredFingerprints,
    DeferredSample,
    ErrorRecord,
    Identity,
    ModuleRecord,
)
from torchinstruments.session_exit import finish_at_exit, tell_at_exit
from torchinstruments.session_running import Running
from torchinstruments.sinks.delivery import Delivery
from torchinstruments.sinks.sink import Sink
from torchinstruments.store.filesystem import redact
from torchinstruments.termination import unwatch, watch
from torchinstruments.user_warnings import UserWarnings, lateness

__all__ = ["AGREEMENT_TIMEOUT_S", "CLOSE_TIMEOUT_S", "FLUSH_TIMEOUT_S", "RunSession"]

AGREEMENT_TIMEOUT_S = 60.0
"""For which a rank waits for the leader at attach."""

CLOSE_TIMEOUT_S = 60.0
"""For which `RunSession.close` waits where the caller says nothing."""

FLUSH_TIMEOUT_S = 60.0
"""For which `RunSession.flush` waits where the caller says nothing."""


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
        self._mesh = mesh
        self._process = process
        self._device = device
        self._destination = destination
        self._plan = plan
        self._warnings = UserWarnings(are_wanted=error_policy is not ErrorPolicy.IGNORE)
        self._channel = channel
        self._finish_counting: Callable[[], Callable[[], None] | None] = _nothing
        self._pause: Callable[[], Callable[[int], None] | None] = _nothing
        self._delivery = Delivery(self._warnings.storage_failed)
        self._running = Running(self._delivery, history, plan.policy, sinks, aligned)
        self._identity: Identity | None = None
        self._enrolment: Enrolment | None = None
        self._enrolling: threading.Thread | None = None
        # A thread may close while another one's first forward begins; so may a signal handler in it.
        self._beginning = threading.RLock()
        self._observing = True
        self._is_closed = False
        self._is_abandoned = False
        self._is_enrolled = False
        self._end_lock = threading.RLock()  # garbage collection may abandon a session while this is held
        self._attached_s = time.monotonic()
        self._attached_amid = id(sys.exception())
        tell_at_exit(self)

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
        self._running.source = source

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
            self._warnings.warn("begin", f"nothing is observed: {error}")
            return False
        enrolling = threading.Thread(
            target=self._enrol_in_background, name="torchinstruments-enrolment", daemon=True
        )
        finish_at_exit(self)
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
        return self._running.wants_histograms

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
        return self._running.counters(observed)

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
        self._running.stop_schedule()
        self._tell_exception()
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
            self._warnings.warn("no value", f"the run has samples, but not one value: {emptiness}")
        dropped = self.counters(self._running.source()).rows_dropped
        if dropped:
            self._warnings.warn(
                "dropped", f"{dropped} rows of history were given up; the manifest in {self.url} says why"
            )
        # A sink that ends the run is answered before the end; what fails then is told by itself.
        if not arrived and self._observing and not dropped and not self._delivery.on_writer_thread:
            self._warnings.warn("late", lateness(self.url, "" if enrolment is None else enrolment.spool_path))
        return arrived

    def abandon(self) -> None:
        """Ends the run without waiting, for a model that is gone without remove_observer (any thread)."""
        if not self._is_closed:
            self._is_closed = True
            self._running.stop_schedule(0.0)
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
        self._warnings.silence()
        pause = self._pause()
        if pause is not None:
            pause(1)
        if self._enrolling is not None:
            self._enrolling.join(timeout_s)
        self._tell_end(
            "SIGTERM", "the process was asked to end by SIGTERM, and everything up to then is here"
        )
        self.tell_open_attempt()
        self._delivery.flush(max(end_s - time.monotonic(), 0.0))
        self._delivery.close(max(end_s - time.monotonic(), 0.0), complete=False)

    def _tell_exception(self) -> None:
        """Tells that an exception ends the run, by its type: its message may hold what is nobody's business.

        One amid which the run began is none that ends it; nor is the end that a program asks for.
        """
        error = sys.exception()
        is_an_end = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
        if error is not None and not is_an_end and id(error) != self._attached_amid:
            self._tell_end(
                type(error).__name__, "the run was closed while an exception of this type was raised"
            )

    def _tell_end(self, kind: str, message: str) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.put_error(ErrorRecord("process", "", kind, message, at))

    def _say_if_empty(self) -> None:
        counted = self._running.source()
        if self._observing and counted.samples == 0 and counted.missed == 0:
            elapsed_s = time.monotonic() - self._attached_s
            reason = likely_reason(
                self._plan.sampling,
                forwards=counted.forwards,
                elapsed_s=elapsed_s,
                traced=counted.errors.get(TRACING, 0),
                checkpointed=counted.errors.get(CHECKPOINTED, 0),
                agreeing_s=self._running.agreeing_s,
            )
            self._warnings.warn("empty", f"the run has no sample: {reason}")

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
        if self._enrolling.is_alive() and (samples := self._running.source().samples):
            self._warnings.warn(
                "exit",
                f"the program ended before the run's folder {self.url} could be claimed, so its "
                f"{samples} samples are lost; call remove_observer(model) before the end",
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
            self._warnings.warn("enrolment", f"nothing is kept of rank {identity.rank}: {error}")
        with self._end_lock:
            self._is_enrolled = True
            is_abandoned = self._is_abandoned
        if is_abandoned:
            # What the model left before it was dropped could not be written any earlier.
            self._delivery.close(0.0, complete=False)

    def _start(self, identity: Identity, enrolment: Enrolment) -> None:
        """Starts what runs on a rank that observes, and says what is to be said of the enrolment."""
        for notice in enrolment.notices:
            self._warnings.warn(notice, notice)
        if not self._observing:
            return
        self._running.start(identity, enrolment)


_OPEN: "weakref.WeakSet[RunSession]" = weakref.WeakSet()


def _nothing() -> None:
    """Stands for an observer that is not there yet."""
