"""What a job left in a spool, and uploaders that no longer get through: others take over."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.spooling import make_manifest, make_part, make_target, sample_ids, stored_manifest
from storage.uploaders import WAIT_S, root, until, uploader_pids
from torchinstruments.cli.main import main
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool import SpoolTarget
from torchinstruments.store.spool_folder import LOG, UPLOADER_LOCK, list_parts
from torchinstruments.store.uploader_state import read_uploader_state
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore

__all__ = ["root"]


def left_behind(url: str, options: dict[str, Any], root: Path, **given: Any) -> SpoolTarget:
    """Returns the closed spool of a process that was never served, for its uploader was held off."""
    target = make_target(url, options, root, **given)
    spool = Path(target.path).parent
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    for first in range(0, 30, 10):
        target.write_part("samples", 10, make_part(range(first, first + 10)))
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    target.close()
    lock.release()
    return target


def upload(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Runs ``upload --json`` and returns its exit code, its document and what it told people."""
    code = main(["upload", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out)["spools"] if captured.out else [], captured.err


def test_what_a_job_left_is_uploaded(
    seaweed: ObjectStore, bucket: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the folder that the manifest names, with progress; then the spool is gone."""
    url = f"s3://{bucket}/run"
    target = left_behind(url, seaweed.storage_options, root)
    options = json.dumps(seaweed.storage_options)
    code, (done,), told = upload(capsys, target.path, "--storage-options", options)
    assert (code, done["rows_uploaded"], done["rows_left"], done["error"]) == (0, 30, 0, "")
    assert "uploaded 30 of 30 rows (100%)" in told
    storage = open_storage(url, seaweed.storage_options)
    assert sample_ids(storage) == list(range(30))
    manifest = stored_manifest(storage)
    assert (manifest.status, manifest.tables["samples"].rows_in_spool) == ("closed", 0)
    assert list(root.iterdir()) == []
    assert main(["upload", str(root)]) == 0
    assert "nothing to upload" in capsys.readouterr().out


def test_a_refusal_ends_at_once_and_leaves_everything(
    seaweed: ObjectStore, bucket: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong credentials are one sentence and exit code 2; no secret shows, and no row is gone."""
    target = left_behind(f"s3://{bucket}/run", seaweed.storage_options, root)
    options = {**seaweed.storage_options, "secret": "not-the-secret"}
    code, (done,), told = upload(capsys, str(root), "--storage-options", json.dumps(options))
    assert (code, done["rows_uploaded"], done["rows_left"]) == (2, 0, 30)
    assert "StorageDeniedError" in done["error"]
    assert "not-the-secret" not in told + json.dumps(done)
    assert len(list_parts(Path(target.path))) == 3


def test_a_store_that_is_down_is_given_up_in_time(
    bucket: str,
    root: Path,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An outage ends the command with exit code 2 after the time given, and the rows stay."""
    left_behind(f"s3://{bucket}/run", proxied(), root)
    fault_proxy.down()
    options = json.dumps(proxied())
    code, (done,), _ = upload(capsys, str(root), "--storage-options", options, "--give-up-after-s", "1")
    assert (code, done["rows_left"]) == (2, 30)
    assert "StorageUnreachableError" in done["error"]


@pytest.mark.parametrize("given", ["nowhere", "file"])
def test_what_is_no_spool_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    """A path that is no folder is a mistake of the user."""
    (tmp_path / "file").write_text("")
    assert main(["upload", str(tmp_path / given)]) == 2
    assert "is no folder of this host" in capsys.readouterr().err


def test_rows_of_memory_have_nowhere_to_go(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What lay in the memory of a dead process cannot be uploaded, and is said."""
    left_behind("memory://gone/run", {}, root)
    code, (done,), _ = upload(capsys, str(root))
    assert code == 2
    assert "only by the process that wrote there" in done["error"]


def test_a_failing_uploader_hands_over_to_the_command(
    seaweed: ObjectStore, bucket: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expired credentials of a living job: the command with others carries its rows, and the job goes on."""
    url = f"s3://{bucket}/run"
    target = make_target(url, {**seaweed.storage_options, "secret": "expired-secret"}, root)
    spool = Path(target.path).parent
    target.write_part("samples", 10, make_part(range(10)))
    assert not target.upload(0.0)
    assert until(lambda: "StorageDeniedError" in target.state().last_error)
    (old,) = uploader_pids(spool)
    state = read_uploader_state(spool)
    assert state is not None
    assert (state.pid, "StorageDeniedError" in state.last_error) == (old, True)

    code, (done,), _ = upload(capsys, target.path, "--storage-options", json.dumps(seaweed.storage_options))
    assert (code, done["rows_uploaded"], done["num_writers"], done["error"]) == (0, 10, 1, "")
    assert until(lambda: old not in uploader_pids(spool))
    assert "hands over" in (spool / LOG).read_text()
    assert sample_ids(open_storage(url, seaweed.storage_options)) == list(range(10))
    assert target.state().last_error == ""


def test_a_later_process_takes_over_from_an_uploader_with_old_credentials(
    seaweed: ObjectStore, bucket: str, root: Path
) -> None:
    """A restart with fresh credentials is not held back by the uploader of the generation before."""
    url = f"s3://{bucket}/run"
    before = make_target(url, {**seaweed.storage_options, "secret": "expired-secret"}, root)
    spool = Path(before.path).parent
    before.write_part("samples", 10, make_part(range(10)))
    assert not before.upload(0.0)
    assert until(lambda: "StorageDeniedError" in before.state().last_error)
    (old,) = uploader_pids(spool)
    after = make_target(url, seaweed.storage_options, root, process="2b3c4d5e")
    after.write_part("samples", 10, make_part(range(10, 20)))
    assert after.upload(WAIT_S)
    assert old not in uploader_pids(spool)
    assert before.upload(WAIT_S)  # its starter is older than the new uploader and leaves that alone
    assert sample_ids(open_storage(url, seaweed.storage_options)) == list(range(20))
    assert len(uploader_pids(spool)) == 1


def test_an_uploader_that_works_is_left_to_it(
    seaweed: ObjectStore, bucket: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without other settings the command watches how the job's own uploader carries the rows."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root)
    target.write_part("samples", 10, make_part(range(10)))
    target.upload(0.0)
    (spool,) = root.iterdir()
    assert until(lambda: read_uploader_state(spool) is not None)
    (pid,) = uploader_pids(spool)
    code, (done,), _ = upload(capsys, target.path)
    assert (code, done["rows_uploaded"], done["error"]) == (0, 10, "")
    assert uploader_pids(spool) == [pid]


def test_an_uploader_killed_in_the_middle_of_a_put_is_repeated(
    seaweed: ObjectStore,
    bucket: str,
    root: Path,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
) -> None:
    """The object that it was putting arrives once, from another uploader."""
    url = f"s3://{bucket}/run"
    fault_proxy.stall(method="PUT", path="samples.parts")
    target = make_target(url, proxied(), root)
    spool = Path(target.path).parent
    target.write_part("samples", 10, make_part(range(10)))
    target.upload(0.0)
    assert until(lambda: "stall" in {entry.action for entry in fault_proxy.log})
    (pid,) = uploader_pids(spool)
    assert os.getpriority(os.PRIO_PROCESS, pid) == max(10, os.getpriority(os.PRIO_PROCESS, 0))
    os.kill(pid, signal.SIGKILL)
    fault_proxy.clear()
    target.write_part("samples", 10, make_part(range(10, 20)))
    assert target.upload(WAIT_S)
    assert pid not in uploader_pids(spool)
    assert sample_ids(open_storage(url, seaweed.storage_options)) == list(range(20))
    state = target.state().tables["samples"]
    assert (state.rows, state.rows_in_spool) == (20, 0)
