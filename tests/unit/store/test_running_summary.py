"""Summaries that grow with the parts of one process."""

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.records import Sample, Signal
from torchinstruments.store import running_summary
from torchinstruments.store.columns import Origin
from torchinstruments.store.entries import entry
from torchinstruments.store.history_columns import HistoryColumns, history_columns
from torchinstruments.store.row_blocks import RowBlock, row_block
from torchinstruments.store.running_summary import MAX_SERIES, MAX_SUMMARY_BYTES, RunningSummary, max_series
from torchinstruments.store.series import SeriesIndex
from torchinstruments.store.summaries import SummaryBuilder
from unit.store.equal_summaries import same
from unit.store.material import backward, forward, measurement

ORIGIN = Origin(0, 0, "1a2b3c4d")
_values = st.sampled_from([0.0, -0.0, 1.5, -2.0, None])
_scales = st.sampled_from([None, 1.0, 2.0, float("inf")])


@st.composite
def _delivered(draw: st.DrawFn) -> list[tuple[int, Sample]]:
    """Some samples, most often one after the other and of one layout."""
    first, layers = draw(st.sampled_from([0, 1, 5, 20, 40])), draw(st.sampled_from([1, 1, 1, 3]))
    return [
        (
            ordinal,
            replace(
                forward(
                    ordinal,
                    *[
                        measurement(layer, metrics=("mean", "std"), values=(draw(_values), draw(_values)))
                        for layer in range(layers)
                    ],
                ),
                loss_scale=draw(_scales),
            ),
        )
        for ordinal in range(first, first + draw(st.sampled_from([1, 2, 3, 7])))
    ]


_deliveries = _delivered()


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


@settings(deadline=None)
@given(st.data(), st.integers(1, 4))
def test_parts_that_wait_give_the_summaries_of_rows_folded_at_once(data: st.DataObject, window: int) -> None:
    """Whatever is missing, late or of another layout, nothing differs to the bit."""
    made, summary, every = HistoryColumns(ORIGIN), RunningSummary(window), RunningSummary(window)
    index, builder = SeriesIndex(), SummaryBuilder(window)
    for _ in range(data.draw(st.integers(1, 6))):
        part = made.make(data.draw(_deliveries))
        summary.add(part)
        every.add(part)
        every.fold_rest()
        for batch in part.table.to_batches():
            builder.add(row_block(batch, index.number(batch)))

    expected = builder.finish(index)
    assert same(summary.finish(), expected)
    assert same(every.finish(), expected)


def test_rows_wait_for_those_of_further_parts_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows are folded together as were set, whole parts of them, and a rest with the finish."""
    monkeypatch.setattr(running_summary, "_MAX_WAITING_ROWS", 6)
    folded: list[int] = []
    add = SummaryBuilder.add_following

    def count(builder: SummaryBuilder, blocks: Sequence[RowBlock]) -> None:
        folded.append(sum(block.num_samples for block in blocks))
        add(builder, blocks)

    monkeypatch.setattr(SummaryBuilder, "add_following", count)
    made, summary = HistoryColumns(ORIGIN), RunningSummary(20)
    for ordinal in range(5):
        summary.add(made.make([(ordinal, forward(ordinal, measurement()))]))
    assert folded == [2, 2]
    assert entry(summary.finish(), 0)["observations"] == 5
    assert folded == [2, 2, 1]


def test_rows_of_small_parts_do_not_wait_as_many_parts() -> None:
    """What a part's arrays take beside their rows is bounded too, however few rows a part has."""
    made, summary = HistoryColumns(ORIGIN), RunningSummary(20)
    alive: list[weakref.ref[object]] = []
    for ordinal in range(200):
        part = made.make([(ordinal, forward(ordinal, measurement()))])
        assert part.keyed is not None
        alive.append(weakref.ref(part.keyed.block.value))
        summary.add(part)
        del part
        assert sum(one() is not None for one in alive) <= 64

    assert entry(summary.finish(), 0)["observations"] == 200
    assert not any(one() is not None for one in alive)
