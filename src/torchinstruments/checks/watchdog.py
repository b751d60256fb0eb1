"""Says that no step has been accepted for long, while that lasts. A pure state machine.

It counts attempts: tries at a step that the loss scaler skipped, in a row. Where no try is ever seen it
counts backwards instead, and says that it does: against the micro-batches of an attempt where those are
known, and against a large number where they are not. Of a backward that raised nothing tells that it did, so
that it counts too, unless something looks at gradients when backwards end.
"""

from dataclasses import dataclass

__all__ = ["FALLBACK_BACKWARDS", "FACTOR", "Trip", "Watchdog"]

FACTOR = 4
"""Attempts in a row without an accepted step that are still no cause to speak."""

FALLBACK_BACKWARDS = 256
"""Backwards without any attempt before it speaks, where nothing tells how many an attempt has."""


@dataclass(frozen=True, slots=True)
class Trip:
    """What a watchdog has to say.

    Attributes:
        unit: ``attempts`` or ``backwards``.
        number: How many there were since the last accepted step.
        threshold: How many are allowed.
    """

    unit: str
    number: int
    threshold: int


class Watchdog:
    """Counts what lies between accepted steps.

    Args:
        accumulation_steps: Backwards of an attempt, where the caller declared them.
        factor: Attempts that are allowed.
    """

    def __init__(self, accumulation_steps: int | None = None, factor: int = FACTOR) -> None:
        self._declared = accumulation_steps
        self._factor = factor
        self._least_threshold = min(factor, FALLBACK_BACKWARDS)
        self._attempts = 0
        self._backwards = 0
        self._largest = 0
        self._has_tripped = False
        self.num_trips = 0
        """How often it spoke."""

    def accepted(self) -> None:
        """Takes an accepted step, which arms it again (training thread, hot path)."""
        if self._backwards > self._largest:
            self._largest = self._backwards
        self._attempts = self._backwards = 0
        self._has_tripped = False

    def skipped(self) -> Trip | None:
        """Takes a skipped attempt (training thread, hot path)."""
        self._largest = max(self._largest, self._backwards)
        self._backwards = 0
        self._attempts += 1
        return self._trip("attempts", self._attempts, self._factor)

    def backward(self) -> Trip | None:
        """Takes a backward (autograd thread, hot path)."""
        self._backwards += 1
        if self._backwards <= self._least_threshold:
            return None
        return self._trip("backwards", self._backwards, self._threshold_of_backwards())

    def snapshot(self) -> dict[str, object]:
        """Returns its state as plain values."""
        return {
            "attempts_since_accepted": self._attempts,
            "attempts_threshold": self._factor,
            "backwards_since_attempt": self._backwards,
            "backwards_threshold": self._threshold_of_backwards(),
            "tripped": self._has_tripped,
            "num_trips": self.num_trips,
        }

    def _threshold_of_backwards(self) -> int:
        size = self._declared or self._largest
        return size * self._factor if size else FALLBACK_BACKWARDS

    def _trip(self, unit: str, number: int, threshold: int) -> Trip | None:
        if self._has_tripped or number <= threshold:
            return None
        self._has_tripped = True
        self.num_trips += 1
        return Trip(unit, number, threshold)
