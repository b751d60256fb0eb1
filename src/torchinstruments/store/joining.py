"""Joining small spooled parts of one table and process into the one part that is uploaded.

A small part is mostly footer: 300 rows cost 33 bytes each, 36,000 cost 4.6. What is joined has the order of
any other part, `schema.INNER_ORDER`, from its first row to its last: a sample whose backward was spooled
later has its rows together again, each gradient beside its output.

Rows are merged in a stream. Footers tell the lowest sample of every row group, so a sample is complete, and
can be written, as soon as no later row group begins at or below it. Only samples that wait for rows from
further on are held in memory.
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.store import schema
from torchinstruments.store.columns import split_into_groups
from torchinstruments.store.parts import open_part_writer

__all__ = ["UnreadablePartError", "join_parts"]

_Integers = npt.NDArray[np.int64]

_LAYER = "layer"
_LOWEST = -(2**63)
_HIGHEST = 2**63 - 1
_MAX_WIDTH = 2**30
_MAX_RADIX = 2**62


class UnreadablePartError(Exception):
    """A spooled part that Parquet cannot read.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, detail: object) -> None:
        self.path = path
        super().__init__(f"{path} is not readable: {' '.join(str(detail).split())[:200]}")


def join_parts(table: str, paths: Sequence[Path], layers: Sequence[str] = ()) -> bytes:
    """Returns one part with the rows of several, in the inner order of a part (uploader).

    The same files and layers give the same bytes, so that an upload can be repeated after a crash. A single
    file is returned as it is.

    Args:
        table: One of `layout.TABLES`.
        paths: Spooled parts of one process and table, in the order in which they were written.
        layers: Layers in catalog order. Others follow them, in the order in which the files show them.

    Raises:
        UnreadablePartError: One of them cannot be read.
        OSError: The spool cannot be read.
    """
    lowest = [low for path in paths for low in _lowest_keys(path, table)]
    if len(paths) == 1:
        return paths[0].read_bytes()
    # What follows each row group begins at or above this.
    bounds = np.minimum.accumulate([_HIGHEST, *reversed(lowest)])[::-1][1:].tolist()
    rows_schema = schema.in_memory(schema.TABLE_SCHEMAS[table])
    merger = _Merger(table, layers)
    sink = pa.BufferOutputStream()
    with open_part_writer(sink, rows_schema) as writer:
        for rows, bound in zip(_row_groups(paths, rows_schema), bounds, strict=True):
            merger.add(rows)
            for group in merger.take_complete(bound):
                writer.write_table(group, row_group_size=group.num_rows)
        for group in merger.take_rest():
            writer.write_table(group, row_group_size=group.num_rows)
        writer.add_key_value_metadata(_own_metadata(paths[0]))
    return sink.getvalue().to_pybytes()


