"""Scalars for TensorBoard, read back by TensorBoard itself."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import metadata

from merge.run_folder import RunFolder, process_of, whole_run
from merge.synthetic_run import METRICS, SyntheticRun
from torchinstruments.errors import ConfigurationError
from torchinstruments.merge.engine import merge_run
from torchinstruments.report import write_tensorboard


def scalar_tags(found: EventAccumulator) -> list[str]:
    """Returns the names of all scalars."""
    tags = found.Tags()["scalars"]
    assert isinstance(tags, list)
    return tags


def read(folder: Path) -> EventAccumulator:
    """Returns what TensorBoard finds in a folder, all of it."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_every_series_is_a_band_of_three_scalars(tmp_path: Path) -> None:
    """TensorBoard reads lowest, median and highest of each series at each attempt, and no mean over ranks."""
    run = SyntheticRun(RunFolder(tmp_path / "run", world_size=4), 6, 2).write()
    written = write_tensorboard(merge_run(run.folder.url), tmp_path / "board")
    assert (written.num_series, written.num_values) == (2 * 2 * 9, 6 * 2 * 2 * 9)
    found = read(tmp_path / "board")
    tag = "torchinstruments/ranks/layers.001/output_gradient/call_0/grad_output.0/std"
    own = np.sort([run.values(rank)[:, 1, 1, METRICS.index("std")] for rank in range(4)], axis=0)
    for kind, expected in (("lowest", own[0]), ("median_of_ranks", own[1]), ("highest", own[3])):
        scalars = found.Scalars(f"{tag}/{kind}")
        assert [one.step for one in scalars] == list(range(6))
        np.testing.assert_allclose([one.value for one in scalars], expected, rtol=1e-6)
    assert len(scalar_tags(found)) == 3 * written.num_series
    assert not [one for one in scalar_tags(found) if one.endswith("/mean_of_ranks")]


def test_the_layout_draws_the_bands(tmp_path: Path) -> None:
    """A category a layer, a chart a series, whose margin goes from the lowest to the highest."""
    run = SyntheticRun(RunFolder(tmp_path / "run", world_size=2), 2, 2).write()
    write_tensorboard(merge_run(run.folder.url), tmp_path / "board")
    found = read(tmp_path / "board")
    (tensor,) = found.Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = importlib.import_module("tensorboard.plugins.custom_scalar.layout_pb2").Layout.FromString(
        tensor.tensor_proto.string_val[0]
    )
    assert [one.title for one in layout.category] == ["layers.000", "layers.001"]
    assert len(layout.category[0].chart) == 2 * 9
    tags = set(scalar_tags(found))
    for category in layout.category:
        for chart in category.chart:
            (band,) = chart.margin.series
            assert {band.value, band.lower, band.upper} <= tags
            assert band.lower == band.value.removesuffix("median_of_ranks") + "lowest"


def test_a_name_makes_no_folder(tmp_path: Path) -> None:
    """Slashes and markup in a layer's name are quoted."""
    run = whole_run(tmp_path / "run", 2)
    for rank in range(2):
        run.history(rank, [{"sample_id": 0, "value": 1.0, "layer": "a/b<c>"}], process_of(rank))
    write_tensorboard(merge_run(run.url), tmp_path / "board")
    (layer,) = {one.split("/")[2] for one in scalar_tags(read(tmp_path / "board"))}
    assert layer == "a%2Fb%3Cc%3E"


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    """TensorBoard would mix what lies there with this."""
    merged = merge_run(whole_run(tmp_path / "run", 2).url)
    write_tensorboard(merged, tmp_path / "board")
    with pytest.raises(ConfigurationError, match="not empty"):
        write_tensorboard(merged, tmp_path / "board")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="cannot hold files"):
        write_tensorboard(merged, tmp_path / "file" / "board")
