"""Two runs beside each other: the change of every series, rank by rank, against an oracle of plain Python."""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merge.run_folder import RunFolder, process_of
from torchinstruments.errors import ConfigurationError, RunFormatError
from torchinstruments.merge import changes, compare_runs, merge_run
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.records import Member, ModuleRecord

Values = Mapping[str, Sequence[float | None]]


def written(
    root: Path,
    by_rank: Sequence[Mapping[str, Any]],
    *,
    layers: Mapping[str, str] | None = None,
    window: int = 3,
    run_id: str = "run-a",
) -> RunFolder:
    """Writes and merges a run.

    Args:
        root: Its folder.
        by_rank: For each rank layer to the values of its ``std``, or to rows.
        layers: Layer to type in its catalog.
        window: Samples in a window.
        run_id: Its id.
    """
    run = RunFolder(root, world_size=len(by_rank), window=window, run_id=run_id).run()
    run.generation(
        0, [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(len(by_rank))]
    )
    for rank, held in enumerate(by_rank):
        run.manifest(rank, process_of(rank), status="closed")
        kinds = layers or dict.fromkeys(held, "Linear")
        run.catalog(
            rank, [ModuleRecord(one, kind, (), 1, 1) for one, kind in kinds.items()], process_of(rank)
        )
        rows: list[dict[str, Any]] = []
        for layer, values in held.items():
            for sample, value in enumerate(values):
                own = value if isinstance(value, dict) else {"value": value}
                reason = {"unavailable_reason": "no_finite_entries"} if own.get("value") is None else {}
                rows.append({"sample_id": sample, "layer": layer, "metric": "std"} | reason | own)
        if rows:
            run.history(rank, rows, process_of(rank))
    merge_run(run.url)
    return run


def change(a: float, b: float) -> float:
    """The documented formula."""
    larger = max(abs(a), abs(b))
    return abs(b / larger - a / larger) if larger else 0.0


def compared(a: RunFolder, b: RunFolder, **arguments: Any) -> dict[str, Any]:
    """Compares two runs and returns the document, which is strict JSON."""
    document = compare_runs(a.url, b.url, **arguments).to_dict()
    json.dumps(document, allow_nan=False)
    return document


@pytest.mark.parametrize("measure", ["latest", "recent_window"])
def test_every_change_is_that_of_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: str
) -> None:
    """Of 20 ranks with random series each series has its largest change, and the rank that has it."""
    monkeypatch.setattr(changes, "FOLDED_RANKS", 3)
    random = np.random.default_rng(5)
    sides: list[list[dict[str, list[float | None]]]] = []
    for _ in range(2):
        ranks = []
        for rank in range(20):
            names = [f"layer{place}" for place in range(6) if (place + rank) % 5]
            ranks.append(
                {name: [float(one) if one > -1 else None for one in random.normal(size=5)] for name in names}
            )
        sides.append(ranks)
    a, b = (written(tmp_path / name, ranks) for name, ranks in zip("ab", sides, strict=True))

    def number(values: Sequence[float | None]) -> float | None:
        if measure == "latest":
            return values[-1]
        known = [one for one in values[-3:] if one is not None]
        return sum(known) / len(known) if known else None

    expected: dict[str, list[tuple[float, int]]] = {}
    lost: dict[str, list[int]] = {}
    for rank, (of_a, of_b) in enumerate(zip(*sides, strict=True)):
        for name in of_a:
            first, second = number(of_a[name]), number(of_b[name])
            if first is not None and second is not None:
                expected.setdefault(name, []).append((change(first, second), rank))
            elif first is not None:
                lost.setdefault(name, []).append(rank)
    document = compared(a, b, measure=measure)
    assert (document["compared_by"], document["ranks_compared"]) == ("rank", "0-19")
    found = document["largest_changes"]
    assert len(found) == len(expected) == 6
    assert [one["change"] for one in found] == sorted((one["change"] for one in found), reverse=True)
    for one in found:
        share, rank = max(expected[one["layer"]], key=lambda pair: (pair[0], -pair[1]))
        assert one["change"] == pytest.approx(share, rel=1e-12)
        assert one["largest"]["rank"] == rank
        assert one["largest"]["a"]["value"] == pytest.approx(number(sides[0][rank][one["layer"]]), rel=1e-12)
        assert one["largest"]["b"]["value"] == pytest.approx(number(sides[1][rank][one["layer"]]), rel=1e-12)
        assert "ranks" not in one
    assert {one["layer"] for one in document["lost_values"]} == set(lost)
    for one in document["lost_values"]:
        assert one["ranks_lost"] == ranks_text(lost[one["layer"]])
    assert document["series"]["compared"] == 6


