"""The writing side of the spool: rows are durable on a local disk at once and go on from there by themselves.

With a remote folder the training process never talks to a network. It leaves small parts and documents in the
spool and sees to it that one uploader a host and run is alive; that process joins and uploads them, outlives
the training process, and takes over what dead processes left. See `spool_folder` for what lies where.

The spool is bounded: beyond 8 GiB, or a tenth of the disk space that was free at the start, a part is refused
like on a full disk. It is its user's alone: see `private_folders`.
"""

import contextlib
import errno
import os
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from torchinstruments import environment
from torchinstruments.records import Claim, GenerationRecord, Identity, RunRecord
from torchinstruments.store import layout
from torchinstruments.store.claim import run_url
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.manifest import TableState, decode_manifest, encode_document
from torchinstruments.store.private_folders import make_private_folder, own_spool_root
from torchinstruments.store.spool_folder import (
    ABOUT,
    CLOSED,
    DOCUMENTS,
    PROGRESS,
    SEGMENTS,
    WANTED,
    WRITER_LOCK,
    About,
    Progress,
    TableProgress,
    list_parts,
    part_name,
    published,
    read_progress,
    spool_folder_name,
    spooled_bytes,
)
from torchinstruments.store.starting import UploaderStarter
from torchinstruments.store.target import TargetState
from torchinstruments.store.urls import beside, is_remote, local_path, needs_this_process, redact

__all__ = ["MAX_SPOOL_BYTES", "SpoolTarget"]

MAX_SPOOL_BYTES = 8 * 2**30
"""What the spool of one run may hold on one host, where a tenth of the free disk is not less."""

_FREE_SHARE = 10
_RESCAN_S = 30.0
_POLL_S = 0.1
_KEEP_ALIVE_WHILE_WAITING_S = 2.0
_TRIES = 5


