"""Rows as arrays."""

import numpy as np
import pyarrow as pa

from torchinstruments.store.row_blocks import SUMMARISED_COLUMNS, integers, row_block
from torchinstruments.store.schema import HISTORY


def test_missing_and_infinite_values_are_nan() -> None:
    """Whatever a file holds, a summary meets finite numbers or NaN."""
    columns: dict[str, pa.Array] = {
        name: pa.array([""] * 3, HISTORY.field(name).type)
        for name in SUMMARISED_COLUMNS
        if pa.types.is_string(HISTORY.field(name).type)
    }
    columns["sample_id"] = pa.array([4, 5, 6])
    columns["timestamp"] = pa.array([1, 2, 3], pa.timestamp("us", tz="UTC"))
    columns["value"] = pa.array([1.5, None, np.inf])
    columns["loss_scale"] = pa.array([None, 2.0, None], pa.float64())

    block = row_block(pa.RecordBatch.from_pydict(columns), np.arange(3))

    np.testing.assert_array_equal(block.value, [1.5, np.nan, np.nan])
    np.testing.assert_array_equal(block.loss_scale, [np.nan, 2.0, np.nan])
    assert (block.sample_id.tolist(), block.timestamp_us.tolist()) == ([4, 5, 6], [1, 2, 3])


def test_a_number_that_is_not_there_is_minus_one() -> None:
    """Columns of whole numbers stay such where some are null."""
    batch = pa.RecordBatch.from_pydict({"attempt": pa.array([3, None], pa.int64())})
    assert integers(batch, "attempt").tolist() == [3, -1]
