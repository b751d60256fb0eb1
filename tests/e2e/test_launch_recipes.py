"""The recipes for many machines, with all their processes on this one: ranks, run id, and merge."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml  # pyrefly: ignore[untyped-import]

from e2e.ports import free_port
from merge.run_folder import whole_run
from torchinstruments import open_run
from torchinstruments.store.filesystem import open_storage
from torchinstruments.testing.object_store import ObjectStore

pytestmark = pytest.mark.timeout(300)

PROJECT = Path(__file__).resolve().parents[2]
LAUNCH = PROJECT / "launch"
SMALL = ("--batch-size", "2", "--context", "8", "--text-bytes", "50000", "--sample-every-steps", "2")
BINARIES = Path(sys.executable).parent
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NPROC": "1"}


@contextmanager
def started(
    command: list[str | Path], cwd: Path, variables: dict[str, str], output: Path
) -> Generator[subprocess.Popen[bytes]]:
    """Starts a command, and kills it where a test ends early."""
    environment = os.environ | {"PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}"} | LOOPBACK | variables
    with (
        output.open("wb") as file,
        subprocess.Popen(command, cwd=cwd, env=environment, stdout=file, stderr=file) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def run(command: list[str | Path], cwd: Path, variables: dict[str, str], output: Path) -> int:
    """Runs a command to its end and returns its exit code."""
    with started(command, cwd, variables, output) as process:
        return process.wait(200)


def ranks_and_nodes(url: str, options: Mapping[str, object] | None = None) -> list[tuple[int, int | None]]:
    """Returns rank and node of each manifest of a run that all ranks closed."""
    with_options = None if options is None else dict(options)
    found: list[tuple[int, int | None]] = []
    storage = open_storage(url, with_options)
    for entry in storage.walk():
        if Path(entry.path).name.startswith("process-"):
            manifest = json.loads(storage.read(entry.path))
            assert manifest["status"] == "closed", manifest
            assert not any(table["rows_in_spool"] for table in manifest["tables"].values())
            found.append((manifest["rank"], manifest["node_rank"]))
    return sorted(found)


def test_torchrun_on_two_machines(tmp_path: Path) -> None:
    """Two agents, as one starts them on two machines, make one run of the name that they were given."""
    variables = {
        "NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "PORT": free_port(),
        "OUTPUT_DIR": "shared run",
        "RUN_ID": "night-7",
    }
    script = [LAUNCH / "torchrun_multi_node.sh", "--steps", "4", *SMALL]
    with started(script, tmp_path, variables | {"NODE_RANK": "1"}, tmp_path / "1.out") as second:
        assert run(script, tmp_path, variables | {"NODE_RANK": "0"}, tmp_path / "0.out") == 0
        assert second.wait(60) == 0
    said = (tmp_path / "0.out").read_text()
    assert r"compare the ranks:  torchinstruments merge shared\ run" in said
    assert "compare the ranks" not in (tmp_path / "1.out").read_text()
    assert json.loads((tmp_path / "shared run" / "run.json").read_text())["run_id"] == "night-7"
    assert ranks_and_nodes(str(tmp_path / "shared run")) == [(0, 0), (1, 1)]


@pytest.mark.parametrize("missing", ["NNODES", "NODE_RANK", "MASTER_ADDR", "OUTPUT_DIR"])
def test_a_variable_that_is_not_set_is_named(tmp_path: Path, missing: str) -> None:
    """Nothing is started on a machine that does not know its place."""
    given = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OUTPUT_DIR": "run", missing: ""}
    assert run([LAUNCH / "torchrun_multi_node.sh"], tmp_path, given, tmp_path / "out") == 2
    assert f"{missing} is not set; give NNODES" in (tmp_path / "out").read_text()


@dataclass(frozen=True)
class Slurm:
    """A cluster that is this machine."""

    jobs: Path
    variables: dict[str, str]

    def submit(self, *arguments: str, **variables: str) -> dict[str, Any]:
        """Submits a training and its merge, waits for both, and returns what became of each by its name."""
        script = [LAUNCH / "slurm" / "submit.sh", *arguments]
        output = self.jobs / "submit.out"
        code = run(script, PROJECT.parent, self.variables | variables, output)
        assert code == 0, output.read_text() + "".join(one.read_text() for one in self.jobs.glob("*.out"))
        jobs = {path.stem: json.loads(path.read_text()) for path in self.jobs.glob("*.json")}
        return {
            one["asked"]["job-name"]: one | {"id": job, "said": (self.jobs / f"{job}.out").read_text()}
            for job, one in jobs.items()
        }


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Slurm's commands on the PATH, with one node after the other on this machine."""
    commands, jobs = tmp_path / "bin", tmp_path / "jobs"
    commands.mkdir()
    jobs.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        (commands / name).symlink_to(Path(__file__).with_name("slurm_here.py"))
    path = os.pathsep.join((str(commands), str(BINARIES), os.environ["PATH"]))
    spool = str(tmp_path / "spool")
    variables = {
        "PATH": path,
        "SLURM_HERE": str(jobs),
        "TORCHINSTRUMENTS_SPOOL_DIR": spool,
        "PORT": free_port(),
    }
    return Slurm(jobs, variables | {"DASK_INTERFACE": "lo"})


