"""What an inventory is made of: the files of a run, each named by the folder and the path it lies in."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchinstruments.records import GenerationRecord, RunRecord
from torchinstruments.store.manifest import Manifest
from torchinstruments.store.storage import Storage

__all__ = ["CatalogFile", "Inventory", "ManifestFile", "PartFile", "RankInventory", "SetAside"]


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that is left out, and why.

    Attributes:
        source: Index of its folder in `Inventory.storages`.
        path: Path below that folder.
        reason: As in `UnusableFileError`.
    """

    source: int
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A readable manifest and where it lies.

    Attributes:
        manifest: What it says.
        source: Index of its folder in `Inventory.storages`.
        path: Path below that folder.
        modified_at: When the store last changed it, by its clock, in seconds since the epoch, where known.
    """

    manifest: Manifest
    source: int
    path: str
    modified_at: float | None


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """A module catalog, or a report of checks, that has not been read yet; see `read_catalog`.

    Attributes:
        process: 8 hex digits.
        source: Index of its folder in `Inventory.storages`.
        path: Path below that folder.
        size_bytes: Its size.
    """

    process: str
    source: int
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PartFile:
    """A part by its name; its bytes have not been looked at.

    Attributes:
        table: One of `layout.TABLES`.
        rank: Rank whose folder it lies in.
        process: 8 hex digits.
        sequence: Its number among the parts of that process and table.
        source: Index of its folder in `Inventory.storages`.
        path: Path below that folder.
        size_bytes: Its size.
        modified_at: When the store last changed it, in seconds since the epoch, where known.
    """

    table: str
    rank: int
    process: str
    sequence: int
    source: int
    path: str
    size_bytes: int
    modified_at: float | None


@dataclass(frozen=True, slots=True)
class RankInventory:
    """Everything of one rank, of all its processes and generations.

    Attributes:
        rank: The rank.
        manifests: By generation, then process.
        catalogs: By process.
        checks: Reports of checks, by process.
        parts: Table to its parts, in the order of writing: by generation (a process without a readable
            manifest comes last), process and sequence.
    """

    rank: int
    manifests: tuple[ManifestFile, ...]
    catalogs: tuple[CatalogFile, ...]
    parts: Mapping[str, tuple[PartFile, ...]]
    checks: tuple[CatalogFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """What lies in the folders of one run.

    Attributes:
        storages: The folders, each once, in the order given.
        run: ``run.json`` of the first folder.
        generations: Records in ``generations/``, by number; of several folders the fullest of each number.
        ranks: Rank to its files, by rank. Ranks that left nothing are not here.
        set_aside: Documents that could not be used, and parts that lie here twice.
        strange: Files where only parts or this package's documents may lie, as (source, path).
        newest_at: Newest modification time of the run's files, in seconds since the epoch, where known.
        newest_generation: Highest generation that a record or a manifest tells, -1 where none does.
    """

    storages: tuple[Storage, ...]
    run: RunRecord
    generations: tuple[GenerationRecord, ...]
    ranks: Mapping[int, RankInventory]
    set_aside: tuple[SetAside, ...]
    strange: tuple[tuple[int, str], ...]
    newest_at: float | None
    newest_generation: int

    @property
    def manifests(self) -> tuple[ManifestFile, ...]:
        """All readable manifests, by rank, generation and process."""
        return tuple(found for rank in self.ranks.values() for found in rank.manifests)
