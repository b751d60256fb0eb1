"""Rows find the row with their keys in the first run of its kind, whatever the runs look like."""

import numpy as np
import pyarrow as pa
import pytest

from torchinstruments.merge.repeated_runs import repeated_runs

NAMES = ("layer", "call_index", "loss_scale")


def batch_of(rows: list[tuple[int, str, int, float | None]]) -> tuple[pa.RecordBatch, np.ndarray]:
    """Returns rows of (moment, layer, call_index, loss_scale)."""
    moment, layer, call, scale = zip(*rows, strict=True)
    columns = [
        pa.array(layer).dictionary_encode(),
        pa.array(call, pa.int32()),
        pa.array(scale, pa.float64()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(NAMES)), np.array(moment)


@pytest.mark.parametrize("seed", range(20))
def test_keys_stay_what_they_are(seed: int) -> None:
    """The row that each row is given has its keys, for runs that repeat, break off, and differ in one key."""
    random = np.random.default_rng(seed)
    rows: list[tuple[int, str, int, float | None]] = []
    for moment in range(30):
        kind = int(random.integers(3))
        for place in range(3 + (kind == 2)):
            scale = None if random.random() < 0.9 else 2.0
            rows.append((moment, "abcd"[(place + (kind == 1)) % 4], place % 2, scale))
    batch, moment = batch_of(rows)
    found = repeated_runs(batch, moment, NAMES)
    assert found.rows.take(pa.array(found.position)).to_pylist() == batch.to_pylist()


def test_runs_that_repeat_are_looked_at_once() -> None:
    """Of a hundred samples with the same keys one is left; what has to be the same beside keys counts too."""
    batch, moment = batch_of([(one, layer, 0, None) for one in range(100) for layer in "abc"])
    assert repeated_runs(batch, moment, NAMES).rows.num_rows == 3
    has_value = np.ones(300, np.bool_)
    has_value[-1] = False
    found = repeated_runs(batch, moment, NAMES, [has_value])
    assert found.rows.num_rows == 6
    assert found.position[-4:].tolist() == [2, 3, 4, 5]
