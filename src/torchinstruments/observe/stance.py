"""Sampled forwards that run as they are written although the model was compiled: ``compiled="force_eager"``.

Torch has one stance for the whole process, which says whether compiled code is used. A sampled forward takes
``force_eager`` before it begins, and every module hook in it fires. The stance has to last until the backward
is over and all that the framework does behind it: activation checkpointing computes parts of the forward
again in there, and finds an error where those run otherwise than before.

So each forward of an observer that forces is followed to the end of its backward, the unsampled ones too,
each by one hook on what the model returned. The stance is taken only where no forward that ran compiled waits
for its backward, and it is left when no forward waits that ran under it. A forward that begins while another
one holds the stance therefore runs under it as well, is waited for, and can be measured.

A backward that never comes is told by its graph, which goes with the last tensor of it, and by the attempt:
what did not come before the next attempt's first forward is not waited for. Between several ranks the
attempt alone tells, since they all have to run the same program and need not drop a tensor at the same time.
Where a backward does come after that, or another one through the same forward, the stance is taken again for
it. So it is where the program has set another stance since, as a ``with`` around the forward alone does at
its end, and where the observer was removed meanwhile: what checkpoints compute again has to be what they
computed before.
"""

import sys
import threading
import weakref
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from torchinstruments.config import CompiledMode
from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.engine import (
    call_at_end_of_backward,
    graph_task,
    is_capturing_graph,
    is_in_backward,
    keeps_graph,
)
from torchinstruments.observe.faults import Faults, too_deep
from torchinstruments.observe.hooks import GradientHook
from torchinstruments.observe.leaves import tensors_in
from torchinstruments.observe.sampling import AlwaysSampler, EveryNStepsSampler, SamplingPolicy
from torchinstruments.observe.stack import is_called_in
from torchinstruments.ranks.pipelining import is_pipelined
from torchinstruments.ranks.policy import Policy
from torchinstruments.records import Position

if TYPE_CHECKING:
    from torch._dynamo.decorators import set_stance

__all__ = ["MAX_WAITING", "Flight", "Forcing", "is_agreed", "refuse_disagreement"]

MAX_WAITING = 256
"""Forwards that are followed at once; beyond that the oldest is waited for no more."""

_PROBE = "compiled"


class _State(Enum):
    """How far a forward has come."""

    RUNNING = auto()
    WAITING = auto()
    OVER = auto()


class Flight:
    """One root forward on its way from its begin to the end of its backward.

    Its hooks hold it, and it holds no tensor.

    Args:
        owner: Whose forward it is.
        attempt: In which it began.
        called: Id of the module that was called.
        is_forced: Whether it runs under the stance.
    """

    def __init__(self, owner: "Forcing", attempt: int | None, called: int, *, is_forced: bool) -> None:
        self.owner = weakref.ref(owner)
        self.attempt = attempt
        self.called = called
        self.thread = threading.get_ident()
        self.is_forced = is_forced
        self.state = _State.RUNNING
        self.is_in_backward = False
        """Whether a backward began that leaves nothing of the graph."""
        self.is_blind = False
        """Whether nothing was found in what the model returned that would tell of a backward."""
        self.num_too_deep = 0
        """Hooks of it that the stack had no room for."""
        self._task = -1

    def ended(self, output: object, *, failed: bool) -> None:
        """Takes the end of the forward (training thread, hot path).

        Args:
            output: What the model returned.
            failed: Whether it raised.
        """
        if self.state is not _State.RUNNING:
            return
        self.state = _State.WAITING
        owner = self.owner()
        if owner is not None:
            owner.running.pop(self.thread, None)
        if failed or output is None or not torch.is_grad_enabled():
            self.over()
            return
        tensors = tensors_in(output).tensors
        if not tensors:
            self.is_blind = True
            _PROCESS.keep(self)
            return
        hook = GradientHook(self, 0)
        hooked = [tensor for _, tensor in tensors if tensor.requires_grad and not tensor.is_leaf]
        for tensor in hooked:
            tensor.register_hook(hook)
        if not hooked or self.is_left:
            # Behind its observer the stance is taken again for the backward alone.
            self.over()

    @property
    def is_running(self) -> bool:
        """Whether the call that it follows is on the stack of its thread."""
        return self.state is _State.RUNNING and is_called_in(self.thread, self.called)

    def arrived(self, number: int, gradient: torch.Tensor | None) -> None:  # noqa: ARG002 - as hooks call it
        """Takes that a backward has begun; it never raises (autograd thread, hot path)."""
        task = graph_task()
        if self.state is _State.RUNNING or task == self._task or (self.is_left and not self.is_forced):
            return
        self._task = task
        owner = self.owner()
        faults = None if owner is None else owner.faults
        try:
            if self.is_forced or self.state is _State.OVER:
                _PROCESS.resume(self, faults)
            # Without its observer nothing would end one whose graph is kept.
            if self.is_left or not keeps_graph():
                self.is_in_backward = True
                call_at_end_of_backward(self._engine_ended)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            if faults is not None:
                faults.report(_PROBE, "", error)

    @property
    def is_left(self) -> bool:
        """Whether its observer is gone."""
        owner = self.owner()
        return owner is None or owner.is_closed

    def over(self) -> None:
        """Lets it be waited for no more (training or autograd thread, hot path)."""
        self.state = _State.OVER
        self.is_in_backward = False
        owner = self.owner()
        if self.num_too_deep and owner is not None:
            owner.faults.report(_PROBE, "", too_deep(self.num_too_deep))
            self.num_too_deep = 0
        _PROCESS.settle(None if owner is None else owner.faults)

    def _engine_ended(self) -> None:
        """Is called by the engine after the last gradient (autograd thread, hot path)."""
        try:
            call_at_end_of_backward(self.over)
        except Exception as error:  # noqa: BLE001 - nothing may leave a callback
            if (owner := self.owner()) is not None:
                owner.faults.report(_PROBE, "", error)
            self.over()


