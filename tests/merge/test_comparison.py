"""The comparison of ranks against a reference that looks at one row at a time, in float64."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merge.run_folder import RunFolder, process_of, whole_run
from merge.synthetic_run import SyntheticRun
from torchinstruments.merge import comparison_plan, held_groups
from torchinstruments.merge.alignment import AlignmentFold
from torchinstruments.merge.comparison_blocks import COMPARISON_SCHEMA, compare_stretches
from torchinstruments.merge.comparison_cells import PROVENANCE
from torchinstruments.merge.comparison_plan import ComparisonPlan
from torchinstruments.merge.comparison_rows import ComparisonTask
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.plan import plan_merge
from torchinstruments.merge.reading import read_rank
from torchinstruments.records import Member

Row = dict[str, Any]

RANKS = 5
SHARD_KEYS = {
    0: "mesh dp=R tp=S(0)@0/2 ranks=0,2",
    1: "mesh dp=R tp=S(0)@1/2 ranks=1,3",
    2: "mesh dp=R tp=S(0)@0/2 ranks=0,2",
    3: "mesh dp=R tp=S(0)@1/2 ranks=1,3",
    4: "",
}


def table(run: RunFolder) -> list[Row]:
    """Reads ``comparison.parquet``."""
    return pq.read_table(run.root / "merged" / "comparison.parquet").to_pylist()


def lower_median(values: Iterable[float]) -> float:
    """The lower one of two middle values."""
    ordered = sorted(np.float64(value) for value in values)
    return float(ordered[(len(ordered) - 1) // 2])


def cell_of(row: Row) -> tuple[Any, ...] | str:
    """Returns the cell of a row of ``history``, or why it has none."""
    is_value = row["value"] is not None and math.isfinite(row["value"])
    scope = row["scope"]
    if scope == "local_shard" and not row["replica_key"]:
        return "shard_without_replica_key"
    if scope not in {"local", "local_shard"}:
        if is_value:
            return "scope_not_known"
        scope = "local"
    attempt = row["attempt"]
    moment = (
        (row["generation"], attempt, row["forward_in_attempt"], None)
        if attempt is not None
        else (row["generation"], None, None, row["forward_index"])
    )
    series = (row["layer"], row["call_index"], row["signal"], row["stage"], row["tensor_path"])
    key = row["replica_key"] if scope == "local_shard" else ""
    return (*moment, row["mode"], *series, row["backward_index"], row["metric"], scope, key)


def compared(cells: Mapping[tuple[Any, ...], Mapping[int, Row]]) -> list[Row]:
    """Returns the rows of the table by the definition, from the row of each rank in each cell."""
    found: list[Row] = []
    names = COMPARISON_SCHEMA.names
    for cell, rows in cells.items():
        held = {
            rank: row["value"]
            for rank, row in sorted(rows.items())
            if row["value"] is not None and math.isfinite(row["value"])
        }
        if len(held) < 2:
            continue
        low, high = min(held.values()), max(held.values())
        median = lower_median(held.values())
        distances = {rank: abs(value - median) for rank, value in held.items()}
        mad: float | None = lower_median(distances.values())
        far = next(rank for rank, one in distances.items() if one == max(distances.values()))
        furthest: int | None = far
        mads: float | None = None
        if len(held) == 2:
            reason, furthest, mad = "two_ranks", None, None
        elif low == high:
            reason, furthest = "all_equal", None
        elif mad == 0:
            reason = "mad_is_zero"
        else:
            reason, mads = "", distances[far] / mad
        differs = [name for name in PROVENANCE if len({row[name] for row in rows.values()}) > 1]
        values = (
            len(held),
            len(rows) - len(held),
            next(rank for rank, value in held.items() if value == low),
            low,
            next(rank for rank, value in held.items() if value == high),
            high,
            median,
            mad,
            furthest,
            None if furthest is None else held[furthest],
            mads,
            reason,
            ",".join(differs),
        )
        found.append(dict(zip(names, (*cell, *values), strict=True)))
    return sorted(found, key=in_order)


def in_order(row: Row) -> tuple[Any, ...]:
    """Sorts rows as the table is sorted."""
    attempt = -1 if row["attempt"] is None else row["attempt"]
    forward = row["forward_index"] if attempt < 0 else row["forward_in_attempt"]
    names = ("mode", "layer", "call_index", "signal", "stage", "tensor_path", "backward_index", "metric")
    return (row["generation"], attempt, forward, *(row[name] for name in names), row["replica_key"])


def gathered(rows: Mapping[int, Sequence[Row]]) -> tuple[dict[tuple[Any, ...], dict[int, Row]], Counter[str]]:
    """Returns the row of each rank in each cell, and how many rows have none."""
    cells: dict[tuple[Any, ...], dict[int, Row]] = {}
    lost: Counter[str] = Counter()
    for rank, own in rows.items():
        for row in own:
            cell = cell_of(row)
            if isinstance(cell, str):
                lost[cell] += 1
            else:
                cells.setdefault(cell, {})[rank] = row
    return cells, lost


class Holes:
    """A run of five ranks in which everything occurs that can."""

    def __init__(self, root: Path) -> None:
        self.run = RunFolder(root, world_size=RANKS).run()
        self.rows: dict[int, list[Row]] = {}
        members = [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(RANKS)]
        self.run.generation(0, members)
        self.run.generation(1, members)
        random = np.random.default_rng(7)
        for rank in range(RANKS):
            self.write_rank(rank, random)

    def write_rank(self, rank: int, random: np.random.Generator) -> None:
        """Steps 0 to 7 of one generation and 5 to 10 of the next, each in a process of its own."""
        for generation, attempts in ((0, range(8)), (1, range(5, 11))):
            process = f"{rank + 10 + 16 * generation:08x}"
            self.run.manifest(rank, process, generation=generation)
            sample_id = generation * 1_000_000_000
            parts: list[list[Row]] = [[] for _ in range(5)]
            samples: list[Row] = []
            for attempt in attempts:
                for forward in range(3 if attempt % 3 == 0 else 2):
                    if rank == 3 and attempt in {2, 6}:
                        continue
                    place = {
                        "generation": generation,
                        "sample_id": sample_id,
                        "attempt": attempt,
                        "forward_in_attempt": forward,
                        "forward_index": 100 * rank + sample_id % 1_000_000_000,
                        "mode": "eval" if forward == 2 and (rank, attempt) != (4, 6) else "train",
                    }
                    samples.append({name: value for name, value in place.items() if name != "mode"})
                    # Rank 1 cuts its parts elsewhere, and gradients come a part later than their forward.
                    cut = (attempt - attempts[0]) // (3 if rank == 1 else 2)
                    outputs, gradients = self.rows_of(rank, attempt, forward, random)
                    parts[cut] += [place | row for row in outputs]
                    parts[cut + 1] += [place | row for row in gradients]
                    sample_id += 1
            written = 0
            for rows in parts:
                if rows:
                    self.run.history(rank, rows, process, written, generation=generation)
                    self.rows.setdefault(rank, []).extend(self.filled(row) for row in rows)
                    written += 1
            self.run.samples(rank, samples, process, generation=generation)

    def filled(self, row: Row) -> Row:
        """Returns a row with what `RunFolder` adds."""
        return {
            "call_index": 0,
            "stage": "",
            "backward_index": 0,
            "grad_sync": "synced",
            "loss_scale": None,
            "scale_provenance": "none_seen",
            "scope": "local",
            "replica_key": "",
            "shape": "8x4",
            "dtype": "float32",
            "execution": "eager",
        } | row

    def rows_of(
        self, rank: int, attempt: int, forward: int, random: np.random.Generator
    ) -> tuple[list[Row], list[Row]]:
        """A discriminator's forward, a generator's, and now and then one for evaluation."""
        layers = [("disc", "gen", "disc")[forward], "shared"] + (["alone"] if rank == 2 else [])
        outputs: list[Row] = []
        gradients: list[Row] = []
        for layer in layers:
            for metric in ("mean", "std"):
                outputs.append(self.value(random, layer=layer, metric=metric))
                if forward < 2:
                    for backward in range(2 if layer == "gen" else 1):
                        row = self.value(random, layer=layer, metric=metric)
                        row |= {"signal": "output_gradient", "tensor_path": "grad_output.0"}
                        gradients.append(row | {"backward_index": backward})
        outputs += [
            {"layer": "rank", "metric": "mean", "value": float(rank)},
            {"layer": "equal", "metric": "mean", "value": 0.25},
            {"layer": "one", "metric": "mean", "value": 3.0 if rank == 2 and attempt == 3 else 1.0},
            {"layer": "few", "metric": "mean", "value": float(rank) if rank in {1, 4} else None},
            {"layer": "huge", "metric": "mean", "value": (-1.7e308, 0.0, 1.7e308, 1.0, 2.0)[rank]},
            {"layer": "calls", "metric": "mean", "value": float(random.normal()), "call_index": rank % 2},
            {
                "layer": "placed",
                "metric": "mean",
                "value": 1.0,
                "scope": "local_of_dtensor" if rank % 2 else "unknown",
            },
            {
                "layer": "shards",
                "metric": "rms",
                "signal": "parameter",
                "tensor_path": "weight",
                "value": float(random.normal()) if rank % 2 else float(attempt),
                "scope": "local_shard",
                "replica_key": SHARD_KEYS[rank],
                "shape": "2x4",
            },
        ]
        for row in outputs:
            row.setdefault("signal", "output")
            row.setdefault("tensor_path", "output")
            row["unavailable_reason"] = "" if row["value"] is not None else "overflow"
            if attempt == 3 and rank == 1:
                row |= {"loss_scale": 1024.0, "scale_provenance": "gradscaler"}
            elif attempt == 3:
                row |= {"loss_scale": 2048.0, "scale_provenance": "gradscaler"}
            if attempt == 4 and rank == 0:
                row["grad_sync"] = "local"
            if attempt == 7 and rank == 4:
                row["shape"], row["dtype"], row["execution"] = "7x4", "bfloat16", "forced_eager"
        return outputs, gradients

    def value(self, random: np.random.Generator, **row: str) -> Row:
        """A row with a random value of few digits, sometimes missing or not finite."""
        if random.random() < 0.1:
            return row | {"signal": "output", "value": None, "unavailable_reason": "no_finite_entries"}
        if random.random() < 0.05:
            return row | {"signal": "output", "value": math.inf, "unavailable_reason": ""}
        return row | {
            "signal": "output",
            "value": float(random.integers(-9, 9)) / 3,
            "unavailable_reason": "",
        }


@pytest.fixture(scope="module")
def holes(tmp_path_factory: pytest.TempPathFactory) -> Holes:
    """A run of five ranks in which everything occurs that can."""
    return Holes(tmp_path_factory.mktemp("holes") / "run")


@pytest.mark.parametrize("held_bytes", [0, 2_000, held_groups.MAX_HELD_BYTES])
@pytest.mark.parametrize(("max_cells", "task_cells"), [(1, 1), (1, 36_000), (60, 200), (36_000, 36_000)])
def test_every_cell_matches_the_reference(
    holes: Holes, monkeypatch: pytest.MonkeyPatch, max_cells: int, task_cells: int, held_bytes: int
) -> None:
    """All columns of all rows are right, however the run is cut, and whatever is kept between stretches."""
    monkeypatch.setattr(comparison_plan, "MAX_BLOCK_CELLS", max_cells)
    monkeypatch.setattr(comparison_plan, "MAX_TASK_CELLS", task_cells)
    monkeypatch.setattr(held_groups, "MAX_HELD_BYTES", held_bytes)
    result: Any = merge_run(holes.run.url).result
    cells, lost = gathered(holes.rows)
    expected = compared(cells)
    found = table(holes.run)
    assert len(found) == len(expected) > 300
    for row, wanted in zip(found, expected, strict=True):
        assert row == wanted
    section = result["comparison"]
    rows = sum(map(len, holes.rows.values()))
    values = sum(row["num_ranks"] for row in expected)
    without = sum(
        1 for rows in cells.values() for row in rows.values() if not math.isfinite(row["value"] or 0.0)
    ) + sum(1 for rows in cells.values() for row in rows.values() if row["value"] is None)
    assert section["cells"] == len(expected)
    assert section["rows"] == rows
    assert section["rows_compared"] == values
    assert section["rows_without_value"] == without
    assert section["rows_not_compared"] == {
        "shard_without_replica_key": lost["shard_without_replica_key"],
        "scope_not_known": lost["scope_not_known"],
        "two_processes": 0,
        "repeated": 0,
    }
    assert section["rows_of_one_rank"] == rows - values - without - lost.total()
    assert section["ambiguous_ranks"] == ""
    assert min(lost.values()) > 0


def test_the_widest_cell_of_each_series_stands_in_the_result(holes: Holes) -> None:
    """Of each series the widest cell is named, and of all series the widest, by the documented order."""
    result: Any = merge_run(holes.run.url).result
    by_series: dict[tuple[Any, ...], list[Row]] = {}
    names = ("layer", "call_index", "signal", "stage", "tensor_path", "metric")
    for row in compared(gathered(holes.rows)[0]):
        by_series.setdefault(tuple(row[name] for name in names), []).append(row)

    def width(row: Row) -> tuple[int, float]:
        if row["furthest_mads"] is not None:
            return (2, row["furthest_mads"])
        value, median = row["furthest_value"], row["median_of_ranks"]
        if value is not None:
            relative = abs(value - median) / max(abs(value), abs(median))
            return (3 if relative >= 1e-6 else 1, relative)
        return (0, row["highest_value"] - row["lowest_value"])

    best = {key: max(rows, key=width) for key, rows in by_series.items()}
    seen = 0
    for layer in result["layers"]:
        for tensor in layer["tensors"]:
            for statistic in tensor["statistics"]:
                named = {"layer": layer["layer"], "metric": statistic["metric"]} | tensor
                across, key = statistic["across_ranks"], tuple(named[name] for name in names)
                if key not in best:
                    assert across["furthest"] is None
                    assert across["compared_cells"] == 0
                    continue
                seen += 1
                row = best[key]
                assert across["furthest"] == record_of(row)
                assert across["compared_cells"] == len(by_series[key])
                zero = sum(one["unavailable_reason"] == "mad_is_zero" for one in by_series[key])
                assert across["cells_where_mad_is_zero"] == zero
    assert seen == len(best)
    named = sorted(key for key, row in best.items() if row["furthest_rank"] is not None)
    named.sort(key=lambda key: width(best[key]), reverse=True)
    assert 0 < len(named) <= 20
    widest = result["comparison"]["widest"]
    assert widest == [dict(zip(names, key, strict=True)) | record_of(best[key]) for key in named]


def lone_run(root: Path, rows: Iterable[tuple[int, str, Sequence[float]]]) -> RunFolder:
    """Writes a run from attempt, layer and the value of each of eight ranks."""
    run = whole_run(root, 8, num_samples=3)
    for rank in range(8):
        own = [
            {"sample_id": i, "attempt": i, "layer": layer, "value": values[rank]}
            for i, layer, values in sorted(rows, key=lambda row: row[:2])
        ]
        run.history(rank, own, process_of(rank))
    return run


NOISE = [1.0 + 1e-7 * rank for rank in range(7)]


@pytest.mark.parametrize("cells_of_stretch", [1, comparison_plan.MAX_BLOCK_CELLS])
def test_one_rank_off_among_equal_ones_comes_first(
    cells_of_stretch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes before any number of median deviations, a difference of rounding behind, in series and list."""
    monkeypatch.setattr(comparison_plan, "MAX_BLOCK_CELLS", cells_of_stretch)
    equal = [1.0] * 7
    rows = [
        (0, "lone", [*NOISE, 2.0]),
        (1, "lone", [*equal, 1000.0]),
        (2, "lone", [*equal, 500.0]),
        (0, "rounding", [*equal, 1.0 + 2**-52]),
        (1, "rounding_then_noise", [*equal, 1.0 + 2**-52]),
        (2, "rounding_then_noise", [*NOISE, 1.5]),
        (0, "overflow", [*(-1e308 + rank * 1e306 for rank in range(7)), 1.7e308]),
        (1, "equal", [1.0] * 8),
    ]
    run = lone_run(tmp_path / "run", rows)
    merged = merge_run(run.url)
    found = [(one.layer, one.attempt, one.rank, one.value, one.unavailable_reason) for one in merged.widest]
    assert found == [
        ("overflow", 0, 7, 1.7e308, "overflow"),
        ("lone", 1, 7, 1000.0, "mad_is_zero"),
        ("rounding_then_noise", 2, 7, 1.5, ""),
        ("rounding", 0, 7, 1.0 + 2**-52, "mad_is_zero"),
    ]
    assert [one.mads is None for one in merged.widest] == [True, True, False, True]
    assert "widest: overflow output mean, rank 7: 1.7e+308, too far from the median -9.7e+307" in repr(merged)
    layers: Any = merged.result["layers"]
    furthest = {
        layer["layer"]: tensor["statistics"][0]["across_ranks"]["furthest"]
        for layer in layers
        for tensor in layer["tensors"]
    }
    for one in merged.widest:
        assert (furthest[one.layer]["attempt"], furthest[one.layer]["rank"]) == (one.attempt, one.rank)
    html: str = merged._repr_html_()
    assert html.count("<td>mad_is_zero</td>") == 2


