"""What it costs to write samples: encoding, size, whether time stays linear, and added step time.

The samples are real ones of the model of ``examples/``. Times of encoding are processor seconds of the
thread, the least of several rounds. A step beside the writer thread is measured in wall time, for a thread
that is busy beside training shares Python's lock with it: a second's worth of another run's deliveries, as
hooks leave them, is put before the thread at once, and a model that nobody observes trains until it is done
with them. What its steps took more than without them is what they take more in a second at that rate. It is
the least of many such bursts, in turns with as many steps beside nothing (A/A), with a thread that takes the
numbers out and lets go of them, and with one that computes as long without the lock: what that adds is for
want of a processor. Asserts nothing.

    python -P tests/benchmarks/writer.py [--rounds 12] [--only steps]
"""

import argparse
import hashlib
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from torchinstruments import AlwaysSampler, inject_observer
from torchinstruments.config import HistoryConfig
from torchinstruments.observe.observation import Delivery as Hooked
from torchinstruments.records import Claim, Identity, ModuleRecord, RunRecord, Sample
from torchinstruments.sinks.delivery import Delivery
from torchinstruments.sinks.directory import RankFolderSink
from torchinstruments.sinks.outbox import BoundedOutbox
from torchinstruments.store.columns import Origin
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.history_columns import HistoryColumns
from torchinstruments.store.local_target import LocalTarget
from torchinstruments.store.parts import encode_columns
from torchinstruments.store.writer import RankWriter

EXAMPLES = str(Path(__file__).parents[2] / "examples")
RECORDED = 60
RATE = 100_000
BURSTS = 5


class Keeping:
    """A sink that keeps samples."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Nothing to begin."""

    def observe(self, sample: Sample) -> None:
        """Keeps it."""
        self.samples.append(sample)

    def close(self) -> None:
        """Nothing to end."""


def renumbered_sample(sample: Sample, ordinal: int) -> Sample:
    """Returns what was read out of a delivery once more, as of another sample."""
    again = replace(sample, ordinal=ordinal, measurements=())
    if sample.columns is not None:
        again.take_columns(sample.columns)
    return again


def renumbered(delivery: Hooked, ordinal: int) -> Hooked:
    """Returns a delivery once more, as one of another sample."""
    return replace(delivery, facts=replace(delivery.facts, ordinal=ordinal))


def example(rows: int = 2) -> tuple[nn.Module, torch.Tensor]:
    """The character model of ``examples/``, with a batch of so many rows."""
    sys.path.insert(0, EXAMPLES)
    from ddp_language_model import VOCABULARY, CharacterModel

    return CharacterModel(64), torch.randint(VOCABULARY, (rows, 64))


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
        made = HistoryColumns(origin)
        columns = made.make(part)
        data = encode_columns(columns, {})
        made_s = least(lambda: made.make(part), rounds)  # noqa: B023 - called at once
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
        writer = rank_writer(folder)
        began_s = time.thread_time()
        for number in range(count):
            for sample in samples[2 * (number % RECORDED) :][:2]:
                writer.add_sample(renumbered_sample(sample, number))
        writer.close(60.0)
        return time.thread_time() - began_s


def rank_writer(folder: str) -> RankWriter:
    """Returns what writes the parts of one process."""
    identity = Identity(0, 1, 0, "host", "1a2b3c4d", launcher="", pid=1)
    claim = Claim(folder, "run", 0, 0, verified=True)
    return RankWriter(
        identity, claim, HistoryConfig(), LocalTarget(open_storage(folder), "", identity.process)
    )


