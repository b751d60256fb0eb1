"""Audits and probes of spread models on two ranks: each rank looks at its own part, and nobody waits."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchinstruments.checks import LivenessProbe, RangeProbe, func, grad_health, module, param_health
from torchinstruments.testing.collectives import no_collectives
from torchinstruments.testing.ranks import RankPool

KINDS = ("ddp", "fsdp1", "fsdp2", "tensor_parallel")


OWN = {
    "ddp": {"local"},
    "fsdp1": {"local_shard"},
    "fsdp2": {"local_shard"},
    "tensor_parallel": {"local", "local_shard", "unknown"},
}
"""What the norms of parameters' gradients cover; layer 0 is whole, and so is the last one's bias."""


def build(kind: str) -> Any:
    """Returns a model of three layers, the first of which has fewer rows than there are ranks."""
    torch.manual_seed(7)
    model: Any = nn.Sequential(nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].bias.fill_(10.0)
        model[2].weight[0, 0] = float("nan")
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer)
        return fully_shard(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"2": ColwiseParallel(), "4": RowwiseParallel()})


def look(kind: str) -> dict[str, Any]:
    """Returns what a rank sees of its part, while no collective may be called."""
    model = build(kind)
    x = torch.ones(3, 4) * (1 + dist.get_rank())
    with no_collectives():
        health = param_health(model)
        ranges = RangeProbe({func("relu"): (0, 1), module("4"): (-1, 1)})
        liveness = LivenessProbe([func("linear")])
        with grad_health(model, scaler=None) as gradients, ranges.watch(model), liveness.watch(model):
            model(x).sum().backward()
        health.to_json()
        gradients.to_json()
        ranges.to_json()
        return {
            "rows": {row.name: (row.scope.value, row.reason) for row in health.rows},
            "num_nan": sum(row.scanned.num_nan for row in health.rows if row.scanned is not None),
            "num_values": health.coverage["num_values"],
            "scope": health.coverage["scope"],
            "errors": [
                entry.reason for entry in (*ranges.unavailable, *liveness.unavailable, *gradients.unavailable)
            ],
            "flags": {row.module: row.flags for row in gradients.rows},
            "own": {row.parameter_scope.value for row in gradients.rows if row.num_parameters},
            "arrived": {row.module: row.num_arrived for row in gradients.rows},
            "codes": sorted({finding.code for finding in ranges.findings}),
            "linears": len(liveness.facts()),
            "scopes": {one.site: one.scope.value for one in (*liveness.facts(), *ranges.facts())},
        }


def test_audits_and_probes_of_spread_models_look_at_this_ranks_part(rank_pool: RankPool) -> None:
    """Under DDP all of it, under sharding a labelled part, also an empty one; no collective, and no crash."""
    for kind in KINDS:
        ranks = rank_pool.run(look, kind)
        for found in ranks:
            assert not [reason for reason in found["errors"] if "error" in reason], (kind, found)
            assert set(found["rows"]) == {f"{layer}.{name}" for layer in "024" for name in ("weight", "bias")}
            if kind == "tensor_parallel":
                # The sum over ranks is under way when the layer returns, and looking would wait for it.
                assert "async_collective" in found["errors"]
                assert found["codes"] == ["activation_range_violated"]
            else:
                assert found["codes"] == ["activation_nan", "activation_range_violated"], kind
            assert found["arrived"]["4"] == 1, kind
            assert found["own"] == OWN[kind], (kind, found)
            # A partial sum of one rank is no value of the layer.
            assert found["linears"] == (2 if kind == "tensor_parallel" else 3), kind
            assert ("partial_placement" in found["errors"]) == (kind == "tensor_parallel")
            assert "gradient_nonfinite" in found["flags"]["0"], kind
            # The columns of the parallel layer are spread; everything else that a layer puts out is whole.
            spread = {site for site, scope in found["scopes"].items() if scope == "local_shard"}
            assert spread == ({"2:linear"} if kind == "tensor_parallel" else set()), (kind, found["scopes"])
        scopes = [found["scope"] for found in ranks]
        num_values = [found["num_values"] for found in ranks]
        if kind == "ddp":
            assert (scopes, num_values) == (["local"] * 2, [31, 31])
            assert [found["num_nan"] for found in ranks] == [1, 1]
        elif kind == "tensor_parallel":
            assert scopes == ["local_shard"] * 2
            assert sum(found["num_nan"] for found in ranks) == 1
        else:
            assert (scopes, sum(num_values)) == (["local_shard"] * 2, 31)
            assert sum(found["num_nan"] for found in ranks) == 1
            assert any(reason == "empty" for found in ranks for _, reason in found["rows"].values())
