"""What all subcommands have in common: help with an example that runs, ``--json``, exit codes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from merge.run_folder import counted, process_of, whole_run
from storage.spooling import make_part, make_target
from torchinstruments.cli.main import COMMANDS, main
from torchinstruments.environment import SPOOL_DIR
from torchinstruments.merge.engine import merge_run
from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool_folder import UPLOADER_LOCK

NAMES = [command.name for command in COMMANDS]

ENDINGS = [
    ("merge", 0, "runs/first"),
    ("merge", 1, "runs/partial"),
    ("merge", 2, "runs"),
    ("report", 0, "runs/first"),
    ("report", 1, "runs/partial"),
    ("report", 2, "runs"),
    ("status", 0, "runs/first"),
    ("status", 1, "runs/partial"),
    ("status", 2, "runs"),
    ("compare", 0, "runs/first runs/second"),
    ("compare", 1, "runs/first runs/partial"),
    ("compare", 2, "runs/first runs"),
    ("compare", 3, "runs/first runs/changed --max-change mean=0.1"),
    ("upload", 0, "empty"),
    ("upload", 1, "damaged"),
    ("upload", 2, "nowhere"),
    ("doctor", 0, "runs/first"),
    ("doctor", 1, "left"),
    ("doctor", 2, "file"),
]
"""Of each command its exit codes, and arguments that lead to them in the folder of `place`."""

MISTAKES = {
    "": "required: COMMAND; see: torchinstruments --help",
    "fly": "invalid choice: 'fly' (choose from 'merge', ",
    "merge": "required: URL; see: torchinstruments merge --help",
    "merge runs/first --out x": "merge does not take --out x there; see: torchinstruments merge --help",
    "merge runs/first --jsn": "does not take --jsn there",
    "--json merge runs/first": "merge does not take --json there",
    "merge runs/nowhere": "runs/nowhere holds no run, for there is no such folder on this host; check",
    "merge file": "file holds no run, for it is a file; give the folder that run.json lies in",
    "status runs/first/run.json": "it is a file; give the folder",
    "merge runs/first/rank-001": "give the folder above it, ",
    "status runs/first/merged": "give the folder above it, ",
    "merge ''": "the address of the run is empty; give a folder",
    "merge runs/first --output ''": "--output is empty; leave it out",
    "merge runs/first --output file": "which is a file; leave --output out",
    "merge runs/first --output runs/first/rank-000": "leave --output out",
    "merge runs/first --ranks": "argument --ranks: expected one argument",
    "merge runs/first --ranks 3-1": "ranks '3-1' cannot be read; give ranks and ranges",
    "merge runs/first --ranks 9": "none of the ranks '9' left anything",
    "merge runs/first --executor thread": "invalid choice: 'thread' (choose from 'threads', ",
    "merge runs/first --executor threads --scheduler a:1": "--executor threads has no scheduler",
    "merge runs/first --scheduler a:1 --scheduler-file file": "give one of them",
    "merge runs/first --scheduler nonsense": "'nonsense' is no address of a dask scheduler",
    "merge runs/first --scheduler tcp://host": "give one such as tcp://host:8786",
    "merge runs/first --scheduler-file nowhere.json": "nowhere.json cannot be read (No such file",
    "merge runs/first --scheduler-file file": "the file file names no dask scheduler; give the file that",
    "merge runs/first --storage-options '[1]'": "is a JSON list, but has to be an object",
    "merge s3://": "names no bucket; give one",
    "merge htp://x/y": "the scheme 'htp' of 'htp://x/y' is not known; give s3://",
    "report runs/nowhere": "runs/nowhere holds neither a run nor merged files; give the folder of a run",
    "report runs/first --tensorboard a --output b": "were both given; give one of them",
    "report runs/first --output runs/first": "",
    "compare runs/first": "required: B; see: torchinstruments compare --help",
    "compare runs/first runs/second runs/changed": "compare does not take runs/changed there",
    "compare runs/first runs/fresh": "was not merged; run `torchinstruments merge`",
    "compare runs/first runs/second --max-change std": "'std' cannot be read; give a metric and",
    "compare runs/first runs/second --max-change mean=-1": "give a number from 0 to 2",
    "compare runs/first runs/second --max-change no=1": "give one of mean, std",
    "compare runs/first runs/second --measure mean": "invalid choice: 'mean' (choose from 'recent_window'",
    "upload file": "file is no folder of this host; give the spool",
    "upload --give-up-after-s soon": "'soon' is no number of seconds; give one, such as 60",
    "upload --give-up-after-s -1": "has to be 0 or more seconds",
    "doctor runs/first --timeout-s nan": "has to be more than 0 seconds",
    "doctor ''": "is empty; give",
}
"""Wrong command lines, and what the one sentence about each says."""


def spool_with(root: Path, url: str, part: bytes) -> None:
    """Leaves a dead process's spool with one part of three rows that nobody carries."""
    target = make_target(url, None, root)
    lock = FileLock.acquire(Path(target.path).parent / UPLOADER_LOCK)
    assert lock is not None
    target.write_part("samples", 3, part)
    target.close()
    lock.release()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two equal runs, one with other values, one without a rank, one not merged; spools; a file."""
    root = tmp_path_factory.mktemp("place")
    for name in ("first", "second", "changed", "partial", "fresh"):
        run = whole_run(root / "runs" / name, 2, num_samples=4 + 3 * (name == "changed"))
        for rank in range(2):
            counted(run, rank, history_rows=5 + 3 * (name == "changed"))
            run.history(rank, [{"sample_id": 0, "metric": "std", "value": 1.0}], process_of(rank), 1)
        if name == "partial":
            for path in sorted((run.root / "rank-001").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        if name != "fresh":
            merge_run(run.url)
    (root / "file").write_text("text")
    (root / "empty").mkdir()
    spool_with(root / "left", str(root / "run"), make_part([1, 2, 3]))
    spool_with(root / "damaged", str(root / "run"), b"no Parquet")
    return root


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as where the user is, with spools of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv(SPOOL_DIR, str(folder / "empty"))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_the_help_runs(
    place: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help ends with an example, which does what it says, and with the exit codes, on a narrow screen too."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    found = re.search(r"^example:\n  torchinstruments (.+)\n\nexit codes: 0 ", text, re.MULTILINE)
    assert found is not None
    assert found[1].startswith(f"{name} ")
    assert main(shlex.split(found[1])) == 0


@pytest.mark.parametrize(("name", "code", "arguments"), ENDINGS)
def test_exit_codes_and_json(
    place: Path,
    name: str,
    code: int,
    arguments: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --json standard output is one document, or empty where nothing was done; the code is the same."""
    if name == "doctor" and code == 1:
        monkeypatch.setenv(SPOOL_DIR, str(place / "left"))
    assert main([name, *shlex.split(arguments), "--json"]) == code
    captured = capsys.readouterr()
    assert captured.err
    if captured.out:
        assert isinstance(json.loads(captured.out), dict)
    else:
        assert code == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_help_names_every_exit_code(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the table of endings, and no other."""
    main([name, "--help"])
    text = " ".join(capsys.readouterr().out.partition("exit codes: ")[2].split())
    named = {int(code) for code in re.findall(r"(?:^|, )(\d) ", text)}
    assert named == {code for command, code, _ in ENDINGS if command == name}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence(place: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error alone, with exit code 2 and the way out, and without a word of how the code runs."""
    assert main(shlex.split(line)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("torchinstruments: ")
    assert MISTAKES[line] in captured.err
    assert "Traceback" not in captured.err


def test_a_wrong_scheduler_ends_the_process(place: Path) -> None:
    """Nothing of dask keeps it alive after the sentence."""
    command = [sys.executable, "-m", "torchinstruments", "merge", "runs/first", "--scheduler", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
