"""One look at every parameter and buffer of a model, or at every tensor of a mapping.

It looks at values alone and at one moment, so it needs no session and no step. Of a sharded tensor it looks
at this rank's part, says so, and calls no collective. It reads the host once a device and some hundred
tensors, and waits for the device there: it is for before, between and after steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from torchinstruments.checks.health_entries import AuditEntry, NotATensor, entries_of
from torchinstruments.checks.inventory import BUFFER, Inventory
from torchinstruments.checks.param_rows import (
    ParamHealth,
    ParamHealthRow,
    concluded,
    headroom_used,
    rules_of,
)
from torchinstruments.checks.registration import bounds_of, flag_of, names_of, shown
from torchinstruments.checks.tensor_scan import Bounds, DeviceScan, Scanned, merged, parts_of, read, scan
from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.sharding import is_flattened
from torchinstruments.records import Absent, Reason, Scope, error_text
from torchinstruments.statistics.admission import COMPLEX, admit
from torchinstruments.statistics.isolation import isolated, unintercepted

__all__ = ["MAX_FRACTION", "SUBNORMAL_FRACTION_THRESHOLD", "param_health"]

MAX_FRACTION = 0.9
"""Share of a dtype's range from which a float tensor is said to have little headroom."""

SUBNORMAL_FRACTION_THRESHOLD = 0.1
"""Share of subnormal values from which a tensor is said to be heavy with them."""

_BATCH = 256
"""Tensors whose numbers are read together."""

