"""Agreement with threads and a real TCP store, the ranks being threads of this process."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchinstruments.ranks.rendezvous import (
    StoreConnection,
    Timing,
    agree,
    connect,
    keep_generation,
    kept_generations,
    kept_run_id,
)
from torchinstruments.records import Claim, Identity

QUICK = Timing(
    leader_grace_s=0.3, watch_s=0.3, heartbeat_s=0.05, poll_s=0.01, members_after_s=0.5, serve_s=20.0
)


@pytest.fixture
def server():
    """The store of a launcher's agent."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def _client(server):
    return StoreConnection(
        dist.TCPStore(
            "127.0.0.1",
            server.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
        )
    )


def _identity(rank, process, world_size=2):
    return Identity(rank=rank, world_size=world_size, local_rank=rank, host="h", process=process)


def _claim():
    return Claim("/runs/a", "a", 3, 3 * 10**9, verified=True)


def _fallback():
    return Claim("/runs/a", "a", 0, 0, verified=False)


def _service(agreed):
    assert agreed.service is not None
    return agreed.service


def _forbidden():
    raise AssertionError("a follower must not claim")


def _in_thread(function):
    results = []

    def run():
        results.append(function())

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(20)
        assert results, "the thread did not return"
        return results[0]

    return result


def _follow(server, rank=1, process="b", world_size=2, timeout_s=15.0, timing=QUICK, claim=_forbidden):
    return _in_thread(
        lambda: agree(
            _identity(rank, process, world_size),
            True,
            claim,
            store=_client(server),
            fallback=_fallback,
            timeout_s=timeout_s,
            timing=timing,
        )
    )


def test_a_follower_gets_the_leaders_claim_and_the_leader_its_members(server):
    """One claim for two ranks, answered from a background thread that then ends."""
    told = []
    follower = _follow(server)
    leader = agree(
        _identity(0, "a"),
        False,
        _claim,
        store=_client(server),
        fallback=_fallback,
        on_members=lambda members, complete: told.append((members, complete)),
        timing=QUICK,
    )
    followed = follower()
    assert (followed.claim, followed.leader, followed.verified) == (_claim(), False, True)
    assert (leader.claim, leader.leader, leader.verified) == (_claim(), True, True)
    _service(leader)._thread.join(10)
    ((members, complete),) = told
    assert [(m.rank, m.process, m.observing) for m in members] == [(0, "a", False), (1, "b", True)]
    assert complete
    assert not _service(leader).is_running


def test_a_claim_that_takes_long_is_waited_for_though_rank_0_is_silent_meanwhile(server):
    """The leader shows life while it claims, so that nobody else takes its place."""

    def slow_claim():
        time.sleep(1.5)
        return _claim()

    follower = _follow(server)
    leader = agree(
        _identity(0, "a"), True, slow_claim, store=_client(server), fallback=_fallback, timing=QUICK
    )
    assert follower().claim == _claim()
    _service(leader).stop()


def test_a_rank_that_hears_nothing_takes_its_fallback(server):
    """Silence raises on none."""
    agreed = _follow(server, timeout_s=0.1)()
    assert (agreed.claim, agreed.leader, agreed.verified) == (_fallback(), False, False)


def test_rank_1_leads_where_rank_0_never_attaches(server):
    """After the grace, over the real store."""
    agreed = _follow(server, claim=_claim)()
    assert (agreed.leader, agreed.verified) == (True, True)
    _service(agreed).stop()


def test_members_are_told_in_time_though_a_rank_is_missing_and_again_when_it_comes(server):
    """The caller can write the generation's record before the last rank attaches."""
    told = []
    first_told = threading.Event()

    def on_members(members, complete):
        told.append(([m.rank for m in members], complete))
        first_told.set()

    leader = agree(
        _identity(0, "a"),
        True,
        _claim,
        store=_client(server),
        fallback=_fallback,
        on_members=on_members,
        timing=QUICK,
    )
    assert first_told.wait(15)
    _follow(server)()
    _service(leader)._thread.join(15)
    assert told == [([0], False), ([0, 1], True)]


def test_a_caller_whose_members_function_raises_does_not_silence_the_leader(server):
    """The other ranks still hear it."""

    def broken(members, complete):
        raise OSError("disk full")

    leader = agree(
        _identity(0, "a", 3),
        True,
        _claim,
        store=_client(server),
        fallback=_fallback,
        on_members=broken,
        timing=QUICK,
    )
    for rank, process in ((1, "b"), (2, "c")):
        assert _follow(server, rank, process, 3)().verified
    _service(leader)._thread.join(15)
    assert isinstance(_service(leader).error, OSError)


def test_stopping_tells_the_members_so_far(server):
    """A short program ends before the leader had its time."""
    told = []
    leader = agree(
        _identity(0, "a"),
        True,
        _claim,
        store=_client(server),
        fallback=_fallback,
        on_members=lambda members, complete: told.append((members, complete)),
    )
    _service(leader).stop()
    assert not _service(leader).is_running
    assert [([m.rank for m in members], complete) for members, complete in told] == [([0], False)]


def test_stopping_at_once_still_hears_of_a_rank_that_just_attaches(server):
    """A training of a few milliseconds ends before the second rank has even asked."""
    told = []
    leader = agree(
        _identity(0, "a"),
        True,
        _claim,
        store=_client(server),
        fallback=_fallback,
        on_members=lambda members, complete: told.append((members, complete)),
        timing=QUICK,
    )
    _service(leader)._stopped = True
    follower = _follow(server)
    _service(leader).stop()
    assert follower().verified
    assert [([m.rank for m in members], complete) for members, complete in told] == [([0, 1], True)]


