"""Opening one part and reading its rows, whole or in batches."""

import contextlib
import io
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.errors import StorageError
from torchinstruments.merge.sources import Source, opened
from torchinstruments.store.documents import UnusableFileError
from torchinstruments.store.inspection import Expected, inspect_footer
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.schema import TABLE_SCHEMAS
from torchinstruments.store.storage import Storage

__all__ = ["BATCH_ROWS", "MAX_FETCHED_BYTES", "batches", "checked_batches", "open_part", "reread"]

MAX_FETCHED_BYTES = 64 * 2**20
"""Parts up to this size are fetched by one request; larger ones are read in ranges."""

BATCH_ROWS = 65_536
"""Rows that a worker decodes at once: as many whole row groups as fit."""

_TEXTS = {
    table: [field.name for field in schema if pa.types.is_string(field.type)]
    for table, schema in TABLE_SCHEMAS.items()
}


@contextlib.contextmanager
def open_part(storage: Storage, part: PartFile, run_id: str) -> Generator[pq.ParquetFile]:
    """Checks a part's footer and opens its rows (offline, any worker).

    Raises:
        UnusableFileError: It is to be left out.
    """
    if part.size_bytes == 0:
        raise UnusableFileError("empty_file")
    with contextlib.ExitStack() as stack:
        if part.size_bytes <= MAX_FETCHED_BYTES:
            data = storage.read(part.path)
            raw: BinaryIO = stack.enter_context(io.BytesIO(data))
            source: pa.NativeFile | BinaryIO = pa.BufferReader(data)
        else:
            raw = source = stack.enter_context(storage.open_input(part.path, part.size_bytes))
        # Rank and process of the rows are compared row by row, and reported instead of refused.
        _, footer = inspect_footer(raw, Expected(part.table, run_id))
        raw.seek(0)
        yield stack.enter_context(
            pq.ParquetFile(
                source,
                metadata=footer,
                read_dictionary=_TEXTS[part.table],
                pre_buffer=part.size_bytes > MAX_FETCHED_BYTES,
                page_checksum_verification=True,
            )
        )


def batches(
    file: pq.ParquetFile, columns: Sequence[str], is_wanted: Callable[[int, int], bool] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a part (offline, any worker).

    Args:
        file: The part.
        columns: What to read of it.
        is_wanted: Told the lowest and highest attempt of a row group, whether to read it; None for all.
    """
    metadata, names = file.metadata, list(columns)
    groups: list[int] = []
    rows = 0
    # Whole row groups, so that no batch ends in the middle of a sample. One thread: the merge is parallel
    # over ranks, and a worker's memory stays that of one batch.
    for number in range(metadata.num_row_groups):
        if is_wanted is not None and not _may_hold(metadata.row_group(number), is_wanted):
            continue
        added = metadata.row_group(number).num_rows
        if groups and rows + added > BATCH_ROWS:
            yield from file.iter_batches(BATCH_ROWS, groups, names, use_threads=False)
            groups.clear()
            rows = 0
        groups.append(number)
        rows += added
    if groups:
        yield from file.iter_batches(BATCH_ROWS, groups, names, use_threads=False)


def _may_hold(group: pq.RowGroupMetaData, is_wanted: Callable[[int, int], bool]) -> bool:
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == "attempt":
            statistics = column.statistics
            if statistics is None or not statistics.has_min_max:
                return True
            return is_wanted(statistics.min, statistics.max)
    return True


def checked_batches(
    file: pq.ParquetFile, columns: Sequence[str], max_held_rows: int
) -> Iterable[pa.RecordBatch]:
    """Returns the rows of a part of which every one can be decoded (offline, any worker).

    Args:
        file: The part.
        columns: What to read of it.
        max_held_rows: A part with more rows is decoded twice instead of held.
    """
    if file.metadata.num_rows <= max_held_rows:
        return list(batches(file, columns))
    for _ in batches(file, columns):
        pass
    return batches(file, columns)


def reread(
    sources: Sequence[Source],
    run_id: str,
    part: PartFile,
    columns: Sequence[str],
    is_wanted: Callable[[int, int], bool] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a part that could be read to its end before (offline, any worker).

    Args:
        sources: The folders of the run, by `PartFile.source`.
        run_id: Its run.
        part: The part.
        columns: What to read of it.
        is_wanted: As in `batches`.

    Raises:
        StorageError: A store did not answer, or the part changed since.
    """
    storage = opened(sources[part.source])
    try:
        with open_part(storage, part, run_id) as file:
            yield from batches(file, columns, is_wanted)
    except StorageError:
        raise
    except (UnusableFileError, pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(
            f"{storage.url.rstrip('/')}/{part.path} could be read and then could not ({error}); merge again"
        ) from error