def test_each_rank_is_held_beside_itself(tmp_path: Path) -> None:
    """Values that swap their ranks are no small change, as a mean over ranks would have it."""
    a = written(tmp_path / "a", [{"fc": [1.0]}, {"fc": [3.0]}])
    b = written(tmp_path / "b", [{"fc": [3.0]}, {"fc": [1.0]}])
    [one] = compared(a, b)["largest_changes"]
    assert one["change"] == pytest.approx(2 / 3)
    assert one["largest"]["rank"] == 0
    assert {rank: (pair["a"]["value"], pair["b"]["value"]) for rank, pair in one["ranks"].items()} == {
        "0": (1.0, 3.0),
        "1": (3.0, 1.0),
    }


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (0.0, 0.0, 0.0),
        (-0.0, 0.0, 0.0),
        (0.0, 5e-324, 1.0),
        (1.0, 0.0, 1.0),
        (1.0, -1.0, 2.0),
        (1e308, -1e308, 2.0),
        (1.7e308, 1.6e308, 0.1 / 1.7),
        (5e-324, 1.0, 1.0),
        (2.0, 3.0, 1 / 3),
    ],
)
def test_changes_of_odd_numbers(tmp_path: Path, a: float, b: float, expected: float) -> None:
    """Zeros, the smallest and the largest numbers have a finite change, the same in both directions."""
    first = written(tmp_path / "a", [{"fc": [a]}])
    second = written(tmp_path / "b", [{"fc": [b]}])
    for pair in ((first, second), (second, first)):
        found = compare_runs(pair[0].url, pair[1].url, measure="latest").changes()
        assert found["change"].to_list() == [pytest.approx(expected, rel=1e-12)]
    assert compared(first, second)["series"]["changed"] == (1 if expected else 0)


def moved(mean: float, std: float, zeros: float = 0.5) -> list[dict[str, Any]]:
    """Rows of one sample of a tensor: its mean, its std and how much of it is 0."""
    return [
        {"sample_id": 0, "metric": metric, "value": value}
        for metric, value in (("mean", mean), ("std", std), ("zero_fraction", zeros))
    ]


def test_a_number_that_is_0_but_for_rounding_is_not_the_first(tmp_path: Path) -> None:
    """Series and ranks are chosen by the change against the tensor's size; ``change`` stays the largest."""
    a = written(tmp_path / "a", [{"fc": moved(1e-15, 2.0)}, {"fc": moved(0.5, 2.0)}])
    b = written(tmp_path / "b", [{"fc": moved(-1e-15, 3.0)}, {"fc": moved(-0.25, 1.0, 0.6)}])
    document = compared(a, b, measure="latest", max_change={"mean": 1.9})
    first, mean, zeros = document["largest_changes"]
    assert (first["metric"], first["share_of_size"], first["largest"]["rank"]) == ("std", 0.5, 1)
    assert (mean["metric"], mean["share_of_size"], mean["change"]) == ("mean", 0.75 / 2, 2.0)
    assert (mean["largest"]["rank"], mean["largest"]["change"]) == (1, 1.5)
    assert mean["ranks"]["0"]["change"] == 2.0
    assert mean["ranks"]["0"]["share_of_size"] == pytest.approx(2e-15 / 3)
    assert zeros["metric"] == "zero_fraction"
    assert zeros["share_of_size"] == zeros["change"] == pytest.approx(0.1 / 0.6)
    [condition] = document["conditions"]
    assert (condition["met"], condition["largest_change"]) == (True, 2.0)
    row = compare_runs(a.url, b.url, measure="latest").changes().row(1, named=True)
    assert (row["change"], row["rank"], row["change_on_rank"], row["std_a"]) == (2.0, 1, 1.5, 2.0)


