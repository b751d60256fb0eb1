"""Training checks on two ranks: each says what its own rank saw, and no collective is called."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from merge.schema_checks import folder_problems
from torchinstruments import AlwaysSampler, inject_observer, merge_run, remove_observer
from torchinstruments.checks import ChecksSession, CheckViolationError
from torchinstruments.testing.collectives import no_collectives

STEPS = 3
MICRO_BATCHES = 4


class _Net(nn.Module):
    """A layer that is used, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used = nn.Linear(4, 3)
        self.unused = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _wrapped(kind: str) -> Any:
    model = _Net()
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "ddp_views":
        return DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    if kind == "fully_shard":
        fully_shard(model)
        return model
    if kind == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
        return model
    if kind == "tensor_parallel":
        return parallelize_module(model, init_device_mesh("cpu", (2,)), {"used": ColwiseParallel()})
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def _session(model: nn.Module, optimizer: torch.optim.Optimizer) -> ChecksSession:
    """Returns a session with every check on."""
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    session.register_nonfinite_param_check()
    session.register_change_check(window=(2, 3), action="collect")
    session.register_update_ratio_check()
    session.register_magnitude_check(exploding_threshold=50.0)
    session.register_frozen_check(["unused.*"], action="collect")
    return session


def _train(kind: str) -> dict[str, Any]:
    """Trains with accumulation and every check; rank 1's inputs are a hundred times as large."""
    model = _wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = _session(model, optimizer)
    factor = 100.0 if dist.get_rank() == 1 else 1.0
    with no_collectives(), session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for micro_batch in range(MICRO_BATCHES):
                is_last = micro_batch == MICRO_BATCHES - 1
                if kind == "fully_shard":
                    model.set_requires_gradient_sync(is_last)
                    model(torch.full((2, 4), factor)).sum().backward()
                elif is_last:
                    model(torch.full((2, 4), factor)).sum().backward()
                else:
                    with model.no_sync():
                        model(torch.full((2, 4), factor)).sum().backward()
            optimizer.step()
    return session.report().to_dict()


def _codes(report: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in report["findings"]}


@pytest.mark.parametrize("kind", ["ddp", "ddp_views"])
def test_replicas_are_looked_at_before_their_gradients_are_reduced(rank_pool, kind):
    """The large gradients are rank 1's own, in buckets too, and are labelled as not reduced."""
    small, large = rank_pool.run(_train, kind)
    for report in (small, large):
        assert report["ledgers"]["scale"]["micro_batches_per_attempt"]["most_frequent"] == MICRO_BATCHES
        assert report["counters"]["backwards"] == STEPS * MICRO_BATCHES
        assert report["counters"]["accepted_steps"] == STEPS
        assert report["ledgers"]["clip"]["applied_clip_factors"] == []
        assert not [entry for entry in report["unavailable"] if "internal_error" in entry["reason"]]
        (unused,) = [one for one in report["findings"] if one["code"] == "param_received_no_gradient"]
        assert unused["names"] == ["unused.weight", "unused.bias"]
    assert "grad_magnitude_flagged" not in _codes(small)
    flagged = [one for one in large["findings"] if one["code"] == "grad_magnitude_flagged"]
    assert [one["names"] for one in flagged] == [["used.weight"]] * STEPS
    # Four micro-batches of two rows of 100: 800 in each of 12 elements, before the mean over ranks.
    local = 800.0 * 12**0.5
    assert flagged[0]["values"]["norm_highest"] == pytest.approx(local, rel=1e-5)
    assert flagged[0]["values"]["grad_sync"] == "local"


def test_shards_of_fully_shard_are_looked_at_where_they_lie(rank_pool):
    """Reduced, labelled as shards; backwards without a reduction reach no parameter, forwards count."""
    reports = rank_pool.run(_train, "fully_shard")
    for report in reports:
        assert report["ledgers"]["scale"]["micro_batches_per_attempt"]["most_frequent"] == MICRO_BATCHES
        assert report["counters"]["accepted_steps"] == STEPS
        assert report["coverage"]["parameters_that_fired"] == 2
        assert report["ledgers"]["clip"]["steps_observed"] == 0
        assert report["ledgers"]["clip"]["unavailable"] == ["sharded: the norm of a shard is no total"]
        assert not [entry for entry in report["unavailable"] if "internal_error" in entry["reason"]]
        flagged = [one for one in report["findings"] if one["code"] == "grad_magnitude_flagged"]
        assert {one["scope"] for one in flagged} == {"local_shard"}
        assert {one["values"]["grad_sync"] for one in flagged} == {"synced"}
        ratios = report["ledgers"]["update_ratio"][0]["parameters"]
        assert "used.weight" in ratios
    assert {"param_received_no_gradient"} <= _codes(reports[0])


