"""overview.parquet and timeline.parquet of whole merges, against NumPy over the values that were written."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from merge.run_folder import RunFolder, counted, process_of, whole_run
from merge.synthetic_run import METRICS, SIGNALS, SyntheticRun
from torchinstruments.merge import overview_choice
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.overview import OVERVIEW_KEY

RANKS, LINES = 40, 2


def lower_median(values: np.ndarray) -> np.ndarray:
    """Returns the lower median over the first axis."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> SyntheticRun:
    """A merged run of 40 ranks, so few numbers of which are wanted that ranks form groups."""
    run = SyntheticRun(
        RunFolder(tmp_path_factory.mktemp("many"), world_size=RANKS),
        30,
        3,
        part_samples=7,
        late_gradients=True,
    )
    run.write()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overview_choice, "MAX_NUMBERS", 12_000)
        patch.setattr(overview_choice, "MAX_GROUPS", 10)
        patch.setattr(overview_choice, "MAX_LINES", LINES)
        merge_run(run.folder.url)
    return run


def overview_of(run: RunFolder) -> pl.DataFrame:
    """Reads the table of a merged run."""
    return pl.read_parquet(run.root / "merged" / "overview.parquet")


def test_every_row_is_what_the_values_say(many: SyntheticRun) -> None:
    """Lowest, highest, median and deviation, and the values and distances of the ranks that are shown."""
    values = np.stack([many.values(rank) for rank in range(RANKS)])
    found = overview_of(many.folder)
    assert found.height == found["attempt"].n_unique() * 3 * len(SIGNALS) * len(METRICS)
    for row in found.iter_rows(named=True):
        place = (
            row["attempt"],
            int(row["layer"].removeprefix("layers.")),
            SIGNALS.index(row["signal"]),
            METRICS.index(row["metric"]),
        )
        own = values[(slice(None), *place)]
        median = lower_median(own)
        mad = lower_median(np.abs(own - median))
        assert (row["num_ranks"], row["num_ranks_without_value"]) == (RANKS, 0)
        assert (row["lowest_rank"], row["highest_rank"]) == (own.argmin(), own.argmax())
        numbers = [row[one] for one in ("lowest_value", "highest_value", "median_of_ranks", "mad_of_ranks")]
        np.testing.assert_allclose(numbers, [own.min(), own.max(), median, mad], rtol=1e-7)
        np.testing.assert_allclose(row["values"], own[row["ranks"]], rtol=1e-7)
        np.testing.assert_allclose(row["distances"], own[row["ranks"]] - median, rtol=1e-7)


def test_detailed_forwards_have_the_furthest_rank_of_every_group(many: SyntheticRun) -> None:
    """Other forwards have the chosen ranks alone; what was chosen stands in the file's metadata."""
    told = json.loads(
        pq.read_metadata(many.folder.root / "merged" / "overview.parquet").metadata[OVERVIEW_KEY.encode()]
    )
    assert told["group_ranks"] == 4
    always = [int(one) for one in told["ranks_of_every_forward"].replace("-", ",").split(",")]
    values = np.stack([many.values(rank) for rank in range(RANKS)])
    found = overview_of(many.folder)
    assert 0 < found.filter("all_groups")["attempt"].n_unique() < found["attempt"].n_unique()
    assert told["forwards"] == 30
    assert told["forwards_chosen"] == found["attempt"].n_unique()
    for row in found.filter(metric="std", signal="output").iter_rows(named=True):
        own = values[:, row["attempt"], int(row["layer"][-1]), 0, METRICS.index("std")]
        distance = np.abs(own - lower_median(own)).reshape(10, 4)
        furthest = distance.argmax(axis=1) + np.arange(10) * 4
        assert set(always) <= set(row["ranks"])
        if row["all_groups"]:
            assert set(furthest) <= set(row["ranks"])
        else:
            assert len(row["ranks"]) == LINES


def test_parts_of_a_tensor_are_held_against_ranks_with_the_same_part(tmp_path: Path) -> None:
    """Each rank has its own number and the distance from its replica, and there is no median of parts."""
    run = whole_run(tmp_path / "run", 4)
    for rank in range(4):
        part = {"scope": "local_shard", "replica_key": f"mesh S(0)@{rank % 2}/2", "layer": "shard"}
        run.history(rank, [{"sample_id": 0, "value": 2.0**rank, **part}], process_of(rank), sequence=1)
        counted(run, rank, history_rows=5)
    merge_run(run.url)
    row = overview_of(run).filter(layer="shard").row(0, named=True)
    assert (row["ranks"], row["values"]) == ([0, 1, 2, 3], [1.0, 2.0, 4.0, 8.0])
    assert row["distances"] == [0.0, 0.0, 3.0, 6.0]
    assert (row["lowest_value"], row["highest_rank"], row["median_of_ranks"]) == (1.0, 3, None)


def test_a_single_rank_has_values_and_no_distance(tmp_path: Path) -> None:
    """There is nothing to hold them against, and the comparison stays empty."""
    run = whole_run(tmp_path / "run", 1)
    run.history(
        0, [{"sample_id": one, "attempt": one, "value": float(one)} for one in range(4)], process_of(0)
    )
    run.samples(0, [{"sample_id": one, "attempt": one} for one in range(4)], process_of(0))
    result = merge_run(run.url).result["comparison"]
    assert isinstance(result, dict)
    assert result["cells"] == 0
    found = overview_of(run)
    assert found["values"].to_list() == [[0.0], [1.0], [2.0], [3.0]]
    assert found["distances"].to_list() == [[None]] * 4


def test_a_rank_without_a_value_is_counted(tmp_path: Path) -> None:
    """Its place is empty, and the forward at which a value was first not finite is among those chosen."""
    run = whole_run(tmp_path / "run", 3)
    run.history(
        1, [{"sample_id": 2, "value": None, "unavailable_reason": "no_finite_entries"}], process_of(1)
    )
    merge_run(run.url)
    row = overview_of(run).filter(attempt=0).row(0, named=True)
    assert (row["ranks"], row["num_ranks"], row["num_ranks_without_value"]) == ([0, 2], 2, 1)
