"""The page on the result names every field of every document, and every column of the merged tables."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from merge.run_folder import START, RunFolder, process_of, whole_run
from merge.schema_checks import field_names, problems
from torchinstruments.checks import Action, Finding, Severity
from torchinstruments.merge.comparison_blocks import COMPARISON_SCHEMA
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.entries import SUMMARY_SCHEMA
from torchinstruments.merge.overview_rows import OVERVIEW_SCHEMA
from torchinstruments.merge.steps import STEPS_SCHEMA
from torchinstruments.merge.timeline import TIMELINE_SCHEMA
from torchinstruments.records import Counters, ErrorRecord, Member, ModuleRecord
from torchinstruments.store.json_schemas import json_schema
from torchinstruments.store.manifest import TableState

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "result-format.md").read_text()


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    """The merge of a run in which everything is found that can be."""
    run = RunFolder(tmp_path / "run", world_size=4).run()
    run.generation(0, [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(4)])
    for rank in range(3):
        process = process_of(rank)
        run.manifest(rank, process)
        run.catalog(rank, [ModuleRecord("unused", "Linear", (), 1, 1)], process)
        steps: list[dict[str, Any]] = [
            {"attempt": i, "gap_s": 0.2 if rank == 1 else 0.01} for i in range(20 - rank)
        ]
        steps[5] |= {"outcome": "skipped" if rank else "applied", "last_micro_batch_sync": "local"}
        run.steps(rank, steps, process)
        digests = [{"attempt": i, "digest": int(rank == i == 2)} for i in range(4)]
        run.fingerprints(rank, digests, process)
        row = {"sample_id": 0, "metric": "nonfinite_fraction", "value": float(rank == 2)}
        far = [{"sample_id": i, "attempt": i, "value": 9.0 if rank == i == 2 else rank / 2} for i in (1, 2)]
        shard = {"sample_id": 3, "attempt": 3, "layer": "sharded", "metric": "max", "scope": "local_shard"}
        shard |= {"replica_key": f"mesh sh=S(0)@{rank}/3 ranks={rank}", "shape": "4", "value": float(rank)}
        apart = {"sample_id": 4, "attempt": 4, "value": 1.0, "mode": "eval" if rank == 1 else "train"}
        rows = [row | {"attempt": rank, "sample_id": 10 + rank}, *far, shard, apart]
        run.history(rank, rows, process)
    run.write("rank-000/history.parts/part-0000000a-000001.parquet", b"")
    error = ErrorRecord("reducer", "fc", "ValueError", "no", START.isoformat())
    ended = ErrorRecord("process", "", "SIGTERM", "asked to end", START.isoformat())
    lost = {"history": TableState(next_part=4)}
    run.manifest(
        0, process_of(0), errors=(error, ended), counters=Counters(errors={"reducer": 1}), tables=lost
    )
    run.manifest(1, "000000f1")
    missing = {"check": "change", "reason": "no_hook_fired: flat", "names": ["fc.weight"]}
    seen = [Finding("frozen", "frozen_param_changed", Severity.CRITICAL, Action.COLLECT, "changed").to_dict()]
    report = {"findings": seen, "checks_run": ["frozen"], "unavailable": [missing]}
    run.checks(1, [report | {"finalized_reason": "scope_exit"}], process_of(1))
    run.samples(2, [{"sample_id": 9, "rank": 7}], process_of(2))
    found: Any = merge_run(run.url).result
    return found


def named_in(heading: str) -> set[str]:
    """Returns the words in code in the part of the page below a heading."""
    _, found, rest = PAGE.partition(f"\n## {heading}\n")
    assert found, heading
    part = rest.partition("\n## ")[0]
    return {word for code in re.findall(r"`([^`]+)`", part) for word in re.findall(r"\w+", code)}


SECTIONS = sorted(set(json_schema("result")["properties"]) - {"schema_version"})  # type: ignore[call-overload]
DOCUMENTS = {
    "run": "run.json",
    "generation": "generations/NNN.json",
    "manifest": "process-*.json",
    "modules": "modules-*.json",
    "checks": "checks-*.json",
    "rank_result": "result.json of a rank",
    "comparison": "Two runs",
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_a_section_is_on_the_page(section: str) -> None:
    """Each field that the schema allows stands in the part of the page that has the section's name."""
    schema: Any = json_schema("result")
    allowed = set(field_names(schema["properties"][section], schema["$defs"]))
    for told_of_a_rank, name in (("layers", "summary"), ("findings", "finding")):
        if section == told_of_a_rank:
            allowed -= set(field_names(schema["$defs"][name], schema["$defs"]))
    assert len(allowed) > 2
    assert allowed - named_in(section) == set()


