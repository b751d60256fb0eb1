"""The folders that a subcommand is given: whether each holds a run, and which other runs lie beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torchinstruments.cli.console import count_text, shown_text
from torchinstruments.errors import RunFormatError

if TYPE_CHECKING:
    from torchinstruments.store.storage import Storage

__all__ = ["Folders", "open_folders", "print_runs_beside"]

_RUN_PREFIX = "run-"
"""A run that finds another one in its folder goes to ``run-<run id>`` below it."""

_MAX_NAMED_RUNS = 10


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of one run.

    Attributes:
        storages: The folders, each once, in the order given.
        runs_beside: Ids of the other runs that lie below them in ``run-*/``, sorted.
    """

    storages: "tuple[Storage, ...]"
    runs_beside: tuple[str, ...]


def open_folders(urls: Sequence[str], options: Mapping[str, object] | None) -> Folders:
    """Opens the folders of a run and lists each of them, one level deep.

    Args:
        urls: Paths or fsspec URLs; the same one twice counts once.
        options: In fsspec's dialect, for all of them.

    Raises:
        RunFormatError: There is no ``run.json`` in one of them.
        ConfigurationError: An address cannot work.
        StorageError: A store refused or did not answer.
    """
    from torchinstruments.store.filesystem import open_storage
    from torchinstruments.store.layout import RUN_FILE

    storages = tuple(open_storage(url, options) for url in dict.fromkeys(urls))
    beside: set[str] = set()
    for storage in storages:
        entries = storage.list()
        if RUN_FILE not in {entry.path for entry in entries}:
            raise RunFormatError(f"{storage.url} holds no run, for {_why_no_run(storage)}")
        beside |= {
            entry.path.removeprefix(_RUN_PREFIX)
            for entry in entries
            if entry.is_folder and entry.path.startswith(_RUN_PREFIX)
        }
    return Folders(storages, tuple(sorted(beside)))


def _why_no_run(storage: "Storage") -> str:
    """Returns why a folder is not that of a run, and what to give instead where that is known."""
    from torchinstruments.store.layout import MERGED, RUN_FILE, parse_rank_folder

    place = Path(storage.url)
    if storage.is_local and not place.exists():
        return "there is no such folder on this host; check the path, or wait until the job has attached"
    if storage.is_local and not place.is_dir():
        return f"it is a file; give the folder that {RUN_FILE} lies in"
    above, _, name = storage.url.rstrip("/").rpartition("/")
    if name == MERGED or parse_rank_folder(name) is not None:
        return f"it is a folder inside of one; give the folder above it, {above}"
    return (
        f"there is no {RUN_FILE} in it: it is not the folder that inject_observer wrote to, or the job has "
        f"not attached yet"
    )


def print_runs_beside(folders: Folders, file: TextIO) -> None:
    """Prints one line on the runs that lie beside the one asked for; nothing where there are none."""
    ids = folders.runs_beside
    if not ids:
        return
    named = shown_text(", ".join(ids[:_MAX_NAMED_RUNS]))
    more = f" and {len(ids) - _MAX_NAMED_RUNS:,} more" if len(ids) > _MAX_NAMED_RUNS else ""
    verb, where = ("lies", "") if len(ids) == 1 else ("lie", "each ")
    print(
        f"{count_text(len(ids), 'other run')} {verb} beside this one, {where}in run-<id>/: {named}{more}",
        file=file,
    )
