"""The run's folder as a sink: tables, manifest and catalog of one process, and a copy of its history."""

import time
from collections.abc import Sequence
from pathlib import Path

from torchinstruments.records import AttemptRecord, ErrorRecord, ModuleRecord, RunRecord, Sample
from torchinstruments.store.derived import write_history_copy
from torchinstruments.store.writer import RankWriter

__all__ = ["DirectorySink"]

FINISH_TIMEOUT_S = 60.0
"""How long `DirectorySink.close` waits for what carries data further."""


class DirectorySink:
    """Hands everything to a `RankWriter`.

    Args:
        writer: Writes the tables and documents of this process.
        copy_folder: The rank's folder, where it is local and a ``history.parquet`` shall lie in it after an
            explicit close; else None.
    """

    def __init__(self, writer: RankWriter, copy_folder: Path | None = None) -> None:
        self._writer = writer
        self._copy_folder = copy_folder
        self._run_id = ""
        self._finished: bool | None = None

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Writes manifest and catalog for the first time (writer thread)."""
        self._run_id = run.run_id
        self._writer.start(modules)

    def observe(self, sample: Sample) -> None:
        """Takes one delivery of a sample (writer thread)."""
        self._writer.add_sample(sample)

    def attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Takes the attempts of a window that closed (writer thread)."""
        self._writer.add_attempts(records)

    def modules(self, modules: Sequence[ModuleRecord]) -> None:
        """Takes the catalog, anew whenever it changed (writer thread)."""
        self._writer.set_modules(modules)

    def error(self, error: ErrorRecord) -> None:
        """Takes an error for the manifest (writer thread)."""
        self._writer.add_error(error)

    def tick(self) -> None:
        """Does what is due (writer thread)."""
        self._writer.tick()

    def flush(self) -> bool:
        """Makes durable what was taken so far, and tells whether it is (writer thread)."""
        return self._writer.flush()

    def close(self) -> None:
        """Finishes completely, within `FINISH_TIMEOUT_S` (writer thread)."""
        self.finish(FINISH_TIMEOUT_S, complete=True)

    def finish(self, timeout_s: float, *, complete: bool) -> bool:
        """Stores what is left and marks the manifest closed; see `TelemetrySink.finish` (writer thread)."""
        if self._finished is None:
            began_s = time.monotonic()
            # At the end of the interpreter durable is enough: what carries parts further outlives it.
            self._finished = self._writer.close(timeout_s, complete=complete)
            left_s = timeout_s - (time.monotonic() - began_s)
            if complete and self._copy_folder is not None and left_s > 0:
                write_history_copy(self._copy_folder, self._run_id, timeout_s=left_s)
        return self._finished
