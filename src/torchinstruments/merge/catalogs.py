"""The module catalogs of all ranks: which layers there are, and which of them never fired."""

from collections.abc import Mapping, Sequence

from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.merge.tasks import RankReading
from torchinstruments.records import ModuleRecord
from torchinstruments.store.catalog import ModuleCatalog
from torchinstruments.store.summaries import SeriesSummaries

__all__ = ["FiredModules", "joined_modules"]

NOT_CALLED = "not_called"
"""Reason of a layer without rows on a rank that took samples: no sampled forward reached it."""

NO_SAMPLES = "no_samples"
"""Reason of a layer on a rank that took no sample."""


def joined_modules(catalogs: Sequence[ModuleCatalog]) -> dict[str, ModuleRecord]:
    """Returns the layers of one rank in the order of its catalogs; of each, the record that fired most."""
    joined: dict[str, ModuleRecord] = {}
    for catalog in catalogs:
        for module in catalog.modules:
            held = joined.get(module.layer)
            if held is None or module.fired > held.fired:
                joined[module.layer] = module
    return joined


class FiredModules:
    """Which expected layers never fired, and on which ranks.

    A catalog is rewritten at most once a minute, so the one of a process that was killed may be behind; a row
    with a value proves that its layer fired.
    """

    def __init__(self) -> None:
        self._never: dict[str, tuple[str, dict[int, str]]] = {}

    def add(self, rank: int, modules: Mapping[str, ModuleRecord], reading: RankReading) -> None:
        """Takes the joined catalog of a rank and what was read of it."""
        summaries = reading.summaries
        has_value = (summaries.observations > summaries.unavailable_observations).tolist()
        fired = {key.layer for key, there in zip(summaries.keys, has_value, strict=True) if there}
        never = {
            layer: module
            for layer, module in modules.items()
            if module.expected and module.fired == 0 and layer not in fired
        }
        if never:
            reasons = _reasons(summaries)
            otherwise = NOT_CALLED if len(reading.keys) else NO_SAMPLES
            for layer, module in never.items():
                reason = reasons.get(layer, otherwise)
                self._never.setdefault(layer, (module.type, {}))[1][rank] = reason

    def record(self) -> list[dict[str, object]]:
        """Returns ``coverage.modules_never_fired``."""
        return [
            {
                "layer": layer,
                "type": kind,
                "ranks": ranks_text(reasons),
                "reasons": {
                    reason: ranks_text(rank for rank, held in reasons.items() if held == reason)
                    for reason in sorted(set(reasons.values()))
                },
            }
            for layer, (kind, reasons) in self._never.items()
        ]


def _reasons(summaries: SeriesSummaries) -> dict[str, str]:
    """Returns layer to why its latest rows have no value; of several reasons the first by name."""
    found: dict[str, str] = {}
    for key, text in zip(summaries.keys, summaries.latest.reason, strict=True):
        reason = text.partition(":")[0]
        if reason:
            found[key.layer] = min(found.get(key.layer, reason), reason)
    return found
