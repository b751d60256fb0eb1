"""M of the last N: what has to be seen before something is said, and again before it is said again.

A pure state machine. Only what was bad lately has a state, so that a healthy model costs nothing here.
"""

from collections.abc import Collection

from torchinstruments.checks.findings import Action

__all__ = ["WARN_WINDOW", "Sustained", "at_once", "warned"]

WARN_WINDOW = (5, 8)
"""How many bad ones of how many observations make a finding, where the caller says nothing."""


def at_once() -> "Sustained":
    """Returns windows of what is told at the first bad one, and again after `WARN_WINDOW` without any."""
    return Sustained((1, WARN_WINDOW[1]))


class Sustained:
    """Windows of the same size over many subjects.

    Args:
        window: ``(m, n)``: told at m bad ones of the last n; armed again after n good ones in a row.
    """

    def __init__(self, window: tuple[int, int]) -> None:
        self._needed, self._size = window
        self._mask = (1 << self._size) - 1
        self._recent: dict[int, int] = {}
        self._told: set[int] = set()

    @property
    def suspects(self) -> Collection[int]:
        """Subjects that were bad lately."""
        return self._recent.keys()

    def num_bad(self, subject: int) -> int:
        """Returns how many of a subject's last observations were bad."""
        return self._recent.get(subject, 0).bit_count()

    def observe(self, bad: Collection[int], observed: Collection[int]) -> list[int]:
        """Takes one observation of some subjects (training thread, hot path).

        Args:
            bad: Subjects that were bad.
            observed: All that were looked at, the bad ones among them; others keep their windows.

        Returns:
            Subjects of which a finding is due.
        """
        due: list[int] = []
        for subject in [*self._recent, *(one for one in bad if one not in self._recent)]:
            if subject not in observed:
                continue
            recent = (self._recent.get(subject, 0) << 1 | (subject in bad)) & self._mask
            if recent:
                self._recent[subject] = recent
                if subject not in self._told and recent.bit_count() >= self._needed:
                    self._told.add(subject)
                    due.append(subject)
            else:
                self._recent.pop(subject, None)
                self._told.discard(subject)
        return due


def warned(action: Action, windows: Sustained, bad: Collection[int], observed: Collection[int]) -> Action:
    """Returns what is done about something bad, of which each is a finding and only the first one a warning.

    Args:
        action: What the caller asked for.
        windows: Of what is told at the first bad one.
        bad: Subjects that are bad.
        observed: All that were looked at.
    """
    due = windows.observe(bad, observed)
    return Action.COLLECT if action is Action.WARN and not due else action
