"""A writer on a target in memory, for the tests of what it makes durable."""

import io
from typing import Any

import pyarrow.parquet as pq

from torchinstruments.config import HistoryConfig
from torchinstruments.records import Counters
from torchinstruments.store.manifest import Manifest, decode_manifest
from torchinstruments.store.writer import RankWriter
from unit.store.material import (
    HandClock,
    MemoryTarget,
    claim,
    identity,
)

__all__ = ["Rig"]


class Rig:
    """A writer on a target in memory, and the clock that it reads."""

    def __init__(
        self,
        buffer_rows: int = 1000,
        generation: int = 0,
        spool_path: str = "",
        max_bytes: int = 2**26,
    ) -> None:
        self.target = MemoryTarget()
        self.clock = HandClock()
        self.reported: list[tuple[str, str]] = []
        self.training = Counters()
        self.writer = RankWriter(
            identity(),
            claim(generation),
            HistoryConfig(buffer_rows=buffer_rows),
            self.target,
            counters=self.count,
            report=self.report,
            clock=self.clock,
            spool_path=spool_path,
            max_waiting_bytes=max_bytes,
        )

    def count(self) -> Counters:
        """Returns what the training side counted."""
        return self.training

    def report(self, probe: str, error: Exception) -> None:
        """Keeps a report."""
        self.reported.append((probe, str(error)))

    def pass_time(self, seconds: int) -> None:
        """Lets time pass, a tick a second."""
        for _ in range(seconds):
            self.clock.now_s += 1
            self.writer.tick()

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Returns all durable rows of a table."""
        return [row for data in self.target.of(table) for row in pq.read_table(io.BytesIO(data)).to_pylist()]

    def manifest(self) -> Manifest:
        """Returns the newest manifest."""
        return decode_manifest(self.target.last("process-"))

    def num_manifests(self) -> int:
        """Returns how often the manifest was written."""
        return sum(name.startswith("process-") for name, _ in self.target.documents)
