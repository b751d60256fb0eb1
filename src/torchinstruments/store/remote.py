"""Storage on anything that fsspec reaches. Only processes that own the remote side open one.

Every call has a bound. s3fs hangs for ever in a PUT whose request is accepted and never answered, whatever
its read timeout says, so each call hands fsspec a timeout of its own; a filesystem that is not asynchronous
is called in a thread that can be left behind. Data is one PUT of bytes: a file object would publish what was
written so far when an exception or the garbage collector closes it. Nothing is cached, since other ranks
write too: listings are asked for anew, and a cache in a chain of URLs is passed by, which would also lose the
exclusive creation of files.
"""

import contextlib
import datetime as dt
import io
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torchinstruments.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageNotFoundError,
    StorageUnreachableError,
)
from torchinstruments.store.deadlines import call_in_time
from torchinstruments.store.refusals import explained, is_missing_bucket
from torchinstruments.store.storage import FileInfo, Listing, checked_path
from torchinstruments.store.urls import redact, schemes, secrets_of

__all__ = ["FsspecStorage", "open_remote"]

# There a folder is only a common beginning of names, so that none is ever made; making one could make a
# bucket.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory"})
_CACHES = frozenset({"simplecache", "filecache", "blockcache", "cached"})
_UPLOAD_BYTES_PER_S = 256 * 1024
_WHOLE_READ_BYTES = 16 * 2**20
_BLOCK_BYTES = 4 * 2**20
# One process, one clock for those stores whose exclusive creation is a look followed by a write.
_CREATION = threading.Lock()


def open_remote(
    url: str, storage_options: Mapping[str, object] | None, *, timeout_s: float
) -> "FsspecStorage":
    """Returns the storage at an fsspec URL; connects to nothing yet.

    Args:
        url: The folder, as a URL or a chain of URLs; caches that a chain begins with are passed by.
        storage_options: Settings in fsspec's dialect; what they say wins over the bounds set here.
        timeout_s: Bound of one request in seconds; data adds a second for each 256 KiB.

    Returns:
        The storage; it keeps no copy of a secret in what it shows.

    Raises:
        ConfigurationError: The scheme is not known, its package is not installed, or the options cannot work.
    """
    import fsspec
    from fsspec.core import url_to_fs

    secrets = secrets_of(url, storage_options)
    shown = redact(url)
    for scheme in schemes(url):
        try:
            fsspec.get_filesystem_class(scheme)
        except ValueError:
            raise ConfigurationError(
                f"the scheme {scheme!r} of {shown!r} is not known; give s3://, gs://, abfs://, hdfs:// or "
                f"another one that fsspec lists in fsspec.available_protocols(), or a local path"
            ) from None
        except ImportError as error:
            raise ConfigurationError(
                f"the scheme {scheme!r} of {shown!r} needs a package that is not installed: {error}; "
                f"install it with pip in every environment that writes or reads the run"
            ) from None
    with explained(shown, "opening", secrets):
        target, options = _past_caches(url, storage_options)
        filesystem, root = url_to_fs(target, **_bounded_options(target, options, timeout_s))
    if hasattr(filesystem, "retries"):
        filesystem.retries = 3  # s3fs's own tries, on top of the client's; five of each take up to a minute
    return FsspecStorage(filesystem, str(root), shown, timeout_s=timeout_s, secrets=secrets)


def _past_caches(
    url: str, storage_options: Mapping[str, object] | None
) -> tuple[str, Mapping[str, object] | None]:
    """Returns the address behind the caches that a chain begins with, and that link's own options."""
    links = schemes(url)
    options = storage_options
    while len(links) > 1 and links[0] in _CACHES:
        url = url.partition("::")[2]
        links = links[1:]
        if len(links) == 1:
            inner = (storage_options or {}).get(links[0])
            options = inner if isinstance(inner, Mapping) else None
    return url, options


