"""The writer thread and what it does with sinks."""

import asyncio
import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from typing_extensions import override

from torchinstruments.records import (
    AttemptRecord,
    Claim,
    ClosedAttempt,
    ErrorRecord,
    FingerprintRecord,
    Identity,
    Measurement,
    ModuleRecord,
    RunRecord,
    Sample,
)
from torchinstruments.sinks.delivery import THREAD_NAME, Delivery
from torchinstruments.sinks.outbox import Attempts, BoundedOutbox
from unit.store.material import attempt, claim, fingerprint, forward, identity, module, run_record

WAIT_S = 30.0


@dataclass
class Deferred:
    """A sample that may fail, or wait, when it is resolved."""

    ordinal: int = 0
    num_scalars: int = 1
    before: Callable[[], object] | None = None

    def resolve(self) -> Sample:
        """Returns a sample without measurements."""
        if self.before is not None:
            self.before()
        return forward(self.ordinal)


@dataclass
class DeferredRows:
    """Fingerprints that may fail when they are resolved."""

    before: Callable[[], None] | None = None
    num_rows: int = 2

    def resolve(self) -> list[FingerprintRecord]:
        """Returns two rows."""
        if self.before is not None:
            self.before()
        return [fingerprint(0), fingerprint(0, "0.bias", 5)]


@dataclass
class PlainSink:
    """Keeps what it is given; the protocol that anyone may implement."""

    seen: list[tuple[object, ...]] = field(default_factory=list)

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Keeps the run's id and the number of layers."""
        self.seen.append(("initialize", run.run_id, len(modules)))

    def ordinals(self) -> list[object]:
        """Returns the ordinals of the samples that came."""
        return [entry[1] for entry in self.seen if entry[0] == "observe"]

    def observe(self, sample: Sample) -> None:
        """Keeps the ordinal, and the thread's name."""
        self.seen.append(("observe", sample.ordinal, threading.current_thread().name))

    def close(self) -> None:
        """Keeps that it was closed."""
        self.seen.append(("close",))


@dataclass
class KeepingSink(PlainSink):
    """Keeps everything else too."""

    errors: list[ErrorRecord] = field(default_factory=list)
    arrived: bool = True

    def attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Keeps the attempts' numbers."""
        self.seen.append(("attempts", tuple(record.attempt for record in records)))

    def fingerprints(self, records: Sequence[FingerprintRecord]) -> None:
        """Keeps the names and digests of the tensors."""
        self.seen.append(("fingerprints", tuple((record.tensor, record.digest) for record in records)))

    def modules(self, modules: Sequence[ModuleRecord]) -> None:
        """Keeps the number of layers."""
        self.seen.append(("modules", len(modules)))

    def error(self, error: ErrorRecord) -> None:
        """Keeps the error."""
        self.errors.append(error)

    def tick(self) -> None:
        """Does nothing."""

    def flush(self) -> bool:
        """Keeps that it was flushed."""
        self.seen.append(("flush",))
        return self.arrived

    def finish(self, timeout_s: float, *, complete: bool) -> bool:
        """Keeps how it was finished."""
        assert timeout_s >= 0
        self.seen.append(("finish", complete))
        return self.arrived


