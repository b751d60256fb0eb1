"""The page that explains a rank's folder, and the queries on it."""

import dataclasses
import re
from pathlib import Path

import duckdb
import polars as pl
import pytest

from torchinstruments.records import Counters, ErrorRecord, ModuleRecord, RunRecord
from torchinstruments.store import schema
from torchinstruments.store.derived import write_history_copy
from torchinstruments.store.index_page import Collected, encode_index
from torchinstruments.store.local import LocalStorage
from unit.store.folders import begin_run, samples, writer
from unit.store.material import claim, forward, identity, measurement, module, run_record

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"history\.par\w+")


def collected(
    *,
    is_closed: bool = True,
    counters: Counters | None = None,
    modules: tuple[ModuleRecord, ...] = (),
    errors: tuple[ErrorRecord, ...] = (),
    rows_left_out: int = 0,
) -> Collected:
    """Returns what came of a process."""
    return Collected(
        is_closed=is_closed,
        written_at="2026-01-01T00:00:00+00:00",
        counters=counters or Counters(),
        forward_deliveries=0,
        backward_deliveries=0,
        modules=modules,
        errors=errors,
        rows_left_out=rows_left_out,
        max_series=131_072,
        trouble="",
    )


def page_of(one: Collected, run: RunRecord | None = None) -> str:
    """Returns the page."""
    return encode_index(identity(), claim(3), run or run_record(), one).decode()


@pytest.fixture(scope="module")
def rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank's folder as two parts and an orderly close leave it, with one row that has no value."""
    folder = tmp_path_factory.mktemp("run")
    storage = LocalStorage(str(folder))
    begin_run(storage)
    one = writer(storage, 0)
    one.start(run_record(), [module(0), module(1)])
    for delivery in samples():
        one.add_sample(delivery)
    one.flush()
    odd = measurement(
        metrics=("nonfinite_fraction", "std"), values=(0.25, None), reasons=("", "no_finite_entries")
    )
    one.add_sample(forward(9, odd, settled=True))
    one.close(10.0)
    write_history_copy(folder / "rank-000", "run-1")
    return folder / "rank-000"


def blocks(folder: Path, language: str) -> dict[str, str]:
    """Returns the page's blocks in a language; a name tells what each reads and is about."""
    found = [text for kind, text in _BLOCK.findall((folder / "index.md").read_text()) if kind == language]
    return dict(zip(("trend", "missing", "nonfinite"), found, strict=True))


