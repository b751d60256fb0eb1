"""Running root forwards are kept by thread, and given up when nobody ends them."""

import threading
from typing import Any

import pytest

from torchinstruments.observe.calls import RootCall, RunningCalls
from torchinstruments.records import GradSync


class Sampled:
    """Stands for a sampled forward: all that is asked of it here is to detach, and who ends it."""

    def __init__(self) -> None:
        self.num_detached = 0
        self.num_claims = 0

    def claim_end(self) -> bool:
        """Gives its end to the first who asks."""
        self.num_claims += 1
        return self.num_claims == 1

    def detach(self) -> None:
        """Counts."""
        self.num_detached += 1


def call_with(sampled: Any) -> RootCall:
    """A call that is measured."""
    return RootCall(GradSync.UNKNOWN, None, sampled=sampled)


def test_each_thread_has_its_own_call() -> None:
    """It begins and ends there alone."""
    calls = RunningCalls([].append)
    mine = RootCall(GradSync.UNKNOWN, None)
    calls.begin(mine)
    others: list[RootCall | None] = []

    def other() -> None:
        others.append(calls.current())
        calls.end()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert others == [None]
    assert calls.current() is mine
    calls.end()
    assert calls.current() is None


def test_calls_of_threads_that_are_gone_are_given_up() -> None:
    """Their samples end as failed; those of living threads go on."""
    given_up: list[object] = []
    calls = RunningCalls(given_up.append)
    mine, theirs = Sampled(), Sampled()
    calls.begin(call_with(mine))
    thread = threading.Thread(target=calls.begin, args=(call_with(theirs),))
    thread.start()
    thread.join()
    calls.abandon_dead_threads()
    assert given_up == [theirs]
    assert calls.current() is not None
    calls.abandon()
    assert given_up == [theirs, mine]


def test_dropped_calls_leave_their_hooks_behind_nowhere() -> None:
    """Each sample is detached and none is delivered; one that its own thread ends is not told twice."""
    given_up: list[object] = []
    calls = RunningCalls(given_up.append)
    sampled = Sampled()
    calls.begin(call_with(sampled))
    calls.drop()
    assert (sampled.num_detached, given_up, calls.current()) == (1, [], None)
    ended = Sampled()
    ended.claim_end()
    calls.begin(call_with(ended))
    calls.drop()
    assert (ended.num_detached, calls.cut_off) == (1, [sampled])


def test_a_call_whose_giving_up_raises_is_given_up_all_the_same() -> None:
    """It is not given up again with every forward of its thread."""

    def fail(_sampled: object) -> None:
        raise MemoryError("no room")

    calls = RunningCalls(fail)
    calls.begin(call_with(Sampled()))
    with pytest.raises(MemoryError):
        calls.abandon()
    assert calls.current() is None


def test_a_call_fails_by_an_exception_of_its_own_alone() -> None:
    """One that was being handled when it began does not count."""
    before = ValueError("before")
    try:
        raise before
    except ValueError:
        call = RootCall(GradSync.UNKNOWN, before)
        assert not call.has_failed()
        try:
            int("its own")
        except ValueError:
            assert call.has_failed()
