"""The rank that is late by its own work, told apart from those that wait for it."""

import dataclasses
import math
from pathlib import Path
from statistics import median, median_low
from typing import Any

import numpy as np
import pytest

from merge.run_folder import RunFolder, process_of
from torchinstruments.merge import own_work
from torchinstruments.merge.engine import merge_run

Row = dict[str, Any]


def own_work_of(run: RunFolder) -> dict[str, Any]:
    """Merges a run and returns the section."""
    section: Any = merge_run(run.url).result["own_work"]
    return section


def training(
    run: RunFolder, gaps: dict[int, float], *, generation: int = 0, hosts: str = "", num_attempts: int = 40
) -> dict[int, list[Row]]:
    """Writes steps in which every rank waits for the slowest one, with some noise."""
    random = np.random.default_rng(generation)
    rows: dict[int, list[Row]] = {}
    run.generation(generation)
    slowest = max(gaps.values())
    for rank, gap in gaps.items():
        process = f"{rank:07x}{generation}"
        host = f"host-{hosts[rank]}" if hosts else "host-a"
        run.manifest(rank, process, generation=generation, host=host)
        rows[rank] = [
            {
                "attempt": attempt,
                "gap_s": 0.0 if attempt == 0 else gap + 0.001 * random.random(),
                "forward_s": 0.1,
                "backward_s": 0.2 + slowest - gap,
                "optimizer_s": 0.01,
            }
            for attempt in range(num_attempts)
        ]
        run.steps(rank, rows[rank], process, generation=generation)
    return rows


def test_the_late_rank_is_told_from_those_that_wait(tmp_path: Path) -> None:
    """The rank with the long gap is late; the others, whose backwards are longer for it, wait."""
    run = RunFolder(tmp_path / "run", world_size=5).run()
    rows = training(run, {0: 0.01, 1: 0.01, 2: 0.01, 3: 0.2, 4: 0.01})
    [record] = own_work_of(run)["generations"]
    assert record["judged"]
    assert (record["late_ranks"], record["waiting_ranks"]) == ("3", "0-2,4")
    assert (record["clock"], record["common_attempts"]) == ("host", 39)
    gaps = {rank: median(row["gap_s"] for row in own[1:]) for rank, own in rows.items()}
    centre = median_low(gaps.values())
    mad = median_low(abs(gap - centre) for gap in gaps.values())
    assert record["gap_s_median_of_ranks"] == centre
    assert record["gap_s_mad_of_ranks"] == mad
    latest = record["latest"]
    assert (latest["rank"], latest["host"]) == (3, "host-a")
    assert latest["gap_s"] == gaps[3]
    assert latest["late_by_s"] == gaps[3] - centre
    assert latest["late_by_mads"] == pytest.approx((gaps[3] - centre) / mad)
    lengths = [
        median(row["gap_s"] + row["forward_s"] + row["backward_s"] + row["optimizer_s"] for row in own[1:])
        for own in rows.values()
    ]
    assert record["attempt_s_median_of_ranks"] == pytest.approx(median_low(lengths))
    assert latest["share_of_attempt"] == pytest.approx(latest["late_by_s"] / median_low(lengths))
    assert [one["rank"] for one in record["ranks"]] == sorted(gaps, key=lambda rank: (-gaps[rank], rank))


def test_the_answer_has_types(tmp_path: Path) -> None:
    """A generation that cannot be judged says why; of another the late rank stands with its seconds."""
    run = RunFolder(tmp_path / "run", world_size=3).run()
    training(run, {0: 0.01, 1: 0.2, 2: 0.01})
    training(run, {0: 0.01}, generation=1)
    merged = merge_run(run.url)
    judged, other = merged.own_work
    section: Any = merged.result["own_work"]
    assert (judged.generation, judged.judged, judged.late_ranks, judged.waiting_ranks) == (
        0,
        True,
        "1",
        "0,2",
    )
    assert judged.latest is not None
    assert dataclasses.asdict(judged.latest) == section["generations"][0]["latest"]
    assert (judged.latest.rank, round(judged.latest.late_by_s, 2)) == (1, 0.19)
    assert (other.judged, other.unavailable_reason, other.latest) == (False, "single_rank", None)


def test_ranks_that_differ_by_little_are_not_late(tmp_path: Path) -> None:
    """A gap that is far from the others in their own measure and costs nothing is no finding."""
    run = RunFolder(tmp_path / "run", world_size=4).run()
    training(run, {0: 0.010, 1: 0.010, 2: 0.010, 3: 0.013})
    [record] = own_work_of(run)["generations"]
    assert (record["late_ranks"], record["waiting_ranks"], record["latest"]) == ("", "", None)


def test_two_ranks_are_enough(tmp_path: Path) -> None:
    """Of two ranks the reference is the quicker one."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    training(run, {0: 0.2, 1: 0.01})
    [record] = own_work_of(run)["generations"]
    assert (record["late_ranks"], record["waiting_ranks"]) == ("0", "1")
    assert record["latest"]["late_by_mads"] is None


@pytest.mark.parametrize(("slower_s", "late_ranks"), [(0.0, ""), (0.2, "1")])
def test_of_two_noisy_ranks_only_the_slow_one_is_late(
    tmp_path: Path, slower_s: float, late_ranks: str
) -> None:
    """By the medians alone noise would make one of two equal ranks late, for two have no deviation."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    random = np.random.default_rng(7)
    gaps = random.exponential(0.1, (2, 30)) + np.array([[0.0], [slower_s]])
    for rank in range(2):
        run.steps(rank, [{"attempt": i, "gap_s": gaps[rank, i]} for i in range(30)], process_of(rank))
    [record] = own_work_of(run)["generations"]
    assert record["late_ranks"] == late_ranks
    first = record["ranks"][0]
    assert first["share_of_attempt"] > own_work.MIN_SHARE
    own, other = gaps[first["rank"], 1:], gaps[1 - first["rank"], 1:]
    assert first["later_share"] == np.mean(own > other)


