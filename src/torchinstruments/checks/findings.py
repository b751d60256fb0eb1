"""What checks say: findings, and why something could not be looked at. Torch-free and immutable.

Two axes never mix. *Severity* describes evidence, *action* what is done about it. No finding says that a
model learns or does not; it says what was seen, where, and how it is known.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from torchinstruments.records import ScaleProvenance, Scope, StepProvenance

__all__ = [
    "MAX_FINDINGS",
    "MAX_NAMES",
    "Action",
    "Attribution",
    "CheckWarning",
    "EvidenceKind",
    "Finding",
    "FindingStore",
    "GradientStage",
    "Moment",
    "Severity",
    "Unavailable",
    "plain",
]

MAX_FINDINGS = 1_000
"""Findings of one severity and code that are kept; further ones are counted."""

MAX_NAMES = 20
"""Names that one finding or entry lists; how many there were stands beside them."""


class CheckWarning(RuntimeWarning):
    """What a check with ``action="warn"`` warns with."""


class Severity(StrEnum):
    """How grave the evidence is; the order in which a report lists findings."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class Action(StrEnum):
    """What is done about a finding. Each is in the report, whatever the action."""

    RAISE = "raise"
    WARN = "warn"
    COLLECT = "collect"


class Attribution(StrEnum):
    """Whether the names of a finding are where the fault began, or only where it arrived."""

    EXACT = "exact"
    SMEARED = "smeared"


class GradientStage(StrEnum):
    """At which point of a step a number was taken."""

    PRE_CLIP_SCALED = "pre_clip_scaled"
    PRE_CLIP_UNSCALED = "pre_clip_unscaled"
    PRE_CLIP_UNKNOWN = "pre_clip_unknown"
    POST_CLIP_APPLIED = "post_clip_applied"
    POST_WRITE = "post_write"


class EvidenceKind(StrEnum):
    """What a finding rests on."""

    COUNTING_HOOK = "counting_hook"
    MAGNITUDE_PASS = "magnitude_pass"  # noqa: S105 - no password
    STEP_HOOK = "step_hook"
    CLONE = "clone"
    DIGEST = "digest"
    SCAN_KERNEL = "scan_kernel"
    LEDGER = "ledger"


@dataclass(frozen=True, slots=True)
class Moment:
    """Where training stood when something was seen.

    Attributes:
        attempt: Window of the step clock, from 0; None before the first.
        micro_batch: Forward with gradients in the attempt, from 0, where one backward was looked at.
        backward: Backwards that had ended before this one, since attach, where one was looked at.
        optimizer: Ordinal of the optimizer in order of first sight, where its step was looked at.
        accepted_step: Steps of this session's optimizers that were known to be applied before.
        global_step: The caller's number, inside ``session.step(global_step=...)``.
        step_provenance: How the attempt is known.
    """

    attempt: int | None = None
    micro_batch: int | None = None
    backward: int | None = None
    optimizer: int | None = None
    accepted_step: int = 0
    global_step: int | None = None
    step_provenance: StepProvenance = StepProvenance.NONE


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check saw.

    Attributes:
        check: The check, by the name of its registrar without ``register_`` and ``_check``.
        code: Stable name of the kind of finding.
        severity: How grave the evidence is.
        action: What was done about it.
        message: One sentence.
        names: Parameters, by their names without wrapper segments; at most `MAX_NAMES`.
        num_names: How many there were.
        values: Numbers by name; None for one that is not finite.
        moment: Where training stood.
        stage: At which point of a step the numbers were taken; None where there are none.
        scale_provenance: How the loss scale of the numbers is known; None where there are none.
        loss_scale: The factor that is still in the numbers; None where it is unknown or there is none.
        evidence: What it rests on.
        scope: What part of the parameters this rank saw.
        coverage: How much of what was asked for was looked at, as ``seen/asked``.
        attribution: Whether the names are where it began; None where that is no question.
        collateral_zeroed: Further gradients that are exactly zero beside a nonfinite one, as clipping leaves
            them; None where that is no question.
        zero_baseline: Whether a ratio has a zero below it.
        remedy: What can be done about it.
        follow_up: Where to look further.
    """

    check: str
    code: str
    severity: Severity
    action: Action
    message: str
    names: tuple[str, ...] = ()
    num_names: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    moment: Moment = field(default_factory=Moment)
    stage: GradientStage | None = None
    scale_provenance: ScaleProvenance | None = None
    loss_scale: float | None = None
    evidence: EvidenceKind = EvidenceKind.STEP_HOOK
    scope: Scope = Scope.LOCAL
    coverage: str = ""
    attribution: Attribution | None = None
    collateral_zeroed: int | None = None
    zero_baseline: bool = False
    remedy: str = ""
    follow_up: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_names", max(self.num_names, len(self.names)))
        object.__setattr__(self, "names", tuple(self.names[:MAX_NAMES]))
        values = {name: _finite(value) for name, value in self.values.items()}
        object.__setattr__(self, "values", MappingProxyType(values))

    def to_dict(self) -> dict[str, object]:
        """Returns it as plain values, the moment's among them; strict JSON can hold every one."""
        shown = {one.name: plain(getattr(self, one.name)) for one in fields(self) if one.name != "moment"}
        return shown | {one.name: plain(getattr(self.moment, one.name)) for one in fields(Moment)}


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Something that was asked for and could not be looked at.

    Attributes:
        check: The check.
        reason: Why: a code, with a detail behind a colon.
        names: The parameters that are meant, at most `MAX_NAMES`; none where all of the check is.
        num_names: How many there were.
        num_times: How often.
    """

    check: str
    reason: str
    names: tuple[str, ...] = ()
    num_names: int = 0
    num_times: int = 1

    def to_dict(self) -> dict[str, object]:
        """Returns it as plain values."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(self)}


