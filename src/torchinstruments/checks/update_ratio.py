"""How far a step moved each parameter, against its size: raw, and divided by its own group's learning rate.

Both are L2 norms of all elements: ``|after - before| / |before|``. The values of every parameter are in the
report, whether they leave a band or not.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from torchinstruments.checks.check import Ground, Judge, Measured, StepLook
from torchinstruments.checks.findings import Action, EvidenceKind, Finding, GradientStage, Severity
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.measures import scope_of
from torchinstruments.checks.parameter_check import ParameterCheck
from torchinstruments.checks.reading import Column, Numbers
from torchinstruments.records import Reason, ScaleProvenance

__all__ = ["UpdateRatioCheck"]

_Place: TypeAlias = tuple[Mapping[int, int], tuple[int, ...], npt.NDArray[np.intp], npt.NDArray[np.intp]]


class _Table:
    """The ratios of all parameters, by their positions in the inventory.

    Args:
        size: Of the inventory.
    """

    def __init__(self, size: int) -> None:
        self.num_looks = np.zeros(size, np.int64)
        self.last = np.full(size, np.nan)
        self.lowest = np.full(size, np.inf)
        self.highest = np.full(size, -np.inf)
        self.lr = np.full(size, np.nan)

    def take(self, indices: npt.NDArray[np.intp], ratios: Numbers, rates: Numbers) -> None:
        """Takes finite ratios and the learning rates that they came about with (hot path)."""
        self.num_looks[indices] += 1
        self.last[indices] = ratios
        self.lowest[indices] = np.minimum(self.lowest[indices], ratios)
        self.highest[indices] = np.maximum(self.highest[indices], ratios)
        self.lr[indices] = rates

    def take_over(self, former: "_Table", places: Sequence[tuple[int, int]]) -> None:
        """Takes the rows of tensors that stood elsewhere before.

        Args:
            former: What was known of them.
            places: Where each stands now, and where it stood.
        """
        now = np.array([place for place, _ in places], np.intp)
        then = np.array([place for _, place in places], np.intp)
        for name in ("num_looks", "last", "lowest", "highest", "lr"):
            getattr(self, name)[now] = getattr(former, name)[then]

    def row(self, index: int) -> dict[str, float | int | None]:
        """Returns the values of one parameter."""
        last, lr = float(self.last[index]), float(self.lr[index])
        return {
            "num_looks": int(self.num_looks[index]),
            "last": last,
            "lowest": float(self.lowest[index]),
            "highest": float(self.highest[index]),
            "last_per_lr": last / lr if lr > 0 else None,
            "lr": None if math.isnan(lr) else lr,
        }


class UpdateRatioCheck(ParameterCheck):
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
        super().__init__(within, every, action)
        self._bounds = bounds
        self._table = _Table(0)
        self._zero_baselines: set[int] = set()
        self._rates: Mapping[int, float | Column | None] = {}
        self._is_due = False
        self._is_watched = np.zeros(0, np.bool_)
        self._place: _Place | None = None

    @override
    def attached(self, ground: Ground) -> None:
        before = self._ground
        super().attached(ground)
        entries = ground.inventory.entries
        self._is_watched = np.zeros(len(entries), np.bool_)
        self._is_watched[list(self._watched.indices)] = True
        self._place = None
        if before is not None and before.inventory.is_same_as(ground.inventory):
            return
        former, self._table = self._table, _Table(len(entries))
        self._zero_baselines.clear()
        if before is not None:
            places = [(entry.index, before.inventory.index_of(entry.tensor)) for entry in entries]
            self._table.take_over(former, [(now, then) for now, then in places if then is not None])

    @override
    def before_write(self, look: StepLook) -> Judge | None:
        self._is_due = self.is_due(look)
        if self._is_due:
            look.wanted.update(self._watched.own(look))
            # As the step uses them; a scheduler may change them before its end is seen.
            self._rates = {number: _rate(look, number) for number in set(look.positions.values())}
        return None

    @override
    def after_write(self, look: StepLook) -> Judge | None:
        self.step_applied(look)
        if not self._is_due:
            return None
        self._is_due = False
        befores, changes, rates = look.befores(), look.changes(), self._rates

        def judge() -> None:
            reasons = () if look.copies is None else look.copies.reasons.items()
            for index, reason in reasons:
                if index in self._watched.indices and reason != Reason.EMPTY.value:
                    self.ground.unavailable(self.name, reason, self.ground.inventory.names([index]))
            self._judge(look, befores, changes, rates)

        return judge

    def _places(self, look: StepLook, changes: Measured) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Returns positions and groups of what was measured, kept for as long as the same is measured."""
        if self._place is None or self._place[0] is not look.positions or self._place[1] != changes.indices:
            indices = np.array(changes.indices, np.intp)
            groups = np.array([look.positions[index] for index in changes.indices], np.intp)
            self._place = look.positions, changes.indices, indices, groups
        return self._place[2], self._place[3]

    @override
    def snapshot_indices(self, inventory: Inventory) -> frozenset[int]:
        entries = inventory.entries
        return frozenset([i for i in self._watched.chosen(inventory) if entries[i].tensor.requires_grad])

    @override
    def facts(self) -> Mapping[str, object]:
        ground = self._ground
        table = self._table
        return {
            "bounds": self._bounds,
            "every": self._every,
            "stage": GradientStage.POST_WRITE.value,
            "scale_provenance": ScaleProvenance.UNSCALED.value,
            "parameters": {}
            if ground is None
            else {
                ground.inventory.name(int(index)): table.row(int(index))
                for index in np.flatnonzero(table.num_looks)
            },
        }

    def _judge(
        self,
        look: StepLook,
        befores: Measured,
        changes: Measured,
        rates: Mapping[int, float | Column | None],
    ) -> None:
        before, change = _aligned(befores, changes)
        indices, groups = self._places(look, changes)
        chosen = self._is_watched[indices] & np.isfinite(before) & np.isfinite(change)
        is_zero = chosen & (before == 0)
        measured = chosen & (before > 0)
        if not measured.all():
            before, change, kept, groups = (
                before[measured],
                change[measured],
                indices[measured],
                groups[measured],
            )
        else:
            kept = indices
        ratios = change / before
        self._table.take(kept, ratios, _rates_of(rates, groups))
        new_zero = [
            int(index)
            for index, moved in zip(indices[is_zero], changes.norms[is_zero], strict=True)
            if moved != 0 and index not in self._zero_baselines
        ]
        self._zero_baselines.update(new_zero)
        low, high = self._bounds or (None, None)
        is_outside = np.zeros(len(ratios), np.bool_)
        if low is not None:
            is_outside |= ratios < low
        if high is not None:
            is_outside |= ratios > high
        outside = {
            int(index): float(ratio)
            for index, ratio in zip(kept[is_outside], ratios[is_outside], strict=True)
        }
        if new_zero:
            self._emit_zero_baseline(look, new_zero)
        if self._bounds is None:
            return
        due = self.due(outside, frozenset(kept.tolist()))
        if due:
            self._emit_outside(look, due, outside, len(kept))

    def _emit_outside(
        self, look: StepLook, due: list[int], outside: Mapping[int, float], num_observed: int
    ) -> None:
        ground = self.ground
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
                    "lr": float(self._table.lr[furthest]),
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
        ground = self.ground
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


def _aligned(befores: Measured, changes: Measured) -> tuple[Numbers, Numbers]:
    """Returns the norms before the write and of the change, in the order of the changes."""
    if befores.indices == changes.indices:
        return befores.norms, changes.norms
    by_index = befores.by_index
    return np.array([by_index[index] for index in changes.indices]), changes.norms


def _rates_of(rates: Mapping[int, float | Column | None], groups: npt.NDArray[np.intp]) -> Numbers:
    """Returns the learning rate of each of some groups; NaN where it has none."""
    table = np.full(max(rates, default=0) + 1, np.nan)
    for number, rate in rates.items():
        value = rate.first if isinstance(rate, Column) else rate
        table[number] = math.nan if value is None else value
    return table[groups]


def _rate(look: StepLook, group: int) -> float | Column | None:
    """Returns a group's learning rate, queued where it is a tensor; None where it has none."""
    lr = look.optimizer.param_groups[group].get("lr")
    if isinstance(lr, torch.Tensor):
        return look.reading.add_one(lr)
    return float(lr) if isinstance(lr, (int, float)) else None