def test_polars_queries_run_as_they_stand(rank_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block by itself, in the rank's folder, gives the rows that it is about."""
    monkeypatch.chdir(rank_folder)
    found: dict[str, pl.DataFrame] = {}
    for name, text in blocks(rank_folder, "python").items():
        space: dict[str, object] = {}
        exec(text, space)
        frame = space[name]
        assert isinstance(frame, pl.DataFrame)
        found[name] = frame
    assert found["trend"].height == 7
    assert found["trend"]["sample_id"].to_list() == [0, 1, 2, 0, 1, 2, 9]
    assert found["missing"]["unavailable_reason"].to_list() == ["no_finite_entries"]
    assert found["nonfinite"].select("sample_id", "value").rows() == [(9, 0.25)]


def test_duckdb_queries_run_as_they_stand(rank_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same three questions have the same answers there."""
    monkeypatch.chdir(rank_folder)
    with duckdb.connect() as connection:
        found = {
            name: connection.execute(text).fetchall() for name, text in blocks(rank_folder, "sql").items()
        }
    assert [row[3] for row in found["trend"]] == [0, 1, 2, 0, 1, 2, 9]
    assert found["missing"] == [("layer99", "output", "std", "no_finite_entries", 1, 9)]
    assert [(row[0], row[-1]) for row in found["nonfinite"]] == [(9, 0.25)]


def test_queries_read_the_parts_and_the_copy(rank_folder: Path) -> None:
    """Both forms of the history are shown in both languages."""
    for language in ("python", "sql"):
        named = {name for text in blocks(rank_folder, language).values() for name in _NAMED.findall(text)}
        assert named == {"history.parts", "history.parquet"}


def test_every_column_of_history_is_explained() -> None:
    """The page's table is the schema."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", page_of(collected()), re.MULTILINE)
    assert [name for name, _ in rows] == schema.HISTORY.names
    assert all(meaning.strip() for _, meaning in rows)


def test_the_page_is_small_however_large_the_run() -> None:
    """Lists and texts are cut, so that all of it is read in one go."""
    name = "block." * 10 + "größe." * 50
    run = dataclasses.replace(
        run_record(name[:120]),
        sampling={"type": name, "settings": {f"{i}": name for i in range(500)}},
        statistics=tuple(f"{name}{i}" for i in range(500)),
        versions={"torchinstruments": name, "torch": name},
        rank_policy="ranks:" + ",".join(map(str, range(5000))),
    )
    modules = tuple(ModuleRecord(f"{name}{i}", "Linear", (), 0, 0) for i in range(5000))

    page = page_of(collected(modules=modules, rows_left_out=10**9), run)

    assert len(page.encode()) < 10_000
    assert "and 4985 more" in page


def test_errors_are_at_most_a_hundred_short_lines_and_all_counted() -> None:
    """A message of many lines is one bullet."""
    message = "first line\n* second line `" + "x" * 1000
    error = ErrorRecord("reducer", "encoder.0", "ValueError", message)
    counters = Counters(errors={"reducer": 120, "sink": 3})

    page = page_of(collected(counters=counters, errors=(error,) * 120))

    section = page.partition("## Errors\n")[2]
    bullets = [line for line in section.splitlines() if line.startswith("* ")]
    assert "123 in all: reducer 120, sink 3." in section
    assert len(bullets) == 100
    assert all(len(line) < 600 for line in bullets)
    assert bullets[0].startswith("* reducer: encoder.0: ValueError: first line * second line 'xxx")


def test_layers_that_never_fired_are_named_at_the_close_only() -> None:
    """At attach no layer has fired yet, and one that is not expected to is no news."""
    modules = (
        module(0, fired=1),
        module(1),
        dataclasses.replace(module(2), expected=False),
    )
    assert "* Layers that never fired: `layer98`\n" in page_of(collected(modules=modules))
    assert "never fired" not in page_of(collected(modules=modules, is_closed=False))
    assert "* Layers that never fired: none\n" in page_of(collected(modules=modules[:1]))


def test_the_page_says_whose_it_is_and_that_a_later_process_writes_over_it() -> None:
    """Several processes may have held a rank; the page belongs to one."""
    page = page_of(collected())
    assert "* Rank: 0 of 2 (counted from 0), generation 3\n" in page
    assert "one of them, `1a2b3c4d`: a later one writes over both" in page


def test_rows_without_a_summary_are_told() -> None:
    """Where the bound on series was met, the page says how much and where it is."""
    page = page_of(collected(rows_left_out=17))
    assert "* Rows without a summary in `result.json`: 17, beyond its first 131072 series" in page
    assert "Rows without a summary" not in page_of(collected())


def test_what_came_from_a_program_is_no_markup() -> None:
    """Links, HTML, cells of tables and control characters of names and messages stay text."""
    message = "<script>x</script> [click](javascript:x) | cell ![i](http://x) \x1b[31m \u202e `code`"
    error = ErrorRecord("hook<b>", "layer[0]", "Odd|Error", message, at="")
    counters = Counters(errors={"hook<b>": 1}, histograms_missing={"<i>": 2})
    page = page_of(collected(counters=counters, errors=(error,)), run_record("run-<b>"))
    outside = re.sub(r"(?s)```.*?```|`[^`]*`", "", page)
    assert not re.search(r"(?<!\\)<[a-z/]|(?<!\\)\[[^\]]*[^\\]\]\(", outside)
    assert r"\<script>x\</script> \[click\](javascript:x) \| cell" in page
    assert "\x1b" not in page
    assert "\u202e" not in page
