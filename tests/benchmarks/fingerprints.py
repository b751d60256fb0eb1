"""What a fingerprint costs, as multiples of a bare sum of the same tensors.

::

    python -P tests/benchmarks/fingerprints.py [--rounds 9] [--sizes 1000 1000000]

Each cell is the least processor time of this thread among the rounds; variants take turns within a round, so
that what else the machine does falls on all of them alike. Only ratios of one run are comparable. "In torch"
is what runs on an accelerator, here on the CPU. "Transposed" is compared with the sum of the transposed
tensor, which reads it as it lies. The second table is of many tensors of one size, digested together. The
last one is all that the training thread does for a model: finding tensors, their names, keys and digests.
"""

import argparse
import runpy
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.fingerprints import Fingerprinter
from torchinstruments.records import ErrorRecord
from torchinstruments.statistics.digests import Digester

NUM_TOGETHER = 100
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
MIN_CALL_S = 0.002
"""Shorter variants are repeated within a round: the clock of a thread is coarse."""


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description="Cost of fingerprints, as multiples of a bare sum.")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, of which the least time counts")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 100_000, 1_000_000, 16_000_000])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; least of {options.rounds} rounds, x a bare sum\n")
    print_row("entries", "dtype", "sum us", "sum A/A", "digest", "transposed", "in torch", "GB/s")
    for size in options.sizes:
        for dtype in DTYPES:
            print_row(*of_tensor(size, dtype, options.rounds))
    print(f"\n{NUM_TOGETHER} tensors of one size, x a bare sum of each\n")
    print_row("entries", "dtype", "sum us", "sum A/A", "one by one", "together", "in torch")
    for size in (16, 1000, 10_000):
        for dtype in DTYPES:
            print_row(*of_several(size, dtype, options.rounds))
    print("\nall parameters and buffers of a model, x a bare sum of each\n")
    print_row("model", "tensors", "MiB", "sum us", "sum A/A", "fingerprints")
    models = {
        "200 linear": nn.Sequential(*(nn.Linear(4, 4) for _ in range(200))),
        "characters": characters(),
        "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8), 6, enable_nested_tensor=False),
    }
    for name, model in models.items():
        print_row(*of_model(name, model, options.rounds))


def of_tensor(size: int, dtype: torch.dtype, rounds: int) -> tuple[str, ...]:
    """Returns the row of one size and dtype."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    transposed = tensor.view(-1, 100).t()
    digester = Digester()
    seconds = least_times(
        {
            "sum": tensor.sum,
            "of transposed": transposed.sum,
            "again": tensor.sum,
            "digest": partial(digester.on_host, tensor),
            "transposed": partial(digester.on_host, transposed),
            "torch": partial(digester.on_device, tensor),
        },
        rounds,
    )
    bare = seconds.pop("sum")
    seconds["transposed"] *= bare / seconds.pop("of transposed")
    speed = f"{tensor.nbytes / seconds['digest'] / 1e9:.1f}"
    ratios = (f"{spent / bare:.2f}" for spent in seconds.values())
    return (f"{size:,}", str(dtype).removeprefix("torch."), f"{bare * 1e6:.1f}", *ratios, speed)


def of_several(size: int, dtype: torch.dtype, rounds: int) -> tuple[str, ...]:
    """Returns the row of many tensors of one size and dtype."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(dtype) for _ in range(NUM_TOGETHER)]
    digester = Digester()
    seconds = least_times(
        {
            "sum": partial(bare_sums, tensors),
            "again": partial(bare_sums, tensors),
            "alone": lambda: [digester.on_host(tensor) for tensor in tensors],
            "together": partial(digester.several_on_host, tensors),
            "torch": lambda: list(digester.several_on_device(tensors)),
        },
        rounds,
    )
    bare = seconds.pop("sum")
    ratios = (f"{spent / bare:.2f}" for spent in seconds.values())
    return (f"{size:,}", str(dtype).removeprefix("torch."), f"{bare * 1e6:.1f}", *ratios)


def characters() -> nn.Module:
    """Returns the model of the examples that predicts characters."""
    path = Path(__file__).parents[2] / "examples" / "ddp_language_model.py"
    return runpy.run_path(str(path))["CharacterModel"](context=128)


def of_model(name: str, model: nn.Module, rounds: int) -> tuple[str, ...]:
    """Returns the row of one model."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    fingerprinter = Fingerprinter(Faults(ErrorPolicy.RAISE, end))
    seconds = least_times(
        {
            "sum": partial(bare_sums, tensors),
            "again": partial(bare_sums, tensors),
            "fingerprints": partial(fingerprinter.take, model, 0),
        },
        rounds,
    )
    bare = seconds.pop("sum")
    size = sum(tensor.nbytes for tensor in tensors) / 2**20
    ratios = (f"{spent / bare:.2f}" for spent in seconds.values())
    return (name, str(len(tensors)), f"{size:.1f}", f"{bare * 1e6:.0f}", *ratios)


def bare_sums(tensors: list[torch.Tensor]) -> None:
    """What a user would call cheap."""
    for tensor in tensors:
        tensor.sum()


def end(error: ErrorRecord) -> None:
    """Ends the benchmark: what fails is not what was to be measured."""
    raise RuntimeError(error.message)


def least_times(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the least seconds of processor time of each variant, which take turns."""
    num_calls = {name: calls_for(variant) for name, variant in variants.items()}
    least = dict.fromkeys(variants, float("inf"))
    for _ in range(rounds):
        for name, variant in variants.items():
            begin = time.thread_time()
            for _ in range(num_calls[name]):
                variant()
            least[name] = min(least[name], (time.thread_time() - begin) / num_calls[name])
    return least


def calls_for(variant: Callable[[], object]) -> int:
    """Returns how often to call a variant for one measurement, after one call to warm up."""
    variant()
    begin = time.thread_time()
    variant()
    return max(1, round(MIN_CALL_S / max(time.thread_time() - begin, 1e-6)))


def print_row(*cells: str) -> None:
    """Prints one row of a table."""
    print("".join(cell.rjust(14) for cell in cells), flush=True)


if __name__ == "__main__":
    main()
