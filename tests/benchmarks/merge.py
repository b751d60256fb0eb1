"""What a merge costs, as ratios to a bare scan of the same columns by pyarrow, and the memory that it takes.

Run by ``make bench``; asserts nothing. For each number of ranks a synthetic run is written, then measured in
processes of their own, so that peaks of memory are each measurement's: the scan of what the summary pass
reads, that pass, the scan of what the comparison reads, the comparison, and the whole merge with its threads.
Ratios are of processor seconds, medians over rounds. Both scans and passes use one thread.

    python tests/benchmarks/merge.py [--ranks 8 64 256] [--rows 100000] [--rounds 3] [--executors]

With ``--executors`` the whole merge is measured instead, with threads and with one and two dask workers of
this machine, in seconds from its beginning to its end; memory is that of the process that merges.
"""

# ruff: noqa: E402 - what is imported below is found by the path that is set first

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

_TESTS = Path(__file__).resolve().parents[1]
# Without this folder, in which `merge` is this file and not the tests' package.
sys.path = [str(_TESTS), *(one for one in sys.path if Path(one) != _TESTS / "benchmarks")]

from merge.run_folder import RunFolder
from merge.synthetic_run import METRICS, SIGNALS, SyntheticRun
from torchinstruments.merge.alignment import AlignmentFold
from torchinstruments.merge.comparison import ComparisonFold
from torchinstruments.merge.comparison_blocks import compare_stretches
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.held_groups import COMPARED_COLUMNS
from torchinstruments.merge.plan import plan_merge
from torchinstruments.merge.reading import read_rank
from torchinstruments.store.row_blocks import SUMMARISED_COLUMNS
from torchinstruments.store.schema import KEY_COLUMNS

_LAYERS = 20
_SUMMARY_COLUMNS = ("generation", "rank", "process", *KEY_COLUMNS, *SUMMARISED_COLUMNS)


def scan(url: str, columns: tuple[str, ...]) -> None:
    """Decodes some columns of every part, and does nothing with them."""
    for path in sorted(Path(url).glob("rank-*/history.parts/*.parquet")):
        with pq.ParquetFile(path) as file:
            texts = [name for name in columns if file.schema_arrow.field(name).type == "string"]
        with pq.ParquetFile(path, read_dictionary=texts, pre_buffer=True) as file:
            for _ in file.iter_batches(65_536, columns=list(columns), use_threads=False):
                pass


def summarise(url: str) -> None:
    """Reads every rank as the merge does first."""
    for task in plan_merge([url], None, None).tasks:
        read_rank(task)


def compare(url: str) -> float:
    """Compares all ranks; returns the processor seconds of the comparison alone."""
    plan = plan_merge([url], None, None)
    alignment = AlignmentFold()
    with ComparisonFold() as fold:
        series = 0
        for task in plan.tasks:
            reading = read_rank(task)
            alignment.add(reading.rank, reading.keys)
            fold.plan.add_rank(reading.rank, reading.row_spans)
            series = max(series, len(reading.summaries))
        started_s = time.process_time()
        for task in fold.plan.tasks(alignment.samples, series, plan.inventory.run.run_id, plan.sources):
            for block in compare_stretches(task):
                fold.add_block(block)
        fold.file()
        return time.process_time() - started_s


def merge(url: str) -> None:
    """Merges the run as a user does."""
    with tempfile.TemporaryDirectory() as folder:
        merge_run(url, output=folder)


