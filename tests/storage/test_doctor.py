"""``torchinstruments doctor``: says what a job would meet in a store, and leaves nothing there."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from storage.spooling import make_part, make_target
from torchinstruments.cli.main import main
from torchinstruments.environment import RANK, SPOOL_DIR
from torchinstruments.store.diagnosis import probe_store
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool_folder import UPLOADER_LOCK
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore

PROBES = ["create", "create_again", "write", "read", "list", "clock", "delete"]


@pytest.fixture(autouse=True)
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPOOL_DIR, str(tmp_path / "spools"))


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Runs ``doctor --json`` and returns its exit code, its document and what it told people."""
    code = main(["doctor", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    """Returns the outcome of each probe."""
    return {probe["name"]: probe["outcome"] for probe in found["probes"]}


def test_a_store_that_works(
    seaweed: ObjectStore, bucket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every probe passes with its time, the secret shows nowhere, and the bucket is as empty as before."""
    monkeypatch.setenv(RANK, "3")
    url = f"s3://{bucket}/run"
    code, found, told = doctor(capsys, url, "--storage-options", json.dumps(seaweed.storage_options))
    assert (code, found["problems"]) == (0, [])
    assert [probe["name"] for probe in found["probes"]] == PROBES
    assert set(outcomes(found).values()) == {"ok"}
    assert all(probe["duration_s"] > 0 for probe in found["probes"])
    clock = next(probe for probe in found["probes"] if probe["name"] == "clock")
    assert abs(clock["clock_skew_s"]) < 5
    assert found["credentials_source"] == "storage_options (key, secret)"
    assert found["identity"]["launcher"]["RANK"] == "3"
    assert found["versions"]["torchinstruments"]
    assert seaweed.secret not in told + json.dumps(found)
    assert open_storage(url, seaweed.storage_options).walk() == []


def test_credentials_of_the_environment_are_named_by_their_source(
    seaweed: ObjectStore, bucket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that they are in variables, not which they are."""
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    code, found, told = doctor(capsys, f"s3://{bucket}/run")
    assert code == 0
    assert found["credentials_source"] == "environment variables (AWS_ACCESS_KEY_ID)"
    assert seaweed.key not in told + json.dumps(found)


@pytest.mark.parametrize("url", ["memory://doctor/run", "{tmp_path}/not/there/yet", "{tmp_path}"])
def test_nothing_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
    """Neither files nor the folders that a write makes, locally and in memory."""
    before = sorted(tmp_path.rglob("*"))
    code, found, _ = doctor(capsys, url.format(tmp_path=tmp_path))
    assert (code, set(outcomes(found).values())) == (0, {"ok"})
    assert found["credentials_source"] == "none needed"
    assert sorted(tmp_path.rglob("*")) == before
    assert not fsspec.filesystem("memory").find("/doctor")


def test_a_refusal_names_the_way_out(
    seaweed: ObjectStore, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With wrong credentials the first probe fails, the others are left out, and the exit code is 2."""
    options = {**seaweed.storage_options, "secret": "not-the-secret"}
    code, found, told = doctor(capsys, f"s3://{bucket}/run", "--storage-options", json.dumps(options))
    assert code == 2
    assert outcomes(found) == {"create": "failed"} | dict.fromkeys(PROBES[1:], "skipped")
    assert "check the credentials" in found["problems"][0]
    assert "not-the-secret" not in told + json.dumps(found)


def test_a_store_that_can_be_written_and_not_listed(
    bucket: str,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each probe fails by itself; the file is deleted all the same."""
    fault_proxy.status(403, "AccessDenied", method="GET", path=r"list-type=2")
    url = f"s3://{bucket}/run"
    code, found, _ = doctor(capsys, url, "--storage-options", json.dumps(proxied()))
    assert code == 2
    assert outcomes(found) == dict.fromkeys(PROBES, "ok") | {"list": "failed", "clock": "failed"}
    fault_proxy.clear()
    assert open_storage(url, proxied()).walk() == []


def test_a_silent_store_is_a_sentence_in_time(
    bucket: str,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A store that accepts and never answers fails with a bound, not with a hang."""
    fault_proxy.stall()
    options = json.dumps(proxied())
    code, found, _ = doctor(capsys, f"s3://{bucket}/run", "--storage-options", options, "--timeout-s", "1")
    assert code == 2
    assert "StorageUnreachableError" in found["problems"][0]


def test_a_spool_that_nobody_carries_needs_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of a dead process without an uploader: exit code 1 and the command that carries them."""
    target = make_target("s3://bucket/run", None, tmp_path / "spools")
    spool = Path(target.path).parent
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    target.write_part("samples", 3, make_part([1, 2, 3]))
    target.close()
    lock.release()
    code, found, told = doctor(capsys, str(tmp_path / "run"))
    assert code == 1
    (one,) = found["spool"]["spools"]
    assert (one["rows"], one["uploader_pid"], one["num_writers"], one["run_id"]) == (3, None, 0, "night-7")
    assert f"torchinstruments upload {spool}" in told


@pytest.mark.parametrize("url", ["https://example.org/run", "s3://", "nosuch://x/y"])
def test_an_address_that_cannot_work_is_one_sentence(capsys: pytest.CaptureFixture[str], url: str) -> None:
    """A mistake of the user ends with 2 and without a document."""
    assert main(["doctor", url]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_a_clock_that_is_off_needs_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a minute is told, by how much, and the way out."""
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + 100.0)
    clock = next(one for one in probe_store(str(tmp_path), None, timeout_s=5.0) if one.name == "clock")
    assert clock.outcome == "warning"
    assert "set this host's with NTP" in clock.detail
    assert clock.clock_skew_s is not None
    assert -130.0 < clock.clock_skew_s < -90.0