def test_ranks_off_among_equal_ones_leave_places_to_median_deviations(tmp_path: Path) -> None:
    """Of twenty places ten stay for series with a number of median deviations, where there are as many."""
    clear = [(0, f"clear{i:02}", [*[1.0] * 7, 2.0 + i]) for i in range(25)]
    noisy = [(0, f"noisy{i:02}", [*NOISE, 2.0 + i]) for i in range(12)]
    layers = [one.layer for one in merge_run(lone_run(tmp_path / "run", clear + noisy).url).widest]
    assert layers == [
        *(f"clear{i:02}" for i in range(24, 14, -1)),
        *(f"noisy{i:02}" for i in range(11, 1, -1)),
    ]
    layers = [one.layer for one in merge_run(lone_run(tmp_path / "other", clear + noisy[:3]).url).widest]
    assert layers == [*(f"clear{i:02}" for i in range(24, 7, -1)), "noisy02", "noisy01", "noisy00"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1000.0, "1000, where half of the ranks or more hold 1"),
        (1.00001, "1.00001, where half of the ranks or more hold 1.0"),
    ],
)
def test_the_headline_says_what_the_lone_rank_holds(tmp_path: Path, value: float, text: str) -> None:
    """Value and what the others hold stand in the digest, with digits that tell them apart."""
    merged = merge_run(lone_run(tmp_path / "run", [(1, "fc", [*[1.0] * 3, value, *[1.0] * 4])]).url)
    assert f"widest: fc output mean, rank 3: {text}, at generation 0, attempt 1" in repr(merged)


