"""Carrying what one process left in the spool to where readers look: parts, event files, documents.

A part goes up in four steps: ``progress.json`` names the spooled parts that go into it, the object is put,
the progress counts it, the spooled parts are deleted. A crash between any two of them is repaired by
repeating: the same spooled parts, in the order of the same catalog, give the same object under the same
name, and what the progress counts already is only deleted. An event file goes up as it is, and is deleted
after that.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from torchinstruments.records import GenerationRecord
from torchinstruments.store import layout
from torchinstruments.store.catalog import decode_catalog
from torchinstruments.store.claim import ensure_generation, ensure_run, write_members
from torchinstruments.store.filesystem import Storage
from torchinstruments.store.inspection import Expected, inspect_part
from torchinstruments.store.joining import UnreadablePartError, join_parts
from torchinstruments.store.locks import FileLock
from torchinstruments.store.manifest import TableState, decode_manifest, encode_document
from torchinstruments.store.spool_folder import (
    ABOUT,
    CLOSED,
    DOCUMENTS,
    OPEN_SUFFIX,
    PROGRESS,
    UNREADABLE,
    WANTED,
    WRITER_LOCK,
    Progress,
    SpooledPart,
    TableProgress,
    list_parts,
    list_segments,
    read_about,
    read_progress,
    read_text,
    write_atomically,
)

__all__ = ["Shipment", "select_parts"]

JOIN_BYTES = 2**20
"""As soon as so much of a table is spooled it goes up."""

MAX_JOIN_BYTES = 8 * 2**20
"""An object is joined from no more than this, unless a single spooled part is larger."""

MAX_AGE_S = 300.0
"""After so long a spooled part goes up, however small it is."""

MANIFEST_AT_MOST_EVERY_S = 60.0
"""A manifest that changed is stored no sooner than so many seconds after the last time, unless wanted."""

MANIFEST_DELAY_S = 90.0
"""What a manifest's way through the spool may add to the time at which its writer promised the next one."""

_BATCHES_A_ROUND = 8
_SEGMENTS_A_ROUND = 8