def test_ends_of_ranges_are_held_against_the_size_of_their_own_ranks(tmp_path: Path) -> None:
    """Of the lowest value the std on the rank that holds it, in A and in B; of the highest likewise."""
    a = written(tmp_path / "a", [{"fc": moved(-1e-9, 1.0)}, {"fc": moved(1.0, 4.0)}])
    b = written(tmp_path / "b", [{"fc": moved(3.0, 8.0)}, {"fc": moved(1e-9, 2.0)}, {"fc": moved(2.0, 9.0)}])
    mean = next(one for one in compared(a, b)["largest_changes"] if one["metric"] == "mean")
    assert (mean["lowest"]["change"], mean["lowest"]["share_of_size"]) == (2.0, pytest.approx(1e-9))
    assert (mean["highest"]["change"], mean["highest"]["share_of_size"]) == (pytest.approx(2 / 3), 2 / 8)
    assert (mean["change"], mean["share_of_size"]) == (2.0, 2 / 8)


def test_worlds_of_other_sizes_are_compared_by_their_ranges(tmp_path: Path) -> None:
    """No rank of one is that of the other: lowest beside lowest, highest beside highest, with their ranks."""
    a = written(tmp_path / "a", [{"fc": [1.0]}, {"fc": [4.0]}])
    b = written(tmp_path / "b", [{"fc": [2.0]}, {"fc": [1.0]}, {"fc": [1.0]}, {"fc": [5.0]}])
    document = compared(a, b)
    assert document["compared_by"] == "range_over_ranks"
    assert document["not_by_rank_reason"] == "world_sizes_differ"
    [one] = document["largest_changes"]
    assert one["lowest"] == {
        "change": 0.0,
        "share_of_size": 0.0,
        "a": {"rank": 0, "value": 1.0},
        "b": {"rank": 1, "value": 1.0},
    }
    assert one["highest"] == {
        "change": pytest.approx(0.2),
        "share_of_size": pytest.approx(0.2),
        "a": {"rank": 1, "value": 4.0},
        "b": {"rank": 3, "value": 5.0},
    }
    assert one["change"] == one["highest"]["change"]
    assert (one["ranks_with_value_a"], one["ranks_with_value_b"]) == (2, 4)


def test_shards_of_other_worlds_are_not_compared(tmp_path: Path) -> None:
    """They are cut in different places; in worlds of one size each rank holds its own part."""
    sharded = {"value": 1.0, "scope": "local_shard"}
    a = written(tmp_path / "a", [{"fc": [sharded]}] * 2)
    b = written(tmp_path / "b", [{"fc": [sharded | {"value": 2.0}]}] * 3)
    c = written(tmp_path / "c", [{"fc": [sharded | {"value": 2.0}]}] * 2)
    d = written(tmp_path / "d", [{"fc": [{"value": 2.0}]}] * 2)
    assert compared(a, b)["series"]["not_compared"] == {"not_whole_tensors": 1}
    assert compared(a, c)["largest_changes"][0]["change"] == 0.5
    document = compared(a, d)
    assert document["series"]["not_compared"] == {"scope_differs": 1}
    assert document["largest_changes"] == []