@pytest.mark.parametrize(("name", "heading"), DOCUMENTS.items())
def test_every_field_of_a_document_is_on_the_page(name: str, heading: str) -> None:
    """Each field that the schema allows stands below the document's heading."""
    schema: Any = json_schema(name)
    allowed = set(field_names(schema, schema.get("$defs", {})))
    assert len(allowed) > 4
    assert allowed - named_in(heading) == set()


def test_what_a_merge_writes_has_the_shape_of_the_schema(result: dict[str, Any]) -> None:
    """In a run in which everything is found; a field more or less, or another type, is noticed."""
    assert problems("result", result) == []
    assert problems("result", result | {"more": 1})
    assert problems("result", {key: value for key, value in result.items() if key != "layers"})
    steps = result["steps"]
    assert problems("result", result | {"steps": steps | {"compared_attempts": "many"}})
    assert problems("result", result | {"steps": steps | {"ranks": [steps["ranks"][0] | {"mean": 1.0}]}})


def test_every_field_of_the_schema_occurs(result: dict[str, Any]) -> None:
    """No field is described that no merge writes."""
    schema: Any = json_schema("result")
    allowed = set(field_names(schema, schema["$defs"]))
    assert allowed - set(keys(result)) == {"ranks_in", "ranks_differ_in"}


def keys(value: object) -> Iterator[str]:
    """Yields every name in a document."""
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_beyond_inline_ranks_and_without_manifests_too(tmp_path: Path) -> None:
    """A large world, a rank without a manifest, and ranks that differ have shapes of their own."""
    run = whole_run(tmp_path / "run", 3)
    (run.root / f"rank-002/process-{process_of(2)}.json").unlink()
    run.history(1, [{"sample_id": 0, "value": 1.0, "shape": "2x2"}], process_of(1))
    document = dict(merge_run(run.url, inline_ranks=1).result)
    assert problems("result", document) == []
    assert {"ranks_in", "ranks_differ_in"} <= set(keys(document))
    empty = RunFolder(tmp_path / "empty").run()
    assert problems("result", dict(merge_run(empty.url).result)) == []


@pytest.mark.parametrize(
    ("table", "declared"),
    [("summary", SUMMARY_SCHEMA), ("overview", OVERVIEW_SCHEMA), ("timeline", TIMELINE_SCHEMA)],
)
def test_every_column_of_a_table_is_on_the_page(table: str, declared: pa.Schema) -> None:
    """The page lists the columns of a table, and no other."""
    _, _, rest = PAGE.partition(f"\n## {table}.parquet\n")
    rows = rest.partition("\n## ")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", rows, re.MULTILINE)))
    assert sorted(listed) == sorted(declared.names)


def test_every_column_of_the_comparison_is_on_the_page() -> None:
    """The page lists the columns of comparison.parquet, in their order."""
    _, _, rest = PAGE.partition("`comparison.parquet` is sorted by")
    part = rest.partition("\n## ")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", part, re.MULTILINE)))
    assert sorted(listed) == sorted(COMPARISON_SCHEMA.names)


def test_every_column_of_the_table_is_on_the_page() -> None:
    """The page lists the columns of steps.parquet, in their order."""
    _, _, rest = PAGE.partition("`steps.parquet` has one row for each value:\n")
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", rest, re.MULTILINE)))
    assert listed[: len(STEPS_SCHEMA)] == STEPS_SCHEMA.names