class FailingSink(PlainSink):
    """Fails at one of its methods."""

    def __init__(self, where: str, error: BaseException | None = None) -> None:
        super().__init__()
        self.where = where
        self.error = RuntimeError(f"broken {where}") if error is None else error

    @override
    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Fails where it should."""
        self.fail("initialize")
        super().initialize(run, modules)

    @override
    def observe(self, sample: Sample) -> None:
        """Fails where it should."""
        self.fail("observe")
        super().observe(sample)

    @override
    def close(self) -> None:
        """Fails where it should."""
        self.fail("close")
        super().close()

    def fail(self, where: str) -> None:
        """Raises in the method that was chosen."""
        if where == self.where:
            raise self.error


def raise_value_error() -> None:
    """A device that lost a copy."""
    raise ValueError("the copy failed")


def test_a_delivery_waits_for_its_run_and_then_hands_over_in_order() -> None:
    """What was put before the start comes first, and everything comes from the writer thread."""
    sink = KeepingSink()
    delivery = Delivery()
    delivery.put_modules((module(0),))
    delivery.put_sample(Deferred(0))
    delivery.put_attempts([ClosedAttempt(attempt(0))])
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]

    delivery.start(run_record(), [sink])
    delivery.put_sample(Deferred(1))

    assert delivery.close(WAIT_S)
    assert sink.seen == [
        ("initialize", "run-1", 1),
        ("modules", 1),
        ("observe", 0, THREAD_NAME),
        ("attempts", (0,)),
        ("observe", 1, THREAD_NAME),
        ("finish", True),
    ]


@dataclass
class Late:
    """An amendment that becomes complete, and says when it is asked."""

    complete: bool = False
    asked: threading.Event = field(default_factory=threading.Event)

    def is_complete(self) -> bool:
        """Returns what the test says."""
        self.asked.set()
        return self.complete

    def amend(self, record: AttemptRecord) -> AttemptRecord:
        """Returns the record with whether it came too early."""
        return replace(record, scale_after=2.0 if self.complete else None)


class AttemptSink(KeepingSink):
    """Keeps the scales of the attempts, and says when some came."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[tuple[int, float | None]] = []
        self.came = threading.Event()

    @override
    def attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Keeps them."""
        self.scales += [(record.attempt, record.scale_after) for record in records]
        self.came.set()


def test_an_attempt_waits_until_it_is_complete_and_those_behind_it_wait_too() -> None:
    """So that a row says the same whenever the writer looked, and rows come in their order."""
    sink, late = AttemptSink(), Late()
    behind = Late(complete=True)
    delivery = Delivery(patience_s=WAIT_S)
    delivery.start(run_record(), [sink])
    delivery.put_attempts([ClosedAttempt(attempt(0), (late,))])
    delivery.put_attempts([ClosedAttempt(attempt(1), (behind,))])
    assert behind.asked.wait(WAIT_S)
    assert late.asked.is_set()
    assert sink.scales == []
    late.complete = True
    assert sink.came.wait(WAIT_S)
    assert delivery.close(WAIT_S)
    assert sink.scales == [(0, 2.0), (1, 2.0)]


def test_an_attempt_that_never_becomes_complete_is_handed_over_after_its_patience() -> None:
    """With what is known of it."""
    sink, late = AttemptSink(), Late()
    delivery = Delivery(patience_s=0.0)
    delivery.start(run_record(), [sink])
    delivery.put_attempts([ClosedAttempt(attempt(0), (late,))])
    assert sink.came.wait(WAIT_S)
    assert sink.scales == [(0, None)]
    assert delivery.close(WAIT_S)


def test_attempts_that_wait_for_their_end_are_fetched_behind_those_that_ended() -> None:
    """In the writer thread, and for an update they have waited long enough."""
    sink = AttemptSink()
    waiting = [[ClosedAttempt(attempt(1), (Late(),))]]
    threads: set[str] = set()

    def fetch(now_s: float) -> Sequence[ClosedAttempt]:
        threads.add(threading.current_thread().name)
        assert now_s <= time.perf_counter()
        return waiting.pop() if waiting else []

    delivery = Delivery(patience_s=WAIT_S)
    delivery.fetch_with(fetch)
    delivery.put_attempts([ClosedAttempt(attempt(0), (Late(complete=True),))])
    delivery.start(run_record(), [sink])
    while len(sink.scales) < 2:
        assert sink.came.wait(WAIT_S)
        sink.came.clear()
    assert sink.scales == [(0, 2.0), (1, None)]
    assert threads == {THREAD_NAME}
    assert delivery.close(WAIT_S)


def test_attempts_that_cannot_be_fetched_are_told_once_and_stop_nothing() -> None:
    """What was put goes on its way."""
    sink = KeepingSink()

    def fail(_: float) -> Sequence[ClosedAttempt]:
        raise RuntimeError("odd")

    delivery = Delivery()
    delivery.fetch_with(fail)
    delivery.start(run_record(), [sink])
    assert delivery.flush(WAIT_S)
    delivery.put_attempts([ClosedAttempt(attempt(0))])
    assert delivery.close(WAIT_S)
    assert ("attempts", (0,)) in sink.seen
    assert [(one.probe, one.message) for one in sink.errors] == [("optimizer", "odd")]


@pytest.mark.parametrize("ends", [Delivery.flush, Delivery.close])
def test_a_flush_and_a_close_wait_for_no_attempt(ends: Callable[[Delivery, float], bool]) -> None:
    """Both answer for everything that was put before."""
    sink = AttemptSink()
    delivery = Delivery(patience_s=WAIT_S)
    delivery.start(run_record(), [sink])
    delivery.put_attempts([ClosedAttempt(attempt(0), (Late(),))])
    assert ends(delivery, WAIT_S)
    assert sink.scales == [(0, None)]
    assert delivery.close(WAIT_S)


def test_sinks_take_each_sample_in_the_order_they_were_given() -> None:
    """The first sink has seen a sample before the second does."""
    order: list[str] = []

    class Named(PlainSink):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        @override
        def observe(self, sample: Sample) -> None:
            order.append(f"{self.name}{sample.ordinal}")

    delivery = Delivery()
    delivery.start(run_record(), [Named("a"), Named("b")])
    for ordinal in range(2):
        delivery.put_sample(Deferred(ordinal))

    delivery.close(WAIT_S)
    assert order == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize("where", ["initialize", "observe", "close"])
def test_a_sink_that_fails_disturbs_no_other_and_is_told_of(where: str) -> None:
    """The failure is in the keeping sink's errors, with the owner, and pending once."""
    told: list[tuple[str, str]] = []

    def on_error(probe: str, error: BaseException) -> None:
        told.append((probe, str(error)))

    keeper = KeepingSink()
    delivery = Delivery(on_error)
    delivery.start(run_record(), [FailingSink(where), keeper])
    delivery.put_sample(Deferred(0))

    delivery.close(WAIT_S)

    assert ("observe", 0, THREAD_NAME) in keeper.seen
    assert [(error.probe, error.module, error.type, error.message) for error in keeper.errors] == [
        ("sink", "FailingSink", "RuntimeError", f"broken {where}")
    ]
    assert told == [("sink", f"broken {where}")]
    assert str(delivery.pending_error()) == f"broken {where}"
    assert delivery.pending_error() is None


