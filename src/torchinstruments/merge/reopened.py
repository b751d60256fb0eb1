"""The result of an earlier merge, opened again with its tables."""

import contextlib
import hashlib
import io
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.errors import RunFormatError, TorchInstrumentsError
from torchinstruments.merge.merged_run import merged_folder
from torchinstruments.merge.result import RESULT_FILE, RESULT_SCHEMA_VERSION, MergeResult
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.layout import MERGED
from torchinstruments.store.local import require_no_link

if TYPE_CHECKING:
    from torchinstruments.store.storage import Storage

__all__ = ["merged_table", "reopen_result", "shaped_like_a_merge"]


class _Run(msgspec.Struct):
    run_id: str


class _Coverage(msgspec.Struct):
    complete: bool


class _Head(msgspec.Struct):
    schema_version: int
    run: _Run
    coverage: _Coverage


def reopen_result(url: str, storage_options: Mapping[str, object] | None = None) -> MergeResult | None:
    """Returns what the last merge of a run left, or None where it was not merged (offline).

    Args:
        url: The run's folder, the folder that holds the merged files, or ``result.json`` in it.
        storage_options: In fsspec's dialect.

    Raises:
        ConfigurationError: The address cannot work.
        RunFormatError: There is no run, or what the merge left cannot be read.
        StorageError: The store refused or did not answer, or the folder of the merged files is a link.
    """
    given = open_storage(url.removesuffix(f"/{RESULT_FILE}"), storage_options)
    storage = merged_folder(given)
    if storage is not given:
        require_no_link(given, MERGED)  # a page is written there
    try:
        data = storage.read(RESULT_FILE)
    except FileNotFoundError:
        return None
    try:
        head = msgspec.json.decode(data, type=_Head)
        result = msgspec.json.decode(data, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(storage, RESULT_FILE, error) from None
    if head.schema_version != RESULT_SCHEMA_VERSION:
        raise RunFormatError(
            f"{RESULT_FILE} in {storage.url} has schema version {head.schema_version}, and this release "
            f"reads version {RESULT_SCHEMA_VERSION}; merge the run again"
        )
    return MergeResult(result, storage.url, head.coverage.complete, storage)


def merged_table(merged: MergeResult, name: str) -> pq.ParquetFile | None:
    """Returns a table of a merge, or None where it was an earlier release's and has no such table (offline).

    Raises:
        RunFormatError: It is not the one that the result was written with, or cannot be read.
        StorageError: The store refused or did not answer.
    """
    files = merged.result.get("files")
    records = files if isinstance(files, list) else []
    digests = [one.get("sha256") for one in records if isinstance(one, dict) and one.get("file") == name]
    if not digests:
        return None
    try:
        data = merged.storage.read(name)
    except FileNotFoundError:
        raise _unreadable(merged.storage, name, "it is gone") from None
    if hashlib.sha256(data).hexdigest() not in digests:
        raise RunFormatError(
            f"{name} in {merged.url.rstrip('/')} is not the one that {RESULT_FILE} beside it was written "
            f"with, for a merge ended halfway or runs now, or a file was changed; merge the run again"
        )
    try:
        return pq.ParquetFile(io.BytesIO(data))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(merged.storage, name, error) from None


@contextlib.contextmanager
def shaped_like_a_merge(merged: MergeResult) -> Generator[None]:
    """Tells what a result that no merge wrote does to whoever shows it.

    Raises:
        RunFormatError: Something is missing in the result or a table, or is of another type than is due.
    """
    import polars as pl

    try:
        yield
    except TorchInstrumentsError:
        raise
    except (
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        pa.ArrowException,
        pl.exceptions.PolarsError,
    ) as error:
        what = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise RunFormatError(
            f"{RESULT_FILE} in {merged.url.rstrip('/')}, or a table beside it, is not what a merge writes "
            f"({what}); merge the run again"
        ) from error


def _unreadable(storage: "Storage", name: str, error: object) -> RunFormatError:
    detail = " ".join(str(error).split())
    return RunFormatError(f"{name} in {storage.url} cannot be read ({detail}); merge the run again")
