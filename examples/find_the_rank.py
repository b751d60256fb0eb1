"""Lets one rank of a small DDP training go wrong in five ways, and prints what the merge says of each.

It is the last rank that goes wrong: its shard of the data is in other units, one of its layers makes a NaN,
one bit of its replica flips, its loader is slow, or it alone skips a step. Each fault is a run in a folder
of its own. The answers name rank, layer and attempt as far as they can be known: of two replicas that
differ nobody can say which went wrong; of three (``--ranks 3``) one is alone with its value.

    python examples/find_the_rank.py
    torchrun --standalone --nproc-per-node=3 examples/find_the_rank.py
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import polars as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812  the name that everybody knows it by
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import EveryNStepsSampler, MergeResult, inject_observer, merge_run, remove_observer
from torchinstruments.merge import HeldValue

FAULT_STEP = 5
FAULTS = {
    "bad data shard": f"from step {FAULT_STEP} on inputs are a hundred times as large",
    "NaN on one rank": f"in step {FAULT_STEP} layer roots gets a count of -1",
    "bit flip": f"in step {FAULT_STEP} a bit of hidden.weight flips",
    "slow loader": "50 ms go by before each step",
    "skip on one rank": f"in step {FAULT_STEP} a reduced gradient of head.weight turns infinite",
}


class SquareRoot(nn.Module):
    """The square root of counts, a layer of its own so that it has a name."""

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        """Of every entry."""
        return counts.sqrt()


class Net(nn.Module):
    """Eight counts to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.roots = SquareRoot()
        self.hidden = nn.Linear(8, 16)
        self.active = nn.ReLU()
        self.head = nn.Linear(16, 1)

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 1)."""
        return self.head(self.active(self.hidden(self.roots(counts))))


@torch.no_grad()
def flip_one_bit(weight: torch.Tensor) -> None:
    """Flips the lowest bit of the first entry."""
    weight.view(torch.int32)[0, 0] ^= 1


def train(fault: str, folder: str, num_steps: int) -> str:
    """Trains with a fault on the last rank, every step of it measured, and returns where that lies."""
    is_faulty = dist.get_rank() == dist.get_world_size() - 1
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    observer = inject_observer(
        model,
        output_dir=folder,
        sampler=EveryNStepsSampler(1),
        signals=("input", "output", "output_gradient"),
        fingerprints=True,
    )
    try:
        for step in range(num_steps):
            begins = is_faulty and step == FAULT_STEP
            if fault == "slow loader" and is_faulty:
                time.sleep(0.05)
            counts = torch.randint(0, 100, (32, 8), generator=generator).float()
            if fault == "bad data shard" and is_faulty and step >= FAULT_STEP:
                counts *= 100
            if fault == "NaN on one rank" and begins:
                counts[0, 0] = -1
            if fault == "bit flip" and begins:
                flip_one_bit(net.hidden.weight)
            scaler.scale(F.mse_loss(model(counts), torch.ones(32, 1))).backward()
            if fault == "skip on one rank" and begins:
                assert net.head.weight.grad is not None
                net.head.weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        remove_observer(model)
    return observer.url


def answer(fault: str, merged: MergeResult) -> str:
    """Returns what the merge says of a fault, in a line."""
    if fault == "bad data shard":
        inputs = merged.comparison().filter(layer="roots", signal="input", metric="mean")
        apart = inputs.filter(pl.col("highest_value") > 2 * pl.col("lowest_value")).sort("attempt")
        return (
            "rank {highest_rank}, attempt {attempt}: {layer} {signal} {metric} is {highest_value:.0f}, on "
            "rank {lowest_rank} {lowest_value:.0f}".format(**apart.row(0, named=True))
        )
    if fault == "NaN on one rank":
        first = merged.first_nonfinite
        assert first is not None
        return f"rank {first.ranks}, attempt {first.attempt}: {first.layer} {first.signal}, {first.phase}"
    if fault == "slow loader":
        late = merged.own_work[0].latest
        assert late is not None
        return f"rank {late.rank}: late by its own work, {late.late_by_s * 1000:.0f} ms an attempt"
    diverged = merged.first_divergence
    assert diverged is not None
    if fault == "bit flip":
        return f"attempt {diverged.attempt}: {diverged.tensor} {by_rank(diverged.values)}"
    differing = merged.step_disagreements[0]
    outcomes = next(one.values for one in differing.differences if one.column == "outcome")
    since = f"replicas differ from attempt {diverged.attempt} on"
    return f"attempt {differing.attempt}: {by_rank(outcomes)}; {since}"


def by_rank(values: Sequence[HeldValue]) -> str:
    """Returns which ranks hold which value, the value of the fewest ranks first."""
    return ", ".join(f"{one.value} on rank {one.ranks}" for one in values)


def run_rank(options: argparse.Namespace) -> None:
    """Trains with one fault after the other; rank 0 merges each and prints the answers."""
    dist.init_process_group("gloo")
    for fault, what in FAULTS.items():
        url = train(fault, f"{options.output_dir}/{fault.replace(' ', '-')}", options.steps)
        dist.barrier()  # all ranks are closed
        if dist.get_rank() == 0:
            print(f"\n{fault} ({url})")
            print(f"  put in:      rank {dist.get_world_size() - 1}: {what}")
            print(f"  merge says:  {answer(fault, merge_run(url))}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks, or is one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", default=os.environ.get("OUTPUT_DIR", "runs/find-the-rank"))
    parser.add_argument("--steps", type=int, default=16, help="of each run (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="where torchrun starts none (default: 2)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}")
    command = [sys.executable, "-m", *torchrun, __file__, *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode)


if __name__ == "__main__":
    main()
