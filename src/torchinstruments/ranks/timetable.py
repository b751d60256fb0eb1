"""The schedule of `torchinstruments.ranks.schedule` over the store: a background thread on every rank.

The planner's thread looks at its own rank's progress and writes a document where there is a new plan, and
once in a while so that the others know it alive. A listener's thread asks the store for that document: one
short request a look. No rank ever waits for another one here, and the training thread never comes here.
"""

import atexit
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchinstruments.ranks.agreement import KeyValueStore
from torchinstruments.ranks.rendezvous import Agreement
from torchinstruments.ranks.schedule import Plan, Planner, Progress, ScheduleListener
from torchinstruments.records import Identity

__all__ = ["Listening", "Paced", "Pacing", "Planning", "ScheduleThread", "pacing", "schedule"]

MAX_LOOK_S = 5.0
"""Between two looks at most, apart from the jitter."""

MIN_LOOK_S = 0.25
_LOOKS_IN_INTERVAL = 12
_MAX_LOOKS_PER_S = 205
_JITTER = 0.2
_MAX_FAILURES = 3


class Paced(Protocol):
    """Whom a schedule is for: `torchinstruments.observe.aligned.AlignedSampler`."""

    @property
    def interval_s(self) -> float:
        """Between two samples."""
        ...

    @property
    def progress(self) -> Progress | None:
        """How far this rank has come; None before its first root forward (schedule's thread)."""
        ...

    @property
    def num_forwards(self) -> int:
        """Root forwards begun (schedule's thread)."""
        ...

    def take(self, plans: Sequence[Plan], num_lost: int = 0) -> None:
        """Takes targets (schedule's thread)."""
        ...

    def follow(self, *, is_led: bool) -> None:
        """Takes whether the planner is alive (schedule's thread)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """The times of a schedule, in seconds.

    Attributes:
        look_s: Between two looks, give or take a fifth.
        lead_s: How far ahead a target lies: two of the longest looks.
        beat_s: Between two documents of a planner that has nothing new to tell.
        patience_s: Silence after which a planner counts as dead.
    """

    look_s: float
    lead_s: float
    beat_s: float
    patience_s: float


def pacing(interval_s: float, world_size: int) -> Pacing:
    """Returns how often the ranks look.

    Every 5 s; more often where the interval asks for it and so few ranks look that all of them together do
    not ask the store more often than 1,024 ranks would.

    Args:
        interval_s: Between two samples.
        world_size: Ranks of the world.
    """
    wanted_s = max(MIN_LOOK_S, world_size / _MAX_LOOKS_PER_S, interval_s / _LOOKS_IN_INTERVAL)
    look_s = min(MAX_LOOK_S, wanted_s)
    return Pacing(
        look_s=look_s,
        lead_s=2 * (1 + _JITTER) * look_s,
        beat_s=6 * look_s,
        patience_s=18 * look_s,
    )


class Planning:
    """The planner's part: one `step` a look."""

    def __init__(
        self, store: KeyValueStore, key: str, paced: Paced, *, interval_s: float, pacing: Pacing
    ) -> None:
        """Makes a planner that has told nothing.

        Args:
            store: Shared by all ranks.
            key: Where the document lies; this planner's alone.
            paced: Whose progress counts.
            interval_s: Between two samples.
            pacing: The times.
        """
        self._store = store
        self._key = key
        self._paced = paced
        self._beat_s = pacing.beat_s
        self._planner = Planner(interval_s=interval_s, lead_s=pacing.lead_s, look_s=pacing.look_s)
        self._beat_due_s: float | None = None

    def step(self, now_s: float) -> None:
        """Plans and tells, if there is something to tell.

        Raises:
            RuntimeError: The store did not take it. What was planned is kept, and told with what comes next.
        """
        progress = self._paced.progress
        plan = self._planner.look(now_s, progress)
        if plan is not None:
            # What the others hear of too late they call missed, and so they shall: this rank measures it.
            self._paced.take([plan])
        if plan is not None or self._beat_due_s is None or now_s >= self._beat_due_s:
            self._store.set(self._key, self._planner.news(progress).encode())
            self._beat_due_s = now_s + self._beat_s
            self._paced.follow(is_led=True)

    def end(self) -> None:
        """Tells the others that nothing more will come.

        Raises:
            RuntimeError: The store did not take it.
        """
        self._store.set(self._key, self._planner.news(self._paced.progress, ended=True).encode())


