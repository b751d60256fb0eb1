"""Gradients that are not finite: collected where they arise, raised before they are written.

Where gradients are added to, a nonfinite one is evidence and no fault: under a loss scaler it is the
mechanism at work. It is kept with the parameter's name, on attempts that are skipped too. Before a write it
is the last moment at which the weights are as they were, and the check raises there if it was asked to.

The two sites together tell a culprit from its victims. Clipping by a total norm that is not finite makes
every healthy gradient zero or nonfinite; what was nonfinite before the clipping is where it began.
"""

import math
from collections.abc import Mapping

import torch
from typing_extensions import override

from torchinstruments.checks.check import BackwardLook, Check, Ground, Judge, Measured, StepLook
from torchinstruments.checks.findings import (
    MAX_NAMES,
    Action,
    Attribution,
    EvidenceKind,
    Finding,
    GradientStage,
    Severity,
)
from torchinstruments.checks.measures import scope_of
from torchinstruments.checks.sustained import at_once, warned
from torchinstruments.records import ScaleProvenance

__all__ = ["NonfiniteGradientCheck"]

_SCALED = (ScaleProvenance.GRADSCALER,)
_REMEDY = (
    "the weights are as they were: drop this batch and go on, or find what made it; "
    "torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True) raises where clipping would spread it"
)
_REMEDY_COLLECTED = "under a loss scaler this step is skipped; else look at the batch and at these parameters"