def step_time(rounds: int) -> None:
    """Prints how much longer steps take beside a writer thread that gets the rate."""
    deliveries = unresolved(RATE)
    tiny, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(200)]), torch.randn(4, 4)
    model, tokens = example(rows=8)

    def tiny_step() -> None:
        tiny(x).square().mean().backward()

    def example_step() -> None:
        nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    for name, step in (("200 x Linear(4, 4)", tiny_step), ("example model, 8 x 64", example_step)):
        bursts: dict[str, list[tuple[int, float]]] = {
            way: [] for way in ("nothing", "without lock", "resolved", "written")
        }
        with tempfile.TemporaryDirectory() as folder:
            writers = {way: Beside(f"{folder}/{way}", deliveries, way) for way in ("resolved", "written")}
            for number in range(BURSTS * rounds):
                for way in list(writers) if number % 2 else reversed(writers):
                    bursts[way].append(writers[way].burst(step))
                    bursts["nothing"].append(steps_s(step, bursts[way][-1][0]))
                bursts["without lock"].append(
                    beside_hashing_s(step, writers["written"].thread_s / (number + 1))
                )
            writer_s = {way: writer.thread_s / (BURSTS * rounds) for way, writer in writers.items()}
            writer_s["without lock"] = writer_s["written"]
            for writer in writers.values():
                writer.end()
        bare_s = min(taken_s / count for count, taken_s in bursts["nothing"])
        print(f"\n{name}: step {1e3 * bare_s:.2f} ms, beside {scalars_of(deliveries):,} scalars a second")
        for way, found in bursts.items():
            added = [100 * (taken_s - count * bare_s) for count, taken_s in found]
            print(
                f"  {way:14}{min(added):6.2f} % longer, median {statistics.median(added):6.2f} %, "
                f"writer thread {100 * writer_s.get(way, 0.0):.1f} % of a core",
                flush=True,
            )


def steps_s(step: Callable[[], None], count: int) -> tuple[int, float]:
    """Returns how many steps were made, and their wall seconds."""
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    return count, time.perf_counter() - began_s


class Beside(RankFolderSink):
    """A writer thread that gets deliveries all at once, and tells when it is done with them.

    Args:
        folder: Where it writes.
        deliveries: What it gets.
        way: ``resolved`` where it lets go of them.
    """

    def __init__(self, folder: str, deliveries: Sequence[Hooked], way: str) -> None:
        super().__init__(rank_writer(folder))
        self._deliveries = deliveries
        self._lets_go = way == "resolved"
        self._put = self._observed = 0
        self._done = threading.Event()
        # It wakes when the queue is half full, which is with the last one.
        self._delivery = Delivery(outbox=BoundedOutbox(2 * scalars_of(deliveries)))
        run = RunRecord(1, "run", "0" * 32, "", {}, {}, (), (), {}, "all", 1, "")
        self._delivery.start(run, [self])
        self.burst(partial(time.sleep, 0.01))  # the first part takes longer
        self._delivery.flush(60.0)
        self._first_s = self._delivery.writer_s

    def observe(self, sample: Sample) -> None:
        """Takes one delivery of a sample (writer thread)."""
        if not self._lets_go:
            super().observe(sample)
        self._observed += 1

    def tick(self) -> None:
        """Ends a round (writer thread)."""
        super().tick()
        if self._observed == self._put:
            self._done.set()

    def burst(self, step: Callable[[], None]) -> tuple[int, float]:
        """Returns how many steps were made until the deliveries were done with, and their wall seconds."""
        first = self._put // 2
        self._put += len(self._deliveries)
        self._done.clear()
        for place, one in enumerate(self._deliveries):
            self._delivery.put_sample(renumbered(one, first + place // 2))
        began_s, count = time.perf_counter(), 0
        while not self._done.is_set():
            step()
            count += 1
        return count, time.perf_counter() - began_s

    @property
    def thread_s(self) -> float:
        """Processor seconds of the thread since the first burst."""
        return self._delivery.writer_s - self._first_s

    def end(self) -> None:
        """Ends the thread."""
        self._delivery.close(60.0)


def beside_hashing_s(step: Callable[[], None], thread_s: float) -> tuple[int, float]:
    """Returns steps and wall seconds beside a thread that computes so long without Python's lock."""
    text = bytes(2**20)

    def work() -> None:
        while time.thread_time() < thread_s:
            hashlib.sha256(text)

    thread = threading.Thread(target=work)
    began_s, count = time.perf_counter(), 0
    thread.start()
    while thread.is_alive():
        step()
        count += 1
    return count, time.perf_counter() - began_s


def unresolved(num_scalars: int) -> list[Hooked]:
    """Deliveries of a short training run as hooks leave them, their numbers not read out yet."""
    taken: list[Hooked] = []
    model, x = example()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Delivery, "put_sample", lambda _, sample: taken.append(sample)),
    ):
        observer = inject_observer(model, output_dir=folder, sampler=AlwaysSampler(), histograms=())
        while scalars_of(taken) < num_scalars:
            model(x).square().mean().backward()
        observer.close()
    return taken


def scalars_of(deliveries: Sequence[Hooked]) -> int:
    """Counts the scalars of deliveries."""
    return sum(one.num_scalars for one in deliveries)


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
