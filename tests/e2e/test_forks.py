"""Children of an observed process: they end, they write nothing, and the parent's rows are there once."""

import subprocess
import sys
from pathlib import Path

import pytest

from fork_server import ForkServer
from torchinstruments import open_run

ROWS_OF_A_SAMPLE = 2 * 9

PROGRAM = """
import multiprocessing, os, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchinstruments import AlwaysSampler, inject_observer, remove_observer

model = nn.Linear(4, 2)
observer = inject_observer(model, output_dir=sys.argv[1], sampler=AlwaysSampler(), histograms=())

def train(steps=1):
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()

class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with torch.no_grad():
            model(torch.ones(1, 4))  # a worker may call the model that its parent observes
        return torch.ones(4)

def child():
    train(2)
    assert observer.flush() and observer.close()
    remove_observer(model)

def wait(pid):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""

LOADERS = """
train()
for _ in range(2):
    for batch in DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        train()
remove_observer(model)
"""

FORKS = """
stop = threading.Event()
def flush_all_the_time():
    while not stop.is_set():
        observer.flush()
flushing = threading.Thread(target=flush_all_the_time)
flushing.start()
train()
for turn in range(8):
    pid = os.fork()
    if pid == 0:
        child()
        if turn % 4:
            os._exit(0)
        stop.set()
        raise SystemExit(0)  # with everything that an interpreter does at its end
    train()
    wait(pid)
stop.set()
flushing.join()
remove_observer(model)
"""

PROCESSES = """
train()
running = [multiprocessing.get_context("fork").Process(target=child) for _ in range(4)]
for one in running:
    one.start()
train(3)
for one in running:
    one.join()
    assert one.exitcode == 0, one.exitcode
ended = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
ended.start()
ended.terminate()
ended.join()
assert ended.exitcode == -15
remove_observer(model)
"""

OWN = """
train()
pid = os.fork()
if pid == 0:
    model = nn.Linear(4, 2)
    inject_observer(model, output_dir=sys.argv[1] + "-child", sampler=AlwaysSampler(), histograms=())
    train(2)
    raise SystemExit(0)
wait(pid)
train()
remove_observer(model)
"""


@pytest.mark.parametrize(
    ("body", "samples"),
    [(LOADERS, 5), (FORKS, 9), (PROCESSES, 4), (OWN, 2)],
    ids=["loaders", "forks", "processes", "own observer"],
)
def test_children_write_nothing_and_end(
    fork_server: ForkServer, tmp_path: Path, body: str, samples: int
) -> None:
    """Whether the parent's writer was busy or not, and however a child ends."""
    program = fork_server.start(PROGRAM + body, tmp_path, str(tmp_path / "run"))

    assert program.wait(60.0) == 0, program.err.read_text()

    assert program.err.read_text() == ""
    run = open_run(str(tmp_path / "run"))
    assert len(run.manifests) == 1
    assert run.manifests[0].status == "closed"
    assert run.samples().collect()["sample_id"].sort().to_list() == list(range(samples))
    assert run.history().collect().height == samples * ROWS_OF_A_SAMPLE
    if body == OWN:
        assert open_run(str(tmp_path / "run-child")).history().collect().height == 2 * ROWS_OF_A_SAMPLE


SPAWNING = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchinstruments import AlwaysSampler, inject_observer, remove_observer

class Rows(Dataset):
    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            self.model(torch.ones(1, 4))
        return torch.ones(4)

if __name__ == "__main__":
    model = nn.Linear(4, 2)
    inject_observer(model, output_dir=sys.argv[1], sampler=AlwaysSampler(), histograms=())
    for batch in DataLoader(Rows(model), batch_size=2, num_workers=1, multiprocessing_context="spawn"):
        model(batch).sum().backward()
    remove_observer(model)
"""


def test_a_spawned_worker_that_is_sent_the_observed_model_observes_nothing(tmp_path: Path) -> None:
    """The copy of the model that is pickled for it has hooks that do nothing."""
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    run = open_run(str(tmp_path / "run"))
    assert len(run.manifests) == 1
    assert run.samples().collect()["sample_id"].sort().to_list() == [0, 1]
