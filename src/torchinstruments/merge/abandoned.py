"""Temporary tables of merges that were killed: what nobody could delete then is deleted by a later merge."""

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

__all__ = ["TEMPORARY_PREFIX", "clear_abandoned"]

TEMPORARY_PREFIX = "torchinstruments-merge-"
"""How the folders of temporary tables are called."""

MIN_AGE_S = 2 * 24 * 3600.0
"""A folder in which nothing was written for so long belongs to no merge that runs."""


def clear_abandoned() -> None:
    """Deletes temporary folders of this user's merges that ended long ago (offline).

    What cannot be deleted stays: a merge does not fail over another one's leavings.
    """
    oldest_s = time.time() - MIN_AGE_S
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        try:
            is_abandoned = _is_own_folder(folder) and _last_written_s(folder) < oldest_s
        except OSError:
            continue  # gone since it was listed
        if is_abandoned:
            shutil.rmtree(folder, ignore_errors=True)


def _is_own_folder(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _last_written_s(folder: Path) -> float:
    return max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
