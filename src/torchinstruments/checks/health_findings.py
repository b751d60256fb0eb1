"""What an audit says of tensors, gradients or activations: evidence with a severity, and no verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from torchinstruments.checks.findings import MAX_NAMES, Severity, plain

__all__ = ["HealthFinding", "gravest_first", "headline", "printed"]

_MAX_PRINTED = 10


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One kind of thing that was seen.

    Attributes:
        code: Stable name of the kind.
        severity: How grave the evidence is.
        message: One sentence.
        names: Tensors, modules or sites that show it, at most 20; the rows have all.
        num_names: How many there are.
        values: Numbers by name, of those in ``names``; None for one that is not finite.
        remedy: What can be done about it.
    """

    code: str
    severity: Severity
    message: str
    names: tuple[str, ...] = ()
    num_names: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_names", max(self.num_names, len(self.names)))
        object.__setattr__(self, "names", tuple(self.names[:MAX_NAMES]))
        kept = {
            name: MappingProxyType(dict(value)) for name, value in self.values.items() if name in self.names
        }
        object.__setattr__(self, "values", MappingProxyType(kept))

    def to_dict(self) -> dict[str, object]:
        """Returns it as plain values that strict JSON can hold."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(self)}


def gravest_first(findings: Sequence[HealthFinding]) -> tuple[HealthFinding, ...]:
    """Returns findings in the order of their severity."""
    order = {severity: rank for rank, severity in enumerate(Severity)}
    return tuple(sorted(findings, key=lambda finding: order[finding.severity]))


def headline(findings: Sequence[HealthFinding]) -> str:
    """Returns how many findings there are of each severity."""
    counts = dict.fromkeys(Severity, 0)
    for finding in findings:
        counts[finding.severity] += 1
    return ", ".join(f"{number} {severity.value}" for severity, number in counts.items())


def printed(title: str, findings: Sequence[HealthFinding], further: Sequence[str]) -> str:
    """Returns a summary for people.

    Args:
        title: Its first line, before the counts.
        findings: Gravest first.
        further: Lines behind them.
    """
    lines = [f"{title}: {headline(findings)}"]
    for finding in findings[:_MAX_PRINTED]:
        where = ", ".join([name or "(model)" for name in finding.names[:3]]) + (
            ", ..." if finding.num_names > 3 else ""
        )
        lines.append(f"  [{finding.severity.value}] {finding.code} {where}: {finding.message}")
    if len(findings) > _MAX_PRINTED:
        lines.append(f"  ... and {len(findings) - _MAX_PRINTED} more in .findings")
    return "\n".join([*lines, *further])
