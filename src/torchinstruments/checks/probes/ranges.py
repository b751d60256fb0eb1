"""Whether activations stay in ranges that the program declares."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from typing_extensions import override

from torchinstruments.checks.findings import Severity, plain
from torchinstruments.checks.health_findings import HealthFinding, gravest_first, printed
from torchinstruments.checks.probes.selectors import FunctionSelector, ModuleSelector, Selector
from torchinstruments.checks.probes.watching import Probe
from torchinstruments.checks.registration import bounds_of, flag_of, shown
from torchinstruments.checks.tensor_scan import Bounds, DeviceScan, Scanned, merged, read, scan
from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Scope

__all__ = ["RangeFacts", "RangeProbe"]

_MAX_KINDS = 8
"""Dtypes and devices in which one site may come."""

_NEVER = 2**62


@dataclass(frozen=True, slots=True)
class RangeFacts:
    """What was seen at one site.

    Attributes:
        site: Its label.
        selector: What it was selected by, as written.
        scope: What the numbers cover.
        low: Lower bound, part of the range; None for an open side.
        high: Upper bound.
        negate: Whether the range is one to be left.
        num_seen: Tensors that were looked at.
        num_violations: Tensors among them that break the rule.
        first_violation: The watched forward of the first one, from 0; None without one.
        scanned: Counts and extremes over all of them.
    """

    site: str
    selector: str
    scope: Scope
    low: float | None
    high: float | None
    negate: bool
    num_seen: int
    num_violations: int
    first_violation: int | None
    scanned: Scanned

    def to_dict(self) -> dict[str, object]:
        """Returns it as plain values that strict JSON can hold, the counts among them."""
        plain_values = {
            one.name: plain(getattr(self, one.name)) for one in fields(self) if one.name != "scanned"
        }
        return plain_values | {one.name: plain(getattr(self.scanned, one.name)) for one in fields(Scanned)}


class _Kind:
    """Numbers of one dtype on one device, added up there."""

    __slots__ = ("_first", "_num_violations", "_scan")

    def __init__(self, first: DeviceScan, violates: torch.Tensor, forward: int) -> None:
        self._scan = first
        self._num_violations = violates.to(torch.int64)
        self._first = _first_of(violates, forward)

    def add(self, found: DeviceScan, violates: torch.Tensor, forward: int) -> None:
        """Adds a tensor (training thread, hot path)."""
        before = self._scan
        self._scan = DeviceScan(
            before.counts + found.counts,
            torch.minimum(before.low, found.low),
            torch.maximum(before.high, found.high),
            before.num_values + found.num_values,
            before.is_unsigned,
        )
        self._num_violations = self._num_violations + violates
        self._first = torch.minimum(self._first, _first_of(violates, forward))

    def packed(self) -> torch.Tensor:
        """Returns everything as one int64 tensor."""
        return torch.cat((self._scan.packed(), torch.stack((self._num_violations, self._first))))

    def unpacked(self, numbers: Sequence[int]) -> tuple[Scanned, int, int]:
        """Returns counts, violations, and the forward of the first one."""
        return self._scan.unpacked(numbers[:-2]), numbers[-2], numbers[-1]


class _RangeSite:
    """One site of a range probe."""

    def __init__(self, bounds: Bounds, *, negate: bool) -> None:
        self._bounds = bounds
        self._negate = negate
        self.kinds: dict[tuple[torch.dtype, torch.device], _Kind] = {}
        self.num_seen = 0

    def take(self, tensor: torch.Tensor, forward: int) -> None:
        """Counts what lies where (training thread, hot path)."""
        key = (tensor.dtype, tensor.device)
        if key not in self.kinds and len(self.kinds) >= _MAX_KINDS:
            raise RuntimeError(f"one site came in more than {_MAX_KINDS} dtypes and devices")
        found = scan(tensor, self._bounds)
        num_outside = found.counts[0] + found.counts[5] + found.counts[6]
        violates = num_outside == 0 if self._negate else num_outside > 0
        if key in self.kinds:
            self.kinds[key].add(found, violates, forward)
        else:
            self.kinds[key] = _Kind(found, violates, forward)
        self.num_seen += 1


class RangeProbe(Probe[_RangeSite]):
    """Looks whether values lie in declared ranges.

    ::

        probe = RangeProbe({func("relu"): (0, 6), module("encoder.*"): (None, 10)})
        with probe.watch(model):
            model(x)
        print(probe)

    NaN lies in no range. An infinity lies beyond a bound, and in a range that is open on its side.

    Args:
        bounds: For each selector a closed range, None for an open side. A bound is rounded to the dtype of
            the values.
        negate: Turns the rule round: at least one value of each tensor has to lie outside of the range.

    Raises:
        ConfigurationError: An argument is not possible.
    """

    name = "range_probe"

    def __init__(
        self, bounds: Mapping[Selector, tuple[float | None, float | None]], *, negate: bool = False
    ) -> None:
        self._negate = flag_of("negate", negate)
        self._bounds = _checked(bounds)
        super().__init__(tuple(self._bounds))

    @override
    def new_site(self, selector: Selector, label: str) -> _RangeSite:
        """Returns what is kept of a site (training thread, hot path)."""
        return _RangeSite(self._bounds[selector], negate=self._negate)

    def facts(self) -> tuple[RangeFacts, ...]:
        """Returns what was seen at each site, in the order of their first values; reads once a device."""
        kinds = [kind for site in self._sites.values() for kind in site.kinds.values()]
        numbers = iter(read([kind.packed() for kind in kinds]))
        facts = []
        for (selector, label), site in self._sites.items():
            found = [kind.unpacked(next(numbers)) for kind in site.kinds.values()]
            if not found:
                continue
            first = min(first for _, _, first in found)
            low, high = self._bounds[selector]
            facts.append(
                RangeFacts(
                    site=label,
                    selector=str(selector),
                    scope=self.scope_of(selector, label),
                    low=low,
                    high=high,
                    negate=self._negate,
                    num_seen=site.num_seen,
                    num_violations=sum(number for _, number, _ in found),
                    first_violation=None if first == _NEVER else first,
                    scanned=merged([scanned for scanned, _, _ in found]),
                )
            )
        return tuple(facts)

    @property
    def findings(self) -> tuple[HealthFinding, ...]:
        """One a site and code, gravest first: ``activation_nan`` and ``activation_range_violated``."""
        return _findings_of(self.facts())

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values that strict JSON can hold."""
        facts = self.facts()
        return {
            "probe": self.name,
            "num_forwards": self.num_forwards,
            "findings": [finding.to_dict() for finding in _findings_of(facts)],
            "sites": [one.to_dict() for one in facts],
            "unmatched": list(self.unmatched),
            "unavailable": [entry.to_dict() for entry in self.unavailable],
        }

    def to_json(self, *, indent: int | None = 1) -> str:
        """Returns `to_dict` as strict JSON.

        Args:
            indent: Spaces a level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True, allow_nan=False)

    def __str__(self) -> str:
        """Returns a summary for people."""
        facts = self.facts()
        further = [f"  {len(facts)} sites in {self.num_forwards} watched forwards"]
        further += [f"  {entry.reason}: {', '.join(entry.names[:3])}" for entry in self.unavailable[:10]]
        return printed("RangeProbe", _findings_of(facts), further)


def _checked(bounds: object) -> dict[Selector, Bounds]:
    """Returns the ranges by selector.

    Raises:
        ConfigurationError: They are none, or there are none.
    """
    if not isinstance(bounds, Mapping) or not bounds:
        raise ConfigurationError(
            f"bounds={shown(bounds)} is not possible; give a mapping such as {{func('relu'): (0, 6)}}, "
            f"not empty"
        )
    checked: dict[Selector, Bounds] = {}
    for selector, pair in bounds.items():
        if not isinstance(selector, (FunctionSelector, ModuleSelector)):
            raise ConfigurationError(
                f"bounds has {shown(selector)}, which is no selector; give func('relu') or "
                f"module('encoder.*')"
            )
        found = bounds_of(f"bounds[{selector}]", pair)
        if found is None:
            raise ConfigurationError(
                f"bounds[{selector}] is None; give a pair (low, high), None for an open side"
            )
        checked[selector] = found
    return checked


def _findings_of(facts: Sequence[RangeFacts]) -> tuple[HealthFinding, ...]:
    """Returns what facts show."""
    found = []
    for one in facts:
        values = {
            "num_violations": one.num_violations,
            "num_seen": one.num_seen,
            "first_violation": one.first_violation,
            "num_below": one.scanned.num_below,
            "num_above": one.scanned.num_above,
            "num_nan": one.scanned.num_nan,
            "num_values": one.scanned.num_values,
            "minimum": one.scanned.minimum,
            "maximum": one.scanned.maximum,
            "low": one.low,
            "high": one.high,
            "negate": one.negate,
        }
        if one.scanned.num_nan:
            found.append(
                HealthFinding(
                    code="activation_nan",
                    severity=Severity.CRITICAL,
                    message=f"{one.scanned.num_nan} of {one.scanned.num_values} values are NaN",
                    names=(one.site,),
                    values={one.site: values},
                    remedy="look at what the site was given; the first site is nearest to the cause",
                )
            )
        if one.num_violations:
            inside = "no value outside of" if one.negate else "values outside of"
            found.append(
                HealthFinding(
                    code="activation_range_violated",
                    severity=Severity.WARNING,
                    message=f"{one.num_violations} of {one.num_seen} tensors have {inside} "
                    f"[{'-inf' if one.low is None else one.low:}, {'inf' if one.high is None else one.high}]",
                    names=(one.site,),
                    values={one.site: values},
                    remedy="the range is yours: minimum and maximum say what was seen",
                )
            )
    return gravest_first(found)


def _first_of(violates: torch.Tensor, forward: int) -> torch.Tensor:
    """Returns the number of a forward where it violates, else one that none has."""
    never = torch.full_like(violates, _NEVER, dtype=torch.int64)
    return never.masked_fill(violates, forward)
