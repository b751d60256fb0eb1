"""The rendezvous store of the job, over a connection of our own, and agreement over it with threads and time.

Nothing here is a collective, and nothing raises because of the store: silence and errors end in an agreement
that is not verified. torch's own store object is never used, since a thread that waits in it blocks all
others.

Where torchrun's agent hosts the store, every rank connects to the agent, before and after the process group
is initialised alike, so that ranks which attach at different moments meet under the same keys. Elsewhere the
store of the initialised group is cloned, which opens a connection of its own.
"""

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from torchinstruments import environment
from torchinstruments.ranks.agreement import Follower, Hello, KeyValueStore, Leader, ScopedStore, Verdict
from torchinstruments.records import Claim, Identity, Member

__all__ = [
    "Agreement",
    "AgreementService",
    "StoreConnection",
    "Timing",
    "agree",
    "connect",
    "keep_generation",
    "kept_generations",
    "kept_run_id",
]

_PREFIX = "torchinstruments/1"
_LAST_LOOKS_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long the parts of an agreement may take, in seconds.

    Attributes:
        leader_grace_s: Silence after which a rank above 0 looks whether it has to lead.
        watch_s: For how long it then watches whether a rank below it lives; several heartbeats.
        heartbeat_s: Between two signs of life.
        poll_s: Between two looks of a follower at first, and of the leader; both slow down.
        members_after_s: When the leader tells its members, though some ranks are missing.
        serve_s: For how long the leader answers late ranks.
    """

    leader_grace_s: float = 20.0
    watch_s: float = 5.0
    heartbeat_s: float = 1.0
    poll_s: float = 0.05
    members_after_s: float = 60.0
    serve_s: float = 600.0


class StoreConnection:
    """A `KeyValueStore` over a c10d store that nobody else uses."""

    def __init__(self, store: dist.Store) -> None:
        """Wraps a store.

        Args:
            store: A clone, or a client of our own.
        """
        self._store = store
        self._there: set[str] = set()

    def set(self, key: str, value: bytes) -> None:
        """Writes a key."""
        self._store.set(key, value.decode("ascii"))

    def get_if_there(self, key: str) -> bytes | None:
        """Returns a key's value, or None where it is missing; a bare ``get`` would wait for it."""
        if key not in self._there:
            if not self._store.check([key]):
                return None
            # No key is ever deleted, so it need not be asked for again: one round trip a look.
            self._there.add(key)
        return self._store.get(key)


def connect(identity: Identity, *, timeout_s: float = 5.0) -> KeyValueStore | None:
    """Returns a connection of our own to the job's rendezvous store, or None where there is none.

    Args:
        identity: Who connects. A world of one needs a store only to keep its run id over a restart, so it
            uses one that outlives its process, of torchrun's agent, or none.
        timeout_s: For connecting, and for each request.
    """
    if not dist.is_available():
        return None
    store = _agent_store(timeout_s)
    if store is None and identity.world_size > 1:
        store = _group_store(timeout_s)
    return StoreConnection(dist.PrefixStore(_PREFIX, store)) if store is not None else None


def kept_run_id(store: KeyValueStore | None, channel: str, make: Callable[[], str]) -> str:
    """Returns the run id that the store keeps over restarts, or a new one, which it keeps from now on.

    For the leader, where neither the user nor the launcher gives one. Does not raise for the store's sake.

    Args:
        store: Of `connect`.
        channel: As given to `agree`.
        make: Makes a new one.
    """
    key = f"{channel}/run_id"
    try:
        kept = store.get_if_there(key) if store is not None else None
        if kept:
            return kept.decode("utf-8")
        made = make()
        if store is not None:
            store.set(key, made.encode("ascii"))
        return made
    except (RuntimeError, ValueError, OSError):
        return make()


def kept_generations(store: KeyValueStore | None, channel: str, run_id: str) -> int:
    """Returns how many generations of a run its leaders have counted in this store (leader, at attach).

    A folder need not know of all of them, for after a restart the leader may be on a host with a folder of
    its own. Does not raise for the store's sake.

    Args:
        store: Of `connect`.
        channel: As given to `agree`.
        run_id: Of the run.
    """
    try:
        kept = store.get_if_there(_generations_key(channel, run_id)) if store is not None else None
        return max(0, int(kept)) if kept else 0
    except (RuntimeError, ValueError, OSError):
        return 0


def keep_generation(store: KeyValueStore | None, channel: str, run_id: str, generation: int) -> None:
    """Lets the store keep that a generation was counted, for `kept_generations` (leader, at attach).

    Args:
        store: Of `connect`.
        channel: As given to `agree`.
        run_id: Of the run.
        generation: The one that begins.
    """
    if store is None:
        return
    # A store that is gone keeps nothing over a restart, and the leader goes on without it.
    with contextlib.suppress(RuntimeError, ValueError, OSError):
        store.set(_generations_key(channel, run_id), str(generation + 1).encode("ascii"))


