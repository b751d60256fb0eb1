"""Sinks that are isolated from each other, and what becomes of what they are handed."""

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest
from typing_extensions import override

from torchinstruments.records import (
    AttemptRecord,
    Claim,
    ClosedAttempt,
    ErrorRecord,
    Identity,
    Measurement,
    ModuleRecord,
    RunRecord,
    Sample,
)
from torchinstruments.sinks.delivery import THREAD_NAME, Delivery
from torchinstruments.sinks.outbox import Attempts, BoundedOutbox
from unit.sinks.kept_sinks import (
    WAIT_S,
    Deferred,
    DeferredRows,
    FailingSink,
    KeepingSink,
    PlainSink,
    raise_value_error,
)
from unit.store.material import attempt, claim, forward, identity, run_record


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


def test_sinks_that_keep_errors_are_closed_last() -> None:
    """What another sink fails at while closing still comes into the manifest."""
    keeper = KeepingSink()
    delivery = Delivery()
    delivery.start(run_record(), [keeper, FailingSink("close")])

    delivery.close(WAIT_S)

    assert [error.message for error in keeper.errors] == ["broken close"]


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