def test_a_leader_can_wait_until_all_have_heard(server):
    """Before it raises what the user configured wrongly, which ends its process."""
    follower = _follow(server)
    leader = agree(_identity(0, "a"), True, _claim, store=_client(server), fallback=_fallback, timing=QUICK)
    assert _service(leader).wait_until_complete(15.0)
    assert follower().verified
    alone = agree(
        _identity(0, "c"),
        True,
        _claim,
        store=_client(server),
        fallback=_fallback,
        timing=QUICK,
        channel="1",
    )
    assert not _service(alone).wait_until_complete(0.1)
    _service(alone).stop()


def test_what_the_claim_raises_is_raised_on_the_leader_and_its_thread_ends(server):
    """The thread does not go on answering with nothing."""

    def failing():
        raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        agree(_identity(0, "a"), True, failing, store=_client(server), fallback=_fallback, timing=QUICK)
    assert threading.active_count() == before


class _Broken:
    """A store whose server is gone."""

    def set(self, key, value):
        del key, value
        raise dist.DistNetworkError("Connection reset by peer")

    def get_if_there(self, key):
        del key
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize(("rank", "leads"), [(0, True), (1, False)])
def test_a_store_that_is_gone_raises_nowhere(rank, leads):
    """Rank 0 claims without the others, and the others keep to themselves."""
    agreed = agree(
        _identity(rank, "a"), True, _claim, store=_Broken(), fallback=_fallback, timeout_s=5.0, timing=QUICK
    )
    assert (agreed.leader, agreed.verified) == (leads, leads)
    if leads:
        _service(agreed)._thread.join(10)
        assert isinstance(_service(agreed).error, dist.DistNetworkError)


@pytest.mark.parametrize(
    ("rank", "world_size", "leads", "verified"),
    [(0, 1, True, True), (0, 2, True, True), (1, 2, False, False)],
)
def test_without_a_store_rank_0_claims_for_itself(rank, world_size, leads, verified):
    """And the others cannot know what it found."""
    agreed = agree(_identity(rank, "a", world_size), True, _claim, store=None, fallback=_fallback)
    assert (agreed.leader, agreed.verified) == (leads, verified)
    assert agreed.claim == (_claim() if leads else _fallback())


def test_channels_do_not_answer_each_other(server):
    """The second model of a process agrees for itself."""
    leader = agree(
        _identity(0, "a"), True, _claim, store=_client(server), fallback=_fallback, timing=QUICK, channel="1"
    )
    assert not _follow(server, timeout_s=0.2)().verified
    _service(leader).stop()


def test_a_made_run_id_is_kept_over_a_restart(server):
    """The store outlives the generation, and the folder must not change."""
    made = iter(["first", "second"])
    assert kept_run_id(_client(server), "0", lambda: next(made)) == "first"
    assert kept_run_id(_client(server), "0", lambda: next(made)) == "first"
    assert kept_run_id(_client(server), "1", lambda: next(made)) == "second"
    assert kept_run_id(_Broken(), "0", lambda: "alone") == "alone"
    assert kept_run_id(None, "0", lambda: "alone") == "alone"


def test_it_connects_to_the_agents_store_before_any_process_group(server, monkeypatch):
    """As torchrun's workers can; the key lies under the package's own prefix."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    store = connect(_identity(0, "a"))
    assert store is not None
    store.set("k", b"v")
    assert store.get_if_there("k") == b"v"
    assert store.get_if_there("missing") is None
    assert server.check(["torchinstruments/1/k"])


def test_without_agent_and_group_there_is_no_store(monkeypatch):
    """Also where the agent's address leads nowhere, and within the time-out."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert connect(_identity(0, "a")) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert connect(_identity(0, "a"), timeout_s=0.2) is None


@pytest.mark.parametrize("port", ["99999999", "-1", "65536", "29500.5", "port"])
def test_an_agent_at_what_is_no_port_is_no_store(monkeypatch, port):
    """The rank attaches unverified, as where nobody answers."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    assert connect(_identity(0, "a"), timeout_s=0.2) is None


def test_generations_are_counted_in_the_store_over_a_restart(server):
    """By run and channel; a store that is gone, or none, counts nothing and raises nothing."""
    store = _client(server)
    assert kept_generations(store, "0", "night-7") == 0
    keep_generation(store, "0", "night-7", 4)
    assert kept_generations(_client(server), "0", "night-7") == 5
    assert kept_generations(store, "1", "night-7") == 0
    assert kept_generations(store, "0", "other") == 0
    store.set("0/generations/odd", b"no number")
    for nothing in (None, _Broken()):
        keep_generation(nothing, "0", "night-7", 9)
        assert kept_generations(nothing, "0", "night-7") == 0
    assert kept_generations(store, "0", "odd") == 0


def test_all_ranks_know_the_leader_and_whether_it_observes(server):
    """A follower from the reply, over the same scoped store."""
    for observes in (True, False):
        channel = f"observes-{observes}"
        follower = _in_thread(
            lambda channel=channel: agree(
                _identity(1, "b"),
                True,
                _forbidden,
                store=_client(server),
                fallback=_fallback,
                timing=QUICK,
                channel=channel,
            )
        )
        leader = agree(
            _identity(0, "a"),
            observes,
            _claim,
            store=_client(server),
            fallback=_fallback,
            timing=QUICK,
            channel=channel,
        )
        followed = follower()
        for agreed in (leader, followed):
            assert (agreed.leader_process, agreed.leader_observes) == ("a", observes)
        assert leader.store is not None
        assert followed.store is not None
        leader.store.set("schedule", b"x")
        # A write is not answered, so that another connection may be served before it.
        deadline_s = time.monotonic() + 30
        while followed.store.get_if_there("schedule") is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert followed.store.get_if_there("schedule") == b"x"
        _service(leader).stop()
