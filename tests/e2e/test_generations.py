"""Jobs that die, come back smaller or elsewhere, or have no launcher: every generation is named."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch.distributed as dist

from torchinstruments import merge_run, open_run
from torchinstruments.store.filesystem import open_storage

STEPS = 4

WORKER = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torchinstruments import EveryNStepsSampler, inject_observer, remove_observer

settings = json.loads(sys.argv[1])
restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
torch.manual_seed(0)

def join():
    # Addresses that a dead generation left in the store must not be found.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"gloo-{restarts}-{os.environ['WORLD_SIZE']}", store)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))

def attach(model):
    return inject_observer(model, output_dir=settings["folder"], storage_options=settings.get("options"),
                           sampler=EveryNStepsSampler(1))

model = nn.Linear(4, 1)
if settings.get("attach_first"):
    observer = attach(model)
    if settings.get("dies") == "at once":
        os.kill(os.getpid(), signal.SIGKILL)
    join()
    model = nn.parallel.DistributedDataParallel(model)
else:
    join()
    model = nn.parallel.DistributedDataParallel(model)
    observer = attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(settings["steps"]):
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
if settings.get("dies", ("", ""))[0] == restarts:
    observer.flush()
    dist.barrier()
    if settings["dies"][1] == os.environ["RANK"]:
        # The leader's thread tells who is there when it has heard of all, at no particular moment.
        record = f"{settings['folder']}/generations/{int(restarts):03d}.json"
        while not json.load(open(record))["members_complete"]:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
remove_observer(observer._probe._model() if settings.get("attach_first") else model)
print("URL", observer.url)
"""


