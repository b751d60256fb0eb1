"""The writer thread: what was observed goes to the sinks in order, and nothing comes back into training.

One daemon thread a process. It sleeps about a second at a time and works in batches, since a thread that is
busy beside training slows every step. Until `Delivery.start` says which run this is, things only queue.

Nothing that a sink raises ends the thread. Should it end all the same, what it leaves undone is counted as
dropped and told.

A forked child has no writer thread; its copy takes nothing and does nothing. When the main thread has ended,
whatever is still open is flushed for a few seconds; it is closed and its manifest marked then, or once the
threads that may still train have ended. What comes after a close is counted as dropped.
"""

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from torchinstruments.records import (
    ChecksRecord,
    Claim,
    ClosedAttempt,
    DeferredFingerprints,
    DeferredSample,
    ErrorRecord,
    Identity,
    ModuleRecord,
    RunRecord,
)
from torchinstruments.sinks.interrupts import uninterrupted
from torchinstruments.sinks.outbox import (
    Attempts,
    BoundedOutbox,
    Dropped,
    Fingerprints,
    Modules,
)
from torchinstruments.sinks.recipients import Recipients, named
from torchinstruments.sinks.sink import Sink
from torchinstruments.sinks.waiting_attempts import Overdue

__all__ = ["EXIT_TIMEOUT_S", "THREAD_NAME", "Delivery", "others_may_train"]

THREAD_NAME = "torchinstruments-writer"

EXIT_TIMEOUT_S = 5.0
"""How long an interpreter that ends waits for what is still open."""

PATIENCE_S = 20.0
"""How long rows of ``steps`` wait for a scaler's update, so that they do not depend on the moment."""

_SLEEP_S = 1.0

ErrorCallback = Callable[[str, BaseException], None]


@dataclass(slots=True)
class _Flush:
    """A request to flush, and its answer."""

    done: threading.Event = field(default_factory=threading.Event)
    durable: bool = False


@dataclass(frozen=True, slots=True)
class _Close:
    """A request to finish everything and end."""

    deadline_s: float
    complete: bool


