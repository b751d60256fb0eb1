"""The agreement's state machines over a dictionary, in simulated time."""

import pytest

from torchinstruments.ranks.agreement import Follower, Hello, Leader, ScopedStore
from torchinstruments.records import Claim


class _Store:
    """What all ranks share; keys of dead generations stay."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get_if_there(self, key):
        return self.values.get(key)


class _Rank:
    """One rank of one generation: waits, leads, or has its claim."""

    def __init__(self, world, rank, process):
        self.world = world
        self.hello = Hello(rank, process, f"host{rank}", rank, rank % 2 == 0)
        self.alive = True
        self.claim: Claim | None = None
        self.leader: Leader | None = None
        self.follower = Follower(
            world.store, self.hello, now_s=world.now, leader_grace_s=20.0, watch_s=5.0, heartbeat_s=1.0
        )

    def poll(self):
        now = self.world.now
        if not self.alive or (self.claim is not None and self.leader is None):
            return
        if self.leader is not None:
            self.leader.poll(now)
            return
        verdict = self.follower.poll(now)
        self.claim = verdict.claim
        if verdict.lead:
            self.leader = Leader(
                self.world.store, self.hello, world_size=self.world.size, now_s=now, heartbeat_s=1.0
            )
            self.claim = self.leader.claim = self.world.new_claim(self.hello.process)


class _World:
    """A store, a time, and the ranks that attached so far."""

    def __init__(self, size):
        self.size = size
        self.store = _Store()
        self.now = 0.0
        self.ranks = []
        self.generation = 0
        self.claimed_by = []

    def new_claim(self, process):
        self.claimed_by.append(process)
        claim = Claim("/runs/a", "a", self.generation, self.generation * 10**9, verified=True)
        self.generation += 1
        return claim

    def attach(self, rank, process):
        self.ranks.append(_Rank(self, rank, process))
        return self.ranks[-1]

    def die(self):
        for rank in self.ranks:
            rank.alive = False

    def run(self, seconds):
        until = self.now + seconds
        while self.now < until:
            for rank in self.ranks:
                rank.poll()
            self.now += 0.1

    def generation_of(self, processes):
        by_process = {rank.hello.process: rank.claim for rank in self.ranks}
        return [None if by_process[one] is None else by_process[one].generation for one in processes]


@pytest.fixture
def world():
    """Three ranks that have not attached yet."""
    return _World(3)


def test_every_rank_gets_the_claim_of_rank_0(world):
    """In whatever order they attach."""
    for rank, process in ((2, "c"), (0, "a"), (1, "b")):
        world.attach(rank, process)
    world.run(2)
    assert world.claimed_by == ["a"]
    assert world.generation_of("abc") == [0, 0, 0]


def test_rank_0_leads_in_its_first_poll(world):
    """Nobody has to wait for a time-out in the usual case."""
    rank = world.attach(0, "a")
    rank.poll()
    assert rank.leader is not None


def test_members_are_those_that_acknowledged_by_rank(world):
    """With host, local rank and whether they observe."""
    leader = world.attach(0, "a")
    world.attach(2, "c")
    world.run(2)
    assert [(m.rank, m.process, m.host, m.local_rank, m.observing) for m in leader.leader.members] == [
        (0, "a", "host0", 0, True),
        (2, "c", "host2", 2, True),
    ]
    assert not leader.leader.is_complete
    world.attach(1, "b")
    world.run(2)
    assert [m.process for m in leader.leader.members] == ["a", "b", "c"]
    assert leader.leader.is_complete


def test_a_new_generation_believes_nothing_of_the_dead_one(world):
    """All its keys are still there: hellos, replies, acknowledgements and the leader."""
    for rank, process in enumerate("abc"):
        world.attach(rank, process)
    world.run(2)
    world.die()
    late = world.attach(1, "e")
    world.run(3)
    assert late.claim is None
    leader = world.attach(0, "d")
    world.run(2)
    assert [m.process for m in leader.leader.members] == ["d", "e"]
    assert not leader.leader.is_complete
    world.attach(2, "f")
    world.run(2)
    assert world.generation_of("def") == [1, 1, 1]
    assert [m.process for m in leader.leader.members] == ["d", "e", "f"]


def test_ranks_that_change_places_at_a_restart_are_told_apart(world):
    """A process id is never used twice, a rank is."""
    for rank, process in enumerate("abc"):
        world.attach(rank, process)
    world.run(2)
    world.die()
    for rank, process in ((1, "d"), (2, "e"), (0, "f")):
        world.attach(rank, process)
    world.run(2)
    assert world.generation_of("def") == [1, 1, 1]
    assert world.claimed_by == ["a", "f"]


def test_the_lowest_rank_that_waits_leads_where_rank_0_never_attaches(world):
    """After the grace, and the others wait for it instead of leading too."""
    world.attach(2, "c")
    world.attach(1, "b")
    world.run(19)
    assert world.claimed_by == []
    world.run(10)
    assert world.claimed_by == ["b"]
    assert world.generation_of("bc") == [0, 0]


def test_a_dead_generations_rank_0_does_not_hold_up_a_rank_that_has_to_lead(world):
    """Its hello lies there and looks alive, but nothing of it moves."""
    for rank, process in enumerate("abc"):
        world.attach(rank, process)
    world.run(2)
    world.die()
    for rank, process in ((1, "e"), (2, "f")):
        world.attach(rank, process)
    world.run(40)
    assert world.claimed_by == ["a", "e"]
    assert world.generation_of("ef") == [1, 1]


def test_rank_0_that_attaches_late_joins_the_rank_that_leads_already(world):
    """A second claim would split the run in two."""
    for rank, process in ((1, "b"), (2, "c")):
        world.attach(rank, process)
    world.run(30)
    # It looks for the first time before the leader has seen its hello.
    world.attach(0, "a").poll()
    world.run(8)
    assert world.claimed_by == ["b"]
    assert world.generation_of("abc") == [0, 0, 0]


def test_rank_0_does_not_wait_for_ever_for_a_higher_leader_of_a_dead_generation(world):
    """That one waits itself, under a new process id, and moves; but it does not serve."""
    for rank, process in ((1, "b"), (2, "c")):
        world.attach(rank, process)
    world.run(30)
    world.die()
    for rank, process in enumerate("def"):
        world.attach(rank, process)
    world.run(8)
    assert world.claimed_by == ["b", "d"]
    assert world.generation_of("def") == [1, 1, 1]


@pytest.mark.parametrize("after_a_dead_generation", [False, True])
@pytest.mark.parametrize("delay", [19 + n * 0.3 for n in range(24)])
def test_rank_0_and_a_rank_that_gives_up_waiting_never_lead_both(world, delay, after_a_dead_generation):
    """Whenever rank 0 comes while the other decides: one claim, and all hear it."""
    if after_a_dead_generation:
        for rank, process in enumerate("xyz"):
            world.attach(rank, process)
        world.run(2)
        world.die()
        world.claimed_by.clear()
    for rank, process in ((1, "b"), (2, "c")):
        world.attach(rank, process)
    world.run(delay)
    world.attach(0, "a").poll()
    world.run(30)
    assert len(world.claimed_by) == 1
    assert world.generation_of("abc") == [int(after_a_dead_generation)] * 3


def test_of_two_that_begin_at_the_same_moment_one_gives_way(world):
    """Rank 0 says hello between the other's last look and its writing itself down."""
    for rank, process in ((1, "b"), (2, "c")):
        world.attach(rank, process)

    def attach_before_leader(key, value):
        world.store.values[key] = value
        if key == "leader" and b'"b"' in value and len(world.ranks) == 2:
            world.attach(0, "a").poll()

    world.store.set = attach_before_leader
    world.run(60)
    assert world.claimed_by == ["a"]
    assert world.generation_of("abc") == [0, 0, 0]