def merge_with_dask(url: str, num_workers: int) -> float:
    """Merges on a cluster of this machine that runs already; returns the seconds."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=num_workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        started_s = time.monotonic()
        merge_run(url, output=folder, executor=client)
        return time.monotonic() - started_s


def merge_with_threads(url: str) -> float:
    """Merges as a user does; returns the seconds."""
    started_s = time.monotonic()
    merge(url)
    return time.monotonic() - started_s


EXECUTORS: dict[str, Callable[[str], Any]] = {
    "threads": merge_with_threads,
    "dask, 1 worker": lambda url: merge_with_dask(url, 1),
    "dask, 2 workers": lambda url: merge_with_dask(url, 2),
}

MEASURED: dict[str, Callable[[str], Any]] = {
    "nothing": len,
    "scan for the summary": lambda url: scan(url, _SUMMARY_COLUMNS),
    "summary": summarise,
    "scan for the comparison": lambda url: scan(url, COMPARED_COLUMNS),
    "comparison": compare,
    "merge": merge,
    **EXECUTORS,
}


def measured(name: str, url: str) -> tuple[float, float]:
    """Measures in a process of its own: processor seconds, and peak memory in MiB."""
    command = [sys.executable, __file__, "--measure", name, "--url", url]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found["cpu_s"], found["peak_mib"]


def report(ranks: int, rows: int, rounds: int, *, cut_apart: bool) -> None:
    """Writes a run, measures it and prints what came out."""
    samples = max(2, rows // (_LAYERS * len(SIGNALS) * len(METRICS)))
    with tempfile.TemporaryDirectory() as folder:
        root = RunFolder(Path(folder) / "run", world_size=ranks)
        run = SyntheticRun(root, samples, _LAYERS, cut_apart=cut_apart, late_gradients=cut_apart).write()
        total = run.rows * ranks
        found = {
            name: [measured(name, root.url) for _ in range(1 if name == "merge" else rounds)]
            for name in MEASURED
            if name not in EXECUTORS
        }
    cpu_s = {name: statistics.median(one for one, _ in both) for name, both in found.items()}
    peak_mib = {name: max(one for _, one in both) for name, both in found.items()}
    how = "parts cut apart, late gradients" if cut_apart else "parts cut alike"
    print(f"\n{ranks} ranks x {run.rows:,} rows, {how}")
    for name, base in (("summary", "scan for the summary"), ("comparison", "scan for the comparison")):
        print(
            f"  {name:<12} {cpu_s[name] / cpu_s[base]:5.2f} x scan   {1e9 * cpu_s[name] / total:6.0f} ns/row "
            f"(scan {1e9 * cpu_s[base] / total:4.0f})   peak {peak_mib[name]:5.0f} MiB"
        )
    print(
        f"  {'merge':<12} {cpu_s['merge']:5.1f} processor s, {1e9 * cpu_s['merge'] / total:6.0f} ns/row"
        f"   peak {peak_mib['merge']:5.0f} MiB (start {peak_mib['nothing']:.0f})"
    )


def report_executors(ranks: int, rows: int, rounds: int) -> None:
    """Writes a run, merges it with each executor in turns and prints what came out."""
    samples = max(2, rows // (_LAYERS * len(SIGNALS) * len(METRICS)))
    with tempfile.TemporaryDirectory() as folder:
        root = RunFolder(Path(folder) / "run", world_size=ranks)
        run = SyntheticRun(root, samples, _LAYERS).write()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in EXECUTORS}
        for _ in range(rounds):
            for name, measures in found.items():
                measures.append(measured(name, root.url))
    print(f"\n{ranks} ranks x {run.rows:,} rows")
    least_s = {name: min(one for one, _ in both) for name, both in found.items()}
    for name, both in found.items():
        print(
            f"  {name:<16} {least_s[name]:6.1f} s, {least_s[name] / least_s['threads']:5.2f} x threads"
            f"   peak {max(one for _, one in both):5.0f} MiB"
        )


def peak_memory_mib() -> float:
    """Returns the largest resident memory of this process; what it was forked from does not count."""
    status = Path("/proc/self/status").read_text()
    line = next(one for one in status.splitlines() if one.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--executors", action="store_true")
    parser.add_argument("--measure", choices=MEASURED)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    if arguments.measure:
        started_s = time.process_time()
        alone_s = MEASURED[arguments.measure](arguments.url)
        cpu_s = alone_s if isinstance(alone_s, float) else time.process_time() - started_s
        print(json.dumps({"cpu_s": cpu_s, "peak_mib": peak_memory_mib()}))
        return
    for ranks in arguments.ranks:
        if arguments.executors:
            report_executors(ranks, arguments.rows, arguments.rounds)
            continue
        for cut_apart in (False, True):
            report(ranks, arguments.rows, arguments.rounds, cut_apart=cut_apart)


if __name__ == "__main__":
    main()
