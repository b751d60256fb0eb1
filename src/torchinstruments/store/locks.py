"""A lock that a process holds as long as it lives, and that anybody on the host can ask about.

It is ``flock(2)`` on a file: the kernel frees it when its holder dies, however it dies. The lock belongs to
the open file, not to the process, so a child that inherits the descriptor can be handed a held lock without a
gap. For the same reason a forked child closes its copy at once: else a data loader's worker would keep its
parent's lock.
"""

import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Self

__all__ = ["FileLock"]

_POLL_S = 0.05


class FileLock:
    """A held lock.

    Args:
        descriptor: An open file that holds the lock.

    Attributes:
        descriptor: The open file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path, *, timeout_s: float = 0.0) -> Self | None:
        """Takes the lock, and makes its file where there is none.

        Args:
            path: The file; its folder has to exist.
            timeout_s: Seconds to wait for it.

        Returns:
            The held lock, or None where somebody else holds it.

        Raises:
            OSError: The file cannot be made or opened.
        """
        end = time.monotonic() + timeout_s
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                if time.monotonic() >= end:
                    return None
                time.sleep(_POLL_S)
                continue
            except OSError:
                os.close(descriptor)
                raise
            if _is_file_at(descriptor, path):
                return cls(descriptor)
            os.close(descriptor)  # its last holder removed the file in between: try the new one

    @classmethod
    def adopt(cls, descriptor: int, path: Path) -> Self | None:
        """Takes over a held lock from an inherited descriptor; None where it is no lock on `path`."""
        inheritable = False  # by those whom this process starts in its turn
        try:
            os.set_inheritable(descriptor, inheritable)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        return cls(descriptor) if _is_file_at(descriptor, path) else None

    @classmethod
    def is_free(cls, path: Path) -> bool:
        """Returns whether nobody holds the lock, or its file is gone."""
        if not path.exists():
            return True
        lock = cls.acquire(path)
        if lock is None:
            return False
        lock.release()
        return True

    def is_at(self, path: Path) -> bool:
        """Returns whether the lock's file is still the one at `path`; else others may lock another one."""
        return self.descriptor >= 0 and _is_file_at(self.descriptor, path)

    def release(self) -> None:
        """Frees the lock, wherever else its descriptor was inherited; once more does nothing."""
        if self.descriptor >= 0:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Closes this process's copy; the lock stays held where a child inherited it."""
        _held.discard(self)
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _close_in_forked_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_forked_child)
