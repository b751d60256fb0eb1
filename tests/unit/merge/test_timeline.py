"""Stretches of attempts: counts and loss scales against sums over the rows themselves."""

import io

import numpy as np
import polars as pl
import pytest

from torchinstruments.merge import timeline
from torchinstruments.merge.timeline import TimelineFold, TimelineTally

OUTCOMES = ("applied", "skipped", "abandoned", "unknown")


def tally_of(attempt: np.ndarray, outcome: np.ndarray, scale: np.ndarray, size: int) -> TimelineTally:
    """Returns the stretches of some rows of generation 0, given a few rows at a time."""
    tally = TimelineTally()
    for start in range(0, len(attempt), size):
        rows = slice(start, start + size)
        own = attempt[rows]
        tally.add_steps(np.zeros_like(own), own, outcome[rows], scale[rows], np.full(len(own), np.nan))
    return tally


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_a_long_run_has_few_stretches_that_count_every_row(size: int) -> None:
    """However many rows come at once, the table is that of a plain sum over stretches of equal length."""
    random = np.random.default_rng(5)
    attempt = np.arange(1000) if size == 1 else np.arange(5000)
    outcome = random.integers(0, 4, len(attempt))
    scale = np.where(random.random(len(attempt)) < 0.2, np.nan, random.integers(1, 9, len(attempt)))
    keys = np.stack(
        [
            np.zeros(400, np.int64),
            np.sort(random.choice(attempt, 400, replace=False)),
            np.zeros(400, np.int64),
        ],
        1,
    )
    fold = TimelineFold()
    fold.add_rank(3, tally_of(attempt, outcome, scale, size), keys)
    fold.add_rank(4, tally_of(attempt[:70], outcome[:70], scale[:70], size), keys[:1])
    found = pl.read_parquet(io.BytesIO(fold.encoded(keys)))
    width = int(2 ** np.ceil(np.log2(len(attempt) / timeline.MAX_STRETCHES)))
    assert (found["last"] - found["first"] + 1).unique().to_list() == [width]
    assert found.filter(rank=3).height <= timeline.MAX_STRETCHES
    for row in found.iter_rows(named=True):
        number = len(attempt) if row["rank"] == 3 else 70
        inside = np.flatnonzero((attempt[:number] >= row["first"]) & (attempt[:number] <= row["last"]))
        assert [row[name] for name in OUTCOMES] == [int((outcome[inside] == one).sum()) for one in range(4)]
        measured = int(((keys[:, 1] >= row["first"]) & (keys[:, 1] <= row["last"])).sum())
        assert row["samples_of_any_rank"] == measured
        assert row["rank"] == 4 or row["samples"] == measured
        known = scale[inside][~np.isnan(scale[inside])]
        expected = [known.min(), known.max(), known[-1]] if len(known) else [None] * 3
        assert [row[f"loss_scale_{one}"] for one in ("lowest", "highest", "last")] == expected


def test_generations_and_forwards_without_attempts_stay_apart() -> None:
    """Attempt 5 of two generations are two stretches, and a forward without an attempt is none of either."""
    tally = TimelineTally()
    tally.add_steps(
        np.array([0, 1]), np.array([5, 5]), np.zeros(2, np.int64), np.ones(2), np.array([2.0, np.nan])
    )
    keys = np.array([[0, -1, 5], [1, 5, 0]])
    fold = TimelineFold()
    fold.add_rank(0, tally, keys)
    found = pl.read_parquet(io.BytesIO(fold.encoded(keys)))
    assert found.select("generation", "counted_in", "first", "samples", "applied").rows() == [
        (0, "attempt", 5, 0, 1),
        (0, "forward_index", 5, 1, 0),
        (1, "attempt", 5, 1, 1),
    ]
    assert found["loss_scale_last"].to_list() == [2.0, None, 1.0]


def test_the_table_is_bounded_whatever_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more rows than it may have, all ranks get longer stretches, and nothing is lost."""
    monkeypatch.setattr(timeline, "MAX_TIMELINE_ROWS", 100)
    fold = TimelineFold()
    attempt = np.arange(64)
    for rank in range(10):
        fold.add_rank(
            rank, tally_of(attempt, np.zeros_like(attempt), np.ones(64), 64), np.zeros((0, 3), np.int64)
        )
    found = pl.read_parquet(io.BytesIO(fold.encoded(np.zeros((0, 3), np.int64))))
    assert found.height <= 100
    assert found.group_by("rank").agg(pl.col("applied").sum())["applied"].unique().to_list() == [64]


def test_an_outcome_that_no_process_writes_is_an_unknown_one() -> None:
    """A text from elsewhere is counted, as unknown."""
    assert timeline.outcome_code("skipped") == 1
    assert timeline.outcome_code("<b>") == 3