@pytest.mark.parametrize("measure", ["latest", "recent_window"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_one_run_did_not_measure_has_the_reason_of_the_missing_value(
    tmp_path: Path, measure: str, world_size: int
) -> None:
    """A layer inside a compiled region has no scope, which is no other part of a tensor; either way round."""
    missing = {"value": None, "scope": "unknown"}
    layers = {"fc": "inside_compiled", "out": "reducer_error: ValueError: no"}
    a = written(tmp_path / "a", [{"fc": [1.0], "out": [1.0], "part": [1.0]}] * 2)
    rows: dict[str, Any] = {
        name: [missing | {"unavailable_reason": reason}] for name, reason in layers.items()
    }
    rows["part"] = [{"value": 1.0, "scope": "local_shard"}]
    b = written(tmp_path / "b", [rows] * world_size)
    for pair in ((a, b), (b, a)):
        document = compared(*pair, measure=measure)
        expected = {"inside_compiled": 1, "reducer_error": 1, "scope_differs": 1}
        assert document["series"]["not_compared"] == expected
        assert document["lost_values"] == document["gained_values"] == []


def test_gradients_at_another_loss_scale_are_not_compared(tmp_path: Path) -> None:
    """They are stored as observed; outputs, and fractions of a gradient, do not depend on the scale."""

    def rows(scale: float | None, value: float) -> dict[str, Any]:
        gradient = {"signal": "output_gradient", "tensor_path": "grad_output", "loss_scale": scale}
        return {
            "fc": [{"value": value, "loss_scale": scale}],
            "grad": [gradient | {"value": value * (scale or 1.0)}],
            "share": [gradient | {"value": value, "metric": "zero_fraction"}],
        }

    a = written(tmp_path / "a", [rows(1024.0, 0.5)])
    b = written(tmp_path / "b", [rows(2048.0, 0.25)])
    document = compared(a, b)
    assert document["series"]["not_compared"] == {"loss_scale_differs": 1}
    assert {one["layer"]: one["differs_in"] for one in document["largest_changes"]} == {
        "fc": ["loss_scale"],
        "share": ["loss_scale"],
    }
    c = written(tmp_path / "c", [rows(None, 0.25)])
    d = written(tmp_path / "d", [rows(1.0, 0.5)])
    assert compared(c, d)["series"]["not_compared"] == {}


def test_layers_that_came_and_went(tmp_path: Path) -> None:
    """By the catalogs, in the order of the model; series of one run alone are counted."""
    a = written(tmp_path / "a", [{"old": [1.0], "fc": [1.0]}], layers={"old": "Conv2d", "fc": "Linear"})
    b = written(
        tmp_path / "b",
        [{"new": [1.0], "fc": [1.0]}],
        layers={"new": "LayerNorm", "fc": "LoraLinear", "idle": "Dropout"},
    )
    document = compared(a, b)
    assert document["layers"] == {
        "in_both": 1,
        "added": [{"layer": "new", "type": "LayerNorm"}, {"layer": "idle", "type": "Dropout"}],
        "removed": [{"layer": "old", "type": "Conv2d"}],
        "type_changed": [{"layer": "fc", "type_a": "Linear", "type_b": "LoraLinear"}],
    }
    series = document["series"]
    assert (series["in_both"], series["only_in_a"], series["only_in_b"]) == (1, 1, 1)
    assert series["changed"] == 0


def test_values_that_went_and_came_are_named_with_rank_and_reason(tmp_path: Path) -> None:
    """A number that became NaN has no change, and is not passed over."""
    a = written(tmp_path / "a", [{"fc": [1.0], "out": [None]}, {"fc": [1.0], "out": [None]}])
    b = written(tmp_path / "b", [{"fc": [1.0], "out": [2.0]}, {"fc": [None], "out": [None]}])
    document = compared(a, b)
    [lost], [gained] = document["lost_values"], document["gained_values"]
    assert (lost["layer"], lost["ranks_lost"], lost["ranks_compared"]) == ("fc", "1", "0")
    assert lost["ranks"]["1"]["b"]["unavailable_reason"] == "no_valid_observations"
    assert lost["ranks"]["1"]["change"] is None
    assert (gained["layer"], gained["ranks_gained"]) == ("out", "0")
    wider = written(tmp_path / "wider", [{"fc": [None], "out": [1.0]}] * 3)
    document = compared(a, wider)
    assert [one["layer"] for one in document["lost_values"]] == ["fc"]
    assert document["lost_values"][0]["unavailable_reason_b"] == "no_valid_observations"
    assert [one["layer"] for one in document["gained_values"]] == ["out"]


def test_conditions(tmp_path: Path) -> None:
    """A condition is met by a change beyond it or a lost value; nothing to compare is no good news either."""
    a = written(tmp_path / "a", [{"fc": [1.0], "out": [1.0]}])
    b = written(tmp_path / "b", [{"fc": [0.9], "out": [1.0]}])
    found = compare_runs(a.url, b.url, max_change={"std": 0.1 + 1e-12})
    assert (found.met, found.complete) == ((), True)
    [one] = found.to_dict()["conditions"]  # type: ignore[misc]
    assert one == {
        "metric": "std",
        "max_change": 0.1 + 1e-12,
        "met": False,
        "unavailable_reason": "",
        "series_compared": 2,
        "series_beyond": 0,
        "series_lost_values": 0,
        "largest_change": pytest.approx(0.1),
    }
    assert compare_runs(a.url, b.url, max_change={"std": 0.05}).met == ("std",)
    c = written(tmp_path / "c", [{"fc": [1.0], "out": [None]}])
    assert compare_runs(a.url, c.url, max_change={"std": 2.0}).met == ("std",)
    d = written(tmp_path / "d", [{"other": [1.0]}])
    found = compare_runs(a.url, d.url, max_change={"std": 0.5})
    [one] = found.to_dict()["conditions"]  # type: ignore[misc]
    assert (one["met"], one["unavailable_reason"]) == (None, "nothing_compared")
    assert (found.met, found.complete) == ((), False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_change": {"stdd": 0.1}}, ("'stdd'", "std")),
        ({"max_change": {"std": -0.1}}, ("'std'", "-0.1", "from 0 to 2")),
        ({"max_change": {"std": math.nan}}, ("'std'", "nan")),
        ({"max_change": {"std": True}}, ("'std'", "True")),
        ({"max_change": {"std": "10%"}}, ("'std'", "'10%'")),
        ({"measure": "mean"}, ("measure='mean'", "recent_window", "latest")),
        ({"shown": -1}, ("shown=-1",)),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], words: Sequence[str]) -> None:
    """Each gets a sentence with its value and what is allowed."""
    run = written(tmp_path / "a", [{"fc": [1.0]}])
    with pytest.raises(ConfigurationError) as caught:
        compare_runs(run.url, run.url, **arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_a_run_may_be_given_as(tmp_path: Path) -> None:
    """Its folder, the folder of its merged files wherever that is, and result.json; else it says how."""
    a = written(tmp_path / "a", [{"fc": [1.0]}, {"fc": [2.0]}])
    b = written(tmp_path / "b", [{"fc": [2.0]}, {"fc": [2.0]}], run_id="run-b")
    merge_run(b.url, output=str(tmp_path / "elsewhere"))
    expected = compared(a, b)
    for name in (f"{b.url}/merged", f"{b.url}/merged/", f"{b.url}/merged/result.json", f"file://{b.url}"):
        assert compare_runs(a.url, name).to_dict() == expected
    elsewhere: Any = compare_runs(a.url, str(tmp_path / "elsewhere")).to_dict()
    assert elsewhere["largest_changes"] == expected["largest_changes"]
    assert elsewhere["b"]["url"] == str(tmp_path / "elsewhere")
    unmerged = RunFolder(tmp_path / "unmerged").run()
    with pytest.raises(RunFormatError, match=r"unmerged/merged has no result.json.*torchinstruments merge"):
        compare_runs(a.url, unmerged.url)
    with pytest.raises(RunFormatError, match="neither a run nor merged files"):
        compare_runs(a.url, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("result.json", b"", "result.json .* cannot be read"),
        ("result.json", b"[1, 2", "result.json .* cannot be read"),
        ("result.json", b"[" * 100_000, "result.json .* cannot be read"),
        ("result.json", b'{"schema_version": 7}', "schema version 7"),
        ("result.json", b'{"schema_version": 1, "run": 3}', "result.json .* cannot be read"),
        ("summary.parquet", b"", "summary.parquet .* is not the one"),
        ("summary.parquet", b"x" * 500, "summary.parquet .* is not the one"),
    ],
)
def test_merged_files_that_are_damaged(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    """Each gets a sentence that names the file and the way out."""
    run = written(tmp_path / "a", [{"fc": [1.0]}])
    good = written(tmp_path / "b", [{"fc": [1.0]}])
    (run.root / "merged" / name).write_bytes(data)
    for pair in itertools.permutations((run, good)):
        with pytest.raises(RunFormatError, match=rf"{words}.*merge the run again"):
            compare_runs(*(one.url for one in pair))


def adopted(run: RunFolder) -> None:
    """Has ``result.json`` name the table that lies beside it, whatever that is."""
    path = run.root / "merged" / "result.json"
    document = json.loads(path.read_bytes())
    for one in document["files"]:
        one["sha256"] = hashlib.sha256((path.parent / one["file"]).read_bytes()).hexdigest()
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("data", [b"", b"x" * 500])
def test_a_table_that_is_none(tmp_path: Path, data: bytes) -> None:
    """Also where the result names it."""
    run = written(tmp_path / "a", [{"fc": [1.0]}])
    (run.root / "merged" / "summary.parquet").write_bytes(data)
    adopted(run)
    with pytest.raises(RunFormatError, match=r"summary.parquet .* cannot be read.*merge the run again"):
        compare_runs(run.url, run.url)


def test_a_damaged_page_of_the_table(tmp_path: Path) -> None:
    """It is told by the digest, and where that was changed, too, when the series are read."""
    run = written(tmp_path / "a", [{f"layer{place}": [1.0 * place] for place in range(300)}])
    path = run.root / "merged" / "summary.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(255 - byte for byte in data[4:3000]) + data[3000:])
    with pytest.raises(RunFormatError, match=r"summary.parquet .* is not the one"):
        compare_runs(run.url, run.url)
    adopted(run)
    with pytest.raises(RunFormatError, match=r"summary.parquet .* cannot be read.*merge the run again"):
        compare_runs(run.url, run.url)


def test_runs_without_series(tmp_path: Path) -> None:
    """A run that never sampled is compared with: nothing is, and that is said."""
    a = written(tmp_path / "a", [{"fc": [1.0]}])
    empty = written(tmp_path / "b", [{}], layers={"fc": "Linear"})
    for pair in ((a, empty), (empty, a), (empty, empty)):
        document = compared(*pair)
        assert document["series"]["compared"] == 0
        assert document["not_by_rank_reason"] == "no_common_ranks"
        assert document["layers"]["in_both"] == 1


def test_ranks_of_one_run_alone_are_named(tmp_path: Path) -> None:
    """Worlds of one size of which each lost a rank are compared on the ranks that both have."""
    a = written(tmp_path / "a", [{"fc": [1.0]}, {"fc": [1.0]}, {}])
    b = written(tmp_path / "b", [{}, {"fc": [2.0]}, {"fc": [7.0]}])
    found = compare_runs(a.url, b.url)
    document: Any = found.to_dict()
    assert (document["ranks_compared"], document["ranks_only_in_a"], document["ranks_only_in_b"]) == (
        "1",
        "0",
        "2",
    )
    assert [one["change"] for one in document["largest_changes"]] == [0.5]
    assert repr(found) == (f"RunComparison({a.url + '/merged'!r}, {b.url + '/merged'!r}, 1 series, met=())")


def test_only_so_many_are_shown(tmp_path: Path) -> None:
    """The document is bounded, the frame has all of them."""
    a = written(tmp_path / "a", [{f"layer{place:02}": [1.0] for place in range(30)}])
    b = written(tmp_path / "b", [{f"layer{place:02}": [1.0 + place] for place in range(30)}])
    found = compare_runs(a.url, b.url, shown=4)
    document: Any = found.to_dict()
    assert [one["layer"] for one in document["largest_changes"]] == [
        f"layer{place}" for place in (29, 28, 27, 26)
    ]
    assert document["changes_left_out"] == 25
    assert found.changes().height == 30
    assert found.changes()["layer"].to_list()[-1] == "layer00"
