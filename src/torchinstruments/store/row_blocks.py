"""Rows of ``history`` as NumPy arrays, the form in which summaries take them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = [
    "LATEST_COLUMNS",
    "SUMMARISED_COLUMNS",
    "RowBlock",
    "finite_or_nan",
    "floats",
    "integers",
    "microseconds",
    "row_block",
]

LATEST_COLUMNS = ("shape", "dtype", "scope", "execution", "scale_provenance")
"""Columns of which a summary keeps the text of the latest row."""

SUMMARISED_COLUMNS = ("sample_id", "timestamp", "value", "loss_scale", "unavailable_reason", *LATEST_COLUMNS)
"""Columns that `row_block` reads; the key columns tell the series beside them."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of ``history`` of one rank, in the order of their part.

    Rows may be known to be a grid: `num_samples` samples one after the other, in ascending order, each with
    the same series in the same order and no series twice.

    Attributes:
        series: Series number, shape ``[rows]``; of a grid that of each column, ``[rows / num_samples]``.
        sample_id: Sample, shape ``[rows]``.
        timestamp_us: Microseconds since the epoch, UTC, shape ``[rows]``.
        value: NaN where the value is missing, shape ``[rows]``.
        loss_scale: NaN where it is not known, shape ``[rows]``.
        reason: Text column ``unavailable_reason``.
        latest: `LATEST_COLUMNS` to their text columns.
        num_samples: Samples of a grid; 0 where the rows are not known to be one.
    """

    series: npt.NDArray[np.int64]
    sample_id: npt.NDArray[np.int64]
    timestamp_us: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    loss_scale: npt.NDArray[np.float64]
    reason: pa.Array
    latest: Mapping[str, pa.Array]
    num_samples: int = 0

    def ungridded(self) -> "RowBlock":
        """Returns the same rows with the series of each."""
        if self.num_samples == 0:
            return self
        return dataclasses.replace(self, series=np.tile(self.series, self.num_samples), num_samples=0)

    def part(self, start: int, rows: int, series: npt.NDArray[np.int64], num_samples: int) -> "RowBlock":
        """Returns some of the rows, as others number them; nothing is copied.

        Args:
            start: The first one.
            rows: How many.
            series: As of a block.
            num_samples: As of a block.
        """
        if rows == len(self.sample_id):
            return dataclasses.replace(self, series=series, num_samples=num_samples)
        stop = start + rows
        return RowBlock(
            series=series,
            sample_id=self.sample_id[start:stop],
            timestamp_us=self.timestamp_us[start:stop],
            value=self.value[start:stop],
            loss_scale=self.loss_scale[start:stop],
            reason=self.reason.slice(start, rows),
            latest={name: column.slice(start, rows) for name, column in self.latest.items()},
            num_samples=num_samples,
        )

    def is_followed_by(self, other: "RowBlock") -> bool:
        """Whether both are grids of the same series, the other one of later samples alone."""
        return (
            self.num_samples > 0
            and other.num_samples > 0
            and other.series is self.series
            and bool(other.sample_id[0] > self.sample_id[-1])
        )


def row_block(batch: pa.RecordBatch, series: npt.NDArray[np.int64], *, num_samples: int = 0) -> RowBlock:
    """Returns the rows of a batch.

    Args:
        batch: Rows of ``history`` with at least `SUMMARISED_COLUMNS`.
        series: Series number of each row; of each column of a grid.
        num_samples: Samples of a grid; 0 where the rows are not known to be one.
    """
    return RowBlock(
        series=series,
        sample_id=integers(batch, "sample_id"),
        timestamp_us=microseconds(batch, "timestamp"),
        value=finite_or_nan(batch.column("value")),
        loss_scale=finite_or_nan(batch.column("loss_scale")),
        reason=batch.column("unavailable_reason"),
        latest={name: batch.column(name) for name in LATEST_COLUMNS},
        num_samples=num_samples,
    )


def integers(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    """Returns a column of whole numbers, -1 where it is null."""
    column = batch.column(name)
    if column.null_count:
        column = column.fill_null(-1)
    return column.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)


def microseconds(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    """Returns a column of timestamps as microseconds since the epoch, UTC."""
    return batch.column(name).view(pa.int64()).to_numpy(zero_copy_only=False)


def floats(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.float64]:
    """Returns a column of numbers as they are, NaN where it is null."""
    return _floats(batch.column(name))


def finite_or_nan(column: pa.Array) -> npt.NDArray[np.float64]:
    """Returns a column of numbers, NaN where one is null or infinite."""
    values = _floats(column)
    infinite = np.isinf(values)
    return np.where(infinite, np.nan, values) if bool(infinite.any()) else values


def _floats(column: pa.Array) -> npt.NDArray[np.float64]:
    return column.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