class SpoolTarget:
    """Leaves the parts and documents of one process in the spool (a `PartTarget`).

    Args:
        url: The address that the user asked for, with its secrets; they stay in memory.
        storage_options: Settings in fsspec's dialect; they stay in memory and go to the uploader through its
            standard input.
        identity: Who the process is.
        claim: What the ranks agreed on.
        run: The record of the run, for an uploader that has to claim its folder.
        folder: The rank's folder in the run's, ``""`` for the run's own.
        root: Folder under which spools lie; None for the one of `environment.spool_root`.
        max_bytes: Bound of the run's spool on this host; None for the default.
        started_at: When the process attached, ISO 8601 UTC.

    Raises:
        OSError: The spool cannot be made.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, object] | None,
        *,
        identity: Identity,
        claim: Claim,
        run: RunRecord,
        folder: str,
        root: Path | None = None,
        max_bytes: int | None = None,
        started_at: str = "",
    ) -> None:
        url = url if is_remote(url) else local_path(url)
        shown = redact(url).rstrip("/")
        in_process = needs_this_process(url, storage_options)
        spool_root = environment.spool_root() if root is None else root
        name = spool_folder_name(claim.run_id, shown, identity.process if in_process else "")
        self._spool = own_spool_root(Path(os.path.abspath(spool_root.expanduser()))) / name
        self._folder = self._spool / f"rank-{identity.rank:03d}-{identity.process}"
        self._process = identity.process
        self._about = About(
            url=shown,
            run=run,
            folder=folder,
            rank=identity.rank,
            world_size=identity.world_size,
            process=identity.process,
            host=identity.host,
            pid=identity.pid or os.getpid(),
            generation=claim.generation,
            first_sample_id=claim.first_sample_id,
            started_at=started_at,
            verified=claim.verified,
            beside=claim.verified and run_url(url, claim) == beside(url, claim.run_id),
        )
        self._lock: FileLock | None = _make_process_folder(self._folder, self._about)
        self._files = LocalStorage(str(self._folder))
        self._max_bytes = _default_bound(self._spool) if max_bytes is None else max_bytes
        self._starter = UploaderStarter(self._spool, url, storage_options, in_process=in_process)
        self._started = False
        self._next_number = 0
        self._written_rows: dict[str, int] = {}
        self._removed_rows: dict[str, int] = {}
        self._documents: dict[str, bytes] = {}
        self._mending = threading.Lock()
        self._was_removed = False
        self._known_bytes = 0
        self._scanned_at_s = float("-inf")
        self._progress = Progress()
        self._asked = ""
        self._closed = False
        self._last_error = ""

    @property
    def direct(self) -> bool:
        """Always False."""
        return False

    @property
    def path(self) -> str:
        """The process's folder in the spool, for people and for the manifest."""
        return str(self._folder)

    @property
    def segments(self) -> Path:
        """Where the event files of the process grow; the folder may not exist yet."""
        return self._folder / SEGMENTS

    def require_segment_room(self, num_bytes: int) -> None:
        """Refuses event files beyond half of the bound, so that they never crowd out rows (writer thread).

        Raises:
            OSError: So many bytes must not be written.
        """
        self._require_open()
        self._mend()
        if not self._has_room(num_bytes, self._max_bytes // 2):
            raise OSError(
                errno.ENOSPC,
                f"the spool {self._spool} holds {self._known_bytes} bytes of at most {self._max_bytes}, and "
                f"event files may fill half of it; none are written until the store takes what is there",
            )
        self._known_bytes += num_bytes

    def write_part(self, table: str, num_rows: int, data: bytes) -> None:
        """Makes one part durable in the spool (writer thread).

        Args:
            table: One of `layout.TABLES`.
            num_rows: Rows in it.
            data: An encoded Parquet file.

        Raises:
            OSError: It is not durable: the disk is full, the spool holds what it may, or it was closed.
        """
        self._require_open()
        try:
            self._mend()
        except OSError as error:
            self._last_error = f"{type(error).__name__}: {error}"
            raise
        self._require_room(len(data))
        try:
            self._files.replace(part_name(self._next_number, table, num_rows), data)
        except OSError as error:
            self._last_error = f"{type(error).__name__}: {error}"
            raise
        self._last_error = ""
        self._next_number += 1
        self._known_bytes += len(data)
        self._written_rows[table] = self._written_rows.get(table, 0) + num_rows
        self._start_once()

    def write_document(self, name: str, data: bytes) -> None:
        """Replaces a document in the spool, by base name (writer thread).

        Raises:
            OSError: The old document, if any, still stands.
        """
        self._require_open()
        self._write_document(name, data)
        if name == layout.manifest_file("", self._process):
            self._closed = decode_manifest(data).status == "closed"
        self._start_once()

    def write_members(self, record: GenerationRecord) -> None:
        """Leaves the record of a generation for the uploader to store (leader's thread).

        Raises:
            OSError: It is not durable.
        """
        self._write_document(f"generation-{record.generation:03d}.json", encode_document(record))

    def state(self) -> TargetState:
        """Returns what is up and what still lies here (writer thread).

        Rows of spooled parts that nobody can read are missing in both; the uploader counts them as dropped in
        the manifest that it stores.
        """
        progress = self._read_progress()
        tables: dict[str, TableState] = {}
        for table in sorted({*self._written_rows, *progress.tables}):
            up = progress.tables.get(table, TableProgress())
            written = self._written_rows.get(table, 0)
            tables[table] = TableState(
                next_part=up.next_part,
                rows=up.rows,
                bytes=up.bytes,
                rows_in_spool=max(0, written - up.rows - up.rows_dropped - self._removed_rows.get(table, 0)),
                rows_dropped=self._removed_rows.get(table, 0),
            )
        return TargetState(
            tables=tables, last_error=self._last_error or progress.last_error or self._starter.last_error
        )

    def keep_alive(self) -> None:
        """Starts an uploader where none is alive (writer thread, about every 30 s).

        Raises:
            OSError: The folder was removed and cannot be made again.
        """
        self._started = True
        self._mend()
        self._starter.ensure()

    def require_in_place(self) -> None:
        """Makes the folder again where it was removed, or a part of it (writer thread).

        Raises:
            OSError: It was removed since the last call, or cannot be made again.
        """
        self._mend()
        if self._was_removed:
            self._was_removed = False
            raise OSError(
                f"the spool {self._folder} was removed, or a part of it, while this process wrote to it; "
                f"it was made again, and rows that lay in it are lost and count as dropped"
            )

    def upload(self, timeout_s: float) -> bool:
        """Asks for everything to be uploaded now, and waits for it.

        Args:
            timeout_s: Bound in seconds; 0 only asks.

        Returns:
            Whether everything that was written before the call is where readers look.
        """
        if self._lock is None:
            return self._is_served(self._asked) if self._asked else True
        self._asked = uuid.uuid4().hex
        try:
            self._mend()
            self._files.replace(WANTED, self._asked.encode())
        except OSError as error:
            self._last_error = f"{type(error).__name__}: {error}"
            return False
        end_s = time.monotonic() + timeout_s
        next_look_s = 0.0
        while not self._is_served(self._asked):
            now_s = time.monotonic()
            if now_s >= next_look_s:
                with contextlib.suppress(OSError):  # tried again, and told where the next part is written
                    self.keep_alive()
                next_look_s = now_s + _KEEP_ALIVE_WHILE_WAITING_S
            if now_s >= end_s:
                return False
            time.sleep(min(_POLL_S, max(0.0, end_s - now_s)))
        return True

    def finish(self, timeout_s: float) -> bool:
        """Uploads everything and waits (closing thread).

        After a manifest that says ``closed`` the folder is given up too: nothing can be written afterwards,
        and the uploader goes on alone where time ran out.

        Returns:
            False where something still lies in the spool after `timeout_s` seconds.
        """
        done = self.upload(timeout_s)
        if self._closed:
            self.close()
        return done

    def close(self) -> None:
        """Gives the folder up; the uploader carries on and clears it (any thread).

        `finish` does so after a manifest that says ``closed``; this is for one that leaves documents alone.
        """
        if self._lock is None:
            return
        self._read_progress()
        with contextlib.suppress(OSError):
            self._files.replace(CLOSED, b"")  # if not, the free lock says the same
        self._lock.release()
        self._lock = None
        self._starter.settle()

    def _is_served(self, token: str) -> bool:
        return self._read_progress().served == token

    def _read_progress(self) -> Progress:
        if not (self._folder / PROGRESS).exists():
            return self._progress  # nothing is up, the uploader has cleared the folder, or it was removed
        with contextlib.suppress(msgspec.DecodeError, OSError):
            self._progress = read_progress(self._folder)
        return self._progress

    def _start_once(self) -> None:
        if not self._started:
            self.keep_alive()

    def _write_document(self, name: str, data: bytes) -> None:
        try:
            self._mend()
            self._files.replace(f"{DOCUMENTS}/{name}", data)
        except OSError as error:
            self._last_error = f"{type(error).__name__}: {error}"
            raise
        self._documents[name] = data

    def _mend(self) -> None:
        """Makes the folder again where somebody removed it, or what says whose it is (any thread).

        Raises:
            OSError: It cannot be made.
        """
        with self._mending:
            lock = self._lock
            if lock is None or (lock.is_at(self._folder / WRITER_LOCK) and (self._folder / ABOUT).exists()):
                return
            known = self._read_progress()
            self._lock = _make_process_folder(self._folder, self._about, known)
            lock.close()
            left = list_parts(self._folder)
            for table, written in self._written_rows.items():
                up = known.tables.get(table, TableProgress())
                here = sum(part.rows for part in left if part.table == table)
                self._removed_rows[table] = max(0, written - up.rows - up.rows_dropped - here)
            self._scanned_at_s = float("-inf")
            self._was_removed = True
            for name, data in self._documents.items():
                self._files.replace(f"{DOCUMENTS}/{name}", data)

    def _require_open(self) -> None:
        if self._lock is None:
            raise OSError(
                errno.EBADF, f"the spool {self._folder} was closed; nothing more can be written to it"
            )

    def _has_room(self, num_bytes: int, max_bytes: int) -> bool:
        now_s = time.monotonic()
        if now_s - self._scanned_at_s > _RESCAN_S or self._known_bytes + num_bytes > max_bytes:
            self._known_bytes = spooled_bytes(self._spool)
            self._scanned_at_s = now_s
        return self._known_bytes + num_bytes <= max_bytes

    def _require_room(self, num_bytes: int) -> None:
        if not self._has_room(num_bytes, self._max_bytes):
            self._last_error = (
                f"the spool {self._spool} holds {self._known_bytes} bytes of at most {self._max_bytes}; "
                f"rows are dropped until the store takes what is there"
            )
            raise OSError(errno.ENOSPC, self._last_error)


def _make_process_folder(folder: Path, about: About, known: Progress | None = None) -> FileLock:
    """Makes a process's folder, or what is missing of one that was removed.

    Args:
        folder: The folder.
        about: Whose it is.
        known: How far the uploader was, as far as the writer has read; None for a process that begins.

    Raises:
        OSError: It cannot be made.
    """
    for last_try in (*[False] * (_TRIES - 1), True):
        try:
            make_private_folder(folder.parent)
            if known is not None and os.path.lexists(folder):
                make_private_folder(folder)
                return _filled(folder, about, known)
            with published(folder) as temporary:
                return _filled(temporary, about, known)
        except FileNotFoundError:
            # The uploader of an earlier process has just removed the empty spool.
            if last_try:
                raise
    raise AssertionError("the last try returns or raises")


def _filled(folder: Path, about: About, known: Progress | None) -> FileLock:
    """Returns the lock of a folder that now says whose it is."""
    lock = FileLock.acquire(folder / WRITER_LOCK)
    if lock is None:
        raise OSError(errno.EBUSY, f"the spool {folder} is locked by somebody else")
    files = LocalStorage(str(folder))
    if known is not None and not (folder / PROGRESS).exists():
        files.replace(PROGRESS, encode_document(replace(known, is_behind=True)))
    files.replace(ABOUT, encode_document(about))  # the last, for who sees it takes the rest to be there
    return lock


def _default_bound(spool: Path) -> int:
    free = os.statvfs(spool)
    return min(MAX_SPOOL_BYTES, free.f_bavail * free.f_frsize // _FREE_SHARE)
