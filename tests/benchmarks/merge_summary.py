"""What the summary pass of a merge costs, as multiples of a bare pyarrow scan of the same columns.

::

    python -P tests/benchmarks/merge_summary.py [--ranks 8 64 256] [--rows 100000] [--folder FOLDER]

A run is written with the encodings of real parts: 3,600 series a sample, ten samples a part. Then, each in a
process of its own:

* *keys and value*: a scan of the six key columns and the value, part by part, on one thread;
* *same columns*: the same scan of every column that the summary reads, of ``history`` and of ``samples``;
* *summary*: `read_rank` over every rank, one after the other;
* *merge*: all of `merge_run`, with threads.

Times are processor seconds; the scan and the summary take turns, and the least of the rounds counts. Only
ratios of one run are comparable. Memory is the peak of the process, and what it holds more than a process
that only scanned.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.plan import MergePlan, plan_merge
from torchinstruments.merge.reading import HISTORY_COLUMNS, SAMPLE_COLUMNS, forget_layouts, read_rank
from torchinstruments.records import Counters, GenerationRecord, Member, RunRecord
from torchinstruments.store import layout, schema
from torchinstruments.store.manifest import Manifest, TableState, encode_document
from torchinstruments.store.parts import open_part_writer
from torchinstruments.store.schema import KEY_COLUMNS

RUN_ID = "benchmark"
METRICS = ("max", "mean", "min", "nonfinite_fraction", "p25", "p50", "p75", "std", "zero_fraction")
LAYERS = 200
SERIES = LAYERS * 2 * len(METRICS)
SAMPLES_A_PART = 10
SAME_COLUMNS = {"history": HISTORY_COLUMNS, "samples": SAMPLE_COLUMNS}
STARTED = datetime(2026, 1, 1, tzinfo=UTC).isoformat()


def main() -> None:
    """Prints a row for each number of ranks."""
    parser = argparse.ArgumentParser(description="Cost of the summary, as multiples of a bare scan.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256], help="ranks of each run")
    parser.add_argument("--rows", type=int, default=100_000, help="rows a rank, rounded to whole samples")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the least time counts")
    parser.add_argument("--folder", help="where the runs are written; else a folder that is removed")
    parser.add_argument("--measure", choices=sorted(MEASURES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        MEASURES[options.measure](options.folder, options.rounds)
        return
    samples = max(1, round(options.rows / SERIES))
    print(f"pyarrow {pa.__version__}, numpy {np.__version__}; {samples * SERIES:,} rows a rank")
    print_row(
        "ranks",
        "keys+value",
        "same columns",
        "summary",
        "x keys+value",
        "x same",
        "merge",
        "peak MiB",
        "over",
    )
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in options.ranks:
            folder = Path(options.folder or scratch) / f"run-{ranks}-{samples}"
            if not folder.exists():
                write_run(folder, ranks, samples)
            print_row(*measured(folder, ranks, samples, options.rounds))


def measured(folder: Path, ranks: int, samples: int, rounds: int) -> tuple[str, ...]:
    """Returns the row of one run."""
    rows = ranks * samples * SERIES
    narrow, same, summary, _ = numbers_of("passes", folder, rounds)
    merge_s, peak_bytes = numbers_of("merge", folder, 1)
    _, scan_bytes = numbers_of("scan", folder, 1)
    return (
        str(ranks),
        f"{1e9 * narrow / rows:.0f} ns",
        f"{1e9 * same / rows:.0f} ns",
        f"{1e9 * summary / rows:.0f} ns",
        f"{summary / narrow:.2f}",
        f"{summary / same:.2f}",
        f"{1e9 * merge_s / rows:.0f} ns",
        f"{peak_bytes / 2**20:.0f}",
        f"{(peak_bytes - scan_bytes) / 2**20:+.0f}",
    )


def numbers_of(measure: str, folder: Path, rounds: int) -> list[float]:
    """Runs a measure in a process of its own."""
    arguments = ["--measure", measure, "--folder", str(folder), "--rounds", str(rounds)]
    done = subprocess.run(
        [sys.executable, "-P", __file__, *arguments], check=True, capture_output=True, text=True
    )
    return [float(text) for text in done.stdout.split()]


def measure_passes(folder: str, rounds: int) -> None:
    """Prints the least processor seconds of both scans and of the summary, and the peak in bytes."""
    plan = plan_merge([folder], None, None)
    variants: Sequence[Callable[[], None]] = (
        lambda: scan(plan, {"history": (*KEY_COLUMNS, "value")}),
        lambda: scan(plan, SAME_COLUMNS),
        lambda: summarise(plan),
    )
    least = [float("inf")] * len(variants)
    for _ in range(rounds):
        for place, variant in enumerate(variants):
            begun_s = time.process_time()
            variant()
            least[place] = min(least[place], time.process_time() - begun_s)
    print(*least, peak_rss_bytes())


def measure_scan(folder: str, rounds: int) -> None:
    """Prints processor seconds and peak of a scan of the same columns."""
    begun_s = time.process_time()
    for _ in range(rounds):
        scan(plan_merge([folder], None, None), SAME_COLUMNS)
    print(time.process_time() - begun_s, peak_rss_bytes())


def measure_merge(folder: str, rounds: int) -> None:
    """Prints processor seconds and peak of a whole merge."""
    begun_s = time.process_time()
    for _ in range(rounds):
        assert merge_run(folder).complete
    print(time.process_time() - begun_s, peak_rss_bytes())


MEASURES: dict[str, Callable[[str, int], None]] = {
    "passes": measure_passes,
    "scan": measure_scan,
    "merge": measure_merge,
}


def scan(plan: MergePlan, columns: Mapping[str, Sequence[str]]) -> None:
    """Decodes columns of every part of some tables, texts as dictionaries, and looks at nothing."""
    for task in plan.tasks:
        for table, names in columns.items():
            texts = [field.name for field in schema.TABLE_SCHEMAS[table] if pa.types.is_string(field.type)]
            for part in task.parts[table]:
                raw = pa.BufferReader(plan.storages[part.source].read(part.path))
                with pq.ParquetFile(raw, read_dictionary=texts) as file:
                    for batch in file.iter_batches(65_536, columns=list(names), use_threads=False):
                        assert batch.num_rows


def summarise(plan: MergePlan) -> None:
    """Reads every rank and drops what was read."""
    for task in plan.tasks:
        assert len(read_rank(task).summaries) == SERIES
    # The next round begins with nothing, as a merge does.
    forget_layouts()


def write_run(folder: Path, ranks: int, samples: int) -> None:
    """Writes a run in which nothing is missing."""
    folder.mkdir(parents=True)
    members = tuple(Member(rank, f"{rank:08x}", "host", rank, observing=True) for rank in range(ranks))
    run = RunRecord(
        schema_version=schema.SCHEMA_VERSION, run_id=RUN_ID, nonce="0" * 32, created_at=STARTED,
        versions={}, sampling={}, signals=("output", "output_gradient"), statistics=METRICS,
        history={"window": 20}, rank_policy="all", world_size=ranks, launcher="torchrun",
    )  # fmt: skip
    generation = GenerationRecord(
        schema_version=schema.SCHEMA_VERSION, run_id=RUN_ID, generation=0, world_size=ranks,
        leader_process="0" * 8, started_at=STARTED, first_sample_id=0, members=members, members_complete=True,
    )  # fmt: skip
    write(folder / layout.RUN_FILE, encode_document(run))
    write(folder / layout.generation_file(0), encode_document(generation))
    random = np.random.default_rng(0)
    for rank in range(ranks):
        write_rank(folder, rank, ranks, samples, random)


def write_rank(folder: Path, rank: int, world_size: int, samples: int, random: np.random.Generator) -> None:
    """Writes parts and manifest of one rank."""
    process = f"{rank:08x}"
    name = layout.rank_folder(rank, alone=False)
    entries = schema.metadata(
        schema_version=schema.SCHEMA_VERSION, run_id=RUN_ID, generation=0, rank=rank, process=process,
        world_size=world_size,
    )  # fmt: skip
    firsts = range(0, samples, SAMPLES_A_PART)
    for sequence, first in enumerate(firsts):
        ids = np.arange(first, min(first + SAMPLES_A_PART, samples))
        for table, rows in (
            ("history", history(ids, rank, process, random)),
            ("samples", sample_rows(ids, rank, process)),
        ):
            sink = pa.BufferOutputStream()
            with open_part_writer(sink, rows.schema) as writer:
                writer.write_table(rows, row_group_size=max(1, len(rows)))
                writer.add_key_value_metadata(dict(entries))
            write(folder / layout.part_file(name, table, process, sequence), sink.getvalue().to_pybytes())
    tables = {
        "history": TableState(next_part=len(firsts), rows=samples * SERIES),
        "samples": TableState(next_part=len(firsts), rows=samples),
    }
    manifest = Manifest(
        schema_version=schema.SCHEMA_VERSION, run_id=RUN_ID, generation=0, rank=rank, world_size=world_size,
        process=process, host="host", pid=1, local_rank=rank, node_rank=0, launcher="torchrun",
        restart_count=0, device="cpu", mesh_coordinates=(), mesh_axis_names=(), verified=True,
        first_sample_id=0, last_sample_id=samples - 1, last_sample_at="", started_at=STARTED,
        written_at=STARTED, status="closed", next_write_due_s=300.0, tables=tables,
        counters=Counters(errors={}),
    )  # fmt: skip
    write(folder / layout.manifest_file(name, process), encode_document(manifest))


def history(ids: np.ndarray, rank: int, process: str, random: np.random.Generator) -> pa.Table:
    """Returns rows of ``history``: float32-born values of 200 layers, two signals and nine statistics."""
    rows = len(ids) * SERIES
    sample = np.repeat(ids, SERIES)
    of_layer = np.tile(np.repeat(np.arange(LAYERS), 2 * len(METRICS)), len(ids))
    of_signal = np.tile(np.repeat([0, 1], len(METRICS)), len(ids) * LAYERS)
    layers = [f"transformer.blocks.{one // 8}.part{one % 8}" for one in range(LAYERS)]
    is_gradient = of_signal == 1
    texts: dict[str, tuple[np.ndarray, list[str]]] = {
        "layer": (of_layer, layers),
        "signal": (of_signal, ["output", "output_gradient"]),
        "metric": (np.tile(np.arange(len(METRICS)), len(ids) * LAYERS * 2), list(METRICS)),
        "shape": (of_layer % 3, ["8x512", "8x2048", "8x64x512"]),
    }
    constant = {
        "process": process, "step_provenance": "inferred", "stage": "", "tensor_path": "output",
        "mode": "train", "grad_sync": "synced", "scale_provenance": "gradscaler", "scope": "local",
        "replica_key": "", "execution": "eager", "dtype": "float32", "device": "cuda:0",
        "unavailable_reason": "",
    }  # fmt: skip
    times = 1_767_225_600_000_000 + sample * 1_000_000 + of_layer * 137 + np.where(is_gradient, 90_000, 0)
    numbers = {
        "generation": 0, "rank": rank, "sample_id": sample, "attempt": sample, "forward_in_attempt": 0,
        "micro_batch": 0, "forward_index": sample, "timestamp": times, "call_index": 0, "backward_index": 0,
        "grad_enabled": True,
    }  # fmt: skip
    value = random.normal(size=rows).astype(np.float32).astype(np.float64)
    value[np.tile(np.arange(SERIES) % len(METRICS), len(ids)) == METRICS.index("nonfinite_fraction")] = 0.0
    floats = {"value": pa.array(value), "loss_scale": pa.array(np.full(rows, 65536.0), mask=~is_gradient)}
    columns = []
    for field in schema.in_memory(schema.HISTORY):
        if field.name in floats:
            columns.append(floats[field.name])
        elif pa.types.is_dictionary(field.type):
            places, words = texts.get(field.name, (np.zeros(rows, np.int32), [constant.get(field.name, "")]))
            columns.append(pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), words))
        else:
            numeric = np.broadcast_to(np.asarray(numbers[field.name]), (rows,))
            kind = pa.int64() if pa.types.is_timestamp(field.type) else field.type
            columns.append(pa.array(numeric).cast(kind).cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema.in_memory(schema.HISTORY))


def sample_rows(ids: np.ndarray, rank: int, process: str) -> pa.Table:
    """Returns rows of ``samples``."""
    rows = [
        {
            "generation": 0, "rank": rank, "process": process, "sample_id": one, "attempt": one,
            "forward_in_attempt": 0, "micro_batch": 0, "forward_index": one,
            "started_at": datetime.fromtimestamp(1_767_225_600 + one, UTC), "state": "backward_observed",
            "num_backwards": 1, "collection_forward_s": 0.01, "collection_backward_s": 0.01, "rows": SERIES,
            "errors": 0, "modules_expected": LAYERS, "modules_fired": LAYERS,
        }
        for one in ids.tolist()
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=schema.SAMPLES)


def write(path: Path, data: bytes) -> None:
    """Writes a file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def peak_rss_bytes() -> int:
    """Returns the peak of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def print_row(*cells: str) -> None:
    """Prints a row of the table."""
    print("".join(f"{cell:>14}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
