"""The section ``findings`` of ``result.json``: what training checks found, by code and rank.

A finding is one rank's own. Ranks are named, never counted into one another: where only some of the ranks
with checks saw a kind of finding, the others stand beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchinstruments.store.checks import FoundChecks

__all__ = ["CheckFindingsFold"]

_SEVERITIES = ("critical", "warning", "info")
_MAX_NAMES = 20
_LAST = 2**63


@dataclass(slots=True)
class _OfRank:
    """One kind of finding on one rank.

    Attributes:
        num_findings: How many are in its reports.
        names: Parameters, at most `_MAX_NAMES`.
        first: The one of the lowest attempt.
        process: Which process of the rank that was.
    """

    num_findings: int = 0
    names: dict[str, None] = field(default_factory=dict)
    first: Mapping[str, Any] | None = None
    process: str = ""


class CheckFindingsFold:
    """Takes the reports of all ranks, one rank after the other."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], dict[int, _OfRank]] = {}
        self._unavailable: dict[tuple[str, str], dict[int, None]] = {}
        self._run: dict[str, dict[int, None]] = {}
        self._truncated: dict[int, int] = {}
        self._with_checks: list[int] = []
        self._without_checks: list[int] = []

    def add_rank(self, rank: int, documents: Sequence[FoundChecks]) -> None:
        """Takes a rank's reports; ranks come in ascending order."""
        (self._with_checks if documents else self._without_checks).append(rank)
        for document in documents:
            for session in document.sessions:
                for finding in session.findings:
                    self._add_finding(rank, document.process, finding)
                for entry in session.unavailable:
                    key = str(entry.get("check", "")), str(entry.get("reason", ""))
                    self._unavailable.setdefault(key, {})[rank] = None
                for name in session.checks_run:
                    self._run.setdefault(name, {})[rank] = None
                truncated = session.counters.get("truncated_findings")
                if isinstance(truncated, Mapping):
                    lost = sum(number for number in truncated.values() if isinstance(number, int))
                    self._truncated[rank] = self._truncated.get(rank, 0) + lost

    def record(self) -> dict[str, object]:
        """Returns the section."""
        return {
            "ranks_with_checks": self._with_checks,
            "ranks_without_checks": self._without_checks,
            "checks_run": {name: list(ranks) for name, ranks in sorted(self._run.items())},
            "by_code": [self._kind(key, self._kinds[key]) for key in sorted(self._kinds, key=self._order)],
            "unavailable": [
                {"check": check, "reason": reason, "ranks": list(ranks)}
                for (check, reason), ranks in sorted(self._unavailable.items())
            ],
            "findings_not_kept": {str(rank): number for rank, number in self._truncated.items() if number},
        }

    def _add_finding(self, rank: int, process: str, finding: Mapping[str, Any]) -> None:
        key = str(finding.get("severity", "")), str(finding.get("code", "")), str(finding.get("check", ""))
        one = self._kinds.setdefault(key, {}).setdefault(rank, _OfRank())
        one.num_findings += 1
        for name in finding.get("names", ()):
            if len(one.names) < _MAX_NAMES:
                one.names[str(name)] = None
        if one.first is None or _attempt(finding) < _attempt(one.first):
            one.first, one.process = finding, process

    def _kind(self, key: tuple[str, str, str], ranks: Mapping[int, _OfRank]) -> dict[str, object]:
        severity, code, check = key
        first_rank = min(ranks, key=lambda rank: (_attempt(ranks[rank].first), rank))
        return {
            "code": code,
            "check": check,
            "severity": severity,
            "ranks": list(ranks),
            "ranks_that_did_not_see_it": [rank for rank in self._with_checks if rank not in ranks],
            "first": {"rank": first_rank, "finding": ranks[first_rank].first},
            "by_rank": [
                {
                    "rank": rank,
                    "process": one.process,
                    "num_findings": one.num_findings,
                    "first_attempt": None if one.first is None else one.first.get("attempt"),
                    "names": list(one.names),
                }
                for rank, one in ranks.items()
            ],
        }

    def _order(self, key: tuple[str, str, str]) -> tuple[int, int, str, str]:
        severity, code, check = key
        grave = _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES)
        return grave, min(_attempt(one.first) for one in self._kinds[key].values()), code, check


def _attempt(finding: Mapping[str, Any] | None) -> int:
    """Returns the attempt of a finding; those without one come last."""
    attempt = None if finding is None else finding.get("attempt")
    return attempt if isinstance(attempt, int) else _LAST
