"""Summaries that grow with the parts of one process."""

import pyarrow as pa
import pytest

from torchinstruments.records import Sample, Signal
from torchinstruments.store.columns import Origin
from torchinstruments.store.entries import entry
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.running_summary import MAX_SERIES, MAX_SUMMARY_BYTES, RunningSummary, max_series
from unit.store.material import backward, forward, measurement


def rows(*deliveries: Sample) -> pa.Table:
    """Returns the rows of some deliveries, as a part holds them."""
    columns = history_columns([(one.ordinal, one) for one in deliveries], Origin(0, 0, "1a2b3c4d"))
    return columns.table


def test_a_gradient_that_comes_late_takes_its_samples_place() -> None:
    """Windows, first and latest go by sample, in whichever order backwards were delivered."""
    summary = RunningSummary(2)
    for ordinal in (3, 0, 2, 1, 4):
        gradient = measurement(signal=Signal.OUTPUT_GRADIENT, metrics=("mean",), values=(float(ordinal),))
        summary.add(rows(backward(ordinal, gradient)))

    found = summary.finish()
    assert len(found) == 1
    assert (found.first.value[0], found.latest.value[0]) == (0.0, 4.0)
    assert (found.previous_window.mean[0], found.recent_window.mean[0]) == (1.5, 3.5)


def test_series_beyond_the_bound_are_counted_by_layer() -> None:
    """The first ones keep exact summaries; the rows of the others are counted, whatever comes later."""
    summary = RunningSummary(20, bound=3)
    for ordinal in range(4):
        summary.add(rows(forward(ordinal, measurement(0), measurement(1), measurement(2))))

    found = summary.finish()
    assert {key.layer for key in found.keys} == {"layer99"}
    assert [entry(found, place)["observations"] for place in range(len(found))] == [4, 4, 4]
    assert summary.rows_left_out == {"layer98": 12, "layer97": 12}


@pytest.mark.parametrize("window", [1, 20, 100, 1000, 10**6, 10**9])
def test_wide_windows_lower_the_bound(window: int) -> None:
    """However wide the windows, all of them together stay within the memory that summaries may take."""
    assert 1 <= max_series(window) <= MAX_SERIES
    assert max_series(window) == 1 or max_series(window) * 32 * window <= MAX_SUMMARY_BYTES


def test_the_default_window_reaches_the_largest_bound() -> None:
    """With 20 samples a window it is the number of series that counts."""
    assert max_series(20) == MAX_SERIES
