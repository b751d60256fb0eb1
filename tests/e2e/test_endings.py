"""However a process ends, what it measured is there and its manifest says how things stand."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fork_server import ForkServer, Program
from torchinstruments import merge_run, open_run
from torchinstruments.store.manifest import Manifest
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore

ROWS_OF_A_SAMPLE = 2 * 9

PROGRAM = """
import json, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torchinstruments import AlwaysSampler, inject_observer, remove_observer

settings = json.loads(sys.argv[1])
model = nn.Linear(4, 2)
if "RANK" in os.environ:
    dist.init_process_group("gloo", init_method=settings["meets"], rank=int(os.environ["RANK"]), world_size=2)

def attach(**arguments):
    return inject_observer(model, output_dir=settings["folder"], sampler=AlwaysSampler(), histograms=(),
                           storage_options=settings.get("options"), **arguments)

def train(steps=3):
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()

def say(text):
    print(text, flush=True)

"""


def start(
    server: ForkServer, own: Path, body: str, *, environ: dict[str, str] | None = None, **settings: Any
) -> Program:
    """Starts a program whose run goes into ``own / "run"``, unless its settings say where."""
    return server.start(
        PROGRAM + body,
        own,
        json.dumps({"folder": str(own / "run"), **settings}),
        environ={"TORCHINSTRUMENTS_SPOOL_DIR": str(own / "spool"), **(environ or {})},
    )


def manifest(address: str, options: dict[str, object] | None = None, rank: int = 0) -> Manifest:
    """Returns the manifest of a rank."""
    found = open_run(address, storage_options=options).manifests
    (mine,) = [one for one in found if one.rank == rank]
    return mine


def grow_old(folder: Path) -> None:
    """Lets the manifests be as old as they are an hour later."""
    for path in folder.rglob("process-*.json"):
        os.utime(path, (time.time() - 3600.0,) * 2)


def num_samples(folder: Path, rank: int = 0) -> int:
    """Returns how many samples a rank has in the tables; the rows of each have to be all there."""
    run = open_run(str(folder / "run"))
    mine = pl.col("rank") == rank
    samples = run.samples().filter(mine).collect()["sample_id"].unique().sort()
    assert samples.to_list() == list(range(len(samples)))
    assert run.history().filter(mine).collect().height == len(samples) * ROWS_OF_A_SAMPLE
    return len(samples)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('broken')", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
        ("threading.Thread(target=train).start(); sys.exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); signal.raise_signal(signal.SIGTERM)", 5),
    ],
    ids=["end", "exit", "exception", "interrupt", "thread", "sigterm", "own handler"],
)
def test_a_process_that_can_say_goodbye_loses_nothing(
    fork_server: ForkServer, tmp_path: Path, ending: str, code: int
) -> None:
    """Without remove_observer every row is there, the manifest is closed, and the exit status is its own."""
    program = start(fork_server, tmp_path, f"attach(); train(); say('ready')\n{ending}\n")

    assert program.wait() == code, program.err.read_text()

    assert num_samples(tmp_path) == (6 if "Thread" in ending else 3)
    found = manifest(str(tmp_path / "run"))
    assert found.status == "closed"
    asked = [(one.probe, one.type) for one in found.errors]
    assert asked == ([("process", "SIGTERM")] if code == -signal.SIGTERM else [])
    assert "torchinstruments" not in program.err.read_text()
    assert merge_run(str(tmp_path / "run")).complete


@pytest.mark.parametrize(
    ("ending", "code"),
    [("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os.abort()", -6), ("os._exit(6)", 6)],
    ids=["sigkill", "abort", "_exit"],
)
def test_a_process_that_is_gone_at_once_keeps_what_was_flushed(
    fork_server: ForkServer, tmp_path: Path, ending: str, code: int
) -> None:
    """The merge names the rank as interrupted, as soon as its manifest is overdue."""
    body = f"observer = attach(); train(); assert observer.flush(); train(1)\n{ending}\n"
    program = start(fork_server, tmp_path, body)

    assert program.wait() == code

    assert num_samples(tmp_path) == 3
    grow_old(tmp_path / "run")
    result: Any = merge_run(str(tmp_path / "run")).result
    assert result["coverage"]["interrupted_ranks"] == [0]
    assert not result["coverage"]["complete"]


def test_ctrl_c_while_a_process_says_goodbye_loses_nothing(fork_server: ForkServer, tmp_path: Path) -> None:
    """Torchrun sends a second one beside the terminal's; the exit status stays what it was."""
    body = """
observer = attach(); train(); assert observer.flush(); train(1)
fsync = os.fsync
def interrupted(descriptor):
    if threading._SHUTTING_DOWN:
        os.kill(os.getpid(), signal.SIGINT); say("interrupted"); time.sleep(0.02)
    return fsync(descriptor)
os.fsync = interrupted
sys.exit(3)
"""
    program = start(fork_server, tmp_path, body)
    assert program.wait() == 3, program.err.read_text()
    assert program.out.read_text().count("interrupted") > 1
    assert program.err.read_text() == ""
    assert num_samples(tmp_path) == 4
    assert manifest(str(tmp_path / "run")).status == "closed"


