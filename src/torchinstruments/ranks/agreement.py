"""Agreement by echo: state machines over a store that outlives a generation, without threads or time.

Keys of a dead generation survive in the store, so nothing is believed for being there:

* ``hello/<rank>``: who I am. A follower believes only a ``reply/<rank>`` that repeats its own process id, and
  answers it with ``ack/<rank>``, which repeats the leader's. The leader answers anew when the process id in a
  hello changes, and counts only those ranks as members that acknowledged *it*.
* ``waiting/<rank>`` and ``serving/<rank>``: process id and a counter, moved once a second by a rank that
  waits and by a leader that serves. Whether somebody lives is seen from a change during a watch, never from a
  value.
* ``leader``: who leads. Rank 0 leads at once, unless a higher rank does and is alive. When rank 0 is silent,
  a higher rank watches all ranks below it (and whether the leader that is written there serves) and leads if
  none of them lives. It writes itself down first and then looks again for a new hello below it, while a lower
  rank writes its hello first and then looks for the leader: of two that begin at once, at least one sees the
  other.

A leader that finds a younger leader of its own or a lower rank stops answering: it is an orphan of a
generation that is over. A process that attaches between the start of a new generation and its leader's first
write can still be answered by such an orphan; it then keeps the orphan's generation, and the merge reports
the overlap.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torchinstruments.records import Claim, Member

__all__ = ["Follower", "Hello", "KeyValueStore", "Leader", "ScopedStore", "Verdict"]


class KeyValueStore(Protocol):
    """A store that all ranks share. Both methods are one short round trip and may raise when it is gone."""

    def set(self, key: str, value: bytes) -> None:
        """Writes a key (attaching thread; the leader's background thread)."""
        ...

    def get_if_there(self, key: str) -> bytes | None:
        """Returns a key's value, or None at once where it is missing (the same threads)."""
        ...


class ScopedStore:
    """A part of a store: every key gets a prefix."""

    def __init__(self, store: KeyValueStore, prefix: str) -> None:
        """Wraps a store.

        Args:
            store: The whole one.
            prefix: Stands before every key, with a slash.
        """
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        """Writes a key of this part."""
        self._store.set(f"{self._prefix}/{key}", value)

    def get_if_there(self, key: str) -> bytes | None:
        """Returns the value of a key of this part, or None."""
        return self._store.get_if_there(f"{self._prefix}/{key}")


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself.

    Attributes:
        rank: Rank in this generation.
        process: 8 hex digits of this process, never used twice.
        host: Host name.
        local_rank: Rank among those of the host.
        observing: Whether its rank policy lets it observe.
    """

    rank: int
    process: str
    host: str
    local_rank: int
    observing: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a follower knows after a poll.

    Attributes:
        claim: The leader's claim, once it was echoed.
        leader_process: Whose claim it is.
        leader_observes: Whether the leader measures its own model.
        lead: Whether this rank has to lead.
    """

    claim: Claim | None = None
    leader_process: str = ""
    leader_observes: bool = False
    lead: bool = False


class Follower:
    """A rank that waits for the leader's reply, or for the moment to lead itself."""

    def __init__(
        self,
        store: KeyValueStore,
        me: Hello,
        *,
        now_s: float,
        leader_grace_s: float,
        watch_s: float,
        heartbeat_s: float,
    ) -> None:
        """Says hello.

        Args:
            store: Shared by all ranks, scoped to this agreement.
            me: Who says it.
            now_s: Monotonic seconds.
            leader_grace_s: Seconds of silence after which a rank above 0 looks whether it has to lead.
            watch_s: Seconds for which it watches the ranks below it.
            heartbeat_s: Seconds between its own signs of life.
        """
        self._store = store
        self._me = me
        self._pulse = _Pulse(store, f"waiting/{me.rank}", me.process, heartbeat_s)
        self._watch_s = watch_s
        self._look_at_s = now_s + (0.0 if me.rank == 0 else leader_grace_s)
        self._watched: dict[str, bytes | None] | None = None
        store.set(f"hello/{me.rank}", _encode(_fields_of(me)))

    def poll(self, now_s: float) -> Verdict:
        """Looks once.

        Args:
            now_s: Monotonic seconds.
        """
        self._pulse.beat(now_s)
        echoed = self._echoed()
        if echoed is not None:
            return echoed
        if now_s < self._look_at_s:
            return Verdict()
        if self._watched is None:
            self._watched = self._signs_of_life()
            if any(value is not None for value in self._watched.values()):
                self._look_at_s = now_s + self._watch_s
                return Verdict()
        elif self._lives(self._signs_of_life()):
            return self._keep_watching(now_s)
        return self._try_to_lead(now_s)

    def _echoed(self) -> Verdict | None:
        raw = self._store.get_if_there(f"reply/{self._me.rank}")
        reply = _decode(raw)
        if reply.get("process") != self._me.process:
            return None
        claim, leader = _as_claim(reply.get("claim")), reply.get("leader")
        if claim is None or not isinstance(leader, str):
            return None
        self._store.set(f"ack/{self._me.rank}", _encode({"process": self._me.process, "leader": leader}))
        return Verdict(claim=claim, leader_process=leader, leader_observes=reply.get("observes") is True)

    def _signs_of_life(self) -> dict[str, bytes | None]:
        """Returns what those that come before this rank have written last."""
        keys = [f"{kind}/{rank}" for rank in range(self._me.rank) for kind in ("hello", "waiting", "serving")]
        signs = {key: self._store.get_if_there(key) for key in keys}
        leader = _decode(self._store.get_if_there("leader")).get("rank")
        # A higher rank that merely waits gives way; one that serves has claimed, or is about to.
        if isinstance(leader, int) and leader > self._me.rank:
            signs[f"serving/{leader}"] = self._store.get_if_there(f"serving/{leader}")
        return signs

    def _lives(self, signs: Mapping[str, bytes | None]) -> bool:
        before = self._watched or {}
        return any(value is not None and value != before.get(key) for key, value in signs.items())

    def _keep_watching(self, now_s: float) -> Verdict:
        self._watched = None
        self._look_at_s = now_s + self._watch_s
        return Verdict()

    def _try_to_lead(self, now_s: float) -> Verdict:
        me = self._me
        self._store.set("leader", _encode({"rank": me.rank, "process": me.process}))
        if self._lives(self._signs_of_life()):
            return self._keep_watching(now_s)
        return Verdict(lead=True)


class Leader:
    """The rank that claims, answers every hello, and learns who the members are."""

    def __init__(
        self, store: KeyValueStore, me: Hello, *, world_size: int, now_s: float, heartbeat_s: float
    ) -> None:
        """Begins to lead; shows life from now on, and answers once `claim` is set.

        Args:
            store: Shared by all ranks, scoped to this agreement.
            me: Who leads.
            world_size: Ranks in the world.
            now_s: Monotonic seconds.
            heartbeat_s: Seconds between its signs of life.
        """
        self._store = store
        self._me = me
        self._world_size = world_size
        self._pulse = _Pulse(store, f"serving/{me.rank}", me.process, heartbeat_s)
        self._answered: dict[int, Hello] = {}
        self._members: dict[int, Hello] = {me.rank: me}
        self.claim: Claim | None = None
        """What is answered; set by the thread that claims."""
        self.deposed = False
        """Whether a younger leader was found; then nothing is answered any more."""
        self._pulse.beat(now_s)

    @property
    def members(self) -> tuple[Member, ...]:
        """Those that believed this leader, by rank."""
        return tuple(
            [
                Member(hello.rank, hello.process, hello.host, hello.local_rank, hello.observing)
                for _, hello in sorted(self._members.items())
            ]
        )

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of the world believed this leader."""
        return len(self._members) == self._world_size

    def show_life(self, now_s: float) -> None:
        """Moves the counter, if that is due."""
        self._pulse.beat(now_s)

    def poll(self, now_s: float) -> None:
        """Answers whoever said hello, and counts whoever acknowledged.

        Args:
            now_s: Monotonic seconds.
        """
        self.show_life(now_s)
        if self.claim is None or self.deposed:
            return
        for rank in range(self._world_size):
            if rank != self._me.rank and not self.deposed:
                self._serve(rank)

    def _serve(self, rank: int) -> None:
        hello = _as_hello(_decode(self._store.get_if_there(f"hello/{rank}")), rank)
        if hello is None:
            return
        if self._answered.get(rank) != hello:
            self._answer(hello)
        elif self._members.get(rank) != hello:
            ack = _decode(self._store.get_if_there(f"ack/{rank}"))
            if ack.get("process") == hello.process and ack.get("leader") == self._me.process:
                self._members[rank] = hello

    def _answer(self, hello: Hello) -> None:
        if self.claim is None or self._is_deposed():
            self.deposed = self.claim is not None
            return
        reply = {
            "process": hello.process,
            "leader": self._me.process,
            "observes": self._me.observing,
            "claim": _fields_of(self.claim),
        }
        self._store.set(f"reply/{hello.rank}", _encode(reply))
        self._answered[hello.rank] = hello

    def _is_deposed(self) -> bool:
        leader = _decode(self._store.get_if_there("leader"))
        if leader.get("process") == self._me.process:
            return False
        rank = leader.get("rank")
        if isinstance(rank, int) and rank <= self._me.rank:
            return True
        # A higher rank wrote itself down and gave way without a trace.
        self._store.set("leader", _encode({"rank": self._me.rank, "process": self._me.process}))
        return False


class _Pulse:
    """A counter that moves once in a while."""

    def __init__(self, store: KeyValueStore, key: str, process: str, heartbeat_s: float) -> None:
        self._store = store
        self._key = key
        self._process = process
        self._heartbeat_s = heartbeat_s
        self._count = 0
        self._due_s: float | None = None

    def beat(self, now_s: float) -> None:
        if self._due_s is not None and now_s < self._due_s:
            return
        self._due_s = now_s + self._heartbeat_s
        self._count += 1
        self._store.set(self._key, f"{self._process}/{self._count}".encode())


def _encode(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, allow_nan=False, sort_keys=True).encode()


def _decode(raw: bytes | None) -> dict[str, object]:
    """Returns the object that lies in some bytes, or an empty one: what cannot be read says nothing."""
    if raw is None:
        return {}
    try:
        document = json.loads(raw)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _as_hello(document: Mapping[str, object], rank: int) -> Hello | None:
    match document:
        case {
            "rank": int(said),
            "process": str(process),
            "host": str(host),
            "local_rank": int(local_rank),
            "observing": bool(observing),
        } if said == rank:
            return Hello(said, process, host, local_rank, observing)
        case _:
            return None


def _fields_of(record: Hello | Claim) -> dict[str, object]:
    """Returns a document of a record.

    `dataclasses.asdict` fills a tuple from a generator, which fails while another thread of the program asks
    ``gc.get_objects``.
    """
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _as_claim(document: object) -> Claim | None:
    if not isinstance(document, dict):
        return None
    known = {name: document[name] for name in Claim.__dataclass_fields__ if name in document}
    match known:
        case {
            "url": str(),
            "run_id": str(),
            "generation": int(),
            "first_sample_id": int(),
            "verified": bool(),
        }:
            return Claim(**known)
        case _:
            return None
