"""The page that explains the merged files, and the queries on it."""

import re
from pathlib import Path

import duckdb
import polars as pl
import pytest

from merge.run_folder import RunFolder, counted, process_of, whole_run
from torchinstruments.merge.comparison_blocks import COMPARISON_SCHEMA
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.entries import SUMMARY_SCHEMA
from torchinstruments.merge.steps import STEPS_SCHEMA
from torchinstruments.records import ModuleRecord

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMES = ("furthest", "band", "windows", "missing", "disagreements")
HOSTILE = "x`|</td><script>a</script>\n\n# Title\n[l](http://x) ![i](http://x)\n```\n\x1b[31m\u202e"


def page(run: RunFolder) -> str:
    """Returns the merged page of a run."""
    return (run.root / "merged" / "index.md").read_text()


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Five ranks, of which one is far from the others in every sample, lacks a value, and skips a step."""
    run = whole_run(tmp_path_factory.mktemp("run"), 5, num_samples=4)
    for rank in range(5):
        counted(run, rank, history_rows=8 + (rank == 3))
        rows = [
            {"sample_id": sample, "attempt": sample, "metric": "std", "value": 1.0 + rank + 100 * (rank == 3)}
            for sample in range(4)
        ]
        gone = {"layer": "late", "metric": "std", "unavailable_reason": "no_finite_entries"}
        rows += [gone | {"sample_id": 3, "value": None}] if rank == 3 else []
        run.history(rank, rows, process_of(rank), 1)
        steps = [
            {"attempt": one, "outcome": "skipped" if (rank, one) == (3, 2) else "applied"} for one in range(4)
        ]
        run.steps(rank, steps, process_of(rank))
    merge_run(run.url)
    return run


def blocks(run: RunFolder, language: str) -> dict[str, str]:
    """Returns the page's blocks in a language, by what they are about."""
    found = [text for kind, text in _BLOCK.findall(page(run)) if kind == language]
    return dict(zip(_NAMES, found, strict=True))


def test_both_languages_give_the_same_answers(merged: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block runs as it stands in the folder and finds the rank that is far, silent, and skips."""
    monkeypatch.chdir(merged.root / "merged")
    found: dict[str, list[tuple[object, ...]]] = {}
    for name, text in blocks(merged, "python").items():
        space: dict[str, object] = {}
        exec(text, space)
        frame = space[name]
        assert isinstance(frame, pl.DataFrame)
        found[name] = frame.rows()
    with duckdb.connect() as connection:
        for name, text in blocks(merged, "sql").items():
            assert connection.execute(text).fetchall() == found[name], name
    assert found["furthest"] == [(3, "fc", "output", "", "output", "std", 4, 50.5)]
    assert [row[7:12] for row in found["band"]] == [(0, 1.0, 3.0, 3, 104.0)] * 4
    assert [(row[5], row[9]) for row in found["windows"] if row[0] == "fc"] == [
        (rank, 1.0 + rank + 100 * (rank == 3)) for rank in range(5)
    ]
    assert found["missing"] == [("late", "output", "std", "no_finite_entries", 1, 1)]
    assert [row[1:4] for row in found["disagreements"]] == [
        (2, "outcome", "0-2,4"),
        (2, "outcome", "3"),
    ]


def test_every_column_of_the_tables_is_explained(merged: RunFolder) -> None:
    """The page's three tables of columns are the schemas, in their order, each with a meaning."""
    for file, schema in (
        ("summary.parquet", SUMMARY_SCHEMA),
        ("comparison.parquet", COMPARISON_SCHEMA),
        ("steps.parquet", STEPS_SCHEMA),
    ):
        section = page(merged).partition(f"## Columns of {file}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (`.+?) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
        assert [name for names, _, _ in rows for name in re.findall(r"`(\w+)`", names)] == schema.names
        assert all(meaning.strip() for _, _, meaning in rows)


def test_the_page_tells_what_is_missing(tmp_path: Path) -> None:
    """A rank that left nothing, a file that was set aside, and the first disagreement have lines."""
    run = whole_run(tmp_path / "run", 3)
    run.write("rank-001/history.parts/part-00000001-000009.parquet", b"none")
    for path in sorted((run.root / "rank-002").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    merge_run(run.url)
    text = page(run)
    assert "* Complete: no, see the coverage below\n" in text
    assert "* Missing ranks: 2\n" in text
    assert "* Files set aside: 1\n* `" in text


def test_the_page_is_the_same_bytes_whatever_the_executor(tmp_path: Path) -> None:
    """As is everything that a merge writes."""
    run = whole_run(tmp_path / "run", 3)
    found = set()
    for number, executor in enumerate(("threads", "processes")):
        merge_run(run.url, output=str(tmp_path / f"out{number}"), executor=executor)
        found.add((tmp_path / f"out{number}" / "index.md").read_bytes())
    assert len(found) == 1


def test_what_came_from_a_program_is_no_markup(tmp_path: Path) -> None:
    """Hostile names of layers, statistics, signals and the run stay text on their own line, and small."""
    run = whole_run(tmp_path / "run", 3, run_id=HOSTILE)
    for rank in range(3):
        counted(run, rank, history_rows=5)
        layer = ModuleRecord(HOSTILE * 50, "Linear", (), 0, 0)
        run.catalog(rank, [layer], process_of(rank))
        row = {"sample_id": 0, "layer": HOSTILE * 50, "metric": HOSTILE, "value": float(rank) ** 4}
        run.history(rank, [row], process_of(rank), 1)
    merge_run(run.url, untrusted=True)
    text = page(run)
    assert len(text.encode()) < 20_000
    outside = re.sub(r"(?sm)^```\w+\n.*?^```$|`[^`\n]*`", "", text)
    assert not re.search(r"(?<!\\)<[a-z/]|(?<!\\)\[[^\]]*[^\\]\]\(|`", outside)
    assert re.findall(r"^#+ .*$", outside, re.MULTILINE) == re.findall(
        r"^#+ [A-Zr].*$", outside, re.MULTILINE
    )
    assert "# Title" not in re.findall(r"^#.*$", outside, re.MULTILINE)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\<script>" in text
