"""The seam between rows and the place where they become durable."""

from dataclasses import dataclass
from typing import Protocol

from torchinstruments.store.manifest import TableState

__all__ = ["PartTarget", "TargetState"]


@dataclass(frozen=True, slots=True)
class TargetState:
    """What a target knows of its own progress.

    Attributes:
        tables: State per table.
        last_error: Text of the last failure to write or upload, ``""`` while all is well.
    """

    tables: dict[str, TableState]
    last_error: str = ""


class PartTarget(Protocol):
    """Takes encoded parts and documents of one process; a local folder or the spool.

    Attributes:
        direct: True where a written part is at once where readers look; False for the spool.
    """

    @property
    def direct(self) -> bool:
        """Whether a written part is at once where readers look."""
        ...

    def write_part(self, table: str, num_rows: int, data: bytes) -> None:
        """Makes one part durable: temporary name, fsync, rename (writer thread).

        Args:
            table: One of `layout.TABLES`.
            num_rows: Rows in it.
            data: An encoded Parquet file.

        Raises:
            OSError: It is not durable; the caller keeps or drops the rows and counts them.
        """
        ...

    def write_document(self, name: str, data: bytes) -> None:
        """Replaces ``process-*.json``, ``modules-*.json`` or another document, by base name (writer thread).

        Raises:
            OSError: The old document, if any, still stands.
        """
        ...

    def state(self) -> TargetState:
        """Returns progress so far (writer thread)."""
        ...

    def require_in_place(self) -> None:
        """Makes again what somebody removed under this process (writer thread).

        Raises:
            OSError: Something was removed since the last call, and what is lost; or it cannot be made again.
        """
        ...

    def keep_alive(self) -> None:
        """Sees to it that whatever carries parts further is alive (writer thread, about every 30 s)."""
        ...

    def finish(self, timeout_s: float) -> bool:
        """Waits until every part is where readers look (closing thread).

        Returns:
            False where something still lies in the spool after `timeout_s` seconds.
        """
        ...
