"""What training checks found, on its way through the spool to a real object store."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD

from checks.training import batch, mlp, poisoned, train
from merge.schema_checks import problems
from torchinstruments import AlwaysSampler, inject_observer, merge_run, remove_observer
from torchinstruments.checks import ChecksSession, CheckViolationError
from torchinstruments.store.filesystem import open_storage
from torchinstruments.testing.object_store import ObjectStore


def test_what_is_raised_is_in_the_spool_first_and_arrives(
    seaweed: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durable on this host while the exception is on its way, in the bucket and the merge after the close."""
    monkeypatch.setenv("TORCHINSTRUMENTS_SPOOL_DIR", str(tmp_path))
    url = f"s3://{bucket}/run"
    model = mlp()
    inject_observer(model, output_dir=url, storage_options=seaweed.storage_options, sampler=AlwaysSampler())
    optimizer = SGD(model.parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    with session:
        train(model, optimizer, steps=2)
        model(batch()).sum().backward()
        poisoned(model[1].bias)
        with pytest.raises(CheckViolationError):
            optimizer.step()
        (spooled,) = tmp_path.rglob("documents/checks-*.json")
        assert _session(spooled.read_bytes())["finalized_reason"] == "violation"
    remove_observer(model)
    storage = open_storage(url, seaweed.storage_options)
    (path,) = [entry.path for entry in storage.list("") if "checks-" in entry.path]
    stored = json.loads(storage.read(path))
    assert problems("checks", stored) == []
    (session_report,) = stored["sessions"]
    assert session_report["finalized_reason"] == "scope_exit"
    assert session_report["findings"][0]["names"] == ["1.bias"]
    (found,) = merge_run(url, storage_options=seaweed.storage_options).check_findings
    assert (found.code, found.ranks, found.first.attempt) == ("param_grad_nonfinite", "0", 2)


def _session(data: bytes) -> Any:
    (found,) = json.loads(data)["sessions"]
    return found
