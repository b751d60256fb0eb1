"""What the package asks of a place that holds files, the same on a local disk and on an object store.

Paths are relative to the storage's root, with ``/`` between segments. Data is written whole: no call leaves a
half-written file where a reader looks. There is no delete: nothing that a run has stored is ever taken away.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias

__all__ = ["FileInfo", "Listing", "Storage", "checked_path"]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of a listing.

    Attributes:
        path: Relative to the storage's root, with ``/`` between segments.
        size_bytes: Size; 0 for a folder.
        modified_at: The store's own time of the last change, seconds since the epoch; None where it tells
            none.
        is_folder: Whether this is a folder, or a prefix of an object store that acts as one.
    """

    path: str
    size_bytes: int
    modified_at: float | None
    is_folder: bool


Listing: TypeAlias = list[FileInfo]
"""What a listing returns; a name of its own, since `Storage.list` hides the builtin in its class."""


class Storage(Protocol):
    """A folder on a disk or in an object store.

    Every method may raise `StorageDeniedError`, `StorageNotFoundError` (a missing bucket),
    `StorageUnreachableError` or another `OSError` (a full disk), beside what it documents itself. None waits
    without a bound. Instances may be used from several threads.
    """

    @property
    def url(self) -> str:
        """The root as people may see it: absolute, without user info, query and fragment."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether the root is a folder that this host's kernel serves."""
        ...

    def read(self, path: str) -> bytes:
        """Returns a whole file (writer thread, offline).

        Raises:
            FileNotFoundError: There is no such file.
        """
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Writes a file only if none is there yet; of several callers at once exactly one succeeds.

        After a lost response the store is asked again, and the file counts as the caller's own if it holds
        the caller's bytes; so `data` has to differ between callers, by a nonce (attaching thread, uploader).

        Returns:
            Whether the file is the caller's; False where another one was there first.
        """
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Writes a file, in place of the old one if there is one, in one step (writer thread, uploader)."""
        ...

    def replace_together(self, files: Mapping[str, bytes | Path]) -> None:
        """Writes files that belong together in place of the old ones, in the order given (offline).

        On a local folder all are durable under temporary names before the first one is replaced, so that a
        full disk leaves the old ones as they were. A store writes one after the other, each in one step.

        Args:
            files: Path relative to the root to what comes to lie there: bytes, or a file on this host,
                which stays and is not held in memory.
        """
        ...

    def list(self, path: str = "") -> Listing:
        """Returns what lies directly in a folder, sorted by path; empty where there is no such folder."""
        ...

    def walk(self, enters: Callable[[str], bool] | None = None) -> Listing:
        """Returns every file below the root, sorted by path, from as few requests as possible (offline).

        A local folder adds the folders that stand where files of a run belong.

        Args:
            enters: Told the path of a folder, whether it is of interest; None for all of them. A store that
                lists all keys with one prefix returns the others too.
        """
        ...

    def open_input(self, path: str, size_bytes: int | None = None) -> BinaryIO:
        """Opens a file for reading at any position (offline).

        Args:
            path: The file.
            size_bytes: Its size where a listing told it; saves a request to an object store.

        Raises:
            FileNotFoundError: There is no such file.
        """
        ...

    def child(self, path: str) -> "Storage":
        """Returns the storage whose root is a folder of this one; the folder need not exist."""
        ...


def checked_path(path: str) -> str:
    """Returns a relative path without empty segments, and refuses one that leaves the root.

    Raises:
        ValueError: The path is absolute or has a segment ``..``.
    """
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"the path {path!r} leaves its folder")
    return "/".join(segment for segment in path.split("/") if segment not in {"", "."})
