"""Gradients of parameters on two ranks: what each had before the reduction, what all have after it."""

import copy
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer
from torchinstruments.testing.collectives import no_collectives

SIGNALS = ("input", "output", "output_gradient", "parameter", "parameter_gradient")
GRADIENTS = ("parameter_gradient",)


class Gated(nn.Module):
    """Has a layer that only one rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 2, bias=False)
        self.extra = nn.Linear(2, 2, bias=False)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the trunk's output, on rank 1 through the extra layer."""
        h = self.trunk(x)
        return self.extra(h) if dist.get_rank() == 1 else h


def _attach(model: nn.Module, folder: str, signals: tuple[str, ...] = GRADIENTS) -> None:
    inject_observer(model, output_dir=folder, run_id="run", sampler=AlwaysSampler(), signals=signals)


def _linear() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 2, bias=False))


def _born_on_rank_1(folder: str, options: dict[str, Any]) -> None:
    """One step in which rank 1 alone has a NaN."""
    model = DistributedDataParallel(_linear(), **options)
    _attach(model, folder)
    x = torch.ones(4, 3)
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    remove_observer(model)


def _accumulate(folder: str, options: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Two micro-batches, the first one not synchronised; returns the gradient after each and at the step."""
    model = DistributedDataParallel(_linear(), **options)
    _attach(model, folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.module[0].weight
    seen: list[tuple[float, float, float]] = []
    for step in range(2):
        means = []
        optimizer.zero_grad(set_to_none=step == 0)
        for micro_batch in range(2):
            x = torch.full((1, 3), float(1 + dist.get_rank() + 4 * micro_batch))
            with model.no_sync() if micro_batch == 0 else nullcontext():
                model(x).sum().backward()
            means.append(weight.grad.double().mean().item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        means.append(weight.grad.double().mean().item())
        optimizer.step()
        seen.append((means[0], means[1], means[2]))
    remove_observer(model)
    return seen


def _twice_backward(folder: str, retains: bool) -> list[float]:
    """Two backwards for one reduction, through two forwards or one; returns the gradient after each."""
    model = DistributedDataParallel(_linear())
    _attach(model, folder)
    x = torch.full((1, 3), 1.0 + 2.0 * dist.get_rank())
    first = model(x).sum()
    second = first if retains else model(x).sum()
    weight = model.module[0].weight
    means = []
    for loss in (first, second):
        loss.backward(retain_graph=True)
        means.append(weight.grad.double().mean().item())
    remove_observer(model)
    return means


def _use_on_one_rank(folder: str) -> list[float]:
    """Returns the mean of both layers' gradients after the backward."""
    torch.manual_seed(7)
    model = DistributedDataParallel(Gated(), find_unused_parameters=True)
    _attach(model, folder)
    model(torch.ones(1, 2)).sum().backward()
    means = [p.grad.double().mean().item() for p in model.parameters() if p.grad is not None]
    remove_observer(model)
    return means


class Sparing(nn.Module):
    """Has a layer that a forward uses or leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 1, bias=False)
        self.trunk = nn.Linear(2, 1, bias=False)

    @override
    def forward(self, x: torch.Tensor, *, use: bool) -> torch.Tensor:
        """Returns the trunk's output, with the other layer's where it is used."""
        return self.trunk(x) + self.extra(x) if use else self.trunk(x)


def _use_now_and_then(folder: str) -> list[float]:
    """Returns the mean of the extra layer's gradient after each of four attempts; nothing clears it."""
    model = DistributedDataParallel(Sparing(), find_unused_parameters=True)
    _attach(model, folder)
    means = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    # By all ranks, by none, by rank 0 alone, by none.
    for ranks in ((0, 1), (), (0,), ()):
        model(torch.ones(1, 2), use=dist.get_rank() in ranks).sum().backward()
        optimizer.step()
        gradient = model.module.extra.weight.grad
        assert gradient is not None
        means.append(gradient.double().mean().item())
    remove_observer(model)
    return means


class Halves(nn.Module):
    """Two layers that share nothing, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(2, 1, bias=False)
        self.right = nn.Linear(2, 1, bias=False)

    @override
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both."""
        return self.left(x), self.right(x)


def _two_losses(folder: str) -> list[float]:
    """Returns the mean of the first layer's gradient after each of two backwards."""
    model = DistributedDataParallel(Halves())
    _attach(model, folder)
    left, right = model(torch.full((1, 2), float(1 + dist.get_rank())))
    means = []
    for output in (left, right):
        output.sum().backward()
        gradient = next(model.parameters()).grad
        means.append(float("nan") if gradient is None else gradient.double().mean().item())
    remove_observer(model)
    return means


def _leave_out(folder: str) -> None:
    """One step in which the second layer is none of the wrapper's business."""
    inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    inner._ddp_params_and_buffers_to_ignore = ["1.weight"]  # pyrefly: ignore[bad-argument-type]
    model = DistributedDataParallel(inner)
    _attach(model, folder)
    model(torch.ones(1, 2)).sum().backward()
    remove_observer(model)


def _step_with_shared_state(folder: str) -> None:
    """One step of an optimizer whose states are divided among ranks; it runs another one inside."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)))
    _attach(model, folder)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    remove_observer(model)


def _accumulate_sharded(folder: str) -> None:
    """Two micro-batches of a sharded model, the first without synchronisation."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    sharded = fully_shard(model)
    _attach(model, folder)
    for micro_batch in range(2):
        sharded.set_requires_gradient_sync(micro_batch == 1)
        model(torch.ones(1, 4)).sum().backward()
    remove_observer(model)


def _shard(folder: str, *, flat: bool = False, whole: bool = False) -> list[float]:
    """One step of a sharded model; returns the mean of this rank's part of each gradient."""
    torch.manual_seed(7)
    inner = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False))
    if flat:
        model: nn.Module = FullyShardedDataParallel(
            inner, use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        (replicate if whole else fully_shard)(inner)
        model = inner
    _attach(model, folder, ("parameter", "parameter_gradient"))
    torch.manual_seed(dist.get_rank())
    model(torch.randn(3, 4)).pow(2).sum().backward()
    means = []
    for parameter in model.parameters():
        gradient = parameter.grad
        local = getattr(gradient, "to_local", None)
        gradient = gradient if local is None else local()
        means.append(float("nan") if gradient is None else gradient.double().mean().item())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    remove_observer(model)
    return means


def _train(model: DistributedDataParallel) -> list[torch.Tensor]:
    torch.manual_seed(11 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    seen: list[torch.Tensor] = []
    for _ in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.randn(5, 8)).square().mean().backward()
        output = model(torch.randn(5, 8))
        output.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen.append(output.detach().clone())
        seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        seen.extend(p.detach().clone() for p in model.parameters())
    return [*seen, torch.get_rng_state()]


def _compare(folder: str, options: dict[str, Any]) -> tuple[bool, int]:
    """Returns whether a training is the same with every signal measured and no collective allowed to that."""
    torch.manual_seed(7)
    inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 4))
    twin = copy.deepcopy(inner)
    bare = _train(DistributedDataParallel(inner, **options))
    model = DistributedDataParallel(twin, **options)
    with no_collectives():
        _attach(model, folder, SIGNALS)
        observed = _train(model)
        remove_observer(model)
    return all(torch.equal(a, b) for a, b in zip(bare, observed, strict=True)), len(bare)