_NOT_A_TENSOR = "not_a_tensor"
_SCAN_ERROR = "scan_error"


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A tensor whose numbers are on its device.

    Attributes:
        entry: The tensor.
        part: What of it was looked at; None where nothing was.
        scope: What that covers.
        bounds: Declared for it.
        scans: One a part of a complex tensor; none of a tensor without values.
        reason: Why nothing was looked at, else ``""``.
    """

    entry: AuditEntry
    part: torch.Tensor | None
    scope: Scope
    bounds: Bounds | None
    scans: tuple[DeviceScan, ...]
    reason: str


def param_health(
    target: object,
    *,
    include_buffers: bool = True,
    within: Sequence[str] | None = None,
    bounds: Mapping[str, tuple[float | None, float | None]] | None = None,
    max_fraction: float = MAX_FRACTION,
    subnormal_fraction_threshold: float = SUBNORMAL_FRACTION_THRESHOLD,
) -> ParamHealth:
    """Looks once at every tensor of a module or of a mapping.

    Args:
        target: A module, or any mapping from names to tensors: a ``state_dict``, an optimizer's state, an
            average of weights. Nested mappings are gone through.
        include_buffers: Whether a module's buffers are looked at.
        within: Names, aliases or patterns with ``*``; None for all.
        bounds: Names, aliases or patterns, each with the closed range that every value has to lie in; None
            for an open side. Where several match, the last one holds. A bound is rounded to the dtype.
        max_fraction: Share of a float dtype's range from which ``param_dtype_headroom`` is found.
        subnormal_fraction_threshold: Share of subnormal values from which ``param_subnormal_heavy`` is found.

    Returns:
        Rows, findings and coverage. NaN and infinities are critical; little headroom, subnormals and bounds
        are warnings (of 8-bit floats, whose scales are made to use the range, information); constant tensors
        are information, for norm layers begin as such.

    Raises:
        ConfigurationError: An argument is not possible, or a name stands for nothing that is looked at.
    """
    flag_of("include_buffers", include_buffers)
    limit = _share_of("max_fraction", max_fraction)
    threshold = _share_of("subnormal_fraction_threshold", subnormal_fraction_threshold)
    inventory, entries, others = entries_of(target)
    names = names_of("within", within)
    not_tensors = [_no_tensor(other) for other in others]
    if not include_buffers:
        entries = [entry for entry in entries if entry.kind != BUFFER]
    if names is not None:
        kept = _positions(entries)
        chosen = frozenset[int]().union(*(_resolved(inventory, kept, name, "within") for name in names))
        entries = [entry for entry in entries if not chosen.isdisjoint(entry.positions)]
        not_tensors.clear()
    declared = _declared(inventory, _positions(entries), bounds)
    rows = _rows(entries, declared) + not_tensors
    return concluded(rows, rules_of(limit, threshold), has_bounds=bool(declared))


def _positions(entries: Sequence[AuditEntry]) -> frozenset[int]:
    return frozenset(position for entry in entries for position in entry.positions)


def _resolved(inventory: Inventory, kept: frozenset[int], name: str, argument: str) -> frozenset[int]:
    """Returns the positions that a name stands for.

    Raises:
        ConfigurationError: It stands for nothing, or for nothing that is looked at.
    """
    found = inventory.resolve((name,), argument)
    if found.isdisjoint(kept):
        raise ConfigurationError(
            f"{argument} has {name!r}, which is left out by include_buffers= or within=; give only what is "
            f"looked at"
        )
    return found


def _declared(
    inventory: Inventory,
    kept: frozenset[int],
    bounds: Mapping[str, tuple[float | None, float | None]] | None,
) -> dict[int, Bounds]:
    """Returns the bounds of each position of the inventory."""
    if bounds is None:
        return {}
    if not isinstance(bounds, Mapping):
        raise ConfigurationError(
            f"bounds={shown(bounds)} is not possible; give a mapping from names to pairs (low, high)"
        )
    declared: dict[int, Bounds] = {}
    for name, pair in bounds.items():
        if not isinstance(name, str):
            raise ConfigurationError(
                f"bounds has {shown(name)}, which is no name; give one, or a pattern with *"
            )
        found = bounds_of(f"bounds[{name!r}]", pair)
        if found is None:
            raise ConfigurationError(
                f"bounds[{name!r}] is None; give a pair (low, high), None for an open side"
            )
        declared |= dict.fromkeys(_resolved(inventory, kept, name, "bounds"), found)
    return declared


def _rows(entries: Sequence[AuditEntry], declared: Mapping[int, Bounds]) -> list[ParamHealthRow]:
    """Looks at the tensors, some hundred at a time."""
    rows: list[ParamHealthRow] = []
    for start in range(0, len(entries), _BATCH):
        begun = [_begun(entry, declared) for entry in entries[start : start + _BATCH]]
        numbers = iter(read([one.packed() for each in begun for one in each.scans]))
        for each in begun:
            if each.part is None:
                rows.append(_row(each, None, each.reason))
            elif not each.scans:
                rows.append(_row(each, Scanned(0), Reason.EMPTY.value))
            else:
                scanned = merged([one.unpacked(next(numbers)) for one in each.scans])
                rows.append(
                    _row(each, scanned, Reason.NO_FINITE_ENTRIES.value if scanned.minimum is None else "")
                )
    return rows


def _begun(entry: AuditEntry, declared: Mapping[int, Bounds]) -> _Begun:
    """Queues the look at a tensor, or says why there is none."""
    tensor = entry.tensor
    own = [declared[place] for place in entry.positions if place in declared]
    bounds = own[-1] if own else None
    with unintercepted():
        if is_lazy(tensor):
            return _Begun(entry, None, Scope.LOCAL, bounds, (), Reason.UNINITIALISED.value)
        with isolated(tensor):
            admitted = admit(tensor, COMPLEX)
            if isinstance(admitted, Absent):
                return _Begun(entry, None, Scope.LOCAL, bounds, (), admitted.reason)
            part, scope = admitted
            if is_flattened(tensor):
                scope = Scope.LOCAL_SHARD
            if part.numel() == 0:
                return _Begun(entry, part, scope, bounds, (), "")
            try:
                scans = tuple([scan(one, bounds or (None, None)) for one in parts_of(part)])
            except (RuntimeError, TypeError) as error:
                # An operation that this device or dtype lacks costs this tensor alone, and its row says so.
                reason = f"{_SCAN_ERROR}: {type(error).__name__}: {error_text(error)}"[:200]
                return _Begun(entry, None, scope, bounds, (), reason)
    return _Begun(entry, part, scope, bounds, scans, "")


def _row(begun: _Begun, scanned: Scanned | None, reason: str) -> ParamHealthRow:
    """Returns the row of a tensor."""
    entry, seen = begun.entry, begun.entry.tensor if begun.part is None else begun.part
    with unintercepted():
        is_shapeless = is_lazy(seen) or seen.is_nested
        return ParamHealthRow(
            name=entry.name,
            aliases=entry.aliases,
            kind=entry.kind,
            shape=() if is_shapeless else tuple(map(int, seen.shape)),
            dtype=str(seen.dtype).removeprefix("torch."),
            device=str(seen.device),
            scope=begun.scope,
            is_scanned=scanned is not None,
            reason=reason,
            scanned=scanned,
            bounds=begun.bounds,
            headroom_used=None if scanned is None else headroom_used(seen.dtype, scanned),
        )


def _no_tensor(other: NotATensor) -> ParamHealthRow:
    """Returns the row of something else that a mapping holds."""
    return ParamHealthRow(
        name=other.name,
        aliases=(),
        kind="mapping",
        shape=(),
        dtype="",
        device="",
        scope=Scope.LOCAL,
        is_scanned=False,
        reason=f"{_NOT_A_TENSOR}: {other.type_name}",
        scanned=None,
        bounds=None,
        headroom_used=None,
    )


def _share_of(argument: str, value: object) -> float:
    """Returns a share above 0.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    raise ConfigurationError(f"{argument}={shown(value)} is not possible; give a share, above 0 and up to 1")
