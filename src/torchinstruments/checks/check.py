"""What a check is to its session, and what it is shown.

A session visits four sites. At each a check queues its device work and returns a judge; all numbers of a
visit are fetched together, and then every judge runs:

1. ``backward_ended`` (autograd thread): what one backward added, before clipping and unscaling, on attempts
   that the loss scaler skips too. Its judges wait until the attempt's step, or until the scaler skips it.
2. ``before_write`` (training thread): as the optimizer finds them, before it writes; the last moment at which
   a raise leaves the weights as they were. With a closure, after each evaluation.
3. ``after_write`` (training thread): after a step that was applied.
4. ``attempt_closed`` (training thread): the ledger's record of an attempt, some attempts later.

Whatever raises in a check becomes an unavailable entry. A check never raises a finding by itself: it hands it
over, and the session raises when everything of the visit is in the report.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from torchinstruments.checks.copies import Copies
from torchinstruments.checks.findings import Finding, GradientStage, Moment
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.measures import norms, sort_out
from torchinstruments.checks.reading import Column, Numbers, Reading
from torchinstruments.records import AttemptRecord, GradSync, ScaleProvenance

__all__ = ["BackwardLook", "Check", "Ground", "Judge", "Measured", "StepLook"]

Judge: TypeAlias = Callable[[], None]
"""Looks at numbers that were fetched, and hands over findings (training or autograd thread)."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What a check stands on, from `attached` on.

    Attributes:
        inventory: What the session watches.
        emit: Takes a finding.
        unavailable: Takes check, reason and names of what could not be looked at.
        clip_norm: What the caller declared that gradients are clipped to.
    """

    inventory: Inventory
    emit: Callable[[Finding], None]
    unavailable: Callable[[str, str, tuple[str, ...]], None]
    clip_norm: float | None = None


class Check:
    """Base of all checks: a site that a check does not override is never called for it.

    Attributes:
        name: As in reports.
        has_run: Whether it has looked at anything.
        is_passive: Whether it only takes what others ask for, so that no site is visited for it alone.
    """

    name: str = ""
    is_passive = False

    def __init__(self) -> None:
        self.has_run = False

    def attached(self, ground: Ground) -> None:
        """Takes what it stands on, before any site (training thread, at attach)."""

    def backward_ended(self, look: "BackwardLook") -> Judge | None:
        """Takes the end of a backward (autograd thread, hot path)."""

    def before_write(self, look: "StepLook") -> Judge | None:
        """Takes gradients as the optimizer finds them (training thread, hot path)."""

    def after_write(self, look: "StepLook") -> Judge | None:
        """Takes parameters as an applied step left them (training thread, hot path)."""

    def attempt_closed(self, record: AttemptRecord) -> None:
        """Takes the record of an attempt, complete (training thread)."""

    def finish(self, unavailable: Callable[[str, str, tuple[str, ...]], None], *, is_final: bool) -> None:
        """Says what was asked for and never came (training thread, at each report).

        Args:
            unavailable: Takes check, reason and names, for this report alone.
            is_final: Whether nothing more will come, so that what is open is to be judged as it is.
        """

    def detached(self) -> None:
        """Drops what it holds of the model (training thread, at detach)."""

    def snapshot_indices(self, inventory: Inventory) -> frozenset[int]:  # noqa: ARG002 - none by default
        """Returns of which parameters it needs copies around a step, which all checks share."""
        return frozenset()

    def baseline_indices(self, inventory: Inventory) -> frozenset[int]:  # noqa: ARG002 - none by default
        """Returns of which tensors it keeps copies of its own."""
        return frozenset()

    def facts(self) -> Mapping[str, object] | None:
        """Returns values for the report that are no findings; None for none."""
        return None


@dataclass(slots=True, eq=False)
class Measured:
    """One norm for each of some tensors, and why others have none.

    Attributes:
        indices: Of the tensors, in the inventory.
        tensors: As they were measured, of the first indices; those of early norms are not kept.
        column: Their norms.
        reasons: By index, for those that could not be measured.
    """

    indices: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    column: Column
    reasons: Mapping[int, str]
    _by_index: dict[int, float] | None = None

    @property
    def norms(self) -> Numbers:
        """The norms in the order of `indices`, once they were fetched."""
        return self.column.numbers

    @property
    def by_index(self) -> dict[int, float]:
        """The norms by index, once they were fetched."""
        if self._by_index is None:
            self._by_index = dict(zip(self.indices, self.norms.tolist(), strict=True))
        return self._by_index

    def where(self, chosen: npt.NDArray[np.bool_]) -> list[int]:
        """Returns the indices at which a mask over the norms is set, in order; cheap where it is nowhere."""
        return [self.indices[position] for position in np.flatnonzero(chosen)]

    def nonfinite(self) -> list[int]:
        """Returns the indices of tensors with an element that is not finite."""
        return self.where(~np.isfinite(self.norms))

    @staticmethod
    def of(
        tensors: Mapping[int, torch.Tensor], reading: Reading, early: Mapping[int, torch.Tensor] | None = None
    ) -> "Measured":
        """Queues the norms of tensors (hot path). Call it inside `isolated`.

        Args:
            tensors: By position.
            reading: Takes the norms.
            early: Norms that are known already, by position; each a flat tensor of one.
        """
        if early:
            tensors = {index: tensor for index, tensor in tensors.items() if index not in early}
        ready, reasons = sort_out(tensors)
        measured = tuple(ready.values())
        groups = norms(measured)
        if early:
            start = len(measured)
            groups.append((range(start, start + len(early)), torch.cat(tuple(early.values()))))
        return Measured((*ready, *(early or ())), measured, reading.add(groups), reasons)


@dataclass(slots=True, eq=False)
class BackwardLook:
    """What a backward has added to, at its end.

    Attributes:
        moment: Where training stands.
        fired: Positions of the parameters whose gradients came, each once.
        gradients: What stands in them now, by position; none any more when the judges are called.
        reading: Takes numbers.
        stage: Before clipping, scaled or not.
        scale_provenance: How the loss scale is known.
        loss_scale: The scale; None where there is none or it is unknown.
        grad_sync: Whether ranks have reduced the gradients yet.
    """

    moment: Moment
    fired: tuple[int, ...]
    gradients: Mapping[int, torch.Tensor]
    reading: Reading
    stage: GradientStage
    scale_provenance: ScaleProvenance
    loss_scale: Column | None
    grad_sync: GradSync = GradSync.UNKNOWN
    early: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Norms that were taken when their gradients came, by position: those of `gradients` stand for others."""
    _norms: Measured | None = None

    def release(self) -> None:
        """Drops the gradients, of which only numbers are judged later (hot path)."""
        self.gradients = {}
        if self._norms is not None:
            self._norms.tensors = ()

    def scale(self) -> float | None:
        """Returns the loss scale, once the numbers were fetched; None where none is known."""
        return None if self.loss_scale is None else self.loss_scale.first

    def has_norms(self) -> bool:
        """Returns whether a check has asked for the norms (hot path)."""
        return self._norms is not None

    def norms(self) -> Measured:
        """Queues the norms of the gradients, once for all checks (hot path)."""
        if self._norms is None:
            self._norms = Measured.of(self.gradients, self.reading, self.early)
        return self._norms


