"""Gradients that vanish or explode, by their norms before clipping and in unscaled units.

The norms are taken where gradients are added to: at the step clipping has pinned their total, so that
nothing there can explode. Where a gradient never comes by that way, and where the loss scale in it is not
known, there is no verdict, and the report says so.
"""

import math
from collections.abc import Mapping

from typing_extensions import override

from torchinstruments.checks.check import BackwardLook, Check, Ground, Judge, Measured, StepLook
from torchinstruments.checks.findings import Action, EvidenceKind, Finding, Severity
from torchinstruments.checks.measures import scope_of
from torchinstruments.checks.selection import Watched
from torchinstruments.checks.sustained import WARN_WINDOW, Sustained
from torchinstruments.records import ScaleProvenance

__all__ = ["MagnitudeCheck"]

_UNSCALED = (ScaleProvenance.UNSCALED, ScaleProvenance.NONE_SEEN)


class MagnitudeCheck(Check):
    """Judges the norms of gradients, one parameter at a time.

    Args:
        vanishing_threshold: L2 norm below which one that is not zero vanishes.
        exploding_threshold: L2 norm above which one explodes.
        within: Names of the parameters; None for all.
        every: Attempts between two looks.
        action: What is done about it.
    """

    name = "grad_magnitude"

    def __init__(
        self,
        vanishing_threshold: float,
        exploding_threshold: float,
        within: tuple[str, ...] | None,
        every: int,
        action: Action,
    ) -> None:
        super().__init__()
        self._vanishing = vanishing_threshold
        self._exploding = exploding_threshold
        self._watched = Watched(within)
        self._every = every
        self._action = action
        self._ground: Ground | None = None
        self._windows = Sustained(WARN_WINDOW)
        self._latest: dict[int, float] = {}
        self._fired: set[int] = set()
        self._look: BackwardLook | None = None

    @override
    def attached(self, ground: Ground) -> None:
        self._ground = ground
        self._watched.attached(ground.inventory)

    @override
    def backward_ended(self, look: BackwardLook) -> Judge | None:
        if look.moment.attempt is not None and look.moment.attempt % self._every:
            return None
        measured = look.norms()

        def judge() -> None:
            self._take(look, measured)

        return judge

    @override
    def before_write(self, look: StepLook) -> Judge | None:
        own = self._watched.own(look)

        def judge() -> None:
            self._say_unseen(look, own)
            self._conclude()

        return judge

    @override
    def finish(self) -> None:
        self._conclude()
        ground = self._ground
        if ground is not None:
            for reason, indices in self._watched.unseen().items():
                ground.unavailable(self.name, reason, ground.inventory.names(indices))

    def _take(self, look: BackwardLook, measured: Measured) -> None:
        """Takes a backward of the attempt; the last one has what all of them added up to."""
        if self._look is not None and self._look.moment.attempt != look.moment.attempt:
            # The one before was skipped, or never stepped.
            self._conclude()
        ground = self._ground
        assert ground is not None
        for index, reason in measured.reasons.items():
            ground.unavailable(self.name, reason, ground.inventory.names([index]))
        self._fired.update(look.gradients)
        scale = 1.0 if look.scale_provenance in _UNSCALED else look.scale()
        if not scale:
            ground.unavailable(self.name, "unknown_scale: what multiplies the gradients is not known", ())
            return
        self._look = look
        self._latest.update(zip(measured.indices, (measured.norms / scale).tolist(), strict=True))

    def _conclude(self) -> None:
        """Judges an attempt."""
        look, latest = self._look, dict(self._latest)
        self._look = None
        self._latest.clear()
        self._fired.clear()
        if look is None or not latest:
            return
        low, high, chosen = self._vanishing, self._exploding, self._watched.indices
        outside = {
            index: norm
            for index, norm in latest.items()
            if not (low <= norm <= high) and norm != 0 and math.isfinite(norm) and index in chosen
        }
        due = list(outside)
        if self._action is Action.WARN:
            due = self._windows.observe(outside, latest.keys() & chosen)
        if due:
            self._emit(look, due, outside, len(latest.keys() & chosen))

    def _emit(
        self, look: BackwardLook, due: list[int], outside: Mapping[int, float], num_observed: int
    ) -> None:
        ground = self._ground
        assert ground is not None
        norms = [outside[index] for index in due]
        num_exploding = sum(norm > self._exploding for norm in norms)
        names = ground.inventory.names(due)
        ground.emit(
            Finding(
                check=self.name,
                code="grad_magnitude_flagged",
                severity=Severity.WARNING,
                action=self._action,
                message=f"{num_exploding} gradients have norms above {self._exploding:g} and "
                f"{len(due) - num_exploding} below {self._vanishing:g} ({names[0]} first)",
                names=names,
                values={
                    "num_exploding": num_exploding,
                    "num_vanishing": len(due) - num_exploding,
                    "norm_highest": max(norms),
                    "norm_lowest": min(norms),
                    "vanishing_threshold": self._vanishing,
                    "exploding_threshold": self._exploding,
                    "grad_sync": look.grad_sync.value,
                },
                moment=look.moment,
                stage=look.stage,
                scale_provenance=look.scale_provenance,
                loss_scale=look.scale(),
                evidence=EvidenceKind.MAGNITUDE_PASS,
                scope=scope_of(ground.inventory.entries[due[0]].tensor),
                coverage=f"{num_observed}/{len(self._watched.indices)} parameters",
                remedy="the norms are in unscaled units, before clipping: clip, lower the learning rate, or "
                "look at the modules of these parameters",
                follow_up="grad_health(model): is_frontier names the module where it begins",
            )
        )

    def _say_unseen(self, look: StepLook, own: list[int]) -> None:
        """Says of which gradients the step knows and no backward did: there is no number before clipping."""
        ground = self._ground
        assert ground is not None
        due = look.moment.attempt is None or look.moment.attempt % self._every == 0
        gradients = look.gradients
        unseen = [index for index in own if due and index in gradients and index not in self._fired]
        if unseen:
            ground.unavailable(
                self.name,
                "no_accumulation_evidence: the gradient was not added to by a backward that is seen, and "
                "after clipping its magnitude says nothing",
                ground.inventory.names(unseen),
            )
