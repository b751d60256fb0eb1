"""Fingerprints of replicas and shards on real ranks: what is equal, what is seen, and what is not judged."""

from pathlib import Path

import polars as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer
from torchinstruments.ranks.replicas import ReplicaKeys
from torchinstruments.testing.collectives import no_collectives

STEPS = 4
FLIP_BEFORE = 2


def build() -> nn.Sequential:
    """Returns the same model on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, folder: str, run_id: str, *, flips: str = "", evaluates: bool = False) -> None:
    """Trains on data of this rank's own; before the third step rank 1 has one bit flipped.

    An evaluation before each step leaves the parameters of the root gathered, where FSDP2 shards it.
    """
    torch.manual_seed(11 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with no_collectives():
        inject_observer(model, output_dir=folder, run_id=run_id, sampler=AlwaysSampler(), fingerprints=True)
        for step in range(STEPS):
            if flips and step == FLIP_BEFORE and dist.get_rank() == 1:
                parameter = model.get_parameter(flips).detach()
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.view(torch.int32).view(-1)[3] ^= 1
            if evaluates:
                with torch.no_grad():
                    model(torch.randn(6, 8))
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        remove_observer(model)


def train_ddp(folder: str, flips: str = "") -> None:
    """Trains under DDP."""
    model = DistributedDataParallel(build(), broadcast_buffers=False)
    train(model, folder, "ddp", flips=flips)


def train_fsdp1(folder: str) -> None:
    """Trains under FSDP1, whose shards are plain tensors."""
    train(FullyShardedDataParallel(build(), device_id=torch.device("cpu")), folder, "fsdp1")


def train_fsdp2(folder: str) -> None:
    """Trains under FSDP2, each layer by itself."""
    model = build()
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    train(model, folder, "fsdp2")


def train_hsdp(folder: str, flips: str = "", *, evaluates: bool = False) -> None:
    """Trains under HSDP on two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build()
    fully_shard(model, mesh=mesh)
    train(model, folder, "hsdp", flips=flips, evaluates=evaluates)


def fingerprints(folder: Path) -> pl.DataFrame:
    """Returns the table of all ranks."""
    return open_run(str(folder)).fingerprints().collect()


def differing(table: pl.DataFrame) -> list[tuple[int, str]]:
    """Returns attempt and tensor where ranks of one key hold different bytes, in order."""
    judged = table.filter(pl.col("replica_key") != "")
    by_replica = judged.group_by("attempt", "tensor", "replica_key").agg(pl.col("digest").n_unique())
    found = by_replica.filter(pl.col("digest") > 1).select("attempt", "tensor").unique()
    return sorted(found.rows())


def test_replicas_of_ddp_share_a_key_and_their_digests(three_ranks, tmp_path: Path):
    """Three ranks with data of their own: every parameter is equal in every attempt."""
    three_ranks.run(train_ddp, str(tmp_path / "run"))
    table = fingerprints(tmp_path / "run")
    assert table.height == 3 * STEPS * 9
    parameters = table.filter(pl.col("kind") == "parameter")
    assert parameters["replica_key"].unique().to_list() == ["ddp ranks=0-2"]
    assert set(parameters["tensor"]) == {f"{at}.{name}" for at in (0, 1, 3) for name in ("weight", "bias")}
    assert differing(table) == []
    # They are not equal because nothing ever changed.
    weights = parameters.filter(pl.col("tensor") == "0.weight")
    assert weights["digest"].n_unique() == STEPS


def test_buffers_differ_between_the_ranks_of_ddp_and_are_not_judged(rank_pool, tmp_path: Path):
    """Statistics of a batch norm are each rank's own, and raise no alarm."""
    rank_pool.run(train_ddp, str(tmp_path / "run"))
    table = fingerprints(tmp_path / "run")
    buffers = table.filter(pl.col("kind") == "buffer")
    assert set(buffers["replica_key"]) == {""}
    last = buffers.filter((pl.col("tensor") == "1.running_mean") & (pl.col("attempt") == STEPS - 1))
    assert last["digest"].n_unique() == 2
    assert differing(table) == []