@dataclass(slots=True, eq=False)
class StepLook:
    """A step of one optimizer, before or after it writes.

    Attributes:
        optimizer: The optimizer.
        moment: Where training stands.
        positions: Group of each parameter that it steps, by the parameter's position.
        reading: Takes numbers.
        inventory: What the session watches.
        scale_provenance: How the loss scale of the gradients is known.
        loss_scale: The factor that is still in the gradients; None where it is unknown or there is none.
        found_inf: What a scaler found that leaves skipping to the optimizer; None where none does.
        evaluation: Which evaluation of a closure this is, from 0.
    """

    optimizer: Optimizer
    moment: Moment
    positions: Mapping[int, int]
    reading: Reading
    inventory: Inventory
    scale_provenance: ScaleProvenance
    loss_scale: Column | float | None
    found_inf: Column | None = None
    evaluation: int = 0
    wanted: set[int] = field(default_factory=set)
    copies: Copies | None = None
    """Parameters before the write: those that a check had put into `wanted`."""
    _trainable: list[int] | None = None
    _gradients: dict[int, torch.Tensor] | None = None
    _norms: Measured | None = None
    _befores: Measured | None = None
    _changes: Measured | None = None

    @property
    def trainable(self) -> list[int]:
        """Positions of the parameters that it steps and that need a gradient (hot path)."""
        if self._trainable is None:
            entries = self.inventory.entries
            self._trainable = [index for index in self.positions if entries[index].tensor.requires_grad]
        return self._trainable

    @property
    def gradients(self) -> Mapping[int, torch.Tensor]:
        """The gradients that are there, by position (hot path)."""
        if self._gradients is None:
            entries = self.inventory.entries
            self._gradients = {
                index: gradient
                for index in self.positions
                if (gradient := entries[index].tensor.grad) is not None
            }
        return self._gradients

    def has_norms(self) -> bool:
        """Returns whether a check has asked for the norms (hot path)."""
        return self._norms is not None

    def norms(self) -> Measured:
        """Queues the norms of the gradients, once for all checks (hot path)."""
        if self._norms is None:
            self._norms = Measured.of(self.gradients, self.reading)
        return self._norms

    @property
    def copied(self) -> tuple[int, ...]:
        """Positions of the parameters that were copied before the write (hot path)."""
        return () if self.copies is None else self.copies.indices

    def befores(self) -> Measured:
        """Queues the norms of the copied parameters before the write, before any `changes` (hot path)."""
        if self._befores is None:
            copies = self.copies
            found = [] if copies is None else copies.before()
            self._befores = Measured(self.copied, (), self.reading.add(found), {})
        return self._befores

    def changes(self) -> Measured:
        """Queues the norms of what the write added, and spends the copies for that (hot path).

        A norm is 0 if and only if every element is what it was.
        """
        if self._changes is None:
            self.befores()
            copies = self.copies
            found = [] if copies is None else copies.change(self.tensors(self.copied))
            self._changes = Measured(self.copied, (), self.reading.add(found), {})
        return self._changes

    def group(self, index: int) -> Mapping[str, Any]:
        """Returns the options of a parameter's own group."""
        group: Mapping[str, Any] = self.optimizer.param_groups[self.positions[index]]
        return group

    def scale(self) -> float | None:
        """Returns the factor that is still in the gradients, once the numbers were fetched."""
        return self.loss_scale.first if isinstance(self.loss_scale, Column) else self.loss_scale

    def is_skipped(self) -> bool:
        """Returns whether the optimizer skips the write by itself, once the numbers were fetched."""
        return self.found_inf is not None and self.found_inf.first != 0

    def tensors(self, indices: Sequence[int]) -> dict[int, torch.Tensor]:
        """Returns tensors of the inventory by position (hot path)."""
        entries = self.inventory.entries
        return {index: entries[index].tensor for index in indices}
