"""Pictures from frames: what they show is what the frames say."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from merge.run_folder import RunFolder, process_of, whole_run
from merge.synthetic_run import METRICS, SyntheticRun
from torchinstruments.errors import ConfigurationError
from torchinstruments.merge.engine import merge_run
from torchinstruments.report import (
    coverage_map,
    loss_scale_lines,
    own_work_plot,
    rank_layer_heat_map,
    series_over_ranks,
    skipped_steps_map,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from torchinstruments import MergeResult

STEPS = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SyntheticRun:
    """A run of three ranks; rank 2 lacks half of its samples, skips every sixth step and works longer."""
    run = SyntheticRun(RunFolder(tmp_path_factory.mktemp("run"), world_size=3), STEPS, 2)
    run.write(without={2: range(12, STEPS)})
    for rank in range(3):
        rows = [
            {
                "attempt": one,
                "optimizer_attempt": one,
                "outcome": "skipped" if rank == 2 and one % 6 == 5 else "applied",
                "scale_before": 1024.0 / 2 ** (one // 6 if rank == 2 else 0),
                "gap_s": 0.5 if rank == 2 else 0.01,
            }
            for one in range(STEPS)
        ]
        run.folder.steps(rank, rows, process_of(rank))
    return run


@pytest.fixture(scope="module")
def merged(run: SyntheticRun) -> "MergeResult":
    """What a merge finds of it."""
    return merge_run(run.folder.url)


def traces(figure: "go.Figure") -> list[dict[str, Any]]:
    """Returns what a picture draws, as plain data."""
    return list(figure.to_dict()["data"])


def numbers(held: Any) -> np.ndarray:
    """Returns numbers that plotly keeps as a list, or as bytes with their type and shape."""
    if not isinstance(held, dict):
        return np.array(held, float)
    found = np.frombuffer(base64.b64decode(held["bdata"]), held["dtype"]).astype(float)
    shape = [int(one) for one in str(held.get("shape", len(found))).split(",")]
    return found.reshape(shape)


def test_the_heat_map_shows_distances_in_median_deviations(run: SyntheticRun, merged: "MergeResult") -> None:
    """A cell is the distance from the median over ranks, divided by the deviation."""
    (trace,) = traces(rank_layer_heat_map(merged.overview(), metric="std", attempt=3))
    own = np.stack([run.values(rank)[3, :, 0, METRICS.index("std")] for rank in range(3)], axis=1)
    median = np.sort(own, axis=1)[:, [1]]
    mad = np.sort(np.abs(own - median), axis=1)[:, [1]]
    np.testing.assert_allclose(numbers(trace["z"]), (own - median) / mad, rtol=1e-5)
    assert list(trace["y"]) == ["layers.000", "layers.001"]
    assert list(trace["x"]) == ["0", "1", "2"]


def test_of_two_ranks_distances_are_shares(merged: "MergeResult") -> None:
    """There is no median deviation of two ranks: the larger magnitude takes its place."""
    (trace,) = traces(rank_layer_heat_map(merged.overview(), metric="std", attempt=20))
    shown = numbers(trace["z"])
    assert shown.shape == (2, 2)
    assert (np.sort(np.abs(shown), axis=1)[:, 0] == 0).all()
    assert (np.abs(shown) <= 2).all()


def test_small_distances_look_small(tmp_path: Path) -> None:
    """Colours do not end at the largest distance where all are small."""
    folder = whole_run(tmp_path / "run", 2)
    for rank in range(2):
        folder.history(rank, [{"sample_id": 0, "metric": "std", "value": 1.0 + rank / 100}], process_of(rank))
    (trace,) = traces(rank_layer_heat_map(merge_run(folder.url).overview()))
    assert np.abs(numbers(trace["z"])).max() < 0.01
    assert (trace["zmin"], trace["zmax"]) == (-0.5, 0.5)


def test_a_series_has_a_line_a_rank_and_a_band(run: SyntheticRun, merged: "MergeResult") -> None:
    """Each line is a rank's values, the band goes from the lowest to the highest, and there is no mean."""
    found = {
        one.get("name") or "lowest": numbers(one["y"])
        for one in traces(series_over_ranks(merged.overview(), "layers.001"))
    }
    assert set(found) == {"lowest", "lowest to highest rank", "rank 0", "rank 1", "rank 2", "median_of_ranks"}
    own = np.stack([run.values(rank)[:, 1, 0, METRICS.index("std")] for rank in range(3)])
    np.testing.assert_allclose(found["rank 1"], own[1], rtol=1e-6)
    np.testing.assert_allclose(found["rank 2"], own[2, :12], rtol=1e-6)
    np.testing.assert_allclose(found["lowest"][:12], own[:, :12].min(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found["lowest to highest rank"][12:], own[:2, 12:].max(axis=0), rtol=1e-6)


def test_what_is_not_there_is_named(merged: "MergeResult") -> None:
    """A layer or metric that nobody measured is one sentence."""
    with pytest.raises(ConfigurationError, match="layer='nowhere'"):
        series_over_ranks(merged.overview(), "nowhere")
    with pytest.raises(ConfigurationError, match="metric='none'"):
        rank_layer_heat_map(merged.overview(), metric="none")


def test_ranks_with_one_loss_scale_share_a_line(merged: "MergeResult") -> None:
    """The rank whose scale fell has its own."""
    found = {one["name"]: list(one["y"]) for one in traces(loss_scale_lines(merged.timeline()))}
    assert found == {
        "ranks 0-1": [1024.0] * STEPS,
        "rank 2": [1024.0] * 6 + [512.0] * 6 + [256.0] * 6 + [128.0] * 6,
    }


def test_skips_and_coverage_are_those_of_each_rank(merged: "MergeResult") -> None:
    """A row a rank: steps it skipped, and which share of the measured forwards it has."""
    (skips,) = traces(skipped_steps_map(merged.timeline()))
    expected = np.zeros((3, STEPS))
    expected[2, 5::6] = 1
    np.testing.assert_array_equal(numbers(skips["z"]), expected)
    (share,) = traces(coverage_map(merged.timeline(), [0, 1, 2, 3]))
    expected = np.ones((4, STEPS))
    expected[2, 12:] = expected[3] = 0
    np.testing.assert_array_equal(numbers(share["z"]), expected)


def test_own_work_is_that_of_the_result(merged: "MergeResult") -> None:
    """One bar a rank, beside one of the rest of its attempts."""
    section = merged.result["own_work"]
    assert isinstance(section, dict)
    gaps, others = traces(own_work_plot(section))
    assert list(gaps["x"]) == ["0", "1", "2"]
    np.testing.assert_allclose(numbers(gaps["y"]), [0.01, 0.01, 0.5])
    np.testing.assert_allclose(numbers(others["y"]), 0.055)


def test_names_in_pictures_are_escaped(tmp_path: Path) -> None:
    """Plotly would read a layer's name as markup."""
    run = whole_run(tmp_path / "run", 2)
    for rank in range(2):
        run.history(
            rank, [{"sample_id": 0, "value": 1.0, "layer": "<b>x</b>", "metric": "std"}], process_of(rank)
        )
    overview = merge_run(run.url).overview()
    (trace,) = traces(rank_layer_heat_map(overview))
    assert list(trace["y"]) == ["&lt;b&gt;x&lt;/b&gt;"]
    assert "&lt;b&gt;" in series_over_ranks(overview, "<b>x</b>").to_dict()["layout"]["title"]["text"]
