"""The module catalogs of all ranks: which layers there are, and which of them never fired."""

from collections.abc import Mapping, Sequence

from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.records import ModuleRecord
from torchinstruments.store.catalog import ModuleCatalog
from torchinstruments.store.summaries import SeriesSummaries

__all__ = ["FiredModules", "joined_modules"]


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
        self._never: dict[str, tuple[str, list[int]]] = {}

    def add(self, rank: int, modules: Mapping[str, ModuleRecord], summaries: SeriesSummaries) -> None:
        """Takes the joined catalog and the summaries of a rank."""
        has_value = (summaries.observations > summaries.unavailable_observations).tolist()
        fired = {key.layer for key, there in zip(summaries.keys, has_value, strict=True) if there}
        for layer, module in modules.items():
            if module.expected and module.fired == 0 and layer not in fired:
                self._never.setdefault(layer, (module.type, []))[1].append(rank)

    def record(self) -> list[dict[str, object]]:
        """Returns ``coverage.modules_never_fired``."""
        return [
            {"layer": layer, "type": kind, "ranks": ranks_text(ranks)}
            for layer, (kind, ranks) in self._never.items()
        ]
