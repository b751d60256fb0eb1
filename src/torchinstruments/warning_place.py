"""Where a warning of this package points to: the line of the program that led to it.

A warning shows the line that it is attributed to. Raised from a hook or a writer it would show this package,
or torch between the program and the hook, and tell its reader nothing.
"""

import sys
import warnings
from types import FrameType

__all__ = ["warn_user"]

_INNER = frozenset({"torchinstruments", "torch", "threading", "concurrent", "contextlib"})
"""Packages whose lines are nobody's own: this one, and what calls it."""


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns, attributed to the innermost line outside this package and torch (any thread).

    In a thread of this package's own, where no such line exists, the caller's is shown.

    Args:
        message: The whole warning.
        category: Its kind.

    Raises:
        Warning: A filter of the program's turned it into an exception.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as warnings does it itself
    stacklevel = 2
    while frame is not None and _is_inner(frame):
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(message, category, stacklevel=2 if frame is None else stacklevel)


def _is_inner(frame: FrameType) -> bool:
    """Returns whether a frame runs code that is not the program's own."""
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] in _INNER
