"""What the uploader of one host sends to an object store in an hour, and the memory that it takes.

Eight ranks train the model of ``examples/`` at default settings into a real store, with pauses, so that the
machine is free for something else; a proxy counts the requests. What is sent before the first minute is over
(claim, first documents) stands apart from the steady state after it, which is scaled to an hour, and to 1,024
ranks on hosts of eight. Asserts nothing.

    python tests/benchmarks/uploader.py [--minutes 11]
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from torchinstruments.environment import SPOOL_DIR
from torchinstruments.store.uploader_state import read_uploader_state
from torchinstruments.testing.fault_proxy import FaultProxy, LogEntry
from torchinstruments.testing.object_store import object_store
from torchinstruments.testing.ranks import RankPool

RANKS = 8
STEP_S = 0.5
START_S = 60.0
LOOK_S = 1.0


def train(examples: str, url: str, storage_options: dict[str, Any], minutes: float) -> int:
    """Trains for so long (on each rank); returns the rows that were measured."""
    import torch
    from torch.nn import functional

    from torchinstruments import inject_observer, remove_observer

    sys.path.insert(0, examples)
    from ddp_language_model import VOCABULARY, CharacterModel

    model = torch.nn.parallel.DistributedDataParallel(CharacterModel(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    observer = inject_observer(model, output_dir=url, storage_options=storage_options)
    end_s = time.monotonic() + 60 * minutes
    keep = torch.ones(1)
    while keep.item():
        text = torch.randint(VOCABULARY, (1, 65))
        optimizer.zero_grad()
        logits = model(text[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        time.sleep(STEP_S)
        # All ranks leave together.
        keep = torch.tensor([float(time.monotonic() < end_s)])
        torch.distributed.broadcast(keep, 0)
    remove_observer(model)
    return observer.counters.rows


def resident_mib(pid: int) -> tuple[float, float]:
    """Returns what a process holds now, and of that what is its own."""
    fields = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if ":" in line
    )
    resident, private = fields["Rss"], fields["Private_Dirty"]
    return int(resident.split()[0]) / 1024, int(private.split()[0]) / 1024


def kind(entry: LogEntry) -> str:
    """Returns what a request that sends something sends."""
    name = entry.target.partition("?")[0].rpartition("/")[2]
    folder = entry.target.partition("?")[0].split("/")[-2] if "/" in entry.target else ""
    if folder.endswith(".parts"):
        return folder.removesuffix(".parts") + " part"
    for start in ("process", "modules", "events", "checks"):
        if name.startswith(start):
            return start
    return name


def watch(spools: Path, found: list[tuple[float, float]], stop: threading.Event) -> None:
    """Notes the uploader's memory once a second until it is told to stop."""
    while not stop.wait(LOOK_S):
        for spool in spools.iterdir():
            state = read_uploader_state(spool)
            try:
                if state is not None:
                    found.append(resident_mib(state.pid))
            except (OSError, KeyError):  # it has just ended, or not begun
                continue


def tell(title: str, entries: list[LogEntry], hours: float | None = None) -> None:
    """Prints what was sent, and what that makes in an hour where it goes on like that."""
    sent = [entry for entry in entries if entry.method in ("PUT", "POST")]
    num_bytes: Counter[str] = Counter()
    for entry in sent:
        num_bytes[kind(entry)] += entry.body_bytes
    total = sum(num_bytes.values())
    print(f"\n{title}: {len(entries)} requests, {len(sent)} objects, {total / 2**20:.2f} MiB")
    for name, count in Counter(map(kind, sent)).most_common():
        print(f"  {name:18} {count:5}  {num_bytes[name] / 1024:9.1f} KiB")
    if hours is not None:
        for ranks in (RANKS, 1024):
            scale = ranks / RANKS / hours
            num_objects, num_mib = scale * len(sent), scale * total / 2**20
            print(f"  {ranks} ranks, an hour: {num_objects:,.0f} objects, {num_mib:,.1f} MiB")


def main() -> None:
    """Trains, counts, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=11.0)
    minutes = parser.parse_args().minutes
    examples = str(Path(__file__).parents[2] / "examples")
    memory: list[tuple[float, float]] = []
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        object_store() as store,
        FaultProxy(store.endpoint) as proxy,
    ):
        os.environ[SPOOL_DIR] = folder
        url = f"s3://{store.make_bucket('benchmark')}/run"
        endpoint = {"endpoint_url": proxy.url, "region_name": "us-east-1"}
        options = {**store.storage_options, "client_kwargs": endpoint}
        watcher = threading.Thread(target=watch, args=(Path(folder), memory, stop))
        watcher.start()
        with RankPool(RANKS) as pool:
            began_s = time.monotonic()
            rows = sum(pool.run(train, examples, url, options, minutes, timeout_s=60 * minutes + 120))
            ended_s = began_s + 60 * minutes
        last_s = time.monotonic() + 60
        while any(Path(folder).iterdir()) and time.monotonic() < last_s:
            time.sleep(0.5)
        stop.set()
        watcher.join()
        log = proxy.log
    print(f"{RANKS} ranks, {minutes:.0f} minutes, a step each {STEP_S} s and more, {rows:,} rows of history")
    steady_s = began_s + START_S
    tell("first minute", [entry for entry in log if entry.at_s < steady_s])
    steady = [entry for entry in log if steady_s <= entry.at_s < ended_s]
    tell(f"the {minutes - START_S / 60:.1f} minutes after it", steady, (ended_s - steady_s) / 3600)
    tell("the close", [entry for entry in log if entry.at_s >= ended_s])
    print(
        f"\nuploader: at most {max(memory)[0]:.0f} MiB resident, {max(one[1] for one in memory):.0f} its own"
    )


if __name__ == "__main__":
    main()