class NonfiniteGradientCheck(Check):
    """Looks for NaN and infinity in gradients.

    Args:
        action: What is done about one before a write.
    """

    name = "nonfinite_grad"

    def __init__(self, action: Action) -> None:
        super().__init__()
        self._action = action
        self._ground: Ground | None = None
        self._attempt: int | None = None
        self._at_accumulation: dict[int, float] = {}
        self._told: set[int] = set()
        self._windows = at_once()

    @override
    def attached(self, ground: Ground) -> None:
        """Takes what it stands on."""
        self._ground = ground
        self._windows = at_once()
        self._begin(None)

    @override
    def backward_ended(self, look: BackwardLook) -> Judge:
        """Queues the norms of what a backward added to (autograd thread, hot path)."""
        measured = look.norms()

        def judge() -> None:
            self._judge_backward(look, measured)

        return judge

    @override
    def before_write(self, look: StepLook) -> Judge:
        """Queues the norms of what is to be written (training thread, hot path)."""
        measured = look.norms()

        def judge() -> None:
            self._judge_step(look, measured)

        return judge

    def _judge_backward(self, look: BackwardLook, measured: Measured) -> None:
        self._begin(look.moment.attempt)
        self._say_unmeasured(measured)
        norms = measured.by_index
        self._at_accumulation.update(norms)
        # The first backward that brings it is where it arose; later ones only still have it.
        new = [index for index in measured.nonfinite() if index not in self._told]
        if not new:
            return
        self._told.update(new)
        is_scaled = look.scale_provenance in _SCALED
        num_nan = sum(math.isnan(norms[index]) for index in new)
        self._emit(
            new,
            code="param_grad_nonfinite_at_accumulation",
            severity=Severity.INFO if is_scaled else Severity.WARNING,
            action=Action.COLLECT,
            message=f"{len(new)} of {len(norms)} gradients became nonfinite in a backward",
            look=look,
            stage=look.stage,
            loss_scale=look.scale(),
            evidence=EvidenceKind.COUNTING_HOOK,
            values={
                "num_nonfinite_gradients": len(new),
                "num_gradients_with_nan": num_nan,
                "num_gradients_with_inf_only": len(new) - num_nan,
            },
            attribution=Attribution.EXACT if len(new) == 1 else Attribution.SMEARED,
            remedy=_REMEDY_COLLECTED,
        )

    def _judge_step(self, look: StepLook, measured: Measured) -> None:
        self._begin(look.moment.attempt)
        self._say_unmeasured(measured)
        bad = measured.nonfinite()
        if bad and look.is_skipped():
            # The optimizer leaves the weights alone by itself; the accumulation site has the names.
            return
        culprits, attribution = self._attribute(bad)
        action = warned(self._action, self._windows, culprits, look.positions)
        if not bad:
            return
        norms = measured.by_index
        zeroed = [
            index
            for index, norm in norms.items()
            if norm == 0 and self._at_accumulation.get(index, 0.0) != 0 and index not in culprits
        ]
        spread = [index for index in bad if index not in culprits]
        shown = dict(zip(measured.indices, measured.tensors, strict=True))
        names = ", ".join(self._names(culprits[:3])) + (", ..." if len(culprits) > 3 else "")
        self._emit(
            culprits,
            code="param_grad_nonfinite",
            severity=Severity.CRITICAL,
            action=action,
            message=f"{len(bad)} of {len(norms)} gradients are nonfinite before the write ({names})",
            look=look,
            stage=GradientStage.POST_CLIP_APPLIED,
            loss_scale=look.scale(),
            evidence=EvidenceKind.STEP_HOOK,
            values={
                "num_nonfinite_gradients": len(bad),
                "num_spread_by_clipping": len(spread),
                **_counts({index: shown[index] for index in culprits[:MAX_NAMES]}),
            },
            attribution=attribution,
            collateral_zeroed=len(zeroed),
            remedy=_REMEDY,
        )

    def _attribute(self, bad: list[int]) -> tuple[list[int], Attribution]:
        """Returns where it began, as far as that is known."""
        if len(bad) == 1:
            return bad, Attribution.EXACT
        before = [index for index in bad if not math.isfinite(self._at_accumulation.get(index, 0.0))]
        seen_all = all(index in self._at_accumulation for index in bad)
        if len(before) == 1 and seen_all:
            return before, Attribution.EXACT
        return (before or bad), Attribution.SMEARED

    def _begin(self, attempt: int | None) -> None:
        if attempt is None or attempt != self._attempt:
            self._attempt = attempt
            self._at_accumulation.clear()
            self._told.clear()

    def _say_unmeasured(self, measured: Measured) -> None:
        if measured.reasons and self._ground is not None:
            for index, reason in measured.reasons.items():
                self._ground.unavailable(self.name, reason, self._names([index]))

    def _names(self, indices: list[int]) -> tuple[str, ...]:
        return () if self._ground is None else self._ground.inventory.names(indices)

    def _emit(
        self,
        indices: list[int],
        *,
        code: str,
        severity: Severity,
        action: Action,
        message: str,
        look: BackwardLook | StepLook,
        stage: GradientStage,
        loss_scale: float | None,
        evidence: EvidenceKind,
        values: Mapping[str, float | int],
        attribution: Attribution,
        remedy: str,
        collateral_zeroed: int | None = None,
    ) -> None:
        assert self._ground is not None
        entries = self._ground.inventory.entries
        self._ground.emit(
            Finding(
                check=self.name,
                code=code,
                severity=severity,
                action=action,
                message=message,
                names=self._names(indices),
                num_names=len(indices),
                values=values,
                moment=look.moment,
                stage=stage,
                scale_provenance=look.scale_provenance,
                loss_scale=loss_scale,
                evidence=evidence,
                scope=scope_of(entries[indices[0]].tensor),
                attribution=attribution,
                collateral_zeroed=collateral_zeroed,
                remedy=remedy,
                follow_up="grad_health(model) names the module at the frontier",
            )
        )


def _counts(tensors: Mapping[int, torch.Tensor]) -> dict[str, int]:
    """Returns how many elements are NaN and infinite; reads devices, which only happens with a finding."""
    shown = list(tensors.values())[:MAX_NAMES]
    num_nan = sum(int(torch.isnan(tensor).sum()) for tensor in shown)
    num_inf = sum(int(torch.isinf(tensor).sum()) for tensor in shown)
    return {"num_nan": num_nan, "num_inf": num_inf}