class Shipment:
    """What the uploader knows and does of one process's folder.

    Args:
        folder: The process's folder in the spool.
        log: Takes one line for people.
        after_put: Called after each object was put and before the spool knows of it; for tests of crashes
            there.

    Raises:
        FileNotFoundError: The folder is gone.
        msgspec.DecodeError: The folder was written by another release.
    """

    def __init__(
        self, folder: Path, log: Callable[[str], None], *, after_put: Callable[[str], None] | None = None
    ) -> None:
        self.folder = folder
        self._log = log
        self._after_put = after_put
        self._made_at = _stamp(folder / ABOUT)
        self._about = read_about(folder)
        self._progress = read_progress(folder)
        self._home: Storage | None = None
        self._is_run_there = self._about.verified
        self._seen_s: dict[str, float] = {}
        self._sent: dict[str, tuple[int, int]] = {}
        self._sent_manifest = b""
        self._manifest_sent_s = float("-inf")

    @property
    def progress(self) -> Progress:
        """How far it has come."""
        return self._progress

    def is_over(self) -> bool:
        """Returns whether the process writes no more: it said so, or it is dead."""
        return (self.folder / CLOSED).exists() or FileLock.is_free(self.folder / WRITER_LOCK)

    def was_made_again(self) -> bool:
        """Returns whether its writer has made the folder again since it was opened here, or it is gone."""
        try:
            return _stamp(self.folder / ABOUT) != self._made_at
        except OSError:
            return True

    def has_request(self) -> bool:
        """Returns whether the process waits for everything to be uploaded."""
        return read_text(self.folder / WANTED) != self._progress.served

    def forget_home(self, *, is_gone: bool) -> None:
        """Asks the store again for the run's folder at the next round, perhaps over a new client.

        Args:
            is_gone: Whether it, or its bucket, was removed: what says which run it is has to be written anew.
        """
        self._home = None
        if is_gone:
            self._is_run_there = False
            self._sent.clear()
            self._sent_manifest = b""
            self._manifest_sent_s = float("-inf")

    def note_error(self, text: str) -> None:
        """Tells the writing process why uploading fails; ``""`` once it does not."""
        if text != self._progress.last_error:
            self._save(replace(self._progress, last_error=text))

    def ship(self, base: Storage, *, urgent: bool) -> bool:
        """Uploads what is due.

        Args:
            base: The address that the user asked for.
            urgent: Whether everything is due.

        Returns:
            Whether something due is left for the next round.

        Raises:
            StorageError: The store refused or did not answer.
            OSError: The store, or the spool, failed otherwise.
        """
        request = read_text(self.folder / WANTED)
        urgent = urgent or request != self._progress.served or self.is_over()
        home = self._claimed(base)
        if self._progress.is_behind:
            self._recount(home)
        parts = self._aged(self._unsent(list_parts(self.folder)))
        left, more = self._ship_parts(home, parts, urgent=urgent)
        if more or self._ship_segments(home):
            return True
        if not self._ship_documents(home, left, urgent=urgent):
            self._log(f"{home.url} was removed, and what says which run it holds is written once more")
            self.forget_home(is_gone=True)
            return True
        if request != self._progress.served or self._progress.last_error:
            self._save(replace(self._progress, served=request, last_error=""))
        return False

    def remove_if_done(self) -> bool:
        """Removes the folder of a process that is over and has nothing left; returns whether it is gone."""
        if not self.is_over() or self.has_request() or list_parts(self.folder):
            return False
        if list_segments(self.folder, open_too=True):
            return False
        if not FileLock.is_free(self.folder / WRITER_LOCK):
            return False
        shutil.rmtree(self.folder, ignore_errors=True)
        return not self.folder.exists()

    def _claimed(self, base: Storage) -> Storage:
        """Returns the folder of the run; claims it where the run started without that.

        A local folder may be another one than the leader's, on a host that does not share its disk.
        """
        if self._home is not None:
            return self._home
        about = self._about
        if self._is_run_there and not base.is_local:
            self._home = base.child(f"run-{about.run.run_id}") if about.beside else base
        else:
            home = ensure_run(base, about.run)
            ensure_generation(
                home,
                GenerationRecord(
                    schema_version=about.run.schema_version,
                    run_id=about.run.run_id,
                    generation=about.generation,
                    world_size=about.world_size,
                    leader_process=about.process,
                    started_at=about.started_at,
                    first_sample_id=about.first_sample_id,
                ),
            )
            if home.url != base.url:
                self._log(
                    f"{base.url} holds another run; the rows of run {about.run.run_id} go to {home.url}"
                )
            self._home = home
        if self._progress.url != self._home.url or not self._progress.verified:
            self._save(replace(self._progress, verified=True, url=self._home.url))
        return self._home

    def _recount(self, home: Storage) -> None:
        """Counts objects that were put before the folder was removed; nothing is put over them."""
        tables = dict(self._progress.tables)
        folder, process = self._about.folder, self._about.process
        for table in layout.TABLES:
            state = self._table(table)
            place = layout.part_file(folder, table, process, 0).rpartition("/")[0]
            for entry in home.list(place):
                name = layout.parse_part(entry.path.rpartition("/")[2])
                if name is None or name.process != process or name.sequence < state.next_part:
                    continue
                expected = Expected(table, self._about.run.run_id, process, self._about.rank)
                rows = inspect_part(home, entry.path, expected, entry.size_bytes).num_rows
                found = tables.get(table, state)
                tables[table] = replace(
                    found,
                    next_part=max(found.next_part, name.sequence + 1),
                    rows=found.rows + rows,
                    bytes=found.bytes + entry.size_bytes,
                    rows_dropped=found.rows_dropped - rows,  # its writer gave them up
                )
        self._save(replace(self._progress, tables=tables, is_behind=False))

    def _aged(self, parts: list[SpooledPart]) -> list[SpooledPart]:
        """Returns parts that are as old as they have been seen here, though the host's clock was set back."""
        now_s, wall_s = time.monotonic(), time.time()
        self._seen_s = {part.path.name: self._seen_s.get(part.path.name, now_s) for part in parts}
        return [
            replace(part, written_at_s=min(part.written_at_s, wall_s - now_s + self._seen_s[part.path.name]))
            for part in parts
        ]

    def _unsent(self, parts: list[SpooledPart]) -> list[SpooledPart]:
        """Deletes what is up already, and returns the rest."""
        left: list[SpooledPart] = []
        for part in parts:
            table = self._table(part.table)
            if part.number <= table.through and part.path.name not in table.pending:
                part.path.unlink(missing_ok=True)
            else:
                left.append(part)
        return left

    def _ship_parts(
        self, home: Storage, parts: list[SpooledPart], *, urgent: bool
    ) -> tuple[list[SpooledPart], bool]:
        batches = 0
        for table in layout.TABLES:
            while selected := select_parts(
                [part for part in parts if part.table == table],
                self._table(table).pending,
                now_s=time.time(),
                urgent=urgent,
            ):
                if batches == _BATCHES_A_ROUND:
                    return parts, True
                batches += 1
                self._put(home, table, selected)
                gone = {part.number for part in selected}
                parts = [part for part in parts if part.number not in gone or part.path.exists()]
        return parts, False

    def _put(self, home: Storage, table: str, selected: list[SpooledPart]) -> None:
        progress = self._table(table)
        names = tuple(part.path.name for part in selected)
        layers = self._layers()
        if progress.pending != names:
            progress = replace(progress, pending=names, by_catalog=bool(layers))
            self._save_table(table, progress)
        try:
            # A catalog that came between the first try and this one would give other bytes.
            data = join_parts(table, [part.path for part in selected], layers if progress.by_catalog else ())
        except UnreadablePartError as error:
            self._set_aside(table, selected, error)
            return
        path = layout.part_file(self._about.folder, table, self._about.process, progress.next_part)
        home.replace(path, data)
        if self._after_put is not None:
            self._after_put(path)
        self._save_table(
            table,
            TableProgress(
                next_part=progress.next_part + 1,
                rows=progress.rows + sum(part.rows for part in selected),
                bytes=progress.bytes + len(data),
                rows_dropped=progress.rows_dropped,
                through=selected[-1].number,
            ),
        )
        for part in selected:
            part.path.unlink(missing_ok=True)

    def _layers(self) -> tuple[str, ...]:
        """Returns the layers in catalog order, which never changes; nothing before the catalog is there."""
        path = self.folder / DOCUMENTS / layout.modules_file("", self._about.process)
        try:
            return tuple(module.layer for module in decode_catalog(path.read_bytes()).modules)
        except (FileNotFoundError, msgspec.DecodeError):
            return ()

    def _set_aside(self, table: str, selected: list[SpooledPart], error: UnreadablePartError) -> None:
        """Moves a part that cannot be read out of the way of the others, and counts its rows."""
        bad = next(part for part in selected if part.path == error.path)
        aside = self.folder.parent / UNREADABLE
        aside.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(bad.path, aside / f"{self.folder.name}-{bad.path.name}")
        progress = self._table(table)
        self._save_table(table, replace(progress, pending=(), rows_dropped=progress.rows_dropped + bad.rows))
        self._log(f"{error}; it is set aside in {aside}, and its {bad.rows} rows count as dropped")

    def _ship_segments(self, home: Storage) -> bool:
        """Uploads event files that grow no more, each as one object; returns whether some are left."""
        segments = list_segments(self.folder, open_too=self.is_over())
        for path in segments[:_SEGMENTS_A_ROUND]:
            data = path.read_bytes()
            if data:
                target = layout.tensorboard_file(self._about.folder, path.name.removesuffix(OPEN_SUFFIX))
                home.replace(target, data)
                if self._after_put is not None:
                    self._after_put(target)
            path.unlink(missing_ok=True)
        return len(segments) > _SEGMENTS_A_ROUND

    def _ship_documents(self, home: Storage, left: list[SpooledPart], *, urgent: bool) -> bool:
        """Uploads documents that changed; returns False where the run's folder turns out to be gone."""
        manifest_name = layout.manifest_file("", self._about.process)
        for path in sorted((self.folder / DOCUMENTS).glob("[!.]*")):
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if path.name == manifest_name:
                if not self._ship_manifest(home, path, left, urgent=urgent):
                    return False
            elif self._sent.get(path.name) != stamp:
                self._ship_document(home, path)
                self._sent[path.name] = stamp
        return True

    def _ship_document(self, home: Storage, path: Path) -> None:
        data = path.read_bytes()
        if path.name.startswith("generation-"):
            record = msgspec.json.decode(data, type=GenerationRecord)
            if not write_members(home, record):
                self._log(
                    f"generation {record.generation} belongs to another leader; its members stay as they are"
                )
            return
        target = self._in_rank_folder(path.name)
        was_killed = not (self.folder / CLOSED).exists() and self.is_over()
        if was_killed and path.name in (layout.RESULT_FILE, layout.INDEX_FILE):
            # All processes of a rank share these, and a later one may have left its own.
            home.create(target, data)
        else:
            home.replace(target, data)

    def _ship_manifest(self, home: Storage, path: Path, left: list[SpooledPart], *, urgent: bool) -> bool:
        data = self._uploaded_manifest(path.read_bytes(), left)
        now_s = time.monotonic()
        if data == self._sent_manifest or (
            not urgent and now_s - self._manifest_sent_s < MANIFEST_AT_MOST_EVERY_S
        ):
            return True
        try:
            home.read(layout.RUN_FILE)
        except FileNotFoundError:
            return False
        home.replace(self._in_rank_folder(path.name), data)
        self._sent_manifest = data
        self._manifest_sent_s = now_s
        return True

    def _uploaded_manifest(self, data: bytes, left: list[SpooledPart]) -> bytes:
        """Returns the writer's manifest with the state of the upload, which its writer cannot know."""
        manifest = decode_manifest(data)
        tables: dict[str, TableState] = {}
        for name in sorted({*manifest.tables, *self._progress.tables}):
            up = self._table(name)
            tables[name] = TableState(
                next_part=up.next_part,
                rows=up.rows,
                bytes=up.bytes,
                rows_in_spool=sum(part.rows for part in left if part.table == name),
                rows_dropped=max(0, up.rows_dropped + manifest.tables.get(name, TableState()).rows_dropped),
            )
        return encode_document(
            replace(
                manifest,
                tables=tables,
                spool_path=str(self.folder),
                next_write_due_s=manifest.next_write_due_s + MANIFEST_DELAY_S,
            )
        )

    def _in_rank_folder(self, name: str) -> str:
        return f"{self._about.folder}/{name}" if self._about.folder else name

    def _table(self, table: str) -> TableProgress:
        return self._progress.tables.get(table, TableProgress())

    def _save_table(self, table: str, progress: TableProgress) -> None:
        tables: Mapping[str, TableProgress] = {**self._progress.tables, table: progress}
        self._save(replace(self._progress, tables=tables))

    def _save(self, progress: Progress) -> None:
        write_atomically(self.folder, PROGRESS, progress)
        self._progress = progress


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def select_parts(
    parts: list[SpooledPart], pending: tuple[str, ...], *, now_s: float, urgent: bool
) -> list[SpooledPart]:
    """Returns the spooled parts of a table that go into its next object; empty while nothing is due.

    Args:
        parts: Spooled parts of the table, in the order of writing.
        pending: Names of those whose upload was begun; they alone are due then.
        now_s: Seconds since the epoch.
        urgent: Whether everything is due.
    """
    begun = [part for part in parts if part.path.name in pending]
    if begun:
        return begun
    if not parts:
        return []
    total = sum(part.size_bytes for part in parts)
    oldest_s = min(part.written_at_s for part in parts)
    if not urgent and total < JOIN_BYTES and now_s - oldest_s < MAX_AGE_S:
        return []
    selected: list[SpooledPart] = []
    size = 0
    for part in parts:
        if selected and size + part.size_bytes > MAX_JOIN_BYTES:
            break
        selected.append(part)
        size += part.size_bytes
    return selected
