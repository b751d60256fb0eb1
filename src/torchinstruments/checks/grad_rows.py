"""What the numbers of one backward say of modules: rows, where something begins, and findings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from torchinstruments.checks.findings import Severity, plain
from torchinstruments.checks.gradient_graph import users_of
from torchinstruments.checks.health_findings import HealthFinding, gravest_first
from torchinstruments.records import ScaleProvenance, Scope

__all__ = ["GradHealthRow", "LossScale", "ModuleFacts", "OutputFacts", "Thresholds", "findings_of", "rows_of"]

_NONFINITE, _ZERO = "gradient_nonfinite", "gradient_zero"
_EXPLODING, _VANISHING = "gradient_exploding", "gradient_vanishing"
_MISSING = "gradient_missing"

_CODES = {
    _NONFINITE: (
        Severity.CRITICAL,
        "have NaN or infinity in the gradients of their outputs",
        "look at what uses the output of the module where it begins; a gradient scaler skips such a step",
    ),
    _ZERO: (
        Severity.WARNING,
        "have gradients of their outputs that are zero throughout",
        "look at what follows the module where it begins: a flat piece of an activation, or a mask",
    ),
    _EXPLODING: (
        Severity.WARNING,
        "have gradients of their outputs above exploding_threshold",
        "clip, lower the learning rate, or look at the module where it begins",
    ),
    _VANISHING: (
        Severity.WARNING,
        "have gradients of their outputs below vanishing_threshold",
        "look at the module where it begins, and at the scale of the loss",
    ),
    _MISSING: (
        Severity.INFO,
        "gave outputs to none of which a gradient came back",
        "the loss does not use them, or detach() lies between; a branch that is not taken looks the same",
    ),
}


@dataclass(frozen=True, slots=True)
class Thresholds:
    """L2 norms in unscaled units: below the first a gradient vanishes, above the second it explodes."""

    vanishing: float
    exploding: float


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor that is in gradients.

    Attributes:
        value: The factor; None where it is not known.
        provenance: How it is known.
    """

    value: float | None
    provenance: ScaleProvenance


@dataclass(frozen=True, slots=True, eq=False)
class OutputFacts:
    """What came to one output tensor.

    Attributes:
        layer: Index of the module that gave it.
        node: What made it in the graph of the backward; None where nothing recorded did.
        key: The same for outputs that are one tensor.
        num_arrivals: Gradients that came.
        norm: L2 norm of all of them, as observed.
        num_values: Their entries.
        num_zero: Entries that are zero.
        num_nonfinite: Entries that are not finite.
        reason: Why a gradient could not be measured, else ``""``.
        scope: What the numbers cover.
    """

    layer: int
    node: object
    key: tuple[int, int]
    num_arrivals: int
    norm: float
    num_values: int
    num_zero: int
    num_nonfinite: int
    reason: str
    scope: Scope


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What is known of a module beside its outputs.

    Attributes:
        layer: Index of the module.
        name: Its name.
        type_name: Of its class.
        num_calls: Calls that were seen.
        reason: Why its outputs could not be watched, else ``""``.
        parameter_norm: L2 norm over its own parameters' gradients, as they stand; None without any.
        num_parameters: Its own parameters that need a gradient.
        num_parameters_without_gradient: Of these, those without one.
        parameter_scope: What the norm covers.
    """

    layer: int
    name: str
    type_name: str
    num_calls: int
    reason: str
    parameter_norm: float | None
    num_parameters: int
    num_parameters_without_gradient: int
    parameter_scope: Scope


@dataclass(frozen=True, slots=True)
class GradHealthRow:
    """What one backward brought to the outputs and to the own parameters of a module.

    Attributes:
        module: Without segments of wrappers; ``""`` is the model.
        type_name: Of its class.
        num_calls: Calls that were seen.
        num_outputs: Output tensors that could get a gradient.
        num_arrived: Of these, those that did.
        norm: L2 norm over all of these gradients, with the loss scale divided out where it is known; None
            where there is none, or it is not finite.
        num_values: Entries of these gradients.
        num_zero: Entries that are zero.
        num_nonfinite: Entries that are NaN or infinite.
        parameter_norm: L2 norm over its own parameters' ``.grad`` at the end of the block, as it stands: with
            what was there before, and with the loss scale if that is still in it.
        num_parameters: Its own parameters that need a gradient.
        num_parameters_without_gradient: Of these, those whose ``.grad`` is None.
        flags: What its outputs' gradients show: codes of findings.
        is_frontier: Whether one of the flags begins here: no module that uses its output shows it. None where
            the graph does not tell.
        frontier_of: These flags.
        magnitude_reason: Why the norm was not compared with the thresholds; ``""`` where it was.
        reason: Why there is no gradient of its outputs; ``""`` where there is.
        scope: What the numbers of outputs cover.
        parameter_scope: What ``parameter_norm`` covers; ``unknown`` where some of the parameters are spread.
        loss_scale: Divided out of ``norm``; None where it is not known.
        scale_provenance: How it is known.
    """

    module: str
    type_name: str
    num_calls: int
    num_outputs: int
    num_arrived: int
    norm: float | None
    num_values: int
    num_zero: int
    num_nonfinite: int
    parameter_norm: float | None
    num_parameters: int
    num_parameters_without_gradient: int
    flags: tuple[str, ...]
    is_frontier: bool | None
    frontier_of: tuple[str, ...]
    magnitude_reason: str
    reason: str
    scope: Scope
    parameter_scope: Scope
    loss_scale: float | None
    scale_provenance: ScaleProvenance

    def to_dict(self) -> dict[str, object]:
        """Returns it as plain values that strict JSON can hold."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(self)}


