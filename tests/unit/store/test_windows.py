"""The last samples of every series."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.store.row_blocks import RowBlock
from torchinstruments.store.series import SeriesIndex
from torchinstruments.store.summaries import SummaryBuilder
from torchinstruments.store.windows import Segments, WindowRing

_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=40)


def segments_of(rows: list[tuple[int, int]], first_value: int) -> Segments:
    """Sorts (series, sample) rows; the value of a row is its place of arrival."""
    series = np.array([row[0] for row in rows], np.int64)
    ids = np.array([row[1] for row in rows], np.int64)
    order = np.lexsort((ids, series))
    value = (first_value + np.arange(len(rows), dtype=np.float64))[order]
    starts = np.flatnonzero(np.append(True, series[order][1:] != series[order][:-1]))
    lengths = np.diff(np.append(starts, len(rows)))
    return Segments(series[order], ids[order], value, starts, lengths)


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(_rows, min_size=1, max_size=5))
def test_windows_hold_the_last_rows_whatever_the_cut(
    window: int, blocks: list[list[tuple[int, int]]]
) -> None:
    """However rows are cut into blocks, the windows hold the last ones by sample, then by arrival."""
    ring = WindowRing(window)
    arrived: list[tuple[int, int, float]] = []
    for block in blocks:
        ring.add(segments_of(block, len(arrived)))
        arrived += [(row[0], row[1], float(len(arrived) + place)) for place, row in enumerate(block)]
    num_series = 1 + max(row[0] for row in arrived)
    recent, previous = ring.recent(num_series), ring.previous(num_series)
    for series in range(num_series):
        own = sorted((row for row in arrived if row[0] == series), key=lambda row: row[1])
        for windows, part in ((recent, own[-window:]), (previous, own[-2 * window : -window])):
            assert windows.observations[series] == len(part)
            if part:
                assert windows.mean[series] == sum(row[2] for row in part) / len(part)
            else:
                assert np.isnan(windows.mean[series])


def test_a_wide_window_takes_only_the_memory_of_its_rows() -> None:
    """A window far wider than the run does not reserve its places."""
    ring = WindowRing(10_000_000)
    ring.add(segments_of([(0, 1), (0, 2), (1, 1)], 0))
    assert ring._values.size < 100


@pytest.mark.parametrize("window", [10_000, 10**6, 10**12])
def test_a_wide_window_is_summarised_by_its_rows(window: int) -> None:
    """However wide, only the places that have rows are looked at; sums too large for float64 have a mean."""
    ring = WindowRing(window)
    largest = np.finfo(np.float64).max
    ring.add(
        Segments(
            series=np.array([0, 0, 1], np.int64),
            sample_id=np.array([1, 2, 1], np.int64),
            value=np.array([largest, largest, 3.0]),
            starts=np.array([0, 2], np.int64),
            lengths=np.array([2, 1], np.int64),
        )
    )
    recent, previous = ring.recent(2), ring.previous(2)
    assert recent.observations.tolist() == [2, 1]
    assert recent.mean.tolist() == [largest, 3.0]
    assert previous.observations.tolist() == [0, 0]
    assert len(ring._offsets(2, window)) == 2
    assert len(ring._offsets(2, 2 * window)) == 0


def test_an_empty_block_changes_nothing() -> None:
    """A block without rows leaves no series."""
    import pyarrow as pa

    builder = SummaryBuilder(3)
    none = np.zeros(0, np.int64)
    builder.add(RowBlock(none, none, none, np.zeros(0), np.zeros(0), pa.array([], pa.string()), {}))
    assert len(builder.finish(SeriesIndex())) == 0
