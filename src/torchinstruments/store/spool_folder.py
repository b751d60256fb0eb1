"""What lies in a spool, and who may touch what: the contract between the writing process and the uploader.

::

    <spool root>/<run id>-<8 hex of the address>/      0700, one for each host and run
        uploader.lock                                  held by the one uploader
        uploader.log                                   what it has to say, bounded
        uploader.json                                  which one it is and what it fails at
        uploader.handover                              a request to end in favour of another one
        unreadable/                                    spooled parts that Parquet cannot read
        rank-000-1a2b3c4d/                             one for each process
            about.json                                 whose rows these are and where they go; no secrets
            writer.lock                                held while the writing process lives
            000017-history-8192.parquet                small parts in the order of writing, with their rows
            segments/                              event files of TensorBoard; `.open` while they grow
            documents/process-1a2b3c4d.json            documents, each replaced in one step
            wanted                                     a request to upload everything now
            closed                                     nothing more will be written
            progress.json                              how far the uploader has come

The writing process creates everything in a process's folder but ``progress.json``; only the uploader writes
that, and only it deletes. A folder appears under its name with its lock held already. One that somebody
removed, wholly or in part, is made again by its writer, with as much of ``progress.json`` as it has read.
"""

import contextlib
import errno
import hashlib
import os
import re
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torchinstruments.records import RunRecord
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.manifest import encode_document

__all__ = [
    "ABOUT",
    "CLOSED",
    "DOCUMENTS",
    "LOG",
    "OPEN_SUFFIX",
    "PROGRESS",
    "SEGMENTS",
    "UNREADABLE",
    "UPLOADER_LOCK",
    "UPLOADER_NICENESS",
    "WANTED",
    "WRITER_LOCK",
    "About",
    "Progress",
    "SpooledPart",
    "TableProgress",
    "list_parts",
    "list_segments",
    "part_name",
    "process_folders",
    "published",
    "read_about",
    "read_progress",
    "read_text",
    "spool_folder_name",
    "spooled_bytes",
    "write_atomically",
]

UPLOADER_LOCK = "uploader.lock"
UPLOADER_NICENESS = 10
LOG = "uploader.log"
UNREADABLE = "unreadable"
ABOUT = "about.json"
WRITER_LOCK = "writer.lock"
DOCUMENTS = "documents"
WANTED = "wanted"
CLOSED = "closed"
PROGRESS = "progress.json"
SEGMENTS = "segments"
OPEN_SUFFIX = ".open"