def _train_spread(kind: str) -> dict[str, Any]:
    """Trains three steps of one backward each; of replicas, rank 1's inputs are a hundred times as large."""
    model = _wrapped("ddp" if kind == "zero_redundancy" else kind)
    parameters = list(model.parameters())
    if kind == "zero_redundancy":
        optimizer: Any = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.01)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.01)
    session = _session(model, optimizer)
    factor = 100.0 if dist.get_rank() == 1 and kind != "tensor_parallel" else 1.0
    with no_collectives(), session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((2, 4), factor)).sum().backward()
            optimizer.step()
    return session.report().to_dict()


@pytest.mark.parametrize("kind", ["hybrid", "tensor_parallel", "zero_redundancy"])
def test_every_way_to_spread_a_model_is_looked_at_without_a_collective(rank_pool, kind):
    """A step of an optimizer that shards its state is one step; nothing fails, and labels are right."""
    reports = rank_pool.run(_train_spread, kind)
    for report in reports:
        assert report["unavailable"] == []
        assert report["counters"]["accepted_steps"] == report["counters"]["backwards"] == STEPS
        scale = report["ledgers"]["scale"]
        assert (scale["attempts"], scale["accepted_steps"]) == (STEPS, STEPS)
        assert [one["optimizer"] for one in scale["optimizers"]] == [0]
        ratios = report["ledgers"]["update_ratio"][0]["parameters"]
        assert {name: one["num_looks"] for name, one in ratios.items()} == dict.fromkeys(
            ("used.weight", "used.bias", "unused.weight", "unused.bias"), STEPS
        )
        (unused,) = [one for one in report["findings"] if one["code"] == "param_received_no_gradient"]
        assert unused["names"] == ["unused.weight", "unused.bias"]
        assert report["coverage"]["parameters_that_fired"] == 2
    flagged = [
        [one for one in report["findings"] if one["code"] == "grad_magnitude_flagged"] for report in reports
    ]
    labels = [{(one["scope"], one["values"]["grad_sync"]) for one in of_rank} for of_rank in flagged]
    # 200 in each of 12 elements on rank 1, 2 on rank 0, and their mean once they are reduced.
    if kind == "hybrid":
        assert labels == [{("local_shard", "synced")}, {("local_shard", "synced")}]
        assert flagged[0][0]["values"]["norm_highest"] == pytest.approx(101.0 * 12**0.5, rel=1e-5)
    elif kind == "zero_redundancy":
        assert labels == [set(), {("local", "local")}]
        assert flagged[1][0]["values"]["norm_highest"] == pytest.approx(200.0 * 12**0.5, rel=1e-5)
    else:
        assert labels == [set(), set()]


def test_flat_shards_say_what_cannot_be_known_of_them(rank_pool):
    """FSDP1 tells no hook of a gradient, and a rank may have nothing of a parameter: typed, no crash."""
    reports = rank_pool.run(_train, "flat")
    for report in reports:
        assert report["counters"]["accepted_steps"] == STEPS
        assert report["ledgers"]["scale"]["micro_batches_per_attempt"]["most_frequent"] == MICRO_BATCHES
        reasons = [entry["reason"] for entry in report["unavailable"]]
        assert any(reason.startswith("no_hook_fired") for reason in reasons)
        assert not [reason for reason in reasons if "internal_error" in reason]
        assert {one["scope"] for one in report["findings"] if one["names"]} <= {"local_shard"}
        assert report["ledgers"]["clip"]["steps_observed"] == 0
        assert report["ledgers"]["clip"]["unavailable"] == ["sharded: the norm of a shard is no total"]
        # What lies on the other rank alone is not told to be without gradients here.
        held = {name for one in report["findings"] for name in one["names"]}
        assert "used.weight" not in held


def _nan_on_one(kind: str) -> dict[str, Any]:
    """A NaN is born on rank 1; every rank's step sees it after the reduction."""
    model = _wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = _session(model, optimizer)
    value = float("nan") if dist.get_rank() == 1 else 1.0
    raised = ""
    with session:
        model(torch.full((2, 4), value)).sum().backward()
        try:
            optimizer.step()
        except CheckViolationError as error:
            raised = str(error.fields["code"])
    found = session.report().to_dict()["findings"]
    return {
        "raised": raised,
        "born": [one["names"] for one in found if one["code"] == "param_grad_nonfinite_at_accumulation"],
        "finite": all(bool(torch.isfinite(p).all()) for p in model.parameters()),
    }


@pytest.mark.parametrize("kind", ["ddp", "ddp_views"])
def test_the_rank_on_which_a_nan_was_born_is_the_one_that_says_so(rank_pool, kind):
    """Both raise before the write; only one saw it before the reduction."""
    healthy, origin = rank_pool.run(_nan_on_one, kind)
    assert (healthy["raised"], origin["raised"]) == ("param_grad_nonfinite", "param_grad_nonfinite")
    assert healthy["finite"]
    assert origin["finite"]
    assert healthy["born"] == []
    assert origin["born"] == [["used.weight"]]


def _overflow_on_one() -> dict[str, Any]:
    """An infinite loss on rank 1 in one of four steps under a gradient scaler."""
    model = DistributedDataParallel(_Net().used)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = ChecksSession(model, optimizer, scaler=scaler)
    session.register_nonfinite_grad_check()
    with session:
        for step in range(4):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 and dist.get_rank() == 1 else 1.0
            scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    return session.report().to_dict()


