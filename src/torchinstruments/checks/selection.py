"""Which parameters a check watches, and which of those it never saw."""

from torchinstruments.checks.check import StepLook
from torchinstruments.checks.inventory import PARAMETER, Inventory

__all__ = ["Watched"]


class Watched:
    """The parameters that a check was given, from `attached` on.

    Args:
        within: Their names, aliases or patterns; None for every parameter.
    """

    def __init__(self, within: tuple[str, ...] | None) -> None:
        self._within = within
        self._inventory: Inventory | None = None
        self._seen: set[int] = set()
        self.indices: frozenset[int] = frozenset()

    def attached(self, inventory: Inventory) -> None:
        """Takes the inventory (training thread, at attach).

        Raises:
            ConfigurationError: A name stands for nothing.
        """
        if self._inventory is not None and not self._inventory.is_same_as(inventory):
            self._seen.clear()
        self._inventory = inventory
        self.indices = self.chosen(inventory)

    def chosen(self, inventory: Inventory) -> frozenset[int]:
        """Returns the positions of what was chosen (any time).

        Raises:
            ConfigurationError: A name stands for nothing.
        """
        if self._within is None:
            return frozenset(entry.index for entry in inventory.parameters)
        return inventory.resolve(self._within, "within")

    def own(self, look: StepLook) -> list[int]:
        """Returns those that an optimizer steps and that need a gradient (training thread, hot path)."""
        own = look.trainable
        if self._within is not None:
            own = [index for index in own if index in self.indices]
            self._seen.update(own)
        return own

    def unseen(self) -> dict[str, list[int]]:
        """Returns by reason those that were asked for by name and that no step ever had."""
        if self._within is None or self._inventory is None:
            return {}
        reasons: dict[str, list[int]] = {}
        for index in sorted(self.indices - self._seen):
            entry = self._inventory.entries[index]
            if entry.kind != PARAMETER:
                reason = "never_observed: it is a buffer, which no optimizer steps"
            elif not entry.tensor.requires_grad:
                reason = "never_observed: requires_grad is False"
            else:
                reason = "never_observed: no step of a watched optimizer had it"
            reasons.setdefault(reason, []).append(index)
        return reasons
