"""What can be known of gradient clipping, in three tiers, from norms that other checks ask for anyway.

a. The factor by which a step's gradients shrank between the last backward and the write, where both totals
   are known in the same units.
b. Whether the total before the write stands at the declared ``clip_norm``. Clipping divides by the total plus
   1e-6, so that a clipped total is short of the norm by 1e-6 at most, and of what the dtype rounds.
c. A hint only: the last totals are all the same, as clipping makes them.
"""

import math
from collections import deque
from itertools import pairwise

import numpy as np
import torch
from typing_extensions import override

from torchinstruments.checks.check import BackwardLook, Check, Ground, Judge, Measured, StepLook
from torchinstruments.checks.measures import scope_of
from torchinstruments.checks.reading import Numbers
from torchinstruments.records import GradSync, ScaleProvenance, Scope

__all__ = ["ClipLedger"]

_SHORT = 1e-6
_HINT_WINDOW = 6
_HINT_TOLERANCE = 1e-6
_MAX_SERIES = 64
_UNSCALED = (ScaleProvenance.UNSCALED, ScaleProvenance.NONE_SEEN)
_REDUCED = (GradSync.NOT_DISTRIBUTED, GradSync.SYNCED)


class ClipLedger(Check):
    """Takes totals of gradients before and after clipping; it asks for none unless ``clip_norm`` is declared.

    Args:
        clip_norm: What the caller declared.
    """

    name = "clip_ledger"

    def __init__(self, clip_norm: float | None) -> None:
        super().__init__()
        self._clip_norm = clip_norm
        self.is_passive = clip_norm is None
        self._ground: Ground | None = None
        self._before: dict[int, float] = {}
        self._attempt: int | None = None
        self._is_comparable = True
        self._observed = 0
        self._saturated = 0
        self._nonfinite = 0
        self._factors: deque[float] = deque(maxlen=_MAX_SERIES)
        self._totals: deque[float] = deque(maxlen=_HINT_WINDOW)
        self._reasons: set[str] = set()

    @override
    def attached(self, ground: Ground) -> None:
        """Takes what it stands on."""
        self._ground = ground
        self._attempt = None
        self._before.clear()

    @override
    def backward_ended(self, look: BackwardLook) -> Judge | None:
        """Takes norms before clipping, where another check asked for them (autograd thread, hot path)."""
        if not look.has_norms():
            return None
        measured = look.norms()

        def judge() -> None:
            if look.moment.attempt is None or look.moment.attempt != self._attempt:
                self._attempt = look.moment.attempt
                self._before.clear()
            scale = _scale_in(look)
            self._is_comparable = scale is not None and look.grad_sync in _REDUCED
            if scale is not None:
                self._before.update(zip(measured.indices, (measured.norms / scale).tolist(), strict=True))

        return judge

    @override
    def before_write(self, look: StepLook) -> Judge | None:
        """Takes norms as they are written (training thread, hot path)."""
        if self._clip_norm is None and not look.has_norms():
            return None
        measured = look.norms()

        def judge() -> None:
            if not look.is_skipped():
                self._judge(look, measured)

        return judge

    def snapshot(self) -> dict[str, object]:
        """Returns the ledger as plain values."""
        totals = list(self._totals)
        is_constant = len(totals) == _HINT_WINDOW and all(
            abs(one - other) <= _HINT_TOLERANCE * max(abs(one), abs(other)) for one, other in pairwise(totals)
        )
        has_hint = is_constant and totals[-1] > 0
        return {
            "tier": "a" if self._factors else "b" if self._clip_norm is not None else "c",
            "declared_clip_norm": self._clip_norm,
            "steps_observed": self._observed,
            "saturated_steps": None if self._clip_norm is None else self._saturated,
            "saturation_rate": self._saturated / self._observed
            if self._clip_norm is not None and self._observed
            else None,
            "applied_clip_factors": list(self._factors),
            "constancy_hint": has_hint,
            "constant_total": totals[-1] if has_hint else None,
            "nonfinite_totals": self._nonfinite,
            "unavailable": sorted(self._reasons),
        }

    def _judge(self, look: StepLook, measured: Measured) -> None:
        if not measured.indices:
            return
        entries = look.inventory.entries
        if any(scope_of(entries[index].tensor) is not Scope.LOCAL for index in measured.indices):
            self._reasons.add("sharded: the norm of a shard is no total")
            return
        scale = look.scale()
        if scale is None and look.scale_provenance in _UNSCALED:
            scale = 1.0
        if not scale:
            self._reasons.add("unknown_scale: the loss scale in the gradients is not known")
            return
        total = _total(measured.norms) / scale
        self._observed += 1
        if not math.isfinite(total):
            self._nonfinite += 1
            return
        self._totals.append(total)
        if self._clip_norm is not None:
            rounding = 4 * max(
                torch.finfo(dtype).eps for dtype in {tensor.dtype for tensor in measured.tensors}
            )
            self._saturated += total >= self._clip_norm * (1 - rounding) - _SHORT
        before = [self._before[index] for index in measured.indices if index in self._before]
        if self._is_comparable and len(before) == len(measured.indices):
            pre_total = _total(np.array(before))
            if math.isfinite(pre_total) and pre_total > 0:
                self._factors.append(total / pre_total)


def _total(norms: Numbers) -> float:
    return float(np.sqrt(np.square(norms).sum()))


def _scale_in(look: BackwardLook) -> float | None:
    """Returns the loss scale that is in a backward's gradients; None where it is not known."""
    return 1.0 if look.scale_provenance in _UNSCALED else look.scale()