def record_of(row: Row) -> Row:
    """Returns a row of the table as it stands in ``result.json``."""
    same = ("unavailable_reason", "median_of_ranks", "mad_of_ranks", "num_ranks", "num_ranks_without_value")
    place = ("generation", "attempt", "forward_in_attempt", "forward_index", "mode", "backward_index")
    return {
        "rank": row["furthest_rank"],
        "value": row["furthest_value"],
        "mads": row["furthest_mads"],
        "lowest": {"rank": row["lowest_rank"], "value": row["lowest_value"]},
        "highest": {"rank": row["highest_rank"], "value": row["highest_value"]},
        **{name: row[name] for name in (*same, *place, "scope", "replica_key", "differs_in")},
    }


def test_values_equal_to_the_rank_are_never_averaged(tmp_path: Path) -> None:
    """Where each rank holds its own number, lowest is 0 and highest N - 1, and their mean is nowhere."""
    run = constant_run(tmp_path / "run", [0.0, 1.0, 2.0, 3.0], num_samples=1)
    result: Any = merge_run(run.url).result
    (row,) = table(run)
    assert (row["lowest_rank"], row["lowest_value"]) == (0, 0.0)
    assert (row["highest_rank"], row["highest_value"]) == (3, 3.0)
    assert (row["median_of_ranks"], row["mad_of_ranks"]) == (1.0, 1.0)
    assert (row["furthest_rank"], row["furthest_value"], row["furthest_mads"]) == (3, 3.0, 2.0)
    assert 1.5 not in {value for value in row.values() if isinstance(value, float)}
    text = (run.root / "merged" / "result.json").read_text()
    assert "1.5" not in text.partition('"comparison"')[2].partition('"layers"')[0]
    assert result["comparison"]["rows_compared"] == 4


