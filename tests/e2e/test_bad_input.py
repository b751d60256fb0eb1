"""What a user can get wrong at attach: one sentence with the value and the way out, on all ranks alike."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchinstruments.testing.object_store import ObjectStore

PROGRAM = """
import os, sys
from datetime import timedelta
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import torch.distributed as dist
import torchinstruments
from torchinstruments import *

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
if "TORCHELASTIC_RUN_ID" in os.environ:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
try:
    observer = eval(sys.argv[1])
except torchinstruments.TorchInstrumentsError as error:
    sys.stdout.write(f"RAISED {type(error).__name__}: {error}\\n")
    sys.stdout.flush()
    sys.exit(0)
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
observer.close(*map(float, sys.argv[2:]))
sys.stdout.write(f"TRAINED rows={observer.counters.rows} url={observer.url}\\n")
"""


def run_program(
    expression: str,
    *,
    ranks: int = 1,
    cwd: Path,
    close_timeout_s: float = 60.0,
    variables: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs the small training with an attach expression, alone or on several ranks."""
    script = cwd / "program.py"
    script.write_text(PROGRAM)
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, str(script), expression, str(close_timeout_s)],
        cwd=cwd,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "TORCHINSTRUMENTS_SPOOL_DIR": str(cwd / "spool")}
        | (variables or {}),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def end_uploaders(spool: Path) -> None:
    """Ends the uploaders that this test's programs left behind with a spool that can never become empty."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().decode().split("\0")
            if "torchinstruments.store.uploader" in command and any(str(spool) in word for word in command):
                os.kill(int(process.name), signal.SIGKILL)


def raised(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Returns the sentences that ranks raised."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.removeprefix("RAISED ") for line in done.stdout.splitlines() if line.startswith("RAISED ")]


@pytest.mark.parametrize(
    ("expression", "variables", "words"),
    [
        ("inject_observer(model)", {"RANK": "two", "WORLD_SIZE": "4"}, ("RANK", "'two'", "whole number")),
        ("inject_observer(model)", {"RANK": "4", "WORLD_SIZE": "4"}, ("RANK=4", "WORLD_SIZE=4", "0 to 3")),
        ("inject_observer(model)", {"RANK": "1"}, ("RANK=1", "WORLD_SIZE")),
        (
            "inject_observer(model, interval=timedelta(seconds=5), sampler=AlwaysSampler())",
            {},
            ("interval", "sampler"),
        ),
        ("inject_observer(model, output_dir='')", {}, ("output_dir=''", "'stats'")),
        ("inject_observer(model, output_dir='nosuch://x/y')", {}, ("nosuch",)),
        ("inject_observer(model, output_dir='gs://bucket/run')", {}, ("gs://", "gcsfs")),
        ("inject_observer(model, rank_policy='some')", {}, ("rank_policy='some'", "rank0")),
        ("inject_observer(model, rank_policy=[-1])", {}, ("rank_policy=[-1]",)),
        ("inject_observer(model, error_policy='loud')", {}, ("error_policy='loud'", "'ignore'")),
        ("inject_observer(model, sampler=3)", {}, ("sampler=3", "should_sample")),
        ("inject_observer(model, selector=lambda name, module: False)", {}, ("selector",)),
        ("inject_observer(model, reducers=())", {}, ("reducers",)),
        ("inject_observer(model, optimizer=7)", {}, ("optimizer=7",)),
        ("inject_observer(model, run_id='///')", {}, ("run id '///'",)),
        ("inject_observer(model, interval=timedelta(0))", {}, ("interval",)),
        ("inject_observer(model, storage_options={'key': 'x'})", {}, ("storage_options", "local")),
        ("inject_observer('model')", {}, ("model='model'", "Module")),
        ("inject_observer(model, history_config={'window': 3})", {}, ("history_config", "HistoryConfig")),
        ("inject_observer(model, history_config=HistoryConfig(window=0))", {}, ("window=0", "at least 1")),
    ],
)
def test_a_wrong_argument_is_one_sentence_with_value_and_way_out(
    expression: str, variables: dict[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    """The error is a ConfigurationError whose single line has each of the words."""
    (sentence,) = raised(run_program(expression, cwd=tmp_path, variables=variables))
    assert sentence.startswith("ConfigurationError: ")
    assert all(word in sentence for word in words), sentence


def test_a_second_observer_on_one_model_is_refused(tmp_path: Path) -> None:
    """The second attach raises and says how to go on."""
    (sentence,) = raised(run_program("(inject_observer(model), inject_observer(model))", cwd=tmp_path))
    assert sentence.startswith("ObserverAlreadyAttachedError: ")
    assert "remove_observer(model)" in sentence


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_cannot_be_is_refused_on_all_ranks(ranks: int, tmp_path: Path) -> None:
    """A file where a folder should be raises on each rank, with its path."""
    (tmp_path / "file").write_text("here is no folder")
    target = str(tmp_path / "file" / "run")
    sentences = raised(
        run_program(f"inject_observer(model, output_dir={target!r})", ranks=ranks, cwd=tmp_path)
    )
    assert len(sentences) == ranks
    assert len(set(sentences)) == 1
    assert str(tmp_path / "file") in sentences[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("missing_bucket", "StorageNotFoundError", ("no-such-bucket",)),
        ("wrong_secret", "StorageDeniedError", ("s3://",)),
        ("no_credentials", "StorageDeniedError", ("s3://", "redential")),
    ],
)
def test_a_store_that_says_no_raises_on_all_ranks(
    case: str,
    error: str,
    words: tuple[str, ...],
    ranks: int,
    seaweed: ObjectStore,
    bucket: str,
    tmp_path: Path,
) -> None:
    """A missing bucket, a wrong secret and no credentials each raise the same sentence on each rank."""
    options = dict(seaweed.storage_options)
    target = f"s3://{bucket}/run"
    if case == "missing_bucket":
        target = "s3://no-such-bucket/run"
    elif case == "wrong_secret":
        options["secret"] = "not-the-secret"
    else:
        options = {key: value for key, value in options.items() if key not in {"key", "secret"}}
    done = run_program(
        f"inject_observer(model, output_dir={target!r}, storage_options={options!r})",
        ranks=ranks,
        cwd=tmp_path,
        variables={"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)},
    )
    sentences = raised(done)
    assert len(sentences) == ranks, done.stdout + done.stderr
    assert len(set(sentences)) == 1
    assert sentences[0].startswith(f"{error}: ")
    assert all(word in sentences[0] for word in words), sentences[0]
    assert "not-the-secret" not in done.stdout + done.stderr


def test_a_store_that_is_merely_down_does_not_stop_training(tmp_path: Path) -> None:
    """With nobody listening the run starts unverified, warns, trains, and keeps its rows in the spool."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"key": "a", "secret": "b", "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
    done = run_program(
        "inject_observer(model, output_dir='s3://bucket/run', sampler=AlwaysSampler(), "
        f"storage_options={options!r})",
        cwd=tmp_path,
        close_timeout_s=2.0,
        variables={"RANK": "0", "WORLD_SIZE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TRAINED" in done.stdout
    assert "unverified" in done.stderr
    assert list((tmp_path / "spool").rglob("*-history-*.parquet"))
    (log,) = (tmp_path / "spool").rglob("uploader.log")
    assert (
        f"by an uploader that keeps the endpoint and credentials it was started with; if {log}" in done.stderr
    )
    end_uploaders(tmp_path / "spool")


def test_another_runs_folder_is_left_alone(tmp_path: Path) -> None:
    """A second run goes beside the first, says so with both names, and the first keeps its bytes."""
    expression = "inject_observer(model, output_dir='stats', run_id={!r}, sampler=AlwaysSampler())"
    first = run_program(expression.format("first"), cwd=tmp_path)
    before = (tmp_path / "stats" / "run.json").read_bytes()
    second = run_program(expression.format("second"), cwd=tmp_path)
    assert "url=" + str(tmp_path / "stats") in first.stdout
    assert "url=" + str(tmp_path / "stats" / "run-second") in second.stdout
    assert (tmp_path / "stats" / "run.json").read_bytes() == before
    assert "'first'" in second.stderr
    assert "'second'" in second.stderr
