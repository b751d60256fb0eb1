"""A program that ends without remove_observer: the attempt that was open has its row all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchinstruments import open_run

PROGRAM = """
import sys, threading
import torch
from torch import nn
from torchinstruments import AlwaysSampler, inject_observer

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
observer = inject_observer(model, output_dir=sys.argv[1], sampler=AlwaysSampler())

def train(steps):
    for _ in range(steps):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

how = sys.argv[2]
if how == "open":
    train(3)
    model(torch.randn(3, 4)).sum().backward()
elif how == "raised":
    train(3)
    with observer.step(global_step=9):
        model(torch.randn(3, 4)).sum().backward()
        raise SystemExit(0)
elif how == "thread":
    def later():
        threading.main_thread().join()
        train(4)
    threading.Thread(target=later).start()
elif how == "dropped":
    train(4)
    del model, observer, optimizer
"""


@pytest.mark.parametrize(
    ("how", "last"),
    [
        ("open", (3, -1, None, "abandoned", "none")),
        ("raised", (3, -1, 9, "abandoned", "explicit")),
        ("thread", (3, 0, None, "applied", "optimizer_hook")),
        ("dropped", (3, 0, None, "applied", "optimizer_hook")),
    ],
)
def test_the_last_attempt_has_a_row_however_the_program_ends(
    tmp_path: Path, how: str, last: tuple[object, ...]
) -> None:
    """At the end of the main thread, of a thread that outlives it, or of the model."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), how],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    steps = open_run(str(tmp_path / "run")).steps().collect().sort("attempt")
    assert steps["attempt"].to_list() == [0, 1, 2, 3]
    columns = ("attempt", "optimizer", "global_step", "outcome", "evidence")
    assert steps.select(columns).row(-1) == last
