"""What `merge_run` gives back: typed answers, frames, a copy, five lines, and HTML that escapes all text."""

import dataclasses
import pickle
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from merge.run_folder import RunFolder, process_of
from torchinstruments import StorageError
from torchinstruments.checks import Action, Finding, Severity
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.failures import of_rank
from torchinstruments.merge.result import MergeResult
from torchinstruments.records import Member

NAME = "a<script>alert('x')</script>\n\x1b[2J\"&" + "é" * 300


@pytest.fixture
def merged(tmp_path: Path) -> MergeResult:
    """The merge of a run of five ranks in which one is missing and everything is found that can be."""
    run = RunFolder(tmp_path / "run", world_size=5).run()
    run.generation(0, [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(5)])
    for rank in range(4):
        process = process_of(rank)
        run.manifest(rank, process)
        steps: list[dict[str, Any]] = [{"attempt": i} for i in range(20)]
        steps[5] |= {"outcome": "skipped" if rank == 1 else "applied"}
        run.steps(rank, steps, process)
        run.fingerprints(rank, [{"attempt": i, "digest": int(rank == i == 2)} for i in range(4)], process)
        rows: list[dict[str, Any]] = [
            {
                "sample_id": i,
                "attempt": i,
                "layer": NAME,
                "value": 50.0 if (rank, i) == (2, 3) else rank * 0.5,
            }
            for i in range(4)
        ]
        bad: dict[str, Any] = {"sample_id": 4, "attempt": 4, "layer": NAME, "metric": "nonfinite_fraction"}
        bad["value"] = float(rank == 3) / 4
        run.history(rank, [*rows, bad], process)
    moved = Finding("frozen", "frozen_param_changed", Severity.CRITICAL, Action.RAISE, "seen", ("fc.weight",))
    for rank in (0, 2):
        seen = [moved.to_dict() | {"attempt": 4}] if rank else []
        run.checks(rank, [{"findings": seen, "checks_run": ["frozen"]}], process_of(rank))
    run.write("rank-000/history.parts/part-0000000a-000001.parquet", b"")
    return merge_run(run.url)


