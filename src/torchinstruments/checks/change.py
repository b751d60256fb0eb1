"""Parameters that receive no gradient for many steps.

Whether a parameter moves says little: weight decay moves every parameter of a network in which nothing flows,
and momentum goes on for dozens of steps. So the fact that decides is the gradient's, missing or exactly zero,
sustained over steps, since a single one is legitimate: routing, branches not taken, rare tokens. Movement is
told beside it, with the number of steps since the first missing gradient in which it was seen.

A finding names all that a missing gradient leaves without one, and not where it began.
"""

from dataclasses import dataclass

from typing_extensions import override

from torchinstruments.checks.check import Ground, Judge, Measured, StepLook
from torchinstruments.checks.findings import Action, EvidenceKind, Finding, GradientStage, Severity
from torchinstruments.checks.measures import local_numel, scope_of
from torchinstruments.checks.parameter_check import ParameterCheck

__all__ = ["ChangeCheck"]


@dataclass(slots=True)
class _Suspect:
    """A parameter without gradients.

    Attributes:
        steps: Steps since the first of them, it not counted.
        moved: In how many of those the parameter moved.
        was_none: Whether the last gradient was missing, and not zero.
    """

    steps: int = 0
    moved: int = 0
    was_none: bool = False


@dataclass(slots=True)
class _Observation:
    """What one step's gradients were."""

    observed: frozenset[int]
    bad: dict[int, bool]


class ChangeCheck(ParameterCheck):
    """Watches whether parameters receive gradients.

    Args:
        within: Names of the parameters; None for all.
        window: How many steps of how many make a finding.
        every: Applied steps of an optimizer between two observations.
        action: What is done about it.
    """

    name = "change"

    def __init__(
        self, within: tuple[str, ...] | None, window: tuple[int, int], every: int, action: Action
    ) -> None:
        super().__init__(within, every, action, window)
        self._suspects: dict[int, _Suspect] = {}
        self._latest: _Observation | None = None

    @override
    def attached(self, ground: Ground) -> None:
        windows = self._windows
        super().attached(ground)
        if self._windows is not windows:
            self._suspects.clear()

    @override
    def before_write(self, look: StepLook) -> Judge | None:
        self._latest = None
        if not self.is_due(look):
            return None
        measured = look.norms()
        own = self._watched.own(look)
        # Whether they move is only of interest in what is suspected already.
        look.wanted.update(index for index in own if index in self._suspects)

        def judge() -> None:
            self._latest = self._observe(measured, look, own)

        return judge

    @override
    def after_write(self, look: StepLook) -> Judge | None:
        self.step_applied(look)
        latest, self._latest = self._latest, None
        if latest is None:
            return None
        changes = look.changes() if look.wanted else None

        def judge() -> None:
            self._judge(look, latest, {} if changes is None else changes.by_index)

        return judge

    def _observe(self, measured: Measured, look: StepLook, own: list[int]) -> _Observation:
        entries = look.inventory.entries
        zero = measured.where(measured.norms == 0)
        has_gradient = look.gradients
        absent = [index for index in own if index not in has_gradient]
        observed = frozenset(own)
        if measured.reasons or absent:
            empty = [index for index in absent if local_numel(entries[index].tensor) == 0]
            observed -= {*measured.reasons, *empty}
        bad = {index: False for index in zero if index in observed}
        bad.update({index: True for index in absent if index in observed})
        return _Observation(observed, bad)

    def _judge(self, look: StepLook, latest: _Observation, changes: dict[int, float]) -> None:
        windows = self._windows
        assert windows is not None
        due = self.due(latest.bad, latest.observed)
        for index in [*latest.bad, *(one for one in self._suspects if one not in latest.bad)]:
            if index not in latest.observed:
                continue
            suspect = self._suspects.get(index)
            if suspect is not None:
                suspect.steps += 1
                suspect.moved += changes.get(index, 0.0) != 0
            if index in latest.bad:
                suspect = self._suspects.setdefault(index, _Suspect())
                suspect.was_none = latest.bad[index]
            elif suspect is not None and windows.num_bad(index) == 0:
                del self._suspects[index]
        if due:
            self._emit(look, due, min(windows.num_bad(index) for index in due))

    def _emit(self, look: StepLook, due: list[int], num_bad: int) -> None:
        ground = self.ground
        suspects = [self._suspects[index] for index in due]
        assert self._window is not None
        m, n = self._window
        names = ground.inventory.names(due)
        ground.emit(
            Finding(
                check=self.name,
                code="param_received_no_gradient",
                severity=Severity.WARNING,
                action=self._action,
                message=f"{len(due)} parameters received no gradient in {m} of the last {n} steps "
                f"({names[0]} first)",
                names=names,
                values={
                    "m": m,
                    "n": n,
                    "every": self._every,
                    "num_bad_in_window": num_bad,
                    "num_gradient_none": sum(suspect.was_none for suspect in suspects),
                    "num_gradient_zero": sum(not suspect.was_none for suspect in suspects),
                    "movement_steps_looked_at": min(suspect.steps for suspect in suspects),
                    "movement_latency_steps": max(suspect.moved for suspect in suspects),
                },
                moment=look.moment,
                stage=GradientStage.POST_CLIP_APPLIED,
                scale_provenance=look.scale_provenance,
                loss_scale=look.scale(),
                evidence=EvidenceKind.STEP_HOOK,
                scope=scope_of(ground.inventory.entries[due[0]].tensor),
                remedy="see whether these parameters are used in the forward and reach the loss; "
                "momentum and weight decay move parameters without gradients for many steps",
                follow_up="grad_health(model): is_frontier names the module below which no gradient comes",
            )
        )
