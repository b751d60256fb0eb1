"""The schedule over a store: how often it is asked, who plans, and what a store that is gone means."""

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchinstruments.ranks.rendezvous import Agreement, StoreConnection
from torchinstruments.ranks.schedule import Plan, Progress
from torchinstruments.ranks.timetable import Listening, Pacing, Planning, ScheduleThread, pacing, schedule
from torchinstruments.records import Claim, Identity

CLAIM = Claim("/runs/a", "a", 0, 0, verified=True)
QUICK = Pacing(look_s=0.01, lead_s=0.05, beat_s=0.05, patience_s=60.0)


class CountingStore:
    """A store in memory that counts its requests."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: bytes) -> None:
        """Writes."""
        self.requests["set"] += 1
        self.values[key] = value

    def get_if_there(self, key: str) -> bytes | None:
        """Looks."""
        self.requests["get"] += 1
        return self.values.get(key)


class BrokenStore(CountingStore):
    """A store whose server is gone."""

    def set(self, key: str, value: bytes) -> None:
        """Raises."""
        super().set(key, value)
        raise dist.DistNetworkError("Broken pipe")

    def get_if_there(self, key: str) -> bytes | None:
        """Raises."""
        super().get_if_there(key)
        raise dist.DistNetworkError("Broken pipe")


class Rank:
    """A rank at a given progress; keeps what it is told."""

    interval_s = 60.0

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.plans: list[Plan] = []
        self.lost = 0
        self.is_led: list[bool] = []
        self.told = threading.Event()

    @property
    def num_forwards(self) -> int:
        """Of its progress."""
        return 0 if self.progress is None else self.progress.forward + 1

    def take(self, plans: Sequence[Plan], num_lost: int = 0) -> None:
        """Keeps plans."""
        self.plans += plans
        self.lost += num_lost
        if plans:
            self.told.set()

    def follow(self, *, is_led: bool) -> None:
        """Keeps changes."""
        if self.is_led[-1:] != [is_led]:
            self.is_led.append(is_led)


def at(now_s: float) -> Progress:
    """Returns the progress of ten attempts a second."""
    return Progress(int(now_s * 10), int(now_s * 10), int(now_s * 10), True, 0.0)


def test_1024_ranks_ask_the_store_once_in_five_seconds_each() -> None:
    """Ten minutes: one request a rank and look, one write a plan or half minute, and everyone hears all."""
    times = pacing(60.0, 1024)
    assert times == Pacing(look_s=5.0, lead_s=12.0, beat_s=30.0, patience_s=90.0)
    store = CountingStore()
    leader = Rank()
    planning = Planning(store, "k", leader, interval_s=60.0, pacing=times)
    ranks = [Rank() for _ in range(1023)]
    listening = [Listening(store, "k", rank, now_s=0.0, pacing=times) for rank in ranks]
    for look in range(1, 121):
        leader.progress = at(5.0 * look)
        planning.step(5.0 * look)
        for number, one in enumerate(listening):
            ranks[number].progress = at(5.0 * look + 0.05)
            one.step(5.0 * look + 5.0 * number / 1024)
    assert store.requests["get"] == 1023 * 120
    assert len(leader.plans) in (9, 10)
    assert store.requests["set"] <= len(leader.plans) + 600 / times.beat_s
    assert all(rank.plans == leader.plans and rank.lost == 0 and rank.is_led == [True] for rank in ranks)
    assert max(len(value) for value in store.values.values()) < 1000


@pytest.mark.parametrize(
    ("interval_s", "world_size", "look_s"),
    [(60.0, 2, 5.0), (3600.0, 2, 5.0), (12.0, 2, 1.0), (0.1, 2, 0.25), (0.1, 410, 2.0), (0.1, 100_000, 5.0)],
)
def test_looks_are_as_frequent_as_the_interval_needs_and_the_store_bears(
    interval_s: float, world_size: int, look_s: float
) -> None:
    """Five seconds at most, and no more requests a second than 1,024 ranks at that pace make."""
    times = pacing(interval_s, world_size)
    assert times.look_s == look_s
    assert times.lead_s >= 2 * 1.2 * look_s


def test_a_real_store_is_asked_in_one_round_trip_once_the_document_is_there() -> None:
    """`StoreConnection` checks for a key until it is there, and from then on only gets it."""
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    calls: list[str] = []

    class Counted:
        """The operations of a store, by name."""

        def set(self, key: str, value: str) -> None:
            """Writes."""
            calls.append("set")
            server.set(key, value)

        def check(self, keys: list[str]) -> bool:
            """Checks."""
            calls.append("check")
            return server.check(keys)

        def get(self, key: str) -> bytes:
            """Gets."""
            calls.append("get")
            return server.get(key)

    store = StoreConnection(Counted())  # pyrefly: ignore[bad-argument-type]
    leader, follower = Rank(), Rank()
    times = pacing(60.0, 2)
    listening = Listening(store, "k", follower, now_s=0.0, pacing=times)
    planning = Planning(store, "k", leader, interval_s=60.0, pacing=times)
    listening.step(1.0)
    assert calls == ["check"]
    calls.clear()
    planning.step(2.0)
    listening.step(3.0)
    assert calls == ["set", "check", "get"]
    calls.clear()
    for look in range(1, 13):
        leader.progress = at(5.0 * look)
        planning.step(5.0 * look)
        listening.step(5.0 * look + 1)
    assert Counter(calls) == {"get": 12, "set": calls.count("set")}
    assert follower.plans == leader.plans
    assert len(follower.plans) == 1


def test_a_plan_that_the_store_did_not_take_is_told_with_the_next_one() -> None:
    """The planner measures it all the same, so the others have to learn that they missed it."""
    store, broken = CountingStore(), BrokenStore()
    leader, follower = Rank(), Rank()
    times = pacing(60.0, 2)
    planning = Planning(broken, "k", leader, interval_s=60.0, pacing=times)
    for look in range(1, 12):
        leader.progress = at(5.0 * look)
        with pytest.raises(RuntimeError):
            planning.step(5.0 * look)
    assert len(leader.plans) == 1
    planning._store = store
    leader.progress = at(60.0)
    planning.step(60.0)
    Listening(store, "k", follower, now_s=0.0, pacing=times).step(60.0)
    assert follower.plans == leader.plans


def _thread(part: Planning | Listening, rank: Rank, errors: list[Exception]) -> ScheduleThread:
    return ScheduleThread(part, rank, pacing=QUICK, on_error=errors.append)


def test_a_thread_whose_store_is_gone_ends_and_its_rank_goes_by_its_own_time() -> None:
    """After three tries, and it says why."""
    for make in (
        lambda rank: Planning(BrokenStore(), "k", rank, interval_s=60.0, pacing=QUICK),
        lambda rank: Listening(BrokenStore(), "k", rank, now_s=0.0, pacing=QUICK),
    ):
        rank, errors = Rank(), []
        thread = _thread(make(rank), rank, errors)
        thread.start()
        thread._thread.join(20)
        assert [type(error) for error in errors] == [dist.DistNetworkError]
        assert rank.is_led == [False]


def test_threads_hear_each_other_and_a_planner_that_stops_says_so() -> None:
    """A listener then goes by its own time at once, instead of waiting for silence."""
    store, errors = CountingStore(), []
    leader, follower = Rank(), Rank()
    leader.progress = Progress(5, 5, 5, True, -1000.0)
    planning = _thread(Planning(store, "k", leader, interval_s=0.01, pacing=QUICK), leader, errors)
    follower.progress = leader.progress
    listening = Listening(
        store, "k", follower, now_s=0.0, pacing=Pacing(look_s=1, lead_s=1, beat_s=1, patience_s=1e9)
    )
    hearing = _thread(listening, follower, errors)
    hearing.start()
    planning.start()
    assert follower.told.wait(20)
    hearing.stop()
    planning.stop(20)
    listening.step(1.0)
    assert follower.is_led == [True, False]
    assert errors == []


def test_a_thread_that_is_stopped_before_it_starts_ends_at_once() -> None:
    """As where an observer is closed while its rank still enrols."""
    store, rank, errors = CountingStore(), Rank(), []
    thread = _thread(Planning(store, "k", rank, interval_s=60.0, pacing=QUICK), rank, errors)
    thread.stop()
    thread.start()
    thread._thread.join(20)
    assert not thread._thread.is_alive()
    assert store.requests["set"] == 1
    assert errors == []


def _identity(rank: int) -> Identity:
    return Identity(rank=rank, world_size=3, local_rank=rank, host="h", process=f"{rank:08x}")


@pytest.mark.parametrize(
    ("leader", "leader_observes", "first_rank", "parts"),
    [
        (0, True, 0, ("Planning", "Listening", "Listening")),
        (1, True, 0, ("Listening", "Planning", "Listening")),
        (0, False, 1, (None, "Planning", "Listening")),
        (0, False, None, (None, None, None)),
        (0, True, None, ("Planning", "Listening", "Listening")),
    ],
)
def test_exactly_one_rank_plans(
    leader: int, leader_observes: bool, first_rank: int | None, parts: tuple[str | None, ...]
) -> None:
    """The leader, or the first rank that observes; where only the user's function knows that one, nobody."""
    found = []
    for rank in range(3):
        agreement = Agreement(
            CLAIM,
            leader=rank == leader,
            verified=True,
            store=CountingStore(),
            leader_process="aaaaaaaa",
            leader_observes=leader_observes,
        )
        thread = schedule(Rank(), _identity(rank), agreement, first_rank=first_rank, on_error=print)
        found.append(None if thread is None else type(thread._part).__name__)
    if not leader_observes:
        # It has no observer, so it is never asked.
        found[leader] = None
    assert tuple(found) == parts


def test_without_a_store_or_a_verified_claim_there_is_no_schedule() -> None:
    """Such a rank has nobody to agree with."""
    for agreement in (
        Agreement(CLAIM, leader=True, verified=True, leader_observes=True),
        Agreement(CLAIM, leader=False, verified=False, store=CountingStore(), leader_observes=True),
    ):
        assert schedule(Rank(), _identity(0), agreement, first_rank=0, on_error=print) is None
