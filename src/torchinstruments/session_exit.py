"""What the sessions that are open have left to do when the interpreter exits.

The attempt that is open is told, and what a first forward began comes to its end, before the writer threads
are asked to finish.
"""

import atexit
import logging
import threading
import time
import weakref
from typing import Protocol

from torchinstruments.sinks.delivery import EXIT_TIMEOUT_S, others_may_train
from torchinstruments.sinks.interrupts import uninterrupted

__all__ = ["Exiting", "finish_at_exit", "tell_at_exit"]

_LOGGER = logging.getLogger("torchinstruments")


class Exiting(Protocol):
    """A session, as far as the end of the interpreter is concerned."""

    @property
    def url(self) -> str:
        """Where its run lies, without secrets."""
        ...

    def tell_open_attempt(self) -> None:
        """Has the attempt that is open left with the writer thread; other threads may still train."""
        ...

    def finish_enrolment(self, timeout_s: float) -> None:
        """Waits for an enrolment that is still going on."""
        ...


_alive: "weakref.WeakSet[Exiting]" = weakref.WeakSet()
_waiting: "weakref.WeakSet[Exiting]" = weakref.WeakSet()


def tell_at_exit(session: Exiting) -> None:
    """Takes a session whose open attempt is to be told; held weakly (attaching thread)."""
    _alive.add(session)


def finish_at_exit(session: Exiting) -> None:
    """Takes a session that enrols in the background; held weakly (training thread)."""
    _waiting.add(session)


@uninterrupted()
def _finish_after_main() -> None:
    """Lets what a first forward began come to its end, before the writer threads are asked to finish.

    The open attempt is left to `_finish_at_exit` where a thread may still train.
    """
    if not others_may_train():
        _tell_open_attempts()
    _finish_enrolments()


@uninterrupted()
def _finish_at_exit() -> None:
    """Does the same for what threads did that outlived the main one."""
    _tell_open_attempts()
    _finish_enrolments()


def _tell_open_attempts() -> None:
    """Has the attempts that are open left with the writer threads."""
    for session in list(_alive):
        try:
            session.tell_open_attempt()
        except Exception as error:  # noqa: BLE001 - the other sessions have theirs to tell
            _LOGGER.warning("torchinstruments: the last attempt of %s is lost: %s", session.url, error)


def _finish_enrolments() -> None:
    """Waits for enrolments that are still going on."""
    end_s = time.monotonic() + EXIT_TIMEOUT_S
    for session in list(_waiting):
        session.finish_enrolment(max(end_s - time.monotonic(), 0.0))


# Hooks run in the reverse order of their registration: these before those of the delivery threads.
atexit.register(_finish_at_exit)
try:
    threading._register_atexit(_finish_after_main)  # type: ignore[attr-defined]  # noqa: SLF001
except (AttributeError, RuntimeError):
    # Not every Python has it, and after the main thread's end it takes none.
    atexit.register(_finish_after_main)
