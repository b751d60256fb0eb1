"""The folders of a run, each listed once and each there once, however it was spelled.

A folder that is named twice, by a link, a mount or another name of its store, would have each of its files
twice. Where the spelling does not tell, the content does: the same ``run.json`` beside the same files of the
same size and time is the same folder, or a copy that adds nothing to it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torchinstruments.records import RunRecord
from torchinstruments.store import layout
from torchinstruments.store.documents import read_run
from torchinstruments.store.storage import Listing, Storage

__all__ = ["ListedFolder", "list_folders"]


@dataclass(frozen=True, slots=True)
class ListedFolder:
    """One folder of a run.

    Attributes:
        storage: The folder.
        listing: Every file in it.
        run: Its ``run.json``.
    """

    storage: Storage
    listing: Listing
    run: RunRecord


def list_folders(storages: Sequence[Storage]) -> list[ListedFolder]:
    """Lists each folder once (offline).

    Args:
        storages: The folders, in the order given; of one that is named twice the first counts.

    Raises:
        RunFormatError: One of them holds no readable ``run.json``.
        StorageError: A store refused or did not answer.
    """
    by_place: dict[str, Storage] = {}
    for storage in storages:
        by_place.setdefault(_place(storage), storage)
    found: list[ListedFolder] = []
    for storage in by_place.values():
        listing = storage.walk(layout.may_hold_files)
        run = read_run(storage, _size_of_run(listing))
        if not any(_is_same(one, run, listing) for one in found):
            found.append(ListedFolder(storage, listing, run))
    return found


def _place(storage: Storage) -> str:
    return os.path.realpath(storage.url) if storage.is_local else storage.url


def _size_of_run(listing: Listing) -> int:
    return next((info.size_bytes for info in listing if info.path == layout.RUN_FILE), 0)


def _is_same(known: ListedFolder, run: RunRecord, listing: Listing) -> bool:
    return known.run.nonce == run.nonce and known.listing == listing
