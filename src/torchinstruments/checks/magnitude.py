"""Gradients that vanish or explode, by their norms before clipping and in unscaled units.

The norms are taken where gradients are added to: at the step clipping has pinned their total, so that
nothing there can explode. Where a gradient never comes by that way, and where the loss scale in it is not
known, there is no verdict, and the report says so.
"""

import math
from collections.abc import Callable, Mapping

from typing_extensions import override

from torchinstruments.checks.check import BackwardLook, Judge, Measured, StepLook
from torchinstruments.checks.findings import Action, EvidenceKind, Finding, Severity
from torchinstruments.checks.measures import scope_of
from torchinstruments.checks.parameter_check import ParameterCheck
from torchinstruments.records import AttemptRecord, ScaleProvenance

__all__ = ["MagnitudeCheck"]

_UNSCALED = (ScaleProvenance.UNSCALED, ScaleProvenance.NONE_SEEN)


class MagnitudeCheck(ParameterCheck):
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
        super().__init__(within, every, action)
        self._vanishing = vanishing_threshold
        self._exploding = exploding_threshold
        self._latest: dict[int, float] = {}
        self._fired: set[int] = set()
        self._attempt: int | None = None
        self._look: BackwardLook | None = None

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
    def attempt_closed(self, record: AttemptRecord) -> None:
        # One that was skipped has no step at which it could be judged.
        if self._look is not None and self._look.moment.attempt == record.attempt:
            self._conclude()

    @override
    def finish(self, unavailable: Callable[[str, str, tuple[str, ...]], None], *, is_final: bool) -> None:
        super().finish(unavailable, is_final=is_final)
        if is_final and self._ground is not None:
            self._conclude()
            self._attempt = None

    def _take(self, look: BackwardLook, measured: Measured) -> None:
        """Takes a backward of the attempt; the last one has what all of them added up to."""
        if look.moment.attempt is None or look.moment.attempt != self._attempt:
            # The one before was skipped, or never stepped.
            self._conclude()
            self._attempt = look.moment.attempt
            self._fired.clear()
        ground = self.ground
        for index, reason in measured.reasons.items():
            ground.unavailable(self.name, reason, ground.inventory.names([index]))
        self._fired.update(measured.indices, measured.reasons)
        scale = 1.0 if look.scale_provenance in _UNSCALED else look.scale()
        if not scale:
            ground.unavailable(self.name, "unknown_scale: what multiplies the gradients is not known", ())
            return
        self._look = look
        self._latest.update(zip(measured.indices, (measured.norms / scale).tolist(), strict=True))

    def _conclude(self) -> None:
        """Judges what came since the last judgement."""
        look, latest = self._look, self._latest
        self._look = None
        self._latest = {}
        if look is None or not latest:
            return
        low, high, chosen = self._vanishing, self._exploding, self._watched.indices
        observed = latest.keys() & chosen
        nonfinite = [index for index in sorted(observed) if not math.isfinite(latest[index])]
        if nonfinite:
            self.ground.unavailable(
                self.name,
                "nonfinite: there is no magnitude; register_nonfinite_grad_check looks for these",
                self.ground.inventory.names(nonfinite),
            )
            observed -= set(nonfinite)
        outside = {
            index: norm
            for index, norm in latest.items()
            if not (low <= norm <= high) and norm != 0 and index in observed
        }
        due = self.due(outside, observed)
        if due:
            self._emit(look, due, outside, len(observed))

    def _emit(
        self, look: BackwardLook, due: list[int], outside: Mapping[int, float], num_observed: int
    ) -> None:
        ground = self.ground
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
        ground = self.ground
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
