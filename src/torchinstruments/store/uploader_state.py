"""What an uploader says of itself, and how another one asks for its place.

An uploader keeps the endpoint and the credentials that it was started with. Where those do not work, somebody
who has others leaves ``uploader.handover``; the uploader finishes what it is at, frees its lock and ends, and
the other one takes the lock. Both files lie in the spool of the run, and neither holds a setting.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchinstruments.store.local import LocalStorage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.manifest import encode_document
from torchinstruments.store.spool_folder import UPLOADER_LOCK

__all__ = [
    "UploaderState",
    "clear_handover",
    "clear_uploader_state",
    "is_handover_wanted",
    "read_uploader_state",
    "take_over",
    "write_uploader_state",
]

_STATE = "uploader.json"
_HANDOVER = "uploader.handover"
_ASK_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class UploaderState:
    """``uploader.json``: which uploader holds the lock, or held it last.

    Attributes:
        pid: Its process id.
        started_at_s: When it took the lock, by the host's monotonic clock, which nobody sets back.
        last_error: Why uploading fails at present, without secrets; ``""`` while it does not.
    """

    pid: int
    started_at_s: float
    last_error: str = ""


def write_uploader_state(spool: Path, state: UploaderState) -> None:
    """Stores what an uploader says of itself (uploader).

    Raises:
        OSError: The old state, if any, still stands.
    """
    LocalStorage(str(spool)).replace(_STATE, encode_document(state))


def read_uploader_state(spool: Path) -> UploaderState | None:
    """Returns what the spool's uploader says of itself; None where none ever did (any process)."""
    try:
        return msgspec.json.decode((spool / _STATE).read_bytes(), type=UploaderState)
    except (OSError, msgspec.DecodeError):
        return None


def clear_uploader_state(spool: Path) -> None:
    """Removes both files, for a spool that is given up (uploader)."""
    (spool / _STATE).unlink(missing_ok=True)
    clear_handover(spool)


def is_handover_wanted(spool: Path) -> bool:
    """Returns whether somebody asks for the uploader's place (uploader)."""
    return (spool / _HANDOVER).exists()


def clear_handover(spool: Path) -> None:
    """Forgets such a request (uploader, when it begins and when it obeys)."""
    (spool / _HANDOVER).unlink(missing_ok=True)


def take_over(spool: Path, timeout_s: float) -> FileLock | None:
    """Asks the uploader of a spool to end, and takes its lock (writer thread, ``torchinstruments upload``).

    Args:
        spool: The spool of the run.
        timeout_s: Seconds to wait; one that is in the middle of a request finishes that first.

    Returns:
        The held lock, or None where it is not free yet; the request stands then.

    Raises:
        OSError: Nothing can be written into the spool.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        descriptor = os.open(spool / _HANDOVER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.close(descriptor)
        left_s = end_s - time.monotonic()
        lock = FileLock.acquire(spool / UPLOADER_LOCK, timeout_s=max(0.0, min(left_s, _ASK_AGAIN_S)))
        if lock is not None or left_s <= _ASK_AGAIN_S:
            if lock is not None:
                with contextlib.suppress(OSError):
                    clear_handover(spool)
            return lock
