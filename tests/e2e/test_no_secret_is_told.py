"""What a whole job with credentials leaves behind, prints and shows of itself: none of them."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fork_server import ForkServer
from storage.uploaders import uploader_pids
from torchinstruments import open_run
from torchinstruments.cli.main import main
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.spool_folder import LOG
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore

PROGRAM = """
import json, logging, os, sys, time
import torch
from torch import nn
from torchinstruments import AlwaysSampler, inject_observer, remove_observer

logging.basicConfig(level=logging.DEBUG)
settings = json.loads(os.environ.pop("SETTINGS"))
model = nn.Linear(4, 2)
observer = inject_observer(model, output_dir=settings["url"], storage_options=settings["options"],
                           sampler=AlwaysSampler(), error_policy="warn")
print(repr(observer), observer.url, observer.counters, flush=True)
while not os.path.exists(settings["end"]):
    model(torch.ones(3, 4)).sum().backward()
    observer.flush()
    print("trained", flush=True)
    time.sleep(0.1)
print(remove_observer(model), repr(observer), flush=True)
raise RuntimeError("the program's own end")
"""


def shown_by(pid: int) -> bytes:
    """Returns the arguments and variables of a process, as others can read them."""
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def test_a_job_whose_store_turns_it_away_tells_no_credentials(
    fork_server: ForkServer,
    tmp_path: Path,
    seaweed: ObjectStore,
    bucket: str,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not in files, spool, logs at debug level, output, processes or commands, before, during and after."""
    url, options, end = f"s3://{bucket}/run", proxied(), tmp_path / "end"
    hidden = [seaweed.key.encode(), seaweed.secret.encode()]
    spools = tmp_path / "spools"
    settings = json.dumps({"url": url, "options": options, "end": str(end)})
    program = fork_server.start(
        PROGRAM, tmp_path, environ={"SETTINGS": settings, "TORCHINSTRUMENTS_SPOOL_DIR": str(spools)}
    )
    program.wait_for("trained")
    fault_proxy.status(403, "ExpiredToken")
    (spool,) = spools.iterdir()
    end.touch()  # a close asks for an upload at once, and waits for it
    end_s = time.monotonic() + 60.0
    while main(["doctor", url, "--storage-options", json.dumps(options)]) == 0 or (
        "ExpiredToken" not in (spool / LOG).read_text()
    ):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    shown = [shown_by(pid) for pid in uploader_pids(spool)]
    assert shown
    shown += [path.read_bytes() for path in spool.rglob("*") if path.is_file()]
    fault_proxy.clear()
    assert program.wait(90.0) == 1
    shown += [program.out.read_bytes(), program.err.read_bytes()]
    assert b"the program's own end" in shown[-1]
    while list(spools.iterdir()):
        assert time.monotonic() < end_s + 60.0
        time.sleep(0.1)

    given = ["--storage-options", json.dumps(options)]
    assert main(["status", url, *given]) == 0
    assert main(["merge", url, *given]) == 0
    captured = capsys.readouterr()
    shown += [captured.out.encode(), captured.err.encode()]
    shown.append(repr(open_run(url, storage_options=options)).encode())
    storage = open_storage(url, seaweed.storage_options)
    files = {entry.path: storage.read(entry.path) for entry in storage.walk()}
    assert {"run.json", "merged/result.json", "merged/summary.parquet"} <= set(files)
    for text in (*shown, *files.values()):
        for secret in hidden:
            assert secret not in text, text[:2000]
