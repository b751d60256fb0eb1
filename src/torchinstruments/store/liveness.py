"""Whether a process still runs, as far as its folder can tell.

A manifest promises when it will be rewritten. A process that did not say ``closed`` is interrupted when
that time is over by a margin, or at once when a later generation of the run exists, since a restart ends all
processes of the one before.

"Now" has to be the store's now, and a reader must not write to find out. It is the later of the newest
modification time in the listing and this host's clock: on a local folder both are one clock; an object store
refuses requests whose signature is more than 15 minutes off, so this host's clock is off by no more than the
margin that is given there. A file from further ahead was written while a clock was wrong, and tells no time.
"""

import time
from enum import StrEnum

from torchinstruments.store.clocks import seconds_of
from torchinstruments.store.inventory import Inventory, ManifestFile

__all__ = ["LOCAL_MARGIN_S", "REMOTE_MARGIN_S", "ProcessStatus", "process_status", "store_now_s"]

LOCAL_MARGIN_S = 60.0
"""How late a manifest may be on a folder of this host or of its network file system."""

REMOTE_MARGIN_S = 900.0
"""How late a manifest may be on an object store: its clock may be as far from ours as it lets requests be."""


class ProcessStatus(StrEnum):
    """What became of a process that observed."""

    RUNNING = "running"
    CLOSED = "closed"
    INTERRUPTED = "interrupted"


def store_now_s(inventory: Inventory, *, clock_s: float | None = None) -> float:
    """Returns the time that the store has at least, in seconds since the epoch.

    Args:
        inventory: What was listed.
        clock_s: This host's time; None reads it.
    """
    here_s = time.time() if clock_s is None else clock_s
    ahead_s = 0.0 if inventory.newest_at is None else inventory.newest_at - here_s
    return here_s + ahead_s if 0.0 < ahead_s <= REMOTE_MARGIN_S else here_s


def process_status(inventory: Inventory, found: ManifestFile, now_s: float | None = None) -> ProcessStatus:
    """Returns the status of one process (offline).

    Args:
        inventory: The run that it belongs to.
        found: Its manifest.
        now_s: The store's time; None takes `store_now_s`.
    """
    manifest = found.manifest
    if manifest.status == ProcessStatus.CLOSED:
        return ProcessStatus.CLOSED
    if inventory.newest_generation > manifest.generation:
        return ProcessStatus.INTERRUPTED
    written_s = found.modified_at
    margin_s = LOCAL_MARGIN_S if inventory.storages[found.source].is_local else REMOTE_MARGIN_S
    if written_s is None:
        written_s = seconds_of(manifest.written_at)
        margin_s = REMOTE_MARGIN_S
    now_s = store_now_s(inventory) if now_s is None else now_s
    late = written_s is None or now_s > written_s + manifest.next_write_due_s + margin_s
    return ProcessStatus.INTERRUPTED if late else ProcessStatus.RUNNING
