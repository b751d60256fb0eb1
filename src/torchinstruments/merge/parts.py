"""Opening one part and reading its rows, whole or in batches."""

import contextlib
import io
from collections.abc import Generator, Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.errors import StorageError
from torchinstruments.merge.failures import of_rank
from torchinstruments.merge.row_checks import checked, table_schema
from torchinstruments.merge.sources import Source, opened
from torchinstruments.store.documents import UnusableFileError
from torchinstruments.store.inspection import Expected, inspect_file
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.schema import TABLE_SCHEMAS
from torchinstruments.store.storage import Storage

__all__ = [
    "BATCH_ROWS",
    "MAX_FETCHED_BYTES",
    "ChangedPartError",
    "batches",
    "check_all_columns",
    "checked_batches",
    "open_part",
    "reread",
    "reread_groups",
]

MAX_FETCHED_BYTES = 64 * 2**20
"""Parts up to this size are fetched by one request; larger ones are read in ranges."""

BATCH_ROWS = 65_536
"""Rows that a worker decodes at once."""


class ChangedPartError(Exception):
    """A part that was read before cannot be read now: it is damaged in other columns, or is gone.

    What was made of its first reading cannot be taken back out, so that the merge has to begin anew.
    """


@contextlib.contextmanager
def open_part(storage: Storage, part: PartFile, run_id: str) -> Generator[pq.ParquetFile]:
    """Checks a part's footer and opens its rows (offline, any worker).

    Raises:
        UnusableFileError: It is to be left out.
    """
    if part.size_bytes == 0:
        raise UnusableFileError("empty_file")
    texts = [field.name for field in TABLE_SCHEMAS[part.table] if pa.types.is_string(field.type)]
    with contextlib.ExitStack() as stack:
        if part.size_bytes <= MAX_FETCHED_BYTES:
            raw = stack.enter_context(io.BytesIO(storage.read(part.path)))
        else:
            raw = stack.enter_context(storage.open_input(part.path, part.size_bytes))
        # Rank and process of the rows are compared row by row, and reported instead of refused.
        inspect_file(raw, Expected(part.table, run_id))
        raw.seek(0)
        file = stack.enter_context(
            pq.ParquetFile(raw, read_dictionary=texts, pre_buffer=True, page_checksum_verification=True)
        )
        yield file


def batches(file: pq.ParquetFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a part (offline, any worker).

    Raises:
        UnusableFileError: A row has what no row of that table can have.
    """
    # One thread: the merge is parallel over ranks, and a worker's memory stays that of one batch.
    found = file.iter_batches(batch_size=BATCH_ROWS, columns=list(columns), use_threads=False)
    return checked(found, table_schema(file.schema_arrow.names), file.metadata.num_rows)


def check_all_columns(file: pq.ParquetFile) -> None:
    """Decodes every column of a part to its end (offline, any worker).

    Raises:
        UnusableFileError: A row has what no row of that table can have.
        Exception: Whatever a decoder trips over.
    """
    for _ in batches(file, file.schema_arrow.names):
        pass


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
    sources: Sequence[Source], run_id: str, part: PartFile, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a part that could be read to its end before (offline, any worker).

    Raises:
        ChangedPartError: It cannot be read any more, or not in these columns.
        StorageError: A store did not answer.
    """
    with _second_look(sources, run_id, part) as file:
        yield from batches(file, columns)


def reread_groups(
    sources: Sequence[Source], run_id: str, part: PartFile, columns: Sequence[str], groups: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """Yields row groups of a part that could be read to its end before, one batch each (offline, any worker).

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: It cannot be read any more, or not in these columns.
    """
    with _second_look(sources, run_id, part) as file:
        for group in groups:
            # One thread: the merge is parallel over what is compared.
            table = file.read_row_group(group, columns=list(columns), use_threads=False)
            yield from table.unify_dictionaries().combine_chunks().to_batches()


@contextlib.contextmanager
def _second_look(sources: Sequence[Source], run_id: str, part: PartFile) -> Generator[pq.ParquetFile]:
    """Opens a part that could be read before; errors name its rank."""
    storage = opened(sources[part.source])
    try:
        with open_part(storage, part, run_id) as file:
            yield file
    except FileNotFoundError as error:
        raise ChangedPartError(f"{storage.url.rstrip('/')}/{part.path} is gone") from error
    except StorageError as error:
        raise of_rank(part.rank, error)  # noqa: B904 - it is the same error
    except (UnusableFileError, pa.ArrowException, OSError, ValueError) as error:
        raise ChangedPartError(f"{storage.url.rstrip('/')}/{part.path} ({error})") from error
