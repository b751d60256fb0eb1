"""Attempts on their way to the sinks: some wait for what the host does not know yet of them.

Attempts that wait long for their end, as while a checkpoint is saved, are fetched from whoever counts them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torchinstruments.records import AttemptRecord, ClosedAttempt
from torchinstruments.sinks.outbox import Attempts

__all__ = ["Overdue", "WaitingAttempts"]

_MAX_HELD = 4_096

Overdue = Callable[[float], Sequence[ClosedAttempt]]


class WaitingAttempts:
    """Keeps attempts in their order until they are complete, or waited for long enough (writer thread).

    Args:
        patience_s: How long they wait.
        fail: Takes errors, as (probe, where, error).
    """

    def __init__(self, patience_s: float, fail: Callable[[str, str, BaseException], None]) -> None:
        self._patience_s = patience_s
        self._fail = fail
        self._held: deque[tuple[Attempts, float]] = deque()
        self.overdue: Overdue | None = None
        """Returns the attempts that have waited long for their end."""

    def put(self, item: Attempts) -> None:
        """Takes the attempts of a window."""
        _are_complete(item)
        self._held.append((item, time.monotonic() + self._patience_s))

    def fetch_overdue(self) -> None:
        """Fetches attempts that wait for their end, behind those that ended; they have waited enough."""
        if self.overdue is None:
            return
        try:
            records = self.overdue(time.perf_counter())
        except Exception as error:  # noqa: BLE001 - what was put goes on its way
            self.overdue = None
            self._fail("optimizer", "", error)
            return
        if records:
            item = Attempts(tuple(records))
            _are_complete(item)
            self._held.append((item, time.monotonic()))

    def take_due(self, *, everything: bool) -> Iterator[tuple[AttemptRecord, ...]]:
        """Takes out the attempts that are complete, or waited for long enough, in their order.

        Args:
            everything: Whether none waits any longer.
        """
        while self._held:
            item, until_s = self._held[0]
            is_due = everything or len(self._held) > _MAX_HELD or time.monotonic() >= until_s
            if not is_due and not _are_complete(item):
                return
            self._held.popleft()
            yield tuple([self._resolve_attempt(attempt) for attempt in item.records])

    def _resolve_attempt(self, attempt: ClosedAttempt) -> AttemptRecord:
        """Returns an attempt's whole record, or what the host knew of it where a device failed."""
        try:
            return attempt.resolve()
        except BaseException as error:  # noqa: BLE001 - whatever a device did, the row is kept
            self._fail("optimizer", "", error)
            return attempt.record


def _are_complete(item: Attempts) -> bool:
    """Returns whether all attempts are; each is asked, for one that is not keeps what is known so far."""
    try:
        complete = [attempt.is_complete() for attempt in item.records]
    except Exception:  # noqa: BLE001 - what is wrong is told when the record itself is asked for
        return True
    return all(complete)
