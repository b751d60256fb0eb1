"""The bounds of the queue to the writer thread."""

import threading
from dataclasses import dataclass

from torchinstruments.records import ClosedAttempt, ErrorRecord, FingerprintRecord, Sample
from torchinstruments.sinks.outbox import Attempts, BoundedOutbox, Dropped, Fingerprints, describe
from unit.store.material import attempt, fingerprint, forward


@dataclass
class Deferred:
    """A sample of some size that needs no copy."""

    num_scalars: int
    ordinal: int = 0

    def resolve(self) -> Sample:
        """Returns a sample without measurements."""
        return forward(self.ordinal)


@dataclass
class DeferredRows:
    """Fingerprints of some number that need no copy."""

    num_rows: int

    def resolve(self) -> list[FingerprintRecord]:
        """Returns the rows."""
        return [fingerprint(0, f"{number}.weight") for number in range(self.num_rows)]


def drain(outbox: BoundedOutbox) -> list[object]:
    """Returns everything that waits."""
    return [outbox.take() for _ in range(len(outbox))]


def test_things_come_out_in_the_order_they_were_put():
    """Samples, attempts and errors share one queue."""
    outbox = BoundedOutbox()
    things = [
        Deferred(1),
        Attempts((ClosedAttempt(attempt(0)),)),
        Deferred(2),
        ErrorRecord("sink", "", "E", "m"),
    ]
    for thing in things:
        outbox.put_sample(thing) if isinstance(thing, Deferred) else outbox.put_records(thing)

    assert drain(outbox) == things
    assert outbox.take() is None


def test_beyond_its_scalars_the_newest_sample_is_dropped_and_counted():
    """The oldest stay: they are what was observed first."""
    outbox = BoundedOutbox(max_scalars=10)
    kept, dropped = Deferred(8), Deferred(3)

    outbox.put_sample(kept)
    outbox.put_sample(dropped)

    assert drain(outbox) == [kept]
    assert outbox.dropped == Dropped(deliveries=1, scalars=3)


def test_a_sample_larger_than_the_bound_is_taken_into_an_empty_queue():
    """A very large model is not unobservable."""
    outbox = BoundedOutbox(max_scalars=10)

    outbox.put_sample(Deferred(1000))

    assert len(outbox) == 1
    assert outbox.dropped == Dropped()


def test_beyond_its_deliveries_samples_are_dropped_however_small():
    """Samples without scalars take memory too."""
    outbox = BoundedOutbox(max_deliveries=2)

    for _ in range(5):
        outbox.put_sample(Deferred(0))

    assert len(outbox) == 2
    assert outbox.dropped.deliveries == 3


def test_beyond_its_records_attempts_are_dropped_and_counted():
    """A loop of short steps before the run is known does not fill memory."""
    outbox = BoundedOutbox(max_records=3)

    for number in range(5):
        outbox.put_records(Attempts((ClosedAttempt(attempt(number)), ClosedAttempt(attempt(number, 1)))))

    assert len(outbox) == 1
    assert outbox.dropped == Dropped(records=8)


def test_fingerprints_have_a_bound_of_their_own():
    """A large model's neither push out samples and attempts nor are pushed out by them."""
    outbox = BoundedOutbox(max_scalars=10, max_records=1, max_fingerprints=10)
    outbox.put_sample(Deferred(10))
    outbox.put_records(Attempts((ClosedAttempt(attempt(0)),)))

    for _ in range(3):
        outbox.put_fingerprints(Fingerprints(DeferredRows(4)))

    assert len(outbox) == 4
    assert outbox.dropped == Dropped(fingerprints=4)
    drain(outbox)
    outbox.put_fingerprints(Fingerprints(DeferredRows(1000)))
    outbox.put_sample(Deferred(10))
    outbox.put_records(Attempts((ClosedAttempt(attempt(0)),)))
    assert len(outbox) == 3
    assert outbox.dropped == Dropped(fingerprints=4)
    drain(outbox)
    assert (outbox._scalars, outbox._deliveries, outbox._records, outbox._fingerprints) == (0, 0, 0, 0)


def test_what_was_taken_makes_room():
    """The bound is on what waits, not on what passed."""
    outbox = BoundedOutbox(max_scalars=10, max_deliveries=1, max_records=1)

    for number in range(20):
        outbox.put_sample(Deferred(10))
        outbox.put_records(Attempts((ClosedAttempt(attempt(number)),)))
        drain(outbox)

    assert outbox.dropped == Dropped()


def test_a_queue_that_fills_says_so():
    """The owner wakes the writer before anything is dropped."""
    outbox = BoundedOutbox(max_scalars=10)

    assert [outbox.put_sample(Deferred(2)) for _ in range(5)] == [False, False, True, True, True]


def test_counts_are_exact_under_many_threads():
    """Backward threads put beside the main thread while the writer takes."""
    outbox = BoundedOutbox(max_scalars=50, max_deliveries=20)
    taken: list[object] = []
    done = threading.Event()

    def put() -> None:
        for _ in range(2000):
            outbox.put_sample(Deferred(3))

    def take() -> None:
        while not done.is_set() or len(outbox):
            item = outbox.take()
            if item is not None:
                taken.append(item)

    taker = threading.Thread(target=take)
    putters = [threading.Thread(target=put) for _ in range(4)]
    for thread in (taker, *putters):
        thread.start()
    for thread in putters:
        thread.join()
    done.set()
    taker.join()

    assert len(taken) + outbox.dropped.deliveries == 8000
    assert (outbox._scalars, outbox._deliveries) == (0, 0)


def test_what_was_dropped_is_described_in_a_sentence():
    """Only what was really dropped since the last look is named."""
    text = describe(Dropped(1, 10, 0), Dropped(3, 40, 0))

    assert text == "the queue to the writer thread was full: 2 deliveries of samples, 30 scalars were dropped"
    text = describe(Dropped(), Dropped(fingerprints=7))
    assert text == "the queue to the writer thread was full: 7 fingerprints were dropped"