def test_one_flipped_bit_on_one_rank_is_seen_in_that_tensor_alone(rank_pool, tmp_path: Path):
    """From its attempt on; the others stay equal in it, and differ only once gradients carry it further."""
    rank_pool.run(train_ddp, str(tmp_path / "run"), "module.0.weight")
    found = differing(fingerprints(tmp_path / "run"))
    assert [tensor for attempt, tensor in found if attempt == FLIP_BEFORE] == ["0.weight"]
    assert {attempt for attempt, _ in found} == {FLIP_BEFORE, FLIP_BEFORE + 1}


def test_flat_shards_of_fsdp1_are_not_judged(rank_pool, tmp_path: Path):
    """They are different parts by design, and nothing in them says so."""
    rank_pool.run(train_fsdp1, str(tmp_path / "run"))
    table = fingerprints(tmp_path / "run")
    assert set(table["replica_key"]) == {""}
    shards = table.filter((pl.col("kind") == "parameter") & (pl.col("attempt") == 0))
    assert shards["digest"].n_unique() == 2


def test_shards_of_fsdp2_have_keys_of_their_own(rank_pool, tmp_path: Path):
    """A shard is one rank's alone."""
    rank_pool.run(train_fsdp2, str(tmp_path / "run"))
    table = fingerprints(tmp_path / "run").filter(pl.col("kind") == "parameter")
    assert table.height == 2 * STEPS * 6
    keys = table.group_by("rank").agg(pl.col("replica_key").unique()).sort("rank")
    assert keys["replica_key"].to_list() == [["mesh 0=S(0)@0/2 ranks=0"], ["mesh 0=S(0)@1/2 ranks=1"]]
    assert set(table.filter(pl.col("tensor") == "0.weight")["shape"]) == {"8x8"}
    assert differing(table) == []


def train_after_evaluations(folder: str) -> int:
    """Returns how many forwards were measured of a training in which FSDP2 frees what was gathered."""
    train_hsdp(folder, "0.weight", evaluates=True)
    return open_run(folder).samples().filter(pl.col("rank") == dist.get_rank()).collect().height


def test_a_parameter_that_is_gathered_has_the_fingerprint_of_its_part(four_ranks, tmp_path: Path):
    """An evaluation leaves a root gathered: keys, shapes and what is seen are those of any other step.

    FSDP2 frees the gathered parameters behind it, which no reading of them may prevent.
    """
    assert four_ranks.run(train_after_evaluations, str(tmp_path / "run")) == [2 * STEPS] * 4
    table = fingerprints(tmp_path / "run").filter(pl.col("kind") == "parameter")
    keys = table.group_by("rank").agg(pl.col("replica_key").unique()).sort("rank")
    assert keys["replica_key"].to_list() == [
        [f"mesh replicate=R shard=S(0)@{rank % 2}/2 ranks={rank % 2},{rank % 2 + 2}"] for rank in range(4)
    ]
    assert set(table.filter(pl.col("tensor") == "0.weight")["shape"]) == {"8x8"}
    flipped = table.filter(pl.col("attempt") == FLIP_BEFORE)
    assert differing(flipped) == [(FLIP_BEFORE, "0.weight")]
    assert differing(flipped.filter(pl.col("rank").is_in([0, 2]))) == []


def test_hsdp_is_equal_across_replicas_and_not_across_shards(four_ranks, tmp_path: Path):
    """Ranks 0 and 2 hold the first half of everything, 1 and 3 the second."""
    four_ranks.run(train_hsdp, str(tmp_path / "run"))
    table = fingerprints(tmp_path / "run").filter(pl.col("kind") == "parameter")
    keys = dict(table.select("rank", "replica_key").unique().sort("rank").rows())
    assert keys == {
        rank: f"mesh replicate=R shard=S(0)@{rank % 2}/2 ranks={rank % 2},{rank % 2 + 2}" for rank in range(4)
    }
    assert differing(table) == []
    weights = table.filter((pl.col("tensor") == "0.weight") & (pl.col("attempt") == STEPS - 1))
    assert weights["digest"].n_unique() == 2


def test_one_flipped_bit_of_a_shard_is_seen_against_its_replica(four_ranks, tmp_path: Path):
    """Rank 3 holds the same half as rank 1; the other half is whole."""
    four_ranks.run(train_hsdp, str(tmp_path / "run"), "0.weight")
    table = fingerprints(tmp_path / "run").filter(pl.col("attempt") == FLIP_BEFORE)
    assert differing(table) == [(FLIP_BEFORE, "0.weight")]
    assert differing(table.filter(pl.col("rank").is_in([0, 2]))) == []