def constant_run(root: Path, values: Sequence[float], num_samples: int) -> RunFolder:
    """Writes a run in which the value of each rank at attempt i is its own plus i."""
    run = whole_run(root, len(values), num_samples)
    for rank, value in enumerate(values):
        rows = [{"sample_id": i, "attempt": i, "value": value + i} for i in range(num_samples)]
        run.history(rank, rows, process_of(rank))
    return run


def test_two_ranks_have_no_furthest(tmp_path: Path) -> None:
    """Of two ranks nobody can say which one is off: lowest and highest are named, and no furthest."""
    run = constant_run(tmp_path / "run", [0.0, 10.0], num_samples=3)
    layers: Any = merge_run(run.url).result["layers"]
    furthest = layers[0]["tensors"][0]["statistics"][0]["across_ranks"]["furthest"]
    assert (furthest["rank"], furthest["mads"], furthest["mad_of_ranks"]) == (None, None, None)
    assert furthest["unavailable_reason"] == "two_ranks"
    assert furthest["lowest"] == {"rank": 0, "value": 0.0}
    assert furthest["highest"] == {"rank": 1, "value": 10.0}


def test_without_attempts_forwards_are_known_by_their_index(tmp_path: Path) -> None:
    """A run without an optimizer is compared by forward_index, and its table says so."""
    run = RunFolder(tmp_path / "run", world_size=3).run()
    for rank in range(3):
        run.manifest(rank, process_of(rank))
        rows = [
            {"sample_id": i, "attempt": None, "forward_index": 10 * i, "value": float(rank * i)}
            for i in range(4)
        ]
        run.history(rank, rows, process_of(rank))
    merge_run(run.url)
    found = [(row["attempt"], row["forward_in_attempt"], row["forward_index"]) for row in table(run)]
    assert found == [(None, None, 0), (None, None, 10), (None, None, 20), (None, None, 30)]
    assert [row["highest_value"] for row in table(run)] == [0.0, 2.0, 4.0, 6.0]


