"""SIGTERM as an exception, so that a command that is told to stop leaves nothing behind."""

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType

__all__ = ["TERMINATED", "Terminated", "raised_when_terminated"]

TERMINATED = 128 + signal.SIGTERM
"""Exit code: ended by SIGTERM."""


class Terminated(BaseException):
    """The process was told to stop."""


@contextlib.contextmanager
def raised_when_terminated() -> Generator[None]:
    """Raises `Terminated` in the main thread on SIGTERM, where nobody else has a use for that signal."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(_number: int, _frame: FrameType | None) -> None:
    # Once: a second one while the first is dealt with ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated
