"""What telemetry adds to the mean step of the examples on two ranks, by interval, with checks and without.

The models, micro-batches and wrappers of ``examples/``: DDP, and fully_shard with bfloat16 and activation
checkpointing. All leaf layers are measured, with the default statistics and histograms, into a
local folder. One model takes turns between the ways; the bare step stands twice (A/A). Times are processor
seconds of the whole process, the writer thread's included, a flush within each measurement; a figure is the
median over rounds and ranks. What a sampled step adds is taken from the run that samples every step; beside
the run at every hundredth step, whose effect is smaller than what the machine itself adds, stands that share
of it. Asserts nothing.

    python -P tests/benchmarks/amortised.py [--rounds 3] [--steps 20]
"""

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from torchinstruments.testing.ranks import RankPool

EXAMPLES = str(Path(__file__).parents[2] / "examples")
RANKS = 2
MICRO_BATCHES, BATCH, CONTEXT = 2, 8, 64
BARE, AGAIN = "bare", "bare again (A/A)"
INTERVALS = {"every step": 1, "every 10 steps": 10, "every 100 steps": 100}
CHECKS = ("checks", "checks, every step")


def measure(examples: str, kind: str, folder: str, rounds: int, num_steps: int) -> dict[str, Any]:
    """Measures all ways (on each rank); returns seconds a step by way, and what the observers counted."""
    import sys

    import torch
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from torchinstruments import EveryNStepsSampler, inject_observer, leaf_modules
    from torchinstruments.checks import ChecksSession

    warnings.simplefilter("ignore")
    sys.path.insert(0, examples)
    from ddp_language_model import VOCABULARY, CharacterModel, synchronised
    from fsdp_language_model import ShardedCharacterModel, shard

    torch.manual_seed(0)
    inner = CharacterModel(CONTEXT) if kind == "DDP" else ShardedCharacterModel(CONTEXT)
    num_layers = sum(leaf_modules()(name, module) for name, module in inner.named_modules())
    model: Any = DistributedDataParallel(inner) if kind == "DDP" else shard(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))

    def step() -> None:
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            if kind == "FSDP":
                model.set_requires_gradient_sync(last)
            with synchronised(model, last=last):
                logits = model(text[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
                (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    def seconds(steps: int, flush: Any = None) -> float:
        step()
        torch.distributed.barrier()
        began_s = time.process_time()
        for _ in range(steps):
            step()
        if flush is not None:
            flush()
        return (time.process_time() - began_s) / steps

    def checked(steps: int, flush: Any = None) -> float:
        session = ChecksSession(model, optimizer, scaler=None)
        session.register_nonfinite_grad_check()
        session.register_nonfinite_param_check()
        session.register_update_ratio_check()
        session.register_magnitude_check()
        session.register_change_check(action="collect")
        with session:
            return seconds(steps, flush)

    def observed(way: str, number: int, every: int, steps: int, run: Any) -> float:
        observer = inject_observer(
            model, output_dir=f"{folder}/{number}-{every}-{run.__name__}", sampler=EveryNStepsSampler(every)
        )
        taken_s = run(steps, observer.flush)
        counted[way] = (observer.counters.rows, observer.counters.bytes, observer.counters.samples, steps + 1)
        observer.close()
        return taken_s

    counted: dict[str, tuple[int, int, int, int]] = {}
    found: dict[str, list[float]] = {way: [] for way in (BARE, AGAIN, *INTERVALS, *CHECKS)}
    seconds(5)
    for number in range(rounds):
        found[BARE].append(seconds(num_steps))
        for way, every in INTERVALS.items():
            found[way].append(observed(way, number, every, max(every, num_steps), seconds))
        found[AGAIN].append(seconds(num_steps))
        found[CHECKS[0]].append(checked(num_steps))
        found[CHECKS[1]].append(observed(CHECKS[1], number, 1, num_steps, checked))
    return {"seconds": found, "counted": counted, "layers": num_layers}


def tell(kind: str, results: list[dict[str, Any]]) -> None:
    """Prints the table of one example."""
    dtype = "float32" if kind == "DDP" else "bfloat16"
    base = [result["seconds"][BARE] for result in results]
    bare_s = statistics.median(one for times in base for one in times)

    def added_s(way: str) -> float:
        return statistics.median(
            one - bare
            for result, bares in zip(results, base, strict=True)
            for one, bare in zip(result["seconds"][way], bares, strict=True)
        )

    print(
        f"\n{kind}: {results[0]['layers']} layers, {RANKS} ranks, {dtype}, {MICRO_BATCHES} micro-batches, "
        f"bare step {1e3 * bare_s:.1f} ms of processor time"
    )
    print(f"{'':22}{'added':>10}{'of a step':>11}{'scalars a step':>16}{'bytes a step and rank':>23}")
    for way in results[0]["seconds"]:
        if way == BARE:
            continue
        line = f"{way:22}{1e3 * added_s(way):7.2f} ms{100 * added_s(way) / bare_s:9.2f} %"
        if way in results[0]["counted"]:
            rows, num_bytes, _, steps = results[0]["counted"][way]
            line += f"{rows / steps:16,.0f}{num_bytes / steps:23,.0f}"
        print(line)
    each_s = added_s("every step")
    for name, interval_s in (("100 steps", 100 * bare_s), ("60 s", 60.0)):
        print(f"{'a sampled step each ' + name:34}{100 * each_s / interval_s:8.3f} % of the time", flush=True)


def main() -> None:
    """Prints one table for each example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=("DDP", "FSDP"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RankPool(RANKS) as pool:
        for kind in (options.only,) if options.only else ("DDP", "FSDP"):
            results = pool.run(
                measure, EXAMPLES, kind, f"{folder}/{kind}", options.rounds, options.steps, timeout_s=1800.0
            )
            tell(kind, results)


if __name__ == "__main__":
    main()
