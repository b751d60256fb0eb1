"""The command that writes a page: exit codes, streams, and what it does of itself."""

import builtins
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from merge.run_folder import RunFolder, process_of, whole_run
from torchinstruments.cli.main import main
from torchinstruments.merge import merge_run
from torchinstruments.records import Member

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of two ranks that was not merged."""
    return whole_run(tmp_path / "run")


def test_a_run_that_was_not_merged_is_merged_first(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so; the second time the result that lies there is taken."""
    assert main(["report", run.url]) == 0
    printed = capsys.readouterr()
    assert "not merged yet; merging it first" in printed.err
    assert f"{run.url}/merged/report.html" in printed.out
    before = (run.root / "merged" / "result.json").stat().st_mtime_ns
    assert main(["report", run.url]) == 0
    assert "merging" not in capsys.readouterr().err
    assert (run.root / "merged" / "result.json").stat().st_mtime_ns == before
    assert main(["report", run.url, "--merge"]) == 0
    assert (run.root / "merged" / "result.json").stat().st_mtime_ns > before


def test_what_is_not_complete_exits_with_one(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """The page is there all the same, and the line says that the merge was not complete."""
    run.manifest(1, process_of(1), status="running")
    assert main(["report", run.url]) == 1
    assert "NOT COMPLETE" in capsys.readouterr().out
    assert (run.root / "merged" / "report.html").exists()


def test_a_run_without_samples_exits_as_its_merge_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is missing, but there is nothing either: 1 of both commands."""
    run = RunFolder(tmp_path / "run").run()
    run.generation(0, [Member(0, process_of(0), "host-a", 0, observing=True)])
    run.manifest(0, process_of(0))
    assert main(["merge", run.url]) == 1
    assert "complete, but no sample was taken" in capsys.readouterr().out
    assert main(["report", run.url]) == 1


def test_json_goes_to_standard_output_alone(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """One document: where the page lies, its size, and whether anything is missing."""
    merge_run(run.url)
    assert main(["report", run.url, "--json", "--output", str(run.root / "page.html")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "report": str(run.root / "page.html"),
        "size_bytes": (run.root / "page.html").stat().st_size,
        "complete": True,
        "missing": [],
    }


def test_scalars_for_tensorboard(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder is written in place of a page; a single rank has no band."""
    folder = run.root / "board"
    assert main(["report", run.url, "--tensorboard", str(folder)]) == 0
    assert "1 series in" in capsys.readouterr().out
    assert len(list(folder.iterdir())) == 1
    assert not (run.root / "merged" / "report.html").exists()
    alone = whole_run(run.root / "alone", 1)
    assert main(["report", alone.url, "--tensorboard", str(run.root / "empty"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["series"] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tensorboard", "a", "--output", "b"], "give one of them"),
        (["--storage-options", "["], "--storage-options is no JSON"),
    ],
)
def test_a_mistake_is_one_sentence(
    run: RunFolder, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """Exit code 2, and no traceback."""
    assert main(["report", run.url, *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert sentence in lines[0]


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is named."""
    assert main(["report", str(tmp_path)]) == 2
    assert "holds neither a run nor merged files" in capsys.readouterr().err


def test_without_plotly_the_way_out_is_named(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence with the command to run, before anything is merged."""
    load: Callable[..., object] = builtins.__import__

    def without_plotly(name: str, *arguments: object, **named: object) -> object:
        if name.partition(".")[0] == "plotly":
            raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
        return load(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_plotly)
    assert main(["report", run.url]) == 2
    assert "run pip install plotly jinja2" in capsys.readouterr().err
    assert not (run.root / "merged").exists()


def _without(name: str) -> "Callable[[dict[str, Any]], object]":
    return lambda result: result.pop(name)


@pytest.mark.parametrize(
    "spoil",
    [
        _without("comparison"),
        lambda result: result["coverage"].pop("foreign_parts"),
        lambda result: result["replicas"].update(unavailable_reason="\x1b[31m", equal=None),
        lambda result: result.update(ranks=1e300),
        lambda result: result["run"].update(versions=[["a"]]),
        lambda result: result["comparison"]["widest"].append({"layer": "fc", "value": {}}),
    ],
)
def test_a_result_that_no_merge_wrote_is_one_sentence(
    run: RunFolder, capsys: pytest.CaptureFixture[str], spoil: "Callable[[dict[str, Any]], object]"
) -> None:
    """What is missing there, or has another type, ends with 2, without a traceback and without a page."""
    merge_run(run.url)
    path = run.root / "merged" / "result.json"
    result = json.loads(path.read_text())
    spoil(result)
    path.write_text(json.dumps(result))
    assert main(["report", run.url]) == 2
    said = capsys.readouterr().err
    assert "is not what a merge writes (" in said
    assert said.endswith("); merge the run again\n")
    assert "\x1b" not in said
    assert not (run.root / "merged" / "report.html").exists()


def test_no_page_is_written_through_a_link(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was copied from somebody may bring a link in place of its folder of results."""
    merge_run(run.url)
    (run.root / "merged").rename(tmp_path / "elsewhere")
    (run.root / "merged").symlink_to(tmp_path / "elsewhere")
    assert main(["report", run.url]) == 2
    assert "is a link, and nothing is written through one" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere" / "report.html").exists()
