"""M of the last N: what has to be seen before something is said, and again before it is said again.

A pure state machine. Only what was bad lately has a state, so that a healthy model costs nothing here.
"""

from collections.abc import Collection

__all__ = ["WARN_WINDOW", "Sustained"]

WARN_WINDOW = (5, 8)
"""How many bad ones of how many observations make a finding, where the caller says nothing."""


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