def keys_of(model: nn.Module) -> dict[str, str]:
    """Returns the key of each parameter."""
    keys = ReplicaKeys(list(model.modules()))
    return {name: keys.of(parameter) for name, parameter in model.named_parameters()}


def keys_of_odd_ddp() -> list[dict[str, str]]:
    """Returns the keys of models that DDP manages in part, or in a way of its own."""
    partly = build()
    partly.__dict__["_ddp_params_and_buffers_to_ignore"] = ["3.weight"]
    partly[0].bias.requires_grad_(False)
    hooked = DistributedDataParallel(nn.Linear(2, 2, bias=False))
    hooked.register_comm_hook(None, fp16_compress_hook)
    foreign = DistributedDataParallel(nn.Linear(2, 2, bias=False))
    foreign.register_comm_hook(None, own_hook)
    alone = dist.new_subgroups(1)[0]
    stage = DistributedDataParallel(nn.Linear(2, 2, bias=False), process_group=alone)
    twice = DistributedDataParallel(nn.Sequential(stage), process_group=dist.group.WORLD)
    mixed = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2, bias=False)), nn.Linear(2, 2, bias=False))
    return [keys_of(one) for one in (DistributedDataParallel(partly), hooked, foreign, stage, twice, mixed)]


def own_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leaves each rank its own gradients, as averaging of models does."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_only_what_ddp_provably_keeps_equal_has_a_key(rank_pool):
    """Ignored and frozen ones, foreign hooks and what lies outside have none; groups tell keys apart."""
    world = "ddp ranks=0,1"
    for rank, (partly, hooked, foreign, stage, twice, mixed) in enumerate(rank_pool.run(keys_of_odd_ddp)):
        assert {name for name, key in partly.items() if key == ""} == {"module.0.bias", "module.3.weight"}
        assert set(partly.values()) == {"", world}
        assert hooked == {"module.weight": world}
        assert foreign == {"module.weight": ""}
        assert stage == {"module.weight": f"ddp ranks={rank}"}
        assert twice == {"module.0.module.weight": ""}
        assert mixed == {"0.module.weight": world, "1.weight": ""}


def keys_of_tensor_parallel() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the keys of a model in two halves, on one mesh of all ranks and on one a pair of ranks."""
    model = build()
    plan: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    whole = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, whole, plan)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = build()
    parallelize_module(other, pairs["tp"], plan)
    return keys_of(model), keys_of(other)


def test_parts_of_tensor_parallelism_have_keys_by_coordinate_and_mesh(four_ranks):
    """A replicated bias is compared within its mesh; two meshes of two ranks are never mixed."""
    for rank, (whole, pairs) in enumerate(four_ranks.run(keys_of_tensor_parallel)):
        first = rank - rank % 2
        assert whole["0.weight"] == f"mesh tp=S(0)@{rank}/4 ranks={rank}"
        assert whole["3.weight"] == f"mesh tp=S(1)@{rank}/4 ranks={rank}"
        assert whole["3.bias"] == "mesh tp=R ranks=0-3"
        assert whole["1.weight"] == ""
        assert pairs["0.bias"] == f"mesh tp=S(0)@{rank % 2}/2 ranks={rank}"
        assert pairs["3.bias"] == f"mesh tp=R ranks={first},{first + 1}"


def keys_inside_the_wrapper() -> list[dict[str, str]]:
    """Returns the keys that the model inside DDP finds in the wrapper's forward, and outside of it."""
    inner = nn.Linear(2, 2)
    wrapper = DistributedDataParallel(inner)
    found: list[dict[str, str]] = []

    def pre_hook(module: nn.Module, _: object) -> None:
        found.append(keys_of(module))

    inner.register_forward_pre_hook(pre_hook)
    wrapper(torch.ones(1, 2))
    return [*found, keys_of(inner)]


def test_the_model_inside_a_wrapper_finds_it_while_it_runs(rank_pool):
    """An observer may be attached to the inner model."""
    world = "ddp ranks=0,1"
    expected = [{"weight": world, "bias": world}, {"weight": "", "bias": ""}]
    assert rank_pool.run(keys_inside_the_wrapper) == [expected] * 2
