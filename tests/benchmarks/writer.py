"""What it costs to write samples: encoding, size, whether time stays linear, and added step time.

The samples are real ones of the model of ``examples/``. Times of encoding are processor seconds of the
thread, the least of several rounds. Step times are wall time and processor seconds of the training thread,
for a thread that is busy beside training shares Python's lock with it: a model of 200 tiny layers, sampled so
often that it gives the rate, takes turns between an observer whose samples are dropped, the same again (A/A),
one whose writer thread takes the numbers out and lets go of them, and one that writes them into a local
folder. A ratio is the median over rounds. Asserts nothing.

    python -P tests/benchmarks/writer.py [--rounds 12] [--only steps]
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from torchinstruments import AlwaysSampler, EveryNForwardsSampler, inject_observer
from torchinstruments.config import HistoryConfig
from torchinstruments.records import Claim, Identity, ModuleRecord, RunRecord, Sample
from torchinstruments.sinks.delivery import Delivery
from torchinstruments.store.columns import Origin
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.local_target import LocalTarget
from torchinstruments.store.parts import encode_columns
from torchinstruments.store.writer import RankWriter

EXAMPLES = str(Path(__file__).parents[2] / "examples")
RECORDED = 60
RATE = 100_000
SPAN_S = 2.5
"""Longer than the writer thread's period, so that each measurement holds its share of the work."""


class Keeping:
    """A sink that keeps samples."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Nothing to begin."""

    def observe(self, sample: Sample) -> None:
        """Keeps it without its histograms, which go elsewhere."""
        self.samples.append(replace(sample, histograms=()))

    def close(self) -> None:
        """Nothing to end."""


def example() -> tuple[nn.Module, torch.Tensor]:
    """The character model of ``examples/``, with a small batch."""
    sys.path.insert(0, EXAMPLES)
    from ddp_language_model import VOCABULARY, CharacterModel

    return CharacterModel(64), torch.randint(VOCABULARY, (2, 64))


def recorded() -> list[Sample]:
    """Deliveries of a short training run, forward and backward of each step."""
    model, x = example()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sink = Keeping()
    with tempfile.TemporaryDirectory() as folder:
        observer = inject_observer(
            model, output_dir=folder, sampler=AlwaysSampler(), sink=sink, histograms=()
        )
        for _ in range(RECORDED):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
        observer.close()
    return sink.samples


def scalars(samples: Sequence[Sample]) -> int:
    """Counts rows of history."""
    return sum(len(one.metrics) for sample in samples for one in sample.measurements)


def encoding(samples: list[Sample], rounds: int) -> None:
    """Prints throughput and size of parts."""
    origin = Origin(0, 0, "1a2b3c4d")
    print(
        f"{'rows a part':>12}{'columns, M/s':>14}{'encoded, M/s':>14}{'together':>10}{'bytes a scalar':>16}"
    )
    for share in (0.03, 0.2, 0.9):
        part = [(sample.ordinal, sample) for sample in samples[: int(share * len(samples))]]
        num_rows = scalars([sample for _, sample in part])
        columns = history_columns(part, origin)
        data = encode_columns(columns, {})
        made_s = least(lambda: history_columns(part, origin), rounds)  # noqa: B023 - called at once
        encoded_s = least(lambda: encode_columns(columns, {}), rounds)  # noqa: B023 - called at once
        rates = [num_rows / seconds / 1e6 for seconds in (made_s, encoded_s, made_s + encoded_s)]
        print(
            f"{num_rows:12,}{rates[0]:14.2f}{rates[1]:14.2f}{rates[2]:10.2f}{len(data) / num_rows:16.2f}",
            flush=True,
        )


def least(function: Callable[[], object], rounds: int) -> float:
    """Returns the least processor time of a call."""
    times = []
    for _ in range(rounds):
        began_s = time.thread_time()
        function()
        times.append(time.thread_time() - began_s)
    return min(times)


