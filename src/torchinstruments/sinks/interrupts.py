"""Ctrl-C while the last rows are written: the program is ending already, and they would be lost.

Two come more often than one: torchrun sends its workers another one beside the terminal's.
"""

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType

__all__ = ["uninterrupted"]


@contextlib.contextmanager
def uninterrupted() -> Generator[None]:
    """Lets SIGINT pass, where it would raise ``KeyboardInterrupt`` (exit hooks, whose time is bounded)."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    # Not SIG_IGN, which a child that is started meanwhile would keep.
    signal.signal(signal.SIGINT, _pass)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _pass(_number: int, _frame: FrameType | None) -> None:
    """Does nothing."""
