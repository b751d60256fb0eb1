"""The merge and the command line on a real object store."""

import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from merge.run_folder import whole_run
from torchinstruments.cli.main import main
from torchinstruments.merge.engine import merge_run
from torchinstruments.store.filesystem import open_storage
from torchinstruments.testing.object_store import ObjectStore, s3_options


@pytest.fixture
def remote(bucket: str, seaweed: ObjectStore, tmp_path: Path) -> str:
    """Copies a whole run of two ranks into a bucket and returns its URL."""
    run = whole_run(tmp_path / "run")
    url = f"s3://{bucket}/some/run"
    storage = open_storage(url, seaweed.storage_options)
    for path in run.root.rglob("*"):
        if path.is_file():
            storage.replace(str(path.relative_to(run.root)), path.read_bytes())
    return url


def test_remote_and_local_runs_give_the_same_bytes(remote: str, seaweed: ObjectStore, tmp_path: Path) -> None:
    """A run in a bucket merges into the same bytes as on disk, by threads and by spawned processes."""
    local = merge_run(str(tmp_path / "run"))
    merged = merge_run(remote, storage_options=seaweed.storage_options)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        merge_run(
            remote, storage_options=seaweed.storage_options, executor=pool, output=str(tmp_path / "out")
        )
    assert merged.complete
    assert merged.url == f"{remote}/merged"
    assert merged.summary().equals(local.summary())
    stored = open_storage(remote, seaweed.storage_options).child("merged")
    for name in ("result.json", "summary.parquet"):
        expected = (tmp_path / "run" / "merged" / name).read_bytes()
        assert stored.read(name) == expected
        assert (tmp_path / "out" / name).read_bytes() == expected


def test_the_command_line_reads_a_bucket(
    remote: str, seaweed: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both commands take storage options and exit with 0; no secret is shown."""
    options = json.dumps(seaweed.storage_options)
    assert main(["status", remote, "--storage-options", options]) == 0
    assert main(["merge", remote, "--storage-options", options]) == 0
    captured = capsys.readouterr()
    assert f"{remote}/merged/result.json" in captured.out
    assert seaweed.secret not in captured.out + captured.err


@pytest.mark.parametrize("command", [["merge"], ["status"]])
def test_a_refusing_store_gets_one_sentence(
    remote: str, seaweed: ObjectStore, capsys: pytest.CaptureFixture[str], command: Sequence[str]
) -> None:
    """Wrong credentials, a missing bucket and a store that is not there exit with 2 and one sentence each."""
    wrong = json.dumps(s3_options(seaweed.endpoint, seaweed.key, "wrong"))
    right = json.dumps(seaweed.storage_options)
    nowhere = json.dumps(s3_options("http://127.0.0.1:9", seaweed.key, seaweed.secret))
    for url, options in ((remote, wrong), ("s3://no-such-bucket/run", right), (remote, nowhere)):
        assert main([*command, url, "--storage-options", options]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert captured.err.startswith("torchinstruments: ")
        assert url.split("/")[2] in captured.err
        assert seaweed.secret not in captured.err