def test_sigterm_during_training_ends_it_within_seconds(fork_server: ForkServer, tmp_path: Path) -> None:
    """No sample is half there, nothing counts as dropped, and nothing is printed."""
    body = "attach(); train(); say('ready')\nwhile True: train(1)\n"
    program = start(fork_server, tmp_path, body)
    program.wait_for("ready")
    program.send(signal.SIGTERM)

    assert program.wait() == -signal.SIGTERM

    assert program.err.read_text() == ""
    samples = open_run(str(tmp_path / "run")).samples().collect()
    assert samples["sample_id"].n_unique() >= 3
    found = manifest(str(tmp_path / "run"))
    assert (found.status, found.counters.errors) == ("closed", {"process": 1})
    result: Any = merge_run(str(tmp_path / "run")).result
    assert result["ranks"][0]["last_errors"][-1]["type"] == "SIGTERM"


def test_sigterm_while_blocked_in_a_collective(fork_server: ForkServer, tmp_path: Path) -> None:
    """The rank waits for one that never comes; all its rows are there when it is gone, by the signal."""
    body = "attach(run_id='r'); train(); say('ready')\n"
    body += "if dist.get_rank() == 0: dist.barrier()\ntime.sleep(600)\n"
    meets = f"file://{tmp_path / 'meets'}"
    ranks = [
        start(fork_server, tmp_path, body, meets=meets, environ={"RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    for rank in ranks:
        rank.wait_for("ready")
    time.sleep(0.5)  # it is in the barrier by then, most likely; the test holds in any case
    began_s = time.monotonic()
    ranks[0].send(signal.SIGTERM)

    assert ranks[0].wait(30.0) == -signal.SIGTERM
    print(f"ended after {time.monotonic() - began_s:.2f} s")
    ranks[1].send(signal.SIGTERM)
    assert ranks[1].wait(30.0) == -signal.SIGTERM

    assert [num_samples(tmp_path, rank) for rank in range(2)] == [3, 3]
    found = manifest(str(tmp_path / "run"))
    assert found.status == "closed"
    assert merge_run(str(tmp_path / "run")).complete


def test_sigterm_with_a_sink_that_hangs_ends_the_process_all_the_same(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """After the bound of 5 s nothing is waited for."""
    body = """
from torchinstruments import SnapshotSink
class Hanging(SnapshotSink):
    def observe(self, sample):
        say("hangs")
        threading.Event().wait()
from torchinstruments import termination
termination.END_TIMEOUT_S = 0.5
attach(sink=Hanging(settings["folder"] + "-snapshots"))
train()
time.sleep(600)
"""
    program = start(fork_server, tmp_path, body)
    program.wait_for("hangs")
    program.send(signal.SIGTERM)
    assert program.wait(30.0) == -signal.SIGTERM


def test_sigterm_of_a_run_in_an_object_store(
    fork_server: ForkServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The rows are in the spool when the process is gone, and the uploader brings them at once."""
    address = f"s3://{request.getfixturevalue('bucket')}/run"
    options = request.getfixturevalue("seaweed").storage_options
    body = "attach(); train(); say('ready')\ntime.sleep(600)\n"
    program = start(fork_server, tmp_path, body, folder=address, options=options)
    program.wait_for("ready")
    program.send(signal.SIGTERM)
    assert program.wait(30.0) == -signal.SIGTERM

    end_s = time.monotonic() + 60
    while not (found := open_run(address, storage_options=options).manifests) or (
        found[0].status != "closed"
    ):
        assert time.monotonic() < end_s, found
        time.sleep(0.2)
    assert open_run(address, storage_options=options).history().collect().height == 3 * ROWS_OF_A_SAMPLE
    assert merge_run(address, storage_options=options).complete


def test_sigterm_while_a_close_waits_for_its_store(
    fork_server: ForkServer,
    tmp_path: Path,
    seaweed: ObjectStore,
    bucket: str,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
) -> None:
    """The process ends by the signal all the same, and its rows arrive once the store answers again."""
    address = f"s3://{bucket}/run"
    body = """
observer = attach(); train(); assert observer.flush(); say("ready")
while not os.path.exists(settings["go"]): time.sleep(0.01)
say("closes")
observer.close(600.0)
say("closed")
"""
    go = tmp_path / "go"
    program = start(fork_server, tmp_path, body, folder=address, options=proxied(), go=str(go))
    program.wait_for("ready")
    fault_proxy.stall()
    go.touch()
    program.wait_for("closes")
    time.sleep(0.5)  # it waits by then, most likely; the test holds in any case
    program.send(signal.SIGTERM)

    assert program.wait(30.0) == -signal.SIGTERM
    assert "closed" not in program.out.read_text()

    fault_proxy.clear()
    fault_proxy.down()  # resets what still stalls
    fault_proxy.up()
    options = seaweed.storage_options
    end_s = time.monotonic() + 60
    while open_run(address, storage_options=options).history().collect().height < 3 * ROWS_OF_A_SAMPLE:
        assert time.monotonic() < end_s
        time.sleep(0.2)
    assert open_run(address, storage_options=options).history().collect().height == 3 * ROWS_OF_A_SAMPLE


def test_sigterm_of_an_observer_that_begins_at_its_first_forward(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Attached before the process group, from a thread: what was left while the ranks agreed is there too."""
    body = """
thread = threading.Thread(target=attach)
thread.start(); thread.join()
train(); say("ready")
time.sleep(600)
"""
    environ = {"RANK": "0", "WORLD_SIZE": "2"}
    body = f"import os; os.environ.update({environ!r})\n" + body
    program = start(fork_server, tmp_path, body)
    program.wait_for("ready")
    program.send(signal.SIGTERM)
    assert program.wait(30.0) == -signal.SIGTERM
