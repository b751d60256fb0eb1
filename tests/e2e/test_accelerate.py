"""Accelerate's own wrapper of an optimizer, its accumulation, and its scaler of the loss."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchinstruments import open_run

PROGRAM = """
import sys
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchinstruments import AlwaysSampler, inject_observer, remove_observer
from torchinstruments.checks import ChecksSession, CheckViolationError

folder, is_scaled, is_given = sys.argv[1], sys.argv[2] == "scaled", sys.argv[3] == "given"
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
if is_scaled:
    # What Accelerate makes itself for fp16 on a GPU.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
torch.manual_seed(0)
model = nn.Linear(4, 1)
model, optimizer, batches = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=0.01),
    DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2),
)
observer = inject_observer(model, output_dir=folder, sampler=AlwaysSampler(),
                           **({"optimizer": optimizer} if is_given else {}))
session = ChecksSession(model, optimizer if is_given else None)
session.register_nonfinite_grad_check()
session.register_update_ratio_check()
skipped, raised = [], ""
try:
    with session:
        for index, (batch,) in enumerate(batches):
            with accelerator.accumulate(model):
                before = [parameter.detach().clone() for parameter in model.parameters()]
                factor = float("inf") if index == 3 else 1.0
                accelerator.backward(model(batch).square().mean() * factor)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    skipped.append(optimizer.step_was_skipped)
except CheckViolationError as error:
    is_clean = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    raised = f"{error.fields['code']} clean={is_clean}"
remove_observer(model)
report = session.final_report
ledger = report.ledgers["scale"]
print("SKIPPED", skipped)
print("LEDGER", ledger["accepted_steps"], ledger["skipped_attempts"], ledger["backoff_events"],
      ledger["micro_batches_per_attempt"]["lowest"], ledger["micro_batches_per_attempt"]["highest"])
print("RAISED", raised or "nothing")
print("UNAVAILABLE", [one.to_dict() for one in report.unavailable])
"""


def lines_of(folder: Path, *choices: str) -> list[str]:
    """Runs eight batches, the fourth of which has an infinite loss, and returns what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *choices],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("choice", ["given", "found"])
def test_a_step_that_its_scaler_skips_is_a_skipped_attempt_of_two_micro_batches(
    tmp_path: Path, choice: str
) -> None:
    """Observer and checks count what Accelerate says itself, with the scale beside each gradient."""
    lines = lines_of(tmp_path / "run", "scaled", choice)
    assert "SKIPPED [False, True, False, False]" in lines
    assert "LEDGER 3 1 1 2 2" in lines
    assert "RAISED nothing" in lines
    assert "UNAVAILABLE []" in lines
    run = open_run(str(tmp_path / "run"))
    columns = ("attempt", "optimizer", "micro_batches", "outcome", "evidence", "scale_before", "scale_after")
    assert run.steps().sort("attempt").select(columns).collect().rows() == [
        (0, 0, 2, "applied", "found_inf", 8.0, 8.0),
        (1, 0, 2, "skipped", "found_inf", 8.0, 4.0),
        (2, 0, 2, "applied", "found_inf", 4.0, 4.0),
        (3, 0, 2, "applied", "found_inf", 4.0, 4.0),
    ]
    gradients = run.history().filter(signal="output_gradient")
    scales = gradients.select("attempt", "micro_batch", "loss_scale", "scale_provenance").unique().collect()
    assert sorted(scales.iter_rows()) == [
        (attempt, micro_batch, 8.0 if attempt < 2 else 4.0, "gradscaler")
        for attempt in range(4)
        for micro_batch in (0, 1)
    ]


def test_without_a_scaler_an_infinite_gradient_is_raised_before_it_is_written(tmp_path: Path) -> None:
    """The check stands inside the step that Accelerate calls; weights are bitwise what they were."""
    assert "RAISED param_grad_nonfinite clean=True" in lines_of(tmp_path / "run", "plain", "given")
