"""Parameters and buffers that must not change, compared with what they were at attach.

The comparison comes after every step of any watched optimizer, so that what changed between steps is seen
too: a load, an average, a hand that wrote. A clone costs a copy of the tensors, a digest no memory; both
compare bytes.
"""

import torch
from torch.nn.parameter import is_lazy
from typing_extensions import override

from torchinstruments.checks.check import Check, Ground, Judge, StepLook
from torchinstruments.checks.findings import Action, EvidenceKind, Finding, GradientStage, Severity
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.measures import scope_of
from torchinstruments.checks.reading import Column
from torchinstruments.checks.sustained import at_once, warned
from torchinstruments.records import Absent, Reason, ScaleProvenance
from torchinstruments.statistics.admission import COMPLEX, admit
from torchinstruments.statistics.digests import Digester
from torchinstruments.statistics.isolation import functions_off, isolated

__all__ = ["FrozenCheck"]


class FrozenCheck(Check):
    """Compares tensors with what they were.

    Args:
        names: Names, aliases or patterns.
        evidence: `EvidenceKind.CLONE` or `EvidenceKind.DIGEST`.
        every: Steps between two comparisons.
        action: What is done about a change.
    """

    name = "frozen"

    def __init__(self, names: tuple[str, ...], evidence: EvidenceKind, every: int, action: Action) -> None:
        super().__init__()
        self._names = names
        self._evidence = evidence
        self._every = every
        self._action = action
        self._ground: Ground | None = None
        self._indices: tuple[int, ...] = ()
        self._clones: dict[int, torch.Tensor] = {}
        self._digests: dict[int, torch.Tensor | int] = {}
        self._digester = Digester()
        self._num_steps = 0
        self._changed: set[int] = set()
        self._windows = at_once()

    @override
    def attached(self, ground: Ground) -> None:
        self._ground = ground
        self._indices = tuple(sorted(ground.inventory.resolve(self._names, "names")))
        self._changed.clear()
        self._windows = at_once()
        for index in self._indices:
            self._keep(index)

    @override
    def after_write(self, look: StepLook) -> Judge | None:
        self._num_steps += 1
        if self._num_steps % self._every:
            return None
        differs: dict[int, bool | Column] = {}
        for index, clone in self._clones.items():
            current = self._comparable(index)
            if current is None:
                continue
            if not _is_alike(current, clone):
                differs[index] = True
            elif current.device.type == "cpu":
                differs[index] = not torch.equal(current, clone)
            else:
                differs[index] = look.reading.add_one((current != clone).any())
        for index, digest in self._digests.items():
            local = self._part(index)
            if local is None:
                continue
            now = self._digest(local)
            if isinstance(now, torch.Tensor) and isinstance(digest, torch.Tensor):
                differs[index] = look.reading.add_one(now.ne(digest))
            else:
                differs[index] = bool(now != digest)

        def judge() -> None:
            self._judge(look, differs)

        return judge

    @override
    def baseline_indices(self, inventory: Inventory) -> frozenset[int]:
        is_copied = self._evidence is EvidenceKind.CLONE
        return inventory.resolve(self._names, "names") if is_copied else frozenset()

    @override
    def detached(self) -> None:
        self._clones.clear()
        self._digests.clear()

    def _judge(self, look: StepLook, differs: dict[int, bool | Column]) -> None:
        ground = self._ground
        assert ground is not None
        changed = [
            index
            for index, found in differs.items()
            if (found if isinstance(found, bool) else found.first != 0)
        ]
        new = [index for index in changed if index not in self._changed]
        self._changed = set(changed)
        for index in changed:
            # What it is now is what the next look compares with, so that a further change is one.
            self._keep(index)
        due = changed if self._action is Action.RAISE else new
        action = warned(self._action, self._windows, changed, differs)
        if not due:
            return
        names = ground.inventory.names(due)
        stepped = sum(index in look.positions for index in due)
        ground.emit(
            Finding(
                check=self.name,
                code="frozen_param_changed",
                severity=Severity.CRITICAL,
                action=action,
                message=f"{len(due)} tensors that must not change have changed ({names[0]} first)",
                names=names,
                values={"num_in_this_optimizer": stepped, "every": self._every},
                moment=look.moment,
                stage=GradientStage.POST_WRITE,
                scale_provenance=ScaleProvenance.UNSCALED,
                evidence=self._evidence,
                scope=scope_of(ground.inventory.entries[due[0]].tensor),
                coverage=f"{len(differs)}/{len(self._indices)} tensors",
                remedy="see whether an optimizer holds them, whether weight decay applies, and whether "
                "something wrote them since the last look; load them from a checkpoint",
            )
        )

    def _keep(self, index: int) -> None:
        """Takes what a tensor is now."""
        with functions_off(), isolated("cpu"):
            if self._evidence is EvidenceKind.DIGEST:
                local = self._part(index)
                if local is not None:
                    self._digests[index] = self._digest(local)
            else:
                current = self._comparable(index)
                if current is not None:
                    self._clones[index] = current.clone()

    def _part(self, index: int) -> torch.Tensor | None:
        """Returns this rank's part of a tensor; None, and says why, where it has no bytes to compare."""
        assert self._ground is not None
        inventory = self._ground.inventory
        tensor = inventory.entries[index].tensor
        reason = Reason.UNINITIALISED.value
        if not is_lazy(tensor):
            admitted = admit(tensor, COMPLEX)
            if not isinstance(admitted, Absent):
                return admitted[0]
            reason = admitted.reason
        self._ground.unavailable(self.name, reason, inventory.names([index]))
        return None

    def _comparable(self, index: int) -> torch.Tensor | None:
        """Returns a tensor whose equality is that of bits: NaN equals itself, and -0 is not 0."""
        local = self._part(index)
        if local is None:
            return None
        real = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
        return real.view(_BITS[real.itemsize])

    def _digest(self, local: torch.Tensor) -> torch.Tensor | int:
        return self._digester.on_host(local) if local.is_cpu else self._digester.on_device(local)


def _is_alike(current: torch.Tensor, clone: torch.Tensor) -> bool:
    return (current.shape, current.dtype, current.device) == (clone.shape, clone.dtype, clone.device)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
