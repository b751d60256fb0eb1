"""Counters of the training side add up, whatever thread adds to them."""

import threading

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe.counts import Counts
from torchinstruments.observe.faults import Faults
from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import Counters, ErrorRecord


def drop(record: ErrorRecord) -> None:
    """Keeps nothing."""


def test_counts_of_several_threads_add_up() -> None:
    """No addition is lost; errors and forwards come from where they are counted."""
    faults, clock = Faults(ErrorPolicy.IGNORE, drop), StepClock()
    counts = Counts(faults, clock)
    for _ in range(3):
        clock.forward_started(grad_enabled=True, now_s=0.0, now_us=0)

    def work() -> None:
        for _ in range(2_000):
            counts.add(collection_s=0.5)
        counts.add(samples=1, missed=1)
        faults.report("sampler", "", ValueError("x"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.read() == Counters(
        forwards=3, samples=4, missed=4, collection_s=4_000.0, errors={"sampler": 4}
    )


def test_counters_can_be_used_in_a_child_that_was_forked_while_one_was_held() -> None:
    """A lock that nobody will release is replaced."""
    counts = Counts(Faults(ErrorPolicy.IGNORE, drop), StepClock())
    with counts._lock:
        counts.disarm()
        counts.add(samples=1)
    assert counts.read().samples == 1
