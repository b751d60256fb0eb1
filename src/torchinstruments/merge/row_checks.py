"""What the rows of a part have to be, beyond what its footer can say.

A footer declares names and types. That a key is null, an ordinal negative or a time beyond the calendar shows
only in the rows, and would turn into a wrong series or sample without a word. The check looks at columns, not
at rows, and so costs next to nothing beside decoding them.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.store.documents import UnusableFileError
from torchinstruments.store.schema import TABLE_SCHEMAS

__all__ = ["check_num_rows", "check_rows", "checked", "table_schema"]

_ORDINALS = frozenset(
    {
        "generation",
        "rank",
        "sample_id",
        "attempt",
        "forward_in_attempt",
        "forward_index",
        "call_index",
        "backward_index",
    }
)
"""Columns that count from 0; readers take a negative number for none."""

_LAST_US = 253_402_300_799_999_999
"""The last microsecond of the year 9999, beyond which neither ISO 8601 nor Python has a name."""

_Check = tuple[int, str, Callable[[str, pa.Array], None]]

_BY_NAMES = {tuple(declared.names): declared for declared in TABLE_SCHEMAS.values()}


def table_schema(names: Iterable[str]) -> pa.Schema:
    """Returns the declared schema of the table that has these columns (offline, any worker).

    Args:
        names: All columns of a part whose footer was checked.
    """
    return _BY_NAMES[tuple(names)]


def checked(
    batches: Iterable[pa.RecordBatch], declared: pa.Schema, num_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yields batches of a part as they are (offline, any worker).

    Args:
        batches: All rows of the part, some of its columns.
        declared: Schema of its table.
        num_rows: Rows that its footer claims.

    Raises:
        UnusableFileError: A row has what no row of that table can have, or their number is another one.
    """
    seen = 0
    checks: list[_Check] | None = None
    for batch in batches:
        if checks is None:
            checks = _checks(batch.schema, declared)
        if batch.num_rows:
            for place, name, check in checks:
                check(name, batch.column(place))
        seen += batch.num_rows
        yield batch
    check_num_rows(seen, num_rows)


def check_num_rows(seen: int, claimed: int) -> None:
    """Compares the rows of a part with those that its footer claims.

    Raises:
        UnusableFileError: Their number is another one.
    """
    if seen != claimed:
        raise UnusableFileError("unreadable", f"{seen} rows where its footer says {claimed}")


def check_rows(batch: pa.RecordBatch, declared: pa.Schema) -> None:
    """Looks at some columns of some rows of a part (offline, any worker).

    Raises:
        UnusableFileError: A row has what no row of that table can have.
    """
    if batch.num_rows:
        for place, name, check in _checks(batch.schema, declared):
            check(name, batch.column(place))


def _checks(schema: pa.Schema, declared: pa.Schema) -> "list[_Check]":
    """Returns what has to be looked at; a column that its file declares without nulls can have none."""
    found: list[_Check] = []
    for place, field in enumerate(schema):
        if field.nullable and not declared.field(field.name).nullable:
            found.append((place, field.name, _check_nulls))
        if field.name in _ORDINALS:
            found.append((place, field.name, _check_ordinals))
        elif pa.types.is_timestamp(field.type):
            found.append((place, field.name, _check_times))
    return found


def _check_nulls(name: str, column: pa.Array) -> None:
    if column.null_count:
        raise UnusableFileError("schema_mismatch", f"{name} is null in {column.null_count} rows")


def _check_ordinals(name: str, column: pa.Array) -> None:
    lowest = int(_numbers(column).min())
    if lowest < 0:
        raise UnusableFileError("schema_mismatch", f"{name} {lowest} is below 0")


def _check_times(name: str, column: pa.Array) -> None:
    # Unsigned, so that one look finds what lies before 1970 too: it is larger than any time after it.
    if int(_numbers(column.view(pa.int64())).view(np.uint64).max()) > _LAST_US:
        raise UnusableFileError("schema_mismatch", f"{name} is outside of the years 1970 to 9999")


def _numbers(column: pa.Array) -> npt.NDArray[np.integer]:
    filled = column.fill_null(0) if column.null_count else column
    return filled.to_numpy(zero_copy_only=False)