def _bounded_options(
    url: str, storage_options: Mapping[str, object] | None, timeout_s: float
) -> dict[str, Any]:
    """Returns the caller's options with bounds and without caches; what the caller says wins."""
    links = schemes(url)
    options: dict[str, Any] = dict(storage_options or {})
    defaults: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    for position, scheme in enumerate(links):
        if scheme not in {"s3", "s3a"}:
            continue
        place = options if position == 0 else dict(options.get(scheme) or {})
        config = {
            "connect_timeout": min(5.0, timeout_s),
            "read_timeout": min(20.0, timeout_s),
            "retries": {"max_attempts": 2},
        }
        # Else each reading of a whole file begins with a request for its size.
        place.setdefault("max_concurrency", 1)
        place["config_kwargs"] = config | dict(place.get("config_kwargs") or {})
        if position > 0:
            options[scheme] = defaults | place
    return defaults | options


class FsspecStorage:
    """A folder behind an fsspec filesystem.

    Args:
        filesystem: An instance of ``fsspec.AbstractFileSystem``.
        root: The folder, in the filesystem's own spelling.
        url: Address for people, without secrets.
        timeout_s: Bound of one request in seconds; data adds a second for each 256 KiB.
        secrets: Texts that no message may hold.
    """

    def __init__(
        self, filesystem: Any, root: str, url: str, *, timeout_s: float, secrets: tuple[str, ...]
    ) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._secrets = secrets
        protocol = filesystem.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)

    def __repr__(self) -> str:
        return f"FsspecStorage({self._url!r})"

    @property
    def url(self) -> str:
        """The address without secrets."""
        return self._url

    @property
    def is_local(self) -> bool:
        """Always False."""
        return False

    def child(self, path: str) -> "FsspecStorage":
        """Returns the storage of a folder below this one, over the same client.

        Args:
            path: The folder, relative to this one; it need not exist.
        """
        relative = checked_path(path)
        if not relative:
            return self
        return FsspecStorage(
            self._filesystem,
            f"{self._root}/{relative}",
            f"{self._url}/{relative}",
            timeout_s=self._timeout_s,
            secrets=self._secrets,
        )

    def read(self, path: str) -> bytes:
        """Returns a whole file.

        Args:
            path: The file, relative to the folder.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: The store refused or did not answer.
        """
        with self._explained(path, "reading"):
            return bytes(self._call(self._filesystem.cat_file, self._key(path)))

    def open_input(self, path: str, size_bytes: int | None = None) -> BinaryIO:
        """Opens a file for reading at any position; one of up to 16 MiB is fetched whole, with one request.

        Args:
            path: The file, relative to the folder.
            size_bytes: Its size where a listing told it; saves a request.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: The store refused or did not answer.
        """
        with self._explained(path, "reading"):
            if size_bytes is None:
                size_bytes = int(self._call(self._filesystem.info, self._key(path))["size"])
            if size_bytes <= _WHOLE_READ_BYTES:
                return io.BytesIO(self._call(self._filesystem.cat_file, self._key(path)))
            return io.BufferedReader(_RangedInput(self, path, size_bytes), buffer_size=64 * 1024)

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Returns a piece of a file, with one request.

        Args:
            path: The file, relative to the folder.
            start: First byte.
            end: The byte after the last one.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: The store refused or did not answer.
        """
        with self._explained(path, "reading"):
            return bytes(self._call(self._filesystem.cat_file, self._key(path), start=start, end=end))

    def create(self, path: str, data: bytes) -> bool:
        """Writes a file only if none is there yet.

        Args:
            path: The file, relative to the folder.
            data: What it holds; different for each caller, by a nonce, for a lost answer is settled by it.

        Returns:
            Whether the file is the caller's; False where another one was there first.

        Raises:
            ConfigurationError: The client cannot work with its settings.
            StorageDeniedError: The store does not let the caller write.
            StorageNotFoundError: The bucket does not exist.
            StorageUnreachableError: The store did not answer, or what it answered settles nothing.
        """
        try:
            with self._explained(path, "writing"):
                self._create(self._key(path), data)
            return True
        except (ConfigurationError, StorageDeniedError, StorageNotFoundError):
            raise
        except OSError as error:
            # Somebody was first, or the answer was lost: stores name the refusal in different ways, so look.
            try:
                return self.read(path) == data
            except FileNotFoundError:
                raise StorageUnreachableError(
                    f"creating {self._url}/{path} had no clear outcome and may work later ({error})"
                ) from None

    def replace(self, path: str, data: bytes) -> None:
        """Writes a file in place of the old one, with one PUT.

        Args:
            path: The file, relative to the folder.
            data: What it holds.

        Raises:
            StorageError: The store refused or did not answer; the old file may stand, or the new one.
        """
        with self._explained(path, "writing"):
            self._with_folder(self._key(path), self._filesystem.pipe_file, data)

    def replace_together(self, files: Mapping[str, bytes | Path]) -> None:
        """Writes files in place of the old ones, one after the other; a large one in pieces.

        Args:
            files: Path relative to the folder to what comes to lie there; a file on this host stays.

        Raises:
            StorageError: The store refused or did not answer; files may stand from before and from now.
        """
        for path, data in files.items():
            if isinstance(data, bytes):
                self.replace(path, data)
            else:
                self._replace_with_file(path, data)

    def _replace_with_file(self, path: str, source: Path) -> None:
        """Writes what a file of this host holds; pieces of a large one appear together."""
        key = self._key(path)
        extra_s = source.stat().st_size / _UPLOAD_BYTES_PER_S
        with self._explained(path, "writing"):
            try:
                self._call(self._filesystem.put_file, str(source), key, extra_s=extra_s)
            except FileNotFoundError:
                if self._protocols & _OBJECT_STORES:
                    raise
                self._call(self._filesystem.makedirs, key.rpartition("/")[0], exist_ok=True)
                self._call(self._filesystem.put_file, str(source), key, extra_s=extra_s)

    def remove(self, path: str) -> None:
        """Deletes a file that this process has made itself; one that is not there is no error (doctor alone).

        Args:
            path: The file, relative to the folder.

        Raises:
            StorageError: The store refused or did not answer.
        """
        with self._explained(path, "deleting"), contextlib.suppress(FileNotFoundError):
            self._call(self._filesystem.rm_file, self._key(path))

    def list(self, path: str = "") -> Listing:
        """Returns what lies directly in a folder.

        Args:
            path: The folder, relative to this one; ``""`` for this one itself.

        Returns:
            Its files and folders, sorted by path; empty where there is no such folder.

        Raises:
            StorageNotFoundError: The bucket does not exist.
            StorageError: The store refused or did not answer.
        """
        folder = checked_path(path)
        with self._explained(folder, "listing"):
            try:
                entries = self._call(self._filesystem.ls, self._key(folder), detail=True)
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                return []
        depth = folder.count("/") + 1 if folder else 0
        found = self._infos(entries)
        return [
            entry for entry in found if entry.path.count("/") == depth and self._is_below(entry.path, folder)
        ]

    def walk(self, enters: Callable[[str], bool] | None = None) -> Listing:  # noqa: ARG002 - part of the seam
        """Returns every file below the folder, from one listing.

        Args:
            enters: Not asked: all keys below one prefix come with one request.

        Returns:
            Files alone, sorted by path; empty where there is no such folder.

        Raises:
            StorageNotFoundError: The bucket does not exist.
            StorageError: The store refused or did not answer.
        """
        with self._explained("", "listing"):
            try:
                entries = self._call(self._filesystem.find, self._root, detail=True)
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                return []
        return [entry for entry in self._infos(entries.values()) if not entry.is_folder]

    def _infos(self, entries: Any) -> Listing:
        prefix = self._root.strip("/") + "/" if self._root.strip("/") else ""
        found: dict[str, FileInfo] = {}
        for entry in entries:
            name = str(entry["name"]).lstrip("/")
            is_folder = entry.get("type") == "directory"
            # Some stores show an emptied folder as an object whose name ends with a slash.
            if not name.startswith(prefix) or name == prefix or (name.endswith("/") and not is_folder):
                continue
            path = name[len(prefix) :].rstrip("/")
            found[path] = FileInfo(
                path, 0 if is_folder else int(entry.get("size") or 0), _modified_at(entry), is_folder
            )
        return [found[path] for path in sorted(found)]

    @staticmethod
    def _is_below(path: str, folder: str) -> bool:
        return not folder or path.startswith(f"{folder}/")

    def _create(self, key: str, data: bytes) -> None:
        if self._filesystem.async_impl:
            self._with_folder(key, self._filesystem.pipe_file, data, mode="create")
            return
        with _CREATION:
            try:
                self._with_folder(key, self._filesystem.pipe_file, data, mode="create")
                return
            except (NotImplementedError, TypeError, ValueError):
                pass  # knows no exclusive creation: a look and a write, exclusive within this process alone
            if self._call(self._filesystem.exists, key):
                raise FileExistsError(key)
            self._with_folder(key, self._filesystem.pipe_file, data)

    def _with_folder(self, key: str, function: Callable[..., Any], data: bytes, **arguments: Any) -> None:
        extra_s = len(data) / _UPLOAD_BYTES_PER_S
        try:
            self._call(function, key, data, extra_s=extra_s, **arguments)
        except FileNotFoundError:
            if self._protocols & _OBJECT_STORES:
                raise
            self._call(self._filesystem.makedirs, key.rpartition("/")[0], exist_ok=True)
            self._call(function, key, data, extra_s=extra_s, **arguments)

    def _call(
        self, function: Callable[..., Any], *positional: Any, extra_s: float = 0.0, **arguments: Any
    ) -> Any:
        timeout_s = self._timeout_s + extra_s
        if self._filesystem.async_impl:
            return function(*positional, timeout=timeout_s, **arguments)
        if "memory" in self._protocols:
            return function(*positional, **arguments)

        def run() -> Any:
            return function(*positional, **arguments)

        return call_in_time(run, timeout_s, what=f"a request to {self._url}")

    def _key(self, path: str) -> str:
        relative = checked_path(path)
        return f"{self._root}/{relative}" if relative else self._root

    def _explained(self, path: str, doing: str) -> Any:
        return explained(f"{self._url}/{path}" if path else self._url, doing, self._secrets)


class _RangedInput(io.RawIOBase):
    """A large remote file, read in blocks of 4 MiB, each a bounded request; the last block stays at hand."""

    def __init__(self, storage: FsspecStorage, path: str, size_bytes: int) -> None:
        super().__init__()
        self._storage = storage
        self._path = path
        self._size_bytes = size_bytes
        self._position = 0
        self._block_start = 0
        self._block = b""

    # pyrefly: ignore[missing-override-decorator]
    def readable(self) -> bool:
        return True

    # pyrefly: ignore[missing-override-decorator]
    def seekable(self) -> bool:
        return True

    # pyrefly: ignore[missing-override-decorator]
    def tell(self) -> int:
        return self._position

    # pyrefly: ignore[missing-override-decorator]
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    # pyrefly: ignore[missing-override-decorator]
    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._size_bytes - self._position)
        if wanted <= 0:
            return 0
        offset = self._position - self._block_start
        if not 0 <= offset < len(self._block):
            end = min(self._size_bytes, self._position + max(wanted, _BLOCK_BYTES))
            self._block = self._storage.read_range(self._path, self._position, end)
            self._block_start, offset = self._position, 0
        piece = self._block[offset : offset + wanted]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def _modified_at(entry: Mapping[str, Any]) -> float | None:
    for name in ("LastModified", "mtime", "last_modified", "modified", "updated", "created"):
        value = entry.get(name)
        if isinstance(value, dt.datetime):
            return (value if value.tzinfo else value.replace(tzinfo=dt.UTC)).timestamp()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            try:
                parsed = dt.datetime.fromisoformat(value)
            except ValueError:
                continue
            return (parsed if parsed.tzinfo else parsed.replace(tzinfo=dt.UTC)).timestamp()
    return None