class _Merger:
    """Brings rows into the inner order of a part, and gives them back as its row groups.

    Args:
        table: One of `layout.TABLES`.
        layers: Layers in catalog order.
    """

    def __init__(self, table: str, layers: Sequence[str]) -> None:
        self._key, *self._further = schema.INNER_ORDER[table]
        self._layers = {layer: place for place, layer in enumerate(layers)}
        self._held: list[pa.Table] = []
        self._num_held = 0
        self._sort_at = schema.MAX_ROW_GROUP_ROWS

    def add(self, rows: pa.Table) -> None:
        """Takes rows whose text columns are dictionaries."""
        if _LAYER in self._further:
            self._place_layers(rows.column(_LAYER))
        self._held.append(rows)
        self._num_held += rows.num_rows

    def take_complete(self, bound: int) -> Iterator[pa.Table]:
        """Yields the full row groups of which nothing more can come.

        Args:
            bound: No later row has a lower key.
        """
        if self._num_held < self._sort_at:
            return
        rows, keys = self._sorted()
        # The last one may still take samples that come later.
        sizes = split_into_groups(keys[: np.searchsorted(keys, bound)])[:-1]
        yield from _slices(rows, sizes)
        taken = sum(sizes)
        self._held = [rows.slice(taken)]
        self._num_held -= taken
        # What is held is sorted anew each time, so there has to be as much again that is new.
        self._sort_at = self._num_held + max(self._num_held, schema.MAX_ROW_GROUP_ROWS)

    def take_rest(self) -> Iterator[pa.Table]:
        """Yields the row groups of everything that is left."""
        if self._num_held:
            rows, keys = self._sorted()
            yield from _slices(rows, split_into_groups(keys))

    def _sorted(self) -> tuple[pa.Table, _Integers]:
        """Returns the rows in their order, and the column that they are grouped by."""
        rows = pa.concat_tables(self._held).unify_dictionaries().combine_chunks()
        keys = rows.column(self._key).to_numpy()
        codes = self._codes(rows)
        ahead = np.diff(keys)
        if bool(((ahead < 0) | ((ahead == 0) & (np.diff(codes) < 0))).any()):
            order = np.lexsort((codes, keys))
            return rows.take(pa.array(order)), keys[order]
        return rows, keys

    def _codes(self, rows: pa.Table) -> _Integers:
        """Returns one number a row by which rows of one key are ordered. Shape ``[rows]``."""
        folded, radix = np.zeros(rows.num_rows, np.int64), 1
        for name in self._further:
            codes, width = self._column_codes(rows.column(name).combine_chunks(), name)
            if radix * width > _MAX_RADIX:
                folded, radix = _dense(folded)
            folded = folded * width + codes
            radix *= width
        return folded

    def _column_codes(self, column: pa.Array, name: str) -> tuple[_Integers, int]:
        """Returns numbers from 0 that order a column like its values, and what they stay below."""
        if isinstance(column, pa.DictionaryArray):
            texts = column.dictionary.to_pylist()
            if name == _LAYER:
                places, width = self._layers, len(self._layers)
            else:
                places, width = {text: place for place, text in enumerate(sorted(texts))}, len(texts)
            ranks = np.array([places[text] for text in texts], np.int64)
            return ranks[column.indices.to_numpy()], width
        values = column.to_numpy().astype(np.int64)
        low, high = int(values.min()), int(values.max())
        if high - low < _MAX_WIDTH:
            return values - low, high - low + 1
        return _dense(values)

    def _place_layers(self, column: pa.ChunkedArray) -> None:
        """Gives layers that the catalog does not know their places, in the order of the rows."""
        layers = column.combine_chunks()
        texts = layers.dictionary.to_pylist()
        if all(text in self._layers for text in texts):
            return
        codes, first = np.unique(layers.indices.to_numpy(), return_index=True)
        for code in codes[np.argsort(first)].tolist():
            self._layers.setdefault(texts[code], len(self._layers))
        for text in texts:  # a dictionary may hold texts that no row has
            self._layers.setdefault(text, len(self._layers))


def _dense(values: _Integers) -> tuple[_Integers, int]:
    """Returns the same order in the smallest numbers from 0, and how many different ones there are."""
    distinct, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), len(distinct)


def _slices(rows: pa.Table, sizes: Sequence[int]) -> Iterator[pa.Table]:
    start = 0
    for size in sizes:
        yield rows.slice(start, size)
        start += size


def _lowest_keys(path: Path, table: str) -> list[int]:
    """Returns the lowest key of each row group, from the footer alone."""
    with _readable(path):
        metadata = pq.read_metadata(path)
        column = metadata.schema.names.index(schema.INNER_ORDER[table][0])
        found: list[int] = []
        for number in range(metadata.num_row_groups):
            statistics = metadata.row_group(number).column(column).statistics
            known = statistics is not None and statistics.has_min_max
            found.append(int(statistics.min) if known else _LOWEST)
        return found


def _own_metadata(path: Path) -> dict[bytes, bytes]:
    own = pq.read_metadata(path).metadata or {}
    return {key: value for key, value in own.items() if key != b"ARROW:schema"}


def _row_groups(paths: Sequence[Path], rows_schema: pa.Schema) -> Iterator[pa.Table]:
    texts = [column.name for column in rows_schema if pa.types.is_dictionary(column.type)]
    for path in paths:
        with _readable(path), pq.ParquetFile(path, read_dictionary=texts) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, use_threads=False).cast(rows_schema)


@contextlib.contextmanager
def _readable(path: Path) -> Generator[None]:
    """Tells a file that Parquet cannot read from a disk that does not answer."""
    try:
        yield
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise UnreadablePartError(path, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise UnreadablePartError(path, error) from error  # a damaged page
