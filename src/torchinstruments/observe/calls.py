"""The root forwards that are running, one a thread."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident

from torchinstruments.observe.backward_sync import BackwardSync
from torchinstruments.observe.capture import SampledForward
from torchinstruments.observe.compiled import NOTHING_COMPILED, CompiledParts
from torchinstruments.observe.stance import Flight
from torchinstruments.records import GradSync, Position

__all__ = ["RootCall", "RunningCalls"]


@dataclass
class RootCall:
    """A root forward that is running.

    Attributes:
        grad_sync: As latched at its start.
        handled: The exception that was being handled when it began.
        position: Where it stands among the steps.
        backward_sync: Reads what its backwards do, where those decide; else None.
        depth: Calls of the root that are on the stack, this one included.
        sampled: Measures it, where it was chosen.
        is_checkpointed: Whether it runs as a whole inside reentrant activation checkpointing.
        compiled: What is compiled of what was called, where it was chosen.
        called: Id of the module that was called: the model, its wrapper or a replica.
        flight: Follows it to the end of its backward, where sampled forwards are forced to run eagerly.
    """

    grad_sync: GradSync
    handled: BaseException | None
    position: Position | None = None
    backward_sync: BackwardSync | None = None
    depth: int = 1
    sampled: SampledForward | None = None
    is_checkpointed: bool = False
    compiled: CompiledParts = NOTHING_COMPILED
    called: int = 0
    flight: Flight | None = None

    def has_failed(self) -> bool:
        """Returns whether it is being left by an exception of its own."""
        handled = sys.exception()
        return handled is not None and handled is not self.handled


class RunningCalls:
    """The root forwards of one observer.

    Args:
        end_failed: Takes the sample of a call that was given up.
    """

    def __init__(self, end_failed: Callable[[SampledForward], None]) -> None:
        self._end_failed = end_failed
        self._by_thread: dict[int, RootCall] = {}
        self.cut_off: list[SampledForward] = []
        """The samples that `drop` ended."""

    def current(self) -> RootCall | None:
        """Returns the call of the current thread (training thread, hot path)."""
        return self._by_thread.get(get_ident())

    def begin(self, call: RootCall) -> None:
        """Takes the outermost call of the current thread (training thread, hot path)."""
        self._by_thread[get_ident()] = call

    def end(self) -> None:
        """Takes that the current thread's call is over (training thread, hot path)."""
        self._by_thread.pop(get_ident(), None)

    def abandon(self, thread: int | None = None) -> None:
        """Ends a call that was left by an exception which runs no hooks, KeyboardInterrupt above all.

        Args:
            thread: Whose call; None is the current one.
        """
        thread = get_ident() if thread is None else thread
        call = self._by_thread.get(thread)
        try:
            if call is not None and call.sampled is not None:
                self._end_failed(call.sampled)
        finally:
            self._by_thread.pop(thread, None)

    def abandon_dead_threads(self) -> None:
        """Ends calls of threads that are gone."""
        if len(self._by_thread) > 1:
            alive = sys._current_frames()  # noqa: SLF001 - the ids of all threads that run Python
            for thread in list(self._by_thread):
                if thread not in alive:
                    self.abandon(thread)

    def drop(self) -> None:
        """Takes the hooks of running forwards out of the model and drops what they measured (any thread).

        After an interrupt it can be called again. A call that begins to be sampled meanwhile is not ended.
        """
        for call in list(self._by_thread.values()):
            sampled = call.sampled
            if sampled is not None:
                sampled.detach()
                if sampled.claim_end():
                    self.cut_off.append(sampled)
        self._by_thread.clear()