def test_a_training_on_slurm_is_merged_after_it(slurm: Slurm, tmp_path: Path) -> None:
    """Two nodes make one run that is named by the job, and the merge that waits for it finds both ranks."""
    folder = tmp_path / "run of a job"
    jobs = slurm.submit("--steps", "4", *SMALL, OUTPUT_DIR=str(folder))
    train, merge = jobs["train"], jobs["merge"]
    assert (train["exit_code"], merge["exit_code"]) == (0, 0), train["said"] + merge["said"]
    assert merge["options"] == ["--parsable", f"--dependency=afterany:{train['id']}"]
    assert [rank for rank, _ in ranks_and_nodes(str(folder))] == [0, 1]
    merged = json.loads((folder / "merged" / "result.json").read_text())
    assert merged["run"]["run_id"] == train["id"]
    assert merged["coverage"]["complete"] is True
    assert merged["coverage"]["present_ranks"] == [0, 1]


def test_a_training_that_failed_is_merged_too_on_several_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """What was measured before the end is merged, by dask, into the bytes that a merge on one node writes."""
    folder = tmp_path / "run"
    failing = ("--steps", "4", *SMALL, "--log-steps", str(tmp_path / "no such folder" / "log"))
    jobs = slurm.submit(*failing, OUTPUT_DIR=str(folder), MERGE="merge_dask.sbatch")
    train, merge = jobs["train"], jobs["merge"]
    assert (train["exit_code"], merge["exit_code"]) == (1, 0), train["said"] + merge["said"]
    assert merge["asked"]["nodes"] == "4"
    assert "read 2 of 2 ranks (100%)" in merge["said"]
    assert not list(PROJECT.glob("dask-scheduler-*"))
    here = tmp_path / "here"
    code = run(
        ["torchinstruments", "merge", folder, "--output", here], tmp_path, slurm.variables, tmp_path / "out"
    )
    assert code == 0
    for name in ("result.json", "summary.parquet", "comparison.parquet", "steps.parquet", "index.md"):
        assert (here / name).read_bytes() == (folder / "merged" / name).read_bytes(), name


