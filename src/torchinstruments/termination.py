"""What is still open when SIGTERM ends the process is made durable first, without a word of the main thread.

A handler below Python writes to a pipe. A thread that waits at its other end sees to what is open for at most
`END_TIMEOUT_S`, gives the signal its default effect back and sends it again: the process ends by SIGTERM, as
it would have ended without all this.

Only the default effect is replaced. A handler that the program installs, before or after, counts and is left
alone; so is its wakeup descriptor. Where it gives the default effect back, as a trainer does after its fit,
the signal is caught again some seconds later. Forked children have the default effect from the start.
"""

import atexit
import contextlib
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from torchinstruments.signal_handler import SignalHandler

__all__ = ["END_TIMEOUT_S", "THREAD_NAME", "Ending", "unwatch", "watch"]

THREAD_NAME = "torchinstruments-sigterm"

END_TIMEOUT_S = 5.0
"""How long the end of the process waits for what is still open."""

LOOK_AGAIN_S = 5.0
"""How often it is looked whether the program has given the default effect back."""

_MAX_READ_BYTES = 1 << 16
_WAKE = b"\0"

_LOGGER = logging.getLogger("torchinstruments")


class Ending(Protocol):
    """What has to be told of the process's end, as far as this module is concerned."""

    def flush_at_signal(self, timeout_s: float) -> None:
        """Makes durable what there is; the process goes on (a thread of its own)."""
        ...

    def end_at_signal(self, timeout_s: float) -> None:
        """Makes durable what there is and marks the end (a thread of its own)."""
        ...


class _Watch:
    """What is open, the thread that waits for the signal as long as something is, and its pipe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage collection and signal handlers may call in the middle
        self._endings: weakref.WeakSet[Ending] = weakref.WeakSet()
        self._pipe: tuple[int, int] | None = None
        self._handler: SignalHandler | None = None
        self._thread: threading.Thread | None = None

    def add(self, ending: Ending) -> None:
        with self._lock:
            if self._pipe is None:
                # Never closed: the program may know the handler and call it at any time.
                self._pipe = os.pipe()
                for descriptor in self._pipe:
                    os.set_blocking(descriptor, False)
                try:
                    self._handler = SignalHandler(self._pipe[1])
                except OSError as error:
                    _LOGGER.debug("SIGTERM will not be seen to: %s", error)
            if self._handler is None:
                return
            self._endings.add(ending)
            self._handler.install()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._wait, args=(self._pipe[0],), name=THREAD_NAME, daemon=True
                )
                self._thread.start()

    def discard(self, ending: Ending) -> None:
        with self._lock:
            self._endings.discard(ending)
            if not self._endings:
                self.release()
                if self._pipe is not None:
                    with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread too
                        os.write(self._pipe[1], _WAKE)

    def release(self) -> None:
        """Gives the signal its default effect back (any thread, without the lock)."""
        if self._handler is not None:
            self._handler.remove()

    @property
    def is_catching(self) -> bool:
        """Whether the signal is caught at present (any thread, without the lock)."""
        return self._handler is not None and self._handler.is_installed

    def _wait(self, reading: int) -> None:
        """Waits for the signal, or until nothing is open (the watching thread)."""
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        while True:
            poll.poll(LOOK_AGAIN_S * 1000)
            with self._lock:
                is_over = not self._endings
                if is_over:
                    self._thread = None
                    self.release()
                elif self._handler is not None:
                    self._handler.install()
            if _read_all(reading).strip(_WAKE):
                self._end()
            if is_over:
                return

    def _end(self) -> None:
        """Sees to what is open, and lets the signal have its effect (the watching thread)."""
        with self._lock:
            endings = list(self._endings)
        if os.getpid() == 1:
            # The kernel keeps the first process of a container from the default effect, so it goes on.
            _tell([ending.flush_at_signal for ending in endings])
            return
        _tell([ending.end_at_signal for ending in endings])
        self.release()
        os.kill(os.getpid(), signal.SIGTERM)


def watch(ending: Ending) -> None:
    """Has something told when SIGTERM is about to end the process (any thread).

    It is held weakly. Nothing is told where the program has a handler of its own.
    """
    _watch.add(ending)


def unwatch(ending: Ending) -> None:
    """Ends that; after the last one the signal has its default effect again (any thread)."""
    _watch.discard(ending)


def _read_all(reading: int) -> bytes:
    """Returns what waits in a pipe that does not block."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while more := os.read(reading, _MAX_READ_BYTES):
            found += more
    return found


def _tell(functions: Sequence[Callable[[float], None]]) -> None:
    """Calls all of them side by side, with the seconds that they have, and waits no longer than that."""
    end_s = time.monotonic() + END_TIMEOUT_S

    def call(function: Callable[[float], None]) -> None:
        try:
            function(max(end_s - time.monotonic(), 0.0))
        except Exception as error:  # noqa: BLE001 - the others are told, and the process ends
            _LOGGER.warning("torchinstruments: at SIGTERM: %s: %s", type(error).__name__, error)

    threads = [
        threading.Thread(target=call, args=(function,), name=THREAD_NAME, daemon=True)
        for function in functions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end_s - time.monotonic(), 0.0))


def _at_exit() -> None:
    """Gives the default effect back: nothing waits for the signal any more."""
    _watch.release()


def _before_fork() -> None:
    """Holds the signal back: a child that got it now would write into the pipe of its parent."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _watch.is_catching else None
    _held_back.masks = [*getattr(_held_back, "masks", ()), held]


def _after_fork_in_parent() -> None:
    masks = getattr(_held_back, "masks", [])
    mask = masks.pop() if masks else None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Leaves all of it to the parent; the lock may be held for ever here."""
    global _watch
    inherited, _watch = _watch, _Watch()
    inherited.release()
    _inherited.append(inherited)  # the program may know its handler and call it at any time
    _after_fork_in_parent()


_watch = _Watch()
_inherited: list[_Watch] = []
_held_back = threading.local()

# The last of this package's at exit, since the first that is registered: what is open is closed before.
atexit.register(_at_exit)
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
