"""What a session found, as an immutable record with a plain and a printed form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torchinstruments.checks.findings import Finding, Severity, Unavailable, plain

__all__ = ["SCHEMA_VERSION", "CheckReport", "frozen"]

SCHEMA_VERSION = 1
"""Of `CheckReport.to_dict`."""

_MAX_PRINTED = 10


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Everything that a session knows at one moment.

    Attributes:
        findings: Gravest first.
        checks_run: Names of the checks that have looked at something.
        unavailable: What was asked for and could not be looked at, a check that never ran included.
        disclosures: What the session was given, and what it saw of the model: facts that no finding repeats.
        ledgers: ``scale``, ``clip`` and ``watchdog``.
        coverage: Which parameters are watched.
        counters: What was counted.
        finalized_reason: ``on_demand``, ``scope_exit``, ``exception_exit`` or ``violation``; in the document
            that an observer keeps also ``running`` or ``detached``.
        schema_version: Of `to_dict`.
    """

    findings: tuple[Finding, ...]
    checks_run: tuple[str, ...]
    unavailable: tuple[Unavailable, ...]
    disclosures: Mapping[str, Any]
    ledgers: Mapping[str, Any]
    coverage: Mapping[str, Any]
    counters: Mapping[str, Any]
    finalized_reason: str = "on_demand"
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain values that strict JSON can hold."""
        return {
            "schema_version": self.schema_version,
            "findings": [finding.to_dict() for finding in self.findings],
            "checks_run": list(self.checks_run),
            "unavailable": [entry.to_dict() for entry in self.unavailable],
            "disclosures": plain(self.disclosures),
            "ledgers": plain(self.ledgers),
            "coverage": plain(self.coverage),
            "counters": plain(self.counters),
            "finalized_reason": self.finalized_reason,
        }

    def to_json(self, *, indent: int | None = 1) -> str:
        """Returns `to_dict` as strict JSON.

        Args:
            indent: Spaces a level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True, allow_nan=False)

    def __str__(self) -> str:
        """Returns a summary for people: what was found, what ran, what could not be looked at."""
        counts = dict.fromkeys(Severity, 0)
        for finding in self.findings:
            counts[finding.severity] += 1
        found = ", ".join(f"{number} {severity.value}" for severity, number in counts.items())
        lines = [f"CheckReport ({self.finalized_reason}): {found}"]
        groups: dict[tuple[Severity, str, tuple[str, ...], int], list[Finding]] = {}
        for finding in self.findings:
            key = finding.severity, finding.code, finding.names, finding.num_names
            groups.setdefault(key, []).append(finding)
        kept = list(groups.values())
        lines += [_line(group) for group in kept[:_MAX_PRINTED]]
        if len(kept) > _MAX_PRINTED:
            num_left = sum(len(group) for group in kept[_MAX_PRINTED:])
            lines.append(f"  ... and {num_left} more in .findings")
        for kind, number in self.counters.get("truncated_findings", {}).items():
            lines.append(f"  ... and {number} of {kind} that were counted and not kept")
        lines.append(f"  ran: {', '.join(self.checks_run) or 'no check'}")
        lines += [
            f"  unavailable: {entry.check}: {entry.reason}" for entry in self.unavailable[:_MAX_PRINTED]
        ]
        if len(self.unavailable) > _MAX_PRINTED:
            lines.append(f"  ... and {len(self.unavailable) - _MAX_PRINTED} more in .unavailable")
        return "\n".join(lines)


def _line(group: Sequence[Finding]) -> str:
    """Returns a line for findings of one kind and the same names: how many, and from when to when."""
    first = group[0]
    where = ", ".join(first.names[:3]) + (", ..." if first.num_names > 3 else "")
    when = [
        _span(name, [getattr(finding.moment, name) for finding in group])
        for name in ("attempt", "global_step")
    ]
    facts = ", ".join([*([f"{len(group)} times"] if len(group) > 1 else []), *filter(None, when)])
    told = f"first: {first.message}" if len(group) > 1 else first.message
    return f"  [{first.severity.value}] {first.code} {where}: {told}" + (f" ({facts})" if facts else "")


def _span(name: str, values: Sequence[int | None]) -> str:
    """Returns the first and the last of some numbers; nothing where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{name} {known[0]}" if known[0] == known[-1] else f"{name} {known[0]} to {known[-1]}"


def frozen(value: object) -> object:
    """Returns plain nested values of which nothing can be changed."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: frozen(entry) for key, entry in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple([frozen(entry) for entry in value])
    return value
