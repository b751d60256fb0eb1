"""What checks of chosen parameters share: whose they are, how often they look, and when they speak."""

from collections import Counter
from collections.abc import Callable, Collection

from typing_extensions import override

from torchinstruments.checks.check import Check, Ground, StepLook
from torchinstruments.checks.findings import Action
from torchinstruments.checks.selection import Watched
from torchinstruments.checks.sustained import WARN_WINDOW, Sustained

__all__ = ["ParameterCheck"]


class ParameterCheck(Check):
    """Looks at some parameters of a model.

    Args:
        within: Names of the parameters; None for all.
        every: Steps, or attempts, from one look to the next.
        action: What is done about a finding.
        window: How many bad ones of how many looks make a finding; None for `WARN_WINDOW` where the action is
            to warn, and for each bad one by itself where it is another.
    """

    def __init__(
        self,
        within: tuple[str, ...] | None,
        every: int,
        action: Action,
        window: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self._watched = Watched(within)
        self._every = every
        self._action = action
        self._window = window or (WARN_WINDOW if action is Action.WARN else None)
        self._windows: Sustained | None = None
        self._num_steps: Counter[int | None] = Counter()
        self._ground: Ground | None = None

    @property
    def ground(self) -> Ground:
        """What it stands on, from `attached` on."""
        assert self._ground is not None
        return self._ground

    @override
    def attached(self, ground: Ground) -> None:
        before, self._ground = self._ground, ground
        self._watched.attached(ground.inventory)
        is_same = before is not None and before.inventory.is_same_as(ground.inventory)
        if self._window is not None and not (is_same and self._windows is not None):
            # Positions of other tensors mean others; those of the same ones keep what was seen of them.
            self._windows = Sustained(self._window)

    @override
    def finish(self, unavailable: Callable[[str, str, tuple[str, ...]], None], *, is_final: bool) -> None:
        if self._ground is not None:
            for reason, indices in self._watched.unseen().items():
                unavailable(self.name, reason, self._ground.inventory.names(indices))

    def is_due(self, look: StepLook) -> bool:
        """Returns whether this step of an optimizer is one that is looked at (training thread, hot path)."""
        return self._num_steps[look.moment.optimizer] % self._every == 0

    def step_applied(self, look: StepLook) -> None:
        """Counts a step of an optimizer (training thread, hot path)."""
        self._num_steps[look.moment.optimizer] += 1

    def due(self, bad: Collection[int], observed: Collection[int]) -> list[int]:
        """Takes what one look has seen; returns of which parameters a finding is due (hot path).

        Args:
            bad: Positions of those that were bad.
            observed: Of all that were looked at.
        """
        return list(bad) if self._windows is None else self._windows.observe(bad, observed)
