"""Spools seen from outside: which there are, what lies in each, who is at work there.

For people and for ``torchinstruments upload`` and ``doctor``; nothing here changes a spool.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchinstruments.errors import ConfigurationError
from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool_folder import (
    ABOUT,
    CLOSED,
    UNREADABLE,
    UPLOADER_LOCK,
    WRITER_LOCK,
    About,
    SpooledPart,
    TableProgress,
    list_parts,
    list_segments,
    process_folders,
    read_about,
    read_progress,
    spooled_bytes,
)
from torchinstruments.store.uploader_state import read_uploader_state

__all__ = ["SpoolContents", "find_spools", "look_into", "unsent_parts"]


@dataclass(frozen=True, slots=True)
class SpoolContents:
    """What lies in the spool of one run on this host.

    Attributes:
        spool: Its folder.
        run_id: The run, ``""`` where no process's folder can be read.
        url: Where the rows go, without secrets.
        num_processes: Folders of processes in it.
        num_writers: Those that are alive and write.
        num_unknown: Those that another release wrote, or nobody.
        rows: Rows that are not up.
        num_files: Spooled parts and event files that are not up.
        size_bytes: Bytes of all that lies there.
        num_unreadable: Spooled parts that were set aside, because Parquet cannot read them.
        uploader_pid: Process id of the uploader at work, None where none is.
        last_error: What that one fails at, or the last one did.
    """

    spool: str
    run_id: str
    url: str
    num_processes: int
    num_writers: int
    num_unknown: int
    rows: int
    num_files: int
    size_bytes: int
    num_unreadable: int
    uploader_pid: int | None
    last_error: str


def find_spools(path: Path) -> list[Path]:
    """Returns the spools at a path: that of a process, of a run, or all below a root.

    Args:
        path: A process's folder in a spool as manifests name it, a run's spool, or the root of spools.

    Returns:
        Folders of runs' spools, sorted by name; empty where the root holds none.

    Raises:
        ConfigurationError: There is no such folder, or it is none of the three.
    """
    folder = Path(os.path.abspath(path.expanduser()))
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is no folder of this host; give the spool that the manifest names, a run's spool, or "
            f"the folder in which spools lie, on the host where the rows were written"
        )
    if (folder / ABOUT).exists():
        return [folder.parent]
    if _is_spool(folder):
        return [folder]
    return sorted(one for one in folder.iterdir() if one.is_dir() and _is_spool(one))


def look_into(spool: Path) -> SpoolContents:
    """Returns what lies in a spool; a file that goes away meanwhile counts as gone."""
    abouts: list[About] = []
    writers = unknown = files = 0
    folders = process_folders(spool)
    for folder in folders:
        try:
            abouts.append(read_about(folder))
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError):
            unknown += 1
            continue
        writers += not _is_over(folder)
        with contextlib.suppress(OSError):
            files += len(list_segments(folder, open_too=True))
    parts = unsent_parts(spool)
    state = read_uploader_state(spool)
    is_at_work = not FileLock.is_free(spool / UPLOADER_LOCK)
    aside = spool / UNREADABLE
    return SpoolContents(
        spool=str(spool),
        run_id=abouts[0].run.run_id if abouts else "",
        url=abouts[0].url if abouts else "",
        num_processes=len(folders),
        num_writers=writers,
        num_unknown=unknown,
        rows=sum(part.rows for part in parts),
        num_files=len(parts) + files,
        size_bytes=spooled_bytes(spool),
        num_unreadable=len(list(aside.iterdir())) if aside.is_dir() else 0,
        uploader_pid=state.pid if is_at_work and state is not None else None,
        last_error=state.last_error if state is not None else "",
    )


def unsent_parts(spool: Path) -> list[SpooledPart]:
    """Returns the spooled parts of a run whose rows are not up, over all its processes."""
    found: list[SpooledPart] = []
    for folder in process_folders(spool):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            progress = read_progress(folder)
            for part in list_parts(folder):
                table = progress.tables.get(part.table, TableProgress())
                if part.number > table.through or part.path.name in table.pending:
                    found.append(part)
    return found


def _is_spool(folder: Path) -> bool:
    return (
        (folder / UPLOADER_LOCK).exists() or (folder / UNREADABLE).is_dir() or bool(process_folders(folder))
    )


def _is_over(folder: Path) -> bool:
    return (folder / CLOSED).exists() or FileLock.is_free(folder / WRITER_LOCK)
