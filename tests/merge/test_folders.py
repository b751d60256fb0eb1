"""Several folders of one run: hosts without a shared filesystem have one each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from merge.run_folder import RunFolder, process_of, whole_rank, whole_run
from torchinstruments.cli.main import main
from torchinstruments.errors import RunFormatError, StorageUnreachableError
from torchinstruments.merge.engine import merge_run
from torchinstruments.records import Member
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.run import open_run
from torchinstruments.testing.object_store import ObjectStore, s3_options


def two_hosts(root: Path) -> tuple[RunFolder, RunFolder]:
    """Writes a run of three ranks on two hosts, the first of which led."""
    first, second = (RunFolder(root / name, world_size=3).run() for name in ("a", "b"))
    first.generation(0, [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(3)])
    whole_rank(first, 0)
    whole_rank(second, 1)
    whole_rank(second, 2)
    return first, second


def result_of(*runs: RunFolder, **arguments: Any) -> dict[str, Any]:
    """Merges folders and returns the document."""
    return dict(merge_run(*(run.url for run in runs), **arguments).result)


@pytest.mark.parametrize(
    "spelling",
    [
        lambda path: f"{path}/",
        lambda path: f"{path.parent}//{path.name}",
        lambda path: f"{path}/rank-000/..",
        lambda path: f"file://{path}",
        lambda path: str(path.parent / "link"),
    ],
    ids=["slash", "two slashes", "dots", "URL", "link"],
)
def test_one_folder_in_another_spelling(tmp_path: Path, spelling: Callable[[Path], str]) -> None:
    """The same folder twice counts once, whatever it is called; the first name has the result."""
    run = whole_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(run.root)
    merged = merge_run(run.url, spelling(run.root))
    result: Any = merged.result
    assert merged.complete
    assert (result["run"]["folders"], result["coverage"]["duplicate_parts"]) == (1, 0)
    assert merged.url == f"{run.url}/merged"
    assert open_run(run.url, spelling(run.root)).history().collect().height == 8


def test_a_copy_with_the_same_files_counts_once(tmp_path: Path) -> None:
    """As the same folder behind two names of a store or two mounts, which only its content tells."""
    run = whole_run(tmp_path / "run")
    shutil.copytree(run.root, tmp_path / "copy")  # keeps times
    result = result_of(run, RunFolder(tmp_path / "copy"))
    assert result["run"]["folders"] == 1
    assert result["coverage"]["duplicate_parts"] == 0


def test_where_the_generation_lies_does_not_matter(tmp_path: Path) -> None:
    """What the leader wrote into its own host's folder counts for all of them, in either order."""
    first, second = two_hosts(tmp_path)
    for order in ((first, second), (second, first)):
        merged = merge_run(*(run.url for run in order))
        result: Any = merged.result
        assert merged.complete
        assert merged.url == f"{order[0].url}/merged"
        assert [one["expected_ranks"] for one in result["generations"]] == [[0, 1, 2]]
        assert result["coverage"]["present_ranks"] == [0, 1, 2]
        shutil.rmtree(order[0].root / "merged")
    result = result_of(second)
    assert result["coverage"]["missing_ranks"] == [0]
    assert result["generations"] == []


def test_the_order_of_folders_changes_no_number(tmp_path: Path) -> None:
    """Ranks are folded by their number, not by their folder."""
    first, second = two_hosts(tmp_path)
    one = result_of(first, second, output=str(tmp_path / "one"))
    other = result_of(second, first, output=str(tmp_path / "other"))
    assert one == other
    tables = [(tmp_path / name / "summary.parquet").read_bytes() for name in ("one", "other")]
    assert tables[0] == tables[1]


def test_a_rank_that_moved_to_another_host(tmp_path: Path) -> None:
    """Its processes lie in two folders; they are one rank, in the order of generations."""
    first, second = two_hosts(tmp_path)
    moved = f"{99:08x}"
    later = {"started_at": "2026-02-01T00:00:00+00:00", "written_at": "2026-02-01T01:00:00+00:00"}
    members = [
        Member(0, process_of(0), "host-a", 0, observing=True),
        Member(1, moved, "host-a", 1, observing=True),
    ]
    first.generation(1, members, world_size=2)
    first.manifest(1, moved, generation=1, world_size=2, first_sample_id=10**9, **later)
    first.history(1, [{"sample_id": 10**9, "value": 50.0}], moved, generation=1)
    result = result_of(first, second)
    processes = [(one["rank"], one["process"], one["generation"]) for one in result["ranks"]]
    assert processes[1:3] == [(1, process_of(1), 0), (1, moved, 1)]
    assert result["coverage"]["overlapping_ranks"] == []
    summary = result["layers"][0]["tensors"][0]["statistics"][0]["ranks"]["1"]
    assert (summary["observations"], summary["latest"]["value"], summary["first"]["value"]) == (5, 50.0, 10.0)


