"""Parts straight into a local folder: durable there is where readers look."""

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
    """

    def __init__(self, storage: Storage, folder: str, process: str) -> None:
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
        try:
            self._storage.replace(f"{self._folder}/{name}" if self._folder else name, data)
        except OSError as error:
            self._last_error = f"{type(error).__name__}: {error}"
            raise

    def state(self) -> TargetState:
        """Returns progress so far (writer thread)."""
        return TargetState(tables=dict(self._tables), last_error=self._last_error)

    def keep_alive(self) -> None:
        """Does nothing: nobody carries parts further (writer thread)."""

    def finish(self, timeout_s: float) -> bool:  # noqa: ARG002 - part of the seam
        """Returns True: every written part is where readers look (closing thread)."""
        return True


def _skipped(state: TableState) -> TableState:
    return TableState(
        next_part=state.next_part + 1,
        missing=(*state.missing, state.next_part)[:100],
        rows=state.rows,
        bytes=state.bytes,
    )