def rows_of(
    modules: Sequence[ModuleFacts],
    outputs: Sequence[OutputFacts],
    scale: LossScale,
    thresholds: Thresholds,
    *,
    has_backward: bool,
) -> tuple[GradHealthRow, ...]:
    """Returns one row a module.

    Args:
        modules: In the order of the model.
        outputs: In the order of the calls.
        scale: What is in the gradients.
        thresholds: What norms are compared with.
        has_backward: Whether any gradient came to anything.
    """
    reached = {output.layer for output in outputs if output.num_arrivals}
    flags = [
        _flags(output, scale, thresholds, is_missing=has_backward and output.layer not in reached)
        for output in outputs
    ]
    begins = _begins(outputs, flags)
    by_layer: dict[int, list[int]] = {}
    for position, output in enumerate(outputs):
        by_layer.setdefault(output.layer, []).append(position)
    rows = []
    for module in modules:
        own = by_layer.get(module.layer, [])
        shown = dict.fromkeys(flag for position in own for flag in flags[position])
        frontier_of = dict.fromkeys(flag for position in own for flag in (begins or {}).get(position, ()))
        seen = [outputs[position] for position in own if outputs[position].num_arrivals]
        norm = math.hypot(*(output.norm for output in seen)) / (scale.value or 1.0) if seen else math.nan
        scopes = {output.scope for output in seen}
        rows.append(
            GradHealthRow(
                module=module.name,
                type_name=module.type_name,
                num_calls=module.num_calls,
                num_outputs=len(own),
                num_arrived=len(seen),
                norm=norm if math.isfinite(norm) else None,
                num_values=sum(output.num_values for output in seen),
                num_zero=sum(output.num_zero for output in seen),
                num_nonfinite=sum(output.num_nonfinite for output in seen),
                parameter_norm=module.parameter_norm,
                num_parameters=module.num_parameters,
                num_parameters_without_gradient=module.num_parameters_without_gradient,
                flags=tuple(shown),
                is_frontier=None if begins is None and shown else bool(frontier_of),
                frontier_of=tuple(frontier_of),
                magnitude_reason=_magnitude_reason(seen, scale),
                reason=_reason(module, [outputs[position] for position in own], has_backward=has_backward),
                scope=scopes.pop() if len(scopes) == 1 else Scope.LOCAL if not scopes else Scope.UNKNOWN,
                parameter_scope=module.parameter_scope,
                loss_scale=scale.value,
                scale_provenance=scale.provenance,
            )
        )
    return tuple(rows)


