"""The command that compares two runs: exit codes, streams, and its table."""

import json
import re
from pathlib import Path

import pytest

from merge.run_folder import RunFolder, process_of, whole_run
from torchinstruments.cli.main import main
from torchinstruments.merge import merge_run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    """Two merged runs of two ranks, complete; in the second one a layer of rank 1 is half as large."""
    first = whole_run(tmp_path / "a")
    second = whole_run(tmp_path / "b", run_id="run-b")
    rows = [{"sample_id": one, "value": (10 + one) / 2, "shape": "4x4"} for one in range(4)]
    second.history(1, rows, process_of(1))
    for run in (first, second):
        assert merge_run(run.url).complete
    return first, second


def test_without_a_condition_a_change_is_no_failure(
    runs: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is shown with its rank, both numbers, and what differs beside them."""
    first, second = runs
    assert main(["compare", first.url, second.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"A: run run-a, 2 ranks, series of 0-1, complete, {first.url}/merged"
    assert lines[1] == f"B: run run-b, 2 ranks, series of 0-1, complete, {second.url}/merged"
    assert lines[2] == "  compared     1 series rank by rank (0-1); mean of the last samples of each series"
    assert lines[-4] == "largest changes by share of size, the first 1 of 1 series that changed"
    assert "share of size = |b - a| / largest of both and the tensor's std in A and in B" in lines[-3]
    headings = ["layer", "signal", "metric", "differs in", "rank", "A", "B", "change", "share of size"]
    assert re.split(r"  +", lines[-2].strip()) == headings
    assert lines[-1].split() == ["fc", "output", "mean", "shape", "1", "12", "6", "50.00%", "50.00%"]


def test_a_change_that_is_large_in_its_tensor_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean of rounding errors that changed its sign stands behind it, with both figures."""
    runs = [whole_run(tmp_path / name, 1) for name in "ab"]
    for run, mean, std in zip(runs, (1e-15, -1e-15), (1.0, 4.0), strict=True):
        own = {"sample_id": 0, "layer": "head"}
        rows = [own | {"metric": "mean", "value": mean}, own | {"metric": "std", "value": std}]
        run.history(0, rows, process_of(0))
        merge_run(run.url)
    main(["compare", runs[0].url, runs[1].url])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [(one[0], one[2], *one[-2:]) for one in shown] == [
        ("head", "std", "75.00%", "75.00%"),
        ("head", "mean", "200.00%", "0.00%"),
    ]


@pytest.mark.parametrize(
    ("limit", "code", "line"),
    [
        ("mean=0.5", 0, "mean by at most 0.5: held, 1 series, the largest 0.5"),
        ("mean=0.49", 3, "mean by at most 0.49: EXCEEDED, 1 of 1 series beyond, the largest 0.5"),
    ],
)
def test_a_condition_decides_the_exit_code(
    runs: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str], limit: str, code: int, line: str
) -> None:
    """3 where the limit did not hold, and the line says so and by how much."""
    assert main(["compare", runs[0].url, runs[1].url, "--max-change", limit]) == code
    assert f"  condition    {line}" in capsys.readouterr().out.splitlines()


def test_a_condition_counts_more_than_an_incomplete_run(
    runs: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was not complete when it was merged exits with 1, and with 3 where a condition is met."""
    first, second = runs
    second.manifest(0, process_of(0), status="running")
    merge_run(second.url)
    assert main(["compare", first.url, second.url]) == 1
    assert "NOT COMPLETE when it was merged" in capsys.readouterr().out
    assert main(["compare", first.url, second.url, "--max-change", "mean=0"]) == 3


def test_json_goes_to_standard_output_alone(
    runs: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is the document, the rest goes to standard error."""
    assert main(["compare", runs[0].url, runs[1].url, "--json", "--measure", "latest"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["measure"] == "latest"
    assert document["largest_changes"][0]["largest"]["b"]["value"] == 6.5
    assert captured.err.startswith("A: run run-a")


def test_worlds_of_other_sizes(
    runs: tuple[RunFolder, RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table says which end of the range it is, and on which rank of either run."""
    wider = whole_run(tmp_path / "wider", 3)
    merge_run(wider.url)
    assert main(["compare", runs[0].url, wider.url]) == 0
    out = capsys.readouterr().out
    assert "lowest and highest over ranks, for the worlds have different sizes" in out
    assert out.splitlines()[-1].split() == [
        "fc",
        "output",
        "mean",
        "highest",
        "1,",
        "2",
        "12",
        "22",
        "45.45%",
        "45.45%",
    ]


def test_layers_and_values_that_came_and_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a line with the first of them; their names are no markup."""
    first = whole_run(tmp_path / "a", 1)
    second = whole_run(tmp_path / "b", 1, run_id="run-b")
    rows = [{"sample_id": one, "value": None, "unavailable_reason": "overflow"} for one in range(4)]
    second.history(
        0, [*rows, {"sample_id": 0, "layer": "[red]new[/]\x1b[31m\n", "value": 1.0}], process_of(0)
    )
    for run in (first, second):
        merge_run(run.url)
    assert main(["compare", first.url, second.url, "--max-change", "mean=1"]) == 3
    out = capsys.readouterr().out
    assert "  added        1 layer: [red]new[/]\\x1b[31m\\n" in out
    assert "  lost values  1 series, first fc output mean on rank 0" in out
    assert "  condition    mean by at most 1: NOT HELD, 1 series lost the value" in out
    assert "  only in B    1 series" in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--max-change", "mean"], "--max-change 'mean'"),
        (["--max-change", "mean=x"], "--max-change 'mean=x'"),
        (["--max-change", "=0.1"], "--max-change '=0.1'"),
        (["--max-change", "mean=nan"], "nan"),
        (["--max-change", "maen=0.1"], "give one of mean"),
        (["--max-change", "mean=0.1", "--max-change", "mean=0.2"], "given twice"),
        (["--storage-options", "[]"], "--storage-options"),
    ],
)
def test_mistakes_get_one_sentence(
    runs: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    """Exit code 2 and no traceback."""
    assert main(["compare", runs[0].url, runs[1].url, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("torchinstruments: ")
    assert word in line


def test_a_run_that_was_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence says what to do."""
    run = whole_run(tmp_path / "a")
    assert main(["compare", run.url, run.url]) == 2
    assert "run `torchinstruments merge` on it first" in capsys.readouterr().err
    assert not (run.root / "merged").exists()
