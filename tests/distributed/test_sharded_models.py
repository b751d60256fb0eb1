"""What is measured of sharded models, how it is labelled, and that training stays what it was."""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from torchinstruments import AlwaysSampler, inject_observer, merge_run, open_run, remove_observer
from torchinstruments.testing.collectives import no_collectives
from torchinstruments.testing.ranks import RankPool

SIGNALS = ("input", "output", "output_gradient", "parameter", "parameter_gradient")
NUM_STEPS = 4


class Block(nn.Module):
    """A norm and a perceptron beside a residual."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU()
        self.down = nn.Linear(2 * width, width)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) -> the same."""
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks between an embedding and a head of a single output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    @override
    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, time) -> (batch, time, 1)."""
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LAYERS = [
    "embedding",
    *(f"blocks.{block}.{layer}" for block in (0, 1) for layer in ("norm", "up", "act", "down")),
    "head",
]


def _build() -> Model:
    torch.manual_seed(7)
    return Model()


def _shard(model: Model, mesh: DeviceMesh | None = None, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _spread(model: Model, mesh: DeviceMesh) -> Model:
    """Tensor parallelism as its documentation has it."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def _flat(model: Model) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def _flattened(model: Model) -> nn.Module:
    """Blocks and the rest of the model have a flat parameter each, and the layers have none."""
    policy = ModuleWrapPolicy({Block})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=False, device_id=device, auto_wrap_policy=policy)


def _unsharded(model: Model) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )


def _checkpointed(model: Model) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return _shard(model)


def _plain(model: Model) -> nn.Module:
    return model


def _tensor_parallel(model: Model) -> nn.Module:
    return _spread(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))


def _mixed(model: Model) -> nn.Module:
    return _shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def _offloaded(model: Model) -> nn.Module:
    return _shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _replicated_shards(model: Model) -> nn.Module:
    return _shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _two_dimensional(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _shard(_spread(model, mesh["tp"]), mesh["dp"])


WRAPPERS: dict[str, Callable[[Model], nn.Module]] = {
    "plain": _plain,
    "ddp": _ddp,
    "fully_shard": _shard,
    "flat": _flat,
    "flattened": _flattened,
    "unsharded": _unsharded,
    "checkpointed": _checkpointed,
    "tensor_parallel": _tensor_parallel,
    "mixed": _mixed,
    "offloaded": _offloaded,
    "replicated_shards": _replicated_shards,
    "two_dimensional": _two_dimensional,
}

OF_FOUR_RANKS = {"replicated_shards", "two_dimensional"}


def _attach(model: nn.Module, folder: str, signals: tuple[str, ...] = SIGNALS) -> None:
    inject_observer(model, output_dir=folder, run_id="run", sampler=AlwaysSampler(), signals=signals)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return (tensor if to_local is None else to_local()).detach().clone()


def _train(model: nn.Module, num_steps: int = NUM_STEPS) -> list[torch.Tensor]:
    """Trains on the same data on all ranks, with an evaluation between steps; returns all there is to see."""
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        output = model(torch.randint(16, (2, 4)))
        output.float().square().mean().backward()
        seen.append(_local(output))
        seen.extend(_local(p.grad) for p in model.parameters() if p.grad is not None)
        optimizer.step()
        seen.extend(_local(p) for p in model.parameters())
        with torch.no_grad():
            seen.append(_local(model(torch.zeros(2, 4, dtype=torch.long))))
    return [*seen, torch.get_rng_state()]


def _compare(folder: str, wrapper: str) -> tuple[bool, int]:
    """Returns whether a training with every signal measured is the same, without a collective of its own."""
    inner = _build()
    twin = copy.deepcopy(inner)
    bare = _train(WRAPPERS[wrapper](inner))
    model = WRAPPERS[wrapper](twin)
    with no_collectives():
        _attach(model, folder)
        observed = _train(model)
        remove_observer(model)
    return all(torch.equal(a, b) for a, b in zip(bare, observed, strict=True)), len(bare)


def _observed_in(frame: FrameType | None) -> bool:
    """Returns whether this package is on the stack."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torchinstruments.observe"):
            return True
        frame = frame.f_back
    return False


def _by_sequence(folder: str) -> tuple[list[str], bool]:
    """A block spread by sequence; returns the kinds of what its layers put out, and whether a look waited."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(7)
    block = Block()
    plan: dict[str, ParallelStyle] = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, mesh, plan)
    kinds: list[str] = []
    looks: list[bool] = []
    original = AsyncCollectiveTensor.trigger_wait

    def note(_module: nn.Module, _args: object, output: object) -> None:
        kinds.append(type(output).__name__)

    def wait(tensor: AsyncCollectiveTensor) -> torch.Tensor:
        looks.append(_observed_in(sys._getframe(1)))
        return original(tensor)

    for module in (block.norm, block.up, block.down):
        module.register_forward_hook(note)
    _attach(block, folder)
    setattr(AsyncCollectiveTensor, "trigger_wait", wait)  # noqa: B010 - for the length of this function
    try:
        block(torch.randn(2, 2, 8)).square().sum().backward()
    finally:
        setattr(AsyncCollectiveTensor, "trigger_wait", original)  # noqa: B010
    remove_observer(block)
    assert looks, "nobody waited at all, so that the guard has seen nothing"
    return kinds, any(looks)