def _rows(folder: Path, metric: str = "mean") -> pl.DataFrame:
    """One statistic of all gradients of parameters, in order."""
    history = open_run(str(folder)).history().collect()
    chosen = (pl.col("signal") == "parameter_gradient") & (pl.col("metric") == metric)
    return history.filter(chosen).sort("rank", "sample_id", "layer", "stage")


def _by_rank(rows: pl.DataFrame, stage: str, column: str = "value") -> list[list[Any]]:
    """One column of a stage on each rank, in the order of samples and layers."""
    found = rows.filter(pl.col("stage") == stage)
    return [found.filter(pl.col("rank") == rank)[column].to_list() for rank in (0, 1)]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_a_nan_is_seen_on_the_rank_where_it_was_born(rank_pool, tmp_path: Path, options: dict[str, Any]):
    """Before the reduction on that rank alone, after it and at the step on all of them."""
    rank_pool.run(_born_on_rank_1, str(tmp_path), options)
    rows = _rows(tmp_path, "nonfinite_fraction")
    assert _by_rank(rows, "local_accumulated") == [[0.0], [pytest.approx(1 / 3)]]
    assert _by_rank(rows, "reduced") == [[pytest.approx(1 / 3)]] * 2
    assert _by_rank(rows, "applied") == [[pytest.approx(1 / 3)]] * 2


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_accumulation_keeps_local_sums_and_reduces_at_the_end(
    rank_pool, tmp_path: Path, options: dict[str, Any]
):
    """The first micro-batch is not reduced and says so; what is reduced is the mean of the local sums."""
    means = rank_pool.run(_accumulate, str(tmp_path), options)
    rows = _rows(tmp_path)
    assert set(rows["grad_sync"].to_list()) == {"local", "synced"}
    for rank, own in enumerate(means):
        after_first, after_second, at_step = (list(one) for one in zip(*own, strict=True))
        local_sum = [1.0 + rank, 1.0 + rank + 5.0 + rank] * 2
        assert after_first == local_sum[::2]
        assert _by_rank(rows, "local_accumulated")[rank] == local_sum
        assert _by_rank(rows, "reduced")[rank] == [None, after_second[0], None, after_second[1]]
        assert _by_rank(rows, "applied")[rank] == pytest.approx(at_step)
    assert means[0][0][1] == (6.0 + 8.0) / 2
    assert _by_rank(rows, "reduced", "unavailable_reason") == [["not_synchronised", ""] * 2] * 2
    assert _by_rank(rows, "applied", "micro_batch") == [[1, 1]] * 2


