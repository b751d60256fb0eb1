"""Ten minutes of training against a store that keeps failing, with its uploader killed now and then.

A small model trains under observation behind the fault proxy; every few seconds another fault comes or goes,
and about once a minute the uploader is killed. What the process holds is printed while it goes on. In the end
the script compares rows sent and rows read, and exits with 1 where a row is missing or doubled, or where
memory, open files or threads grew from the second fifth of the time to the last one.

    python tests/benchmarks/soak.py [--minutes 10] [--seed 0]
"""

import argparse
import contextlib
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchinstruments import EveryNStepsSampler, inject_observer, open_run, remove_observer
from torchinstruments.environment import SPOOL_DIR
from torchinstruments.records import Counters
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.spool_folder import WANTED, process_folders, spooled_bytes
from torchinstruments.store.uploader_state import read_uploader_state
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import object_store

FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "refuses": FaultProxy.down,
    "resets": FaultProxy.reset,
    "stalls": FaultProxy.stall,
    "slow_down": lambda proxy: proxy.status(503, "SlowDown"),
    "internal_error": lambda proxy: proxy.status(500, "InternalError"),
    "expired_token": lambda proxy: proxy.status(403, "ExpiredToken"),
    "loses_responses": lambda proxy: proxy.drop_response(method="PUT"),
    "slow": lambda proxy: proxy.delay(0.5),
}
LAYERS = 3
ROWS_A_STEP = LAYERS * 2 * 9
PAUSE_S = 0.02
LOOK_S = 5.0
KILL_EVERY_S = 60.0
ARRIVAL_S = 300.0
GROWTH_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Held:
    """What the training process held at one time."""

    at_s: float
    resident_bytes: int
    num_files: int
    num_threads: int


def held(began_s: float) -> Held:
    """Returns what this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        time.monotonic() - began_s,
        pages * resource.getpagesize(),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )


def uploader_pid(spools: Path) -> int | None:
    """Returns the process id of the uploader, None where none says that it is at work."""
    for spool in spools.iterdir():
        state = read_uploader_state(spool)
        if state is not None and Path(f"/proc/{state.pid}").exists():
            return state.pid
    return None


def mend(proxy: FaultProxy) -> None:
    """Ends every fault, and resets what still stalls."""
    proxy.clear()
    proxy.down()
    proxy.up()


def soak(minutes: float, seed: int, spools: Path) -> list[str]:
    """Trains for so long and returns what was wrong."""
    chance = random.Random(seed)
    with object_store() as store, FaultProxy(store.endpoint) as proxy:
        url = f"s3://{store.make_bucket('soak')}/run"
        endpoint = {"endpoint_url": proxy.url, "region_name": "us-east-1"}
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        observer = inject_observer(
            model,
            output_dir=url,
            storage_options={**store.storage_options, "client_kwargs": endpoint},
            sampler=EveryNStepsSampler(1),
            histograms=(),
            optimizer=optimizer,
            scaler=None,
        )
        began_s = time.monotonic()
        end_s = began_s + 60 * minutes
        look_s = began_s
        fault_s = began_s + LOOK_S  # a store that refuses at the attach is a mistake of the user's
        kill_s = began_s + KILL_EVERY_S / 2
        found: list[Held] = []
        longest_s: dict[str, tuple[float, int]] = {}
        fault, steps, kills = "none", 0, 0
        while time.monotonic() < end_s:
            step_s = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
            steps += 1
            now_s = time.monotonic()
            if now_s >= began_s + LOOK_S:  # the first steps load what they need
                longest_s[fault] = max(longest_s.get(fault, (0.0, 0)), (time.perf_counter() - step_s, steps))
            if now_s >= fault_s:
                mend(proxy)
                fault = chance.choice(["none", *FAULTS])
                if fault != "none":
                    FAULTS[fault](proxy)
                fault_s = now_s + chance.uniform(3.0, 15.0)
            if now_s >= kill_s:
                kill_s = now_s + KILL_EVERY_S
                pid = uploader_pid(spools)
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        kills += 1
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                found.append(held(began_s))
                for spool in spools.iterdir():
                    for folder in process_folders(spool):
                        LocalStorage(str(folder)).replace(WANTED, uuid.uuid4().hex.encode())
                spooled = sum(spooled_bytes(spool) for spool in spools.iterdir())
                print(
                    f"{found[-1].at_s:6.0f} s  {steps:7,} steps  {fault:15}  "
                    f"{found[-1].resident_bytes / 2**20:6.1f} MiB  {found[-1].num_files} files  "
                    f"{found[-1].num_threads} threads  {spooled / 2**20:6.2f} MiB in the spool",
                    flush=True,
                )
            time.sleep(PAUSE_S)
        mend(proxy)
        remove_observer(model)
        last_s = time.monotonic() + ARRIVAL_S
        while list(spools.iterdir()) and time.monotonic() < last_s:
            time.sleep(0.5)
        problems = compared(url, store.storage_options, steps, observer.counters)
    for name, (step_s, step) in sorted(longest_s.items()):
        print(f"longest step, {name}: {1000 * step_s:.1f} ms (step {step:,})")
    print(f"{steps:,} steps; {kills} uploaders killed")
    problems += [f"the spool still holds {one}" for one in spools.iterdir()]
    return problems + grown(found)


def compared(url: str, storage_options: dict[str, Any], steps: int, counters: Counters) -> list[str]:
    """Compares the rows that were measured, those that were sent and those that are read."""
    history = open_run(url, storage_options=storage_options).history().collect()
    unique = history.unique(["sample_id", "layer", "signal", "metric"]).height
    print(
        f"{counters.rows:,} rows sent, {history.height:,} read, {unique:,} distinct, "
        f"{counters.rows_dropped:,} dropped"
    )
    if steps * ROWS_A_STEP == counters.rows + counters.rows_dropped == history.height == unique:
        return []
    return [f"{steps * ROWS_A_STEP:,} rows were measured"]


def grown(found: list[Held]) -> list[str]:
    """Returns what grew between the second fifth of the time and the last one."""
    fifth = max(1, len(found) // 5)
    early, late = found[fifth : 2 * fifth], found[-fifth:]
    if len(found) < 5:
        return ["too short to tell whether anything grows"]
    problems = []
    for name, slack in (("resident_bytes", GROWTH_BYTES), ("num_files", 4), ("num_threads", 2)):
        before = statistics.median(getattr(one, name) for one in early)
        after = statistics.median(getattr(one, name) for one in late)
        print(f"{name}: {before:,.0f} at first, {after:,.0f} at last")
        if after > before + slack:
            problems.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
    return problems


def main() -> int:
    """Soaks and tells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[SPOOL_DIR] = folder
        problems = soak(arguments.minutes, arguments.seed, Path(folder))
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
