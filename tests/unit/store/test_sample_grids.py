"""Samples of one layout as a matrix: the same summaries as row by row."""

import threading
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchinstruments.store import sample_grids
from torchinstruments.store.row_blocks import LATEST_COLUMNS, row_block
from torchinstruments.store.sample_grids import NumberedRows, SharedLayouts
from torchinstruments.store.schema import KEY_COLUMNS
from torchinstruments.store.series import SeriesIndex
from torchinstruments.store.summaries import SeriesSummaries, SummaryBuilder
from unit.store.equal_summaries import same

Row = tuple[int, int, float | None, float | None]
"""Sample, series, value, loss scale."""

_values = st.one_of(st.none(), st.sampled_from([0.0, -0.0, 1.5, -2.0, 1e308]), st.floats(width=32))
_scales = st.sampled_from([None, 1.0, 65536.0])


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows of ``history`` as a part gives them."""
    count = len(rows)

    def texts(found: list[str]) -> pa.Array:
        return pa.array(found, pa.string()).dictionary_encode()

    columns: dict[str, pa.Array] = {
        "sample_id": pa.array([row[0] for row in rows], pa.int64()),
        "timestamp": pa.array([1000 * row[0] + row[1] for row in rows], pa.timestamp("us", tz="UTC")),
        "value": pa.array([row[2] for row in rows], pa.float64()),
        "loss_scale": pa.array([row[3] for row in rows], pa.float64()),
        "unavailable_reason": texts(["overflow" if row[2] is None else "" for row in rows]),
        "call_index": pa.array([row[1] % 2 for row in rows], pa.int32()),
        "layer": texts([f"layer{row[1] // 2}" for row in rows]),
        "metric": texts([("mean", "std")[row[1] % 2] for row in rows]),
    }
    for name in ("signal", "stage", "tensor_path"):
        columns[name] = texts(["output"] * count)
    for name in LATEST_COLUMNS:
        columns[name] = texts([f"{name}{row[0] % 3}" for row in rows])
    return pa.RecordBatch.from_pydict(columns)


def row_by_row(batches: Sequence[pa.RecordBatch], window: int) -> SeriesSummaries:
    """The summaries without a look at the shape of the rows."""
    index, builder = SeriesIndex(), SummaryBuilder(window)
    for batch in batches:
        builder.add(row_block(batch, index.number(batch)))
    return builder.finish(index)


def as_grids(
    batches: Sequence[pa.RecordBatch], window: int, shared: SharedLayouts
) -> tuple[SeriesSummaries, int]:
    """The summaries as the merge makes them, and how many blocks were grids."""
    numbered, builder = NumberedRows(shared), SummaryBuilder(window)
    num_grids = 0
    for batch in batches:
        for block in numbered.blocks(batch):
            num_grids += block.num_samples > 0
            builder.add(block)
    return builder.finish(numbered.index), num_grids


@st.composite
def batches(draw: st.DrawFn) -> list[list[Row]]:
    """Batches in which samples mostly have one layout; some are late, short, doubled or in another order."""
    layouts = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=3))
    found: list[list[Row]] = []
    sample = 0
    for _ in range(draw(st.integers(1, 4))):
        rows: list[Row] = []
        for _ in range(draw(st.integers(1, 6))):
            layout = layouts[draw(st.sampled_from([0, 0, 0, *range(len(layouts))]))]
            rows += [(sample, series, draw(_values), draw(_scales)) for series in layout]
            sample += draw(st.sampled_from([1, 1, 1, 1, 0, -2, 3]))
            sample = max(sample, 0)
        found.append(rows)
    return found


@settings(deadline=None)
@given(batches(), st.integers(1, 4))
@example([[(0, 0, 0.0, None), (1, 0, -0.0, None)]], 1)
@example([[(0, 0, -0.0, None), (1, 0, 0.0, None)]], 1)
def test_grids_give_the_summaries_of_rows(rows: list[list[Row]], window: int) -> None:
    """Whatever the samples look like, a second rank with the same layout included, nothing differs."""
    found = [batch_of(one) for one in rows]
    expected = row_by_row(found, window)
    shared = SharedLayouts()
    assert same(as_grids(found, window, shared)[0], expected)
    assert same(as_grids(found, window, shared)[0], expected)
    # Cut in other places, in the middle of samples too.
    cut = [part for batch in found for part in (batch.slice(0, 3), batch.slice(3)) if part.num_rows]
    assert same(as_grids(cut, window, shared)[0], expected)


@pytest.mark.parametrize("num_samples", [3, 300])
def test_samples_of_one_layout_are_one_grid(num_samples: int) -> None:
    """Samples of the same series are one block; the extrema are those of the lowest sample among equals."""
    rows = [(sample, series, float(sample % 2), None) for sample in range(num_samples) for series in range(4)]
    summaries, num_grids = as_grids([batch_of(rows)], 2, SharedLayouts())
    assert num_grids == 1
    assert len(summaries) == 4
    assert summaries.observations.tolist() == [num_samples] * 4
    assert summaries.minimum.sample_id.tolist() == [0] * 4
    assert summaries.maximum.sample_id.tolist() == [1] * 4
    assert summaries.latest.sample_id.tolist() == [num_samples - 1] * 4
    assert summaries.latest_texts["shape"] == (f"shape{(num_samples - 1) % 3}",) * 4


def test_ranks_with_one_layout_share_their_keys() -> None:
    """The second rank takes the keys of the first one, and keeps its own further series to itself."""
    shared = SharedLayouts()
    rows = [(0, series, 1.0, None) for series in range(4)]
    first, _ = as_grids([batch_of(rows)], 2, shared)
    second, _ = as_grids([batch_of(rows)], 2, shared)
    assert second.keys is first.keys
    more, _ = as_grids([batch_of(rows), batch_of([(1, 5, 1.0, None)])], 2, shared)
    assert len(more) == 5
    assert as_grids([batch_of(rows)], 2, shared)[0].keys is first.keys


def test_ranks_share_the_layouts_that_follow() -> None:
    """A later layout is shared by ranks that met the same ones before it, and by no others."""
    shared = SharedLayouts()
    parts = [batch_of([(sample, one, 1.0, None) for one in of]) for sample, of in enumerate(([0, 1], [3, 2]))]
    first, second = (as_grids(parts, 2, shared)[0] for _ in range(2))
    assert second.keys is first.keys
    assert same(first, row_by_row(parts, 2))
    turned = [parts[1], parts[0]]
    other, again = (as_grids(turned, 2, shared)[0] for _ in range(2))
    assert other.keys is not first.keys
    assert again.keys is other.keys
    assert same(other, row_by_row(turned, 2))


def test_what_is_shared_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many layouts the last ones are kept, up to a number of series; other threads may ask meanwhile."""
    monkeypatch.setattr(sample_grids, "_MAX_SHARED_SERIES", 5)
    shared = SharedLayouts()
    layouts = [[(0, series, 1.0, None) for series in range(size)] for size in (1, 2, 3, 4)]

    def work() -> None:
        for layout in layouts * 5:
            summaries, _ = as_grids([batch_of(layout)], 2, shared)
            assert len(summaries) == len(layout)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < sum(len(index) for _, index, _ in shared._known.values()) <= 5
    shared.clear()
    assert not shared._known


def test_series_are_sorted_as_their_keys() -> None:
    """The order of numbers is that of the keys, whatever the texts and in whatever order they came."""
    index = SeriesIndex()
    rows = [(0, series, 1.0, None) for series in (5, 0, 3, 1, 4)]
    index.number(batch_of(rows))
    index.number(batch_of([(1, 2, 1.0, None)]))
    keys, order = index.by_key()
    assert list(keys) == sorted(index.keys)
    assert [index.keys[number] for number in order.tolist()] == list(keys)
    assert index.keys[0]._fields == KEY_COLUMNS
