"""Samples by time on real ranks: the same forwards on all, and what one could not take is `missed`."""

import json
import time
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchinstruments import TimedSampler, inject_observer, merge_run, open_run, remove_observer

KEY = ["generation", "attempt", "forward_in_attempt"]
INTERVAL_S = 0.1
STEPS = 250


def _train(
    folder: str, wrapped: bool, immediate: bool, pauses_s: tuple[float, float], tied: bool
) -> tuple[int, int]:
    """Trains with rank 1 some 50 ms behind rank 0; returns the samples and the missed ones.

    Ranks that are `tied` wait for each other once a step, as a data loader or a printed loss may have it:
    of two that nothing ties, one may run away from the other for as long as the machine is busy.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if wrapped:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = inject_observer(
        model,
        output_dir=folder,
        run_id="aligned",
        sampler=TimedSampler(timedelta(seconds=INTERVAL_S), immediate=immediate),
    )
    dist.barrier()
    time.sleep(0.05 * rank)
    for step in range(STEPS):
        if tied:
            dist.barrier()
            time.sleep(0.05 * rank if step % 25 == 0 else 0.0)
        for _ in range(2):
            model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        time.sleep(pauses_s[rank])
        if step % 50 == 0:
            with torch.no_grad():
                model(torch.randn(4, 4))
    dist.barrier()
    remove_observer(model)
    return observer.counters.samples, observer.counters.missed


def _keys(folder: Path, *, missed: bool) -> list[set[tuple[int, ...]]]:
    """Returns what names the samples of each rank between ranks: the missed ones, or the others."""
    samples = open_run(str(folder)).samples().collect().filter((pl.col("state") == "missed") == missed)
    return [set(samples.filter(pl.col("rank") == rank).select(KEY).rows()) for rank in (0, 1)]


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "without-synchronisation"])
def test_ranks_50_ms_apart_measure_the_same_forwards(rank_pool, tmp_path: Path, wrapped: bool) -> None:
    """At least 99 % of the samples are common to both ranks, and every other one is missed on one of them."""
    counted = rank_pool.run(
        _train, str(tmp_path / "run"), wrapped, immediate=True, pauses_s=(0.01, 0.01), tied=not wrapped
    )

    taken, missed = _keys(tmp_path / "run", missed=False), _keys(tmp_path / "run", missed=True)
    assert [(len(taken[rank]), len(missed[rank])) for rank in (0, 1)] == counted
    assert len(taken[0]) > 5
    assert (0, 0, 0) in taken[0] & taken[1]
    everything = taken[0] | taken[1]
    assert len(taken[0] & taken[1]) >= 0.99 * len(everything)
    for rank in (0, 1):
        assert missed[rank] == everything - taken[rank]
    merge_run(str(tmp_path / "run"))
    result = json.loads((tmp_path / "run" / "merged" / "result.json").read_text())
    alignment = result["coverage"]["alignment"]
    assert alignment["samples"] == len(everything)
    assert alignment["share_common_to_all_ranks"] >= 0.99


def test_a_rank_that_runs_ahead_misses_what_it_passed(rank_pool, tmp_path: Path) -> None:
    """Five times as fast as the leader, it hears of attempts that it has left behind, and says so."""
    counted = rank_pool.run(
        _train, str(tmp_path / "run"), False, immediate=False, pauses_s=(0.01, 0.0), tied=False
    )

    taken, missed = _keys(tmp_path / "run", missed=False), _keys(tmp_path / "run", missed=True)
    assert [(len(taken[rank]), len(missed[rank])) for rank in (0, 1)] == counted
    assert missed[0] == set()
    assert missed[1] == taken[0] - taken[1]
    assert len(missed[1]) > 5
    assert taken[1] <= taken[0]
