"""Which process this is, without asking the system at each step: only a fork changes it."""

import os

__all__ = ["pid"]

pid = os.getpid()
"""Id of this process, of a forked child too."""


def _take_again() -> None:
    global pid  # noqa: PLW0603 - it is the process's own
    pid = os.getpid()


os.register_at_fork(after_in_child=_take_again)
