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
        self._lazy = {layer.index: layer for layer in layers if layer.is_lazy}

    def records(self) -> tuple[ModuleRecord, ...]:
        """Returns the catalog as it is now (any thread)."""
        return tuple(
            [
                replace(record, execution_order=self._order.get(index), fired=self._fired[index])
                for index, record in enumerate(self._records)
            ]
        )

    def places(self) -> dict[str, int]:
        """Returns the index of each name."""
        return {record.layer: index for index, record in enumerate(self._records)}

    def renew(self, layers: Sequence[Layer]) -> None:
        """Takes the layers of a model that has changed (training thread).

        Args:
            layers: Those that are there now, with the indices of `places`, new ones with the next. What is no
                longer there stays in the catalog and is not expected to fire.
        """
        by_index = {layer.index: layer for layer in layers}
        records = [
            by_index[index].record() if index in by_index else replace(record, expected=False)
            for index, record in enumerate(self._records)
        ]
        records.extend(by_index[index].record() for index in sorted(by_index) if index >= len(records))
        self._fired.extend([0] * (len(records) - len(self._fired)))
        self._records = records
        self._lazy = {layer.index: layer for layer in layers if layer.is_lazy}

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
        if self._lazy:
            is_new |= self._materialised()
        if not is_new and self._told_s is not None and now_s < self._told_s + MIN_INTERVAL_S:
            return False
        self._told_s = now_s
        return True

    def _materialised(self) -> bool:
        """Returns whether a layer knows its parameters by now, which it did not know before."""
        ready = [layer for layer in self._lazy.values() if not layer.is_lazy]
        for layer in ready:
            self._records[layer.index] = layer.record()
            del self._lazy[layer.index]
        return bool(ready)
