"""Lightning's own loop, whose optimizer step runs forward and backward inside a closure."""

import os
import subprocess
import sys
from pathlib import Path

from torchinstruments import open_run

PROGRAM = """
import sys
import torch
import lightning.pytorch as lightning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchinstruments import AlwaysSampler, inject_observer, remove_observer

class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, index):
        self.net(batch[0])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

model = Regression()
inject_observer(model.net, output_dir=sys.argv[1], sampler=AlwaysSampler())
batches = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=2)
trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=4, accelerator="cpu", logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0)
trainer.fit(model, batches, batches)
remove_observer(model.net)
print("STEPS", trainer.global_step)
"""


def test_ten_batches_accumulated_by_four_are_two_whole_attempts_and_a_partial_one(tmp_path: Path) -> None:
    """The last micro-batch of each runs inside the step; the validation belongs to the last attempt."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "STEPS 3" in done.stdout
    run = open_run(str(tmp_path / "run"))
    columns = ("attempt", "optimizer", "optimizer_attempt", "micro_batches", "last_forward_index", "outcome")
    assert run.steps().collect().sort("attempt").select(columns).rows() == [
        (0, 0, 0, 4, 3, "applied"),
        (1, 0, 1, 4, 7, "applied"),
        (2, 0, 2, 2, 19, "applied"),
    ]
    places = (
        run.history()
        .collect()
        .select("forward_index", "attempt", "micro_batch")
        .unique()
        .sort("forward_index")
    )
    assert places["attempt"].to_list() == [0] * 4 + [1] * 4 + [2] * 12
    assert places["micro_batch"].to_list() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1] + [None] * 10


CHECKED = """
import sys
import torch
import lightning.pytorch as lightning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchinstruments.checks import ChecksSession, CheckViolationError

class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
    def on_before_optimizer_step(self, optimizer):
        self.kept = [parameter.detach().clone() for parameter in self.parameters()]

def fit(model, data, **options):
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, **options)
    session = ChecksSession(model, scaler=None)
    session.register_nonfinite_grad_check()
    session.register_update_ratio_check()
    try:
        with session:
            trainer.fit(model, DataLoader(TensorDataset(data), batch_size=2))
        raised = ""
    except CheckViolationError as error:
        raised = error.fields["code"]
    return session.final_report, raised

model = Regression()
report, raised = fit(model, torch.randn(20, 4), accumulate_grad_batches=4)
ledger = report.ledgers["scale"]
print("COUNTS", report.counters["backwards"], report.counters["accepted_steps"], ledger["attempts"],
      ledger["micro_batches_per_attempt"]["highest"], ledger["micro_batches_per_attempt"]["lowest"], raised)
print("SAID", [one.to_dict() for one in report.unavailable], [one.code for one in report.findings])

data = torch.randn(20, 4)
data[13] = float("nan")
report, raised = fit(model, data)
is_clean = all(torch.equal(a, b) for a, b in zip(model.parameters(), model.kept, strict=True))
(finding,) = [one for one in report.findings if one.severity == "critical"]
print("RAISED", raised, finding.names, finding.moment.attempt, finding.moment.accepted_step, is_clean,
      report.finalized_reason)
"""


def test_checks_look_inside_its_closures(tmp_path: Path) -> None:
    """Counts are right under accumulation, and a NaN is raised before Lightning's optimizer writes it."""
    done = subprocess.run(
        [sys.executable, "-c", CHECKED],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "COUNTS 10 3 3 4 2 " in lines
    assert "SAID [] []" in lines
    assert "RAISED param_grad_nonfinite ('net.weight', 'net.bias') 6 6 True exception_exit" in lines
