"""Storage on a local folder or on one that the kernel mounts: temporary name, fsync, link or rename.

A file appears under its name whole and durable, or not at all. Exclusive creation is ``link(2)`` of a
finished temporary file, which is atomic on local disks and on NFS. Names of temporary files begin with a dot
and end with ``.tmp``; listings leave them out.
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from torchinstruments.errors import (
    StorageDeniedError,
    StorageError,
    StorageNotFoundError,
    StorageUnreachableError,
)
from torchinstruments.store.storage import FileInfo, Listing, Storage, checked_path
from torchinstruments.store.urls import local_path

__all__ = ["LocalStorage", "require_no_link", "sync_folder"]

_COPIED_BYTES = 2**20
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MAY_PASS = frozenset(
    {
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENOTCONN,
        errno.EREMOTEIO,
        errno.EBUSY,
    }
)
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


class LocalStorage:
    """A folder of this host.

    Args:
        root: A path, with or without ``file://`` and ``~``; it need not exist.
    """

    def __init__(self, root: str) -> None:
        self._root = local_path(root)

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    @property
    def url(self) -> str:
        """The absolute path."""
        return self._root

    @property
    def is_local(self) -> bool:
        """Always True."""
        return True

    def prepare(self) -> None:
        """Makes the folder and finds out whether files can be made in it; leaves none (attaching thread).

        Raises:
            StorageError: The folder cannot be made, or nothing can be written into it.
        """
        with _explained(self._root, "writing"):
            os.makedirs(self._root, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._root) as file:
                file.write(b"0")

    def child(self, path: str) -> "LocalStorage":
        """Returns the storage of a folder below this one."""
        return LocalStorage(self._absolute(path))

    def read(self, path: str) -> bytes:
        """Returns a whole file.

        Raises:
            FileNotFoundError: There is no such file.
        """
        target = self._absolute(path)
        with _explained(target, "reading"), _open_file(target) as file:
            # As many bytes as it had when it was opened: files of a run are whole under their names.
            return file.read(os.fstat(file.fileno()).st_size)

    def open_input(self, path: str, size_bytes: int | None = None) -> BinaryIO:  # noqa: ARG002 - part of the seam
        """Opens a file for reading at any position.

        Raises:
            FileNotFoundError: There is no such file.
        """
        target = self._absolute(path)
        with _explained(target, "reading"):
            return _open_file(target)

    def create(self, path: str, data: bytes) -> bool:
        """Writes a file only if none is there yet; returns whether it is the caller's."""
        target = self._absolute(path)
        if os.path.lexists(target):
            return False
        with _explained(target, "writing"), self._temporary(target, data) as temporary:
            try:
                os.link(temporary, target)
            except OSError as error:
                # NFS may lose the answer to a link that was made.
                if os.stat(temporary).st_nlink > 1:
                    pass
                elif error.errno == errno.EEXIST:
                    return False
                elif error.errno in _NO_LINKS:
                    if not _write_exclusively(target, data):
                        return False
                else:
                    raise
            sync_folder(os.path.dirname(target))
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Writes a file in place of the old one, in one step."""
        target = self._absolute(path)
        with _explained(target, "writing"), self._temporary(target, data) as temporary:
            os.replace(temporary, target)
            sync_folder(os.path.dirname(target))

    def replace_together(self, files: Mapping[str, bytes | Path]) -> None:
        """Writes files in place of the old ones, once all of them are durable under temporary names."""
        with contextlib.ExitStack() as stack:
            ready: list[tuple[str, str]] = []
            for path, data in files.items():
                target = self._absolute(path)
                with _explained(target, "writing"):
                    if os.path.isdir(target):
                        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
                    source = data if isinstance(data, bytes) else stack.enter_context(data.open("rb"))
                    ready.append((stack.enter_context(self._temporary(target, source)), target))
            for temporary, target in ready:
                with _explained(target, "writing"):
                    os.replace(temporary, target)
            for folder in dict.fromkeys(os.path.dirname(target) for _, target in ready):
                with _explained(folder, "writing"):
                    sync_folder(folder)

    def list(self, path: str = "") -> Listing:
        """Returns what lies directly in a folder, sorted by path."""
        folder = self._absolute(path)
        with _explained(folder, "listing"):
            return sorted(_entries(folder, checked_path(path)), key=_path_of)

    def walk(self, enters: Callable[[str], bool] | None = None) -> Listing:
        """Returns every file below the root, sorted by path; links to folders are followed once.

        A folder inside a folder of parts, or with the name of a document, is listed too, since a file
        belongs there.

        Args:
            enters: Told the path of a folder, whether to look into it; None for all of them.
        """
        found: Listing = []
        seen: set[tuple[int, int]] = set()
        waiting = [""]
        while waiting:
            relative = waiting.pop()
            folder = self._absolute(relative)
            with _explained(folder, "listing"):
                try:
                    status = os.stat(folder)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                if (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
                for entry in _entries(folder, relative):
                    if entry.is_folder and (enters is None or enters(entry.path)):
                        waiting.append(entry.path)
                    is_misplaced = relative.endswith(".parts") or entry.path.endswith(".json")
                    if not entry.is_folder or is_misplaced:
                        found.append(entry)
        return sorted(found, key=_path_of)

    def _absolute(self, path: str) -> str:
        relative = checked_path(path)
        return os.path.join(self._root, relative) if relative else self._root

    @contextlib.contextmanager
    def _temporary(self, target: str, data: bytes | BinaryIO) -> Generator[str]:
        """Yields the path of a durable temporary file beside the target, and removes what is left of it."""
        folder, name = os.path.split(target)
        # The kernel allows 255 bytes for a name; a long one is shortened, the rest keeps it apart.
        temporary = os.path.join(folder, f".{name[:40]}.{uuid.uuid4().hex}.tmp")
        try:
            with _create_below(folder, temporary) as file:
                if isinstance(data, bytes):
                    file.write(data)
                else:
                    shutil.copyfileobj(data, file, _COPIED_BYTES)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _create_below(folder: str, path: str) -> BinaryIO:
    """Returns a new file; its folder is made where it is not there, which is seldom."""
    try:
        return open(path, "xb")
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)
        return open(path, "xb")


def _path_of(entry: FileInfo) -> str:
    return entry.path


def _entries(folder: str, relative: str) -> Iterator[FileInfo]:
    try:
        scan = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with scan:
        for entry in scan:
            if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                continue
            try:
                is_folder = entry.is_dir()
                status = entry.stat()
            except OSError as error:
                if not entry.is_symlink():
                    if isinstance(error, FileNotFoundError):
                        continue  # gone since it was listed
                    raise
                is_folder = False  # a link to nowhere: something was to be there
                status = entry.stat(follow_symlinks=False)
            yield FileInfo(
                path=f"{relative}/{entry.name}" if relative else entry.name,
                size_bytes=0 if is_folder else status.st_size,
                modified_at=status.st_mtime,
                is_folder=is_folder,
            )


def _open_file(target: str) -> BinaryIO:
    """Opens a file, and nothing else that a name may stand for: a pipe would wait for ever for its writer.

    Raises:
        StorageDeniedError: It is a pipe, a socket or a device.
    """
    _require_file(target, os.stat(target).st_mode)
    # Not waiting, for what was a file a moment ago.
    descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_file(target, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_file(target: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(mode):
        raise StorageDeniedError(f"{target} is no file but a pipe, a socket or a device, and is not read")


def _write_exclusively(target: str, data: bytes) -> bool:
    """Creates a file where the filesystem knows no hard links; a reader may catch it half-written."""
    try:
        file = open(target, "xb")  # noqa: SIM115 - closed below, after the creation alone was tried
    except FileExistsError:
        return False
    with file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return True


def require_no_link(storage: Storage, path: str) -> None:
    """Refuses to write into a folder below another one where a link leads elsewhere; remote ones have none.

    Raises:
        StorageError: There is a link in its place.
    """
    if not storage.is_local:
        return
    root = os.path.realpath(storage.url)
    if os.path.realpath(os.path.join(root, path)) != os.path.join(root, path):
        raise StorageError(
            f"{path} in {storage.url} is a link, and nothing is written through one; remove it, or give "
            f"another folder for the result"
        )


def sync_folder(folder: str) -> None:
    """Makes durable which names a folder holds.

    Raises:
        OSError: They may be lost.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network filesystems refuse to sync a folder; the file itself is durable by then.
        if error.errno not in {errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP}:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(target: str, doing: str) -> Generator[None]:
    """Turns the kernel's refusals into the package's own errors, with a way out; the rest passes as it is."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        number = error.errno
        text = error.strerror or str(error)
        if number in _DENIED:
            raise StorageDeniedError(
                f"{doing} {target} was refused ({text}); check the owner and the mode of its folder, "
                f"or give another one"
            ) from error
        if number == errno.ENAMETOOLONG:
            raise StorageError(
                f"{target} has a name that is longer than the filesystem allows ({text}); "
                f"give a shorter address"
            ) from error
        if doing == "writing" and number in {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}:
            raise StorageError(
                f"{target} cannot be written, because a file stands where a folder is needed, "
                f"or the other way round ({text}); move it away, or give another folder"
            ) from error
        if doing == "writing" and number == errno.ENOENT:
            raise StorageNotFoundError(
                f"the folder of {target} does not exist and cannot be made ({text}); "
                f"make it, or give another one"
            ) from error
        if doing == "reading" and number in {errno.ENOTDIR, errno.EISDIR}:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target) from error
        if number in _MAY_PASS:
            raise StorageUnreachableError(f"{doing} {target} failed and may work later ({text})") from error
        raise
