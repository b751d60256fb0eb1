"""What telemetry at default settings holds beyond its imports, in a training process of its own.

A first process only finds out which modules are loaded in the whole life of an observer. A second one loads
them all before it trains, package by package, trains bare, and then with every step sampled: more than any
interval would. Resident memory in MiB. Asserts nothing.

    python -P tests/benchmarks/memory.py [--steps 300]
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def mib(name: str) -> float:
    """Returns a figure of this process, ``VmRSS`` or its highest value so far, ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def preload(names: list[str]) -> None:
    """Loads modules by package, and prints what each package takes that takes a MiB or more."""
    packages = sorted({name.partition(".")[0] for name in names}, key=lambda one: (one != "torch", one))
    print("imports, MiB:", end="")
    for package in packages:
        before = mib("VmRSS")
        for name in names:
            if name.partition(".")[0] == package:
                try:
                    importlib.import_module(name)
                except Exception as error:  # some are made by others at run time
                    print(f" ({name}: {type(error).__name__})", end="")
        if mib("VmRSS") - before >= 1:
            print(f" {package} {mib('VmRSS') - before:.0f}", end="")
    print()


def live(num_steps: int, *, tells: bool) -> None:
    """Trains bare and observed, and prints what the process holds."""
    import torch

    from torchinstruments import AlwaysSampler, inject_observer

    torch.set_num_threads(1)
    sys.path.insert(0, EXAMPLES)
    from ddp_language_model import VOCABULARY, CharacterModel

    model, x = CharacterModel(64), torch.randint(VOCABULARY, (2, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    train()
    bare = mib("VmHWM")
    with tempfile.TemporaryDirectory() as folder:
        observer = inject_observer(model, output_dir=folder, sampler=AlwaysSampler())
        train()
        observer.flush()
        sampled = mib("VmHWM")
        observer.close()
    if tells:
        print(
            f"bare {bare:.0f}, {num_steps} samples of {observer.counters.rows // num_steps:,} scalars "
            f"+{sampled - bare:.1f}, after the close +{mib('VmHWM') - bare:.1f}"
        )


def main() -> None:
    """Starts both processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--names", action="store_true", help="only print the modules that are loaded")
    parser.add_argument("--preloaded", action="store_true", help="load the modules on standard input first")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.names:
        live(20, tells=False)
        print(json.dumps([name for name in sys.modules if not name.startswith(("_", "ddp_"))]))
    elif options.preloaded:
        preload(json.load(sys.stdin))
        live(options.steps, tells=True)
    else:
        own = [sys.executable, "-P", __file__]
        names = subprocess.run([*own, "--names"], check=True, capture_output=True, text=True).stdout
        command = [*own, "--preloaded", "--steps", str(options.steps)]
        subprocess.run(command, check=True, text=True, input=names)


if __name__ == "__main__":
    main()
