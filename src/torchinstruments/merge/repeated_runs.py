"""Runs of rows with the keys of the run before them: samples of one program are alike but for their moment.

Where that is so, what a key means is looked up for the first run alone. Every key of every row is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.store.row_blocks import floats

__all__ = ["Repeated", "repeated_runs"]

_MAX_SEGMENTS = 16
"""Stretches of runs of one length; with more than these, rows are not worth comparing."""

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Repeated:
    """Rows, each with the row that has the same keys in the first run of its kind.

    Attributes:
        rows: The rows of those first runs.
        position: Place among them of the row with the same keys, shape ``[rows of the batch]``.
    """

    rows: pa.RecordBatch
    position: _Integers


def repeated_runs(
    batch: pa.RecordBatch,
    moment: _Integers,
    names: Sequence[str],
    further: Sequence[npt.NDArray[np.bool_]] = (),
) -> Repeated:
    """Returns which rows repeat the keys of earlier ones (worker).

    Args:
        batch: At least one row.
        moment: What is the same in all rows of a run, and no other, shape ``[rows]``.
        names: The columns that are keys: texts as dictionaries, whole numbers without nulls, or floats.
        further: What else has to be the same, each of shape ``[rows]``.
    """
    starts = np.flatnonzero(np.append(True, moment[1:] != moment[:-1]))
    lengths = np.diff(np.append(starts, len(moment)))
    segments = np.flatnonzero(np.append(True, lengths[1:] != lengths[:-1]))
    if len(starts) == 1 or len(segments) > _MAX_SEGMENTS:
        return Repeated(batch, np.arange(len(moment)))
    columns = [*(_words(batch, name) for name in names), *further]
    is_repeated = np.zeros(len(starts), np.bool_)
    for first, end in zip(segments.tolist(), [*segments[1:].tolist(), len(starts)], strict=True):
        length, low = int(lengths[first]), int(starts[first])
        high = low + length * (end - first)
        is_same = np.ones((end - first - 1) * length, np.bool_)
        for column in columns:
            is_same &= column[low + length : high] == column[low : high - length]
        is_repeated[first + 1 : end] = is_same.reshape(-1, length).all(axis=1)
    firsts = np.flatnonzero(~is_repeated)
    begins = np.cumsum(lengths[firsts]) - lengths[firsts]
    shift = begins[np.cumsum(~is_repeated) - 1] - starts
    position = np.arange(len(moment)) + np.repeat(shift, lengths)
    chosen = np.repeat(starts[firsts] - begins, lengths[firsts]) + np.arange(int(lengths[firsts].sum()))
    return Repeated(batch.take(pa.array(chosen)), position)


def _words(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.generic]:
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        return column.indices.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(column.type):
        values = floats(batch, name)
        return np.where(np.isnan(values), np.nan, values + 0.0).view(np.int64)
    return column.to_numpy(zero_copy_only=False)
