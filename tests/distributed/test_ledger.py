"""Infinities on one rank of two: ledgers, weights and history say what happened on each."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer

ATTEMPTS = 4
SCALE = 1024.0


@dataclass
class _Log:
    """What a rank saw of its own training, without an observer's help.

    Attributes:
        applied: Of each attempt: whether the weights changed.
        found: Of each attempt: whether a gradient was not finite when the scaler looked.
        before: Of each attempt: the scale.
        after: Of each attempt: the scale after the update.
        weights: The weights after each attempt, and the scaler's state at the end.
        nonfinite: Attempt and micro-batch of each forward whose output was not finite.
    """

    applied: list[bool] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    nonfinite: list[tuple[int, int]] = field(default_factory=list)


def _is_infinite(attempt: int, micro_batch: int) -> bool:
    """Whether this rank's entries are: those of rank 1 in attempt 1, those of both in attempt 3."""
    return micro_batch == 0 and (attempt == 3 or (attempt == 1 and dist.get_rank() == 1))


def _train(
    model: DistributedDataParallel,
    *,
    kind: str,
    sharded: bool,
    micro_batches: int,
    local_last: bool,
    adds_up: bool,
) -> _Log:
    """Trains; micro-batches before the last are not synchronised, and the last one unless it is local too."""
    log = _Log()
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "plain"
        else torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    )
    scaler: GradScaler = (ShardedGradScaler if sharded else GradScaler)("cpu", init_scale=SCALE)
    for attempt in range(ATTEMPTS):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            number = float("inf") if _is_infinite(attempt, micro_batch) else 1.0 + dist.get_rank()
            with model.no_sync() if local_last or not is_last else nullcontext():
                output = model(torch.full((2, 3), number))
                scaler.scale(output.mean()).backward()
            if not output.isfinite().all():
                log.nonfinite.append((attempt, micro_batch))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        log.found.append(float(not all(gradient.isfinite().all() for gradient in gradients)))
        log.before.append(scaler.get_scale())
        if adds_up:
            scaler.unscale_(optimizer)
            for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                dist.all_reduce(found)
        scaler.step(optimizer)
        scaler.update()
        log.after.append(scaler.get_scale())
        log.applied.append(
            any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        )
        log.weights.append([parameter.tolist() for parameter in model.parameters()])
    log.weights.append(scaler.state_dict())
    return log


def _run(folder: str, options: dict[str, Any]) -> tuple[_Log, bool]:
    """Returns the log of an observed training, and whether an unobserved one was the same to the last bit."""
    logs = []
    for observed in (False, True):
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3)))
        if observed:
            inject_observer(model, output_dir=folder, run_id="ledger", sampler=AlwaysSampler())
        logs.append(_train(model, **options))
        if observed:
            # Right behind the last update, whose attempt was skipped.
            remove_observer(model)
    # NaN is no equal of itself; as text it is.
    return logs[1], repr(logs[0]) == repr(logs[1])


def _options(kind: str, **others: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "sharded": False,
        "micro_batches": 1,
        "local_last": False,
        "adds_up": False,
        **others,
    }


def _ledger(folder: Path, rank: int) -> pl.DataFrame:
    return open_run(str(folder)).steps().filter(pl.col("rank") == rank).sort("attempt").collect()


