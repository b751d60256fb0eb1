"""Many ranks and many files within the handles and the memory of a small machine."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merge.run_folder import RunFolder, counted, process_of, whole_run
from torchinstruments.merge.engine import merge_run
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.schema import HISTORY, metadata

FEW_HANDLES = 256


@pytest.fixture
def some_ranks(tmp_path: Path) -> RunFolder:
    """Eight ranks with several small parts, which differ in their steps and fingerprints."""
    run = whole_run(tmp_path / "run", 8, num_samples=2)
    for rank in range(8):
        own = process_of(rank)
        run.history(rank, [{"sample_id": 1, "layer": "late", "value": float(rank)}], own, 1)
        counted(run, rank, history_rows=3)
        for part in range(2):
            run.steps(rank, [{"attempt": part, "scale_before": float(rank)}], own, part)
            run.fingerprints(rank, [{"attempt": part, "digest": rank}], own, part)
    return run


def test_each_folder_is_listed_once_and_each_part_read_twice_at_most(
    some_ranks: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is walked once; samples are read once, history and what differs once more to compare ranks."""
    walks: list[str] = []
    reads: dict[str, int] = {}
    walk, read = LocalStorage.walk, LocalStorage.read

    def walking(self: LocalStorage, enters: object) -> object:
        walks.append(self.url)
        return walk(self)

    def reading(self: LocalStorage, path: str) -> bytes:
        reads[path] = reads.get(path, 0) + 1
        return read(self, path)

    monkeypatch.setattr(LocalStorage, "walk", walking)
    monkeypatch.setattr(LocalStorage, "read", reading)
    merge_run(some_ranks.url)
    assert walks == [some_ranks.url]
    parts = {path: times for path, times in reads.items() if path.endswith(".parquet")}
    assert len(parts) == 8 * (2 + 1 + 2 + 2)
    for path, times in parts.items():
        assert times == (1 if "/samples" in path else 2), path


def test_a_world_of_some_ranks_needs_few_handles(tmp_path: Path) -> None:
    """1,024 ranks with several files each merge with a quarter as many file handles."""
    run = RunFolder(tmp_path / "run", world_size=1024).run()
    made = run.history(0, [{"sample_id": 0, "value": 1.0}], process_of(0))
    table = pq.read_table(made)
    for rank in range(1024):
        process = process_of(rank)
        columns = {"rank": pa.array([rank], pa.int32()), "process": pa.array([process])}
        for name, column in columns.items():
            table = table.set_column(table.schema.get_field_index(name), HISTORY.field(name), column)
        entries = metadata(
            schema_version=1, run_id=run.run_id, generation=0, rank=rank, process=process, world_size=1024
        )
        with io.BytesIO() as sink:
            with pq.ParquetWriter(sink, HISTORY, store_schema=False) as writer:
                writer.write_table(table.cast(HISTORY))
                writer.add_key_value_metadata(entries)
            for part in range(2):
                run.write(f"rank-{rank:03}/history.parts/part-{process}-{part:06}.parquet", sink.getvalue())
    code = (
        "import json, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW_HANDLES}, {FEW_HANDLES}))\n"
        "from torchinstruments.merge.engine import merge_run\n"
        "coverage = merge_run(sys.argv[1]).result['coverage']\n"
        "print(json.dumps([coverage['present_ranks'], coverage['quarantined']]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, run.url], check=True, capture_output=True, text=True)
    present, quarantined = json.loads(done.stdout)
    assert present == list(range(1024))
    assert quarantined == []


def test_memory_does_not_grow_with_the_length_of_a_run(tmp_path: Path) -> None:
    """Eight times as many samples of the same layers take no more memory than some readings of one part."""
    code = (
        "import resource, sys\n"
        "from torchinstruments.merge.engine import merge_run\n"
        "merge_run(sys.argv[1], executor='threads')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    peaks: list[int] = []
    rows = [
        {"sample_id": sample, "layer": f"layer{layer}", "value": 1.0}
        for sample in range(40)
        for layer in range(250)
    ]
    for number, parts in enumerate((4, 32)):
        run = whole_run(tmp_path / str(number), 2)
        first = run.history(0, rows, process_of(0), 1)
        for rank in range(2):
            for part in range(1, parts + 1):
                name = f"part-{process_of(rank)}-{part:06}.parquet"
                target = run.root / run.folder(rank) / "history.parts" / name
                if not target.exists():
                    os.link(first, target)
        command = [sys.executable, "-c", code, run.url]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout))
    assert 32 * 2 * len(rows) * 150 > 90 * 2**20  # what the longer run has in rows
    assert peaks[1] - peaks[0] < 24 * 2**20
