"""Reports in the folder of an observer: before a raise, at the end, and now and then while findings come."""

import time
from typing import TYPE_CHECKING

from torchinstruments.checks.findings import FindingStore
from torchinstruments.checks.report import CheckReport

if TYPE_CHECKING:
    from torchinstruments.checks.shared_attempts import SharedAttempts

__all__ = ["KeptReports"]

_KEPT_AT_MOST_EVERY_S = 60.0
_DURABLE_WITHIN_S = 10.0


class KeptReports:
    """Leaves reports with the observer of a session's model, where it has one.

    Args:
        store: Has what was found.
    """

    def __init__(self, store: FindingStore) -> None:
        self.shared: SharedAttempts | None = None
        """Where they go; None for nowhere."""
        self._store = store
        self._kept_s = 0.0
        self._num_kept = -1

    def is_due(self) -> bool:
        """Returns whether one is due: something new, at most once a minute (training thread, hot path)."""
        if self.shared is None or time.monotonic() - self._kept_s < _KEPT_AT_MOST_EVERY_S:
            return False
        return sum(self._store.num_findings().values()) != self._num_kept

    def keep(self, report: CheckReport) -> None:
        """Leaves a report (training thread)."""
        if self.shared is not None:
            self._kept_s = time.monotonic()
            self._num_kept = sum(self._store.num_findings().values())
            self.shared.keep(_encoded(report))

    def keep_durably(self, report: CheckReport) -> None:
        """Leaves a report, and waits until it is on storage (training thread, before a raise)."""
        if self.shared is not None and not self.shared.keep_durably(_encoded(report), _DURABLE_WITHIN_S):
            self._store.add_unavailable("session", "report_not_durable: the store did not answer in time")


def _encoded(report: CheckReport) -> bytes:
    return report.to_json(indent=None).encode()
