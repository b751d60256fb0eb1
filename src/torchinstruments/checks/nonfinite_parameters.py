"""Parameters and buffers that are not finite, scanned after every so many applied steps.

The scan comes after the write: what it finds is in the weights already, and a raise says so.
"""

from collections import Counter

import torch
from typing_extensions import override

from torchinstruments.checks.check import Check, Ground, Judge, Measured, StepLook
from torchinstruments.checks.findings import Action, EvidenceKind, Finding, GradientStage, Severity
from torchinstruments.checks.inventory import BUFFER
from torchinstruments.checks.masks import is_mask, lifted
from torchinstruments.checks.measures import is_freed, measurable, scope_of
from torchinstruments.checks.sustained import at_once, warned
from torchinstruments.records import Reason, ScaleProvenance

__all__ = ["NonfiniteParameterCheck"]

_HARMLESS = (Reason.EMPTY.value, Reason.UNSUPPORTED_DTYPE.value)


class NonfiniteParameterCheck(Check):
    """Looks for NaN and infinity in an optimizer's parameters, and in what no optimizer steps.

    Args:
        every: Applied steps of an optimizer between two scans.
        include_buffers: Whether buffers are scanned too.
        action: What is done about it.
    """

    name = "nonfinite_param"

    def __init__(self, every: int, action: Action, *, include_buffers: bool) -> None:
        super().__init__()
        self._every = every
        self._action = action
        self._include_buffers = include_buffers
        self._ground: Ground | None = None
        self._num_steps: Counter[int | None] = Counter()
        self._known_bad: set[int] = set()
        self._masks: set[int] = set()
        self._windows = at_once()

    @override
    def attached(self, ground: Ground) -> None:
        """Takes what it stands on."""
        self._ground = ground
        self._known_bad.clear()
        self._masks.clear()
        self._windows = at_once()

    @override
    def after_write(self, look: StepLook) -> Judge | None:
        """Queues the norms of the tensors, where a scan is due (training thread, hot path)."""
        number = self._num_steps[look.moment.optimizer]
        self._num_steps[look.moment.optimizer] = number + 1
        if (number + 1) % self._every:
            return None
        entries = look.inventory.entries
        indices = list(look.positions)
        indices += [
            entry.index
            for entry in entries
            if entry.index not in look.positions
            and (self._include_buffers if entry.kind == BUFFER else not entry.tensor.requires_grad)
        ]
        # What was finite and moved by something finite is finite: no second pass over what was copied.
        copied = frozenset(look.copied)
        rest = [index for index in indices if index not in copied] if copied else indices
        befores, changes = (look.befores(), look.changes()) if copied else (None, None)
        there = {index: tensor for index, tensor in look.tensors(rest).items() if not is_freed(tensor)}
        there |= {index: lifted(there[index]) for index in self._masks & there.keys()}
        measured = Measured.of(there, look.reading)

        def judge() -> None:
            bad = set(measured.nonfinite())
            if befores is not None and changes is not None:
                suspects = {*befores.nonfinite(), *changes.nonfinite()}
                bad.update(index for index in suspects if not _is_finite(look.tensors([index])[index]))
            masks = [index for index in bad if entries[index].kind == BUFFER and is_mask(there[index])]
            # Each is read once; from the next look on it counts without its negative infinities.
            self._masks.update(masks)
            self._judge(look, measured, bad.difference(masks), indices)

        return judge

    def _judge(self, look: StepLook, measured: Measured, bad: set[int], indices: list[int]) -> None:
        ground = self._ground
        assert ground is not None
        for index, reason in measured.reasons.items():
            if reason.partition(":")[0] not in _HARMLESS:
                ground.unavailable(self.name, reason, ground.inventory.names([index]))
        num_scanned = len(indices) - len(measured.reasons)
        is_new = not bad <= self._known_bad
        action = warned(self._action, self._windows, bad, indices)
        # Of what this optimizer has nothing to do with, no more is known than before.
        self._known_bad = self._known_bad.difference(indices) | bad
        if not bad or not (is_new or self._action is Action.RAISE):
            return
        ordered = sorted(bad)
        names = ground.inventory.names(ordered)
        ground.emit(
            Finding(
                check=self.name,
                code="param_value_nonfinite",
                severity=Severity.CRITICAL,
                action=action,
                message=f"{len(bad)} of {num_scanned} tensors are nonfinite ({names[0]} first)",
                names=names,
                values={"num_nonfinite_tensors": len(bad), "every": self._every},
                moment=look.moment,
                stage=GradientStage.POST_WRITE,
                scale_provenance=ScaleProvenance.UNSCALED,
                evidence=EvidenceKind.SCAN_KERNEL,
                scope=scope_of(ground.inventory.entries[ordered[0]].tensor),
                coverage=f"{num_scanned}/{num_scanned + len(measured.reasons)} tensors",
                remedy="they are written: load a checkpoint from before, and register the gradient check, "
                "which raises before the write",
            )
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor that was suspected is finite; reads it."""
    found = measurable(tensor)
    return isinstance(found, str) or bool(torch.isfinite(found).all())
