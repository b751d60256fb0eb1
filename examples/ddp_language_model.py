"""Trains a small character model on the source text of Python's standard library, on any number of ranks.

The model is a GPT in miniature (about a million parameters); the text is found through `sysconfig`, so that
the input is real and nothing is downloaded. Every rank trains on its own part of it, in micro-batches whose
gradients are synchronised once a step. Telemetry takes the two lines marked below.

    torchrun --standalone --nproc-per-node=2 examples/ddp_language_model.py --output-dir /tmp/run
    python examples/ddp_language_model.py --steps 10
"""

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812  the name that everybody knows it by
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import (
    EveryNStepsSampler,
    SamplingPolicy,
    TimedSampler,
    inject_observer,
    remove_observer,
)

VOCABULARY = 128
"""ASCII; other characters of the text become a question mark."""


class Attention(nn.Module):
    """Causal self-attention with several heads: (batch, time, width) -> the same."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mixes each position with those before it."""
        batch, time, width = x.shape
        heads = self.query_key_value(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and beside a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class CharacterModel(nn.Module):
    """Predicts the next character: (batch, time) of int64 -> logits (batch, time, VOCABULARY)."""

    def __init__(self, context: int, width: int = 128, num_blocks: int = 5, num_heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the character after each position."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.characters(text) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def standard_library_text(max_bytes: int) -> torch.Tensor:
    """Returns the first `max_bytes` of the standard library's modules, by file name, as uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
        if len(text) >= max_bytes:
            break
    if not text:
        sys.exit(f"no Python source lies in {folder}; install the standard library's sources")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def batches(
    text: torch.Tensor, *, batch_size: int, context: int, seed: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields for ever: inputs and targets (batch_size, context) of int64, from random places of the text."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
        chunk = text[starts + window].long().to(device)
        yield chunk[:, :-1], chunk[:, 1:]


class TensorLog:
    """The script's own record of what its layers put out, to check telemetry against.

    While a prefix is set it keeps outputs and output gradients of all leaf modules, as float64 copies, under
    ``<prefix>/<layer>/output`` and ``<prefix>/<layer>/output_gradient``. Gradients carry the loss scale.

    Args:
        model: The model, without its DDP wrapper.
    """

    def __init__(self, model: nn.Module) -> None:
        self.prefix: str | None = None
        self._arrays: dict[str, np.ndarray] = {}
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                self._follow(name, module)

    def write(self, path: Path) -> None:
        """Writes everything kept as one ``.npz`` file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, allow_pickle=False, **self._arrays)

    def _follow(self, layer: str, module: nn.Module) -> None:
        def keep(kind: str, tensor: torch.Tensor) -> None:
            copy = tensor.detach().to("cpu", torch.float64, copy=True)
            self._arrays[f"{self.prefix}/{layer}/{kind}"] = copy.numpy()

        def keep_output(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            if self.prefix is not None:
                keep("output", output)
                output.register_hook(partial(keep, "output_gradient"))

        module.register_forward_hook(keep_output)


class StepLog:
    """The script's own record of its steps, to check telemetry against: one line of JSON each.

    Whether a step was applied is told by the parameters themselves: they have changed, or they have not.

    Args:
        model: The model, without its DDP wrapper.
        optimizer: Steps its parameters.
        scaler: Scales its loss.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self._before: list[torch.Tensor] = []
        self._line: dict[str, object] = {}
        self._lines: list[str] = []

    def begin(self, step: int) -> None:
        """Takes what there is before the first forward of a step."""
        self._before = [parameter.detach().clone() for parameter in self._model.parameters()]
        self._line = {"step": step, "began_at": time.time(), "lr": self._optimizer.param_groups[0]["lr"]}

    def gradients(self) -> None:
        """Takes what the scaler will find: the gradients after the last backward of a step."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        self._line["is_finite"] = all(bool(gradient.isfinite().all()) for gradient in gradients)
        # A scaler gets its scale at the first loss that it scales.
        self._line["scale_before"] = self._scaler.get_scale()

    def end(self) -> None:
        """Takes what became of a step."""
        now = self._model.parameters()
        changed = any(not torch.equal(a, b) for a, b in zip(self._before, now, strict=True))
        self._line |= {"applied": changed, "scale_after": self._scaler.get_scale(), "ended_at": time.time()}
        self._lines.append(json.dumps(self._line))

    def write(self, path: Path) -> None:
        """Writes all lines."""
        path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among the ranks."""

    rank: int
    world_size: int
    device: torch.device


def join_ranks() -> Place:
    """Joins the process group where a launcher started the ranks; a plain process is a world of one."""
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        return Place(rank=0, world_size=1, device=device)
    dist.init_process_group("nccl" if has_cuda else "gloo")
    return Place(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)


def train(options: argparse.Namespace, place: Place) -> None:
    """Trains for ``--steps`` optimizer steps; rank 0 prints the loss of its part of the text."""
    torch.manual_seed(options.seed)  # the same on all ranks, so that they begin with equal weights
    inner = CharacterModel(options.context).to(place.device)
    model = DistributedDataParallel(inner) if dist.is_initialized() else inner
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(place.device.type, enabled=options.fp16)
    data = batches(
        standard_library_text(options.text_bytes).tensor_split(place.world_size)[place.rank],
        batch_size=options.batch_size,
        context=options.context,
        seed=options.seed + place.rank,
        device=place.device,
    )
    log = TensorLog(inner) if options.log_tensors else None
    steps = StepLog(inner, optimizer, scaler) if options.log_steps else None

    observer = inject_observer(
        model, output_dir=options.output_dir, sampler=make_sampler(options)
    )  # line one
    try:
        for step in range(options.steps):
            losses: list[torch.Tensor] = []
            if steps is not None:
                steps.begin(step)
            for micro_batch in range(options.micro_batches):
                if log is not None:
                    log.prefix = f"{step}/{micro_batch}" if is_logged(step, options) else None
                inputs, targets = next(data)
                with synchronised(model, last=micro_batch == options.micro_batches - 1):
                    with torch.autocast(place.device.type, torch.float16, enabled=options.fp16):
                        logits = model(inputs)
                        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                    if (step, micro_batch) == (options.overflow_at, 0) and is_last(place):
                        loss = loss * float("inf")
                    scaler.scale(loss / options.micro_batches).backward()
                losses.append(loss.detach())
            if steps is not None:
                steps.gradients()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if steps is not None:
                steps.end()
            if place.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
                print(f"step {step:4d}  loss {torch.stack(losses).mean():.3f}", flush=True)
    finally:
        remove_observer(model)  # line two

    if steps is not None:
        steps.write(Path(f"{options.log_steps}-rank-{place.rank:03d}.jsonl"))
    if log is not None:
        log.write(Path(f"{options.log_tensors}-rank-{place.rank:03d}.npz"))
    if place.rank == 0:
        print(f"telemetry: {observer.url}", flush=True)


def synchronised(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Returns the context of a micro-batch: gradients travel between ranks with the last one only."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def is_last(place: Place) -> bool:
    """Returns whether this is the last of the ranks."""
    return place.rank == place.world_size - 1


def make_sampler(options: argparse.Namespace) -> SamplingPolicy:
    """Returns what decides which forwards are measured: every so many steps, or seconds."""
    if options.sample_interval_s is not None:
        return TimedSampler(timedelta(seconds=options.sample_interval_s), immediate=True)
    return EveryNStepsSampler(options.sample_every_steps)


def is_logged(step: int, options: argparse.Namespace) -> bool:
    """Returns whether the script's own log takes this step: those that are sampled, or all."""
    return options.sample_interval_s is not None or (step + 1) % options.sample_every_steps == 0


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
    parser.add_argument("--fp16", action="store_true", help="autocast to float16, with a GradScaler")
    parser.add_argument(
        "--overflow-at",
        type=int,
        metavar="STEP",
        help="let the last rank's loss be infinite in the first micro-batch of this step",
    )
    parser.add_argument(
        "--output-dir",
        default=os.environ.get("OUTPUT_DIR", "runs/language-model"),
        help="folder or URL for the telemetry (default: the variable OUTPUT_DIR, else runs/language-model)",
    )
    sampling = parser.add_mutually_exclusive_group()
    sampling.add_argument("--sample-every-steps", type=int, default=5, help="(default: %(default)s)")
    sampling.add_argument("--sample-interval-s", type=float, help="sample by time instead")
    parser.add_argument(
        "--log-tensors",
        metavar="PREFIX",
        help="write what the layers put out on sampled steps as .npz, a rank",
    )
    parser.add_argument(
        "--log-steps",
        metavar="PREFIX",
        help="write what became of each step as .jsonl, a rank",
    )
    return parser.parse_args()


def main() -> None:
    """Trains, and leaves the process group."""
    options = parse_options()
    place = join_ranks()
    try:
        train(options, place)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