@pytest.mark.parametrize("where", ["initialize", "observe", "close"])
@pytest.mark.parametrize(
    "raised", [asyncio.CancelledError("late"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr
)
def test_a_sink_that_would_end_the_program_ends_nothing(where: str, raised: BaseException) -> None:
    """It is a failure like any other: the other sinks have all samples, and it is no end for the training."""
    told: list[tuple[str, BaseException]] = []

    def on_error(probe: str, error: BaseException) -> None:
        told.append((probe, error))

    keeper = KeepingSink()
    delivery = Delivery(on_error)
    delivery.start(run_record(), [FailingSink(where, raised), keeper])
    for ordinal in range(2):
        delivery.put_sample(Deferred(ordinal))

    assert delivery.close(WAIT_S)

    assert keeper.ordinals() == [0, 1]
    assert delivery.rows_dropped == 0
    assert told == [("sink", raised)] * (2 if where == "observe" else 1)
    assert {(error.module, error.type) for error in keeper.errors} == {("FailingSink", type(raised).__name__)}
    pending = delivery.pending_error()
    assert isinstance(pending, RuntimeError)
    assert str(pending).startswith(f"a sink raised {type(raised).__name__}")


def test_a_thread_that_dies_counts_what_it_leaves_and_says_so() -> None:
    """What was taken is durable, what waits and what comes is dropped and counted, and nobody waits."""
    told: list[str] = []
    delivery = Delivery(lambda probe, error: told.append(f"{probe}: {error}"))
    plain, keeper = PlainSink(), KeepingSink()
    delivery.start(run_record(), [keeper, plain])
    delivery.put_sample(Deferred(0, num_scalars=3))
    assert delivery.flush(WAIT_S)

    # Outside of any sink's call, where the thread sleeps: it is raised when it wakes.
    (thread,) = [one for one in threading.enumerate() if one.name == THREAD_NAME]
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
    )
    assert raised == 1
    delivery.put_sample(Deferred(1, num_scalars=4))
    delivery.put_sample(Deferred(2, num_scalars=5))

    assert not delivery.flush(WAIT_S)
    delivery.put_sample(Deferred(3, num_scalars=7))
    assert not delivery.close(WAIT_S)

    assert keeper.ordinals() == [0]
    assert delivery.rows_dropped == 4 + 5 + 7
    # The second one is for what came after the thread's end.
    assert keeper.seen[-2:] == [("flush",), ("flush",)]
    assert plain.seen[-1] == ("close",)
    died, late = told
    assert died == (
        "sink: the writer thread ended by SystemExit; 9 scalars that waited were dropped, as those of "
        "further samples will be"
    )
    assert late == (
        "sink: a sample came after the writer thread had ended, and its 7 scalars were dropped, as those of "
        "further ones will be; call remove_observer(model) and attach again to go on measuring"
    )
    assert [error.message for error in keeper.errors] == [died.removeprefix("sink: ")]


@dataclass(frozen=True)
class Unnumbered:
    """Attempts whose number of rows is all that can be had of them."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[ClosedAttempt]:
        raise SystemError("bad argument to internal function")


def test_what_fails_outside_of_any_sink_costs_one_item() -> None:
    """It is counted and told, and what comes after it arrives: an attempt, a sample and a close."""
    told: list[str] = []
    outbox = BoundedOutbox()
    delivery = Delivery(lambda probe, error: told.append(f"{probe}: {error}"), outbox)
    keeper = KeepingSink()
    outbox.put_records(Attempts(cast("tuple[ClosedAttempt, ...]", Unnumbered(3))))
    delivery.put_attempts([ClosedAttempt(attempt(4))])
    delivery.put_sample(Deferred(1, num_scalars=4))
    delivery.start(run_record(), [keeper])

    assert delivery.flush(WAIT_S)
    assert delivery.close(WAIT_S)

    expected = "3 attempts did not reach the sinks: SystemError: bad argument to internal function"
    assert told == [f"sink: {expected}"]
    assert [error.message for error in keeper.errors] == [expected]
    assert ("attempts", (4,)) in keeper.seen
    assert keeper.ordinals() == [1]
    assert delivery.rows_dropped == 0


class UnreadableMeasurements:
    """What a sample says it measured, and cannot be read."""

    def __iter__(self) -> Iterator[Measurement]:
        raise SystemError("bad argument to internal function")


@dataclass
class DeferredUnreadable(Deferred):
    """A sample whose measurements cannot be read."""

    @override
    def resolve(self) -> Sample:
        return replace(
            forward(self.ordinal),
            measurements=cast("tuple[Measurement, ...]", UnreadableMeasurements()),
        )


def test_a_sample_that_fails_outside_of_any_sink_is_counted_as_dropped() -> None:
    """Its scalars are missing in the store, and the next sample's are there."""
    told: list[str] = []
    delivery = Delivery(lambda probe, error: told.append(f"{probe}: {error}"))
    keeper = KeepingSink()
    delivery.start(run_record(), [keeper])
    delivery.put_sample(DeferredUnreadable(0, num_scalars=5))
    delivery.put_sample(Deferred(1, num_scalars=4))

    assert delivery.close(WAIT_S)

    assert told == [
        "sink: a sample of 5 scalars did not reach the sinks: SystemError: bad argument to internal function"
    ]
    assert keeper.ordinals() == [1]
    assert delivery.rows_dropped == 5


@dataclass(frozen=True)
class Looking:
    """An amendment that does something and changes nothing."""

    look: Callable[[], None]

    def is_complete(self) -> bool:
        """Returns that nothing more will be known."""
        return True

    def amend(self, record: AttemptRecord) -> AttemptRecord:
        """Returns the record."""
        self.look()
        return record


def test_tuples_of_the_writer_are_filled_whole_while_the_program_looks_at_all_objects() -> None:
    """A tuple that is filled from a generator cannot grow once `gc.get_objects` has shown it to someone."""
    delivery = Delivery()
    keeper = KeepingSink()
    seen: list[object] = []

    def look() -> None:
        seen[:] = [gc.get_objects()]

    delivery.put_attempts([ClosedAttempt(attempt(number), (Looking(look),)) for number in range(12)])
    delivery.start(run_record(), [keeper])

    assert delivery.close(WAIT_S)

    assert seen
    assert ("attempts", tuple(range(12))) in keeper.seen
    assert not keeper.errors


def test_a_sink_that_could_not_begin_is_asked_for_nothing_more() -> None:
    """It has no run to write samples of."""
    sink = FailingSink("initialize")
    delivery = Delivery()
    delivery.start(run_record(), [sink])
    delivery.put_sample(Deferred(0))

    delivery.close(WAIT_S)

    assert sink.seen == []


def test_a_sink_that_fails_at_keeping_errors_does_not_end_the_thread() -> None:
    """Two such sinks would else tell each other for ever."""

    class Hopeless(KeepingSink):
        @override
        def error(self, error: ErrorRecord) -> None:
            raise RuntimeError(f"cannot keep {error.message}")

    keeper = KeepingSink()
    delivery = Delivery()
    delivery.start(run_record(), [Hopeless(), Hopeless(), FailingSink("observe"), keeper])
    delivery.put_sample(Deferred(0))

    assert delivery.close(WAIT_S)
    assert [error.message for error in keeper.errors] == ["broken observe"]


def test_an_owner_that_fails_at_being_told_does_not_end_the_thread() -> None:
    """The next sample is still handed over."""

    def on_error(probe: str, error: BaseException) -> None:
        raise RuntimeError("no ears")

    keeper = KeepingSink()
    delivery = Delivery(on_error)
    delivery.start(run_record(), [FailingSink("observe"), keeper])
    for ordinal in range(2):
        delivery.put_sample(Deferred(ordinal))

    assert delivery.close(WAIT_S)
    assert keeper.ordinals() == [0, 1]


def test_a_sample_that_cannot_be_resolved_is_counted_and_the_next_one_comes() -> None:
    """Its scalars count as rows that were dropped."""
    keeper = KeepingSink()
    delivery = Delivery()
    delivery.start(run_record(), [keeper])
    delivery.put_sample(Deferred(0, num_scalars=7, before=raise_value_error))
    delivery.put_sample(Deferred(1))

    delivery.close(WAIT_S)

    assert keeper.ordinals() == [1]
    assert delivery.rows_dropped == 7
    assert [(error.probe, error.message) for error in keeper.errors] == [("reducer", "the copy failed")]


def test_what_did_not_fit_into_the_queue_is_counted_and_told_once() -> None:
    """The newest samples are dropped; the error says how many."""
    keeper = KeepingSink()
    delivery = Delivery(outbox=BoundedOutbox(max_scalars=10))
    for ordinal in range(5):
        delivery.put_sample(Deferred(ordinal, num_scalars=4))

    delivery.start(run_record(), [keeper])
    delivery.close(WAIT_S)

    assert keeper.ordinals() == [0, 1]
    assert delivery.rows_dropped == 12
    assert [error.message for error in keeper.errors] == [
        "the queue to the writer thread was full: 3 deliveries of samples, 12 scalars were dropped"
    ]


def test_a_put_returns_while_a_sink_is_busy() -> None:
    """The training thread never waits for the writer."""
    release, busy = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        release.wait(WAIT_S)

    keeper = KeepingSink()
    delivery = Delivery()
    delivery.start(run_record(), [keeper])
    delivery.put_sample(Deferred(0, before=wait))
    assert busy.wait(WAIT_S)

    for ordinal in range(1, 1000):
        delivery.put_sample(Deferred(ordinal))
    assert len(keeper.seen) == 1
    release.set()

    assert delivery.close(WAIT_S)
    assert len(keeper.seen) == 1002


def test_a_flush_answers_for_everything_that_was_put_before_it() -> None:
    """Sinks have taken it and flushed."""
    keeper = KeepingSink()
    delivery = Delivery()
    delivery.start(run_record(), [keeper])
    delivery.put_sample(Deferred(0))

    assert delivery.flush(WAIT_S)

    assert keeper.seen[1:] == [("observe", 0, THREAD_NAME), ("flush",)]
    delivery.close(WAIT_S)


def test_a_flush_that_the_target_refused_says_so() -> None:
    """Rows wait in memory, and the caller learns it."""
    delivery = Delivery()
    delivery.start(run_record(), [KeepingSink(arrived=False)])

    assert not delivery.flush(WAIT_S)
    assert not delivery.close(WAIT_S)


def test_a_flush_gives_up_after_its_time() -> None:
    """A sink that hangs does not hang the caller."""
    release = threading.Event()
    delivery = Delivery()
    delivery.start(run_record(), [KeepingSink()])
    delivery.put_sample(Deferred(0, before=lambda: release.wait(WAIT_S)))

    assert not delivery.flush(0.05)

    release.set()
    assert delivery.close(WAIT_S)


def test_a_flush_before_the_start_says_that_nothing_is_durable() -> None:
    """It does not wait for a run that may never be known."""
    delivery = Delivery()
    delivery.put_sample(Deferred(0))

    assert not delivery.flush(WAIT_S)


def test_closing_twice_closes_the_sinks_once() -> None:
    """The second call waits for the same end."""
    keeper = KeepingSink()
    delivery = Delivery()
    delivery.start(run_record(), [keeper])

    assert delivery.close(WAIT_S)
    assert delivery.close(WAIT_S)

    assert keeper.seen.count(("finish", True)) == 1


def test_fingerprints_reach_the_sinks_that_keep_more_than_samples() -> None:
    """Those of a device that fails are lost as a whole, and counted."""
    keeper, plain = KeepingSink(), PlainSink()
    delivery = Delivery()
    delivery.put_fingerprints(DeferredRows())
    delivery.put_fingerprints(DeferredRows(raise_value_error))
    delivery.start(run_record(), [plain, keeper])

    assert delivery.close(WAIT_S)

    expected = ("fingerprints", (("0.weight", 2**64 - 1), ("0.bias", 5)))
    assert [entry for entry in keeper.seen if entry[0] == "fingerprints"] == [expected]
    assert plain.seen == [("initialize", "run-1", 0), ("close",)]
    (error,) = keeper.errors
    assert (error.probe, error.message) == (
        "fingerprint",
        "2 fingerprints are lost: ValueError: the copy failed",
    )


def test_after_closing_nothing_is_taken_and_no_thread_is_left() -> None:
    """A hook that fires late does no harm."""
    keeper = KeepingSink()
    delivery = Delivery()
    delivery.start(run_record(), [keeper])
    delivery.close(WAIT_S)

    delivery.put_sample(Deferred(0))
    delivery.put_attempts([ClosedAttempt(attempt(0))])
    delivery.put_fingerprints(DeferredRows())
    delivery.start(run_record(), [keeper])

    assert len(delivery._outbox) == 0
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


def test_closing_from_a_sink_does_not_wait_for_itself() -> None:
    """A sink that closes its own delivery gets an answer; what was put before is handed over, then closed."""
    answers: list[bool] = []
    delivery = Delivery()

    class Closing(KeepingSink):
        @override
        def observe(self, sample: Sample) -> None:
            super().observe(sample)
            answers.append(delivery.close(WAIT_S))
            answers.append(delivery.flush(sample.ordinal + WAIT_S))

    sink = Closing()
    delivery.start(run_record(), [sink])
    delivery.put_sample(Deferred(0))
    delivery.put_sample(Deferred(1))
    assert delivery._thread is not None
    delivery._thread.join(WAIT_S)

    assert answers == [False] * 4
    assert sink.ordinals() == [0, 1]
    assert sink.seen[-1] == ("finish", True)
    assert delivery.close(WAIT_S)


def test_sinks_that_keep_errors_are_closed_last() -> None:
    """What another sink fails at while closing still comes into the manifest."""
    keeper = KeepingSink()
    delivery = Delivery()
    delivery.start(run_record(), [keeper, FailingSink("close")])

    delivery.close(WAIT_S)

    assert [error.message for error in keeper.errors] == ["broken close"]


def test_the_processor_time_of_the_thread_is_told() -> None:
    """What telemetry costs is visible."""

    def work() -> None:
        sum(index * index for index in range(200_000))

    delivery = Delivery()
    delivery.start(run_record(), [KeepingSink()])
    delivery.put_sample(Deferred(0, before=work))
    delivery.close(WAIT_S)

    assert delivery.writer_s > 0


def test_a_forked_child_takes_nothing_and_closes_at_once() -> None:
    """It inherits no writer thread, and must not hang on one."""
    delivery = Delivery()
    keeper = KeepingSink()
    delivery.start(run_record(), [keeper])
    delivery.put_sample(Deferred(0))
    assert delivery.flush(WAIT_S)

    child = os.fork()
    if child == 0:
        delivery.put_sample(Deferred(1))
        delivery.put_attempts([ClosedAttempt(attempt(0))])
        quiet = len(delivery._outbox) == 0 and delivery.flush(WAIT_S) and delivery.close(WAIT_S)
        os._exit(0 if quiet else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    delivery.put_sample(Deferred(2))
    assert delivery.close(WAIT_S)
    assert keeper.ordinals() == [0, 2]


SCRIPT = """
    import sys
    from unit.sinks.test_delivery import Deferred, KeepingSink
    from unit.store.material import run_record
    from torchinstruments.sinks.delivery import Delivery

    class Printing(KeepingSink):
        def finish(self, timeout_s, *, complete):
            print(self.ordinals(), complete, timeout_s <= 5, flush=True)
            return True

    delivery = Delivery()
    delivery.start(run_record(), [Printing()])
    delivery.put_sample(Deferred(7))
    {ending}
"""


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "raise SystemExit", "delivery.close(30)"])
def test_an_interpreter_that_ends_flushes_what_is_open(ending: str) -> None:
    """A script that never closes loses nothing, and its manifest is marked without derived copies."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "PYTHONPATH": root}

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT.format(ending=ending))],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )

    closed = ending.startswith("delivery")
    assert (result.stdout, result.stderr) == (f"[7] {closed} {not closed}\n", "")


def test_sinks_that_ask_learn_which_rank_they_serve() -> None:
    """Before they begin; those that do not ask are not bothered, and one that fails at it is left out."""

    class Asking(PlainSink):
        def place(self, identity: Identity, claim: Claim) -> None:
            self.seen.append(("place", identity.rank, claim.first_sample_id))

    class Failing(Asking):
        @override
        def place(self, identity: Identity, claim: Claim) -> None:
            raise RuntimeError("broken place")

    asking, plain, failing = Asking(), PlainSink(), Failing()
    delivery = Delivery()
    delivery.start(run_record(), [failing, asking, plain], identity=identity(3), claim=claim(1))
    delivery.close(WAIT_S)

    assert asking.seen == [("place", 3, 1_000_000_000), ("initialize", "run-1", 0), ("close",)]
    assert plain.seen == [("initialize", "run-1", 0), ("close",)]
    assert failing.seen == []
    assert str(delivery.pending_error()) == "broken place"


@dataclass
class UnstartableSink(KeepingSink):
    """A sink that stores, and cannot begin."""

    @override
    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Refuses."""
        raise OSError("no folder")