def documents(name: str) -> list[dict[str, Any]]:
    """Returns the documents of a YAML file of the folder."""
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def test_a_pod_that_is_told_to_end_leaves_nothing_in_its_spool(seaweed: ObjectStore, tmp_path: Path) -> None:
    """The TrainJob's own command in two pods: after SIGTERM every row is in the store in the end."""
    (job,) = [one for one in documents("kubernetes/trainjob.yaml") if one["kind"] == "TrainJob"]
    trainer = job["spec"]["trainer"]
    declared = {one["name"]: one["value"] for one in trainer["env"]}
    url = f"s3://{seaweed.make_bucket(f'run-{uuid.uuid4().hex[:12]}')}/train"
    port = free_port()
    command = [*trainer["command"], "--steps", "1000000", *SMALL]
    spools = [tmp_path / f"spool-{node}" for node in range(2)]

    def pod(node: int) -> dict[str, str]:
        """Returns the variables of a pod: those declared, and those that the controller adds."""
        added = {"NNODES": "2", "NPROC_PER_NODE": "1", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1"}
        added["MASTER_PORT"] = port
        own = {"OUTPUT_DIR": url, "TORCHINSTRUMENTS_SPOOL_DIR": str(spools[node])}
        return declared | {f"PET_{name}": value for name, value in added.items()} | seaweed.env | own

    with (
        started(command, PROJECT, pod(0), tmp_path / "0.out") as first,
        started(command, PROJECT, pod(1), tmp_path / "1.out") as second,
    ):
        end_s = time.monotonic() + 120
        while not all(list(spool.glob("*/rank-*/*-history-*.parquet")) for spool in spools):
            assert time.monotonic() < end_s, (tmp_path / "0.out").read_text()
            time.sleep(0.5)
        for one in (first, second):
            one.send_signal(signal.SIGTERM)
        assert first.wait(100) != 0
        assert second.wait(100) != 0
    for spool in spools:
        assert not list(spool.rglob("*.parquet"))
    assert ranks_and_nodes(url, seaweed.storage_options) == [(0, 0), (1, 1)]
    opened = open_run(url, storage_options=dict(seaweed.storage_options))
    assert opened.history().select(pl.col("rank").unique().sort()).collect()["rank"].to_list() == [0, 1]
    assert json.loads(open_storage(url, dict(seaweed.storage_options)).read("run.json"))["run_id"] == "train"


DIES_WITH_ITS_UPLOADER = """
import json, os, pathlib, signal, sys, time
import torch
from torchinstruments import AlwaysSampler, inject_observer

model = torch.nn.Linear(4, 2)
observer = inject_observer(model, output_dir=sys.argv[1], sampler=AlwaysSampler())
for _ in range(5):
    model(torch.randn(8, 4))
assert observer.flush(30)
while not (states := list(pathlib.Path(os.environ["TORCHINSTRUMENTS_SPOOL_DIR"]).glob("*/uploader.json"))):
    time.sleep(0.1)
os.kill(json.loads(states[0].read_bytes())["pid"], signal.SIGKILL)
os._exit(3)
"""


def test_what_a_command_leaves_in_the_spool_is_uploaded_after_it(
    seaweed: ObjectStore, tmp_path: Path
) -> None:
    """Where a program and its uploader were killed its rows are brought, and its exit code stays."""
    url = f"s3://{seaweed.make_bucket(f'run-{uuid.uuid4().hex[:12]}')}/run"
    variables = seaweed.env | {"TORCHINSTRUMENTS_SPOOL_DIR": str(tmp_path / "spool")}
    command = [LAUNCH / "then_upload.sh", "python", "-c", DIES_WITH_ITS_UPLOADER, url]
    assert run(command, PROJECT, variables, tmp_path / "out") == 3
    assert f"rows uploaded to {url}" in (tmp_path / "out").read_text()
    assert open_run(url, storage_options=dict(seaweed.storage_options)).samples().collect().height == 5


def test_an_upload_that_fails_fails_no_job(tmp_path: Path) -> None:
    """The command's own code counts, and the way out is said."""
    variables = {"TORCHINSTRUMENTS_SPOOL_DIR": str(tmp_path / "out")}
    assert run([LAUNCH / "then_upload.sh", "true"], tmp_path, variables, tmp_path / "out") == 0
    assert (
        "not all is uploaded; run this here later: torchinstruments upload" in (tmp_path / "out").read_text()
    )


def test_a_sky_task_runs_on_its_nodes(tmp_path: Path) -> None:
    """The run part of the training, as the first of one node, and that of the merge, on the same folder."""
    (train,), (merge,) = documents("skypilot/train.yaml"), documents("skypilot/merge.yaml")
    node = {"NUM_NODES": "1", "NODE_RANK": "0", "NODE_IPS": "127.0.0.1\n", "NUM_GPUS_PER_NODE": "2"}
    variables = train["envs"] | {f"SKYPILOT_{name}": value for name, value in node.items()}
    variables |= {"OUTPUT_DIR": str(tmp_path / "run"), "PORT": free_port(), "EXAMPLE": "basic_training"}
    variables |= {"TORCHINSTRUMENTS_SPOOL_DIR": str(tmp_path / "spool"), "HOME": str(tmp_path)}
    for task in (train, merge):
        code = run(["bash", "-ec", task["run"]], PROJECT, variables, tmp_path / "out")
        assert code == 0, (tmp_path / "out").read_text()
    merged = json.loads((tmp_path / "run" / "merged" / "result.json").read_text())
    assert merged["run"]["run_id"] == train["envs"]["RUN_ID"]
    assert merged["coverage"]["present_ranks"] == [0, 1]


def test_the_merge_job_merges(tmp_path: Path) -> None:
    """The command of the pod, for a folder in place of the bucket."""
    folder = whole_run(tmp_path / "run", 3)
    (job,) = documents("kubernetes/merge-job.yaml")
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command.count("s3://bucket/train") == 1
    here = [folder.url if word == "s3://bucket/train" else word for word in command]
    assert run(here, tmp_path, {}, tmp_path / "out") == 0
    assert json.loads((folder.root / "merged" / "result.json").read_text())["coverage"]["complete"] is True


def test_the_dask_merge_on_kubernetes_merges(tmp_path: Path) -> None:
    """The commands of scheduler, workers and job, each in a process here, find each other and the run."""
    folder = whole_run(tmp_path / "run", 3)
    port = free_port()
    replaced = {"s3://bucket/train": folder.url, "tcp://merge-scheduler:8786": f"tcp://127.0.0.1:{port}"}
    replaced |= {"8786": port, "4": "1"}
    commands = [
        one["spec"]["template"]["spec"]["containers"][0]["command"]
        for one in documents("kubernetes/merge-dask.yaml")
        if one["kind"] in {"Deployment", "Job"}
    ]
    scheduler, worker, merge = ([replaced.get(word, word) for word in command] for command in commands)
    loopback = ["--host", "127.0.0.1"]
    with (
        started([*scheduler, *loopback], tmp_path, {}, tmp_path / "scheduler.out") as first,
        started([*worker, *loopback], tmp_path, {}, tmp_path / "worker.out") as second,
    ):
        assert run(merge, tmp_path, {}, tmp_path / "out") == 0, (tmp_path / "out").read_text()
        for one in (second, first):
            one.terminate()
            one.wait(30)
    assert json.loads((folder.root / "merged" / "result.json").read_text())["coverage"]["complete"] is True