def _generations_key(channel: str, run_id: str) -> str:
    return f"{channel}/generations/{run_id}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """What this rank takes as agreed.

    Attributes:
        claim: The leader's claim, or the caller's own fallback.
        leader: Whether this rank claimed for all.
        verified: Whether the claim is this rank's own as leader, or was echoed to it; else it is the
            fallback.
        service: Answers the other ranks in the background, on the leader of several.
        store: What was agreed over, scoped to this agreement; None where nothing was.
        leader_process: 8 hex digits of the leader, where the claim is verified over the store.
        leader_observes: Whether the leader measures its own model.
        waited_s: Seconds until this rank had its echo, gave up, or led.
    """

    claim: Claim
    leader: bool
    verified: bool
    service: "AgreementService | None" = None
    store: KeyValueStore | None = None
    leader_process: str = ""
    leader_observes: bool = False
    waited_s: float = 0.0


def agree(
    identity: Identity,
    observing: bool,  # noqa: FBT001
    claim: Callable[[], Claim],
    *,
    store: KeyValueStore | None,
    fallback: Callable[[], Claim],
    timeout_s: float = 60.0,
    channel: str = "0",
    on_members: Callable[[tuple[Member, ...], bool], None] | None = None,
    timing: Timing | None = None,
) -> Agreement:
    """Agrees on the run's folder and generation with the other ranks, in the calling thread (at attach).

    Args:
        identity: Who asks.
        observing: Whether its rank policy lets it observe.
        claim: Claims the run's folder; called on the leader alone, in the calling thread. What it raises is
            raised here, and the other ranks hear nothing; a failure that all should raise goes into the
            claim.
        store: Of `connect`. None: rank 0 claims for itself and every other rank takes its fallback.
        fallback: Makes an unverified claim for a rank that hears nothing.
        timeout_s: For which a rank waits for the leader.
        channel: Keeps several observers of one process apart: the ordinal of the attached model.
        on_members: Called from the leader's thread with the members so far and whether all ranks are among
            them: once all are, or after `Timing.members_after_s`, and again when more come later.
        timing: Of the parts.

    Returns:
        The agreement; ``verified=False`` after silence or an error of the store.
    """
    timing = timing or Timing()
    if identity.world_size == 1 or store is None:
        if identity.rank == 0:
            return Agreement(claim(), leader=True, verified=True)
        return Agreement(fallback(), leader=False, verified=False)
    me = Hello(identity.rank, identity.process, identity.host, identity.local_rank, observing)
    scoped = ScopedStore(store, channel)
    began_s = time.monotonic()
    try:
        echoed = _follow(scoped, me, identity.world_size, began_s + timeout_s, timing)
    except (RuntimeError, ValueError, OSError):
        # Without its store rank 0 can still claim; the others would claim against it.
        echoed = None if me.rank == 0 else _Silence()
    waited_s = time.monotonic() - began_s
    if isinstance(echoed, _Silence):
        return Agreement(fallback(), leader=False, verified=False, waited_s=waited_s)
    if echoed is not None and echoed.claim is not None:
        return Agreement(
            echoed.claim,
            leader=False,
            verified=True,
            store=scoped,
            leader_process=echoed.leader_process,
            leader_observes=echoed.leader_observes,
            waited_s=waited_s,
        )
    service = AgreementService(scoped, me, identity.world_size, timing, on_members)
    service.start()
    try:
        claimed = claim()
    except BaseException:
        service.stop()
        raise
    service.answer(claimed)
    return Agreement(
        claimed,
        leader=True,
        verified=True,
        service=service,
        store=scoped,
        leader_process=me.process,
        leader_observes=observing,
        waited_s=waited_s,
    )


@dataclass(frozen=True, slots=True)
class _Silence:
    """Nobody answered in time."""


def _follow(
    store: KeyValueStore, me: Hello, world_size: int, deadline_s: float, timing: Timing
) -> Verdict | _Silence | None:
    """Waits for the echo; None tells this rank to lead."""
    began_s = time.monotonic()
    follower = Follower(
        store,
        me,
        now_s=began_s,
        leader_grace_s=timing.leader_grace_s,
        watch_s=timing.watch_s,
        heartbeat_s=timing.heartbeat_s,
    )
    # All ranks together ask one server some thousand times a second at most.
    quick_s = max(timing.poll_s, world_size / 5000)
    while True:
        now_s = time.monotonic()
        verdict = follower.poll(now_s)
        if verdict.claim is not None:
            return verdict
        if verdict.lead:
            return None
        if now_s >= deadline_s:
            return _Silence()
        pause_s = quick_s if now_s - began_s < 2.0 else 4 * quick_s
        time.sleep(max(0.0, min(pause_s, deadline_s - now_s)))


class AgreementService:
    """The leader's background thread: shows life, answers, and tells the members."""

    def __init__(
        self,
        store: KeyValueStore,
        me: Hello,
        world_size: int,
        timing: Timing,
        on_members: Callable[[tuple[Member, ...], bool], None] | None,
    ) -> None:
        """Makes a service that does not run yet.

        Args:
            store: Shared by all ranks, scoped to the channel.
            me: The leader.
            world_size: Ranks in the world.
            timing: Of the parts.
            on_members: As in `agree`.
        """
        self._store = store
        self._me = me
        self._world_size = world_size
        self._timing = timing
        self._on_members = on_members
        self._told: tuple[Member, ...] | None = None
        self._claim: Claim | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._complete = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="torchinstruments-agreement", daemon=True)
        self.error: BaseException | None = None
        """The last thing that failed: the store, which ends the thread, or `on_members`."""

    @property
    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread, which shows life at once and answers after `answer`."""
        atexit.register(self.stop)
        self._thread.start()

    def answer(self, claim: Claim) -> None:
        """Hands the thread what it answers from now on."""
        self._claim = claim
        self._wake.set()

    def wait_until_complete(self, timeout_s: float) -> bool:
        """Waits until every rank has believed the claim (any thread but the service's).

        For a leader that is about to raise, and whose end would leave the others without an answer.

        Args:
            timeout_s: For which it waits at most.

        Returns:
            Whether all did.
        """
        self._thread.join(timeout_s)
        return self._complete

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends the thread; the members so far are told if none were (any thread; also at interpreter exit).

        Args:
            timeout_s: For which the thread is waited for.
        """
        self._stopped = True
        self._wake.set()
        # In a forked child the thread does not exist.
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        leader: Leader | None = None
        try:
            began_s = time.monotonic()
            leader = Leader(
                self._store,
                self._me,
                world_size=self._world_size,
                now_s=began_s,
                heartbeat_s=self._timing.heartbeat_s,
            )
            self._serve(leader, began_s)
            self._look_once_more(leader)
        except Exception as error:  # noqa: BLE001
            # The store is gone, usually because the job is over.
            self.error = error
        if leader is not None and self._claim is not None and not leader.deposed:
            self._tell(leader)
        atexit.unregister(self.stop)

    def _serve(self, leader: Leader, began_s: float) -> None:
        timing = self._timing
        while not self._stopped and not leader.deposed and not leader.is_complete:
            now_s = time.monotonic()
            age_s = now_s - began_s
            if self._claim is not None and age_s > timing.serve_s:
                return
            leader.claim = self._claim
            leader.poll(now_s)
            self._complete = leader.is_complete
            if age_s >= timing.members_after_s and self._claim is not None:
                self._tell(leader)
            self._pause(leader, age_s, time.monotonic() - now_s)

    def _look_once_more(self, leader: Leader) -> None:
        """Gives ranks that are just asking a moment: a run may be over before they were all heard of."""
        end_s = time.monotonic() + _LAST_LOOKS_S
        leader.claim = self._claim
        while leader.claim is not None and not leader.deposed and not leader.is_complete:
            now_s = time.monotonic()
            leader.poll(now_s)
            self._complete = leader.is_complete
            if now_s >= end_s:
                return
            time.sleep(min(self._timing.poll_s, end_s - now_s))

    def _pause(self, leader: Leader, age_s: float, poll_took_s: float) -> None:
        """Waits for the next look, showing life meanwhile; looks take a twentieth of the time at most."""
        timing = self._timing
        slowest_s = 5.0 if age_s > timing.members_after_s else timing.heartbeat_s
        wanted_s = timing.poll_s if age_s < 10.0 else slowest_s
        until_s = time.monotonic() + max(wanted_s, 20 * poll_took_s)
        while not self._stopped:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or leader.claim is not self._claim:
                return
            leader.show_life(time.monotonic())
            self._wake.clear()
            if not self._stopped and leader.claim is self._claim:
                self._wake.wait(min(left_s, timing.heartbeat_s))

    def _tell(self, leader: Leader) -> None:
        members = leader.members
        if self._on_members is None or members == self._told:
            return
        self._told = members
        try:
            self._on_members(members, leader.is_complete)
        except Exception as error:  # noqa: BLE001
            self.error = error


def _agent_store(timeout_s: float) -> dist.Store | None:
    """Returns a client of the store that torchrun's agent hosts, or None."""
    if (environment.text(environment.TORCHELASTIC_USE_AGENT_STORE) or "").lower() != "true":
        return None
    host, port = environment.text(environment.MASTER_ADDR), environment.text(environment.MASTER_PORT)
    if host is None or port is None:
        return None
    try:
        return dist.TCPStore(
            host,
            int(port),
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    # A number that is no port is a TypeError of the binding.
    except (RuntimeError, ValueError, TypeError, OSError):
        return None


def _group_store(timeout_s: float) -> dist.Store | None:
    """Returns a clone of the initialised group's store, or None."""
    if not dist.is_initialized():
        return None
    try:
        store = dist.distributed_c10d._get_default_store().clone()  # noqa: SLF001  # pyrefly: ignore[missing-attribute]
        store.set_timeout(timedelta(seconds=timeout_s))
    except (AttributeError, NotImplementedError, RuntimeError, ValueError, OSError):
        return None
    return store