def test_rows_of_a_sink_that_stores_and_could_not_begin_are_dropped_and_the_close_says_so() -> None:
    """Nothing of the run is anywhere; that must not look like a success."""
    plain = PlainSink()
    delivery = Delivery()
    delivery.start(run_record(), [UnstartableSink(), plain])
    delivery.put_sample(Deferred(0, num_scalars=7))

    assert not delivery.flush(WAIT_S)
    assert not delivery.close(WAIT_S)
    assert delivery.rows_dropped == 7
    assert plain.ordinals() == [0]


def test_what_comes_after_the_close_is_counted_and_told_once() -> None:
    """A training that goes on after remove_observer learns that nothing of it is kept."""
    told: list[str] = []
    delivery = Delivery(lambda probe, error: told.append(f"{probe}: {error}"))
    delivery.start(run_record(), [KeepingSink()])
    assert delivery.close(WAIT_S)

    for ordinal in range(3):
        delivery.put_sample(Deferred(ordinal, num_scalars=7))
    delivery.put_attempts([ClosedAttempt(attempt(0))])

    assert delivery.rows_dropped == 21
    [message] = told
    assert message == (
        "sink: a sample came after the run was closed, and its 7 scalars were dropped, as those of further "
        "ones will be; call remove_observer(model) after the last forward and backward"
    )