class FindingStore:
    """Findings and unavailable entries of a session, bounded: grave ones never make way for others.

    Args:
        max_findings: Kept of each severity and code.
    """

    def __init__(self, max_findings: int = MAX_FINDINGS) -> None:
        self._max_findings = max_findings
        self._findings: dict[tuple[Severity, str], list[Finding]] = {}
        self._num_findings: Counter[tuple[Severity, str]] = Counter()
        # By check and reason: the names, and how often.
        self._unavailable: dict[tuple[str, str], tuple[dict[str, None], int]] = {}
        self._num_left_out = 0

    def add(self, finding: Finding) -> None:
        """Keeps a finding, or counts it (training or autograd thread, hot path)."""
        key = finding.severity, finding.code
        self._num_findings[key] += 1
        kept = self._findings.setdefault(key, [])
        if len(kept) < self._max_findings:
            kept.append(finding)

    def add_unavailable(self, check: str, reason: str, names: tuple[str, ...] = ()) -> None:
        """Keeps an entry, or counts it where it is there already (training or autograd thread)."""
        key = check, reason
        before = self._unavailable.get(key)
        if before is None and len(self._unavailable) >= self._max_findings:
            self._num_left_out += 1
            return
        known: dict[str, None] = {} if before is None else before[0]
        num_times = 0 if before is None else before[1]
        known.update(dict.fromkeys(names))
        self._unavailable[key] = known, num_times + 1

    def findings(self) -> tuple[Finding, ...]:
        """Returns what was kept, gravest first, then in the order in which they came."""
        order = {severity: rank for rank, severity in enumerate(Severity)}
        found = [finding for kept in list(self._findings.values()) for finding in kept]
        return tuple(sorted(found, key=lambda finding: order[finding.severity]))

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Returns the entries, by check and reason."""
        kept = [
            Unavailable(check, reason, tuple(names)[:MAX_NAMES], len(names), num_times)
            for (check, reason), (names, num_times) in sorted(self._unavailable.items())
        ]
        if self._num_left_out:
            reason = f"too_many_reasons: {self._max_findings} are kept"
            kept.append(Unavailable("session", reason, num_times=self._num_left_out))
        return tuple(kept)

    def truncated(self) -> dict[str, int]:
        """Returns how many findings of each severity and code were counted and not kept."""
        return {
            f"{severity.value}/{code}": number - len(self._findings[severity, code])
            for (severity, code), number in sorted(self._num_findings.items())
            if number > len(self._findings[severity, code])
        }

    def num_findings(self) -> dict[str, int]:
        """Returns how many findings of each severity there were, kept or not."""
        totals = dict.fromkeys((severity.value for severity in Severity), 0)
        for (severity, _), number in self._num_findings.items():
            totals[severity.value] += number
        return totals


def plain(value: object) -> object:
    """Returns a value as strict JSON can hold it: no NaN, no infinity, no enum, no tuple."""
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} has no plain form")


def _finite(value: float | str | None) -> float | int | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
