"""Attempts that the program marks itself, with ``session.step(...)``: counted exactly, and compared."""

from collections.abc import Mapping, Sequence

from torchinstruments.records import ClosedAttempt, Outcome

__all__ = ["Blocks"]


class Blocks:
    """What became of the blocks of one session."""

    def __init__(self) -> None:
        self._counts = {"attempts": 0, "accepted": 0, "skipped": 0, "unknown": 0}
        self._declared = 0
        self._num_mismatches = 0
        self._first_mismatch: Mapping[str, int] | None = None

    @property
    def counters(self) -> Mapping[str, int]:
        """Blocks, and what became of them."""
        return {f"explicit_{name}": number for name, number in self._counts.items()}

    @property
    def micro_batches(self) -> Mapping[str, object]:
        """How often another number of micro-batches came than a block had declared."""
        return {
            "declared": self._declared,
            "mismatches": self._num_mismatches,
            "first_mismatch": self._first_mismatch,
        }

    def ended(self, closed: Sequence[ClosedAttempt], declared: int | None, *, failed: bool) -> None:
        """Takes the end of a block (training thread).

        Args:
            closed: Its attempts, one an optimizer.
            declared: How many micro-batches the caller had meant; None where nothing was said.
            failed: Whether an exception left it.
        """
        self._counts["attempts"] += 1
        outcomes = {one.resolve().outcome for one in closed}
        if outcomes == {Outcome.APPLIED}:
            self._counts["accepted"] += 1
        elif Outcome.SKIPPED in outcomes:
            self._counts["skipped"] += 1
        else:
            self._counts["unknown"] += 1
        if declared is None or not closed:
            return
        self._declared = declared
        record = closed[0].record
        if record.micro_batches != declared and not failed:
            self._num_mismatches += 1
            if self._first_mismatch is None:
                self._first_mismatch = {
                    "attempt": record.attempt,
                    "declared": declared,
                    "seen": record.micro_batches,
                }
