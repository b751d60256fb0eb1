"""What the training thread runs in an unsampled step with a scaler, seen by torch's profiler.

The profiler sees every operation of a thread, also where dispatch modes are off. On a CPU it cannot see a
copy between devices; ``unit/ranks/test_nothing_waits`` sees those on a pretended one.
"""

from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from torchinstruments import inject_observer, remove_observer

NUM_STEPS = 5


def _operations(folder: Path | None, kind: str) -> Counter[str]:
    """Returns how often the training thread ran each operation in some unsampled steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "plain"
        else torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    )
    scaler = GradScaler("cpu", init_scale=1024.0)
    if folder is not None:
        inject_observer(model, output_dir=folder, interval=timedelta(hours=1))

    def step(number: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 3), number)).mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for index in range(NUM_STEPS):
            step(float("inf") if index == 2 else 1.0)
    events = profile.events() or ()
    training_thread = next(event.thread for event in events if event.name.startswith("Optimizer.step"))
    if folder is not None:
        remove_observer(model)
    return Counter(
        event.name for event in events if event.name.startswith("aten::") and event.thread == training_thread
    )


@pytest.mark.filterwarnings("ignore:torchinstruments. the run has no sample:RuntimeWarning")
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_an_unsampled_step_reads_nothing_on_the_host_and_costs_a_copy_a_number(
    tmp_path: Path, kind: str
) -> None:
    """Findings after unscale_ and after step, the scale before both and after the update: five copies."""
    bare, observed = _operations(None, kind), _operations(tmp_path / "run", kind)
    assert bare["aten::linear"] == 2 * NUM_STEPS
    assert bare - observed == Counter()
    more = observed - bare
    # Slots are looked up 64 at a time: of these steps the first one has done it.
    assert more == Counter(dict.fromkeys(("aten::fill_", "aten::copy_"), 5 * NUM_STEPS))
