"""The page on the result names every field of the sections that hold rank beside rank."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from merge.run_folder import RunFolder, process_of
from torchinstruments.merge.comparison_blocks import COMPARISON_SCHEMA
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.steps import STEPS_SCHEMA
from torchinstruments.records import Member, ModuleRecord

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "result-format.md").read_text()
BY_TEXT = {"ranks", "reasons", "ranks_missing", "rows_in_spool", "by_phase"}
"""Records whose keys are data, not fields."""


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
        run.history(rank, [row | {"attempt": rank, "sample_id": 10 + rank}, *far], process)
    run.write("rank-000/history.parts/part-0000000a-000001.parquet", b"")
    found: Any = merge_run(run.url).result
    return found


def fields(value: object, name: str = "") -> Iterator[str]:
    """Yields every field of a section."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if name not in BY_TEXT:
                yield key
            yield from fields(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from fields(inner, name)


@pytest.mark.parametrize(
    "section",
    ["coverage", "generations", "steps", "replicas", "first_nonfinite", "own_work", "comparison", "layers"],
)
def test_every_field_is_on_the_page(result: dict[str, Any], section: str) -> None:
    """Each field stands in the part of the page that has the section's name."""
    _, _, rest = PAGE.partition(f"\n## {section}\n")
    part = rest.partition("\n## ")[0]
    named = {word for code in re.findall(r"`([^`]+)`", part) for word in re.findall(r"\w+", code)}
    found = set(fields(result[section]))
    assert len(found) > 5
    assert found - named == set()


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
