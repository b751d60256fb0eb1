"""Folders that only their owner may look into: the spool holds what a model does, in plain Parquet.

A spool's name can be guessed, and its root may be a folder that everybody on the host may write to. So a
folder counts only where it is a real one, belongs to this user and lets nobody else in.
"""

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["make_private_folder", "own_spool_root"]


def own_spool_root(root: Path) -> Path:
    """Returns the folder in which this user's spools lie (attaching thread).

    It is `root` itself where that belongs to the user or does not exist yet, else ``user-<uid>`` in it, so
    that several users of a host can share one ``TORCHINSTRUMENTS_SPOOL_DIR``.

    Args:
        root: Absolute path of the configured folder.
    """
    with contextlib.suppress(FileNotFoundError):
        if root.stat().st_uid != os.geteuid():
            return root / f"user-{os.geteuid()}"
    return root


def make_private_folder(folder: Path) -> None:
    """Makes a folder that nobody else may look into, or makes sure that it is one (attaching thread).

    Args:
        folder: Absolute path. Missing parents are made too, as private.

    Raises:
        OSError: It cannot be made, is a symbolic link or no folder, or belongs to another user.
    """
    for parent in reversed(folder.parents):
        with contextlib.suppress(FileExistsError):
            if not parent.exists():
                parent.mkdir(mode=0o700)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no folder"
        raise OSError(
            f"{folder} is {kind}, and rows are spooled only in a folder of one's own; remove it, or set "
            f"TORCHINSTRUMENTS_SPOOL_DIR to another folder"
        )
    if status.st_uid != os.geteuid():
        raise OSError(
            f"{folder} belongs to user {status.st_uid}, not to {os.geteuid()}, and rows are spooled only "
            f"in a folder of one's own; remove it, or set TORCHINSTRUMENTS_SPOOL_DIR to another folder"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.chmod(folder, 0o700)