def test_two_processes_of_a_rank_are_not_compared(tmp_path: Path) -> None:
    """Forwards that two processes of one rank have are left out of the comparison, counted, and named."""
    run = constant_run(tmp_path / "run", [0.0, 1.0, 2.0], num_samples=4)
    run.manifest(1, "000000ee")
    run.history(1, [{"sample_id": i, "attempt": i, "value": 99.0} for i in (2, 3)], "000000ee")
    # Interleaved processes, of which each has forwards of its own.
    run.history(2, [{"sample_id": 9, "attempt": 9, "value": 9.0}], "000000ef")
    run.history(0, [{"sample_id": 9, "attempt": 9, "value": 8.0}], "000000ed")
    result: Any = merge_run(run.url).result
    assert [(row["attempt"], row["num_ranks"], row["highest_value"]) for row in table(run)] == [
        (0, 3, 2.0),
        (1, 3, 3.0),
        (2, 2, 4.0),
        (3, 2, 5.0),
        (9, 2, 9.0),
    ]
    assert result["comparison"]["rows_not_compared"]["two_processes"] == 4
    assert result["comparison"]["ambiguous_ranks"] == "1"


def test_a_process_without_comparable_rows_holds_no_forward(tmp_path: Path) -> None:
    """Rows that belong to no cell do not make a forward one of two processes."""
    run = constant_run(tmp_path / "run", [0.0, 1.0], num_samples=1)
    run.manifest(1, "000000ee")
    run.history(1, [{"sample_id": 0, "attempt": 0, "value": 9.0, "scope": "unknown"}], "000000ee")
    result: Any = merge_run(run.url).result
    assert [(row["num_ranks"], row["highest_value"]) for row in table(run)] == [(2, 1.0)]
    assert result["comparison"]["rows_not_compared"]["two_processes"] == 0
    assert result["comparison"]["rows_not_compared"]["scope_not_known"] == 1
    assert result["comparison"]["ambiguous_ranks"] == ""


