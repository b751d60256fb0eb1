"""The catalog of selected layers as it grows: when each was first called, and in how many samples."""

from collections.abc import Sequence
from dataclasses import replace

from torchinstruments.observe.selection import Layer
from torchinstruments.records import ModuleRecord

__all__ = ["MIN_INTERVAL_S", "Catalog"]

MIN_INTERVAL_S = 60.0
"""Seconds between two catalogs that differ in counts alone."""


class Catalog:
    """The rows of ``modules-<process>.json``.

    Args:
        layers: All selected ones, by index.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._records = [layer.record() for layer in layers]
        self._order: dict[int, int] = {}
        self._fired = [0] * len(self._records)
        self._told_s: float | None = None

    def records(self) -> tuple[ModuleRecord, ...]:
        """Returns the catalog as it is now (any thread)."""
        return tuple(
            replace(record, execution_order=self._order.get(index), fired=self._fired[index])
            for index, record in enumerate(self._records)
        )

    def fired(self, order: Sequence[int], now_s: float) -> bool:
        """Takes which layers a sampled forward called (training thread, hot path).

        Args:
            order: Indices of layers in the order of their first calls.
            now_s: Monotonic seconds.

        Returns:
            Whether the catalog is worth telling again: a layer fired for the first time, or time has passed.
        """
        is_new = False
        for position, index in enumerate(order):
            if self._fired[index] == 0:
                self._order[index] = position
                is_new = True
            self._fired[index] += 1
        if not is_new and self._told_s is not None and now_s < self._told_s + MIN_INTERVAL_S:
            return False
        self._told_s = now_s
        return True