class Delivery:
    """Takes what the training threads observed and hands it to sinks from a thread of its own.

    Implements `records.Outbox`.

    Args:
        on_error: Told of every failure, as (probe, error), from the writer thread. What it raises is ignored.
        outbox: The queue, where other bounds than the default ones are wanted.
        patience_s: How long attempts wait for what the host does not know yet of them; a flush or close waits
            for none.
    """

    def __init__(
        self,
        on_error: ErrorCallback | None = None,
        outbox: BoundedOutbox | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._outbox = BoundedOutbox() if outbox is None else outbox
        self._on_error = on_error
        self._requests: SimpleQueue[_Flush | _Close | None] = SimpleQueue()
        self._recipients = Recipients(self._outbox, self.report, patience_s)
        self._thread: threading.Thread | None = None
        # Held while the thread is started, and by who closes for the look at it; a signal handler may close.
        self._starting = threading.RLock()
        self._closing = False
        self._everything_arrived = False
        self._inert = False
        self._has_died = False
        self._writer_s = 0.0
        self._late = Dropped()
        self._late_told = Dropped()
        self._late_lock = threading.RLock()  # a signal handler may put in the middle of a put
        self._pending_error: Exception | None = None
        _LIVE.add(self)

    def fetch_with(self, overdue: Overdue) -> None:
        """Takes what returns the attempts that have waited long for their end (training thread, at attach).

        Args:
            overdue: Called about once a second with the seconds of `time.perf_counter` (writer thread).
        """
        self._recipients.waiting.overdue = overdue

    def put_sample(self, sample: DeferredSample) -> None:
        """Takes one delivery of a sample (training thread, hot path)."""
        if self._takes_nothing():
            self._refuse(deliveries=1, scalars=sample.num_scalars)
            return
        if self._outbox.put_sample(sample) and self._thread is not None and self._requests.empty():
            self._requests.put(None)

    def put_attempts(self, attempts: Sequence[ClosedAttempt]) -> None:
        """Takes the attempts of a window that closed (training thread, hot path)."""
        if self._takes_nothing():
            self._refuse(records=len(attempts))
        else:
            self._outbox.put_records(Attempts(tuple(attempts)))

    def put_fingerprints(self, fingerprints: DeferredFingerprints) -> None:
        """Takes the fingerprints of an attempt (training thread, hot path)."""
        if self._takes_nothing():
            self._refuse(fingerprints=fingerprints.num_rows)
        else:
            self._outbox.put_fingerprints(Fingerprints(fingerprints))

    def put_modules(self, modules: tuple[ModuleRecord, ...]) -> None:
        """Takes the catalog, anew whenever it changed (training thread)."""
        if not self._takes_nothing():
            self._recipients.modules = modules
            self._outbox.put_records(Modules(modules))

    def put_checks(self, checks: ChecksRecord) -> None:
        """Takes what a session of checks has found so far (training thread)."""
        if not self._takes_nothing():
            self._outbox.put_records(checks)

    def put_error(self, error: ErrorRecord) -> None:
        """Takes an error of collection (training thread)."""
        if not self._takes_nothing():
            self._outbox.put_records(error)

    @property
    def rows_dropped(self) -> int:
        """Rows of ``history`` that never reached a sink (any thread)."""
        return self._outbox.dropped.scalars + self._recipients.rows_lost + self._late.scalars

    @property
    def emptiness(self) -> str:
        """Why not one number of the samples so far has a value; ``""`` where one has (closing thread)."""
        return self._recipients.emptiness

    @property
    def writer_s(self) -> float:
        """Processor seconds of the writer thread so far (any thread)."""
        return self._writer_s

    def start(
        self,
        run: RunRecord,
        sinks: Sequence[Sink],
        *,
        identity: Identity | None = None,
        claim: Claim | None = None,
    ) -> None:
        """Starts the writer thread, once it is known which run this is; a second call does nothing.

        Args:
            run: The run that sinks are told of.
            sinks: In the order in which they take samples.
            identity: Who this process is, for the sinks that are `RankAware`.
            claim: What the ranks agreed on, for the same ones.
        """
        with self._starting:
            if self._thread is not None or self._takes_nothing():
                return
            place = None if identity is None or claim is None else (identity, claim)
            thread = threading.Thread(
                target=self._work, args=(run, list(sinks), place), name=THREAD_NAME, daemon=True
            )
            # Not known before it runs: it cannot be waited for until then.
            thread.start()
            self._thread = thread

    @property
    def on_writer_thread(self) -> bool:
        """Whether the caller is the writer thread, as a sink is (any thread)."""
        return self._thread is threading.current_thread()

    def report(self, probe: str, error: BaseException) -> None:
        """Takes a failure of a sink or a store: for the owner, and for `pending_error` (writer thread)."""
        if self._pending_error is None:
            self._pending_error = error if isinstance(error, Exception) else _as_failure(error)
        if self._on_error is not None:
            # Whoever is told of errors must not make more of them.
            with contextlib.suppress(BaseException):
                self._on_error(probe, error)

    def pending_error(self) -> Exception | None:
        """Returns the first failure that was not returned yet, for ``error_policy="raise"`` (any thread).

        What ends a program, raised by a sink, is a `RuntimeError` here: it was not meant for the training.
        """
        error, self._pending_error = self._pending_error, None
        return error

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything that was put so far is durable (any thread but the writer's).

        Returns:
            False where it is not, after `timeout_s` seconds at the latest; at once where nothing was started.
        """
        thread = self._thread
        if self._inert:
            return True
        if thread is None or self._closing or self._has_died or thread is threading.current_thread():
            return self._everything_arrived
        request = _Flush()
        self._requests.put(request)
        if self._has_died:
            return False  # the thread ended in between, and may not have seen the request
        end_s = time.monotonic() + timeout_s
        # In slices: a thread that ends with the request in its hands answers nobody.
        while not request.done.wait(min(_SLEEP_S, max(end_s - time.monotonic(), 0.0))):
            if self._has_died or time.monotonic() >= end_s:
                return False
        return request.durable

    def close(self, timeout_s: float, *, complete: bool = True) -> bool:
        """Hands over what waits, closes the sinks and ends the thread; further calls wait for the same end.

        False where a sink that stores could not begin: what it would have stored is counted as dropped. A
        sink may call it too: it is answered with False, and the thread closes after the call.

        Args:
            timeout_s: How long to wait. The thread goes on after it, as long as the process lives.
            complete: False at interpreter exit, where only what is needed is done.

        Returns:
            Whether everything is where readers look.
        """
        if self._inert:
            return True
        with self._starting:
            thread = self._thread
            if thread is None:
                self._closing = True
                return len(self._outbox) == 0
        if not self._closing:
            self._closing = True
            self._requests.put(_Close(time.monotonic() + timeout_s, complete))
        if thread is threading.current_thread():
            return False
        thread.join(timeout_s)
        if self._has_died and not thread.is_alive():
            self._tell_late_losses()
        return self._everything_arrived

    def _tell_late_losses(self) -> None:
        """Has told what was dropped since the thread ended, in its place (closing thread)."""
        with self._late_lock:
            before, self._late_told = self._late_told, self._late
            is_told = before == self._late
        if not is_told:
            self._recipients.flush()

    def _takes_nothing(self) -> bool:
        return self._inert or self._closing or self._has_died

    def _refuse(self, deliveries: int = 0, scalars: int = 0, records: int = 0, fingerprints: int = 0) -> None:
        """Counts what came after the close, and says so once (training thread)."""
        if self._inert:
            return  # a forked child observes nothing
        with self._late_lock:
            before = self._late
            self._late = Dropped(
                before.deliveries + deliveries,
                before.scalars + scalars,
                before.records + records,
                before.fingerprints + fingerprints,
            )
        if before.scalars == 0 and scalars and self._on_error is not None:
            came, way_out = "after the run was closed", "after the last forward and backward"
            if self._has_died:
                came, way_out = "after the writer thread had ended", "and attach again to go on measuring"
            error = RuntimeError(
                f"a sample came {came}, and its {scalars} scalars were dropped, as those "
                f"of further ones will be; call remove_observer(model) {way_out}"
            )
            with contextlib.suppress(Exception):
                self._on_error("sink", error)

    def _work(self, run: RunRecord, sinks: Sequence[Sink], place: tuple[Identity, Claim] | None) -> None:
        """The writer thread, from start to end."""
        try:
            self._recipients.initialize(run, sinks, place)
            while not self._serve_safely(self._next_request()):
                self._writer_s = time.thread_time()
        except BaseException as error:  # noqa: BLE001 - what was left here has to be counted
            self._die(error)
        self._recipients.waiting.overdue = None
        self._writer_s = time.thread_time()

    def _serve_safely(self, request: "_Flush | _Close | None") -> bool:
        """Does one round, and survives it; returns whether it was the last one."""
        try:
            return self._serve(request)
        except Exception as error:  # noqa: BLE001 - whatever it was, the run goes on
            self._recipients.fail("sink", "", error)
            if isinstance(request, _Flush):
                request.done.set()
            return isinstance(request, _Close)

    def _serve(self, request: "_Flush | _Close | None") -> bool:
        """Does one round; returns whether it was the last one."""
        self._recipients.hand_over()
        self._recipients.waiting.fetch_overdue()
        self._recipients.hand_over_waiting(everything=request is not None)
        if isinstance(request, _Close):
            self._everything_arrived = self._recipients.finish(request.deadline_s, complete=request.complete)
            return True
        if isinstance(request, _Flush):
            request.durable = self._recipients.flush()
            request.done.set()
        self._recipients.tick()
        return False

    def _die(self, error: BaseException) -> None:
        """Counts what waits as dropped, says so, and makes durable what was taken (at the thread's end).

        Nothing marks the run's folder as closed: readers find a process that was interrupted.
        """
        self._has_died = True
        lost = self._recipients.drop_rest()
        self._recipients.fail(
            "sink",
            "",
            RuntimeError(
                f"the writer thread ended by {named(error)}; {lost} scalars that "
                f"waited were dropped, as those of further samples will be"
            ),
        )
        self._recipients.hand_over_waiting(everything=True)
        self._recipients.leave()
        with contextlib.suppress(Empty):
            while True:
                request = self._requests.get_nowait()
                if isinstance(request, _Flush):
                    request.done.set()

    def _next_request(self) -> "_Flush | _Close | None":
        try:
            return self._requests.get(timeout=_SLEEP_S)
        except Empty:
            return None


def _as_failure(error: BaseException) -> Exception:
    failure = RuntimeError(f"a sink raised {named(error)}")
    failure.__cause__ = error
    return failure


_LIVE: "weakref.WeakSet[Delivery]" = weakref.WeakSet()


def others_may_train() -> bool:
    """Returns whether threads that are no daemons go on beside this one (when the main thread has ended)."""
    return any(
        thread is not threading.main_thread()
        and thread is not threading.current_thread()
        and thread.is_alive()
        and not thread.daemon
        for thread in threading.enumerate()
    )


@uninterrupted()
def _finish_after_main() -> None:
    """Flushes what is still open when the main thread has ended, and closes it unless others may go on.

    Threads that are no daemons, and those of pools, are waited for only after this; one of them may train.
    """
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    others_go_on = others_may_train()
    for delivery in list(_LIVE):
        left_s = max(deadline_s - time.monotonic(), 0.0)
        if others_go_on:
            delivery.flush(left_s)
        else:
            delivery.close(left_s, complete=False)


@uninterrupted()
def _finish_at_exit() -> None:
    """Closes what is open when all threads have ended but daemons, all of it within `EXIT_TIMEOUT_S`."""
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    for delivery in list(_LIVE):
        if not delivery._closing:  # noqa: SLF001 - the class and its exit hook are one
            delivery.close(max(deadline_s - time.monotonic(), 0.0), complete=False)


def _make_inert() -> None:
    """Lets the copies that a forked child inherits take nothing: their thread was left behind."""
    for delivery in list(_LIVE):
        delivery._inert = True  # noqa: SLF001 - the class and its fork hook are one


atexit.register(_finish_at_exit)
# Runs before the interpreter waits for its pools and forbids new ones; atexit's turn comes after that.
with contextlib.suppress(AttributeError, RuntimeError):  # RuntimeError: imported after the main thread's end
    threading._register_atexit(_finish_after_main)  # type: ignore[attr-defined]  # noqa: SLF001
os.register_at_fork(after_in_child=_make_inert)