_PART = re.compile(r"(\d{6,})-([a-z_]+)-(\d+)\.parquet")
_PROCESS = re.compile(r"rank-\d{3,}-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class About:
    """``about.json``: whose rows lie in a process's folder and where they go.

    Attributes:
        url: Address that the user asked for, without secrets.
        run: The record of the run, to claim its folder where that is still to be done.
        folder: The rank's folder in the run's, ``""`` for the run's own.
        rank: Rank of the process.
        world_size: Ranks of its generation.
        process: 8 hex digits.
        host: Host name.
        pid: Process id.
        generation: Its generation.
        first_sample_id: First sample id of that.
        started_at: ISO 8601, UTC.
        verified: Whether the run's folder was claimed before this process began to write.
        beside: Whether the claimed folder lies beside the address, in ``run-<run id>``.
    """

    url: str
    run: RunRecord
    folder: str
    rank: int
    world_size: int
    process: str
    host: str
    pid: int
    generation: int
    first_sample_id: int
    started_at: str
    verified: bool
    beside: bool


@dataclass(frozen=True, slots=True)
class TableProgress:
    """How far one table of one process has been uploaded.

    Attributes:
        next_part: Number of the next part.
        rows: Rows in the parts that are up.
        bytes: Size of those parts.
        rows_dropped: Rows of spooled parts that could not be read; less those that the writer of a removed
            folder gave up although they were up, so that it may be negative.
        through: Number of the last spooled part that is up; -1 before the first.
        pending: Names of the spooled parts whose joined part is being put under ``next_part``. After a crash
            exactly these are put there again, so that nothing is up twice.
        by_catalog: Whether the catalog was there for them when their joining was begun.
    """

    next_part: int = 0
    rows: int = 0
    bytes: int = 0
    rows_dropped: int = 0
    through: int = -1
    pending: tuple[str, ...] = ()
    by_catalog: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """``progress.json``: what the uploader did for one process.

    Attributes:
        tables: Progress by table.
        served: The last request of ``wanted`` that was fulfilled.
        verified: Whether the run's folder is claimed.
        url: Where the rows go, without secrets; ``""`` until that is known.
        last_error: Why uploading fails at present, ``""`` while it does not.
        is_behind: Whether more may be up than this says: the writer made it again from what it had read.
    """

    tables: Mapping[str, TableProgress] = field(default_factory=dict)
    served: str = ""
    verified: bool = False
    url: str = ""
    last_error: str = ""
    is_behind: bool = False


@dataclass(frozen=True, slots=True)
class SpooledPart:
    """A small part in the spool.

    Attributes:
        number: Ordinal among all spooled parts of its process.
        table: Its table.
        rows: Rows in it.
        path: The file.
        size_bytes: Its size.
        written_at_s: When it was written, seconds since the epoch.
    """

    number: int
    table: str
    rows: int
    path: Path
    size_bytes: int
    written_at_s: float


def spool_folder_name(run_id: str, url: str, process: str = "") -> str:
    """Returns the name of a run's spool.

    Args:
        run_id: Safe for a path.
        url: Address without secrets.
        process: Given where the process uploads by itself, so that its spool is its own.
    """
    digest = hashlib.sha256(f"{url}\0{process}".encode()).hexdigest()[:8]
    return f"{run_id}-{digest}"


def part_name(number: int, table: str, rows: int) -> str:
    """Returns the file name of a spooled part."""
    return f"{number:06d}-{table}-{rows}.parquet"


def list_parts(folder: Path) -> list[SpooledPart]:
    """Returns the spooled parts of a process, in the order of writing."""
    found: list[SpooledPart] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _PART.fullmatch(entry.name)
            if match is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                found.append(
                    SpooledPart(
                        number=int(match[1]),
                        table=match[2],
                        rows=int(match[3]),
                        path=Path(entry.path),
                        size_bytes=status.st_size,
                        written_at_s=status.st_mtime,
                    )
                )
    return sorted(found, key=_number)


def list_segments(folder: Path, *, open_too: bool) -> list[Path]:
    """Returns the event files in a process's folder, in the order of their names, which is that of writing.

    Args:
        folder: The process's folder.
        open_too: Whether to return those too that were not finished.
    """
    try:
        names = os.listdir(folder / SEGMENTS)
    except FileNotFoundError:
        return []
    return [folder / SEGMENTS / name for name in sorted(names) if open_too or not name.endswith(OPEN_SUFFIX)]


def process_folders(spool: Path) -> list[Path]:
    """Returns the folders of all processes in a spool, sorted by name."""
    try:
        names = os.listdir(spool)
    except FileNotFoundError:
        return []
    return [spool / name for name in sorted(names) if _PROCESS.fullmatch(name)]


def spooled_bytes(spool: Path) -> int:
    """Returns how many bytes lie in the spool of a run, over all its processes, unreadable parts too."""
    total = 0
    for folder in process_folders(spool):
        with contextlib.suppress(FileNotFoundError):
            total += sum(part.size_bytes for part in list_parts(folder))
            total += sum(path.stat().st_size for path in list_segments(folder, open_too=True))
    with contextlib.suppress(FileNotFoundError):
        total += sum(path.stat().st_size for path in (spool / UNREADABLE).iterdir())
    return total


def read_about(folder: Path) -> About:
    """Returns what a process's folder says of itself.

    Raises:
        FileNotFoundError: The folder is gone.
        msgspec.DecodeError: It is not what this release writes.
    """
    return msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)


def read_progress(folder: Path) -> Progress:
    """Returns how far a process's rows have been uploaded; the empty progress before the first upload.

    Raises:
        msgspec.DecodeError: It is not what this release writes.
    """
    try:
        return msgspec.json.decode((folder / PROGRESS).read_bytes(), type=Progress)
    except FileNotFoundError:
        return Progress()


def read_text(path: Path) -> str:
    """Returns a small marker's text, or ``""`` where there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def write_atomically(folder: Path, name: str, document: object) -> None:
    """Writes a document into a folder of the spool, durable and in one step.

    Raises:
        OSError: The old one, if any, still stands; or the folder is gone, which is left to its writer.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    LocalStorage(str(folder)).replace(name, encode_document(document))


@contextlib.contextmanager
def published(folder: Path) -> Generator[Path]:
    """Yields a folder under a temporary name, and gives it its own name at the end."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    temporary.mkdir(mode=0o700, parents=True)
    yield temporary
    os.rename(temporary, folder)


def _number(part: SpooledPart) -> int:
    return part.number
