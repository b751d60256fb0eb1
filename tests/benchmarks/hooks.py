"""What an observer costs a training step, as ratios to the bare step. Run by ``make bench``; asserts nothing.

One model is attached and detached again and again, for copies of a model differ by more than the effect. Each
round measures every variant once, in an order that changes from round to round, with the bare step twice: the
second one is the control (A/A), whose distance from 1 is what the machine adds. A ratio is the median over
rounds of the variant's time to the bare time of its own round; behind it stand the quartiles of these ratios.
Times are processor seconds of the process, writer thread left out: samples are not resolved. Where the ratio
of an unsampled step drowns in the control, the microseconds that it adds are a better guide: the median over
rounds of the difference to the bare step of the round, and, printed first, those of an empty forward. Beside
the median stands the ratio of the least times, for what other work on the machine adds is never negative.

    python tests/benchmarks/hooks.py [--rounds 15] [--only unsampled]
"""

import argparse
import gc
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.focus import select_focus
from torchinstruments.observe.observer import Observer
from torchinstruments.observe.probe import RootProbe
from torchinstruments.observe.sampling import AlwaysSampler, EveryNForwardsSampler, SamplingPolicy
from torchinstruments.observe.selection import leaf_modules, select_layers
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.loss_scale import ScalerWatch
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.records import (
    ChecksRecord,
    ClosedAttempt,
    Counters,
    DeferredFingerprints,
    DeferredSample,
    ErrorRecord,
    ModuleRecord,
)
from torchinstruments.statistics.histograms import HistogramReducer, histogram
from torchinstruments.statistics.reducers import default_reducers

STEP_S = 0.03
"""Processor seconds that one measurement of a variant lasts at least."""

EXAMPLES = Path(__file__).parents[2] / "examples"
Step: TypeAlias = Callable[[nn.Module, torch.Tensor], None]


class Discarding:
    """A session that lets go of whatever it is given."""

    url = "memory://benchmark"
    world_size = 1

    def begin(self) -> bool:
        """Observes."""
        return True

    def wants_histograms(self) -> bool:
        """Lets them be taken, so that they cost what they cost."""
        return True

    def put_sample(self, sample: DeferredSample) -> None:
        """Drops it."""

    def put_attempts(self, attempts: Sequence[ClosedAttempt]) -> None:
        """Drops them."""

    def put_fingerprints(self, fingerprints: DeferredFingerprints) -> None:
        """Drops them."""

    def put_modules(self, modules: tuple[ModuleRecord, ...]) -> None:
        """Drops them."""

    def put_checks(self, checks: ChecksRecord) -> None:
        """Drops them."""

    def put_error(self, error: ErrorRecord) -> None:
        """Ends the benchmark: what fails is not what was to be measured."""
        raise RuntimeError(error.message)

    def counters(self, observed: Counters) -> Counters:
        """Returns them as they are."""
        return observed

    def pending_error(self) -> None:
        """There is none."""

    def flush(self, timeout_s: float | None = None) -> bool:
        """There is nothing to flush."""
        return timeout_s is None or timeout_s >= 0

    def close(self, timeout_s: float | None = None) -> bool:
        """There is nothing to close."""
        return timeout_s is None or timeout_s >= 0


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        name: For the table.
        sampler: Makes the sampler; None leaves the model bare.
        histograms: Taken of the first eight layers.
        captures: Whether direct forwards are captured.
        watches: What is watched beside the model, ``optimizers`` or ``scalers`` as well.
    """

    name: str
    sampler: Callable[[], SamplingPolicy] | None
    histograms: tuple[HistogramReducer, ...] = ()
    captures: bool = False
    watches: str = ""


def never() -> SamplingPolicy:
    """A sampler that chooses no forward of the benchmark."""
    return EveryNForwardsSampler(2**62)


VARIANTS = (
    Variant("bare", None),
    Variant("bare again (A/A)", None),
    Variant("unsampled", never),
    Variant("unsampled, direct forwards", never, captures=True),
    Variant("sampled", AlwaysSampler),
    Variant("sampled, direct forwards", AlwaysSampler, captures=True),
    Variant("sampled, histograms", AlwaysSampler, (histogram(),)),
)
UNSAMPLED = (
    *VARIANTS[:2],
    Variant("hooks and clock", never),
    Variant("optimizers as well", never, watches="optimizers"),
    Variant("scalers as well", never, watches="scalers"),
)
"""What a training step pays that is not sampled, one thing after the other."""


def attach(model: nn.Module, variant: Variant) -> Observer | None:
    """Attaches the variant's observer."""
    if variant.sampler is None:
        return None

    def fail(layer: str, error: BaseException) -> None:
        raise RuntimeError(layer) from error

    layers = select_layers(model, leaf_modules(), fail)
    session = Discarding()
    clock = StepClock()
    optimizers = OptimizerWatch(clock, weakref.ref(model), on_error=fail)
    scalers = ScalerWatch(clock, optimizers, on_error=fail)
    watches = {"": (), "optimizers": (optimizers,), "scalers": (optimizers, scalers)}[variant.watches]
    probe = RootProbe(
        model,
        layers=layers,
        sampler=variant.sampler(),
        reducers=default_reducers(),
        session=session,
        clock=clock,
        scale=scalers if scalers in watches else None,
        companions=watches,
        faults=Faults(ErrorPolicy.IGNORE, session.put_error),
        histograms=variant.histograms,
        focus=select_focus(layers, None, 8, fail),
        selector=leaf_modules(),
        capture_direct_forwards=variant.captures,
    )
    observer = Observer(probe)
    observer.attach(model)
    return observer


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """200 layers that do next to nothing: what is seen is the cost of hooks."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(200)]), torch.randn(4, 4)


def transformer(width: int, batch: int, length: int) -> tuple[nn.Module, torch.Tensor]:
    """A small encoder."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(batch, length, width)


