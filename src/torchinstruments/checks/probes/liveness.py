"""How much of an activation is zero, and which units were zero all along. Statistics, and no verdict."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from typing_extensions import override

from torchinstruments.checks.findings import plain
from torchinstruments.checks.probes.selectors import Selector, selectors_of
from torchinstruments.checks.probes.watching import Probe
from torchinstruments.checks.registration import shown
from torchinstruments.checks.tensor_scan import read, scan
from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Scope
from torchinstruments.statistics.device import accumulation_dtype, working_dtype

__all__ = ["MAX_UNITS", "LivenessFacts", "LivenessProbe"]

MAX_UNITS = 1_000_000
"""Units of one site that are told apart."""

_BLOCK_ENTRIES = 1 << 22
"""Entries that are looked at at a time."""

_MIN_FORWARDS = 2
_MAX_LISTED = 1_000


@dataclass(frozen=True, slots=True)
class LivenessFacts:
    """What was seen at one site.

    Attributes:
        site: Its label.
        selector: What it was selected by, as written.
        scope: What the numbers cover.
        num_seen: Tensors that were looked at.
        num_forwards: Watched forwards that they came from.
        num_values: Their values.
        num_zero: Values that are zero.
        num_nonfinite: Values that are NaN or infinite; they are not zero.
        zero_fraction: Share of zeros among all values.
        last_zero_fraction: The same of the last tensor.
        max_abs: Largest finite magnitude; None where no value is finite.
        num_units: Units, where they were asked for.
        num_units_zero_in_all: Of these, those that were zero in every value of every watched forward.
        units_zero_in_all: Their places, the first thousand.
        units_reason: Why there is nothing on units; ``""`` where there is.
    """

    site: str
    selector: str
    scope: Scope
    num_seen: int
    num_forwards: int
    num_values: int
    num_zero: int
    num_nonfinite: int
    zero_fraction: float
    last_zero_fraction: float
    max_abs: float | None
    num_units: int | None
    num_units_zero_in_all: int | None
    units_zero_in_all: tuple[int, ...]
    units_reason: str

    def to_dict(self) -> dict[str, object]:
        """Returns it as plain values that strict JSON can hold."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(self)}


_NOT_ASKED = "not_asked"


class _LivenessSite:
    """One site of a liveness probe."""

    def __init__(self, unit_dim: int | None) -> None:
        self._unit_dim = unit_dim
        self._device: torch.device | None = None
        self._counts: torch.Tensor | None = None
        self._last: torch.Tensor | None = None
        self._max_abs: torch.Tensor | None = None
        self.was_nonzero: torch.Tensor | None = None
        self.units_reason = "" if unit_dim is not None else f"{_NOT_ASKED}: give unit_dim="
        self.num_seen = 0
        self.num_values = 0
        self.num_last = 0
        self.num_forwards = 0
        self._forward = -1

    def take(self, tensor: torch.Tensor, forward: int) -> None:
        """Counts zeros (training thread, hot path)."""
        if self._device is not None and tensor.device != self._device:
            raise RuntimeError("one site came on more than one device")
        self._device = tensor.device
        found = scan(tensor)
        # Zeros and nonfinite values.
        counts = torch.stack((found.counts[3], found.counts[:3].sum()))
        max_abs = _max_abs(found.low, found.high, found.is_unsigned)
        self._counts = counts if self._counts is None else self._counts + counts
        self._max_abs = max_abs if self._max_abs is None else torch.maximum(self._max_abs, max_abs)
        self._last = found.counts[3]
        self.num_last = tensor.numel()
        self.num_values += tensor.numel()
        self.num_seen += 1
        if forward != self._forward:
            self._forward = forward
            self.num_forwards += 1
        if not self.units_reason:
            self._take_units(tensor)

    def packed(self) -> torch.Tensor:
        """Returns everything but the units as one int64 tensor."""
        assert self._counts is not None
        assert self._last is not None
        return torch.cat((self._counts, self._last.view(1)))

    def max_abs(self) -> torch.Tensor:
        """Returns the largest finite magnitude, below 0 where there was none."""
        assert self._max_abs is not None
        return self._max_abs

    def _take_units(self, tensor: torch.Tensor) -> None:
        """Notes which units had a value other than zero."""
        assert self._unit_dim is not None
        if not -tensor.ndim <= self._unit_dim < tensor.ndim:
            self.units_reason = (
                f"no_such_dimension: unit_dim={self._unit_dim}, "
                f"and a tensor here has {tensor.ndim} dimensions"
            )
            return
        unit_dim = self._unit_dim % tensor.ndim
        num_units = tensor.shape[unit_dim]
        if num_units > MAX_UNITS:
            self.units_reason = f"too_many_units: {num_units}, at most {MAX_UNITS} are told apart"
            return
        if self.was_nonzero is not None and self.was_nonzero.numel() != num_units:
            self.units_reason = f"shape_changed: {self.was_nonzero.numel()} units, then {num_units}"
            self.was_nonzero = None
            return
        seen = _nonzero_units(tensor, unit_dim)
        self.was_nonzero = seen if self.was_nonzero is None else torch.logical_or(self.was_nonzero, seen)