def test_a_layer_that_one_rank_uses_is_reduced_on_both(rank_pool, tmp_path: Path):
    """The other rank has no gradient of its own, and half of the first one's afterwards."""
    means = rank_pool.run(_use_on_one_rank, str(tmp_path))
    rows = _rows(tmp_path)
    extra, trunk = means[0][1], means[0][0]
    assert means[0] == means[1]
    local = _by_rank(rows, "local_accumulated")
    assert local[0][0] is None
    assert local[1][0] == pytest.approx(2 * extra)
    assert _by_rank(rows, "local_accumulated", "unavailable_reason") == [["no_gradient", ""], ["", ""]]
    assert _by_rank(rows, "reduced") == [[pytest.approx(extra), pytest.approx(trunk)]] * 2
    assert (local[0][1] + local[1][1]) / 2 == pytest.approx(trunk)


def test_what_no_rank_used_was_not_reduced_though_an_old_gradient_stands(rank_pool, tmp_path: Path):
    """What this rank alone did not use has the mean of all ranks, which DDP writes into it."""
    means = rank_pool.run(_use_now_and_then, str(tmp_path))
    rows = _rows(tmp_path).filter(pl.col("layer") == "extra")
    assert means[0] == means[1]
    used, _, alone, _ = means[0]
    assert (used, alone) == (1.0, 1.5)
    assert _by_rank(rows, "reduced") == [[used, None, alone, None]] * 2
    assert _by_rank(rows, "reduced", "unavailable_reason") == [["", "no_gradient", "", "no_gradient"]] * 2
    unused = [["", "no_gradient", "", "no_gradient"], ["", "no_gradient", "no_gradient", "no_gradient"]]
    assert _by_rank(rows, "local_accumulated", "unavailable_reason") == unused


def test_a_sharded_gradient_is_there_only_once_it_was_reduced(rank_pool, tmp_path: Path):
    """fully_shard hands out each rank's part of the reduced gradient and never the local one."""
    means = rank_pool.run(_shard, str(tmp_path))
    rows = _rows(tmp_path)
    assert _by_rank(rows, "local_accumulated", "unavailable_reason") == [["sharded"] * 2] * 2
    assert _by_rank(rows, "reduced") == [pytest.approx(own) for own in means]
    assert _by_rank(rows, "applied") == [pytest.approx(own) for own in means]
    assert set(rows["scope"].to_list()) == {"local_shard"}
    assert set(rows["shape"].to_list()) == {"3x4", "1x6"}
    parameters = open_run(str(tmp_path)).history().filter(pl.col("signal") == "parameter").collect()
    assert set(parameters["scope"].to_list()) == {"local_shard"}


def test_what_is_replicated_in_the_same_way_is_not_called_sharded(rank_pool, tmp_path: Path):
    """The sharding's own replication hands out reduced gradients alone, of whole parameters."""
    means = rank_pool.run(_shard, str(tmp_path), whole=True)
    rows = _rows(tmp_path)
    early = rows.filter(pl.col("stage") == "local_accumulated")["unavailable_reason"]
    assert {reason.partition(":")[0] for reason in early} == {"no_gradient"}
    assert _by_rank(rows, "reduced") == [pytest.approx(own) for own in means]
    assert means[0] == means[1]
    assert set(rows["scope"].to_list()) == {"local"}


