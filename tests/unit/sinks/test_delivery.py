"""The writer thread: what it takes, when it starts, how it ends."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading

import pytest
from typing_extensions import override

from torchinstruments.records import (
    ClosedAttempt,
    Sample,
)
from torchinstruments.sinks.delivery import THREAD_NAME, Delivery
from torchinstruments.sinks.outbox import BoundedOutbox
from unit.sinks.kept_sinks import (
    WAIT_S,
    Deferred,
    DeferredRows,
    KeepingSink,
    PlainSink,
)
from unit.store.material import attempt, module, run_record


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
    from unit.sinks.kept_sinks import Deferred, KeepingSink
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
    from unit.sinks.kept_sinks import Deferred, KeepingSink
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
