"""Parts straight into a local folder: durable there is where readers look.

A folder that somebody removes under the running job comes back with what names the run and its process; the
parts that were in it are gone, which the manifest tells by their numbers.
"""

import os
from collections.abc import Callable

from torchinstruments.errors import RunFormatError
from torchinstruments.store import layout
from torchinstruments.store.filesystem import Storage
from torchinstruments.store.manifest import TableState
from torchinstruments.store.target import TargetState

__all__ = ["LocalTarget"]


class LocalTarget:
    """Writes the parts and documents of one process into its rank's folder (a `PartTarget`).

    Args:
        storage: The folder of the run.
        folder: The rank's folder in it, ``""`` for the run's own.
        process: 8 hex digits.
        restore: Makes again what belongs to the run as a whole, where the folder was removed; None where
            nothing of that is wanted.
    """

    def __init__(
        self, storage: Storage, folder: str, process: str, *, restore: Callable[[], None] | None = None
    ) -> None:
        self._restore = restore
        self._documents: dict[str, bytes] = {}
        self._was_removed = False
        self._storage = storage
        self._folder = folder
        self._process = process
        self._tables: dict[str, TableState] = {}
        self._doubtful: set[str] = set()
        self._last_error = ""

    @property
    def direct(self) -> bool:
        """Always True."""
        return True

    def write_part(self, table: str, num_rows: int, data: bytes) -> None:
        """Makes one part durable under the table's next number (writer thread).

        A number is used up only by a part that is there: a failed write is tried again under the same one.

        Args:
            table: One of `layout.TABLES`.
            num_rows: Rows in it.
            data: An encoded Parquet file.

        Raises:
            OSError: It is not durable.
        """
        self._mend()
        state = self._tables.get(table, TableState())
        path = layout.part_file(self._folder, table, self._process, state.next_part)
        try:
            if path in self._doubtful:
                # An earlier try failed late and may have left its file; its rows come again in this one.
                self._storage.replace(path, data)
            else:
                while not self._storage.create(path, data):
                    # Somebody else's file: never written over, and counted as a number that was not used.
                    state = _skipped(state)
                    path = layout.part_file(self._folder, table, self._process, state.next_part)
        except OSError as error:
            self._doubtful.add(path)
            self._tables[table] = state
            self._last_error = f"{type(error).__name__}: {error}"
            raise
        self._doubtful.discard(path)
        self._last_error = ""
        self._tables[table] = TableState(
            next_part=state.next_part + 1,
            missing=state.missing,
            rows=state.rows + num_rows,
            bytes=state.bytes + len(data),
        )

    def write_document(self, name: str, data: bytes) -> None:
        """Replaces a document in the rank's folder, by base name (writer thread).

        Raises:
            OSError: The old document, if any, still stands.
        """
        self._mend()
        try:
            self._storage.replace(self._path(name), data)
        except OSError as error:
            self._last_error = f"{type(error).__name__}: {error}"
            raise
        self._documents[name] = data

    def state(self) -> TargetState:
        """Returns progress so far (writer thread)."""
        return TargetState(tables=dict(self._tables), last_error=self._last_error)

    def require_in_place(self) -> None:
        """Makes the folder again where it was removed (writer thread).

        Raises:
            OSError: It was removed since the last call; whatever was in it is lost.
        """
        self._mend()
        if self._was_removed:
            self._was_removed = False
            raise OSError(
                f"the folder {self._storage.url} was removed while this process wrote to it; it was made "
                f"again, and the parts that were in it are lost"
            )

    def keep_alive(self) -> None:
        """Does nothing: parts are where readers look."""

    def finish(self, timeout_s: float) -> bool:  # noqa: ARG002 - part of the seam
        """Returns True: every written part is where readers look (closing thread)."""
        return True

    def _mend(self) -> None:
        """Restores what makes the folder a run's, and the documents of this process, where they are gone."""
        if self._restore is None or not self._documents:
            return
        names = (layout.RUN_FILE, *[self._path(name) for name in self._documents])
        if all(os.path.lexists(os.path.join(self._storage.url, name)) for name in names):
            return
        try:
            self._restore()
        except RunFormatError as error:
            raise OSError(str(error)) from error
        for name, data in self._documents.items():
            self._storage.replace(self._path(name), data)
        self._was_removed = True

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name


def _skipped(state: TableState) -> TableState:
    return TableState(
        next_part=state.next_part + 1,
        missing=(*state.missing, state.next_part)[:100],
        rows=state.rows,
        bytes=state.bytes,
    )
