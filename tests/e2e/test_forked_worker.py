"""DataLoader workers are forked beside a live observer and use Polars: nothing hangs, nothing is doubled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchinstruments import open_run

PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchinstruments import AlwaysSampler, inject_observer, remove_observer

class Rows(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        import polars as pl
        frame = pl.DataFrame({"x": [float(index)] * 8})
        return torch.tensor(frame.select(pl.col("x") * 2).to_series().to_list())

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
observer = inject_observer(model, output_dir=sys.argv[1], sampler=AlwaysSampler())
model(torch.randn(4, 8)).sum().backward()
observer.flush()
for _ in range(2):
    for batch in DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        model(batch).sum().backward()
remove_observer(model)
assert "polars" not in sys.modules, "the training process never imports Polars"
assert "s3fs" not in sys.modules and "aiohttp" not in sys.modules
print(observer.counters.samples)
"""


@pytest.mark.timeout(180)
def test_forked_workers_may_use_polars_while_an_observer_lives(tmp_path: Path) -> None:
    """Two epochs with two forked workers each end, and the run holds each forward of the parent once."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "9"
    run = open_run(str(tmp_path / "run"))
    assert run.samples().collect()["sample_id"].sort().to_list() == list(range(9))
    assert len(run.manifests) == 1