def test_a_slow_host_is_found_though_ranks_move(tmp_path: Path) -> None:
    """A host whose ranks are late in two generations is named with both, whatever the ranks are."""
    run = RunFolder(tmp_path / "run", world_size=4).run()
    training(run, {0: 0.3, 1: 0.01, 2: 0.01, 3: 0.01}, hosts="abcd")
    training(run, {0: 0.01, 1: 0.01, 2: 0.3, 3: 0.01}, hosts="bcad", generation=1)
    section = own_work_of(run)
    assert [one["late_ranks"] for one in section["generations"]] == ["0", "2"]
    assert section["late_hosts"] == [
        {
            "host": "host-a",
            "judged_generations": 2,
            "late_in": [{"generation": 0, "ranks": "0"}, {"generation": 1, "ranks": "2"}],
        }
    ]


@pytest.mark.parametrize("rows", [[{"attempt": 0}], [{"attempt": i, "gap_s": math.nan} for i in range(40)]])
def test_steps_without_times_are_told(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """One attempt a rank, and gaps that are no numbers: a record with the reason."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    for rank in range(2):
        run.steps(rank, rows, process_of(rank))
    training(run, {0: 0.01}, generation=1)
    run.steps(1, rows, process_of(1), sequence=1, generation=1)
    records = own_work_of(run)["generations"]
    assert [(one["generation"], one["judged"], one["unavailable_reason"]) for one in records] == [
        (0, False, "no_timed_attempts"),
        (1, False, "single_rank"),
    ]
    assert [(one["ranks_with_times"], one["common_attempts"]) for one in records] == [("", 0), ("0", 39)]
    assert records[0]["clock"] is None


@pytest.mark.parametrize(("shared", "reason"), [(range(1, 35), "other_model_trained"), (range(1, 20), "")])
def test_attempts_in_which_another_model_was_trained_judge_nobody(
    tmp_path: Path, shared: range, reason: str
) -> None:
    """A rank that seems late in them is not; where enough others are left, those are looked at."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    for rank, gap in enumerate((0.01, 0.3)):
        rows: list[Row] = [{"attempt": i, "gap_s": None if i in shared else gap} for i in range(40)]
        run.steps(rank, rows, process_of(rank))
    [record] = own_work_of(run)["generations"]
    assert (record["unavailable_reason"], record["judged"]) == (reason, not reason)
    assert record["late_ranks"] == ("" if reason else "1")


def test_what_the_clock_cannot_tell_is_not_told(tmp_path: Path) -> None:
    """A lone rank, few attempts in common, and clocks that differ: no verdict, and the reason."""
    run = RunFolder(tmp_path / "run", world_size=3).run()
    training(run, {0: 0.3})
    training(run, {0: 0.3, 1: 0.01, 2: 0.01}, generation=1, num_attempts=own_work.MIN_ATTEMPTS)
    rows = training(run, {0: 0.3, 1: 0.01}, generation=2)
    run.steps(0, [row | {"clock": "device"} for row in rows[0]], "00000002", generation=2)
    records = own_work_of(run)["generations"]
    assert [one["unavailable_reason"] for one in records] == [
        "single_rank",
        "few_common_attempts",
        "clock_differs",
    ]
    assert [one["common_attempts"] for one in records] == [39, 9, 39]
    assert all(one["late_ranks"] == "" and one["latest"] is None for one in records)
    assert records[2]["clock"] is None


def test_several_optimizers_share_an_attempt(tmp_path: Path) -> None:
    """The gap of an attempt counts once, and the time of each of its optimizers."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    run.generation()
    for rank in range(2):
        run.manifest(rank, process_of(rank))
        rows = [
            {"attempt": attempt, "optimizer": optimizer, "optimizer_s": 0.5, "gap_s": 1.0, "forward_s": 2.0}
            for attempt in range(20)
            for optimizer in range(2)
        ]
        run.steps(rank, rows[:21], process_of(rank))
        run.steps(rank, rows[21:], process_of(rank), 1)
    [record] = own_work_of(run)["generations"]
    assert record["gap_s_median_of_ranks"] == 1.0
    assert record["attempt_s_median_of_ranks"] == 1.0 + 2.0 + 0.03 + 2 * 0.5
    assert record["common_attempts"] == 19


def test_of_a_long_run_every_rank_chooses_the_same_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound a fixed part of the attempts is looked at, the same on each rank however it is cut."""
    monkeypatch.setattr(own_work, "MAX_ATTEMPTS", 50)
    run = RunFolder(tmp_path / "run", world_size=2).run()
    run.generation()
    for rank in range(2):
        run.manifest(rank, process_of(rank))
        rows = [{"attempt": attempt, "gap_s": float(attempt)} for attempt in range(400)]
        cut = 100 + 150 * rank
        run.steps(rank, rows[:cut], process_of(rank))
        run.steps(rank, rows[cut:], process_of(rank), 1)
    [record] = own_work_of(run)["generations"]
    assert record["common_attempts"] == 50
    assert [one["late_by_s"] for one in record["ranks"]] == [0.0, 0.0]
    assert 100 < record["gap_s_median_of_ranks"] < 300