def test_an_overflow_on_one_rank_is_one_skip_on_all(rank_pool):
    """The reduction spreads it; the rank on which it arose has the names."""
    healthy, origin = rank_pool.run(_overflow_on_one)
    for report in (healthy, origin):
        scale = report["ledgers"]["scale"]
        assert (scale["accepted_steps"], scale["skipped_attempts"], scale["backoff_events"]) == (3, 1, 1)
    assert healthy["findings"] == []
    (arisen,) = origin["findings"]
    assert (arisen["code"], arisen["attempt"]) == ("param_grad_nonfinite_at_accumulation", 2)


class _Branching(_Net):
    """Takes its second branch on rank 1 alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.used(x)
        return used.sum() + (self.unused(used).sum() if dist.get_rank() == 1 else 0.0)


def _used_on_one() -> dict[str, Any]:
    """Trains two steps; both ranks have the same reduced gradients."""
    model = DistributedDataParallel(_Branching(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    session.register_change_check(window=(1, 1), action="collect")
    with session:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).backward()
            optimizer.step()
    return session.report().to_dict()


def test_a_parameter_that_one_rank_alone_uses_is_named_by_the_others(rank_pool):
    """Its gradient is there after the reduction, and no backward of theirs has added to it."""
    without, using = rank_pool.run(_used_on_one)
    assert (without["findings"], using["findings"], using["unavailable"]) == ([], [], [])
    (entry,) = without["unavailable"]
    assert entry["reason"].startswith("no_hook_fired")
    assert entry["names"] == ["unused.weight", "unused.bias"]
    fired = [report["coverage"]["parameters_that_fired"] for report in (without, using)]
    assert fired == [2, 4]


def _raise_on_one(folder: str) -> dict[str, Any]:
    """A buffer becomes NaN on rank 1 alone; says what is on storage as the exception leaves."""
    net = _Net()
    net.register_buffer("table", torch.ones(2))
    model = DistributedDataParallel(net, find_unused_parameters=True, broadcast_buffers=False)
    inject_observer(model, output_dir=folder, run_id="raise", sampler=AlwaysSampler())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_param_check()
    found: dict[str, Any] = {"raised": "", "kept": []}
    with session:
        for step in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            if step == 1 and dist.get_rank() == 1:
                net.get_buffer("table").fill_(float("nan"))
            try:
                optimizer.step()
            except CheckViolationError as error:
                (path,) = Path(folder, f"rank-{dist.get_rank():03}").glob("checks-*.json")
                (kept,) = json.loads(path.read_text())["sessions"]
                found = {"raised": error.fields["code"], "kept": kept["findings"]}
    remove_observer(model)
    return found


def test_a_raise_on_one_rank_alone_is_on_storage_before_it_leaves(rank_pool, tmp_path):
    """The other rank would wait in its next collective until the launcher ends the group."""
    other, raising = rank_pool.run(_raise_on_one, str(tmp_path))
    assert other == {"raised": "", "kept": []}
    assert raising["raised"] == "param_value_nonfinite"
    assert raising["kept"][0]["names"] == ["table"]
    merged = merge_run(str(tmp_path)).result["findings"]
    assert isinstance(merged, dict)
    (kind,) = merged["by_code"]
    assert (kind["ranks"], kind["ranks_that_did_not_see_it"]) == ("1", "0")


def _observed_nan(folder: str) -> None:
    """A NaN in a gradient of rank 1 alone, behind the reduction, with an observer on both ranks."""
    model = _wrapped("ddp")
    inject_observer(model, output_dir=folder, run_id="checks", sampler=AlwaysSampler())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check(action="collect")
    session.register_magnitude_check()
    with session:
        for attempt in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            if attempt == 1 and dist.get_rank() == 1:
                next(model.parameters()).grad.view(-1)[0] = float("nan")
            optimizer.step()
    remove_observer(model)


def test_the_merge_names_the_rank_that_alone_saw_a_finding(rank_pool, tmp_path):
    """And the one that did not."""
    rank_pool.run(_observed_nan, str(tmp_path))
    found = merge_run(str(tmp_path)).result["findings"]
    assert isinstance(found, dict)
    assert (found["ranks_with_checks"], found["ranks_without_checks"]) == ("0-1", "")
    (kind,) = [one for one in found["by_code"] if one["code"] == "param_grad_nonfinite"]
    assert (kind["ranks"], kind["ranks_that_did_not_see_it"]) == ("1", "0")
    assert (kind["first"]["rank"], kind["first"]["attempt"]) == (1, 1)
    assert kind["first"]["finding"]["attempt"] == 1
    assert kind["by_rank"][0]["names"] == ["used.weight"]
    assert found["checks_run"]["nonfinite_grad"] == "0-1"
    assert found["finalized"] == {"scope_exit": "0-1"}
    assert folder_problems(tmp_path)["checks"] == []