THREAD_SCRIPT = """
    import threading, time
    from unit.sinks.test_delivery import Deferred, KeepingSink
    from unit.store.material import run_record
    from torchinstruments.sinks.delivery import Delivery

    class Printing(KeepingSink):
        def finish(self, timeout_s, *, complete):
            print(self.ordinals(), complete, flush=True)
            return True

    delivery = Delivery()
    delivery.start(run_record(), [Printing()])

    def train():
        delivery.put_sample(Deferred(0))
        time.sleep(2.0)  # the main thread ends at once
        delivery.put_sample(Deferred(1))
        {ending}
        if delivery.rows_dropped:
            print("dropped", delivery.rows_dropped)

    {start}
"""
IN_A_THREAD = "threading.Thread(target=train).start()"
IN_A_POOL = "from concurrent.futures import ThreadPoolExecutor; ThreadPoolExecutor(1).submit(train)"


@pytest.mark.parametrize("start", [IN_A_THREAD, IN_A_POOL], ids=["thread", "pool"])
@pytest.mark.parametrize("ending", ["pass", "delivery.close(30)"], ids=["never closed", "closed"])
def test_a_thread_that_trains_after_the_main_threads_end_loses_nothing(start: str, ending: str) -> None:
    """The interpreter waits for such a thread, and so does the delivery."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(THREAD_SCRIPT.format(ending=ending, start=start))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        timeout=60,
        check=False,
    )

    assert (result.stdout, result.stderr) == (f"[0, 1] {ending != 'pass'}\n", "")
