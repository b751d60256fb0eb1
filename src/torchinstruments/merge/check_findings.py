"""The section ``findings`` of ``result.json``: what training checks found, by code and rank.

A finding is one rank's own. Ranks are named, never counted into one another: where only some of the ranks
with checks saw a kind of finding, the others stand beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.store.checks import FoundChecks, SessionReport

__all__ = ["MAX_SHOWN", "MAX_SHOWN_RANKS", "CheckFindingsFold"]

MAX_SHOWN = 100
"""Kinds of findings, and of what was unavailable, that are shown; further ones are counted."""

MAX_SHOWN_RANKS = 16
"""Ranks of one kind of finding of which more than their number is shown."""

_SEVERITIES = ("critical", "warning", "info")
_MAX_NAMES = 20
_LAST = 2**63

_When = tuple[int, int, int]


@dataclass(slots=True)
class _OfRank:
    """One kind of finding on one rank.

    Attributes:
        when: Generation and attempt of the first, and the rank.
        process: Which process of the rank that was.
        num_findings: How many are in its reports.
        names: Parameters, at most `_MAX_NAMES`.
    """

    when: _When
    process: str
    num_findings: int = 0
    names: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Kind:
    """One kind of finding on all ranks.

    Attributes:
        first: The first of all, as its rank's report has it.
        when: Its generation, attempt and rank.
        ranks: Rank to what it saw.
    """

    first: Mapping[str, Any]
    when: _When
    ranks: dict[int, _OfRank] = field(default_factory=dict)


@dataclass(slots=True)
class _Unavailable:
    """What could not be looked at for one reason.

    Attributes:
        detail: What the lowest rank says behind the reason's code.
        names: The parameters that this rank means, at most `_MAX_NAMES`.
        ranks: Those that say so, ascending.
    """

    detail: str
    names: tuple[str, ...]
    ranks: dict[int, None] = field(default_factory=dict)


class CheckFindingsFold:
    """Takes the reports of all ranks, one rank after the other."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], _Kind] = {}
        self._unavailable: dict[tuple[str, str], _Unavailable] = {}
        self._run: dict[str, dict[int, None]] = {}
        self._ended: dict[str, dict[int, None]] = {}
        self._not_kept: dict[int, int] = {}
        self._with_checks: list[int] = []
        self._without_checks: list[int] = []

    def add_rank(self, rank: int, documents: Sequence[FoundChecks]) -> None:
        """Takes a rank's reports; ranks come in ascending order."""
        (self._with_checks if documents else self._without_checks).append(rank)
        for document in documents:
            for session in document.sessions:
                for finding in session.findings:
                    self._add_finding(rank, document, finding)
                self._add_session(rank, session)

    def record(self) -> dict[str, object]:
        """Returns the section."""
        kinds = sorted(self._kinds, key=self._order)
        unavailable = sorted(self._unavailable)
        return {
            "ranks_with_checks": ranks_text(self._with_checks),
            "ranks_without_checks": ranks_text(self._without_checks),
            "checks_run": {name: ranks_text(ranks) for name, ranks in sorted(self._run.items())},
            "finalized": {reason: ranks_text(ranks) for reason, ranks in sorted(self._ended.items())},
            "by_code": [self._kind(key, self._kinds[key]) for key in kinds[:MAX_SHOWN]],
            "codes_left_out": max(0, len(kinds) - MAX_SHOWN),
            "unavailable": [
                {
                    "check": check,
                    "reason": reason,
                    "detail": self._unavailable[check, reason].detail,
                    "names": list(self._unavailable[check, reason].names),
                    "ranks": ranks_text(self._unavailable[check, reason].ranks),
                }
                for check, reason in unavailable[:MAX_SHOWN]
            ],
            "unavailable_left_out": max(0, len(unavailable) - MAX_SHOWN),
            "findings_not_kept": sum(self._not_kept.values()),
            "ranks_with_findings_not_kept": ranks_text(self._not_kept),
        }

    def _add_session(self, rank: int, session: SessionReport) -> None:
        for entry in session.unavailable:
            code, _, detail = str(entry.get("reason", "")).partition(":")
            key = str(entry.get("check", "")), code
            if key not in self._unavailable:
                names = tuple([str(name) for name in entry.get("names", ())][:_MAX_NAMES])
                self._unavailable[key] = _Unavailable(detail.strip(), names)
            self._unavailable[key].ranks[rank] = None
        for name in session.checks_run:
            self._run.setdefault(name, {})[rank] = None
        if session.finalized_reason:
            self._ended.setdefault(session.finalized_reason, {})[rank] = None
        truncated = session.counters.get("truncated_findings")
        if isinstance(truncated, Mapping):
            lost = sum(number for number in truncated.values() if isinstance(number, int))
            if lost:
                self._not_kept[rank] = self._not_kept.get(rank, 0) + lost

    def _add_finding(self, rank: int, document: FoundChecks, finding: Mapping[str, Any]) -> None:
        key = str(finding.get("severity", "")), str(finding.get("code", "")), str(finding.get("check", ""))
        attempt = finding.get("attempt")
        # One without an attempt comes after those that have one.
        when = document.generation, attempt if isinstance(attempt, int) else _LAST, rank
        kind = self._kinds.setdefault(key, _Kind(finding, when))
        if when < kind.when:
            kind.first, kind.when = finding, when
        one = kind.ranks.setdefault(rank, _OfRank(when, document.process))
        one.num_findings += 1
        for name in finding.get("names", ()):
            if len(one.names) < _MAX_NAMES:
                one.names[str(name)] = None
        if when < one.when:
            one.when, one.process = when, document.process

    def _kind(self, key: tuple[str, str, str], kind: _Kind) -> dict[str, object]:
        severity, code, check = key
        earliest = sorted(kind.ranks.values(), key=_when)
        return {
            "code": code,
            "check": check,
            "severity": severity,
            "ranks": ranks_text(kind.ranks),
            "ranks_that_did_not_see_it": ranks_text(set(self._with_checks) - kind.ranks.keys()),
            "first": _place(kind.ranks[kind.when[2]]) | {"finding": kind.first},
            "by_rank": [
                _place(one) | {"num_findings": one.num_findings, "names": list(one.names)}
                for one in earliest[:MAX_SHOWN_RANKS]
            ],
            "ranks_left_out": max(0, len(earliest) - MAX_SHOWN_RANKS),
        }

    def _order(self, key: tuple[str, str, str]) -> tuple[int, _When, str, str]:
        severity, code, check = key
        grave = _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES)
        return grave, self._kinds[key].when, code, check


def _when(one: _OfRank) -> _When:
    return one.when


def _place(one: _OfRank) -> dict[str, object]:
    generation, attempt, rank = one.when
    return {
        "generation": generation,
        "attempt": None if attempt == _LAST else attempt,
        "rank": rank,
        "process": one.process,
    }