def test_a_leader_that_claims_for_a_minute_is_waited_for_and_stays_written_down(world):
    """A slow store is no reason to lead in its place."""
    leader = Leader(world.store, Hello(0, "a", "h", 0, True), world_size=3, now_s=0.0, heartbeat_s=1.0)
    world.store.set("leader", b'{"rank": 0, "process": "a"}')
    world.store.set("hello/0", b"{}")
    written = []

    def watched_set(key, value):
        written.append(key)
        world.store.values[key] = value

    world.store.set = watched_set
    world.attach(1, "b")
    for _ in range(60):
        leader.poll(world.now)
        world.run(1)
    assert world.claimed_by == []
    assert "leader" not in written
    leader.claim = Claim("/runs/a", "a", 0, 0, verified=True)
    leader.poll(world.now)
    world.run(1)
    assert world.generation_of("b") == [0]


def test_an_orphaned_leader_stops_answering_when_a_younger_one_leads(world):
    """Workers survive their agent now and then."""
    old = world.attach(0, "a")
    world.run(2)
    world.attach(0, "d")
    world.run(1)
    world.attach(1, "e")
    world.run(2)
    assert old.leader.deposed
    assert world.generation_of("de") == [1, 1]


def test_a_failure_reaches_every_rank_with_its_sentence(world):
    """What the user configured wrongly raises on all ranks alike."""
    failure = Claim("/runs/a", "a", 0, 0, verified=False, failure="no such bucket", failure_kind="not_found")

    def refused(_process):
        return failure

    world.new_claim = refused
    for rank, process in enumerate("abc"):
        world.attach(rank, process)
    world.run(2)
    assert [rank.claim for rank in world.ranks] == [failure] * 3


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"{}",
        b'{"process": "b"}',
        b'{"process": "b", "leader": "a", "claim": {}}',
    ],
)
def test_what_cannot_be_read_says_nothing(world, garbage):
    """Neither a follower nor a leader stumbles over it."""
    for key in ("reply/1", "hello/2", "ack/1", "ack/2", "leader", "serving/0", "waiting/0"):
        world.store.set(key, garbage)
    for rank, process in enumerate("ab"):
        world.attach(rank, process)
    world.run(2)
    assert world.generation_of("ab") == [0, 0]


def test_channels_keep_the_agreements_of_several_models_apart():
    """Two models in one process, one store."""
    store = _Store()
    ScopedStore(store, "0").set("hello/0", b"first")
    ScopedStore(store, "1").set("hello/0", b"second")
    assert ScopedStore(store, "0").get_if_there("hello/0") == b"first"
    assert sorted(store.values) == ["0/hello/0", "1/hello/0"]
