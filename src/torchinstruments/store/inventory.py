"""What lies in a run's folders, found with one listing each: the floor under `Run`, merge and status.

Several folders may hold one run (hosts without a shared filesystem have one each), so an inventory spans any
number of them. Every file is named by the place it lies in: the index of its folder and its path there.

A document that cannot be used is set aside by name with a reason code, and the rest is used. Part files are
not opened here; `inspection` does that.
"""

from collections.abc import Sequence

from torchinstruments.errors import RunFormatError
from torchinstruments.store.catalog import ModuleCatalog, decode_catalog
from torchinstruments.store.checks import FoundChecks, decode_checks
from torchinstruments.store.documents import (
    MAX_CHECKS_BYTES,
    UnusableFileError,
    decode_document,
    read_document,
)
from torchinstruments.store.found import (
    CatalogFile,
    Inventory,
    ManifestFile,
    PartFile,
    RankInventory,
    SetAside,
)
from torchinstruments.store.listed import ListedFolder, list_folders
from torchinstruments.store.sorting import FileSorter, locate
from torchinstruments.store.storage import Storage

__all__ = [
    "CatalogFile",
    "Inventory",
    "ManifestFile",
    "PartFile",
    "RankInventory",
    "SetAside",
    "read_catalog",
    "read_checks",
    "take_inventory",
]


def take_inventory(*storages: Storage) -> Inventory:
    """Lists every folder once and reads its documents, all but the catalogs (offline).

    Args:
        storages: The folders that hold one run, at least one; the same one twice counts once.

    Raises:
        RunFormatError: A folder holds no readable ``run.json``, one of a schema version that this release
            does not know, or one of another run than the first folder's.
        StorageError: A store refused or did not answer.
    """
    folders = list_folders(storages)
    _require_one_run(folders)
    distinct = tuple(one.storage for one in folders)
    run = folders[0].run
    files = [locate(source, info) for source, one in enumerate(folders) for info in one.listing]
    sorter = FileSorter(run_id=run.run_id, storages=distinct)
    times = [file.info.modified_at for file in files if sorter.belongs(file)]
    sorter.read_documents()
    generations, ranks = sorter.generation_records(), sorter.ranks()
    numbers = [record.generation for record in generations]
    numbers += [found.manifest.generation for rank in ranks.values() for found in rank.manifests]
    return Inventory(
        storages=distinct,
        run=run,
        generations=generations,
        ranks=ranks,
        set_aside=tuple(sorted(sorter.set_aside, key=_by_place)),
        strange=tuple(sorted(sorter.strange)),
        newest_at=max((time for time in times if time is not None), default=None),
        newest_generation=max(numbers, default=-1),
    )


def read_catalog(inventory: Inventory, file: CatalogFile) -> ModuleCatalog | SetAside:
    """Reads one module catalog (offline).

    Returns:
        The catalog, or why it is set aside.

    Raises:
        StorageError: The store did not answer.
    """
    try:
        data = read_document(inventory.storages[file.source], file.path, file.size_bytes)
        catalog = decode_document(data, decode_catalog)
    except UnusableFileError as error:
        return SetAside(file.source, file.path, error.reason)
    if catalog.run_id != inventory.run.run_id:
        return SetAside(file.source, file.path, "foreign_run")
    return catalog


def read_checks(inventory: Inventory, file: CatalogFile) -> FoundChecks | SetAside:
    """Reads one process's report of checks (offline).

    Returns:
        The report, or why it is set aside.

    Raises:
        StorageError: The store did not answer.
    """
    try:
        data = read_document(inventory.storages[file.source], file.path, file.size_bytes, MAX_CHECKS_BYTES)
        found = decode_document(data, decode_checks)
    except UnusableFileError as error:
        return SetAside(file.source, file.path, error.reason)
    if found.run_id != inventory.run.run_id:
        return SetAside(file.source, file.path, "foreign_run")
    return found


def _require_one_run(folders: Sequence[ListedFolder]) -> None:
    first = folders[0]
    for one in folders:
        if one.run.run_id != first.run.run_id:
            raise RunFormatError(
                f"{first.storage.url} holds the run {first.run.run_id!r}, but {one.storage.url} the run "
                f"{one.run.run_id!r}; give folders of one run only"
            )


def _by_place(file: SetAside) -> tuple[int, str, str]:
    return (file.source, file.path, file.reason)
