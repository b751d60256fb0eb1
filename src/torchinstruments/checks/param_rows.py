"""What the numbers of an audit say: a row a tensor, and one finding a code. No tensor here."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch

from torchinstruments.checks.findings import MAX_NAMES, Severity, Unavailable, plain
from torchinstruments.checks.health_findings import HealthFinding, gravest_first, printed
from torchinstruments.checks.inventory import BUFFER
from torchinstruments.checks.masks import looks_like_a_mask
from torchinstruments.checks.tensor_scan import Bounds, Scanned, dtype_range
from torchinstruments.records import Reason, Scope

__all__ = [
    "SCHEMA_VERSION",
    "ParamHealth",
    "ParamHealthRow",
    "Rule",
    "concluded",
    "headroom_used",
    "rules_of",
]

SCHEMA_VERSION = 1
"""Of `ParamHealth.to_dict`."""

_MAX_PRINTED_REASONS = 10


@dataclass(frozen=True, slots=True)
class ParamHealthRow:
    """What was seen of one tensor.

    Attributes:
        name: Without segments of wrappers.
        aliases: Further names of the same memory.
        kind: ``parameter``, ``buffer`` or ``mapping``.
        shape: Of this rank's part.
        dtype: Without ``torch.``; ``""`` for what is no tensor.
        device: As torch writes it.
        scope: What the numbers cover.
        is_scanned: Whether it was looked at; else ``reason`` says why not.
        reason: A code, with a detail behind a colon: why it, or its extremes, could not be had.
        scanned: The counts; None where it was not looked at. Those of a complex tensor are of both parts.
        bounds: What was declared for it.
        headroom_used: Largest share of the dtype's range that a finite value takes; None without one.
        codes: Of the findings that it is part of.
    """

    name: str
    aliases: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    scope: Scope
    is_scanned: bool
    reason: str
    scanned: Scanned | None
    bounds: Bounds | None
    headroom_used: float | None
    codes: tuple[str, ...] = ()

    @property
    def zero_fraction(self) -> float | None:
        """Share of the values that are zero; None without values."""
        return self._share(lambda scanned: scanned.num_zero)

    @property
    def subnormal_fraction(self) -> float | None:
        """Share of the values that are subnormal, of all values; None without values."""
        return self._share(lambda scanned: scanned.num_subnormal)

    def to_dict(self) -> dict[str, object]:
        """Returns it as plain values that strict JSON can hold, the counts among them."""
        shown = {one.name: plain(getattr(self, one.name)) for one in fields(self) if one.name != "scanned"}
        for one in fields(Scanned):
            shown[one.name] = None if self.scanned is None else plain(getattr(self.scanned, one.name))
        shown["num_nonfinite"] = None if self.scanned is None else self.scanned.num_nonfinite
        shown["max_abs"] = None if self.scanned is None else plain(self.scanned.max_abs)
        shown["zero_fraction"] = self.zero_fraction
        shown["subnormal_fraction"] = self.subnormal_fraction
        return shown

    def _share(self, count: Callable[[Scanned], int]) -> float | None:
        if self.scanned is None or self.scanned.num_values == 0:
            return None
        return count(self.scanned) / self.scanned.num_values


@dataclass(frozen=True, slots=True)
class ParamHealth:
    """What `param_health` saw.

    Attributes:
        findings: Gravest first, one a code.
        rows: One a tensor, in the order of the target.
        unavailable: What was asked for and could not be looked at, by reason.
        checks_run: Codes of the findings that were looked for.
        coverage: How much of the target was looked at.
        schema_version: Of `to_dict`.
    """

    findings: tuple[HealthFinding, ...]
    rows: tuple[ParamHealthRow, ...]
    unavailable: tuple[Unavailable, ...]
    checks_run: tuple[str, ...]
    coverage: Mapping[str, Any]
    schema_version: int = SCHEMA_VERSION

    def row(self, name: str) -> ParamHealthRow:
        """Returns the row of a name or an alias.

        Raises:
            KeyError: No row has it.
        """
        for row in self.rows:
            if name == row.name or name in row.aliases:
                return row
        shown = ", ".join(repr(row.name) for row in self.rows[:3])
        raise KeyError(
            f"{name!r} is no parameter or buffer that was audited; give a name as in "
            f"model.named_parameters(), such as {shown or 'none, for none was'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain values that strict JSON can hold."""
        return {
            "schema_version": self.schema_version,
            "findings": [finding.to_dict() for finding in self.findings],
            "rows": [row.to_dict() for row in self.rows],
            "unavailable": [entry.to_dict() for entry in self.unavailable],
            "checks_run": list(self.checks_run),
            "coverage": plain(self.coverage),
        }

    def to_json(self, *, indent: int | None = 1) -> str:
        """Returns `to_dict` as strict JSON.

        Args:
            indent: Spaces a level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True, allow_nan=False)

    def __str__(self) -> str:
        """Returns a summary for people."""
        seen, asked = self.coverage["num_scanned"], self.coverage["num_tensors"]
        lines = [f"  scanned: {seen} of {asked} tensors, {self.coverage['num_values']} values"]
        if self.coverage["scope"] != Scope.LOCAL:
            lines.append("  of sharded tensors this rank's part alone")
        for entry in self.unavailable[:_MAX_PRINTED_REASONS]:
            more = ", ..." if entry.num_names > 3 else ""
            lines.append(f"  not scanned: {', '.join(entry.names[:3])}{more}: {entry.reason}")
        if len(self.unavailable) > _MAX_PRINTED_REASONS:
            lines.append(f"  ... and {len(self.unavailable) - _MAX_PRINTED_REASONS} more in .unavailable")
        return printed("ParamHealth", self.findings, lines)


@dataclass(frozen=True, slots=True)
class Rule:
    """What makes a finding of rows.

    Attributes:
        code: Of the finding.
        severity: Of the finding, of a row's dtype.
        applies: Whether a row shows it.
        values: What is said of a row.
        message: Behind the number of tensors.
        remedy: What can be done.
    """

    code: str
    severity: Callable[[ParamHealthRow], Severity]
    applies: Callable[[ParamHealthRow, Scanned], bool]
    values: Callable[[ParamHealthRow, Scanned], Mapping[str, Any]]
    message: str
    remedy: str


def headroom_used(dtype: torch.dtype, scanned: Scanned) -> float | None:
    """Returns the largest share of the dtype's range, on either side of zero, that a finite value takes."""
    if scanned.minimum is None or scanned.maximum is None:
        return None
    low, high = dtype_range(dtype)
    shares = [scanned.maximum / high if scanned.maximum > 0 else 0.0]
    if scanned.minimum < 0 and low < 0:
        shares.append(scanned.minimum / low)
    return max(shares)


