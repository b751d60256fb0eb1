"""What became of every attempt: accepted, skipped, abandoned or unknown, and what the loss scale did.

Outcomes are those of the step ledger (`torchinstruments.ranks.scaled_attempt`): they come from the scaler and
not from counted calls or a scale that fell. An attempt is one try of one optimizer, so that of two optimizers
that share a scaler each has its own.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchinstruments.ranks.scaled_attempt import ScaledAttempt
from torchinstruments.records import AttemptRecord, ClosedAttempt, Outcome

__all__ = ["ScaleLedger"]

_MAX_PENDING = 1_024


@dataclass(slots=True)
class _Optimizer:
    """What became of the attempts of one optimizer."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    micro_batches: Counter[int] = field(default_factory=Counter)


class ScaleLedger:
    """Takes attempts as they end, and counts them once all of one is known.

    Args:
        on_record: Takes each record, complete.
    """

    def __init__(self, on_record: Callable[[AttemptRecord], None]) -> None:
        self._on_record = on_record
        self._pending: deque[ClosedAttempt] = deque()
        self._optimizers: dict[int, _Optimizer] = {}
        self._growth_events = 0
        self._backoff_events = 0
        self._scale_sets = 0
        self._windows_without_step = 0
        self._last_change: tuple[int, float | None, float | None] | None = None
        self._initial_scale: float | None = None
        self._current_scale: float | None = None

    def put(self, closed: Sequence[ClosedAttempt]) -> None:
        """Takes attempts that ended (training thread, hot path); it reads devices once in a thousand."""
        self._pending.extend(closed)
        if len(self._pending) > _MAX_PENDING:
            self.settle()

    def settle(self, *, final: bool = False) -> None:
        """Counts what is known by now (training thread); numbers of a device are fetched together.

        Args:
            final: Whether nothing more will come of attempts that are not complete.
        """
        waiting: deque[ClosedAttempt] = deque()
        while self._pending:
            closed = self._pending.popleft()
            if final or closed.is_complete() or len(self._pending) > _MAX_PENDING:
                self._count(closed)
            else:
                waiting.append(closed)
        self._pending = waiting

    def snapshot(self) -> dict[str, object]:
        """Returns the ledger as plain values, without attempts of which something is still to come."""
        total: Counter[Outcome] = Counter()
        micro_batches: Counter[int] = Counter()
        for one in self._optimizers.values():
            total.update(one.outcomes)
            micro_batches.update(one.micro_batches)
        return {
            "attempts": sum(total.values()),
            "accepted_steps": total[Outcome.APPLIED],
            "skipped_attempts": total[Outcome.SKIPPED],
            "abandoned_attempts": total[Outcome.ABANDONED],
            "unknown_attempts": total[Outcome.UNKNOWN],
            "pending_attempts": len(self._pending),
            "windows_without_step": self._windows_without_step,
            "growth_events": self._growth_events,
            "backoff_events": self._backoff_events,
            "scale_sets": self._scale_sets,
            "initial_scale": self._initial_scale,
            "current_scale": self._current_scale,
            "micro_batches_per_attempt": _spread(micro_batches),
            "optimizers": [
                {
                    "optimizer": ordinal,
                    "attempts": sum(one.outcomes.values()),
                    **{outcome.value: one.outcomes[outcome] for outcome in Outcome},
                    "micro_batches_per_attempt": _spread(one.micro_batches),
                }
                for ordinal, one in sorted(self._optimizers.items())
            ],
        }

    def _count(self, closed: ClosedAttempt) -> None:
        record = closed.resolve()
        if record.optimizer < 0:
            self._windows_without_step += 1
        else:
            one = self._optimizers.setdefault(record.optimizer, _Optimizer())
            one.outcomes[record.outcome] += 1
            one.micro_batches[record.micro_batches] += 1
            is_set = any(isinstance(one, ScaledAttempt) and one.is_scale_set for one in closed.amendments)
            self._follow_scale(record, is_set=is_set)
        self._on_record(record)

    def _follow_scale(self, record: AttemptRecord, *, is_set: bool) -> None:
        before, after = record.scale_before, record.scale_after
        if self._initial_scale is None:
            self._initial_scale = before
        if after is not None:
            self._current_scale = after
        elif before is not None:
            self._current_scale = before
        change = record.attempt, before, after
        if before is None or after is None or change == self._last_change:
            # Optimizers that share a scaler share its update.
            return
        self._last_change = change
        self._scale_sets += is_set
        self._growth_events += not is_set and after > before
        self._backoff_events += not is_set and after < before


def _spread(numbers: Counter[int]) -> dict[str, int | None]:
    """Returns the lowest and the highest of counted numbers, and the most frequent one."""
    if not numbers:
        return {"lowest": None, "highest": None, "most_frequent": None}
    return {
        "lowest": min(numbers),
        "highest": max(numbers),
        "most_frequent": numbers.most_common(1)[0][0],
    }
