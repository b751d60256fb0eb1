"""Uploading what a job left in a spool, by hand: ``torchinstruments upload``.

It is the job's own uploader, under the same lock, with other settings: it works until what lies there is up
and no longer, and ends at once where the store refuses. An uploader that is at work is left to it unless it
fails or other settings are given; then it is asked for its place.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool_folder import UNREADABLE, UPLOADER_LOCK, SpooledPart, process_folders
from torchinstruments.store.spools import look_into, unsent_parts
from torchinstruments.store.uploader import Uploader
from torchinstruments.store.uploader_state import read_uploader_state, take_over
from torchinstruments.store.urls import needs_this_process

__all__ = ["SpoolUpload", "upload_spool"]

_HANDOVER_S = 90.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class SpoolUpload:
    """What became of the spool of one run.

    Attributes:
        spool: Its folder.
        run_id: The run.
        url: Where the rows go, without secrets.
        rows_uploaded: Rows that lay there at the beginning and are up.
        rows_set_aside: Rows of spooled parts that Parquet cannot read; they lie in ``unreadable/``.
        rows_left: Rows that still lie there, those that were written meanwhile too.
        num_files_left: Spooled parts and event files that still lie there.
        num_writers: Processes that still write there.
        num_unknown: Folders that another release wrote; they are left alone.
        error: Why not everything is up, without secrets, else ``""``.
    """

    spool: str
    run_id: str
    url: str
    rows_uploaded: int
    rows_set_aside: int
    rows_left: int
    num_files_left: int
    num_writers: int
    num_unknown: int
    error: str


def upload_spool(
    spool: Path,
    storage_options: Mapping[str, object] | None,
    *,
    give_up_after_s: float,
    on_progress: Callable[[int, int], None],
) -> SpoolUpload:
    """Uploads what lies in a spool (offline).

    Args:
        spool: The spool of a run.
        storage_options: Settings in fsspec's dialect; None for those that the environment gives.
        give_up_after_s: Seconds for which a store may fail in a way that may pass.
        on_progress: Told of rows that are up, and of all rows that lay there.

    Returns:
        What became of it; with an error where something that could have gone up did not.

    Raises:
        OSError: The spool cannot be read or written.
    """
    before = look_into(spool)
    there = unsent_parts(spool)
    error = ""
    if before.num_processes > before.num_unknown:
        if needs_this_process(before.url, storage_options):
            error = (
                f"{before.url} could be reached only by the process that wrote there, so these rows have "
                f"nowhere to go; delete {spool} to be rid of them"
            )
        else:
            error = _upload(spool, before.url, storage_options, give_up_after_s, there, on_progress)
    after = look_into(spool)
    set_aside = sum(part.rows for part in there if _is_set_aside(spool, part))
    left = {part.path for part in unsent_parts(spool)}
    gone = sum(part.rows for part in there if part.path not in left)
    return SpoolUpload(
        spool=str(spool),
        run_id=before.run_id,
        url=before.url,
        rows_uploaded=gone - set_aside,
        rows_set_aside=set_aside,
        rows_left=after.rows,
        num_files_left=after.num_files,
        num_writers=after.num_writers,
        num_unknown=after.num_unknown,
        error=error,
    )


def _upload(
    spool: Path,
    url: str,
    storage_options: Mapping[str, object] | None,
    give_up_after_s: float,
    there: list[SpooledPart],
    on_progress: Callable[[int, int], None],
) -> str:
    """Uploads and returns what went wrong at the last, ``""`` where nothing did."""
    total = sum(part.rows for part in there)

    def show() -> None:
        on_progress(total - sum(part.rows for part in there if part.path.exists()), total)

    lock = _locked(spool, there, show, give_up_after_s, may_wait=storage_options is None)
    if lock is None:
        if not any(part.path.exists() for part in there):
            return ""
        state = read_uploader_state(spool)
        pid = f"process {state.pid}" if state is not None else "a process"
        return (
            f"another uploader, {pid}, is at work in {spool} and did not end in time; try again, or end it "
            f"with SIGTERM"
        )
    uploader = Uploader(
        spool, url, storage_options, lock, give_up_after_s=give_up_after_s, once=True, after_round=show
    )
    uploader.run()
    show()
    return uploader.last_error


def _locked(
    spool: Path, there: list[SpooledPart], show: Callable[[], None], patience_s: float, *, may_wait: bool
) -> FileLock | None:
    """Returns the uploader's lock; None where an uploader that is at work carried everything, or keeps it."""
    waiting_since_s = time.monotonic()
    num_left = len(there)
    while True:
        with contextlib.suppress(FileNotFoundError):
            lock = FileLock.acquire(spool / UPLOADER_LOCK)
            if lock is not None:
                return lock
        if not process_folders(spool):
            return None
        state = read_uploader_state(spool)
        left = sum(part.path.exists() for part in there)
        if left < num_left:
            num_left, waiting_since_s = left, time.monotonic()
        is_stuck = time.monotonic() - waiting_since_s > patience_s
        if not may_wait or is_stuck or (state is not None and state.last_error):
            return take_over(spool, _HANDOVER_S)
        show()
        if not left:
            return None
        time.sleep(_LOOK_S)


def _is_set_aside(spool: Path, part: SpooledPart) -> bool:
    return (spool / UNREADABLE / f"{part.path.parent.name}-{part.path.name}").exists()