def example() -> tuple[nn.Module, torch.Tensor]:
    """The character model of ``examples/``, with a micro-batch as they have it."""
    sys.path.insert(0, str(EXAMPLES))
    from ddp_language_model import VOCABULARY, CharacterModel

    return CharacterModel(64), torch.randint(VOCABULARY, (8, 64))


def forward_alone(model: nn.Module, x: torch.Tensor) -> None:
    """An evaluation step."""
    with torch.no_grad():
        model(x)


def forward_and_backward(model: nn.Module, x: torch.Tensor) -> None:
    """A training step without its optimizer."""
    model(x).square().mean().backward()


def training_step(model: nn.Module) -> Step:
    """Returns a training step with optimizer and loss scaler."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = GradScaler("cpu", init_scale=1024.0)

    def whole_step(model: nn.Module, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return whole_step


def seconds(step: Step, model: nn.Module, x: torch.Tensor) -> float:
    """Processor seconds of one step, over as many as it takes to be seen."""
    step(model, x)
    num_steps, elapsed_s = 0, 0.0
    gc.collect()
    gc.disable()
    try:
        began_s = time.process_time()
        while elapsed_s < STEP_S:
            step(model, x)
            num_steps += 1
            elapsed_s = time.process_time() - began_s
    finally:
        gc.enable()
    return elapsed_s / num_steps


def measure(
    step: Step, model: nn.Module, x: torch.Tensor, variants: Sequence[Variant], rounds: int
) -> dict[str, list[float]]:
    """For each variant the seconds of its step in each round."""
    found: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(rounds):
        # Any order: what one variant leaves behind in caches and allocators falls on each of the others.
        for variant in random.Random(number).sample(variants, len(variants)):
            observer = attach(model, variant)
            found[variant.name].append(seconds(step, model, x))
            if observer is not None:
                observer.close()
    return found


def compared(found: dict[str, list[float]]) -> str:
    """A table of each variant beside the bare step of the same round."""
    rows: list[list[str]] = [["variant", "x bare", "quartiles", "least", "added"]]
    bare = found.pop(VARIANTS[0].name)
    for name, times in found.items():
        ratios = [one / base for one, base in zip(times, bare, strict=True)]
        added_s = statistics.median(one - base for one, base in zip(times, bare, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        least = f"{min(times) / min(bare):.3f}"
        rows.append([name, f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", least, f"{added_s * 1e6:.1f} us"])
    return f"bare step {statistics.median(bare) * 1e6:.0f} us\n{table(rows)}"


def added_microseconds() -> list[list[str]]:
    """What an unsampled forward costs in itself, on a model that does nothing: least of several runs."""
    model, x = nn.Sequential(*[nn.Identity() for _ in range(5)]), torch.ones(1)

    def least() -> float:
        return min(seconds(forward_alone, model, x) for _ in range(20))

    bare_s = least()
    rows = []
    for variant in VARIANTS[2:4]:
        observer = attach(model, variant)
        rows.append([variant.name, f"{(least() - bare_s) * 1e6:.1f} us"])
        if observer is not None:
            observer.close()
    return rows


def table(rows: Iterable[Sequence[str]]) -> str:
    """Columns of equal width."""
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> None:
    """Prints one table for each model and step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="rounds over all variants (default 15)")
    parser.add_argument("--only", choices=("unsampled", "sampled"), help="one half of the tables")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"added to a forward that is not sampled\n{table(added_microseconds())}", flush=True)
    models = {
        "MLP, 200 x Linear(4, 4)": mlp(),
        "transformer, 4 layers, d 64, 2 x 16": transformer(64, 2, 16),
        "transformer, 4 layers, d 256, 8 x 64": transformer(256, 8, 64),
        "example, 8 x 64": example(),
    }
    # What is alive by now stays so, and need not be looked through before each measurement.
    gc.collect()
    gc.freeze()
    for title, (model, x) in models.items():
        steps: list[tuple[str, Step, Sequence[Variant]]] = []
        if options.only != "sampled":
            steps.append(("whole step", training_step(model), UNSAMPLED))
        if options.only != "unsampled":
            steps.append(("forward alone", forward_alone, VARIANTS))
            steps.append(("forward and backward", forward_and_backward, VARIANTS))
        num_leaves = sum(1 for _, module in model.named_modules() if not list(module.children()))
        for what, step, variants in steps:
            found = measure(step, model, x, variants, options.rounds)
            print(f"\n{title} ({num_leaves} leaves), {what}\n{compared(found)}", flush=True)


if __name__ == "__main__":
    main()
