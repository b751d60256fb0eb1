"""One rank's summaries as rows of ``summary.parquet``; a missing number is null with a reason beside it."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.store.entries import window_reasons
from torchinstruments.store.row_blocks import LATEST_COLUMNS
from torchinstruments.store.schema import KEY_COLUMNS, in_memory
from torchinstruments.store.series import SeriesKey
from torchinstruments.store.summaries import SeriesSummaries

__all__ = ["SUMMARY_SCHEMA", "SummaryTable"]

_POINTS = ("first", "latest", "minimum", "maximum")
_WINDOWS = ("previous_window", "recent_window")
_TIMESTAMP = pa.timestamp("us", tz="UTC")


def _key_type(name: str) -> pa.DataType:
    return pa.int32() if name == "call_index" else pa.string()


def _summary_schema() -> pa.Schema:
    fields = [pa.field("rank", pa.int32(), nullable=False)]
    fields += [pa.field(name, _key_type(name), nullable=False) for name in KEY_COLUMNS]
    fields += [pa.field(f"latest_{name}", pa.string(), nullable=False) for name in LATEST_COLUMNS]
    fields += [pa.field(name, pa.int64(), nullable=False) for name in _COUNTS]
    for point in _POINTS:
        fields += [
            pa.field(f"{point}_sample_id", pa.int64()),
            pa.field(f"{point}_timestamp", _TIMESTAMP),
            pa.field(f"{point}_value", pa.float64()),
            pa.field(f"{point}_unavailable_reason", pa.string(), nullable=False),
        ]
    for window in _WINDOWS:
        fields += [
            pa.field(f"{window}_observations", pa.int64(), nullable=False),
            pa.field(f"{window}_valid_observations", pa.int64(), nullable=False),
            pa.field(f"{window}_mean", pa.float64()),
            pa.field(f"{window}_unavailable_reason", pa.string(), nullable=False),
        ]
    fields += [pa.field("loss_scale_lowest", pa.float64()), pa.field("loss_scale_highest", pa.float64())]
    return pa.schema(fields)


_COUNTS = ("observations", "unavailable_observations")

SUMMARY_SCHEMA = _summary_schema()
"""Columns of ``summary.parquet``: one row a rank and series, by rank, then by series."""


class SummaryTable:
    """Writes ``summary.parquet`` rank by rank, one row group a rank; a context that ends with the file.

    Nothing of a rank stays in memory.

    Args:
        path: The file, which the caller deletes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: tuple[SeriesKey, ...] = ()
        self._key_columns: list[pa.Array] = []
        self._writer = pq.ParquetWriter(
            path,
            in_memory(SUMMARY_SCHEMA),
            compression="zstd",
            use_dictionary=[field.name for field in SUMMARY_SCHEMA if pa.types.is_string(field.type)],
            store_schema=False,
        )

    def __enter__(self) -> Self:
        """Returns the table."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file."""
        self._writer.close()

    def add(self, rank: int, summaries: SeriesSummaries) -> None:
        """Takes the summaries of a rank; ranks come in ascending order."""
        if len(summaries) == 0:
            return
        # Nearly all ranks have the same series.
        if summaries.keys != self._keys:
            self._keys, self._key_columns = summaries.keys, _key_columns(summaries.keys)
        self._writer.write_table(_table(rank, summaries, self._key_columns), row_group_size=len(summaries))

    def file(self) -> Path:
        """Returns the finished table; nothing can be added afterwards."""
        self._writer.close()
        return self._path


def _key_columns(keys: Sequence[SeriesKey]) -> list[pa.Array]:
    columns: list[pa.Array] = []
    for name, column in zip(KEY_COLUMNS, zip(*keys, strict=True), strict=True):
        columns.append(pa.array(column, pa.int32()) if name == "call_index" else _texts(column))
    return columns


def _table(rank: int, summaries: SeriesSummaries, key_columns: Sequence[pa.Array]) -> pa.Table:
    columns: list[pa.Array] = [pa.array(np.full(len(summaries), rank, np.int32)), *key_columns]
    columns += [_texts(summaries.latest_texts[name]) for name in LATEST_COLUMNS]
    columns += [pa.array(summaries.observations), pa.array(summaries.unavailable_observations)]
    for points in (summaries.first, summaries.latest, summaries.minimum, summaries.maximum):
        absent = points.sample_id < 0
        columns += [
            pa.array(points.sample_id, mask=absent),
            pa.array(points.timestamp_us, mask=absent).cast(_TIMESTAMP),
            _floats(points.value),
            _texts(points.reason),
        ]
    for windows in (summaries.previous_window, summaries.recent_window):
        columns += [
            pa.array(windows.observations),
            pa.array(windows.valid_observations),
            _floats(windows.mean),
            _texts(window_reasons(windows)),
        ]
    columns += [_floats(summaries.loss_scale_lowest), _floats(summaries.loss_scale_highest)]
    return pa.Table.from_arrays(columns, schema=in_memory(SUMMARY_SCHEMA))


def _texts(texts: Sequence[str]) -> pa.Array:
    """Returns a text column as a dictionary; most columns hold one text."""
    if texts.count(texts[0]) == len(texts):
        places = pa.array(np.zeros(len(texts), np.int32))
        return pa.DictionaryArray.from_arrays(places, pa.array(texts[:1], pa.string()))
    return pa.array(texts, pa.string()).dictionary_encode()


def _floats(values: npt.NDArray[np.float64] | Sequence[float]) -> pa.Array:
    return pa.array(np.asarray(values, np.float64), mask=~np.isfinite(values))
