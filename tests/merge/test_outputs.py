"""The folder that a merge writes to: its files are of one merge, and none of them replaces one of the run."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from merge.run_folder import RunFolder, whole_rank, whole_run
from torchinstruments.errors import ConfigurationError, RunFormatError, StorageError
from torchinstruments.merge import compare_runs
from torchinstruments.merge.engine import merge_run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_leaves_the_result_of_before(tmp_path: Path, small_disk: Path) -> None:
    """Where there is no room for all files, none is replaced, and nothing is left of the new ones."""
    run = whole_run(tmp_path / "run")
    merge_run(run.url, output=str(small_disk))
    before = files_of(small_disk)
    sizes = {name: len(data) for name, data in before.items()}
    # Room for the tables, none for the result.
    filler = 256 * 1024 - sum(-(-size // 4096) * 4096 for size in sizes.values())
    room = sum(-(-size // 4096) * 4096 for name, size in sizes.items() if name != "result.json")
    (small_disk / "filler").write_bytes(b"x" * (filler - room - 4096))
    whole_rank(run, 1, 9)
    with pytest.raises(StorageError, match="No space left"):
        merge_run(run.url, output=str(small_disk))
    (small_disk / "filler").unlink()
    assert files_of(small_disk) == before
    merge_run(run.url, output=str(small_disk))
    assert files_of(small_disk)["summary.parquet"] != before["summary.parquet"]


def test_the_result_names_the_bytes_of_the_files_beside_it(tmp_path: Path) -> None:
    """Size and digest of every file beside it."""
    run = whole_run(tmp_path / "run")
    merge_run(run.url)
    files = files_of(run.root / "merged")
    named = json.loads(files.pop("result.json"))["files"]
    assert named == [
        {"file": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sorted(files.items())
    ]
    assert len(named) == 6


def test_a_table_of_another_merge_is_not_compared(tmp_path: Path) -> None:
    """What a store holds after a merge that ended between two files is refused, from either side."""
    runs = [whole_run(tmp_path / name, num_samples=4 + i) for i, name in enumerate("ab")]
    for run in runs:
        merge_run(run.url)
    table = runs[1].root / "merged/summary.parquet"
    (runs[0].root / "merged/summary.parquet").write_bytes(table.read_bytes())
    with pytest.raises(
        RunFormatError, match=r"is not the one that result\.json beside it .* merge the run again"
    ):
        compare_runs(runs[0].url, runs[1].url)
    merge_run(runs[0].url)
    compare_runs(runs[0].url, runs[1].url)


@pytest.mark.parametrize(
    "place",
    [
        "",
        "rank-000",
        "rank-001/",
        "rank-007",
        "rank-000/history.parts",
        "rank-000/history.parts/x",
        "generations",
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_output_among_files_of_the_run_is_refused(tmp_path: Path, place: str, world_size: int) -> None:
    """No file of a rank is replaced, and none comes to lie between its parts."""
    run = whole_run(tmp_path / "run", world_size)
    run.write(f"{run.folder(0)}/result.json", b"the rank's own")
    before = files_of(run.root)
    with pytest.raises(ConfigurationError, match="files of a run belong"):
        merge_run(run.url, output=f"{run.url}/{place}")
    assert files_of(run.root) == before


def test_an_output_in_another_run_or_through_a_link_is_refused(tmp_path: Path) -> None:
    """It is what lies in a folder that counts, and where it is, not what it is called."""
    run, other = (whole_run(tmp_path / name) for name in "ab")
    alone = whole_run(tmp_path / "alone", 1)
    (tmp_path / "link").symlink_to(run.root)
    for output in (other.root, other.root / "rank-001", alone.root, alone.root / "history.parts", "link"):
        with pytest.raises(ConfigurationError, match="files of a run belong"):
            merge_run(run.url, output=str(tmp_path / output))


def test_an_output_beside_the_ranks_is_taken(tmp_path: Path) -> None:
    """Any folder of its own below the run's is as good as ``merged``."""
    run: RunFolder = whole_run(tmp_path / "run")
    for _ in range(2):
        assert merge_run(run.url, output=f"{run.url}/merged-late").complete
    assert sorted(files_of(run.root / "merged-late")) == [
        "comparison.parquet",
        "index.md",
        "overview.parquet",
        "result.json",
        "steps.parquet",
        "summary.parquet",
        "timeline.parquet",
    ]
