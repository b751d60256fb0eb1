"""What training checks add to a step of 200 small parameters, as ratios to the bare step.

Run it with ``python -P tests/benchmarks/checks.py``. One model, attached and detached between measurements,
rounds interleaved, processor time of one thread; a ratio is the median over the rounds. A step is made
before each measurement, since the first one after an attach makes what the later ones use; where nothing
looks at backwards as many as it takes until one hook is enough, but for the line "at first". With ``default``
behind it the layers keep torch's own initial values, under which gradients vanish with depth.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from torchinstruments.checks import ChecksSession
from torchinstruments.checks.lookout import STREAK

DEPTH, WIDTH, ROWS = 100, 64, 32
STEPS, ROUNDS = 8, 15


def counting(_session: ChecksSession) -> None:
    """Registers nothing: hooks, attempts and ledgers alone."""


def everything(session: ChecksSession) -> None:
    """Registers every check at its shortest cadence."""
    session.register_change_check(action="collect")
    session.register_frozen_check(["0.weight"], action="collect")
    session.register_update_ratio_check()
    session.register_nonfinite_grad_check()
    session.register_nonfinite_param_check()
    session.register_magnitude_check()


WAYS: dict[str, Callable[[ChecksSession], None] | None] = {
    "bare": None,
    "bare again": None,
    "counting tier, at first": counting,
    "counting tier": counting,
    "nonfinite_grad": lambda session: session.register_nonfinite_grad_check(),
    "change": lambda session: session.register_change_check(action="collect"),
    "magnitude": lambda session: session.register_magnitude_check(),
    "update_ratio": lambda session: session.register_update_ratio_check(),
    "update_ratio, every=10": lambda session: session.register_update_ratio_check(every=10),
    "frozen (clone, all)": lambda session: session.register_frozen_check(["*"], action="collect"),
    "frozen (digest, all)": lambda session: session.register_frozen_check(
        ["*"], evidence="digest", action="collect"
    ),
    "nonfinite_param": lambda session: session.register_nonfinite_param_check(),
    "all": everything,
}
LATER = frozenset(WAYS) - {"counting tier, at first", "nonfinite_grad", "magnitude", "all"}
"""Ways that look at nothing when a backward ends."""


def main() -> None:
    """Prints a line for each way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    for layer in model:
        # Gradients that vanish with depth would have most norms taken twice.
        if isinstance(layer, nn.Linear) and "default" not in sys.argv[1:]:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    # So small that every round does the same work.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    x = torch.randn(ROWS, WIDTH)

    def seconds(steps: int = STEPS) -> float:
        started_s = time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return (time.process_time() - started_s) / steps

    seconds()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, register in WAYS.items():
            if register is None:
                found[way].append(seconds())
                continue
            session = ChecksSession(model, optimizer, scaler=None)
            register(session)
            with session:
                seconds(STREAK + 4 if way in LATER else 1)
                found[way].append(seconds())
    bare = found["bare"]
    print(f"bare step: {1e3 * statistics.median(bare):.1f} ms, {len(list(model.parameters()))} parameters")
    for way, times in found.items():
        ratio = statistics.median(one / base for one, base in zip(times, bare, strict=True))
        print(f"{way:24} {ratio:.3f}")


if __name__ == "__main__":
    main()