def _hold_to_log(folder: Path, rank: int, log: _Log) -> None:
    """Holds every row of a rank's ledger and history to that rank's own log."""
    steps = _ledger(folder, rank)
    assert steps["outcome"].to_list() == ["applied" if applied else "skipped" for applied in log.applied]
    assert steps["evidence"].to_list() == ["found_inf"] * ATTEMPTS
    assert steps["scale_before"].to_list() == log.before
    assert steps["scale_after"].to_list() == log.after
    history = open_run(str(folder)).history().filter(pl.col("rank") == rank).collect()
    gradients = history.filter(pl.col("signal") == "output_gradient")
    assert gradients.height > 0
    assert {(a, s) for a, s in gradients.select("attempt", "loss_scale").iter_rows()} == set(
        enumerate(log.before)
    )
    assert set(gradients["scale_provenance"]) == {"gradscaler"}
    infinite = history.filter(
        (pl.col("signal") == "output") & (pl.col("metric") == "nonfinite_fraction") & (pl.col("value") > 0)
    )
    assert sorted(set(infinite.select("attempt", "micro_batch").iter_rows())) == log.nonfinite


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_synchronised_gradients_make_all_ranks_skip(
    rank_pool: Any, tmp_path: Path, kind: str, micro_batches: int
) -> None:
    """The reduction brings the infinity of one rank to the other, also that of an earlier micro-batch."""
    folder = tmp_path / "run"
    per_rank = rank_pool.run(_run, str(folder), _options(kind, micro_batches=micro_batches))
    logs = [log for log, _ in per_rank]
    assert [is_same for _, is_same in per_rank] == [True, True]
    for rank, log in enumerate(logs):
        _hold_to_log(folder, rank, log)
        assert log.applied == [True, False, True, False]
        assert _ledger(folder, rank)["found_inf"].to_list() == log.found == [0, 1, 0, 1]
        assert _ledger(folder, rank)["micro_batches"].to_list() == [micro_batches] * ATTEMPTS
        assert _ledger(folder, rank)["micro_batches_synced"].to_list() == [1] * ATTEMPTS
    assert logs[0].weights == logs[1].weights
    assert [log.nonfinite for log in logs] == [[(3, 0)], [(1, 0), (3, 0)]]


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_step_on_local_gradients_is_skipped_on_one_rank_and_applied_on_the_other(
    rank_pool: Any, tmp_path: Path, kind: str
) -> None:
    """From there on weights and scales differ, and each ledger says so."""
    folder = tmp_path / "run"
    per_rank = rank_pool.run(_run, str(folder), _options(kind, local_last=True))
    logs = [log for log, _ in per_rank]
    assert [is_same for _, is_same in per_rank] == [True, True]
    for rank, log in enumerate(logs):
        _hold_to_log(folder, rank, log)
        assert _ledger(folder, rank)["found_inf"].to_list() == log.found
        assert _ledger(folder, rank)["last_micro_batch_sync"].to_list() == ["local"] * ATTEMPTS
    assert [log.applied for log in logs] == [[True, True, True, False], [True, False, True, False]]
    assert [log.after for log in logs] == [[1024, 1024, 1024, 512], [1024, 512, 512, 256]]
    assert logs[0].weights[1] != logs[1].weights[1]


def test_a_sharded_scaler_makes_all_ranks_skip_by_adding_up_what_they_found(
    rank_pool: Any, tmp_path: Path
) -> None:
    """The row has the sum: 1 where one rank found something, 2 where both did."""
    folder = tmp_path / "run"
    per_rank = rank_pool.run(_run, str(folder), _options("plain", local_last=True, sharded=True))
    for rank, (log, is_same) in enumerate(per_rank):
        assert is_same
        _hold_to_log(folder, rank, log)
        assert log.applied == [True, False, True, False]
        assert _ledger(folder, rank)["found_inf"].to_list() == [0, 1, 0, 2]


def test_a_fused_optimizer_applies_what_two_ranks_found_together(rank_pool: Any, tmp_path: Path) -> None:
    """A program that adds up its ranks' findings makes them 2, and it skips at exactly 1.

    The ledger leaves that outcome unknown, beside the 2; the weights are not finite from there on.
    """
    folder = tmp_path / "run"
    options = _options("fused", local_last=True, adds_up=True)
    per_rank = rank_pool.run(_run, str(folder), options)
    for rank, (log, is_same) in enumerate(per_rank):
        assert is_same
        assert log.applied == [True, False, True, True]
        steps = _ledger(folder, rank)
        assert steps["found_inf"].to_list() == [0, 1, 0, 2]
        assert steps["outcome"].to_list() == ["applied", "skipped", "applied", "unknown"]
        assert steps["scale_after"].to_list() == log.after
