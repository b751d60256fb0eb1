"""Event files of TensorBoard as files: they only grow, and are durable piece by piece.

In a local folder there is one file a process, under its name from the first byte, so that TensorBoard can
follow it. In the spool a file is a segment of bounded size and age: it grows under a name that ends with
``.open``, is renamed when it is finished, and goes up whole and once; see `spool_folder`.

What is in these files goes through the kernel at each write, and to the disk within 30 s.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchinstruments.store import layout
from torchinstruments.store.local import sync_folder
from torchinstruments.store.spool import SpoolTarget
from torchinstruments.store.spool_folder import OPEN_SUFFIX
from torchinstruments.store.target import PartTarget
from torchinstruments.store.writer import Clock, SystemClock

__all__ = ["SYNC_EVERY_S", "SegmentBounds", "SegmentFiles", "open_segments"]

SYNC_EVERY_S = 25.0
"""After so long what was written is made durable; with the pace of the writer thread that is within 30 s."""

_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")


@dataclass(frozen=True, slots=True)
class SegmentBounds:
    """When a segment is finished.

    Attributes:
        max_bytes: As soon as it has so many.
        max_age_s: So many seconds after it was begun.
    """

    max_bytes: int = 4 * 2**20
    max_age_s: float = 300.0


class SegmentFiles:
    """Appends whole records to files of one process (writer thread).

    Args:
        folder: Where the files lie; made when the first one is.
        host: Name of this host, for the files' names.
        process: 8 hex digits.
        header: Returns what each file begins with.
        bounds: When a file is finished; None for one file that grows for ever.
        require_room: Raises an `OSError` where so many bytes must not be written.
        clock: Clocks.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str,
        process: str,
        header: Callable[[], bytes],
        bounds: SegmentBounds | None = None,
        require_room: Callable[[int], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._folder = folder
        self._name = f"{_UNSAFE.sub('-', host) or 'host'}.{process}"
        self._header = header
        self._bounds = bounds
        self._require_room = require_room
        self._clock: Clock = SystemClock() if clock is None else clock
        self._number = 0
        self._descriptor: int | None = None
        self._path = folder
        self._size_bytes = 0
        self._begun_s = 0.0
        self._unsynced_since_s: float | None = None

    def append(self, data: bytes) -> None:
        """Writes some whole records.

        Raises:
            OSError: None of them is in the files.
        """
        if self._require_room is not None:
            self._require_room(len(data))
        if self._is_full():
            self.close()
        if self._descriptor is None:
            self._begin()
        self._write(data)

    def tick(self) -> None:
        """Finishes a segment that is old, and makes durable what has waited long enough.

        Raises:
            OSError: What was written may be lost.
        """
        if self._is_full():
            self.close()
            return
        since_s = self._unsynced_since_s
        if since_s is not None and self._clock.monotonic_s() - since_s >= SYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        """Makes durable what was written so far.

        Raises:
            OSError: It may be lost; the next record begins another file.
        """
        if self._descriptor is None or self._unsynced_since_s is None:
            return
        try:
            os.fsync(self._descriptor)
            if os.fstat(self._descriptor).st_nlink == 0:
                raise FileNotFoundError(
                    errno.ENOENT, "it was deleted, and what was in it is lost", str(self._path)
                )
        except OSError:
            self._abandon()
            raise
        self._unsynced_since_s = None

    def close(self) -> None:
        """Finishes the file that is open; the next record begins another one.

        Raises:
            OSError: What was written may be lost.
        """
        if self._descriptor is None:
            return
        self.sync()
        self._abandon()
        if self._bounds is not None:
            os.rename(self._path, self._path.with_name(self._path.name.removesuffix(OPEN_SUFFIX)))
            sync_folder(str(self._folder))

    def _is_full(self) -> bool:
        if self._descriptor is None or self._bounds is None:
            return False
        age_s = self._clock.monotonic_s() - self._begun_s
        return self._size_bytes >= self._bounds.max_bytes or age_s >= self._bounds.max_age_s

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        begun_s = self._clock.wall_us() // 1_000_000
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        while True:
            name = f"events.out.tfevents.{begun_s:010d}.{self._name}.{self._number:06d}"
            self._number += 1
            self._path = self._folder / (name if self._bounds is None else name + OPEN_SUFFIX)
            with contextlib.suppress(FileExistsError):
                self._descriptor = os.open(self._path, flags, 0o666)
                break
        self._size_bytes = 0
        self._begun_s = self._clock.monotonic_s()
        try:
            self._write(self._header())
        except OSError:
            self._abandon()
            with contextlib.suppress(OSError):
                self._path.unlink()
            raise
        sync_folder(str(self._folder))

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None, "begun before anything is written"
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            self._cut_back()
            raise
        self._size_bytes += len(data)
        if self._unsynced_since_s is None:
            self._unsynced_since_s = self._clock.monotonic_s()

    def _cut_back(self) -> None:
        """Takes half a record away again: readers give a file up at the first one that is broken."""
        assert self._descriptor is not None, "something was written to it"
        try:
            os.ftruncate(self._descriptor, self._size_bytes)
        except OSError:
            self._abandon()

    def _abandon(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        self._unsynced_since_s = None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def open_segments(
    target: PartTarget, rank_folder: Path | None, *, host: str, process: str, header: Callable[[], bytes]
) -> SegmentFiles | None:
    """Returns where the event files of a process go; nothing is opened yet.

    Args:
        target: Where its parts go.
        rank_folder: The rank's folder, where it is local.
        host: Name of this host.
        process: 8 hex digits.
        header: Returns what each file begins with.

    Returns:
        The files; None where the target keeps no files on this host.
    """
    if isinstance(target, SpoolTarget):
        return SegmentFiles(
            target.segments,
            host=host,
            process=process,
            header=header,
            bounds=SegmentBounds(),
            require_room=target.require_segment_room,
        )
    if rank_folder is None:
        return None
    folder = rank_folder / layout.TENSORBOARD
    return SegmentFiles(folder, host=host, process=process, header=header)