def rules_of(max_fraction: float, threshold: float) -> list[Rule]:
    """Returns what is looked for, in the order of gravity.

    Args:
        max_fraction: Share of a float dtype's range that is much.
        threshold: Share of subnormal values that is much.
    """
    return [
        Rule(
            code="param_value_nonfinite",
            severity=lambda _: Severity.CRITICAL,
            applies=lambda row, scanned: scanned.num_nonfinite > 0 and not _is_mask(row, scanned),
            values=lambda _, scanned: {
                "num_nan": scanned.num_nan,
                "num_posinf": scanned.num_posinf,
                "num_neginf": scanned.num_neginf,
                "num_values": scanned.num_values,
            },
            message="hold NaN or infinity",
            remedy="load a checkpoint from before; clip_grad_norm_(error_if_nonfinite=True) or a session's "
            "register_nonfinite_grad_check() raises before such values are written",
        ),
        Rule(
            code="param_bounds_violated",
            severity=lambda _: Severity.WARNING,
            applies=lambda _, scanned: scanned.num_below + scanned.num_above > 0,
            values=lambda row, scanned: {
                "num_below": scanned.num_below,
                "num_above": scanned.num_above,
                "num_values": scanned.num_values,
                "low": None if row.bounds is None else row.bounds[0],
                "high": None if row.bounds is None else row.bounds[1],
                "minimum": scanned.minimum,
                "maximum": scanned.maximum,
            },
            message="have values outside the bounds that were declared",
            remedy="the bounds are yours: look at the rows' minimum and maximum",
        ),
        Rule(
            code="param_dtype_headroom",
            severity=_unless_8_bit,
            applies=lambda row, scanned: (
                _is_float(row) and (row.headroom_used or 0.0) >= max_fraction and not _is_mask(row, scanned)
            ),
            values=lambda row, scanned: {
                "max_abs": scanned.max_abs,
                "headroom_used": row.headroom_used,
                "max_fraction": max_fraction,
            },
            message=f"reach {max_fraction:g} of the largest number of their dtype",
            remedy="the next step may overflow: hold them in bfloat16 or float32",
        ),
        Rule(
            code="param_subnormal_heavy",
            severity=_unless_8_bit,
            applies=lambda row, _: 0 < (row.subnormal_fraction or 0.0) >= threshold,
            values=lambda row, scanned: {
                "num_subnormal": scanned.num_subnormal,
                "subnormal_fraction": row.subnormal_fraction,
                "subnormal_fraction_threshold": threshold,
            },
            message=f"hold {threshold:g} or more of subnormal values",
            remedy="they lose digits, or vanish where subnormals are flushed: hold them in a wider dtype",
        ),
        Rule(
            code="param_mask",
            severity=lambda _: Severity.INFO,
            applies=_is_mask,
            values=lambda _, scanned: {
                "num_neginf": scanned.num_neginf,
                "minimum": scanned.minimum,
                "num_values": scanned.num_values,
            },
            message="are buffers of zeros with negative infinity or the lowest number, as masks of attention",
            remedy="",
        ),
        Rule(
            code="param_all_zero",
            severity=lambda _: Severity.INFO,
            applies=lambda _, scanned: 1 < scanned.num_values == scanned.num_zero,
            values=lambda _, scanned: {"num_values": scanned.num_values},
            message="are zero throughout, as biases and running means begin",
            remedy="",
        ),
        Rule(
            code="param_all_same",
            severity=lambda _: Severity.INFO,
            applies=lambda _, scanned: (
                scanned.is_all_same and scanned.num_values > 1 and scanned.num_zero < scanned.num_values
            ),
            values=lambda _, scanned: {"value": scanned.minimum, "num_values": scanned.num_values},
            message="hold one value throughout, as the weights of norm layers begin",
            remedy="",
        ),
    ]