def test_a_row_that_stands_twice_counts_once(tmp_path: Path) -> None:
    """Of two rows of one process and cell the later one counts, and the other one is told."""
    run = constant_run(tmp_path / "run", [0.0, 1.0, 2.0], num_samples=2)
    rows = [{"sample_id": i, "attempt": i, "value": value} for i, value in ((0, 1.0), (1, 2.0), (1, 50.0))]
    run.history(1, rows, process_of(1))
    result: Any = merge_run(run.url).result
    assert [row["highest_value"] for row in table(run)] == [2.0, 50.0]
    assert result["comparison"]["rows"] == 7
    assert result["comparison"]["rows_compared"] == 6
    assert result["comparison"]["rows_not_compared"]["repeated"] == 1
    assert result["comparison"]["rows_of_one_rank"] == 0


@pytest.mark.parametrize("cut_apart", [False, True])
def test_many_ranks_match_polars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_apart: bool) -> None:
    """Nine ranks, some without some samples, agree with Polars over all rows, however parts are cut."""
    monkeypatch.setattr(comparison_plan, "MAX_BLOCK_VALUES", 9 * 500)
    folder = RunFolder(tmp_path / "run", world_size=9)
    SyntheticRun(folder, 40, 4, part_samples=11, cut_apart=cut_apart, late_gradients=cut_apart).write(
        {3: [0, 5, 6], 7: range(20, 30)}
    )
    merged = merge_run(folder.url)
    assert merged.complete
    keys = ["attempt", "layer", "signal", "metric"]
    value, median = pl.col("value"), pl.col("median_of_ranks")
    history = pl.scan_parquet(folder.root / "rank-*" / "history.parts" / "*.parquet")
    rows = history.select(*keys, "rank", "value").collect()
    lower = value.sort().get((pl.len() - 1) // 2)
    rows = rows.with_columns(lower.over(keys).alias("median_of_ranks"))
    rows = rows.with_columns((value - median).abs().alias("distance"))
    ordered = rows.sort("rank")
    distance = pl.col("distance")
    expected = (
        ordered.group_by(keys, maintain_order=True)
        .agg(
            pl.len().cast(pl.Int32).alias("num_ranks"),
            pl.col("rank").get(value.arg_min()).alias("lowest_rank"),
            value.min().alias("lowest_value"),
            pl.col("rank").get(value.arg_max()).alias("highest_rank"),
            value.max().alias("highest_value"),
            median.first(),
            distance.sort().get((pl.len() - 1) // 2).alias("mad_of_ranks"),
            pl.col("rank").get(distance.arg_max()).alias("furthest_rank"),
            (distance.max() / distance.sort().get((pl.len() - 1) // 2)).alias("furthest_mads"),
        )
        .sort(keys)
    )
    found = pl.read_parquet(folder.root / "merged" / "comparison.parquet")
    assert found.height == expected.height == 40 * 4 * 2 * 9
    is_equal = pl.col("unavailable_reason") == "all_equal"
    assert found.filter(is_equal)["metric"].unique().to_list() == ["nonfinite_fraction"]
    differing = found.filter(~is_equal).select(expected.columns)
    assert differing.equals(expected.filter(pl.col("metric") != "nonfinite_fraction"))


def test_the_table_is_as_declared(holes: Holes) -> None:
    """The file holds the declared columns as plain text and numbers, without a stored Arrow schema."""
    merge_run(holes.run.url)
    with pq.ParquetFile(holes.run.root / "merged" / "comparison.parquet") as file:
        assert file.schema_arrow.names == COMPARISON_SCHEMA.names
        assert file.schema_arrow.types == COMPARISON_SCHEMA.types
        assert file.metadata.metadata is None
        groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        assert max(groups) <= 36_000


def shard_run(root: Path, rows: Mapping[int, Sequence[Row]]) -> Any:
    """Merges a run of the given rows of one sharded weight; returns what is combined of it, by metric."""
    run = RunFolder(root, world_size=4).run()
    for rank, own in rows.items():
        run.manifest(rank, process_of(rank))
        place = {"signal": "parameter", "tensor_path": "weight", "scope": "local_shard"}
        run.history(rank, [place | row for row in own], process_of(rank))
    (layer,) = merge_run(run.url).result["layers"]  # type: ignore[misc] - a list
    return {one["metric"]: one["combined"] for one in layer["tensors"][0]["statistics"]}


def shard_rows(rank: int, weight: Any, attempt: int = 0) -> list[Row]:
    """What a rank measures of its half of a weight: ranks 0 and 2 have the first, 1 and 3 the second."""
    half = rank % 2
    part = np.array_split(weight, 2)[half]
    finite = part[np.isfinite(part)]
    numbers = {
        "min": finite.min(initial=np.inf),
        "max": finite.max(initial=-np.inf),
        "mean": finite.mean() if finite.size else math.inf,
        "std": finite.std() if finite.size else math.inf,
        "rms": math.sqrt((finite**2).mean()) if finite.size else math.inf,
        "nonfinite_fraction": 1 - finite.size / part.size if part.size else math.inf,
        "zero_fraction": float((part == 0).mean()) if part.size else math.inf,
    }
    key = f"mesh dp=R tp=S(0)@{half}/2 ranks={half},{half + 2}"
    shape = "x".join(map(str, part.shape))
    found: list[Row] = []
    for metric, value in numbers.items():
        is_there = math.isfinite(value)
        row: Row = {"metric": metric, "value": float(value) if is_there else None}
        row |= {"sample_id": attempt, "attempt": attempt}
        row |= {"unavailable_reason": "" if is_there else "empty", "shape": shape, "replica_key": key}
        found.append(row)
    return found


@pytest.mark.parametrize("num_rows", [5, 1])
def test_parts_give_the_numbers_of_the_whole_tensor(tmp_path: Path, num_rows: int) -> None:
    """Uneven and empty parts of a weight give its exact extrema, fractions and norm; replicas count once."""
    random = np.random.default_rng(5)
    weights = [random.integers(-4, 4, (num_rows, 3)) / 8 for _ in range(2)]
    rows = {rank: shard_rows(rank, weights[0]) + shard_rows(rank, weights[1], 1) for rank in range(4)}
    combined = shard_run(tmp_path / "run", rows)
    weight = weights[1]
    assert {name: one and one["statistic"] for name, one in combined.items()} == {
        "min": "min_of_ranks",
        "max": "max_of_ranks",
        "mean": None,
        "std": None,
        "rms": "l2_norm_of_ranks_from_sum_of_squares",
        "nonfinite_fraction": "nonfinite_fraction_of_ranks_by_size",
        "zero_fraction": "zero_fraction_of_ranks_by_size",
    }
    assert combined["min"]["value"] == weight.min()
    assert combined["max"]["value"] == weight.max()
    assert combined["nonfinite_fraction"]["value"] == 0.0
    assert math.isclose(combined["zero_fraction"]["value"], (weight == 0).mean(), rel_tol=1e-14)
    assert math.isclose(combined["rms"]["value"], np.linalg.norm(weight), rel_tol=1e-14)
    assert (combined["rms"]["num_parts"], combined["rms"]["attempt"]) == (2, 1)


@pytest.mark.parametrize("cells_of_stretch", [1, 40, comparison_plan.MAX_BLOCK_CELLS])
def test_parts_are_combined_at_the_latest_forward_that_has_all(
    cells_of_stretch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later forwards without a part, with unequal replicas or without a norm hide nothing, however cut."""
    monkeypatch.setattr(comparison_plan, "MAX_BLOCK_CELLS", cells_of_stretch)
    weights = [np.arange(1.0, 13.0).reshape(4, 3) + attempt for attempt in range(7)]
    weights[4][3, 2] = math.inf
    rows: dict[int, list[Row]] = {rank: [] for rank in range(4)}
    for rank in rows:
        for attempt, weight in enumerate(weights):
            if attempt < 5 or rank == 0 or (attempt == 5 and rank in {2, 3}):
                unequal = 0.25 if (attempt, rank) == (5, 2) else 0.0
                rows[rank] += shard_rows(rank, weight + unequal, attempt)
    combined = shard_run(tmp_path / "run", rows)
    found = {name: one and (one["attempt"], one["value"]) for name, one in combined.items()}
    assert math.isclose(found["rms"][1], np.linalg.norm(weights[3]), rel_tol=1e-14)
    assert {name: one and one[0] for name, one in found.items()} == {
        "min": 4,
        "max": 4,
        "mean": None,
        "std": None,
        "rms": 3,
        "nonfinite_fraction": 5,
        "zero_fraction": 5,
    }
    assert found["nonfinite_fraction"][1] == 0.0
    assert (found["min"], found["max"]) == ((4, 5.0), (4, 15.0))


def test_nothing_is_combined_that_is_not_exact(tmp_path: Path) -> None:
    """Without all parts, with replicas that differ, or with nonfinite entries there is no such number."""
    weight = np.arange(1.0, 13.0).reshape(4, 3)
    one_half = shard_run(tmp_path / "half", {rank: shard_rows(rank, weight) for rank in (0, 2)})
    assert set(one_half.values()) == {None}
    other = weight + 1.0
    apart = shard_run(
        tmp_path / "apart", {rank: shard_rows(rank, other if rank == 3 else weight) for rank in range(4)}
    )
    assert (apart["rms"], apart["max"]) == (None, None)
    assert apart["zero_fraction"]["value"] == 0.0
    weight[0, 0] = math.inf
    infinite = shard_run(tmp_path / "infinite", {rank: shard_rows(rank, weight) for rank in range(4)})
    assert infinite["rms"] is None
    assert math.isclose(infinite["nonfinite_fraction"]["value"], 1 / 12, rel_tol=1e-14)
    assert infinite["max"]["value"] == 12.0
    one_more = {rank: shard_rows(rank, weight) for rank in range(4)}
    for row in one_more[2]:
        row["shape"] = "3x3"
    assert set(shard_run(tmp_path / "shapes", one_more).values()) == {None}


def planned(folder: RunFolder, num_series: int) -> tuple[ComparisonPlan, list[ComparisonTask]]:
    """Reads the ranks of a run and cuts it."""
    merge_plan = plan_merge([folder.url], None, None)
    plan, alignment = ComparisonPlan(), AlignmentFold()
    for task in merge_plan.tasks:
        reading = read_rank(task)
        alignment.add(reading.rank, reading.keys)
        plan.add_rank(reading.rank, reading.row_spans)
    return plan, list(plan.tasks(alignment.samples, num_series, "run-a", merge_plan.sources))


def test_a_stretch_is_bounded_whatever_the_length_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the run gives twice the tasks, each of as many stretches, forwards and row groups as before."""
    sizes: list[list[tuple[list[int], int]]] = []
    for samples in (40, 80):
        folder = RunFolder(tmp_path / str(samples), world_size=3)
        run = SyntheticRun(folder, samples, 2, part_samples=5).write()
        num_series = run.rows // samples
        monkeypatch.setattr(comparison_plan, "MAX_BLOCK_VALUES", 3 * 10 * num_series)
        monkeypatch.setattr(comparison_plan, "MAX_TASK_CELLS", 20 * num_series)
        plan, tasks = planned(folder, num_series)
        assert plan.num_rows == 3 * run.rows
        sizes.append(
            [
                (
                    [last[1] - first[1] + 1 for first, last in task.stretches],
                    sum(len(spans) for _, spans in task.spans),
                )
                for task in tasks
            ]
        )
    assert sizes == [[([10, 10], 12)] * 2, [([10, 10], 12)] * 4]


def test_a_task_decodes_each_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However ranks cut their parts and however late gradients are; without room to keep rows, more often."""
    folder = RunFolder(tmp_path / "run", world_size=5)
    run = SyntheticRun(folder, 40, 2, part_samples=5, cut_apart=True, late_gradients=True).write()
    num_series = run.rows // run.samples
    monkeypatch.setattr(comparison_plan, "MAX_BLOCK_VALUES", 5 * 4 * num_series)
    _, (task,) = planned(folder, num_series)
    assert len(task.stretches) == 10
    decoded: list[int] = []
    read = held_groups.reread_groups

    def reading(*arguments: Any) -> Any:
        decoded[-1] += len(arguments[-1])
        return read(*arguments)

    monkeypatch.setattr(held_groups, "reread_groups", reading)
    tables: list[pa.Table] = []
    for held_bytes in (held_groups.MAX_HELD_BYTES, 0):
        monkeypatch.setattr(held_groups, "MAX_HELD_BYTES", held_bytes)
        decoded.append(0)
        tables.append(pa.concat_tables(block.table for block in compare_stretches(task)))
    once = sum(len(spans) for _, spans in task.spans)
    assert decoded[0] == once
    assert decoded[1] > 2 * once
    assert tables[0].num_rows == run.rows
    assert tables[0].equals(tables[1])