class Listening:
    """A listener's part: one `step` a look."""

    def __init__(self, store: KeyValueStore, key: str, paced: Paced, *, now_s: float, pacing: Pacing) -> None:
        """Makes a listener that has heard nothing.

        Args:
            store: Shared by all ranks.
            key: Where the planner's document lies.
            paced: Who meets the targets.
            now_s: Monotonic seconds.
            pacing: The times.
        """
        self._store = store
        self._key = key
        self._paced = paced
        self._listener = ScheduleListener(now_s=now_s, patience_s=pacing.patience_s)

    def step(self, now_s: float) -> None:
        """Looks once.

        Raises:
            RuntimeError: The store did not answer.
        """
        heard = self._listener.hear(now_s, self._store.get_if_there(self._key), self._paced.num_forwards)
        if heard.plans or heard.num_lost:
            self._paced.take(heard.plans, heard.num_lost)
        self._paced.follow(is_led=heard.is_led)

    def end(self) -> None:
        """Has nobody to tell."""


class ScheduleThread:
    """Steps in the background until it is stopped, or the store is gone."""

    def __init__(
        self,
        part: Planning | Listening,
        paced: Paced,
        *,
        pacing: Pacing,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Makes a thread that does not run yet.

        Args:
            part: What it does.
            paced: Goes by its own time once the store is gone.
            pacing: The times.
            on_error: Told why it ended before it was stopped, once.
        """
        self._part = part
        self._paced = paced
        self._look_s = pacing.look_s
        self._agreeing_s = pacing.lead_s + 2 * (1 + _JITTER) * pacing.look_s
        self._on_error = on_error
        # Not the program's random state, which must stay as it is.
        self._random = random.Random()  # noqa: S311 - spreads looks, guards nothing
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="torchinstruments-schedule", daemon=True)

    @property
    def agreeing_s(self) -> float:
        """What the first target takes, however short the interval: two looks at the pace, and the lead."""
        return self._agreeing_s

    def start(self) -> None:
        """Starts it (enrolling thread)."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends it; a planner tells the others (any thread; also at interpreter exit).

        Args:
            timeout_s: For which it is waited for.
        """
        self._stopped.set()
        # In a forked child the thread does not exist; and it may be stopped before it ever started.
        if self._thread.ident is None:
            return
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        num_failures = 0
        try:
            while not self._stopped.is_set():
                try:
                    self._part.step(time.monotonic())
                    num_failures = 0
                except (RuntimeError, ValueError, OSError):
                    num_failures += 1
                    if num_failures == _MAX_FAILURES:
                        raise
                self._stopped.wait(self._look_s * self._random.uniform(1 - _JITTER, 1 + _JITTER))
            self._part.end()
        except Exception as error:  # noqa: BLE001 - told, and training goes on
            # At the end of a job the store may go before the last rank does.
            if not self._stopped.is_set():
                self._paced.follow(is_led=False)
                self._on_error(error)


def schedule(
    paced: Paced,
    identity: Identity,
    agreement: Agreement,
    *,
    first_rank: int | None,
    on_error: Callable[[Exception], None],
) -> ScheduleThread | None:
    """Returns the thread of a rank that observes, not started, or None where it has nobody to agree with.

    The leader plans, for every rank knows it; where it does not observe, the lowest rank that does.

    Args:
        paced: Meets the targets.
        identity: This rank.
        agreement: What it agreed on.
        first_rank: The lowest rank that the rank policy lets observe, where that is known.
        on_error: Told why the thread ended before it was stopped.
    """
    store = agreement.store
    if store is None or not agreement.verified or identity.world_size == 1:
        return None
    if not agreement.leader_observes and first_rank is None:
        return None
    plans = agreement.leader if agreement.leader_observes else identity.rank == first_rank
    # A leader's id is never used twice, so nobody hears a generation that is over.
    key = f"schedule/{agreement.leader_process}"
    times = pacing(paced.interval_s, identity.world_size)
    part: Planning | Listening
    if plans:
        part = Planning(store, key, paced, interval_s=paced.interval_s, pacing=times)
    else:
        part = Listening(store, key, paced, now_s=time.monotonic(), pacing=times)
    return ScheduleThread(part, paced, pacing=times, on_error=on_error)