class _Process:
    """The stance of this process, and the forwards that it matters to."""

    def __init__(self) -> None:
        # A signal handler may run a model while its thread is in here.
        self._lock = threading.RLock()
        self._flights: list[weakref.ref[Flight]] = []
        self._kept: set[Flight] = set()
        self._entered: set_stance | None = None

    def start(
        self, owner: "Forcing", position: Position, called: int, *, forces: bool, keeps: bool
    ) -> Flight:
        """Takes the begin of a root forward, and the stance where that is asked for and possible."""
        with self._lock:
            flights = [flight for flight in self._alive() if not _is_over(flight, owner, position)]
            while len(flights) >= MAX_WAITING:
                flights.pop(0).state = _State.OVER
            self._flights = [weakref.ref(flight) for flight in flights]
            self.settle(owner.faults)
            if forces and not self._is_held() and not flights:
                self._enter(owner.faults)
            flight = Flight(owner, position.attempt, called, is_forced=self._is_held())
            self._flights.append(weakref.ref(flight))
            if keeps:
                self._kept.add(flight)
            return flight

    def settle(self, faults: Faults | None) -> None:
        """Leaves the stance if no forward that ran under it is on its way (any thread, hot path)."""
        with self._lock:
            self._kept = {flight for flight in self._kept if flight.state is not _State.OVER}
            if self._entered is None or any(
                flight.is_forced and flight.state is not _State.OVER for flight in self._alive()
            ):
                return
            try:
                # What the program has set since is left to it.
                if self._is_held():
                    self._entered.__exit__(None, None, None)
                self._entered = None
            except Exception as error:  # noqa: BLE001 - tried again at the next forward
                if faults is not None:
                    faults.report(_PROBE, "", error)

    def keep(self, flight: Flight) -> None:
        """Keeps a forward that no tensor tells of (training thread, hot path)."""
        with self._lock:
            self._kept.add(flight)

    def resume(self, flight: Flight, faults: Faults | None) -> None:
        """Takes the stance again for a backward that finds another (autograd thread, hot path)."""
        with self._lock:
            flight.state = _State.WAITING
            if flight.is_left:
                self._await_its_graph(flight)
            elif all(reference() is not flight for reference in self._flights):
                self._flights.append(weakref.ref(flight))
            if flight.is_forced and not self._is_held():
                self._enter(faults)

    def drop(self, owner: "Forcing") -> None:
        """Waits for no forward of an observer any more but what runs, itself or its backward (any thread)."""
        with self._lock:
            for flight in self._alive():
                if flight.owner() not in {owner, None}:
                    continue
                if flight.is_forced and flight.is_running:
                    # What its checkpoints compute again would not be what they computed before.
                    continue
                if flight.is_in_backward and (flight.thread != threading.get_ident() or is_in_backward()):
                    self._await_its_graph(flight)
                else:
                    flight.state = _State.OVER
            self.settle(owner.faults)

    def _await_its_graph(self, flight: Flight) -> None:
        """Has the end of its graph leave the stance, where a backward raises and no forward comes."""
        others = [reference for reference in self._flights if reference() is not flight]
        self._flights = [*others, weakref.ref(flight, self._graph_went)]

    def _graph_went(self, _: weakref.ref[Flight]) -> None:
        """Takes that a forward's graph went (any thread)."""
        self.settle(None)

    def _is_held(self) -> bool:
        """Returns whether the stance is the one taken here, and not one that the program set since."""
        current = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
        return self._entered is not None and current is self._entered.stance

    def disarm(self) -> None:
        """Makes it usable in a forked child, where the lock may be held for ever."""
        self._lock = threading.RLock()

    def _enter(self, faults: Faults | None) -> None:
        """Takes the stance; where torch refuses, the forward runs compiled."""
        try:
            self._entered = torch.compiler.set_stance("force_eager")
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            if faults is not None:
                faults.report(_PROBE, "", error)

    def _alive(self) -> list[Flight]:
        """Returns the forwards that may still be on their way."""
        return [flight for reference in self._flights if (flight := reference()) is not None]


