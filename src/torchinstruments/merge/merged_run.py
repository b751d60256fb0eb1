"""A run as its last merge left it: what is read of ``result.json``, and ``summary.parquet`` rank by rank."""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.errors import RunFormatError
from torchinstruments.merge.entries import SUMMARY_SCHEMA
from torchinstruments.merge.result import RESULT_FILE, RESULT_SCHEMA_VERSION, SUMMARY_FILE
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.layout import MERGED, RUN_FILE
from torchinstruments.store.storage import Storage

if TYPE_CHECKING:
    import polars as pl

__all__ = ["MergedRun", "merged_folder", "open_merged"]


class _Run(msgspec.Struct):
    run_id: str
    created_at: str
    world_size: int
    history: dict[str, int]


class _Coverage(msgspec.Struct):
    complete: bool


class _Generation(msgspec.Struct):
    world_size: int


class _Layer(msgspec.Struct):
    layer: str
    type: str | None


class _File(msgspec.Struct):
    file: str
    sha256: str


class _Result(msgspec.Struct):
    schema_version: int
    run: _Run
    files: list[_File]
    coverage: _Coverage
    generations: list[_Generation]
    layers: list[_Layer]


class _Version(msgspec.Struct):
    schema_version: int


@dataclass(frozen=True, slots=True)
class MergedRun:
    """What a merge found of a run.

    Attributes:
        url: Folder of the merged files, without secrets.
        run_id: The run.
        created_at: When it began, ISO 8601 UTC.
        world_size: Ranks of its last generation.
        window: Samples in a window of its summaries.
        complete: Whether nothing that was expected is missing, and nothing was set aside.
        layers: Layer to its type, in the order of the model; None where no catalog tells the type.
        groups: Rank to its row groups in the table.
    """

    url: str
    run_id: str
    created_at: str
    world_size: int
    window: int
    complete: bool
    layers: Mapping[str, str | None]
    groups: Mapping[int, tuple[int, ...]]
    _file: pq.ParquetFile

    def rows(self, rank: int, columns: list[str]) -> "pl.DataFrame":
        """Returns the series of one rank, one a row.

        Args:
            rank: A rank; one that is not in `groups` has no series.
            columns: Names of columns of ``summary.parquet``.

        Raises:
            RunFormatError: The table is damaged.
        """
        import polars as pl

        names = ["rank", *columns]
        groups = list(self.groups.get(rank, ()))
        if groups:
            try:
                table = self._file.read_row_groups(groups, columns=names, use_threads=False)
            except (pa.ArrowException, OSError, ValueError) as error:
                raise _unreadable(self.url, SUMMARY_FILE, error) from None
        else:
            table = SUMMARY_SCHEMA.empty_table().select(names)
        return pl.DataFrame(pl.from_arrow(table)).filter(rank=rank).drop("rank")


def open_merged(url: str, storage_options: Mapping[str, object] | None) -> MergedRun:
    """Reads what the last merge of a run left (offline).

    Args:
        url: The run's folder, the folder that holds the merged files, or ``result.json`` in it.
        storage_options: In fsspec's dialect.

    Raises:
        ConfigurationError: The address cannot work.
        RunFormatError: The run was not merged, or what lies there cannot be read.
        StorageError: The store refused or did not answer.
    """
    folder = url[: -len(RESULT_FILE)] if url.endswith(f"/{RESULT_FILE}") else url
    storage = merged_folder(open_storage(folder, storage_options))
    try:
        result = _decoded(storage.read(RESULT_FILE), storage)
        data = storage.read(SUMMARY_FILE)
    except FileNotFoundError:
        raise _not_merged(storage) from None
    if hashlib.sha256(data).hexdigest() not in {
        one.sha256 for one in result.files if one.file == SUMMARY_FILE
    }:
        raise RunFormatError(
            f"{SUMMARY_FILE} in {storage.url.rstrip('/')} is not the one that {RESULT_FILE} beside it was "
            f"written with, for a merge ended halfway or runs now, or a file was changed; merge the run again"
        )
    file, groups = _opened(data, storage)
    return MergedRun(
        url=storage.url.rstrip("/"),
        run_id=result.run.run_id,
        created_at=result.run.created_at,
        world_size=result.generations[-1].world_size if result.generations else result.run.world_size,
        window=result.run.history.get("window", 0),
        complete=result.coverage.complete,
        layers={one.layer: one.type for one in result.layers},
        groups=groups,
        _file=file,
    )


def merged_folder(storage: Storage) -> Storage:
    """Returns the folder of the merged files: of a run, or a folder that is one.

    Raises:
        RunFormatError: It holds neither.
        StorageError: The store refused or did not answer.
    """
    names = {entry.path for entry in storage.list()}
    if RUN_FILE in names:
        return storage.child(MERGED)
    if SUMMARY_FILE in names:
        return storage
    raise RunFormatError(
        f"{storage.url} holds neither a run nor merged files; give the folder of a run, or the one that "
        f"`torchinstruments merge` wrote to"
    )


def _not_merged(storage: Storage) -> RunFormatError:
    return RunFormatError(
        f"{storage.url.rstrip('/')} has no {RESULT_FILE} with a {SUMMARY_FILE} beside it, for the run was "
        f"not merged; run `torchinstruments merge` on it first"
    )


def _decoded(data: bytes, storage: Storage) -> _Result:
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version == RESULT_SCHEMA_VERSION:
            return msgspec.json.decode(data, type=_Result)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(storage.url, RESULT_FILE, error) from None
    raise RunFormatError(
        f"{RESULT_FILE} in {storage.url} has schema version {version}, and this release reads version "
        f"{RESULT_SCHEMA_VERSION}; merge the run again"
    )


def _opened(data: bytes, storage: Storage) -> tuple[pq.ParquetFile, dict[int, tuple[int, ...]]]:
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        missing = [name for name in SUMMARY_SCHEMA.names if name not in file.schema_arrow.names]
        if missing:
            raise _unreadable(storage.url, SUMMARY_FILE, f"it has no column {missing[0]}")
        groups: dict[int, tuple[int, ...]] = {}
        for place in range(file.metadata.num_row_groups):
            ranks = file.read_row_group(place, columns=["rank"]).column("rank").unique().to_pylist()
            for rank in ranks:
                groups[rank] = (*groups.get(rank, ()), place)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, RunFormatError):
            raise
        raise _unreadable(storage.url, SUMMARY_FILE, error) from None
    return file, dict(sorted(groups.items()))


def _unreadable(url: str, name: str, error: object) -> RunFormatError:
    detail = " ".join(str(error).split())
    return RunFormatError(f"{name} in {url} cannot be read ({detail}); merge the run again")
