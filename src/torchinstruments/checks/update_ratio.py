"""How far a step moved each parameter, against its size: raw, and divided by its own group's learning rate.

Both are L2 norms of all elements: ``|after - before| / |before|``. The values of every parameter are in the
report, whether they leave a band or not.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from torchinstruments.checks.check import Check, Ground, Judge, StepLook
from torchinstruments.checks.findings import Action, EvidenceKind, Finding, GradientStage, Severity
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.measures import is_finite, scope_of
from torchinstruments.checks.reading import Column
from torchinstruments.checks.selection import Watched
from torchinstruments.checks.sustained import WARN_WINDOW, Sustained
from torchinstruments.records import ScaleProvenance

__all__ = ["UpdateRatioCheck"]


@dataclass(slots=True)
class _Row:
    """The ratios of one parameter."""

    num_looks: int = 0
    last: float | None = None
    lowest: float | None = None
    highest: float | None = None
    last_per_lr: float | None = None
    lr: float | None = None

    def take(self, ratio: float, lr: float | None) -> None:
        """Takes a finite ratio and the learning rate that it came about with."""
        self.num_looks += 1
        self.last = ratio
        self.lowest = ratio if self.lowest is None else min(self.lowest, ratio)
        self.highest = ratio if self.highest is None else max(self.highest, ratio)
        self.lr = lr
        self.last_per_lr = ratio / lr if lr else None


class UpdateRatioCheck(Check):
    """Measures update ratios.

    Args:
        within: Names of the parameters; None for all.
        bounds: What a raw ratio may be, bounds included; None judges nothing.
        every: Applied steps of an optimizer between two looks.
        action: What is done about one that leaves the bounds.
    """

    name = "update_ratio"

    def __init__(
        self,
        within: tuple[str, ...] | None,
        bounds: tuple[float | None, float | None] | None,
        every: int,
        action: Action,
    ) -> None:
        super().__init__()
        self._watched = Watched(within)
        self._bounds = bounds
        self._every = every
        self._action = action
        self._ground: Ground | None = None
        self._num_steps: dict[int | None, int] = defaultdict(int)
        self._rows: dict[int, _Row] = {}
        self._windows: dict[int | None, Sustained] = {}
        self._zero_baselines: set[int] = set()
        self._rates: Mapping[int, float | Column | None] = {}
        self._is_due = False

    @override
    def attached(self, ground: Ground) -> None:
        self._ground = ground
        self._watched.attached(ground.inventory)

    @override
    def before_write(self, look: StepLook) -> Judge | None:
        self._is_due = self._num_steps[look.moment.optimizer] % self._every == 0
        if self._is_due:
            look.wanted.update(self._watched.own(look))
            # As the step uses them; a scheduler may change them before its end is seen.
            self._rates = {number: _rate(look, number) for number in set(look.positions.values())}
        return None

    @override
    def after_write(self, look: StepLook) -> Judge | None:
        self._num_steps[look.moment.optimizer] += 1
        if not self._is_due:
            return None
        self._is_due = False
        own = [index for index in look.snapshots if index in self._watched.indices]
        befores, changes, rates = look.befores(), look.changes(), self._rates

        def judge() -> None:
            self._judge(look, own, befores.by_index, changes.by_index, rates)

        return judge

    @override
    def snapshot_indices(self, inventory: Inventory) -> frozenset[int]:
        entries = inventory.entries
        return frozenset([i for i in self._watched.chosen(inventory) if entries[i].tensor.requires_grad])

    @override
    def finish(self) -> None:
        ground = self._ground
        if ground is not None:
            for reason, indices in self._watched.unseen().items():
                ground.unavailable(self.name, reason, ground.inventory.names(indices))

    @override
    def facts(self) -> Mapping[str, object]:
        ground = self._ground
        names = {} if ground is None else {i: ground.inventory.name(i) for i in self._rows}
        return {
            "bounds": self._bounds,
            "every": self._every,
            "stage": GradientStage.POST_WRITE.value,
            "scale_provenance": ScaleProvenance.UNSCALED.value,
            "parameters": {
                names[index]: {
                    "num_looks": row.num_looks,
                    "last": row.last,
                    "lowest": row.lowest,
                    "highest": row.highest,
                    "last_per_lr": row.last_per_lr,
                    "lr": row.lr,
                }
                for index, row in self._rows.items()
            },
        }

    def _judge(
        self,
        look: StepLook,
        own: list[int],
        befores: Mapping[int, float],
        changes: Mapping[int, float],
        rates: Mapping[int, float | Column | None],
    ) -> None:
        outside: dict[int, float] = {}
        observed: list[int] = []
        new_zero: list[int] = []
        for index in own:
            before, change = befores[index], changes[index]
            if not (is_finite(before) and is_finite(change)):
                continue
            if before == 0:
                if change != 0 and index not in self._zero_baselines:
                    self._zero_baselines.add(index)
                    new_zero.append(index)
                continue
            rate = rates.get(look.positions[index])
            lr = rate.values[0] if isinstance(rate, Column) else rate
            ratio = change / before
            self._rows.setdefault(index, _Row()).take(ratio, lr)
            observed.append(index)
            if not _is_inside(ratio, self._bounds):
                outside[index] = ratio
        if new_zero:
            self._emit_zero_baseline(look, new_zero)
        if self._bounds is None:
            return
        due = list(outside)
        if self._action is Action.WARN:
            windows = self._windows.setdefault(look.moment.optimizer, Sustained(WARN_WINDOW))
            due = windows.observe(outside, frozenset(observed))
        if due:
            self._emit_outside(look, due, outside, len(observed))

    def _emit_outside(
        self, look: StepLook, due: list[int], outside: Mapping[int, float], num_observed: int
    ) -> None:
        ground = self._ground
        assert ground is not None
        assert self._bounds is not None
        furthest = max(due, key=lambda index: outside.get(index, 0.0))
        low, high = self._bounds
        names = ground.inventory.names(due)
        ground.emit(
            Finding(
                check=self.name,
                code="update_ratio_out_of_band",
                severity=Severity.WARNING,
                action=self._action,
                message=f"{len(due)} update ratios lie outside [{low}, {high}] ({names[0]} first)",
                names=names,
                values={
                    "low": low,
                    "high": high,
                    "ratio_highest": outside.get(furthest),
                    "ratio_lowest": min((outside[i] for i in due if i in outside), default=None),
                    "lr": self._rows[furthest].lr,
                },
                moment=look.moment,
                stage=GradientStage.POST_WRITE,
                scale_provenance=ScaleProvenance.UNSCALED,
                evidence=EvidenceKind.CLONE,
                scope=scope_of(ground.inventory.entries[due[0]].tensor),
                coverage=f"{num_observed}/{len(look.positions)} parameters",
                remedy="compare the learning rate of the parameters' group; the report has every ratio, also "
                "divided by it",
            )
        )

    def _emit_zero_baseline(self, look: StepLook, indices: list[int]) -> None:
        ground = self._ground
        assert ground is not None
        names = ground.inventory.names(indices)
        ground.emit(
            Finding(
                check=self.name,
                code="update_ratio_zero_baseline",
                severity=Severity.INFO,
                action=Action.COLLECT,
                message=f"{len(indices)} parameters were all zero before the step and have no ratio",
                names=names,
                moment=look.moment,
                stage=GradientStage.POST_WRITE,
                scale_provenance=ScaleProvenance.UNSCALED,
                evidence=EvidenceKind.CLONE,
                scope=scope_of(ground.inventory.entries[indices[0]].tensor),
                zero_baseline=True,
            )
        )


def _is_inside(ratio: float, bounds: tuple[float | None, float | None] | None) -> bool:
    low, high = bounds or (None, None)
    return (low is None or ratio >= low) and (high is None or ratio <= high)


def _rate(look: StepLook, group: int) -> float | Column | None:
    """Returns a group's learning rate, queued where it is a tensor; None where it has none."""
    lr = look.optimizer.param_groups[group].get("lr")
    if isinstance(lr, torch.Tensor):
        return look.reading.add((lr.detach(),))
    return float(lr) if isinstance(lr, (int, float)) else None