class LivenessProbe(Probe[_LivenessSite]):
    """Counts zeros. It has no thresholds and makes no findings: a batch proves nothing of a unit.

    Args:
        sites: Selectors, as ``[func("relu")]``.
        unit_dim: The dimension whose places are units, such as -1 for the features of a linear layer or 1 for
            the channels of a convolution: for each site it is told which of them were zero in all watched
            forwards, of which it takes two at least. None for no units.

    Raises:
        ConfigurationError: An argument is not possible.
    """

    name = "liveness_probe"

    def __init__(self, sites: Iterable[Selector], *, unit_dim: int | None = None) -> None:
        if unit_dim is not None and (not isinstance(unit_dim, int) or isinstance(unit_dim, bool)):
            raise ConfigurationError(
                f"unit_dim={shown(unit_dim)} is not possible; give a dimension such as -1, or None"
            )
        self._unit_dim = unit_dim
        super().__init__(selectors_of("sites", sites))

    @override
    def new_site(self, selector: Selector, label: str) -> _LivenessSite:
        """Returns what is kept of a site (training thread, hot path)."""
        return _LivenessSite(self._unit_dim)

    def facts(self) -> tuple[LivenessFacts, ...]:
        """Returns what was seen at each site, in the order of their first values; reads the devices."""
        sites = [(key, site) for key, site in self._sites.items() if site.num_seen]
        numbers = read([site.packed() for _, site in sites])
        return tuple(
            [
                _facts(str(selector), label, self.scope_of(selector, label), site, own)
                for ((selector, label), site), own in zip(sites, numbers, strict=True)
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values that strict JSON can hold."""
        return {
            "probe": self.name,
            "num_forwards": self.num_forwards,
            "sites": [one.to_dict() for one in self.facts()],
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
        lines = [f"LivenessProbe: {self.num_forwards} watched forwards"]
        for one in self.facts()[:20]:
            units = ""
            if one.num_units is not None:
                units = f", {one.num_units_zero_in_all} of {one.num_units} units zero in all"
            elif not one.units_reason.startswith(_NOT_ASKED):
                units = f", units not told ({one.units_reason})"
            nonfinite = f", {one.num_nonfinite} nonfinite" if one.num_nonfinite else ""
            lines.append(f"  {one.site}: {one.zero_fraction:.1%} zero{nonfinite}{units}")
        lines += [f"  {entry.reason}: {', '.join(entry.names[:3])}" for entry in self.unavailable[:10]]
        return "\n".join(lines)


def _facts(
    selector: str, label: str, scope: Scope, site: _LivenessSite, numbers: Sequence[int]
) -> LivenessFacts:
    """Returns what was seen at a site."""
    num_zero, num_nonfinite, num_zero_last = numbers
    max_abs = float(site.max_abs().item())
    reason = site.units_reason
    if not reason and site.num_forwards < _MIN_FORWARDS:
        reason = f"too_few_forwards: {site.num_forwards} of at least {_MIN_FORWARDS}"
    num_units: int | None = None
    zero_in_all: list[int] = []
    if not reason and site.was_nonzero is not None:
        num_units = site.was_nonzero.numel()
        zero_in_all = [place for place, seen in enumerate(site.was_nonzero.tolist()) if not seen]
    return LivenessFacts(
        site=label,
        selector=selector,
        scope=scope,
        num_seen=site.num_seen,
        num_forwards=site.num_forwards,
        num_values=site.num_values,
        num_zero=num_zero,
        num_nonfinite=num_nonfinite,
        zero_fraction=num_zero / site.num_values,
        last_zero_fraction=num_zero_last / site.num_last,
        max_abs=max_abs if max_abs >= 0 else None,
        num_units=num_units,
        num_units_zero_in_all=None if num_units is None else len(zero_in_all),
        units_zero_in_all=tuple(zero_in_all[:_MAX_LISTED]),
        units_reason=reason,
    )


def _nonzero_units(tensor: torch.Tensor, unit_dim: int) -> torch.Tensor:
    """Returns for each unit whether any of its values is not zero, a block of the tensor at a time."""
    others = [dim for dim in range(tensor.ndim) if dim != unit_dim]
    if not others:
        return _is_nonzero(tensor)
    size = tensor.shape[others[0]]
    found = [
        torch.amax(_is_nonzero(block), dim=others)
        for block in tensor.split(max(1, size * _BLOCK_ENTRIES // tensor.numel()), dim=others[0])
    ]
    return torch.stack(found).amax(0)


def _is_nonzero(block: torch.Tensor) -> torch.Tensor:
    """Returns where values are not zero; NaN is not."""
    return (block if block.itemsize > 1 else block.to(working_dtype(block.dtype))) != 0


def _max_abs(low: torch.Tensor, high: torch.Tensor, is_unsigned: bool) -> torch.Tensor:  # noqa: FBT001 - of one scan
    """Returns the largest magnitude as a float; negative infinity where no value is finite."""
    wide = accumulation_dtype(low.device)
    low, high = low.to(wide), high.to(wide)
    if is_unsigned:
        return high + 2.0**63
    return torch.maximum(high, -low)
