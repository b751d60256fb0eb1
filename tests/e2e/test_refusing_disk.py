"""A disk that takes documents but not the larger parts: what is lost is counted and named by the merge."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchinstruments import open_run
from torchinstruments.cli.main import main
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.layout import manifest_file, parse_manifest
from torchinstruments.store.manifest import Manifest, decode_manifest

FORWARDS = 200
SIGNALS = 6
STATISTICS = 9
ROWS = FORWARDS * SIGNALS * STATISTICS

PROGRAM = """
import json, resource, signal, sys
import torch
from torch import nn
from torchinstruments import AlwaysSampler, inject_observer

address, options, limit, forwards, closes = json.loads(sys.argv[1])
# Whatever would grow beyond this is refused in the middle, as on a disk that is nearly full.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
observer = inject_observer(model, output_dir=address, sampler=AlwaysSampler(), run_id="refused",
                           storage_options=options)
for _ in range(forwards):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
if closes:
    arrived = observer.close(timeout_s=6.0)
    counted = observer.counters
    print("CLOSED", json.dumps([arrived, counted.rows, counted.rows_dropped]))
"""


def run_program(
    folder: Path, address: str, options: dict[str, object] | None, *, limit: int, closes: bool
) -> list[object] | None:
    """Trains under a limit of file sizes; returns what close and the counters said, if it closed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([address, options, limit, FORWARDS, closes])],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINSTRUMENTS_SPOOL_DIR": str(folder / "spool")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    said = [line.removeprefix("CLOSED ") for line in done.stdout.splitlines() if line.startswith("CLOSED ")]
    return json.loads(said[0]) if said else None


def closed_manifest(address: str, options: dict[str, object] | None) -> Manifest:
    """Returns the manifest of the one process, as soon as it says closed where readers look."""
    storage = open_storage(address, options)
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        for entry in storage.list():
            process = parse_manifest(entry.path)
            if process is not None:
                manifest = decode_manifest(storage.read(manifest_file("", process)))
                if manifest.status == "closed":
                    return manifest
        time.sleep(0.2)
    raise AssertionError(f"no manifest in {address} says closed")


@pytest.mark.parametrize(
    ("place", "closes", "limit", "refused"),
    [
        ("local", True, 8_192, ("history", "steps")),
        ("local", False, 16_384, ("history",)),
        ("spool", True, 16_384, ("history",)),
        ("spool", False, 8_192, ("history", "steps")),
    ],
    ids=["local-close", "local-exit", "spool-close", "spool-exit"],
)
def test_rows_that_a_disk_refuses_to_the_end_are_counted_and_named(
    place: str,
    closes: bool,
    limit: int,
    refused: tuple[str, ...],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Counters and the closed manifest tell the rows by table, and the merge exits 1 with their number."""
    address, options, arguments = str(tmp_path / "run"), None, []
    if place == "spool":
        address = f"s3://{request.getfixturevalue('bucket')}/run"
        options = request.getfixturevalue("seaweed").storage_options
        arguments = ["--storage-options", json.dumps(options)]

    said = run_program(tmp_path, address, options, limit=limit, closes=closes)

    manifest = closed_manifest(address, options)
    counters = manifest.counters
    assert said == ([False, counters.rows, counters.rows_dropped] if closes else None)
    assert counters.rows + counters.rows_dropped == ROWS
    assert counters.rows_dropped == manifest.tables["history"].rows_dropped > ROWS / 2
    dropped = {name: table.rows_dropped for name, table in manifest.tables.items() if table.rows_dropped}
    assert set(dropped) == set(refused)
    samples = open_run(address, storage_options=options).samples().collect()
    assert samples["sample_id"].sort().to_list() == list(range(FORWARDS))
    messages = [error.message for error in manifest.errors]
    for table, rows in dropped.items():
        assert any(text.startswith(f"{rows} rows of {table} given up") for text in messages), messages

    assert main(["merge", address, *arguments]) == 1
    assert f"{sum(dropped.values()):,} rows" in capsys.readouterr().out
    result = json.loads(open_storage(address, options).read("merged/result.json"))
    assert result["coverage"]["rows_dropped"] == sum(dropped.values())
    assert result["coverage"]["rows_in_spool"] == {}