def _is_over(flight: Flight, owner: "Forcing", position: Position) -> bool:
    """Returns whether a forward that begins shows an earlier one to be over."""
    thread = threading.get_ident()
    if flight.state is _State.RUNNING:
        # Left by an exception that runs no hooks, KeyboardInterrupt above all, or by the end of its thread.
        is_gone = flight.owner() is None or flight.thread not in sys._current_frames()  # noqa: SLF001 - the ids of all threads
        is_gone = is_gone or (flight.is_left and not flight.is_running)
        if is_gone or (flight.thread == thread and flight.owner() is owner):
            flight.state = _State.OVER
    elif flight.state is _State.WAITING:
        other = flight.owner()
        is_past = other is owner and None is not flight.attempt != position.attempt
        # The thread would not be here if its backward went on, nor if it waited for what it returned.
        raised = flight.is_in_backward and flight.thread == thread
        is_past = is_past or (flight.is_blind and flight.thread == thread)
        if (other is None and not flight.is_in_backward) or raised or is_past:
            flight.state = _State.OVER
    return flight.state is _State.OVER


_PROCESS = _Process()


class Forcing:
    """Has the sampled forwards of one observer run as they are written.

    Args:
        faults: Takes errors and notices.
        agreed: Whether all ranks of a world of several would force the same forwards.
    """

    def __init__(self, faults: Faults, *, agreed: bool) -> None:
        self.faults = faults
        self.agreed = agreed
        self.is_closed = False
        """Whether it forces no more."""
        self.running: dict[int, Flight] = {}
        """The forwards that are not known to have ended, by their threads."""

    def forward_started(
        self, position: Position, called: int, *, is_chosen: bool, world_size: int
    ) -> Flight | None:
        """Takes the begin of a root forward (training thread, hot path).

        Args:
            position: Where it stands.
            called: Id of the module that was called.
            is_chosen: Whether it is to be measured.
            world_size: Ranks in the world.

        Returns:
            The forward; None in a program that has compiled nothing so far.
        """
        if "torch._dynamo" not in sys.modules:
            return None
        if is_capturing_graph():
            # What is captured would be the eager program for good.
            is_chosen = False
        in_pipeline = is_chosen and is_pipelined()
        forces = is_chosen and not in_pipeline
        flight = _PROCESS.start(self, position, called, forces=forces, keeps=world_size > 1)
        self.running[flight.thread] = flight
        if in_pipeline and not flight.is_forced:
            self._tell_missed("a pipeline's schedule keeps the forwards of several micro-batches waiting")
        elif is_chosen and not flight.is_forced:
            self._tell_missed("an earlier forward, which ran compiled, still waits for its backward")
        return flight

    def close(self) -> None:
        """Leaves the stance, unless another observer's forward needs it (any thread). Idempotent."""
        self.is_closed = True
        _PROCESS.drop(self)

    @property
    def is_running(self) -> bool:
        """Whether a forced forward goes on in which the observer was removed (any thread)."""
        return any(flight.is_forced and flight.is_running for flight in list(self.running.values()))

    def ended_behind_removal(self, output: object) -> None:
        """Takes the end of a forward in which the observer was removed (training thread, hot path).

        Args:
            output: What the model returned; None where it raised.
        """
        flight = self.running.get(threading.get_ident())
        if flight is not None:
            flight.ended(output, failed=output is None)

    def disarm(self) -> None:
        """Leaves the stance in a forked child, where no backward of the parent's will end."""
        _PROCESS.disarm()
        self.close()

    def _tell_missed(self, why: str) -> None:
        self.faults.notice(
            _PROBE,
            "",
            f"a sampled forward was not measured, and counts as missed: with compiled='force_eager' it would "
            f"have run eagerly while {why}; further ones are only counted",
            kind="missed",
        )


def is_agreed(policy: Policy, sampler: SamplingPolicy, world_size: int) -> bool:
    """Returns whether all ranks of a world would force the same forwards."""
    observes = policy.name == "all" or policy.ranks == tuple(range(world_size))
    return world_size == 1 or (observes and type(sampler) in (EveryNStepsSampler, AlwaysSampler))


def refuse_disagreement(policy: Policy, sampler: SamplingPolicy, world_size: int) -> None:
    """Does nothing where all ranks would force the same forwards (attaching thread).

    Eager and compiled code of one model need not issue the same collectives, and ranks of which some force
    would wait for each other for ever.

    Raises:
        ConfigurationError: They might not.
    """
    if not is_agreed(policy, sampler, world_size):
        raise ConfigurationError(
            f"compiled={CompiledMode.FORCE_EAGER.value!r} with rank_policy={policy.name!r}, "
            f"{type(sampler).__name__} and {world_size} ranks is not possible: all ranks have to run the "
            f"same forwards eagerly, or their collectives may not meet; give rank_policy='all' and "
            f"sampler=EveryNStepsSampler(n), or compiled='boundary'"
        )
