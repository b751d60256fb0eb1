"""One backward, looked at module by module: where gradients are zero, missing, nonfinite, small or large.

A layer that passes nothing on leaves every layer before it without a gradient, so that many modules show the
same thing and one is where it begins. The gradient of each output that a module gives is measured when it
comes; and the graph that the backward went through tells which of these outputs were made from which. A
module is a *frontier* of something if it shows it and none of those that use its output does.
"""

import json
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from torchinstruments.checks.findings import MAX_NAMES, Unavailable
from torchinstruments.checks.grad_rows import (
    GradHealthRow,
    LossScale,
    ModuleFacts,
    OutputFacts,
    Thresholds,
    findings_of,
    rows_of,
)
from torchinstruments.checks.health_findings import HealthFinding, printed
from torchinstruments.checks.layer_watch import LayerWatch, matches
from torchinstruments.checks.measures import measurable, norms, scope_of, scope_of_all
from torchinstruments.checks.reading import Column, Reading
from torchinstruments.checks.registration import names_of, positive_of
from torchinstruments.config import UNSET
from torchinstruments.errors import CheckLifecycleError, ConfigurationError
from torchinstruments.observe.engine import graph_task, is_capturing_graph, is_in_backward, tracing
from torchinstruments.observe.fused import FusedRegion
from torchinstruments.observe.hooks import GradientHook, take_out
from torchinstruments.observe.leaves import tensors_in
from torchinstruments.observe.selection import Layer
from torchinstruments.observe.stack import is_in_reentrant_checkpoint
from torchinstruments.ranks.declared_scale import declared_scale_of
from torchinstruments.records import Reason, ScaleProvenance, Scope, error_text
from torchinstruments.statistics.isolation import isolated, unintercepted

__all__ = ["EXPLODING_THRESHOLD", "SCHEMA_VERSION", "VANISHING_THRESHOLD", "GradHealth", "grad_health"]

SCHEMA_VERSION = 1
"""Of `GradHealth.to_dict`."""

VANISHING_THRESHOLD = 1e-7
"""L2 norm below which a gradient that is not zero is said to vanish, in unscaled units."""

EXPLODING_THRESHOLD = 1e4
"""L2 norm above which a gradient is said to explode, in unscaled units."""

_MAX_TARGETS = 20_000
"""Outputs whose gradients are watched."""

_MAX_ARRIVALS = 16
"""Gradients of one output that are measured; more come only from more backwards."""

_MAX_ERRORS = 20
_MAX_PRINTED = 10


@dataclass(slots=True, eq=False)
class _Target:
    """One output tensor whose gradient is awaited.

    Attributes:
        layer: Whose it is.
        tensor: Held weakly: its memory is the program's.
        hook: On the tensor.
        handle: Removes it, also where the tensor is gone or was written since; None before it is there.
        node: What made it, in the graph of the backward; None for a leaf.
        key: The same for outputs that are one tensor.
        numbers: Of each gradient that came: norm, zeros and nonfinite entries on the device, and its entries.
        num_arrivals: Gradients that came.
        reason: Why one could not be measured.
        scope: What of a spread tensor the numbers cover.
    """

    layer: Layer
    tensor: "weakref.ref[torch.Tensor]"
    hook: GradientHook
    node: object
    key: tuple[int, int]
    handle: RemovableHandle | None = None
    numbers: list[tuple[list[torch.Tensor], int]] = field(default_factory=list)
    num_arrivals: int = 0
    reason: str = ""
    scope: Scope = Scope.LOCAL


