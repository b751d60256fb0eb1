"""What the steps of real ranks become: one attempt a step, synchronised as DDP decided, whatever steps it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer

COLUMNS = (
    "rank",
    "attempt",
    "optimizer",
    "optimizer_attempt",
    "global_step",
    "micro_batches",
    "micro_batches_declared",
    "micro_batches_synced",
    "last_micro_batch_sync",
    "outcome",
    "evidence",
)


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def _batch() -> torch.Tensor:
    return torch.randn(3, 4) + dist.get_rank()


def _steps(folder: Path) -> list[dict[str, Any]]:
    return open_run(str(folder)).steps().select(COLUMNS).collect().sort("rank", "attempt").to_dicts()


def _accumulate(folder: str, marked: bool) -> list[bool]:
    """Two steps of four micro-batches, the last one synchronised; whether gradients were equal on ranks."""
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = inject_observer(model, output_dir=folder, run_id="accumulate", sampler=AlwaysSampler())
    equal = []
    torch.manual_seed(dist.get_rank())
    for step in range(2):
        with observer.step(global_step=40 + step, micro_batches=4) if marked else nullcontext():
            for micro_batch in range(4):
                with nullcontext() if micro_batch == 3 else model.no_sync():
                    model(_batch()).square().mean().backward()
                gradient = next(model.parameters()).grad
                assert gradient is not None
                gathered = [torch.empty_like(gradient) for _ in range(2)]
                dist.all_gather(gathered, gradient)
                equal.append(torch.equal(*gathered))
            optimizer.step()
            optimizer.zero_grad()
    remove_observer(model)
    return equal


def _check_accumulation(pool: Any, folder: Path, *, marked: bool) -> None:
    assert pool.run(_accumulate, str(folder), marked) == [[False, False, False, True] * 2] * 2
    assert _steps(folder) == [
        dict(
            zip(
                COLUMNS,
                (rank, attempt, 0, attempt, 40 + attempt if marked else None, 4, 4 if marked else None, 1),
                strict=False,
            )
        )
        | {"last_micro_batch_sync": "synced", "outcome": "applied", "evidence": "optimizer_hook"}
        for rank in range(2)
        for attempt in range(2)
    ]
    rows = open_run(str(folder)).history().collect()
    places = rows.select("rank", "attempt", "micro_batch", "forward_in_attempt", "grad_sync").unique()
    assert set(places.iter_rows()) == {
        (rank, attempt, micro_batch, micro_batch, "synced" if micro_batch == 3 else "local")
        for rank in range(2)
        for attempt in range(2)
        for micro_batch in range(4)
    }


def test_four_micro_batches_are_one_attempt_with_one_synchronised(rank_pool, tmp_path: Path):
    """As the gradients themselves say: equal on both ranks after the fourth, and not before."""
    _check_accumulation(rank_pool, tmp_path / "run", marked=False)


def test_blocks_give_the_same_attempts_with_the_callers_numbers(rank_pool, tmp_path: Path):
    """The key between ranks stays attempt and ordinal; step_provenance says that the program told."""
    _check_accumulation(rank_pool, tmp_path / "run", marked=True)
    history = open_run(str(tmp_path / "run")).history().collect()
    assert set(history["step_provenance"]) == {"explicit"}


def _join_uneven(folder: str) -> int:
    """Rank 0 trains two steps, rank 1 four; returns the forwards that were counted."""
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = inject_observer(model, output_dir=folder, run_id="join", sampler=AlwaysSampler())
    with Join([model]):
        for _ in range(2 + 2 * dist.get_rank()):
            model(_batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    remove_observer(model)
    return observer.counters.forwards


def test_uneven_inputs_under_join_leave_each_rank_its_own_attempts(rank_pool, tmp_path: Path):
    """The rank that is done shadows collectives, which are no forwards: two attempts, and four."""
    assert rank_pool.run(_join_uneven, str(tmp_path / "run")) == [2, 4]
    assert [
        (row["rank"], row["attempt"], row["micro_batches_synced"], row["outcome"])
        for row in _steps(tmp_path / "run")
    ] == [(rank, attempt, 1, "applied") for rank in range(2) for attempt in range(2 + 2 * rank)]


def _shard_the_optimizer(folder: str) -> int:
    """Three steps of an optimizer whose state is sharded between ranks: it steps another one inside."""
    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    inject_observer(model, output_dir=folder, run_id="zero", sampler=AlwaysSampler())
    for _ in range(3):
        model(_batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    remove_observer(model)
    return dist.get_rank()


def test_a_sharded_optimizer_steps_once_an_attempt(rank_pool, tmp_path: Path):
    """What it steps inside belongs to its own step."""
    rank_pool.run(_shard_the_optimizer, str(tmp_path / "run"))
    assert [
        (row["rank"], row["attempt"], row["optimizer"], row["optimizer_attempt"], row["outcome"])
        for row in _steps(tmp_path / "run")
    ] == [(rank, attempt, 0, attempt, "applied") for rank in range(2) for attempt in range(3)]


class _Branches(nn.Module):
    """Two layers of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        """(batch, 4) -> (batch, 1)."""
        return self.layers[branch](x)


def _use_different_layers(folder: str) -> list[list[float]]:
    """Rank 0 uses the first layer alone, rank 1 both in turn; returns the last parameters."""
    torch.manual_seed(5)
    model = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inject_observer(model, output_dir=folder, run_id="branches", sampler=AlwaysSampler())
    for step in range(4):
        model(_batch(), step % 2 if dist.get_rank() else 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    remove_observer(model)
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_a_layer_that_one_rank_uses_has_rows_on_that_rank_alone(rank_pool, tmp_path: Path):
    """Each rank's attempts are whole, all of them synchronised, and the parameters stay equal."""
    first, second = rank_pool.run(_use_different_layers, str(tmp_path / "run"))
    assert first == second
    assert [
        (row["rank"], row["attempt"], row["micro_batches"], row["micro_batches_synced"])
        for row in _steps(tmp_path / "run")
    ] == [(rank, attempt, 1, 1) for rank in range(2) for attempt in range(4)]
    rows = open_run(str(tmp_path / "run")).history().collect()
    measured = rows.filter(rows["unavailable_reason"] == "").select("rank", "attempt", "layer").unique()
    assert set(measured.iter_rows()) == {
        *((0, attempt, "layers.0") for attempt in range(4)),
        *((1, attempt, f"layers.{attempt % 2}") for attempt in range(4)),
    }
