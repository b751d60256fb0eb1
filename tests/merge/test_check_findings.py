"""What training checks found, joined over ranks."""

from pathlib import Path
from typing import Any

from merge.run_folder import RunFolder, process_of, whole_run
from merge.schema_checks import problems
from torchinstruments.checks import Action, Finding, Severity
from torchinstruments.merge.check_findings import MAX_SHOWN, MAX_SHOWN_RANKS, CheckFindingsFold
from torchinstruments.merge.engine import merge_run
from torchinstruments.store.checks import FoundChecks, SessionReport


def finding(
    code: str, attempt: int | None, name: str = "fc.weight", severity: str = "warning"
) -> dict[str, Any]:
    """A finding as a report has it."""
    one = Finding("change", code, Severity(severity), Action.COLLECT, "seen", (name,))
    return one.to_dict() | {"attempt": attempt}


def document(rank: int, findings: list[dict[str, Any]], generation: int = 0, **more: object) -> FoundChecks:
    """What a process of a rank left."""
    session = SessionReport(findings=tuple(findings), **more)  # type: ignore[arg-type]
    return FoundChecks(
        schema_version=1,
        run_id="run-a",
        generation=generation,
        rank=rank,
        process=f"{generation:04x}{rank:04x}",
        sessions=(session,),
    )


def test_ranks_stand_beside_those_that_did_not_see_it(tmp_path: Path) -> None:
    """One rank of three saw it, one had no checks at all; the grave kind comes first."""
    run = whole_run(tmp_path / "run", 3)
    nan = [finding("unmoved", 1), finding("nan", 7, severity="critical")]
    run.checks(0, [{"findings": [], "checks_run": ["change"]}], process_of(0))
    run.checks(
        2, [{"findings": nan, "checks_run": ["change"], "finalized_reason": "violation"}], process_of(2)
    )
    result: Any = merge_run(run.url).result
    found = result["findings"]
    assert problems("result", result) == []
    assert (found["ranks_with_checks"], found["ranks_without_checks"]) == ("0,2", "1")
    assert found["checks_run"] == {"change": "0,2"}
    assert found["finalized"] == {"violation": "2"}
    assert [(one["code"], one["ranks"]) for one in found["by_code"]] == [("nan", "2"), ("unmoved", "2")]
    assert [one["ranks_that_did_not_see_it"] for one in found["by_code"]] == ["0", "0"]
    first = found["by_code"][0]["first"]
    assert (first["rank"], first["process"], first["attempt"]) == (2, process_of(2), 7)
    assert first["finding"]["names"] == ["fc.weight"]


def test_the_first_is_that_of_the_earliest_generation() -> None:
    """Attempts begin anew in each generation; of a restarted rank every process counts."""
    fold = CheckFindingsFold()
    fold.add_rank(0, [document(0, [finding("nan", 1, "late")], generation=1)])
    fold.add_rank(
        1,
        [
            document(1, [finding("nan", 0, "later")], generation=1),
            document(1, [finding("nan", 90, "early"), finding("nan", None, "unknown")]),
        ],
    )
    (kind,) = _records(fold)["by_code"]
    assert (kind["first"]["generation"], kind["first"]["attempt"], kind["first"]["rank"]) == (0, 90, 1)
    assert kind["first"]["finding"]["names"] == ["early"]
    assert [(one["rank"], one["process"], one["num_findings"]) for one in kind["by_rank"]] == [
        (1, "00000001", 3),
        (0, "00010000", 1),
    ]
    assert kind["by_rank"][0]["names"] == ["later", "early", "unknown"]


def test_a_finding_without_an_attempt_says_so() -> None:
    """Null, and no number that stands for it."""
    fold = CheckFindingsFold()
    fold.add_rank(0, [document(0, [finding("nan", None)])])
    (kind,) = _records(fold)["by_code"]
    assert kind["first"]["attempt"] is None
    assert kind["by_rank"][0]["attempt"] is None


def test_the_section_of_many_ranks_and_codes_is_small() -> None:
    """What is left out is counted: codes, ranks of a code, reasons; names of ranks are text."""
    fold = CheckFindingsFold()
    num_ranks, num_codes = 1024, MAX_SHOWN + 7
    for rank in range(num_ranks):
        seen = [finding(f"code-{one:03d}", rank + one, f"layer.{rank}") for one in range(num_codes)]
        reasons = tuple({"check": "change", "reason": f"r{one:03d}: on {rank}"} for one in range(num_codes))
        fold.add_rank(
            rank, [document(rank, seen, unavailable=reasons, counters={"truncated_findings": {"x": 2}})]
        )
    section = _records(fold)
    assert (len(section["by_code"]), section["codes_left_out"]) == (MAX_SHOWN, 7)
    assert (len(section["unavailable"]), section["unavailable_left_out"]) == (MAX_SHOWN, 7)
    assert section["unavailable"][0] == {
        "check": "change",
        "reason": "r000",
        "detail": "on 0",
        "names": [],
        "ranks": "0-1023",
    }
    kind = section["by_code"][0]
    assert (kind["ranks"], kind["ranks_that_did_not_see_it"]) == ("0-1023", "")
    assert [one["rank"] for one in kind["by_rank"]] == list(range(MAX_SHOWN_RANKS))
    assert kind["ranks_left_out"] == num_ranks - MAX_SHOWN_RANKS
    assert section["findings_not_kept"] == 2 * num_ranks
    assert section["ranks_with_findings_not_kept"] == "0-1023"
    assert len(str(section)) < 1_000_000


def test_a_world_without_checks_says_nothing_was_looked_at(tmp_path: Path) -> None:
    """No rank has checks, so that no rank failed to see anything."""
    run = RunFolder(tmp_path / "run").run()
    run.manifest(0)
    section: Any = merge_run(run.url).result["findings"]
    assert (section["ranks_with_checks"], section["ranks_without_checks"]) == ("", "0")
    assert section["by_code"] == section["unavailable"] == []


def _records(fold: CheckFindingsFold) -> Any:
    return fold.record()