def concluded(rows: Sequence[ParamHealthRow], rules: Sequence[Rule], *, has_bounds: bool) -> ParamHealth:
    """Returns everything that rows say.

    Args:
        rows: In the order of the target.
        rules: What is looked for.
        has_bounds: Whether any were declared.
    """
    found: list[HealthFinding] = []
    codes: dict[str, list[str]] = {}
    for rule in rules:
        shown = [row for row in rows if row.scanned is not None and rule.applies(row, row.scanned)]
        # Rows of unlike severity are findings of their own.
        for severity in Severity:
            alike = [row for row in shown if rule.severity(row) is severity]
            if alike:
                found.append(
                    HealthFinding(
                        code=rule.code,
                        severity=severity,
                        message=f"{len(alike)} of {len(rows)} tensors {rule.message} ({alike[0].name} first)",
                        names=tuple([row.name for row in alike]),
                        values={
                            row.name: rule.values(row, row.scanned)
                            for row in alike
                            if row.scanned is not None
                        },
                        remedy=rule.remedy,
                    )
                )
        for row in shown:
            codes.setdefault(row.name, []).append(rule.code)
    rows = [_with_codes(row, tuple(codes.get(row.name, ()))) for row in rows]
    checks_run = [rule.code for rule in rules if has_bounds or rule.code != "param_bounds_violated"]
    return ParamHealth(
        findings=gravest_first(found),
        rows=tuple(rows),
        unavailable=_unavailable(rows),
        checks_run=tuple(checks_run) if any(row.is_scanned for row in rows) else (),
        coverage=_coverage(rows),
    )


def _with_codes(row: ParamHealthRow, codes: tuple[str, ...]) -> ParamHealthRow:
    return replace(row, codes=codes) if codes else row


def _unavailable(rows: Sequence[ParamHealthRow]) -> tuple[Unavailable, ...]:
    """Returns by reason what was not looked at."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if not row.is_scanned:
            names.setdefault(row.reason, []).append(row.name)
    return tuple(
        [
            Unavailable("param_health", reason, tuple(own[:MAX_NAMES]), len(own), len(own))
            for reason, own in sorted(names.items())
        ]
    )


def _coverage(rows: Sequence[ParamHealthRow]) -> Mapping[str, Any]:
    """Returns how much was looked at."""
    scanned = [row for row in rows if row.scanned is not None]
    kinds = Counter(row.kind for row in scanned)
    scopes = {row.scope for row in scanned}
    return MappingProxyType(
        {
            "num_tensors": len(rows),
            "num_scanned": len(scanned),
            "num_not_scanned": len(rows) - len(scanned),
            "num_empty": sum(row.reason == Reason.EMPTY.value for row in scanned),
            "num_values": sum(row.scanned.num_values for row in scanned if row.scanned is not None),
            "num_parameters": kinds["parameter"],
            "num_buffers": kinds["buffer"],
            "num_of_mapping": kinds["mapping"],
            "num_of_local_shards": sum(row.scope is Scope.LOCAL_SHARD for row in scanned),
            "scope": Scope.LOCAL_SHARD.value if Scope.LOCAL_SHARD in scopes else Scope.LOCAL.value,
        }
    )


def _is_mask(row: ParamHealthRow, scanned: Scanned) -> bool:
    """Returns whether a buffer is made to be added to attention, to hide what is not to be seen."""
    reaches_the_end = scanned.num_neginf > 0 or row.headroom_used == 1.0
    return row.kind == BUFFER and _is_float(row) and reaches_the_end and looks_like_a_mask(scanned)


def _is_float(row: ParamHealthRow) -> bool:
    return row.dtype.startswith(("float", "bfloat", "complex"))


def _unless_8_bit(row: ParamHealthRow) -> Severity:
    """Returns how grave the use of a float's range is: scales of 8-bit floats are made to use all of it."""
    return Severity.INFO if row.dtype.startswith("float8") else Severity.WARNING