def test_flattened_parameters_say_that_they_are_pieces(rank_pool, tmp_path: Path):
    """Of those no local gradient is seen, and whether they were reduced is not known."""
    means = rank_pool.run(_shard, str(tmp_path), flat=True)
    rows = _rows(tmp_path)
    assert _by_rank(rows, "local_accumulated", "unavailable_reason") == [["sharded"] * 2] * 2
    for rank, own in enumerate(means):
        found = _by_rank(rows, "applied")[rank]
        expected = [None if math.isnan(one) else pytest.approx(one) for one in own]
        assert found == expected
    assert set(rows["scope"].to_list()) == {"local_shard"}


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_every_bit_of_a_ddp_training_is_the_same_with_every_signal(
    rank_pool, tmp_path: Path, options: dict[str, Any]
):
    """With clipping and a fused optimizer, and without a collective of the observer's own."""
    assert rank_pool.run(_compare, str(tmp_path), options) == [(True, 4 * 9 + 1)] * 2
    samples = open_run(str(tmp_path)).samples().collect()
    assert (samples.height, set(samples["errors"])) == (16, {0})
    assert set(samples["state"].to_list()) == {"backward_observed"}
    assert set(samples["num_backwards"].to_list()) == {1}
    history = open_run(str(tmp_path)).history().collect()
    rows = history.group_by("rank", "sample_id").len().sort("rank", "sample_id")
    assert rows["len"].to_list() == samples.sort("rank", "sample_id")["rows"].to_list()


def test_a_reduction_that_may_be_open_is_not_called_reduced(rank_pool, tmp_path: Path):
    """After the first of two losses DDP has not reduced anything yet."""
    means = rank_pool.run(_two_losses, str(tmp_path))
    assert [own[0] for own in means] == [1.0, 2.0], "the ranks differ, so nothing was reduced"
    rows = _rows(tmp_path).sort("rank", "backward_index", "layer")
    reasons = _by_rank(rows, "reduced", "unavailable_reason")
    assert [[reason.split(":")[0] for reason in own] for own in reasons] == [
        ["not_synchronised", "not_synchronised", ""]
    ] * 2
    assert _by_rank(rows, "reduced")[0][2] == 1.5
    assert _by_rank(rows, "local_accumulated") == [[1.0, None, 1.0], [2.0, None, 2.0]]


def test_an_optimizer_that_runs_another_one_finds_each_gradient_once(rank_pool, tmp_path: Path):
    """The outer one has them all, on every rank."""
    rank_pool.run(_step_with_shared_state, str(tmp_path))
    rows = _rows(tmp_path)
    assert _by_rank(rows, "applied", "layer") == [["0", "1"]] * 2
    assert _by_rank(rows, "applied") == _by_rank(rows, "reduced")


def test_a_sharded_gradient_that_was_not_reduced_is_not_there(rank_pool, tmp_path: Path):
    """It comes with the micro-batch that synchronises, and holds both."""
    rank_pool.run(_accumulate_sharded, str(tmp_path))
    rows = _rows(tmp_path)
    assert _by_rank(rows, "reduced") == [[None, 2.0]] * 2
    assert _by_rank(rows, "reduced", "unavailable_reason")[0][0].split(":")[0] in {
        "no_gradient",
        "not_synchronised",
    }


def test_what_the_wrapper_leaves_alone_is_not_called_reduced(rank_pool, tmp_path: Path):
    """Its gradient is this rank's own, whatever the others do."""
    rank_pool.run(_leave_out, str(tmp_path))
    reasons = _by_rank(_rows(tmp_path), "reduced", "unavailable_reason")
    assert reasons == [["", "not_synchronised: the wrapper around it leaves it alone"]] * 2


@pytest.mark.parametrize("retains", [False, True])
def test_what_a_backward_adds_after_the_reduction_is_not_called_reduced(
    rank_pool, tmp_path: Path, retains: bool
):
    """DDP reduces in the first backward after its last forward, and the next one leaves local values."""
    means = rank_pool.run(_twice_backward, str(tmp_path), retains)
    assert means == [[2.0, 3.0], [2.0, 5.0]], "the ranks differ, so what came second was not reduced"
    rows = _rows(tmp_path).filter(pl.col("stage") == "reduced").sort("rank", "sample_id", "backward_index")
    assert set(rows["grad_sync"]) == {"synced"}
    last = [own[-1] for own in _by_rank(rows, "reduced", "unavailable_reason")]
    assert [reason.split(" and")[0] for reason in last] == [
        "not_synchronised: DistributedDataParallel reduces once after a forward,"
    ] * 2
    assert [own[0] for own in _by_rank(rows, "reduced")] == ([2.0, 2.0] if retains else [None, None])
    local = _by_rank(_rows(tmp_path).sort("rank", "sample_id", "backward_index"), "local_accumulated")
    assert [own[-1] for own in local] == [3.0, 5.0]
