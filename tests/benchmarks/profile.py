"""What measuring a tensor costs, as multiples of its bare sum.

::

    python -P tests/benchmarks/profile.py [--rounds 9] [--sizes 1000 1000000]

Each cell is the least processor time of this thread among the rounds; variants take turns within a round, so
that what else the machine does falls on all of them alike. Only ratios of one run are comparable. The second
table is for data of several kinds: what is counted or sorted costs more or less with how its entries repeat.
In the first two a large tensor of 32 or 64 bits is measured in the way that is faster on this machine; the
third has both ways. The last is for small tensors, two hundred in a batch, in microseconds for each tensor.

The ``-P`` keeps this folder off the import path, where this file would pass for the standard library's own
``profile``; started without it, the script takes the folder off by itself.
"""

import sys
from pathlib import Path

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import argparse  # noqa: E402 - imports follow the repair of the path
import time  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from functools import partial  # noqa: E402

import torch  # noqa: E402

from torchinstruments.statistics import host  # noqa: E402
from torchinstruments.statistics.batching import MeasuredScalars, ScalarBatch  # noqa: E402
from torchinstruments.statistics.contract import Reducer  # noqa: E402
from torchinstruments.statistics.histograms import histogram  # noqa: E402
from torchinstruments.statistics.isolation import isolated  # noqa: E402
from torchinstruments.statistics.profile import ExactProfile  # noqa: E402
from torchinstruments.statistics.reducers import combine, finite_fraction, max_abs, mean, rms, std  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
KINDS_SIZE = 1_000_000
WAYS = {"sort": False, "select": True}
WAYS_SIZES = (100_000, 1_000_000)
SMALL_SIZES = (16, 64, 256, 1000, 4096)
NUM_SMALL = 200
MIN_CALL_S = 0.002
"""Shorter variants are repeated within a round: the clock of a thread is coarse."""

FIVE = combine(mean(), std(), rms(), max_abs(), finite_fraction()).parts


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="Cost of measuring a tensor, as multiples of its bare sum.")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, of which the least time counts")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000, 16_000_000]
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, normal data; least of {options.rounds} rounds\n")
    header = (
        "entries",
        "dtype",
        "sum us",
        "sum A/A",
        "profile",
        "+ histogram",
        "five sums",
        "profile ns/entry",
    )
    print_row(header)
    for size in options.sizes:
        for dtype in DTYPES:
            print_row(ratios(size, dtype, options.rounds))
    print(f"\n{KINDS_SIZE:,} entries of several kinds: the profile, as multiples of the bare sum\n")
    print_row(("", "dtype", *KINDS))
    for dtype in DTYPES:
        print_row(("", name_of(dtype), *kinds(KINDS_SIZE, dtype, options.rounds)))
    print(
        "\nBoth ways to measure a large tensor of 32 or 64 bits: the profile, as multiples of the bare sum\n"
    )
    print_row(("way, entries", "dtype", *KINDS))
    for dtype in (torch.float32, torch.float64):
        for way in WAYS:
            for size in WAYS_SIZES:
                print_row((f"{way} {size:,}", name_of(dtype), *one_way(way, size, dtype, options.rounds)))
    print(
        f"\n{NUM_SMALL} small tensors in a batch: us for each, all but the reading on the training thread\n"
    )
    print_row(("entries", "dtype", "sum", "alone", "batch", "+ histogram", "+ reading"))
    for size in SMALL_SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            print_row(small(size, dtype, options.rounds))


def ratios(size: int, dtype: torch.dtype, rounds: int) -> tuple[str, ...]:
    """Returns the row of one size and dtype."""
    tensor = entries_of(size, dtype)
    seconds = least_times(
        {
            "sum": partial(bare_sum, tensor),
            "again": partial(bare_sum, tensor),
            "profile": partial(measure, (tensor,), (ExactProfile(),)),
            "histogram": partial(measure, (tensor,), (ExactProfile(),), with_histogram=True),
            "five": partial(measure, (tensor,), FIVE),
        },
        rounds,
    )
    bare = seconds["sum"]
    times = [f"{seconds[name] / bare:.2f}" for name in ("again",)]
    times += [f"{seconds[name] / bare:.1f}" for name in ("profile", "histogram", "five")]
    per_entry = f"{seconds['profile'] / size * 1e9:.2f}"
    return (f"{size:,}", name_of(dtype), f"{bare * 1e6:.1f}", *times, per_entry)


def kinds(size: int, dtype: torch.dtype, rounds: int) -> tuple[str, ...]:
    """Returns the cells of one dtype, one for each kind of data."""
    cells: list[str] = []
    for change in KINDS.values():
        # NaN and infinity are 0, the lowest and the highest value of a dtype that has neither.
        entries = change(entries_of(size, torch.float32))
        tensor = entries.to(dtype) if dtype.is_floating_point else whole_numbers(entries, dtype)
        seconds = least_times(
            {"sum": partial(bare_sum, tensor), "profile": partial(measure, (tensor,), (ExactProfile(),))},
            rounds,
        )
        cells.append(f"{seconds['profile'] / seconds['sum']:.1f}")
    return tuple(cells)