class GradHealth:
    """What `grad_health` sees; complete when its block has ended. Not made by hand.

    Args:
        model: The model.
        scaler: What multiplies the loss.
        within: Names of modules or patterns; None for every one without children or with parameters.
        thresholds: What norms are compared with.

    Raises:
        ConfigurationError: ``within`` stands for nothing.
    """

    def __init__(
        self, model: nn.Module, scaler: object, within: tuple[str, ...] | None, thresholds: Thresholds
    ) -> None:
        self._scaler = scaler
        self._within = within
        self._thresholds = thresholds
        self._layers = LayerWatch(model, self._wants, self)
        self._targets: list[_Target] = []
        self._num_calls: Counter[int] = Counter()
        self._checkpointed: set[int] = set()
        self._num_unwatched = 0
        self._backwards: set[int] = set()
        self._scale: torch.Tensor | None = None
        self._errors: Counter[str] = Counter()
        self._state = "new"
        self._rows: tuple[GradHealthRow, ...] = ()
        self._findings: tuple[HealthFinding, ...] = ()
        self._unavailable: tuple[Unavailable, ...] = ()
        self.num_too_deep = 0
        """Hooks that the stack had no room for."""
        for pattern in within or ():
            if not any(matches(pattern, layer) for layer in self._layers.all):
                shown = ", ".join(repr(layer.name) for layer in self._layers.all[1:4])
                raise ConfigurationError(
                    f"within has {pattern!r}, which is no module of the model; give names as in "
                    f"model.named_modules(), such as {shown}, or patterns with *"
                )

    @property
    def rows(self) -> tuple[GradHealthRow, ...]:
        """One a module, in the order of the model; none until the block has ended."""
        return self._rows

    @property
    def findings(self) -> tuple[HealthFinding, ...]:
        """Gravest first, one a code; ``names`` are the modules where it begins."""
        return self._findings

    @property
    def unavailable(self) -> tuple[Unavailable, ...]:
        """What could not be looked at, by reason."""
        return self._unavailable

    @property
    def num_backwards(self) -> int:
        """Backwards that brought gradients; the numbers of several are added up."""
        return len(self._backwards)

    def row(self, module: str) -> GradHealthRow:
        """Returns the row of a module.

        Raises:
            KeyError: No row has this name.
        """
        for row in self._rows:
            if row.module == module:
                return row
        if self._state != "ended":
            raise KeyError("there are no rows before the block of grad_health has ended; ask after it")
        shown = ", ".join(repr(row.module) for row in self._rows[:3])
        raise KeyError(
            f"{module!r} is no module that was audited; give a name as in model.named_modules(), such as "
            f"{shown or 'none, for none was'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain values that strict JSON can hold."""
        return {
            "schema_version": SCHEMA_VERSION,
            "findings": [finding.to_dict() for finding in self._findings],
            "rows": [row.to_dict() for row in self._rows],
            "unavailable": [entry.to_dict() for entry in self._unavailable],
            "num_backwards": self.num_backwards,
            "vanishing_threshold": self._thresholds.vanishing,
            "exploding_threshold": self._thresholds.exploding,
        }

    def to_json(self, *, indent: int | None = 1) -> str:
        """Returns `to_dict` as strict JSON.

        Args:
            indent: Spaces a level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True, allow_nan=False)

    def __str__(self) -> str:
        """Returns a summary for people."""
        if self._state != "ended":
            return "GradHealth: complete when its block has ended"
        seen = sum(row.num_arrived > 0 for row in self._rows)
        lines = [f"  gradients came to outputs of {seen} of {len(self._rows)} modules"]
        for entry in self._unavailable[:_MAX_PRINTED]:
            more = ", ..." if entry.num_names > 3 else ""
            names = ", ".join([name or "(model)" for name in entry.names[:3]])
            lines.append(f"  unavailable: {names}{more}: {entry.reason}")
        return printed("GradHealth", self._findings, lines)

    def begin(self) -> None:
        """Places the hooks (training thread).

        Raises:
            CheckLifecycleError: It was done before.
        """
        if self._state != "new":
            raise CheckLifecycleError("this grad_health was entered before; make a new one for each backward")
        self._state = "watching"
        try:
            self._layers.place()
        except BaseException:
            self._layers.remove()
            raise

    def end(self) -> None:
        """Removes the hooks, and reads what was measured, once a device (training thread)."""
        if self._state != "watching":
            return
        self._state = "ended"
        self._layers.remove()
        for target in self._targets:
            if target.handle is not None:
                target.handle.remove()
            elif (tensor := target.tensor()) is not None:
                take_out(tensor, target.hook)
        self._conclude()
        self._targets.clear()

    def receive(self, layer: Layer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Does nothing: gradients are those of outputs (training thread, hot path)."""

    def observe(self, layer: Layer, output: object) -> None:
        """Has the gradients of an output watched; it never raises (training thread, hot path)."""
        if self._state != "watching" or is_in_backward() or tracing():
            return
        try:
            self._num_calls[layer.index] += 1
            if is_in_reentrant_checkpoint():
                self._checkpointed.add(layer.index)
            for _, tensor in tensors_in(output).tensors:
                with unintercepted():
                    self._watch(layer, tensor)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._fail(error)

    def arrived(self, number: int, gradient: torch.Tensor | None) -> None:
        """Measures a gradient; it never raises (autograd thread, hot path)."""
        if self._state != "watching" or gradient is None:
            return
        target = self._targets[number]
        try:
            self._backwards.add(graph_task())
            target.num_arrivals += 1
            if is_capturing_graph():
                target.reason = Reason.GRAPH_CAPTURE.value
            elif len(target.numbers) >= _MAX_ARRIVALS:
                target.reason = f"too_many_gradients: only {_MAX_ARRIVALS} of one output are measured"
            else:
                with unintercepted(), isolated(gradient):
                    self._measure(target, gradient)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            target.reason = f"hook_error: {type(error).__name__}"
            self._fail(error)

    def num_calls(self, region: FusedRegion) -> int:
        """Returns how many calls were seen inside a region so far (training thread, hot path)."""
        return sum(self._num_calls[layer.index] for layer in region.inside)

    def region_ended(self, region: FusedRegion, num_calls_before: int) -> None:
        """Does nothing: a call that runs fused brings no gradients (training thread, hot path)."""

    def _wants(self, layer: Layer) -> bool:
        if self._within is None:
            module = layer.module
            has_own = next(module.parameters(recurse=False), None) is not None
            return has_own or is_parametrized(module) or next(module.children(), None) is None
        return any(matches(pattern, layer) for pattern in self._within)

    def _watch(self, layer: Layer, tensor: torch.Tensor) -> None:
        """Puts a hook on an output that can get a gradient."""
        if not tensor.requires_grad:
            return
        if len(self._targets) >= _MAX_TARGETS:
            self._num_unwatched += 1
            return
        node = tensor.grad_fn
        key = (id(tensor), -1) if node is None else (id(node), tensor.output_nr)
        hook = GradientHook(self, len(self._targets))
        target = _Target(layer, weakref.ref(tensor), hook, node, key)
        self._targets.append(target)
        target.handle = tensor.register_hook(hook)

    def _measure(self, target: _Target, gradient: torch.Tensor) -> None:
        """Queues the numbers of a gradient, and keeps the loss scale that is in it."""
        scale = getattr(self._scaler, "_scale", None)
        if self._scale is None and isinstance(scale, torch.Tensor):
            self._scale = scale.detach().clone()
        found = measurable(gradient.detach())
        target.scope = scope_of(gradient)
        if isinstance(found, str):
            target.reason = found
            return
        ((_, norm),) = norms([found])
        num_nonfinite = torch.logical_not(torch.isfinite(found)).sum()
        numbers = [norm, (found == 0).sum().reshape(1), num_nonfinite.reshape(1)]
        target.numbers.append((numbers, found.numel()))

    def _fail(self, error: Exception) -> None:
        reason = f"hook_error: {type(error).__name__}: {error_text(error)}"[:200]
        if reason in self._errors or len(self._errors) < _MAX_ERRORS:
            self._errors[reason] += 1

    def _conclude(self) -> None:
        """Makes rows and findings (training thread)."""
        with unintercepted(), isolated("cpu"):
            reading = Reading()
            scale = None if self._scale is None else reading.add_one(self._scale)
            columns = [
                [_added(reading, numbers) for numbers, _ in target.numbers] for target in self._targets
            ]
            owned = [_own_gradients(layer, reading) for layer in self._layers.chosen]
            reading.fetch()
        outputs = [_output(target, own) for target, own in zip(self._targets, columns, strict=True)]
        modules = [
            _module(layer, own, self._num_calls[layer.index], self._reason_of(layer))
            for layer, own in zip(self._layers.chosen, owned, strict=True)
        ]
        self._rows = rows_of(
            modules, outputs, self._loss_scale(scale), self._thresholds, has_backward=bool(self._backwards)
        )
        self._findings = findings_of(self._rows)
        self._unavailable = self._reasons()

    def _loss_scale(self, column: Column | None) -> LossScale:
        """Returns what multiplied the loss."""
        if self._scaler is UNSET:
            return LossScale(None, ScaleProvenance.UNKNOWN)
        if self._scaler is None:
            return LossScale(1.0, ScaleProvenance.UNSCALED)
        if isinstance(self._scaler, (int, float)):
            return LossScale(float(self._scaler), ScaleProvenance.EXPLICIT)
        is_enabled = getattr(self._scaler, "is_enabled", None)
        if callable(is_enabled) and not is_enabled():
            return LossScale(1.0, ScaleProvenance.UNSCALED)
        if column is None or not column.first > 0:
            return LossScale(None, ScaleProvenance.UNKNOWN)
        return LossScale(column.first, ScaleProvenance.GRADSCALER)

    def _reason_of(self, layer: Layer) -> str:
        """Returns why nothing of a module could be seen."""
        if layer.name in self._layers.unseen:
            return self._layers.unseen[layer.name]
        return Reason.REENTRANT_CHECKPOINT.value if layer.index in self._checkpointed else ""

    def _reasons(self) -> tuple[Unavailable, ...]:
        """Returns by reason what could not be looked at."""
        names: dict[str, list[str]] = {}
        for row in self._rows:
            if row.reason:
                names.setdefault(row.reason, []).append(row.module)
            elif row.magnitude_reason.startswith("unknown_scale"):
                names.setdefault(row.magnitude_reason, []).append(row.module)
        found = [
            Unavailable("grad_health", reason, tuple(own[:MAX_NAMES]), len(own), len(own))
            for reason, own in sorted(names.items())
        ]
        found += [Unavailable("grad_health", reason, (), 0, count) for reason, count in self._errors.items()]
        if self._num_unwatched:
            reason = f"too_many_outputs: only {_MAX_TARGETS} are watched"
            found.append(Unavailable("grad_health", reason, (), 0, self._num_unwatched))
        if self.num_too_deep:
            found.append(Unavailable("grad_health", "stack_too_deep", (), 0, self.num_too_deep))
        return tuple(found)


class grad_health(AbstractContextManager[GradHealth]):  # noqa: N801 - reads as what it surrounds
    """Watches a forward and its backward.

    ::

        with grad_health(model, scaler=None) as health:
            loss(model(x)).backward()
        print(health)

    Args:
        model: The model.
        scaler: How the loss is scaled: a ``GradScaler``, a number, or None, which declares that it is not.
            Not given, norms are not compared with thresholds, for a loss scale may be in them.
        within: Names of modules, or patterns with ``*``; None for every module without children or with
            parameters of its own.
        vanishing_threshold: L2 norm below which a gradient vanishes, in unscaled units.
        exploding_threshold: L2 norm above which one explodes.

    Raises:
        ConfigurationError: An argument is not possible, or ``within`` stands for nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        scaler: object = UNSET,
        within: Sequence[str] | None = None,
        vanishing_threshold: float = VANISHING_THRESHOLD,
        exploding_threshold: float = EXPLODING_THRESHOLD,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"model={type(model).__name__} has no modules; give an nn.Module")
        vanishing = positive_of("vanishing_threshold", vanishing_threshold)
        exploding = positive_of("exploding_threshold", exploding_threshold)
        if vanishing >= exploding:
            raise ConfigurationError(
                f"vanishing_threshold={vanishing!r} is not below exploding_threshold={exploding!r}; "
                f"give a smaller one"
            )
        self._health = GradHealth(
            model,
            declared_scale_of(scaler),
            names_of("within", within, "modules"),
            Thresholds(vanishing, exploding),
        )

    def __enter__(self) -> GradHealth:
        """Places the hooks.

        Raises:
            CheckLifecycleError: It was entered before.
        """
        self._health.begin()
        return self._health

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes the hooks, and reads what was measured."""
        self._health.end()


def _added(reading: Reading, numbers: Sequence[torch.Tensor]) -> Column:
    """Queues numbers of one element each."""
    return reading.add([([place], number) for place, number in enumerate(numbers)])


def _own_gradients(layer: Layer, reading: Reading) -> tuple[Column, int, int, Scope]:
    """Queues the norms of a module's own gradients.

    Returns:
        The norms, the parameters that need a gradient, those without one, and what the norms cover.
    """
    own = [parameter for parameter in layer.module.parameters(recurse=False) if parameter.requires_grad]
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    found = [measurable(gradient.detach()) for gradient in gradients]
    tensors = [tensor for tensor in found if not isinstance(tensor, str)]
    column = reading.add(norms(tensors) if tensors else [])
    return column, len(own), len(own) - len(gradients), scope_of_all(own)


def _module(layer: Layer, own: tuple[Column, int, int, Scope], num_calls: int, reason: str) -> ModuleFacts:
    """Returns what is known of a module beside its outputs."""
    column, num_parameters, num_without, scope = own
    norm = math.hypot(*column.numbers.tolist()) if column.num_values else math.nan
    return ModuleFacts(
        layer=layer.index,
        name=layer.name,
        type_name=type(layer.module).__name__,
        num_calls=num_calls,
        reason=reason,
        parameter_norm=norm if math.isfinite(norm) else None,
        num_parameters=num_parameters,
        num_parameters_without_gradient=num_without,
        parameter_scope=scope,
    )


def _output(target: _Target, columns: Sequence[Column]) -> OutputFacts:
    """Returns what came to an output."""
    values = [column.numbers.tolist() for column in columns]
    return OutputFacts(
        layer=target.layer.index,
        node=target.node,
        key=target.key,
        num_arrivals=target.num_arrivals,
        norm=math.hypot(*[norm for norm, _, _ in values]) if values else 0.0,
        num_values=sum(num_entries for _, num_entries in target.numbers),
        num_zero=sum(int(zero) for _, zero, _ in values),
        num_nonfinite=sum(int(nonfinite) for _, _, nonfinite in values),
        reason=target.reason,
        scope=target.scope,
    )