def growth(samples: list[Sample], rounds: int) -> None:
    """Prints what writing takes for longer and longer runs, close included."""
    print(f"\n{'samples':>8}{'seconds':>10}{'ms a sample':>13}{'us a scalar':>13}")
    for count in (100, 200, 400, 800, 1600):
        taken_s = min(written_s(samples, count) for _ in range(max(2, rounds // 6)))
        num_rows = scalars(samples) / RECORDED * count
        print(
            f"{count:8}{taken_s:10.3f}{1e3 * taken_s / count:13.3f}{1e6 * taken_s / num_rows:13.3f}",
            flush=True,
        )


def written_s(samples: list[Sample], count: int) -> float:
    """Returns the processor seconds of writing so many samples, each of two deliveries."""
    with tempfile.TemporaryDirectory() as folder:
        target = LocalTarget(open_storage(folder), "", "1a2b3c4d")
        identity = Identity(0, 1, 0, "host", "1a2b3c4d", launcher="", pid=1)
        claim = Claim(folder, "run", 0, 0, verified=True)
        writer = RankWriter(identity, claim, HistoryConfig(), target)
        began_s = time.thread_time()
        for number in range(count):
            for sample in samples[2 * (number % RECORDED) :][:2]:
                writer.add_sample(replace(sample, ordinal=number))
        writer.close(60.0)
        return time.thread_time() - began_s


def step_time(rounds: int) -> None:
    """Prints how much longer steps take beside a writer that gets the rate."""
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(200)]), torch.randn(4, 4)

    def step() -> None:
        model(x).square().mean().backward()

    def step_s() -> tuple[float, float]:
        """Returns wall seconds and seconds of this thread for a step."""
        step()
        num_steps, began_s, began_thread_s = 0, time.perf_counter(), time.thread_time()
        while time.perf_counter() - began_s < SPAN_S:
            step()
            num_steps += 1
        return (time.perf_counter() - began_s) / num_steps, (time.thread_time() - began_thread_s) / num_steps

    every = interval_for(model, step)
    ways: dict[str, AbstractContextManager[object]] = {
        "dropped": patch.object(Delivery, "put_sample", _drop),
        "dropped again (A/A)": patch.object(Delivery, "put_sample", _drop),
        "resolved": patch.object(RankWriter, "add_sample", _drop),
        "written": nullcontext(),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    rates, shares = [], []
    for number in range(rounds):
        for way in list(ways) if number % 2 else reversed(ways):
            with tempfile.TemporaryDirectory() as folder:
                observer = inject_observer(
                    model, output_dir=folder, sampler=EveryNForwardsSampler(every), histograms=()
                )
                began_s = time.perf_counter()
                with ways[way]:
                    found[way].append(step_s())
                    observer.flush()
                if way == "written":
                    counters, span_s = observer.counters, time.perf_counter() - began_s
                    rates.append(counters.rows / SPAN_S)
                    shares.append(100 * counters.writer_s / span_s)
                observer.close()
    base = found.pop("dropped")
    print(
        f"\na forward in {every} sampled, {statistics.median(rates):,.0f} scalars/s, step "
        f"{1e3 * statistics.median(wall for wall, _ in base):.2f} ms; "
        f"writer thread {statistics.median(shares):.1f} % of a core"
    )
    for clock, name in enumerate(("wall", "thread")):
        for way, times in found.items():
            ratios = [one[clock] / other[clock] for one, other in zip(times, base, strict=True)]
            least = min(one[clock] for one in times) / min(one[clock] for one in base)
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"  {name:8}{way:22}{middle:8.4f}   {low:.4f} .. {high:.4f}   least {least:.4f}", flush=True
            )


def _drop(_taker: object, _sample: object) -> None:
    """Stands where the samples would be put into the queue, or into columns."""


def interval_for(model: nn.Module, step: Callable[[], None]) -> int:
    """Returns the sampling interval at which the model gives about the rate that is asked for."""

    def least_s() -> float:
        times = []
        for _ in range(20):
            began_s = time.perf_counter()
            step()
            times.append(time.perf_counter() - began_s)
        return statistics.median(times)

    bare_s = least_s()
    with tempfile.TemporaryDirectory() as folder:
        observer = inject_observer(model, output_dir=folder, sampler=AlwaysSampler(), histograms=())
        sampled_s = least_s()
        observer.close()
        rows = observer.counters.rows / 20
    # rows / (sampled_s + (every - 1) * bare_s) is the rate.
    return max(1, round((rows / RATE - sampled_s) / bare_s) + 1)


def main() -> None:
    """Prints everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=("encoding", "growth", "steps"), help="one of the three")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    samples = [] if options.only == "steps" else recorded()
    if options.only in {None, "encoding"}:
        encoding(samples, options.rounds)
    if options.only in {None, "growth"}:
        growth(samples, options.rounds)
    if options.only in {None, "steps"}:
        step_time(options.rounds)


if __name__ == "__main__":
    main()