def _partial(folder: str) -> None:
    """A layer that puts out partial sums, which the program adds up itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    plan: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(use_local_output=False),
        "1": RowwiseParallel(output_layouts=Partial(), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    with no_collectives():
        _attach(model, folder)
        output = model(torch.ones(2, 4))
        output.redistribute(placements=[Replicate()]).to_local().sum().backward()
        remove_observer(model)


def _gathered_root(folder: str) -> None:
    """A sampled forward behind an evaluation, which leaves the root's own parameters gathered."""
    model = _shard(_build())
    _attach(model, folder, ("output", "parameter", "parameter_gradient"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.zeros(2, 4, dtype=torch.long))
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    remove_observer(model)


def _half_sharded(folder: str) -> None:
    """Only the blocks are sharded, so that nobody reduces the gradients of the rest."""
    model = _build()
    for block in model.blocks:
        fully_shard(block)
    _attach(model, folder, ("output", "parameter_gradient"))
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    remove_observer(model)


@dataclass(frozen=True)
class Observed:
    """Trainings under every wrapper.

    Attributes:
        folders: Of their telemetry.
        same: Of each rank: whether the training was the same without an observer, and what was compared.
    """

    folders: dict[str, Path]
    same: dict[str, list[tuple[bool, int]]]

    def rows(self, wrapper: str, rank: int = 0) -> pl.DataFrame:
        """Returns the means of one rank."""
        return _means(self.folders[wrapper], rank)


@pytest.fixture(scope="module")
def observed(rank_pool: RankPool, four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """The same training under every wrapper, with every signal measured and collectives forbidden to that."""
    folder = tmp_path_factory.mktemp("wrappers")
    folders = {wrapper: folder / wrapper for wrapper in WRAPPERS}
    same = {
        wrapper: (four_ranks if wrapper in OF_FOUR_RANKS else rank_pool).run(
            _compare, str(folders[wrapper]), wrapper
        )
        for wrapper in WRAPPERS
    }
    return Observed(folders, same)


def _means(folder: Path, rank: int = 0) -> pl.DataFrame:
    history = open_run(str(folder)).history().collect()
    return history.filter((pl.col("rank") == rank) & (pl.col("metric") == "mean"))


def _scopes(rows: pl.DataFrame, signal: str) -> dict[str, str]:
    """Returns layer to scope, each of which must be the same in all samples."""
    found = rows.filter(pl.col("signal") == signal).select("layer", "scope").unique()
    assert found["layer"].is_unique().all()
    return dict(found.iter_rows())


def _mesh(folder: Path) -> list[tuple[list[int], list[str]]]:
    """Returns coordinates and axis names, by rank, as the manifests have them."""
    manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*/process-*.json"))]
    return [(manifest["mesh_coordinates"], manifest["mesh_axis_names"]) for manifest in manifests]


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_every_bit_of_a_training_is_the_same_under_every_wrapper(observed: Observed, wrapper: str) -> None:
    """Outputs, gradients, parameters and RNG state of each rank, and no collective was the observer's."""
    for is_same, num_compared in observed.same[wrapper]:
        assert is_same
        assert num_compared > (30 if wrapper == "flattened" else 90)
    samples = open_run(str(observed.folders[wrapper])).samples().collect()
    assert set(samples["errors"]) == {0}
    assert samples.height == 2 * NUM_STEPS * len(observed.same[wrapper])


def test_layers_have_one_name_under_every_wrapper(observed: Observed) -> None:
    """No wrapper leaves a trace in it."""
    for wrapper in WRAPPERS:
        rows = observed.rows(wrapper)
        assert (
            rows.filter(pl.col("signal") == "output")["layer"].unique(maintain_order=True).to_list() == LAYERS
        )


def test_outputs_of_the_same_data_have_the_same_statistics_under_every_wrapper(observed: Observed) -> None:
    """What spreads parameters alone computes the same to the last bit on every rank."""
    columns = ["sample_id", "layer", "metric", "value", "shape"]
    chosen = (pl.col("signal") == "output") & (pl.col("sample_id") == 0)
    plain = open_run(str(observed.folders["plain"])).history().filter(chosen).collect()
    expected = plain.filter(pl.col("rank") == 0).select(columns).rows()
    for wrapper in (
        "plain",
        "ddp",
        "fully_shard",
        "flat",
        "flattened",
        "unsharded",
        "checkpointed",
        "offloaded",
        "replicated_shards",
    ):
        found = open_run(str(observed.folders[wrapper])).history().filter(chosen).collect()
        for rank in range(len(observed.same[wrapper])):
            assert found.filter(pl.col("rank") == rank).select(columns).rows() == expected


@pytest.mark.parametrize("wrapper", ["fully_shard", "flat", "mixed", "offloaded", "replicated_shards"])
def test_what_spreads_parameters_alone_leaves_outputs_whole(observed: Observed, wrapper: str) -> None:
    """Outputs and their gradients are local; parameters and their gradients are shards."""
    rows = observed.rows(wrapper)
    assert _scopes(rows, "output") == dict.fromkeys(LAYERS, "local")
    assert set(rows.filter(pl.col("signal") == "output_gradient")["scope"]) == {"local"}
    for signal in ("parameter", "parameter_gradient"):
        assert set(rows.filter(pl.col("signal") == signal)["scope"]) == {"local_shard"}


def _catalog(path: Path) -> dict[str, tuple[int | None, int | None]]:
    """Returns layer to the entries of its own parameters, all and trainable."""
    modules = json.loads(path.read_text())["modules"]
    return {one["layer"]: (one["parameter_count"], one["trainable_parameter_count"]) for one in modules}


def test_catalogs_count_whole_parameters_under_every_wrapper(observed: Observed) -> None:
    """A rank's piece of a flat parameter, or none, is not what a layer has."""
    (first, _) = sorted(observed.folders["plain"].glob("rank-*/modules-*.json"))
    expected = _catalog(first)
    assert expected["blocks.0.up"] == (8 * 16 + 16, 8 * 16 + 16)
    for wrapper in WRAPPERS:
        catalogs = sorted(observed.folders[wrapper].glob("rank-*/modules-*.json"))
        assert len(catalogs) == len(observed.same[wrapper])
        assert [_catalog(path) for path in catalogs] == [expected] * len(catalogs), wrapper


def test_layers_whose_parameters_are_in_a_flat_one_say_so(observed: Observed) -> None:
    """Each of them as often as it would have been measured, and never as anything else."""
    in_flat, in_place = observed.rows("flattened"), observed.rows("flat")
    columns = ["sample_id", "layer", "signal", "stage", "tensor_path"]
    chosen = pl.col("signal").str.starts_with("parameter")
    found = in_flat.filter(chosen)
    assert found.height > 0
    assert {reason.partition(":")[0] for reason in found["unavailable_reason"]} == {"inside_flat_parameter"}
    assert sorted(found.select(columns).rows()) == sorted(in_place.filter(chosen).select(columns).rows())


def test_what_is_flattened_and_not_sharded_is_whole(observed: Observed) -> None:
    """Every rank holds and steps all of it; its gradients are still handed out only once reduced."""
    rows, plain = observed.rows("unsharded"), observed.rows("plain")
    assert set(rows.filter(pl.col("signal").str.starts_with("parameter"))["scope"]) == {"local"}
    columns = ["sample_id", "layer", "tensor_path", "shape"]
    for part in (pl.col("signal") == "parameter", pl.col("stage") == "reduced"):
        assert rows.filter(part).select(columns).rows() == plain.filter(part).select(columns).rows()
        assert set(rows.filter(part & (pl.col("sample_id") % 2 == 0))["unavailable_reason"]) == {""}
    early = rows.filter(pl.col("stage") == "local_accumulated")
    assert {reason.partition(":")[0] for reason in early["unavailable_reason"]} == {"no_gradient"}


def _attach_inside(folder: str) -> None:
    """Observes the model inside its wrapper, whose handle is out of sight from there."""
    inner = _build()
    _flat(inner)
    _attach(inner, folder)
    remove_observer(inner)


def test_a_count_that_nothing_tells_is_null(rank_pool: RankPool, tmp_path: Path) -> None:
    """Of a piece the model inside knows neither the wrapper nor the whole."""
    rank_pool.run(_attach_inside, str(tmp_path))
    for path in tmp_path.glob("rank-*/modules-*.json"):
        counts = _catalog(path)
        assert counts["blocks.0.up"] == (None, None)
        assert counts["blocks.0.act"] == (0, 0)


def test_mixed_precision_is_seen_as_it_is(observed: Observed) -> None:
    """Layers compute in bfloat16; the parameters that the optimizer has are float32."""
    rows = observed.rows("mixed")
    dtypes = {signal: set(own["dtype"]) for (signal,), own in rows.group_by("signal")}
    assert dtypes["output_gradient"] == {"bfloat16"}
    assert dtypes["parameter"] == dtypes["parameter_gradient"] == {"float32"}


def test_empty_shards_say_so(observed: Observed) -> None:
    """One row of weights cannot be divided among two ranks, so that the second one has none."""
    for rank, reason in ((0, ""), (1, "empty")):
        rows = observed.rows("fully_shard", rank).filter(pl.col("layer") == "head")
        parameters = rows.filter(pl.col("signal") == "parameter")
        assert set(parameters["unavailable_reason"]) == {reason}
        reduced = rows.filter(pl.col("stage") == "reduced")
        assert set(reduced["unavailable_reason"]) == {reason}
    pieces = observed.rows("flat").filter((pl.col("layer") == "head") & (pl.col("stage") == "applied"))
    assert set(pieces["unavailable_reason"]) == {"empty"}


@pytest.mark.parametrize("wrapper", ["tensor_parallel", "two_dimensional"])
def test_plain_outputs_of_spread_layers_say_that_they_may_be_parts(observed: Observed, wrapper: str) -> None:
    """A layer beside them puts out a whole or a part, as its input was, and nothing tells."""
    rows = observed.rows(wrapper)
    spread = {"blocks.0.up", "blocks.1.up"}
    under_way = {"blocks.0.down", "blocks.1.down"}
    scopes = _scopes(rows, "output")
    assert {layer for layer, scope in scopes.items() if scope == "local_of_dtensor"} == spread
    assert {scope for layer, scope in scopes.items() if layer not in spread} == {"unknown"}
    outputs = rows.filter(pl.col("signal") == "output")
    refused = outputs.filter(pl.col("unavailable_reason") != "")
    assert set(refused["layer"]) == under_way
    assert set(refused["unavailable_reason"]) == {"async_collective"}
    assert set(outputs.filter(pl.col("layer") == "blocks.0.up")["shape"]) == {"2x4x8"}
    gradients = _scopes(rows, "output_gradient")
    assert {gradients[layer] for layer in spread | under_way} == {"local_of_dtensor"}
    parameters = rows.filter((pl.col("signal") == "parameter") & (pl.col("layer") == "blocks.0.up"))
    assert set(parameters["scope"]) == {"local_shard"}


def test_manifests_say_where_a_rank_lies_in_the_mesh(observed: Observed) -> None:
    """Of a mesh with axes in part of the model, the largest; an axis without a name has its number."""
    assert _mesh(observed.folders["ddp"]) == [([], [])] * 2
    assert _mesh(observed.folders["fully_shard"]) == [([0], ["0"]), ([1], ["0"])]
    assert _mesh(observed.folders["tensor_parallel"]) == [([0], ["tp"]), ([1], ["tp"])]
    places = [[row, column] for row in (0, 1) for column in (0, 1)]
    assert _mesh(observed.folders["replicated_shards"]) == [
        (place, ["replicate", "shard"]) for place in places
    ]
    assert _mesh(observed.folders["two_dimensional"]) == [(place, ["dp", "tp"]) for place in places]


def test_a_look_waits_for_no_collective(rank_pool: RankPool, tmp_path: Path) -> None:
    """By sequence, norms put out shards, and what is still under way is not touched."""
    for kinds, has_waited in rank_pool.run(_by_sequence, str(tmp_path)):
        assert kinds == ["DTensor", "Tensor", "AsyncCollectiveTensor"]
        assert not has_waited
    outputs = _means(tmp_path).filter(pl.col("signal") == "output")
    by_layer = {row[0]: row[1:] for row in outputs.select("layer", "scope", "unavailable_reason").rows()}
    assert by_layer == {
        "norm": ("local_shard", ""),
        "up": ("local_of_dtensor", ""),
        "act": ("unknown", ""),
        "down": ("unknown", "async_collective"),
    }


def test_partial_sums_are_flagged(rank_pool: RankPool, tmp_path: Path) -> None:
    """They are no values of the tensor; the shards before them are."""
    rank_pool.run(_partial, str(tmp_path))
    outputs = _means(tmp_path).filter(pl.col("signal") == "output").sort("layer")
    assert outputs.select("layer", "scope", "unavailable_reason").rows() == [
        ("0", "local_shard", ""),
        ("1", "unknown", "partial_placement"),
    ]


def test_a_gathered_parameter_is_measured_as_the_optimizer_has_it(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """Behind an evaluation the root's own parameters are still whole."""
    rank_pool.run(_gathered_root, str(tmp_path))
    rows = _means(tmp_path, 1).filter(pl.col("layer") == "embedding")
    parameters = rows.filter(pl.col("signal").is_in(["parameter", "parameter_gradient"]))
    assert set(parameters["shape"]) == {"8x8"}
    assert set(parameters["scope"]) == {"local_shard"}
    gradients = rows.filter(pl.col("signal") == "parameter_gradient").sort("stage")
    assert gradients.select("stage", "unavailable_reason").rows() == [
        ("applied", ""),
        ("local_accumulated", "sharded"),
        ("reduced", ""),
    ]


def test_what_no_wrapper_reduces_is_not_called_reduced(rank_pool: RankPool, tmp_path: Path) -> None:
    """Beside sharded blocks an embedding and a head are each rank's own."""
    rank_pool.run(_half_sharded, str(tmp_path))
    reduced = _means(tmp_path).filter(pl.col("stage") == "reduced")
    by_layer = dict(reduced.select("layer", "unavailable_reason").unique().iter_rows())
    alone = "not_synchronised: the wrapper around it leaves it alone"
    assert by_layer == {layer: alone if layer in {"embedding", "head"} else "" for layer in by_layer}
    assert {"embedding", "head", "blocks.0.up"} <= set(by_layer)


def test_parts_are_compared_between_the_ranks_that_have_the_same(observed: Observed, tmp_path: Path):
    """Under HSDP the halves of a parameter are equal on the two ranks that hold each, and stay two halves."""
    result: Any = merge_run(
        str(observed.folders["replicated_shards"]), output=str(tmp_path / "merged")
    ).result
    table = pl.read_parquet(tmp_path / "merged" / "comparison.parquet").filter(
        pl.col("signal") == "parameter"
    )
    assert set(table["scope"]) == {"local_shard"}
    assert set(table["num_ranks"]) == {2}
    assert table.filter(pl.col("lowest_value") != pl.col("highest_value")).is_empty()
    halves = table.filter((pl.col("layer") == "blocks.0.up") & (pl.col("tensor_path") == "weight"))
    keys = {f"mesh replicate=R shard=S(0)@{half}/2 ranks={half},{half + 2}" for half in (0, 1)}
    assert set(halves["replica_key"]) == keys
    assert halves.group_by("replica_key").len()["len"].n_unique() == 1
    assert result["comparison"]["rows_not_compared"]["shard_without_replica_key"] == 0


def test_flat_parts_are_not_compared(observed: Observed, tmp_path: Path):
    """Of flat shards nothing says which ranks hold the same: their rows are counted, and stay apart."""
    result: Any = merge_run(str(observed.folders["flat"]), output=str(tmp_path / "merged")).result
    table = pl.read_parquet(tmp_path / "merged" / "comparison.parquet")
    assert set(table["signal"]) == {"input", "output", "output_gradient"}
    assert result["comparison"]["rows_not_compared"]["shard_without_replica_key"] > 0
