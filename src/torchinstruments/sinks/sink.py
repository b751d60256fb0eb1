"""What a consumer of samples is, for anyone, and what the package's own consumers take beside samples."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torchinstruments.records import (
    AttemptRecord,
    ChecksRecord,
    Claim,
    ErrorRecord,
    FingerprintRecord,
    Identity,
    ModuleRecord,
    RunRecord,
    Sample,
)

__all__ = ["ChecksSink", "RankAware", "Sink", "TelemetrySink"]


class Sink(Protocol):
    """Takes resolved samples, in order, from the writer thread; never from the training thread.

    What a sink raises is counted and kept from training and from the other sinks.
    """

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Called once, before the first sample and after the ranks agreed on the run (writer thread)."""
        ...

    def observe(self, sample: Sample) -> None:
        """Takes one delivery of a sample: its forward, then each of its backwards (writer thread)."""
        ...

    def close(self) -> None:
        """Called once, after the last sample (writer thread)."""
        ...


@runtime_checkable
class RankAware(Protocol):
    """What a sink has beside `Sink` where it wants to know which rank of which run it serves."""

    def place(self, identity: Identity, claim: Claim) -> None:
        """Called once, before `Sink.initialize` (writer thread).

        Args:
            identity: Who this process is among the ranks.
            claim: What the ranks agreed on. The id of a sample is `Claim.first_sample_id` plus
                `Sample.ordinal`.
        """
        ...


@runtime_checkable
class TelemetrySink(Sink, Protocol):
    """A sink that also stores what stands around samples."""

    def attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Takes the attempts of a window that closed (writer thread)."""
        ...

    def fingerprints(self, records: Sequence[FingerprintRecord]) -> None:
        """Takes the fingerprints of an attempt (writer thread)."""
        ...

    def modules(self, modules: Sequence[ModuleRecord]) -> None:
        """Takes the catalog, anew whenever it changed (writer thread)."""
        ...

    def error(self, error: ErrorRecord) -> None:
        """Takes an error of collection or of another sink (writer thread)."""
        ...

    def tick(self) -> None:
        """Does what is due; called about once a second (writer thread)."""
        ...

    def flush(self) -> bool:
        """Makes durable what was taken so far, and tells whether it is (writer thread)."""
        ...

    def finish(self, timeout_s: float, *, complete: bool) -> bool:
        """Called once in place of `Sink.close` (writer thread).

        Args:
            timeout_s: How long to wait for what carries data further.
            complete: False at interpreter exit, where only what is needed is done.

        Returns:
            Whether everything is where readers look.
        """
        ...


@runtime_checkable
class ChecksSink(Protocol):
    """A sink that also stores what training checks have found."""

    def checks(self, checks: ChecksRecord) -> None:
        """Takes what a session of checks has found so far (writer thread)."""
        ...
