"""The folders of a run as one filesystem of Arrow, so that its scanner reads through the same storages as we.

A path is the index of the folder and the path below it: ``0/rank-000/history.parts/part-....parquet``. Only
what a scan of named files needs is here; nothing lists, and nothing writes.
"""

import os
from collections.abc import Sequence

import pyarrow as pa
from pyarrow import fs

from torchinstruments.store.storage import Storage

__all__ = ["StorageFiles", "arrow_path"]


def arrow_path(source: int, path: str) -> str:
    """Returns the path under which a file of one of the folders is known to Arrow."""
    return f"{source}/{path}"


class StorageFiles(fs.FileSystemHandler):
    """Reads files of several storages.

    Args:
        storages: The folders of a run.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = tuple(storages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageFiles) and self._storages == other._storages

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(storage.url for storage in self._storages))

    def get_type_name(self) -> str:
        """Returns a name for messages."""
        return "torchinstruments"

    def normalize_path(self, path: str) -> str:
        """Returns the path as it is."""
        return path

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Opens a file for reading at any position (offline, Arrow's threads)."""
        source, _, below = path.partition("/")
        storage = self._storages[int(source)]
        if storage.is_local:
            # Arrow's own file: read without the interpreter's lock, and closed when the scan lets go of it.
            return pa.OSFile(os.path.join(storage.url, below))
        return pa.PythonFile(storage.open_input(below), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Opens a file for reading from its beginning (offline, Arrow's threads)."""
        return self.open_input_file(path)

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        """Returns that each path is a file: only listed files are asked for."""
        return [fs.FileInfo(path, fs.FileType.File) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """Refuses: files are named, never searched for."""
        raise NotImplementedError(f"nothing is listed below {selector.base_dir}")

    def create_dir(self, path: str, recursive: bool) -> None:  # noqa: ARG002, FBT001
        """Refuses: a reader writes nothing."""
        raise _read_only(path)

    def delete_dir(self, path: str) -> None:
        """Refuses: a reader writes nothing."""
        raise _read_only(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Refuses: a reader writes nothing."""
        raise _read_only(path)

    def delete_root_dir_contents(self) -> None:
        """Refuses: a reader writes nothing."""
        raise _read_only("/")

    def delete_file(self, path: str) -> None:
        """Refuses: a reader writes nothing."""
        raise _read_only(path)

    def move(self, src: str, dest: str) -> None:
        """Refuses: a reader writes nothing."""
        raise _read_only(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        """Refuses: a reader writes nothing."""
        raise _read_only(src, dest)

    def open_output_stream(self, path: str, metadata: dict[str, str]) -> pa.NativeFile:  # noqa: ARG002
        """Refuses: a reader writes nothing."""
        raise _read_only(path)

    def open_append_stream(self, path: str, metadata: dict[str, str]) -> pa.NativeFile:  # noqa: ARG002
        """Refuses: a reader writes nothing."""
        raise _read_only(path)


def _read_only(*paths: str) -> PermissionError:
    return PermissionError(f"a run is only read: {', '.join(paths)}")
