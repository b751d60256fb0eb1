"""Sinks that keep what they are given, and samples that may fail, for the tests of the writer thread."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from torchinstruments.records import (
    AttemptRecord,
    ErrorRecord,
    FingerprintRecord,
    ModuleRecord,
    RunRecord,
    Sample,
)
from unit.store.material import fingerprint, forward

__all__ = [
    "Deferred",
    "DeferredRows",
    "FailingSink",
    "KeepingSink",
    "PlainSink",
    "WAIT_S",
    "raise_value_error",
]


WAIT_S = 30.0


@dataclass
class Deferred:
    """A sample that may fail, or wait, when it is resolved."""

    ordinal: int = 0
    num_scalars: int = 1
    before: Callable[[], object] | None = None

    def resolve(self) -> Sample:
        """Returns a sample without measurements."""
        if self.before is not None:
            self.before()
        return forward(self.ordinal)


@dataclass
class DeferredRows:
    """Fingerprints that may fail when they are resolved."""

    before: Callable[[], None] | None = None
    num_rows: int = 2

    def resolve(self) -> list[FingerprintRecord]:
        """Returns two rows."""
        if self.before is not None:
            self.before()
        return [fingerprint(0), fingerprint(0, "0.bias", 5)]


@dataclass
class PlainSink:
    """Keeps what it is given; the protocol that anyone may implement."""

    seen: list[tuple[object, ...]] = field(default_factory=list)

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Keeps the run's id and the number of layers."""
        self.seen.append(("initialize", run.run_id, len(modules)))

    def ordinals(self) -> list[object]:
        """Returns the ordinals of the samples that came."""
        return [entry[1] for entry in self.seen if entry[0] == "observe"]

    def observe(self, sample: Sample) -> None:
        """Keeps the ordinal, and the thread's name."""
        self.seen.append(("observe", sample.ordinal, threading.current_thread().name))

    def close(self) -> None:
        """Keeps that it was closed."""
        self.seen.append(("close",))


@dataclass
class KeepingSink(PlainSink):
    """Keeps everything else too."""

    errors: list[ErrorRecord] = field(default_factory=list)
    arrived: bool = True

    def attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Keeps the attempts' numbers."""
        self.seen.append(("attempts", tuple(record.attempt for record in records)))

    def fingerprints(self, records: Sequence[FingerprintRecord]) -> None:
        """Keeps the names and digests of the tensors."""
        self.seen.append(("fingerprints", tuple((record.tensor, record.digest) for record in records)))

    def modules(self, modules: Sequence[ModuleRecord]) -> None:
        """Keeps the number of layers."""
        self.seen.append(("modules", len(modules)))

    def error(self, error: ErrorRecord) -> None:
        """Keeps the error."""
        self.errors.append(error)

    def tick(self) -> None:
        """Does nothing."""

    def flush(self) -> bool:
        """Keeps that it was flushed."""
        self.seen.append(("flush",))
        return self.arrived

    def finish(self, timeout_s: float, *, complete: bool) -> bool:
        """Keeps how it was finished."""
        assert timeout_s >= 0
        self.seen.append(("finish", complete))
        return self.arrived


class FailingSink(PlainSink):
    """Fails at one of its methods."""

    def __init__(self, where: str, error: BaseException | None = None) -> None:
        super().__init__()
        self.where = where
        self.error = RuntimeError(f"broken {where}") if error is None else error

    @override
    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Fails where it should."""
        self.fail("initialize")
        super().initialize(run, modules)

    @override
    def observe(self, sample: Sample) -> None:
        """Fails where it should."""
        self.fail("observe")
        super().observe(sample)

    @override
    def close(self) -> None:
        """Fails where it should."""
        self.fail("close")
        super().close()

    def fail(self, where: str) -> None:
        """Raises in the method that was chosen."""
        if where == self.where:
            raise self.error


def raise_value_error() -> None:
    """A device that lost a copy."""
    raise ValueError("the copy failed")
