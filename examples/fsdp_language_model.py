"""Trains the model of ddp_language_model.py with its parameters sharded over the ranks.

``fully_shard`` with bfloat16 for the computation, activation checkpointing of each block, and micro-batches
whose gradients are reduced once a step. The text and the model are those of the other example. Telemetry
takes the two lines marked below.

    torchrun --standalone --nproc-per-node=2 examples/fsdp_language_model.py --output-dir /tmp/run
    python examples/fsdp_language_model.py --steps 10
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812  the name that everybody knows it by

from ddp_language_model import (
    CharacterModel,
    Place,
    batches,
    join_ranks,
    make_sampler,
    standard_library_text,
)
from torchinstruments import inject_observer, remove_observer


class ShardedCharacterModel(CharacterModel):
    """The model of the other example, with logits in float32 for the loss."""

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the character after each position."""
        # Those of the head are a view of what it computed, and no module that is sharded may return one.
        return super().forward(text).to(torch.float32, copy=True)


def shard(model: CharacterModel) -> FSDPModule:
    """Shards a model in place, each block by itself and the rest with the root, and returns it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.blocks):
        wrapped = checkpoint_wrapper(block)
        model.blocks[index] = wrapped
        fully_shard(wrapped, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def train(options: argparse.Namespace, place: Place) -> None:
    """Trains for ``--steps`` optimizer steps; rank 0 prints the loss of its part of the text."""
    torch.manual_seed(options.seed)  # the same on all ranks, so that the shards are those of one model
    model = ShardedCharacterModel(options.context).to(place.device)
    sharded = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(
        standard_library_text(options.text_bytes).tensor_split(place.world_size)[place.rank],
        batch_size=options.batch_size,
        context=options.context,
        seed=options.seed + place.rank,
        device=place.device,
    )

    observer = inject_observer(
        model, output_dir=options.output_dir, sampler=make_sampler(options)
    )  # line one
    try:
        for step in range(options.steps):
            losses: list[torch.Tensor] = []
            for micro_batch in range(options.micro_batches):
                inputs, targets = next(data)
                sharded.set_requires_gradient_sync(micro_batch == options.micro_batches - 1)
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                (loss / options.micro_batches).backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if place.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
                print(f"step {step:4d}  loss {torch.stack(losses).mean():.3f}", flush=True)
    finally:
        remove_observer(model)  # line two
    if place.rank == 0:
        print(f"telemetry: {observer.url}", flush=True)


def join_ranks_or_be_one() -> Place:
    """Joins the process group; a plain process makes one of its own, without which nothing can be sharded."""
    place = join_ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return place


def parse_options() -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=2, help="a step (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=8, help="texts a micro-batch (default: %(default)s)"
    )
    parser.add_argument("--context", type=int, default=64, help="characters a text (default: %(default)s)")
    parser.add_argument(
        "--text-bytes", type=int, default=2_000_000, help="of all ranks (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output-dir",
        default=os.environ.get("OUTPUT_DIR", "runs/sharded-language-model"),
        help="folder or URL for the telemetry (default: the variable OUTPUT_DIR, else "
        "runs/sharded-language-model)",
    )
    sampling = parser.add_mutually_exclusive_group()
    sampling.add_argument("--sample-every-steps", type=int, default=5, help="(default: %(default)s)")
    sampling.add_argument("--sample-interval-s", type=float, help="sample by time instead")
    return parser.parse_args()


def main() -> None:
    """Trains, and leaves the process group."""
    options = parse_options()
    place = join_ranks_or_be_one()
    try:
        train(options, place)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
