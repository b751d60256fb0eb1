"""The run's folder as a sink: tables, documents and histograms of one process, and a copy of its history."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchinstruments.records import (
    AttemptRecord,
    ChecksRecord,
    ErrorRecord,
    FingerprintRecord,
    ModuleRecord,
    RunRecord,
    Sample,
)
from torchinstruments.sinks.event_files import HistogramFiles, Missing
from torchinstruments.store.derived import write_history_copy
from torchinstruments.store.writer import RankWriter

__all__ = ["RankFolderSink"]

FINISH_TIMEOUT_S = 60.0
"""How long `RankFolderSink.close` waits for what carries data further."""


_HISTOGRAM = "histogram"
_MAX_LISTED = 1000


class RankFolderSink:
    """Hands scalars to a `RankWriter`, and histograms to event files of TensorBoard.

    A histogram that failed is an error under the probe ``histogram`` in the manifest; the same reason for the
    same tensor is listed once and counted every time. One that is missing since its tensor has nothing to
    show is counted by its reason, beside the errors.

    Args:
        writer: Writes the tables and documents of this process.
        copy_folder: The rank's folder, where it is local and a ``history.parquet`` shall lie in it after an
            explicit close; else None.
        histograms: Takes the histograms of this process; None where it keeps none.
        report: Told of each failure to write them, as ``("storage", error)``.
    """

    def __init__(
        self,
        writer: RankWriter,
        copy_folder: Path | None = None,
        *,
        histograms: HistogramFiles | None = None,
        report: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self._writer = writer
        self._copy_folder = copy_folder
        self._histograms = histograms
        self._report = report
        self._listed: set[tuple[str, str, str, str]] = set()
        self._run_id = ""
        self._finished: bool | None = None

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Writes manifest and catalog for the first time (writer thread)."""
        self._run_id = run.run_id
        self._writer.start(run, modules)

    def observe(self, sample: Sample) -> None:
        """Takes one delivery of a sample (writer thread)."""
        self._writer.add_sample(sample)
        if self._histograms is not None and sample.histograms:
            for missing in self._histograms.write(sample.ordinal, sample.histograms):
                self._note_missing(missing)
            failure = self._histograms.take_failure()
            if failure is not None and self._report is not None:
                self._report("storage", failure)

    def attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Takes the attempts of a window that closed (writer thread)."""
        self._writer.add_attempts(records)

    def fingerprints(self, records: Sequence[FingerprintRecord]) -> None:
        """Takes the fingerprints of an attempt (writer thread)."""
        self._writer.add_fingerprints(records)

    def modules(self, modules: Sequence[ModuleRecord]) -> None:
        """Takes the catalog, anew whenever it changed (writer thread)."""
        self._writer.set_modules(modules)

    def checks(self, checks: ChecksRecord) -> None:
        """Writes what a session of checks has found so far (writer thread)."""
        self._writer.write_checks(checks)

    def error(self, error: ErrorRecord) -> None:
        """Takes an error for the manifest (writer thread)."""
        self._writer.add_error(error)

    def tick(self) -> None:
        """Does what is due (writer thread)."""
        if self._histograms is not None:
            self._try(self._histograms.tick)
        self._writer.tick()

    def flush(self) -> bool:
        """Makes durable what was taken so far, and tells whether it is (writer thread)."""
        durable = self._histograms is None or self._try(self._histograms.flush)
        return self._writer.flush() and durable

    def close(self) -> None:
        """Finishes completely, within `FINISH_TIMEOUT_S` (writer thread)."""
        self.finish(FINISH_TIMEOUT_S, complete=True)

    def finish(self, timeout_s: float, *, complete: bool) -> bool:
        """Stores what is left and marks the manifest closed; see `TelemetrySink.finish` (writer thread)."""
        if self._finished is None:
            began_s = time.monotonic()
            complete_files = self._histograms is None or self._try(self._histograms.close)
            # At the end of the interpreter durable is enough: what carries parts further outlives it.
            self._finished = self._writer.close(timeout_s, complete=complete) and complete_files
            left_s = timeout_s - (time.monotonic() - began_s)
            if complete and self._copy_folder is not None and left_s > 0:
                write_history_copy(self._copy_folder, self._run_id, timeout_s=left_s)
        return self._finished

    def _try(self, function: Callable[[], None]) -> bool:
        """Has histograms made durable; a failure is noted, and rows go on."""
        try:
            function()
        except OSError as error:
            self._writer.add_error(ErrorRecord(_HISTOGRAM, "", type(error).__name__, str(error)))
            if self._report is not None:
                self._report("storage", error)
            return False
        return True

    def _note_missing(self, missing: Missing) -> None:
        code = missing.reason.partition(":")[0]
        if not missing.is_failure:
            self._writer.count_missing_histogram(code)
            return
        key = (missing.layer, missing.tensor_path, missing.name, code)
        listed = key not in self._listed and len(self._listed) < _MAX_LISTED
        if listed:
            self._listed.add(key)
        error = ErrorRecord(
            _HISTOGRAM, missing.layer, code, f"{missing.name} of {missing.tensor_path}: {missing.reason}"
        )
        self._writer.add_error(error, listed=listed)
