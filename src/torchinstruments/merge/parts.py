"""Opening one part and reading its rows, whole or in batches."""

import contextlib
import io
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.errors import StorageError
from torchinstruments.merge.claims import Claims
from torchinstruments.merge.failures import of_rank
from torchinstruments.merge.known_columns import DecodedRows, KnownColumns
from torchinstruments.merge.row_checks import check_num_rows, check_rows, checked, table_schema
from torchinstruments.merge.sources import Source, opened
from torchinstruments.store.documents import UnusableFileError
from torchinstruments.store.inspection import (
    Expected,
    check_size,
    inspect_footer,
    inspect_metadata,
    read_tail,
)
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.schema import TABLE_SCHEMAS
from torchinstruments.store.storage import Storage

__all__ = [
    "BATCH_ROWS",
    "MAX_FETCHED_BYTES",
    "ChangedPartError",
    "OpenPart",
    "batches",
    "check_all_columns",
    "checked_batches",
    "known_batches",
    "open_part",
    "reread",
    "reread_groups",
]

MAX_FETCHED_BYTES = 64 * 2**20
"""Parts up to this size are fetched by one request; larger ones are read in ranges."""

BATCH_ROWS = 65_536
"""Rows that a worker decodes at once: as many whole row groups as fit."""

# By place, for until its footer is checked a file may have other names.
_TEXTS = {
    table: [place for place, field in enumerate(schema) if pa.types.is_string(field.type)]
    for table, schema in TABLE_SCHEMAS.items()
}


class ChangedPartError(Exception):
    """A part that was read before cannot be read now: it is damaged in other columns, or is gone.

    What was made of its first reading cannot be taken back out, so that the merge has to begin anew.
    """


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A part whose footer was checked.

    Attributes:
        file: Its rows.
        data: All its bytes; None where it is read in ranges.
    """

    file: pq.ParquetFile
    data: bytes | None


@contextlib.contextmanager
def open_part(storage: Storage, part: PartFile, run_id: str) -> Generator[OpenPart]:
    """Checks a part's footer and opens its rows (offline, any worker).

    Raises:
        UnusableFileError: It is to be left out.
    """
    check_size(part.size_bytes)
    # Rank and process of the rows are compared row by row, and reported instead of refused.
    expected = Expected(part.table, run_id)
    if part.size_bytes <= MAX_FETCHED_BYTES:
        data = storage.read(part.path)
        with _open_fetched(data, expected) as file:
            yield OpenPart(file, data)
        return
    with storage.open_input(part.path, part.size_bytes) as raw:
        _, footer = inspect_footer(raw, expected)
        raw.seek(0)
        with _parquet_file(raw, part.table, footer) as file:
            yield OpenPart(file, None)


def _open_fetched(data: bytes, expected: Expected) -> pq.ParquetFile:
    read_tail(io.BytesIO(data), len(data))
    try:
        file = _parquet_file(pa.BufferReader(data), expected.table, None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnusableFileError("not_parquet", error) from None
    try:
        inspect_metadata(file.metadata, len(data), expected, partial(_open_columns, file))
    except BaseException:
        file.close()
        raise
    return file


def _open_columns(file: pq.ParquetFile) -> None:
    """Opens every column, and decodes none."""
    groups = range(file.metadata.num_row_groups)
    list(file.reader.iter_batches(0, row_groups=groups, use_threads=False))


def _parquet_file(
    source: pa.NativeFile | BinaryIO, table: str, footer: pq.FileMetaData | None
) -> pq.ParquetFile:
    return pq.ParquetFile(
        source,
        metadata=footer,
        read_dictionary=_TEXTS[table],
        pre_buffer=footer is not None,
        page_checksum_verification=True,
    )


def batches(
    file: pq.ParquetFile, columns: Sequence[str], is_wanted: Callable[[int, int], bool] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a part (offline, any worker).

    Args:
        file: The part.
        columns: What to read of it.
        is_wanted: Told the lowest and highest attempt of a row group, whether to read it; None for all.

    Raises:
        UnusableFileError: A row has what no row of that table can have.
    """
    metadata, names = file.metadata, list(columns)
    chosen = [
        number
        for number in range(metadata.num_row_groups)
        if is_wanted is None or _may_hold(metadata.row_group(number), is_wanted)
    ]
    due = metadata.num_rows
    if is_wanted is not None:
        due = sum(metadata.row_group(number).num_rows for number in chosen)
    decoded = _decoded(file, names, chosen)
    if is_wanted is None:
        # What chooses by the footer comes later, when it is known to speak the truth.
        decoded = _held_against_footer(decoded, Claims(metadata, chosen, names))
    return checked(decoded, table_schema(file.schema_arrow.names), due)


def _held_against_footer(batches: Iterator[pa.RecordBatch], claims: Claims) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        claims.check(batch)
        yield batch


