"""What the merge finds of real ranks: the rank where a NaN was born, a replica gone astray, a late rank."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import AlwaysSampler, inject_observer, merge_run, remove_observer
from torchinstruments.testing.ranks import RankPool

STEPS = 14
NAN_AT = 12
LOCAL_AT = 4
LATE_S = 0.05


def train(folder: str) -> None:
    """Rank 1 loads slowly, leaves one step unsynchronised and at last makes a NaN in its backward."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(11 + rank)
    inject_observer(
        model,
        output_dir=folder,
        run_id="findings",
        sampler=AlwaysSampler(),
        signals=("output", "output_gradient", "parameter_gradient"),
        fingerprints=True,
    )
    for step in range(STEPS):
        if rank == 1:
            time.sleep(LATE_S)
        if step == LOCAL_AT:
            with model.no_sync():
                loss = model(torch.randn(6, 8)).square().mean()
                loss.backward()
        else:
            loss = model(torch.randn(6, 8)).square().mean()
            # The loss is finite, its gradient is not.
            (loss * (float("nan") if rank == 1 and step == NAN_AT else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    remove_observer(model)


def test_each_finding_names_its_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    """The merge names rank and moment of everything that this training did wrong."""
    rank_pool.run(train, str(tmp_path))
    result: Any = merge_run(str(tmp_path)).result
    assert result["coverage"]["complete"]
    steps = result["steps"]
    assert (steps["same_steps"], steps["compared_attempts"]) == (True, STEPS)
    assert [one["applied"] for one in steps["ranks"]] == [STEPS, STEPS]
    assert steps["unsynchronised_steps"]["ranks"] == "0-1"
    assert steps["unsynchronised_steps"]["steps"] == 2
    assert steps["unsynchronised_steps"]["first"]["attempt"] == LOCAL_AT
    replicas = result["replicas"]
    first = replicas["first_divergence"]
    # Fingerprints are taken when an attempt begins: the step before it is the one that drifted.
    assert (first["attempt"], first["tensor"]) == (LOCAL_AT + 1, "0.weight")
    assert first["last_equal_before"]["attempt"] == LOCAL_AT
    assert [one["ranks"] for one in first["values"]] == ["0", "1"]
    assert replicas["diverged_tensors"] == 4
    nonfinite = result["first_nonfinite"]["first"]
    assert (nonfinite["rank"], nonfinite["ranks"], nonfinite["ranks_finite"]) == (1, "1", "0")
    assert (nonfinite["attempt"], nonfinite["phase"], nonfinite["layer"]) == (NAN_AT, "backward", "2")
    reduced = result["first_nonfinite"]["by_phase"]["reduced"]
    assert (reduced["attempt"], reduced["ranks"]) == (NAN_AT, "0-1")
    assert result["first_nonfinite"]["by_phase"]["forward"]["attempt"] == NAN_AT + 1
    [work] = result["own_work"]["generations"]
    assert (work["judged"], work["common_attempts"]) == (True, STEPS - 1)
    # Whether rank 0 is quicker is the machine's affair; a sleep is never shorter than it was asked for.
    assert {one["rank"]: one["gap_s"] >= LATE_S for one in work["ranks"]}[1]