def test_a_copy_of_a_part_that_was_cut_off_is_named(tmp_path: Path) -> None:
    """Of one part in two folders the longer file counts, and the other one is no silent duplicate."""
    first, second = two_hosts(tmp_path)
    part = f"rank-001/history.parts/part-{process_of(1)}-000000.parquet"
    whole = (second.root / part).read_bytes()
    first.write(part, whole[:500])
    result = result_of(first, second)
    assert result["coverage"]["quarantined"] == [
        {"file": f"{first.url}/{part}", "reason": f"truncated: a copy of it has {len(whole)} bytes"}
    ]
    assert result["coverage"]["duplicate_parts"] == 0
    assert result["layers"][0]["tensors"][0]["statistics"][0]["ranks"]["1"]["observations"] == 4


def test_more_folders_than_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host of a large job has one; stores are opened anew where too many are open."""
    monkeypatch.setattr("torchinstruments.merge.sources._MAX_OPEN", 2)
    runs = [RunFolder(tmp_path / f"host{rank}", world_size=6).run() for rank in range(6)]
    runs[3].generation()
    for rank, run in enumerate(runs):
        whole_rank(run, rank)
    merged = merge_run(*(run.url for run in runs), f"{runs[0].url}/")
    result: Any = merged.result
    assert (result["run"]["folders"], result["coverage"]["present_ranks"]) == (6, [0, 1, 2, 3, 4, 5])
    assert merged.summary()["latest_value"].to_list() == [10.0 * rank + 3 for rank in range(6)]


@pytest.mark.parametrize("what", ["nothing", "another run", "a merged folder", "a file"])
def test_one_folder_that_cannot_be(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence names the folder that is wrong, not the first one, and nothing is written."""
    first, _ = two_hosts(tmp_path)
    wrong = tmp_path / "wrong"
    if what == "another run":
        RunFolder(wrong, run_id="run-b").run()
    elif what == "a merged folder":
        RunFolder(wrong).write("result.json", b"{}")
    elif what == "a file":
        wrong.write_bytes(b"x")
    with pytest.raises(RunFormatError, match="wrong"):
        merge_run(first.url, str(wrong))
    assert main(["merge", first.url, str(wrong)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert str(wrong) in line
    assert not (first.root / "merged").exists()


def test_one_folder_local_and_one_in_a_bucket(
    tmp_path: Path, bucket: str, seaweed: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Storage options are for the remote one; the result lies in the first one, and no bucket is written."""
    first, second = two_hosts(tmp_path)
    url = f"s3://{bucket}/host-b"
    storage = open_storage(url, seaweed.storage_options)
    for path in second.root.rglob("*"):
        if path.is_file():
            storage.replace(str(path.relative_to(second.root)), path.read_bytes())
    expected = result_of(first, second, output=str(tmp_path / "local"))
    options = json.dumps(seaweed.storage_options)
    assert main(["merge", first.url, url, f"{url}/", "--storage-options", options]) == 0
    captured = capsys.readouterr()
    assert f"{first.url}/merged/result.json" in captured.out
    assert seaweed.secret not in captured.out + captured.err
    assert json.loads((first.root / "merged" / "result.json").read_bytes()) == expected
    assert not [one.path for one in storage.walk() if one.path.startswith("merged")]
    merged = merge_run(url, first.url, storage_options=seaweed.storage_options)
    assert merged.url == f"{url}/merged"
    assert dict(merged.result) == expected
    nowhere = s3_options("http://127.0.0.1:9", seaweed.key, seaweed.secret)
    with pytest.raises(StorageUnreachableError, match=rf"{bucket}/host-b"):
        merge_run(first.url, url, storage_options=nowhere)