def test_typed_answers(merged: MergeResult) -> None:
    """What people ask for first has names and types, and says what result.json says."""
    assert merged.coverage.expected_ranks == (0, 1, 2, 3, 4)
    assert merged.coverage.missing_ranks == (4,)
    assert [one.reason for one in merged.coverage.quarantined] == ["empty_file"]
    assert merged.coverage.alignment.key == ("generation", "attempt", "forward_in_attempt")
    assert merged.coverage.complete is merged.complete is False
    assert merged.same_steps is False
    (disagreement,) = merged.step_disagreements
    assert (disagreement.attempt, disagreement.differences[0].column) == (5, "outcome")
    assert [(one.value, one.ranks) for one in disagreement.differences[0].values] == [
        ("skipped", "1"),
        ("applied", "0,2-3"),
    ]
    assert merged.replicas_equal is False
    divergence = merged.first_divergence
    assert divergence is not None
    assert (divergence.attempt, divergence.tensor, divergence.values[0].ranks) == (2, "fc.weight", "2")
    nonfinite = merged.first_nonfinite
    assert nonfinite is not None
    assert (nonfinite.rank, nonfinite.attempt, nonfinite.nonfinite_fraction) == (3, 4, 0.25)
    alone, widest = merged.widest
    assert (alone.metric, alone.rank, alone.value, alone.attempt) == ("nonfinite_fraction", 3, 0.25, 4)
    assert (alone.median_of_ranks, alone.mads, alone.unavailable_reason) == (0.0, None, "mad_is_zero")
    assert (widest.layer, widest.rank, widest.value, widest.attempt) == (NAME, 2, 50.0, 3)
    assert (widest.median_of_ranks, widest.mad_of_ranks, widest.mads) == (0.5, 0.5, 99.0)
    (found,) = merged.check_findings
    assert (found.severity, found.code, found.ranks) == ("critical", "frozen_param_changed", "2")
    assert found.ranks_that_did_not_see_it == "0"
    assert (found.first.generation, found.first.attempt, found.first.rank) == (0, 4, 2)
    assert found.first.finding["names"] == ["fc.weight"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        merged.coverage.complete = True  # type: ignore[misc] - that is the test


def test_every_table_is_a_frame(merged: MergeResult) -> None:
    """Summary, comparison and steps come as Polars frames with the rows of their files."""
    assert merged.summary()["rank"].unique().to_list() == [0, 1, 2, 3]
    assert merged.comparison()["attempt"].to_list() == [0, 1, 2, 3, 4]
    assert merged.steps()["outcome"].to_list() == ["skipped", "applied"]


def test_a_copy_is_the_callers_own(merged: MergeResult) -> None:
    """What `to_dict` returns can be changed without the result."""
    copied: Any = merged.to_dict()
    assert copied == merged.result
    copied["coverage"]["missing_ranks"].append(99)
    assert merged.coverage.missing_ranks == (4,)


def test_repr_has_five_lines(merged: MergeResult) -> None:
    """A result shows itself in five lines, whatever a program calls its layers."""
    lines = repr(merged).split("\n")
    assert len(lines) == 5
    assert lines[0] == f"MergeResult('{merged.url}', ranks='0-3', not complete)"
    assert lines[1].startswith(
        "  coverage: 4 of 5 expected ranks, missing: 4, files set aside: 1; 5 forwards,"
    )
    assert lines[2] == (
        "  steps: DIFFER, first at generation 0, attempt 5: outcome skipped on 1, applied on 0,2-3; "
        "replicas DIFFER, first at generation 0, attempt 2: fc.weight"
    )
    assert lines[3].startswith(
        "  first nonfinite: rank 3 at generation 0, attempt 4, forward 0, forward: a<script>"
    )
    assert lines[4].startswith("  widest: a<script>")
    assert all(line.isprintable() and len(line) < 300 for line in lines)


def test_html_escapes_everything(merged: MergeResult) -> None:
    """Names of layers are text in HTML, never markup, and the tags close."""

    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.opened: list[str] = []
            self.seen: set[str] = set()

        @override
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not attrs
            self.opened.append(tag)
            self.seen.add(tag)

        @override
        def handle_endtag(self, tag: str) -> None:
            assert self.opened.pop() == tag

    page = merged._repr_html_()
    tags = Tags()
    tags.feed(page)
    assert tags.opened == []
    assert tags.seen == {"div", "p", "code", "table", "thead", "tbody", "tr", "th", "td"}
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in page


def test_html_of_names_that_no_page_should_have(tmp_path: Path) -> None:
    """Control characters stand there as Python writes them, and long names are cut."""
    run = RunFolder(tmp_path / "run", world_size=4).run()
    names = ["\x1b[31mred\x00\u202e\nend", "x" * 10_000]
    for rank in range(4):
        rows = [{"sample_id": 0, "layer": name, "value": 9.0 if rank == 3 else rank / 8} for name in names]
        run.history(rank, rows, process_of(rank))
    merged = merge_run(run.url)
    assert {one.layer for one in merged.widest} == set(names)
    page = merged._repr_html_()
    assert all(one.isprintable() for one in page)
    assert "<td>\\x1b[31mred\\x00\\u202e\\nend</td>" in page
    assert f"<td>{'x' * 197}...</td>" in page
    assert "x" * 201 not in page


def test_an_error_tells_which_ranks_failed() -> None:
    """An error knows the ranks that failed, also behind a process boundary; others know none."""
    error = of_rank(7, of_rank(3, StorageError("no answer")))
    assert error.failures == {3: "no answer", 7: "no answer"}
    assert pickle.loads(pickle.dumps(error)).failures == error.failures
    assert StorageError("another").failures == {}