class Agent:
    """Starts workers as torchrun's agent does, over a store that outlives them."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.run_id = run_id
        self.spool = folder / "spool"

    def run(
        self,
        settings: Sequence[Mapping[str, Any]],
        *,
        restarts: int = 0,
        codes: Sequence[int] | None = None,
        hosts: Sequence[int] | None = None,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs one worker a rank to its end, each with settings of its own."""
        world_size = len(settings)
        workers = []
        for rank, own in enumerate(settings):
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank if hosts is None else 0),
                "LOCAL_WORLD_SIZE": str(world_size if hosts is None else 1),
                "GROUP_RANK": str(0 if hosts is None else hosts[rank]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_RUN_ID": self.run_id,
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            workers.append(start(self.script, {"steps": STEPS, **own}, self.spool, environ))
        return end(workers, codes or [0] * world_size)


def start(
    script: Path, settings: Mapping[str, Any], spool: Path, environ: Mapping[str, str], *launcher: str
) -> subprocess.Popen[str]:
    """Starts a program that takes its settings as one argument."""
    return subprocess.Popen(
        [sys.executable, *launcher, str(script), json.dumps(settings)],
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHINSTRUMENTS_SPOOL_DIR": str(spool),
            **environ,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(
    workers: Sequence[subprocess.Popen[str]], codes: Sequence[int]
) -> list[subprocess.CompletedProcess[str]]:
    """Waits for programs and compares their exit codes; a program that is left is ended."""
    done = []
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=100)
            done.append(subprocess.CompletedProcess(worker.args, worker.returncode, out, err))
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    said = "\n".join(one.stdout + one.stderr for one in done)
    assert [one.returncode for one in done] == list(codes), said
    return done


def merged(*urls: str, options: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Merges a run and returns its result."""
    merge_run(*urls, storage_options=options)
    return json.loads(open_storage(urls[0], options).read("merged/result.json"))


def samples_of(*urls: str, options: Mapping[str, object] | None = None) -> dict[tuple[int, int], list[int]]:
    """Returns the attempts that were measured, by generation and rank."""
    samples = open_run(*urls, storage_options=options).samples().collect()
    measured = samples.filter(pl.col("state") == "backward_observed")
    return {
        (generation, rank): sorted(rows["attempt"].unique().to_list())
        for (generation, rank), rows in measured.group_by("generation", "rank")
    }


def members(result: Mapping[str, Any]) -> list[list[tuple[int, str]]]:
    """Returns rank and process of the members of each generation."""
    return [[(one["rank"], one["process"]) for one in g["members"]] for g in result["generations"]]


def every_attempt(*places: tuple[int, int]) -> dict[tuple[int, int], list[int]]:
    """Returns what `samples_of` gives where each of these measured all its steps."""
    return {place: list(range(STEPS)) for place in places}


def test_a_killed_worker_comes_back_as_the_next_generation(tmp_path: Path) -> None:
    """Two generations of two processes each under torchrun, and the rows of the killed one are there."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    settings = {"folder": str(tmp_path / "run"), "steps": STEPS, "dies": ["0", "1"], "attach_first": True}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=night-7"]
    end([start(script, settings, tmp_path / "spool", {}, *launcher)], [0])

    result = merged(str(tmp_path / "run"))
    assert samples_of(str(tmp_path / "run")) == every_attempt((0, 0), (0, 1), (1, 0), (1, 1))
    assert (result["run"]["run_id"], result["run"]["launcher"]) == ("night-7", "torchrun")
    assert [one["members_complete"] for one in result["generations"]] == [True, True]
    assert [[rank for rank, _ in one] for one in members(result)] == [[0, 1], [0, 1]]
    assert len({process for one in members(result) for _, process in one}) == 4
    assert {(one["rank"], one["generation"], one["restart_count"]) for one in result["ranks"]} == {
        (rank, generation, generation) for rank in (0, 1) for generation in (0, 1)
    }
    status = {(one["rank"], one["generation"]): one["status"] for one in result["ranks"]}
    assert (status[1, 0], status[0, 1], status[1, 1]) == ("interrupted", "closed", "closed")
    assert result["coverage"]["overlapping_ranks"] == []
    assert result["coverage"]["missing_ranks"] == []


def test_a_restart_with_fewer_ranks_believes_nothing_of_the_larger_world(tmp_path: Path) -> None:
    """Rank 2 of generation 0 is in nobody's way, and only generation 0 expects it."""
    agent = Agent(tmp_path, "shrinking")
    settings = {"folder": str(tmp_path / "run")}
    dies = {**settings, "dies": ["0", "2"]}
    agent.run([dies] * 3, codes=[1, 1, -signal.SIGKILL])
    agent.run([settings] * 2, restarts=1)

    result = merged(str(tmp_path / "run"))
    assert [one["world_size"] for one in result["generations"]] == [3, 2]
    assert [one["expected_ranks"] for one in result["generations"]] == [[0, 1, 2], [0, 1]]
    assert [one["present_ranks"] for one in result["generations"]] == [[0, 1, 2], [0, 1]]
    assert [[rank for rank, _ in one] for one in members(result)] == [[0, 1, 2], [0, 1]]
    assert samples_of(str(tmp_path / "run")) == every_attempt((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))


def test_a_leader_that_dies_at_once_is_a_member_of_its_generation(tmp_path: Path) -> None:
    """It stands there from its claim on, before it can have heard of anybody."""
    settings = {"folder": str(tmp_path / "run"), "attach_first": True, "dies": "at once"}
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    agent = Agent(tmp_path, "short")
    environ["MASTER_PORT"] = str(agent.store.port)
    end([start(agent.script, settings, agent.spool, environ)], [-signal.SIGKILL])
    record = json.loads((tmp_path / "run" / "generations" / "000.json").read_text())
    assert record["members_complete"] is False
    assert [(one["rank"], one["process"]) for one in record["members"]] == [(0, record["leader_process"])]


def test_ranks_that_change_hosts_keep_one_numbering_without_a_shared_folder(tmp_path: Path) -> None:
    """Rank 0 becomes rank 1, and the new leader's host has never seen the run.

    Generations go on from what the store keeps, not from what the leader's own folder shows.
    """
    agent = Agent(tmp_path, "swapped")
    here, there = ({"folder": str(tmp_path / name / "run")} for name in ("host-a", "host-b"))
    agent.run([here], hosts=[0])
    agent.run([there, here], restarts=1, hosts=[1, 0])

    urls = (here["folder"], there["folder"])
    result = merged(*urls)
    assert samples_of(*urls) == every_attempt((0, 0), (1, 0), (1, 1))
    assert [one["generation"] for one in result["generations"]] == [0, 1]
    assert [one["world_size"] for one in result["generations"]] == [1, 2]
    assert {(one["generation"], one["rank"], one["node_rank"]) for one in result["ranks"]} == {
        (0, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
    }
    assert result["coverage"]["overlapping_ranks"] == []
    assert result["coverage"]["complete"], result["coverage"]


def test_two_agents_without_a_shared_folder_write_one_run(tmp_path: Path) -> None:
    """Each host has its own ``run.json`` of the agreed id, and the merge takes both as one."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    launcher += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two-hosts", "--local-addr=127.0.0.1"]
    urls = [str(tmp_path / host / "run") for host in ("host-a", "host-b")]
    agents = [
        start(script, {"folder": url, "steps": STEPS}, tmp_path / "spool", {}, *launcher) for url in urls
    ]
    done = end(agents, [0, 0])

    records = [json.loads((Path(url) / "run.json").read_text()) for url in urls]
    assert [record["run_id"] for record in records] == ["two-hosts", "two-hosts"]
    result = merged(*urls)
    assert samples_of(*urls) == every_attempt((0, 0), (0, 1))
    assert result["coverage"]["complete"], result["coverage"]
    assert [[rank for rank, _ in one] for one in members(result)] == [[0, 1]]
    shown = {line.removeprefix("URL ") for one in done for line in one.stdout.splitlines() if "URL" in line}
    assert shown == set(urls)
    assert [sorted(path.name for path in Path(url).glob("rank-*")) for url in urls] in (
        [["rank-000"], ["rank-001"]],
        [["rank-001"], ["rank-000"]],
    )


@pytest.mark.timeout(300)  # six workers, one job after the other
@pytest.mark.parametrize("place", ["local disk", "object store"])
def test_a_job_that_is_launched_again_goes_on_in_its_folder(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The second launch under the same id is the next generation, though its store knows nothing.

    A launch under another id finds the folder taken, goes beside it, and one rank says so once.
    """
    url, options = str(tmp_path / "run"), None
    if place == "object store":
        url = f"s3://{request.getfixturevalue('bucket')}/run"
        options = request.getfixturevalue("seaweed").storage_options
    settings = {"folder": url, "options": options}
    for _ in range(2):
        Agent(tmp_path, "requeued").run([settings, settings])

    result = merged(url, options=options)
    assert samples_of(url, options=options) == every_attempt((0, 0), (0, 1), (1, 0), (1, 1))
    assert result["coverage"]["complete"], result["coverage"]
    assert len({process for one in members(result) for _, process in one}) == 4
    if place == "local disk":
        others = Agent(tmp_path, "other").run([settings, settings])
        assert [one.stdout.split()[-1] for one in others] == [f"{url}/run-other"] * 2
        assert sum(one.stderr.count("kept beside it") for one in others) == 1
        assert samples_of(f"{url}/run-other") == every_attempt((0, 0), (0, 1))
        assert samples_of(url) == every_attempt((0, 0), (0, 1), (1, 0), (1, 1))


SPAWNED = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchinstruments import EveryNStepsSampler, inject_observer, remove_observer

def train(rank, settings):
    assert "RANK" not in os.environ
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    if settings["attach_first"]:
        observer = inject_observer(model, output_dir=settings["folder"], sampler=EveryNStepsSampler(1))
    dist.init_process_group("gloo", init_method=settings["meets"], rank=rank, world_size=2)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if not settings["attach_first"]:
        observer = inject_observer(wrapped, output_dir=settings["folder"], sampler=EveryNStepsSampler(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(settings["steps"]):
        wrapped(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    observer.close()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, (json.loads(sys.argv[1]),), nprocs=2)
"""


@pytest.mark.parametrize("attach_first", [False, True], ids=["after-init", "before-init"])
def test_spawned_ranks_without_a_launcher_agree(tmp_path: Path, attach_first: bool) -> None:
    """Nothing in the environment names a rank; before the group exists it is settled at the first forward."""
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meets = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    url = str(tmp_path / "run")
    settings = {"folder": url, "steps": STEPS, "attach_first": attach_first, "meets": meets}
    (done,) = end([start(script, settings, tmp_path / "spool", {})], [0])

    result = merged(url)
    assert samples_of(url) == every_attempt((0, 0), (0, 1))
    assert result["coverage"]["complete"], (result["coverage"], done.stderr)
    assert [[rank for rank, _ in one] for one in members(result)] == [[0, 1]]
    assert {one["launcher"] for one in result["ranks"]} == {"process_group"}
