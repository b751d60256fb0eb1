"""Where the training thread leaves what it observed, and what telemetry did and cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchinstruments.records.attempts import ClosedAttempt, DeferredFingerprints
from torchinstruments.records.samples import DeferredSample, ModuleRecord

__all__ = [
    "ChecksRecord",
    "Counters",
    "ErrorRecord",
    "Outbox",
]


@dataclass(frozen=True, slots=True)
class ChecksRecord:
    """What a session of checks has found so far: an entry of ``checks-<process>.json``.

    Attributes:
        session: Ordinal of the session among those of its observer.
        report: Its report as strict JSON; a later one of the same session replaces it.
    """

    session: int
    report: bytes


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One error of collection, as the manifest keeps the last hundred.

    Attributes:
        probe: ``sampler``, ``selector``, ``reducer``, ``forward``, ``gradient``, ``optimizer``,
            ``loss_scale``, ``step``, ``clock``, ``histogram``, ``fingerprint``, ``alignment``, ``tracing``,
            ``bypassed``, ``scripted_module``, ``compiled``, ``sink``, ``storage``, or ``process`` where
            that was asked to end by a signal, whose name is the type, or closed its run amid an exception.
        module: Layer, where there is one.
        type: Class name of the exception.
        message: Its text, at most 500 characters.
        at: ISO 8601, UTC.
    """

    probe: str
    module: str
    type: str
    message: str
    at: str = field(default="")


@dataclass(frozen=True, slots=True)
class Counters:
    """What telemetry did and cost in one process so far; stands in its manifest too.

    Attributes:
        forwards: Root forwards seen.
        samples: Root forwards measured.
        missed: Samples that other ranks took and this one could not.
        rows: Rows of ``history`` that are durable.
        rows_dropped: Rows of ``history`` that were given up, with what they were dropped for in the errors.
        parts: Part files written, of all tables.
        bytes: Their size.
        collection_s: Seconds of the training thread.
        writer_s: Seconds of the writer thread's own work.
        errors: Errors by probe.
        histograms_missing: Histograms that were due and could not be had of their tensors, by reason; one
            that failed by itself is an error.
    """

    forwards: int = 0
    samples: int = 0
    missed: int = 0
    rows: int = 0
    rows_dropped: int = 0
    parts: int = 0
    bytes: int = 0
    collection_s: float = 0.0
    writer_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    histograms_missing: Mapping[str, int] = field(default_factory=dict)


class Outbox(Protocol):
    """Where the training thread leaves what it observed. Every method returns at once and never raises.

    The queue behind it is bounded; what does not fit is dropped and counted.
    """

    def put_sample(self, sample: DeferredSample) -> None:
        """Takes one delivery of a sample (training thread, hot path)."""
        ...

    def put_attempts(self, attempts: Sequence[ClosedAttempt]) -> None:
        """Takes the attempts of a window that closed (training thread, hot path)."""
        ...

    def put_fingerprints(self, fingerprints: DeferredFingerprints) -> None:
        """Takes the fingerprints of an attempt (training thread, hot path)."""
        ...

    def put_modules(self, modules: tuple[ModuleRecord, ...]) -> None:
        """Takes the catalog, anew whenever it changed (training thread)."""
        ...

    def put_checks(self, checks: ChecksRecord) -> None:
        """Takes what a session of checks has found so far (training thread)."""
        ...

    def put_error(self, error: ErrorRecord) -> None:
        """Takes an error of collection (training thread)."""
        ...