def one_way(way: str, size: int, dtype: torch.dtype, rounds: int) -> tuple[str, ...]:
    """Returns the cells of one dtype measured in one of the two ways, whichever is faster."""
    chosen = host.prefers_selection

    def prefers_selection(num_entries: int) -> bool:
        return num_entries > 0 and WAYS[way]

    host.prefers_selection = prefers_selection
    try:
        return kinds(size, dtype, rounds)
    finally:
        host.prefers_selection = chosen


def small(size: int, dtype: torch.dtype, rounds: int) -> tuple[str, ...]:
    """Returns the row of many small tensors."""
    tensors = tuple(entries_of(size, dtype, seed) for seed in range(NUM_SMALL))
    seconds = least_times(
        {
            "sum": partial(bare_sums, tensors),
            "alone": partial(one_by_one, tensors),
            "batch": partial(measure, tensors, (ExactProfile(),)),
            "histogram": partial(measure, tensors, (ExactProfile(),), with_histogram=True),
            "read": partial(measure_and_read, tensors),
        },
        rounds,
    )
    return (f"{size:,}", name_of(dtype), *(f"{spent / NUM_SMALL * 1e6:.1f}" for spent in seconds.values()))


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


def entries_of(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Returns normal data."""
    generator = torch.Generator().manual_seed(seed)
    entries = torch.randn(size, generator=generator)
    return entries.to(dtype) if dtype.is_floating_point else whole_numbers(entries, dtype)


def whole_numbers(entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns entries of about 1 over most of the range of an integer dtype of 8 bits."""
    return (entries.nan_to_num() * 30).clamp(-128, 127).to(dtype)


def as_drawn(entries: torch.Tensor) -> torch.Tensor:
    """Returns the entries."""
    return entries


def rectified(entries: torch.Tensor) -> torch.Tensor:
    """Returns them with half of them zero."""
    return entries.relu()


def mostly_zero(entries: torch.Tensor) -> torch.Tensor:
    """Returns them with nine of ten zero, at places that have nothing to do with each other."""
    keep = torch.rand(entries.shape, generator=torch.Generator().manual_seed(1)) < 0.1
    return entries.where(keep, 0.0)


def constant(entries: torch.Tensor) -> torch.Tensor:
    """Returns as many ones."""
    return torch.ones_like(entries)


def ascending(entries: torch.Tensor) -> torch.Tensor:
    """Returns them sorted."""
    return entries.sort().values


def partly_nonfinite(entries: torch.Tensor) -> torch.Tensor:
    """Returns them with one of fifteen NaN, and two of fifteen infinite."""
    changed = entries.clone()
    for start, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        changed[start::15] = value
    return changed


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": as_drawn,
    "relu": rectified,
    "9/10 zero": mostly_zero,
    "constant": constant,
    "sorted": ascending,
    "3/15 nonfinite": partly_nonfinite,
}


def bare_sum(tensor: torch.Tensor) -> None:
    """What a user would call cheap."""
    tensor.sum()


def bare_sums(tensors: tuple[torch.Tensor, ...]) -> None:
    """The same of many."""
    for tensor in tensors:
        tensor.sum()


def one_by_one(tensors: tuple[torch.Tensor, ...]) -> None:
    """Measures each tensor by itself."""
    profile = ExactProfile()
    for tensor in tensors:
        profile(tensor)


def measure(
    tensors: tuple[torch.Tensor, ...], reducers: Sequence[Reducer], *, with_histogram: bool = False
) -> ScalarBatch:
    """Does what the training thread does for a sample."""
    batch = ScalarBatch(reducers, fail, (histogram(),))
    with isolated("cpu"):
        for tensor in tensors:
            batch.add(tensor, histograms=with_histogram)
        batch.seal()
    return batch


def measure_and_read(tensors: tuple[torch.Tensor, ...]) -> None:
    """Does what the writer thread does as well."""
    batch = measure(tensors, (ExactProfile(),))
    batch.read_all(range(len(tensors)), absent)


def absent(place: int) -> MeasuredScalars:
    """All were measured."""
    raise AssertionError(place)


def fail(probe: str, error: BaseException) -> None:
    """A benchmark of something that fails would be none."""
    raise AssertionError(probe) from error


def name_of(dtype: torch.dtype) -> str:
    """Returns a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def print_row(cells: tuple[str, ...]) -> None:
    """Prints one row of a table."""
    print("".join(cell.rjust(17 if index else 18) for index, cell in enumerate(cells)), flush=True)


if __name__ == "__main__":
    main()
