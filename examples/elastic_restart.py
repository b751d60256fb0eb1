"""Kills one rank of a DDP training once, and shows both lives of the job merged as one run.

``torchrun --max-restarts`` starts all ranks anew, and these go on from the last checkpoint into the same
folder. Each start is a generation of its own. The first table has what every process of every rank left,
the killed one as ``interrupted``. In the second, attempts begin at 0 again; which step of the training an
attempt was is said by the loop, in ``observer.step(global_step=...)``: steps 4 to 6, between the checkpoint
and the death, are there in both generations.

    python examples/elastic_restart.py
    torchrun --standalone --nproc-per-node=2 --max-restarts=1 examples/elastic_restart.py
"""

import argparse
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import AlwaysSampler, inject_observer, merge_run, open_run, remove_observer


def join_ranks() -> None:
    """Joins the process group, under keys of this start: the store still has those of the one before."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    store = dist.PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


def train(options: argparse.Namespace) -> str:
    """Trains from the last checkpoint on, and returns where the telemetry lies."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    checkpoint = Path(options.output_dir, f"checkpoint-{os.environ['TORCHELASTIC_RUN_ID']}.pt")
    first_step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first_step = saved["step"] + 1
        net.load_state_dict(saved["net"])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    observer = inject_observer(model, output_dir=f"{options.output_dir}/telemetry", sampler=AlwaysSampler())
    for step in range(first_step, options.steps):
        with observer.step(global_step=step):
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % options.checkpoint_every == options.checkpoint_every - 1 and dist.get_rank() == 0:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"step": step, "net": net.state_dict()}, checkpoint)
        dist.barrier()
        if generation == 0 and step == options.dies_at and dist.get_rank() == 1:
            observer.flush()  # what was measured in the last half minute would be lost otherwise
            os.kill(os.getpid(), signal.SIGKILL)
    remove_observer(model)
    return observer.url


def show(url: str) -> None:
    """Prints both generations."""
    merged = merge_run(url)
    print(merged)
    result: dict[str, Any] = merged.to_dict()
    ranks = pl.DataFrame(result["ranks"], infer_schema_length=None)
    columns = ("generation", "rank", "process", "restart_count", "status", "samples")
    print(ranks.select(columns).sort("generation", "rank"))
    steps = open_run(url).steps().group_by("generation", "rank")
    first_and_last = (
        pl.format("{} to {}", pl.col(name).min(), pl.col(name).max()).alias(name)
        for name in ("attempt", "global_step")
    )
    print(steps.agg(*first_and_last).sort("generation", "rank").collect())


def main() -> None:
    """Starts the ranks, or is one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", default=os.environ.get("OUTPUT_DIR", "runs/elastic"))
    parser.add_argument("--steps", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--checkpoint-every", type=int, default=4, help="steps (default: %(default)s)")
    parser.add_argument(
        "--dies-at", type=int, default=6, help="step of rank 1's death (default: %(default)s)"
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
        command = [sys.executable, "-m", *torchrun, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode)
    join_ranks()
    url = train(options)
    dist.barrier()  # every rank has closed its files
    if dist.get_rank() == 0:
        show(url)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
