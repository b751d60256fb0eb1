"""The folder that a merge writes to: where it may lie, and how its files come to lie there together."""

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from torchinstruments.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageError,
    TorchInstrumentsError,
)
from torchinstruments.merge.plan import MergePlan
from torchinstruments.merge.result import RESULT_FILE
from torchinstruments.store import layout
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.manifest import encode_document
from torchinstruments.store.storage import Storage

__all__ = ["file_records", "open_output", "write_together"]

_RANK_PREFIX = "rank-"


def open_output(plan: MergePlan, output: str | None) -> Storage:
    """Returns the folder for the result (offline).

    Args:
        plan: What is merged.
        output: As the caller gave it, None for ``merged`` in the first folder.

    Raises:
        ConfigurationError: Files of a run lie there, or belong there.
        StorageError: The store did not answer.
    """
    if output is None:
        return plan.storages[0].child(layout.MERGED)
    storage = open_storage(output, plan.sources[0].storage_options)
    if storage.is_local and Path(storage.url).exists() and not Path(storage.url).is_dir():
        raise ConfigurationError(
            f"the result cannot be written to {storage.url}, which is a file; leave --output out (in Python "
            f"output=), or give a folder"
        )
    if _is_place_of_run(storage, plan.storages) or _holds_run_files(storage):
        raise ConfigurationError(
            f"the result cannot be written to {storage.url}, where files of a run belong, which it would "
            f"replace or stand among; leave --output out (in Python output=), or give a folder of its own"
        )
    return storage


def file_records(files: Mapping[str, bytes | Path]) -> list[dict[str, object]]:
    """Returns ``files`` of ``result.json``: name, size and SHA-256 of each file beside it."""
    records: list[dict[str, object]] = []
    for name, data in sorted(files.items()):
        if isinstance(data, bytes):
            size_bytes, digest = len(data), hashlib.sha256(data)
        else:
            with data.open("rb") as file:
                size_bytes, digest = data.stat().st_size, hashlib.file_digest(file, "sha256")
        records.append({"file": name, "size_bytes": size_bytes, "sha256": digest.hexdigest()})
    return records


def write_together(storage: Storage, files: Mapping[str, bytes | Path], result: Mapping[str, object]) -> None:
    """Writes the files and then ``result.json``, in place of those of the merge before.

    Raises:
        StorageError: The store refused. On a local folder the files of before then stand as they were.
    """
    try:
        # The result last, so that it never speaks of a file that is not there.
        storage.replace_together({**files, RESULT_FILE: encode_document(dict(result))})
    except TorchInstrumentsError:
        raise
    except OSError as error:
        raise StorageError(
            f"the result could not be written to {storage.url} ({error.strerror or error}); make room there, "
            f"or give another folder with --output, in Python output="
        ) from error


def _is_place_of_run(output: Storage, storages: Collection[Storage]) -> bool:
    """Returns whether a folder is one of the run's, or lies where files of a rank belong."""
    for one in storages:
        if one.is_local != output.is_local:
            continue
        root, place = _known_as(one), _known_as(output)
        if place == root:
            return True
        if place.startswith(f"{root}/"):
            first, *further = place[len(root) + 1 :].split("/")
            is_of_rank = first.startswith(_RANK_PREFIX) or first in {layout.GENERATIONS, layout.TENSORBOARD}
            if is_of_rank or any(layout.is_parts_folder(name) for name in (first, *further)):
                return True
    return layout.is_parts_folder(_known_as(output).rpartition("/")[2])


def _holds_run_files(output: Storage) -> bool:
    """Returns whether a folder is one of any run or rank, whatever it is called."""
    try:
        names = [entry.path for entry in output.list()]
    except StorageDeniedError:
        # Who may write there need not be allowed to list; where neither is, writing says so.
        return False
    return any(name == layout.RUN_FILE or layout.parse_manifest(name) is not None for name in names)


def _known_as(storage: Storage) -> str:
    return (os.path.realpath(storage.url) if storage.is_local else storage.url).rstrip("/")
