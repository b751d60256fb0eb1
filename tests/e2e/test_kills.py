"""Ranks that are killed at any moment: what was acknowledged is there, and what is there can be read."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from fork_server import ForkServer, Program
from torchinstruments import merge_run, open_run
from torchinstruments.cli.main import main

ROWS_OF_A_SAMPLE = 2 * 9
WORLD_SIZE = 2
NUM_RUNS = 25
"""With two ranks each, which are killed at moments of their own."""

PROGRAM = """
import json, os, sys, time
import torch
from torch import nn
from torchinstruments import AlwaysSampler, HistoryConfig, inject_observer

settings = json.loads(sys.argv[1])
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
observer = inject_observer(
    model, output_dir=settings["folder"], storage_options=settings.get("options"), sampler=AlwaysSampler(),
    histograms=(), history_config=HistoryConfig(buffer_rows=settings.get("buffer_rows", 40)),
)
print("ready", flush=True)
for step in range(settings.get("steps", 10**6)):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    num_samples = observer.counters.samples
    if step % settings.get("flushes_every", 7) == 0 and observer.flush():
        print("acknowledged", num_samples, flush=True)
    time.sleep(settings.get("pause_s", 0.0))
print("closed", observer.close(), flush=True)
"""


class World:
    """Ranks over a store that outlives them, as under torchrun."""

    def __init__(self, server: ForkServer, own: Path, run_id: str, **settings: Any) -> None:
        self._server = server
        self._own = own
        self._run_id = run_id
        self._settings = settings
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        own.mkdir(parents=True, exist_ok=True)

    def start(self, *, restarts: int = 0, world_size: int = WORLD_SIZE, **settings: Any) -> list[Program]:
        """Starts one program a rank."""
        return [
            self._server.start(
                PROGRAM,
                self._own,
                json.dumps({**self._settings, **settings}),
                environ={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self._store.port),
                    "TORCHELASTIC_RUN_ID": self._run_id,
                    "TORCHELASTIC_RESTART_COUNT": str(restarts),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "TORCHINSTRUMENTS_SPOOL_DIR": str(self._own / "spool"),
                },
            )
            for rank in range(world_size)
        ]


def num_acknowledged(program: Program) -> int:
    """Returns how many samples the program was told to be durable."""
    said = [line for line in program.out.read_text().splitlines() if line.startswith("acknowledged ")]
    return int(said[-1].split()[1]) if said else 0


def read_everything(folder: Path) -> None:
    """Reads each file that has a name, as its kind."""
    for path in folder.rglob("*"):
        if path.is_dir() or path.name.startswith("."):
            continue
        if path.suffix == ".parquet":
            assert pq.read_table(path).num_rows > 0
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            assert path.suffix == ".md", path


def grow_old(folder: Path) -> None:
    """Lets the manifests be as old as they are an hour later."""
    for path in folder.rglob("process-*.json"):
        os.utime(path, (time.time() - 3600.0,) * 2)


def samples_of(
    url: str, rank: int, generation: int = 0, options: Mapping[str, object] | None = None
) -> list[int]:
    """Returns the attempts whose sample has all its rows; no row may be there twice."""
    run = open_run(url, storage_options=options)
    mine = (pl.col("rank") == rank) & (pl.col("generation") == generation)
    history = run.history().filter(mine).collect()
    key = ["sample_id", "signal", "metric", "tensor_path", "layer", "backward_index"]
    assert history.height == history.unique(subset=key).height
    whole = history.group_by("attempt").len().filter(pl.col("len") == ROWS_OF_A_SAMPLE)
    return sorted(whole["attempt"].to_list())


@pytest.mark.timeout(300)
def test_fifty_kills_lose_nothing_that_was_acknowledged(
    fork_server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file can be read, the merge exits 1 and names both ranks, and no acknowledged row is missing."""
    numbers = random.Random(8)
    num_acked = 0
    for turn in range(NUM_RUNS):
        own = tmp_path / str(turn)
        folder = own / "run"
        world = World(fork_server, own, f"run-{turn}", folder=str(folder))
        ranks = world.start()

        def kill(rank: Program, after_s: float) -> None:
            time.sleep(after_s)
            rank.kill()

        for rank in ranks:
            rank.wait_for("ready")
        killers = [threading.Thread(target=kill, args=(rank, numbers.uniform(0.0, 0.4))) for rank in ranks]
        for killer in killers:
            killer.start()
        for killer in killers:
            killer.join()

        assert [rank.code for rank in ranks] == [-signal.SIGKILL] * WORLD_SIZE
        read_everything(folder)
        for number, rank in enumerate(ranks):
            acknowledged = num_acknowledged(rank)
            num_acked += acknowledged
            if acknowledged:
                assert samples_of(str(folder), number)[:acknowledged] == list(range(acknowledged))
        grow_old(folder)
        assert main(["merge", str(folder), "--json"]) == 1
        coverage = json.loads(capsys.readouterr().out)["coverage"]
        # One that was killed before it wrote its first manifest is missing.
        assert sorted({*coverage["interrupted_ranks"], *coverage["missing_ranks"]}) == [0, 1]
        assert coverage["quarantined"] == []
    assert num_acked > NUM_RUNS


def finish(ranks: list[Program]) -> None:
    """Waits for ranks that end by themselves."""
    assert [rank.wait() for rank in ranks] == [0] * len(ranks), [rank.err.read_text() for rank in ranks]


@pytest.mark.parametrize("place", ["folder", "object store"])
def test_a_restart_beside_a_zombie_and_the_old_uploader(
    fork_server: ForkServer, tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    """Rank 1 is killed and rank 0 lives on and writes; the next generation starts at once and loses nothing.

    With an object store one uploader carries the rows of all four processes.
    """
    url, options = str(tmp_path / "run"), None
    if place == "object store":
        url = f"s3://{request.getfixturevalue('bucket')}/run"
        options = request.getfixturevalue("seaweed").storage_options
    folder = str(tmp_path / "run")
    world = World(
        fork_server, tmp_path, "night-7", folder=folder if options is None else url, options=options
    )
    zombie, killed = world.start(pause_s=0.02)
    killed.wait_for("acknowledged 8")
    zombie.wait_for("acknowledged 8")
    killed.kill()
    restarted = world.start(restarts=1, steps=30)
    finish(restarted)
    before = num_acknowledged(zombie)
    end_s = time.monotonic() + 60
    while num_acknowledged(zombie) <= before:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    zombie.send(signal.SIGTERM)
    assert zombie.wait() == -signal.SIGTERM

    acknowledged = {
        (0, 0): num_acknowledged(zombie),
        (1, 0): num_acknowledged(killed),
        (0, 1): 30,
        (1, 1): 30,
    }
    end_s = time.monotonic() + 60
    while not all(
        samples_of(url, rank, generation, options)[:number] == list(range(number))
        for (rank, generation), number in acknowledged.items()
    ):
        assert time.monotonic() < end_s, (acknowledged, open_run(url, storage_options=options).manifests)
        time.sleep(0.5)
    result: Any = merge_run(url, storage_options=options).result
    status = {(one["rank"], one["generation"]): one["status"] for one in result["ranks"]}
    assert status == {(0, 0): "closed", (1, 0): "interrupted", (0, 1): "closed", (1, 1): "closed"}
    # Generations keep the rows of the two processes that held rank 0 at once apart.
    assert result["coverage"]["overlapping_ranks"] == []
    assert result["coverage"]["interrupted_ranks"] == [1]
    assert result["coverage"]["missing_ranks"] == []
    assert result["coverage"]["quarantined"] == []
