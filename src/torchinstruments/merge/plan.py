"""What a merge is going to read: every folder listed once, one task a rank."""

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchinstruments.config import HistoryConfig
from torchinstruments.errors import ConfigurationError
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.merge.sources import Source, opened
from torchinstruments.merge.tasks import RankTask
from torchinstruments.store.inventory import Inventory, take_inventory
from torchinstruments.store.storage import Storage
from torchinstruments.store.urls import check_storage_options, check_url

__all__ = ["MergePlan", "plan_merge"]


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a merge is going to read.

    Attributes:
        sources: The folders, each once, in the order given.
        storages: The same, opened in this process.
        inventory: What lies in them.
        tasks: One a rank that left anything, by rank.
        asked_ranks: The ranks that the caller wants merged, None for all.
        is_second: Whether this is the second try, which takes what it finds.
    """

    sources: tuple[Source, ...]
    storages: tuple[Storage, ...]
    inventory: Inventory
    tasks: tuple[RankTask, ...]
    asked_ranks: frozenset[int] | None
    is_second: bool = False

    @property
    def token(self) -> str:
        """Names this merge among those of this process."""
        return self.sources[0].token


def plan_merge(
    urls: Sequence[str],
    storage_options: Mapping[str, object] | None,
    ranks: Collection[int] | None,
    *,
    is_second: bool = False,
) -> MergePlan:
    """Lists the folders of one run.

    Args:
        urls: At least one folder; the same one twice counts once.
        storage_options: In fsspec's dialect.
        ranks: The ranks to merge, None for all.
        is_second: Whether a first try met files that went away, or were damaged where it did not look.

    Raises:
        ConfigurationError: There is no URL, one that cannot work, or none of the chosen ranks left anything.
        RunFormatError: A folder holds no run, one that this release does not read, or another run.
        StorageError: A store refused or did not answer.
    """
    if not urls:
        raise ConfigurationError("no folder was given; give the URL of at least one run")
    for url in urls:
        check_url(url)
    check_storage_options(storage_options)
    token = uuid.uuid4().hex
    every = [Source(url, storage_options, token, number) for number, url in enumerate(dict.fromkeys(urls))]
    given = [opened(source) for source in every]
    inventory = take_inventory(*given)
    storages = inventory.storages
    # The same folder by another name is not among them.
    sources = tuple(
        source
        for source, storage in zip(every, given, strict=True)
        if any(storage is one for one in storages)
    )
    asked = None if ranks is None else frozenset(ranks)
    if asked is not None and asked.isdisjoint(inventory.ranks):
        raise ConfigurationError(
            f"none of the ranks {ranks_text(asked)!r} left anything in {storages[0].url}; "
            f"there are {ranks_text(inventory.ranks)!r}"
        )
    window = inventory.run.history.get("window", HistoryConfig().window)
    tasks = tuple(
        RankTask(
            rank=rank,
            run_id=inventory.run.run_id,
            window=max(1, window),
            sources=sources,
            parts=found.parts,
            generations={one.manifest.process: one.manifest.generation for one in found.manifests},
            reads_all_columns=is_second,
        )
        for rank, found in inventory.ranks.items()
        if asked is None or rank in asked
    )
    return MergePlan(sources, storages, inventory, tasks, asked, is_second)
