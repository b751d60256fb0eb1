"""The summary of a series against a reference that looks at one row at a time."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merge.run_folder import RunFolder, moment
from torchinstruments.merge.engine import merge_run

Row = dict[str, Any]


def merged_entry(run: RunFolder, rank: int = 0) -> dict[str, Any]:
    """Merges a run of one series and returns its summary of a rank."""
    layers: Any = merge_run(run.url).result["layers"]
    return layers[0]["tensors"][0]["statistics"][0]["ranks"][str(rank)]


def reference(rows: list[Row], window: int) -> dict[str, Any]:
    """Summarises the rows of one series, in the order of arrival, by the definition."""
    rows = sorted(rows, key=lambda row: row["sample_id"])
    valid = [row for row in rows if row["value"] is not None]

    def point(row: Row) -> dict[str, Any]:
        return {
            "sample_id": row["sample_id"],
            "timestamp": moment(row["sample_id"]).isoformat(timespec="microseconds"),
            "value": row["value"],
            "unavailable_reason": row["unavailable_reason"],
        }

    def extremum(choose: Any) -> dict[str, Any]:
        if not valid:
            reason = "no_valid_observations"
            return {"sample_id": None, "timestamp": None, "value": None, "unavailable_reason": reason}
        best = choose(row["value"] for row in valid)
        return point(next(row for row in valid if row["value"] == best))

    def window_of(part: list[Row]) -> dict[str, Any]:
        values = [row["value"] for row in part if row["value"] is not None]
        mean = None
        if values:
            total = 0.0
            for value in values:
                total += value
            mean = total / len(values)
        reason = "" if values else ("no_valid_observations" if part else "no_observations")
        return {
            "observations": len(part),
            "valid_observations": len(values),
            "mean": mean,
            "unavailable_reason": reason,
        }

    return {
        "observations": len(rows),
        "unavailable_observations": len(rows) - len(valid),
        "first": point(rows[0]),
        "latest": point(rows[-1]),
        "minimum": extremum(min),
        "maximum": extremum(max),
        "previous_window": window_of(rows[-2 * window : -window]),
        "recent_window": window_of(rows[-window:]),
    }


def test_windows_of_the_spec(tmp_path: Path) -> None:
    """1,2,3,4,null,6,7 with window 3 have a previous mean of 3.0, a recent one of 6.5 over 2 of 3 rows."""
    run = RunFolder(tmp_path / "run", window=3).run()
    values = [1.0, 2.0, 3.0, 4.0, None, 6.0, 7.0]
    run.history(
        0,
        [
            {"sample_id": i, "value": v, "unavailable_reason": "" if v is not None else "overflow"}
            for i, v in enumerate(values)
        ],
    )
    found = merged_entry(run)
    reason = {"unavailable_reason": ""}
    assert found["previous_window"] == {"observations": 3, "valid_observations": 3, "mean": 3.0} | reason
    assert found["recent_window"] == {"observations": 3, "valid_observations": 2, "mean": 6.5} | reason
    assert (found["observations"], found["unavailable_observations"]) == (7, 1)


@pytest.mark.parametrize("seed", range(6))
def test_random_rows_match_the_reference(tmp_path: Path, seed: int) -> None:
    """Random series with nulls, ties and disorder, in random parts, match a reference made row by row."""
    random = np.random.default_rng(seed)
    window = int(random.integers(1, 6))
    run = RunFolder(tmp_path / "run", window=window).run()
    series: dict[tuple[str, str, int], list[Row]] = {}
    rows: list[Row] = []
    for sample in range(int(random.integers(1, 40))):
        for layer in ("a", "b", "c"):
            for metric in ("mean", "std"):
                for call in range(2):
                    if random.random() < 0.2:
                        continue
                    missing = random.random() < 0.3 or (layer == "c" and metric == "std")
                    rows.append(
                        {
                            "sample_id": sample,
                            "layer": layer,
                            "metric": metric,
                            "call_index": call,
                            # Few distinct values, so that there are ties.
                            "value": None if missing else float(random.integers(-3, 4)) / 3,
                            "unavailable_reason": "no_finite_entries" if missing else "",
                        }
                    )
    # Some rows come late: they move behind others, as gradients do.
    for place in range(len(rows)):
        if random.random() < 0.3:
            rows.append(rows[place])
            rows[place] = {}
    rows = [row for row in rows if row]
    cuts = sorted({0, len(rows), *random.integers(0, len(rows) + 1, 3).tolist()})
    for number, (low, high) in enumerate(itertools.pairwise(cuts)):
        run.history(0, rows[low:high], sequence=number)
    for row in rows:
        series.setdefault((row["layer"], row["metric"], row["call_index"]), []).append(row)
    layers: Any = merge_run(run.url).result["layers"]
    found = {
        (layer["layer"], statistic["metric"], tensor["call_index"]): statistic["ranks"]["0"]
        for layer in layers
        for tensor in layer["tensors"]
        for statistic in tensor["statistics"]
    }
    assert found == {key: reference(own, window) for key, own in series.items()}


def test_many_row_groups(tmp_path: Path) -> None:
    """A part of several row groups and batches is summarised like one block, in the order of its samples."""
    run = RunFolder(tmp_path / "run", window=20).run()
    values = np.sin(np.arange(70_000) * 0.7)
    run.history(0, [{"sample_id": i, "value": float(v)} for i, v in enumerate(values)])
    found = merged_entry(run)
    assert found["observations"] == 70_000
    assert found["minimum"]["value"] == values.min()
    assert found["minimum"]["sample_id"] == int(values.argmin())
    assert found["maximum"]["sample_id"] == int(values.argmax())
    assert math.isclose(found["recent_window"]["mean"], values[-20:].mean(), rel_tol=1e-12)
    assert math.isclose(found["previous_window"]["mean"], values[-40:-20].mean(), rel_tol=1e-12)


def test_ties_go_to_the_lowest_sample(tmp_path: Path) -> None:
    """Of equal extrema the lowest sample is named, even where it arrives in a later part."""
    run = RunFolder(tmp_path / "run").run()
    run.history(0, [{"sample_id": 5, "value": 1.0}, {"sample_id": 7, "value": 1.0}])
    run.history(0, [{"sample_id": 4, "value": 1.0}], sequence=1)
    found = merged_entry(run)
    assert found["minimum"]["sample_id"] == found["maximum"]["sample_id"] == found["first"]["sample_id"] == 4
    assert found["latest"]["sample_id"] == 7


def test_mean_of_huge_values_is_finite(tmp_path: Path) -> None:
    """A window whose sum overflows has a finite mean all the same."""
    run = RunFolder(tmp_path / "run").run()
    run.history(0, [{"sample_id": i, "value": 1.6e308} for i in range(3)])
    assert math.isclose(merged_entry(run)["recent_window"]["mean"], 1.6e308, rel_tol=1e-12)


def test_values_that_are_not_finite_count_as_missing(tmp_path: Path) -> None:
    """NaN and infinities in a part are missing values with a reason, never NaN in the result."""
    run = RunFolder(tmp_path / "run").run()
    run.history(0, [{"sample_id": i, "value": v} for i, v in enumerate([math.nan, math.inf, -math.inf])])
    found = merged_entry(run)
    assert found["unavailable_observations"] == 3
    assert found["latest"]["value"] is None
    assert found["latest"]["unavailable_reason"] == "unstated"
    assert "NaN" not in (tmp_path / "run" / "merged" / "result.json").read_text()


def test_generations_of_one_rank_form_one_series(tmp_path: Path) -> None:
    """Rows of a restarted rank, in another process and generation, continue its series."""
    run = RunFolder(tmp_path / "run").run()
    run.manifest(0, "0000000b", generation=0)
    run.manifest(0, "0000000a", generation=1)
    run.history(0, [{"sample_id": i, "value": float(i)} for i in range(2)], "0000000b")
    later = 1_000_000_000
    run.history(0, [{"sample_id": later + i, "value": 5.0 + i} for i in range(2)], "0000000a", generation=1)
    found = merged_entry(run)
    assert found["observations"] == 4
    assert (found["first"]["value"], found["latest"]["value"]) == (0.0, 6.0)
    assert found["latest"]["sample_id"] == later + 1


def test_second_traversal_is_the_later_row(tmp_path: Path) -> None:
    """Of several traversals of one sample's graph, the last one is the latest row, across parts too."""
    run = RunFolder(tmp_path / "run").run()
    own: dict[str, object] = {"sample_id": 0, "signal": "output_gradient"}
    run.history(0, [{**own, "value": 1.0}, {**own, "backward_index": 1, "value": 2.0}])
    run.history(0, [{**own, "backward_index": 2, "value": 3.0}], sequence=1)
    found = merged_entry(run)
    assert (found["observations"], found["first"]["value"], found["latest"]["value"]) == (3, 1.0, 3.0)


def test_loss_scale_and_texts_stand_beside_the_numbers(tmp_path: Path) -> None:
    """A tensor tells its latest shape, dtype and scope, and between which loss scales its rows were taken."""
    run = RunFolder(tmp_path / "run").run()
    scaled: dict[str, object] = {"scale_provenance": "gradscaler", "dtype": "float16", "value": 1.0}
    run.history(
        0,
        [
            {"sample_id": 0, "loss_scale": 65536.0, "shape": "8x4", **scaled},
            {"sample_id": 1, "loss_scale": 32768.0, "shape": "2x4", **scaled},
        ],
    )
    layers: Any = merge_run(run.url).result["layers"]
    tensor = layers[0]["tensors"][0]
    assert tensor["loss_scale"] == {"lowest": 32768.0, "highest": 65536.0}
    assert (tensor["latest_shape"], tensor["dtype"], tensor["scope"]) == ("2x4", "float16", "local")
