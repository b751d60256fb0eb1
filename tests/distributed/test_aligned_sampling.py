"""Samples by time on real ranks: the same forwards on all of them, and what one could not take is `missed`."""

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
STEPS = 400


def _train(folder: str, wrapped: bool, immediate: bool) -> tuple[int, int]:
    """Trains with rank 1 some 50 ms behind rank 0; returns the samples and the missed ones."""
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
        for _ in range(2):
            model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        if step % 50 == 0:
            with torch.no_grad():
                model(torch.randn(4, 4))
    dist.barrier()
    remove_observer(model)
    return observer.counters.samples, observer.counters.missed


def _samples(folder: Path) -> pl.DataFrame:
    return open_run(str(folder)).samples().collect()


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "without-synchronisation"])
def test_ranks_50_ms_apart_measure_the_same_forwards(rank_pool, tmp_path: Path, wrapped: bool) -> None:
    """At least 99 % of the samples are common to both ranks, and every other one is missed on one of them."""
    counted = rank_pool.run(_train, str(tmp_path / "run"), wrapped, immediate=True)

    samples = _samples(tmp_path / "run")
    taken = {
        rank: set(rows.filter(pl.col("state") != "missed").select(KEY).rows())
        for (rank,), rows in samples.group_by("rank")
    }
    missed = {
        rank: set(rows.filter(pl.col("state") == "missed").select(KEY).rows())
        for (rank,), rows in samples.group_by("rank")
    }
    assert [(len(taken[rank]), len(missed[rank])) for rank in (0, 1)] == counted
    assert len(taken[0]) > 5
    assert (0, 0, 0) in taken[0] & taken[1]
    everything = taken[0] | taken[1]
    assert len(taken[0] & taken[1]) >= 0.99 * len(everything)
    for rank in (0, 1):
        assert missed[rank] == everything - taken[rank]
    alignment = merge_run(str(tmp_path / "run")).result["coverage"]["alignment"]
    assert alignment["samples"] == len(everything)
    assert alignment["share_common_to_all_ranks"] >= 0.99