def _decoded(file: pq.ParquetFile, names: list[str], chosen: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Yields whole row groups, so that no batch ends in the middle of a sample."""
    groups: list[int] = []
    rows = 0
    # One thread: the merge is parallel over ranks, and a worker's memory stays that of one batch.
    for number in chosen:
        added = file.metadata.row_group(number).num_rows
        if groups and rows + added > BATCH_ROWS:
            yield from file.iter_batches(BATCH_ROWS, groups, names, use_threads=False)
            groups.clear()
            rows = 0
        groups.append(number)
        rows += added
    if groups:
        yield from file.iter_batches(BATCH_ROWS, groups, names, use_threads=False)


def known_batches(part: OpenPart, known: KnownColumns) -> Iterator[DecodedRows]:
    """Yields the rows of a part as `batches` does, row group by row group (offline, any worker).

    Args:
        part: The part.
        known: Which columns to read of it, and those of them that were decoded before.

    Raises:
        UnusableFileError: A row has what no row of that table can have.
    """
    file, metadata = part.file, part.file.metadata

    if part.data is None:
        for batch in batches(file, known.names):
            yield DecodedRows(batch)
        return
    claims = Claims(metadata, range(metadata.num_row_groups), known.names)

    def check(rows: pa.RecordBatch, decoded: pa.RecordBatch) -> None:
        claims.check(rows)
        check_rows(decoded, known.declared)

    seen = 0
    for group in range(metadata.num_row_groups):
        rows = known.read(file, part.data, group, check)
        seen += rows.batch.num_rows
        if rows.batch.num_rows:
            yield rows
    check_num_rows(seen, metadata.num_rows)


def _may_hold(group: pq.RowGroupMetaData, is_wanted: Callable[[int, int], bool]) -> bool:
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == "attempt":
            statistics = column.statistics
            if statistics is None or not statistics.has_min_max:
                return True
            return is_wanted(statistics.min, statistics.max)
    return True


def check_all_columns(file: pq.ParquetFile) -> None:
    """Decodes every column of a part to its end (offline, any worker).

    Raises:
        UnusableFileError: A row has what no row of that table can have.
        Exception: Whatever a decoder trips over.
    """
    for batch in batches(file, file.schema_arrow.names):
        # Texts are taken as they are until somebody asks for one: bytes that are none show only here.
        batch.validate(full=True)


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
        ChangedPartError: It cannot be read any more, or not in these columns.
        StorageError: A store did not answer.
    """
    with _second_look(sources, run_id, part) as opened_part:
        for batch in batches(opened_part.file, columns, is_wanted):
            _check_texts(batch)
            yield batch


def reread_groups(
    sources: Sequence[Source], run_id: str, part: PartFile, known: KnownColumns, groups: Sequence[int]
) -> Generator[DecodedRows]:
    """Yields row groups of a part that could be read to its end before, one batch each (offline, any worker).

    Args:
        sources: The folders of the run, by `PartFile.source`.
        run_id: Its run.
        part: The part, of ``history``.
        known: Which columns to read of it, and those of them that were decoded before.
        groups: The row groups.

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: It cannot be read any more, or not in these columns.
    """
    with _second_look(sources, run_id, part) as opened_part:
        for group in groups:
            if opened_part.data is None:
                # One thread: the merge is parallel over what is compared.
                table = opened_part.file.read_row_group(group, columns=list(known.names), use_threads=False)
                (batch,) = table.unify_dictionaries().combine_chunks().to_batches()
                _check_texts(batch)
                yield DecodedRows(batch)
                continue
            rows = known.read(
                opened_part.file, opened_part.data, group, lambda _, decoded: _check_texts(decoded)
            )
            check_num_rows(rows.batch.num_rows, opened_part.file.metadata.row_group(group).num_rows)
            yield rows


def _check_texts(batch: pa.RecordBatch) -> None:
    """Refuses bytes that are no text, which Arrow takes as they are until somebody asks for them."""
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            column.dictionary.validate(full=True)
        elif pa.types.is_string(column.type):
            column.validate(full=True)


@contextlib.contextmanager
def _second_look(sources: Sequence[Source], run_id: str, part: PartFile) -> Generator[OpenPart]:
    """Opens a part that could be read before; errors name its rank."""
    storage = opened(sources[part.source])
    try:
        with open_part(storage, part, run_id) as opened_part:
            yield opened_part
    except FileNotFoundError as error:
        raise ChangedPartError(f"{storage.url.rstrip('/')}/{part.path} is gone") from error
    except StorageError as error:
        raise of_rank(part.rank, error)  # noqa: B904 - it is the same error
    except (UnusableFileError, pa.ArrowException, OSError, ValueError) as error:
        raise ChangedPartError(f"{storage.url.rstrip('/')}/{part.path} ({error})") from error