def findings_of(rows: Sequence[GradHealthRow]) -> tuple[HealthFinding, ...]:
    """Returns one finding a code, with the modules where it begins as names."""
    found = []
    for code, (severity, message, remedy) in _CODES.items():
        flagged = [row for row in rows if code in row.flags]
        if not flagged:
            continue
        begins = [row for row in flagged if code in row.frontier_of]
        where = (
            f"it begins at {begins[0].module or '(model)'!r}" if begins else "where it begins is not known"
        )
        named = begins or flagged
        found.append(
            HealthFinding(
                code=code,
                severity=severity,
                message=f"{len(flagged)} of {len(rows)} modules {message}; {where}",
                names=tuple([row.module for row in named]),
                values={
                    row.module: {
                        "norm": row.norm,
                        "num_values": row.num_values,
                        "num_zero": row.num_zero,
                        "num_nonfinite": row.num_nonfinite,
                        "num_flagged_modules": len(flagged),
                        "loss_scale": row.loss_scale,
                        "scale_provenance": row.scale_provenance.value,
                    }
                    for row in named
                },
                remedy=remedy,
            )
        )
    return gravest_first(found)


def _flags(
    output: OutputFacts, scale: LossScale, thresholds: Thresholds, *, is_missing: bool
) -> tuple[str, ...]:
    """Returns what the gradients of one output show; that none came, where none came to its module."""
    if output.num_arrivals == 0:
        return (_MISSING,) if is_missing and not output.reason else ()
    if output.num_values == 0:
        return ()
    if output.num_nonfinite:
        return (_NONFINITE,)
    if output.num_zero == output.num_values:
        return (_ZERO,)
    if scale.value is None:
        return ()
    norm = output.norm / scale.value
    if norm > thresholds.exploding:
        return (_EXPLODING,)
    return (_VANISHING,) if norm < thresholds.vanishing else ()


def _begins(
    outputs: Sequence[OutputFacts], flags: Sequence[tuple[str, ...]]
) -> Mapping[int, tuple[str, ...]] | None:
    """Returns by output which of its flags begin there: no output made of it has them; None if unknown."""
    flagged_nodes: dict[int, set[str]] = {}
    for output, own in zip(outputs, flags, strict=True):
        flagged_nodes.setdefault(id(output.node), set()).update(own)
    if not any(flags):
        return {}
    users = users_of([output.node for output in outputs if output.node is not None])
    if users is None:
        return None
    begins: dict[int, tuple[str, ...]] = {}
    taken: set[tuple[int, int]] = set()
    for position, (output, own) in enumerate(zip(outputs, flags, strict=True)):
        # Of modules that hand the same tensor on, the first one made it.
        if own and output.key not in taken:
            behind = {flag for user in users.get(id(output.node), ()) for flag in flagged_nodes[user]}
            begins[position] = tuple([flag for flag in own if flag not in behind])
        taken.add(output.key)
    return begins


def _magnitude_reason(seen: Sequence[OutputFacts], scale: LossScale) -> str:
    """Returns why norms were not compared with thresholds."""
    if not seen:
        return "no_gradient"
    if any(output.num_nonfinite for output in seen):
        return "nonfinite"
    if scale.value is None:
        return "unknown_scale: give scaler=, None declares that there is none"
    return ""


def _reason(module: ModuleFacts, own: Sequence[OutputFacts], *, has_backward: bool) -> str:
    """Returns why there is no gradient of a module's outputs."""
    if module.reason:
        return module.reason
    if module.num_calls == 0:
        return "never_called: this thread made no call inside the block"
    if not own:
        return "no_gradient: no output requires one"
    for output in own:
        if output.reason:
            return output.reason
    if any(output.num_arrivals for output in own):
        return ""
    return "no_gradient" if has_backward else "no_backward: none ran inside the block"
