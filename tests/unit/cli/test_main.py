"""The command line: exit codes, streams, and one sentence for a mistake."""

import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from merge.run_folder import RunFolder, counted, process_of, whole_run
from torchinstruments import __version__
from torchinstruments.checks import Action, Finding, Severity
from torchinstruments.checks.findings import Moment
from torchinstruments.cli.main import main
from torchinstruments.merge import engine, merge_run
from torchinstruments.records import Counters, ErrorRecord, Member
from torchinstruments.store.manifest import TableState


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that has to fail, and returns its one sentence."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("read ")]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


def test_merge_of_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A complete merge exits with 0, says so on standard output, and names the result."""
    run = whole_run(tmp_path / "run")
    for rank in range(2):
        counted(run, rank, history_rows=5)
    run.history(0, [{"sample_id": 0, "metric": "std", "value": 1.0}], process_of(0), 1)
    run.history(1, [{"sample_id": 0, "metric": "std", "value": 3.0}], process_of(1), 1)
    assert main(["merge", run.url]) == 0
    out = capsys.readouterr().out
    assert "run run-a: complete" in out
    assert "2 ranks (0-1)" in out
    assert f"{run.url}/merged/result.json" in out
    assert (
        "aligned      4 samples by generation, attempt, forward_in_attempt; 100.0% common to 2 ranks" in out
    )
    assert (
        "widest between ranks: std or mean of each layer's signal, at its widest forward\nspread = (" in out
    )
    headings = ["layer", "signal", "metric", "generation", "attempt", "forward"]
    headings += ["lowest", "rank of lowest", "highest", "rank of highest", "spread"]
    assert re.split(r"  +", out.splitlines()[-2].strip()) == headings
    assert " ".join(out.splitlines()[-1].split()) == "fc output mean 0 0 0 3 0 13 1 76.9%"


def test_merge_names_the_one_rank_that_is_off_among_equal_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the others hold the same, the line has the rank, its value and theirs."""
    run = whole_run(tmp_path / "run", 4)
    for rank in range(4):
        values = [1.0, 1000.0 if rank == 2 else 1.0, 1.0, 1.0]
        rows = [{"sample_id": i, "attempt": i, "value": value} for i, value in enumerate(values)]
        run.history(rank, rows, process_of(rank))
    assert main(["merge", run.url]) == 0
    assert (
        "  furthest     rank 2, in generation 0, attempt 1, forward 0: fc output mean 1000, "
        "where half of the ranks or more hold 1"
    ) in capsys.readouterr().out.splitlines()


def test_the_widest_tensors_are_compared_at_one_forward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that stopped early differs in nothing from ranks that went on and held the same until then."""
    run = whole_run(tmp_path / "run", 3, num_samples=10)
    for rank in range(3):
        rows: list[dict[str, Any]] = []
        for i in range(2 if rank == 1 else 10):
            own = {"sample_id": i, "attempt": i, "metric": "std"}
            rows.append(own | {"value": 1.0 + i})
            scale = 2.0 if rank == 2 and i == 1 else 1.0
            rows.append(own | {"layer": "head", "value": 3.0 * scale, "loss_scale": scale})
        run.history(rank, rows, process_of(rank))
    main(["merge", run.url])
    headings, *rows_shown = capsys.readouterr().out.splitlines()[-3:]
    assert headings.endswith("ranks differ in")
    assert [row.split() for row in rows_shown] == [
        ["head", "output", "std", "0", "1", "0", "3", "0", "6", "2", "50.0%", "loss_scale"],
        ["fc", "output", "std", "0", "0", "0", "1", "0", "1", "0", "0.0%"],
    ]


def test_merge_names_ranks_that_no_leader_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two starts of one rank that counted the same samples exit with 1, and both lines name the rank."""
    run = whole_run(tmp_path / "run", 1)
    later = {"started_at": "2026-02-01T00:00:00+00:00", "written_at": "2026-02-01T01:00:00+00:00"}
    tables = {"samples": TableState(next_part=1, rows=1)}
    run.manifest(0, "000000f1", verified=False, tables=tables, last_sample_id=0, **later)
    run.samples(0, [{"sample_id": 0, "started_at": datetime(2026, 2, 1, tzinfo=UTC)}], "000000f1")
    assert main(["merge", run.url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (
        f"  overlap      rank 0 of generation 0 was held by several processes, which gave out the same "
        f"sample ids: {process_of(0)}, 000000f1"
    ) in lines
    assert "  unverified   1 rank (0): began without an answer of leader or store" in lines


def test_merge_with_a_missing_rank_and_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A merge with something missing or set aside exits with 1 and names both."""
    run = whole_run(tmp_path / "run", 3)
    for path in sorted((run.root / "rank-001").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    run.write("rank-002/history.parts/part-0000000c-000001.parquet", b"")
    counted(run, 2)
    assert main(["merge", run.url]) == 1
    out = capsys.readouterr().out
    assert "NOT COMPLETE" in out
    assert "missing      1 rank (1)" in out
    assert "rank-002/history.parts/part-0000000c-000001.parquet: empty_file" in out


def test_the_answers_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind the headline stand steps, replicas, the first nonfinite value and late ranks, by place."""
    run = whole_run(tmp_path / "run", 3)
    for rank in range(3):
        run.manifest(rank, process_of(rank))
        gap_s = 0.3 if rank == 1 else 0.01
        steps: list[dict[str, Any]] = [
            {"attempt": i, "gap_s": gap_s, "backward_s": 0.5 - gap_s} for i in range(20)
        ]
        for step in steps[15:]:
            step["last_micro_batch_sync"] = "local" if rank == 0 else "synced"
        if rank == 2:
            steps[7]["outcome"] = "skipped"
        run.steps(rank, steps, process_of(rank))
        digests = [{"attempt": i, "digest": 1 + (rank == 2 and 4 <= i < 6)} for i in range(10)]
        run.fingerprints(rank, digests, process_of(rank))
        nonfinite = {"metric": "nonfinite_fraction", "signal": "output_gradient", "loss_scale": 1024.0}
        row = {"sample_id": 3, "attempt": 3, "value": float(rank == 1)}
        run.history(rank, [row | nonfinite], process_of(rank), 1)
    assert main(["merge", run.url]) == 0
    head = capsys.readouterr().out.splitlines()[1:7]
    assert [line[:15].strip() for line in head] == [
        "same steps",
        "outcomes",
        "replicas",
        "nonfinite",
        "late",
        "NOT SYNCED",
    ]
    same_steps, outcomes, replicas, nonfinite, late, unsynchronised = (line[15:] for line in head)
    assert same_steps.startswith("NO, 1 of 20 attempts differ, first in generation 0, attempt 7: ")
    assert same_steps.endswith("outcome skipped on rank 2, applied on ranks 0-1")
    assert outcomes == "optimizer steps: 20 applied on each of ranks 0-1; 19 applied, 1 skipped on rank 2"
    assert replicas.startswith(
        "DIFFER, first in generation 0, attempt 4: fc.weight 0000000000000002 on rank 2"
    )
    assert replicas.endswith("0000000000000001 on ranks 0-1; equal again in generation 0, attempt 6")
    assert nonfinite.startswith("FIRST on rank 1, in generation 0, attempt 3, forward 0, backward: fc ")
    assert nonfinite.endswith("output_gradient, at loss scale 1024")
    assert late.startswith(
        "rank 1 on host-a by its own work, 0.29 s an attempt (55% of its time), generation 0"
    )
    assert late.endswith("; ranks 0,2 wait for it")
    assert unsynchronised.startswith("5 steps applied to gradients that were not synchronised")
    assert unsynchronised.endswith("first in generation 0, attempt 15, rank 0")


@pytest.mark.parametrize(
    ("skipped", "abandoned", "line"),
    [
        ([1, 1], [0, 0], "optimizer steps: 3 applied, 1 skipped on each of ranks 0-1"),
        ([0], [1], "optimizer steps: 3 applied, 1 abandoned on rank 0"),
        (
            [0, 3, 2, 1, 3],
            [1, 1, 1, 1, 1],
            (
                "optimizer steps by rank: 0 (rank 1) to 3 (rank 0) applied, "
                "0 (rank 0) to 3 (rank 1) skipped, 1 abandoned on each"
            ),
        ),
    ],
)
def test_skipped_and_abandoned_steps_are_counted_by_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], skipped: list[int], abandoned: list[int], line: str
) -> None:
    """Where all ranks skipped the same steps it says that they skipped; no count is a sum over ranks."""
    run = whole_run(tmp_path / "run", len(skipped))
    for rank, (of_skipped, of_abandoned) in enumerate(zip(skipped, abandoned, strict=True)):
        run.manifest(rank, process_of(rank))
        outcomes = ["skipped"] * of_skipped + ["abandoned"] * of_abandoned
        outcomes += ["applied"] * (4 - len(outcomes))
        steps = [{"attempt": i, "outcome": outcome} for i, outcome in enumerate(outcomes)]
        run.steps(rank, steps, process_of(rank))
    assert main(["merge", run.url]) == 0
    assert f"  outcomes     {line}" in capsys.readouterr().out.splitlines()


def test_what_is_not_known_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without steps, fingerprints and telling statistics is told to be unknown, not to be well."""
    assert main(["merge", whole_run(tmp_path / "run").url]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()[1:5]]
    assert lines == [
        "same steps   not known: no two ranks have the same attempt",
        "replicas     not known: the run has no fingerprints (fingerprints=True takes them)",
        "nonfinite    not known: no statistic of this run tells",
        "late         not known: the run has no steps",
    ]


def test_what_ended_processes_is_told_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that died says so though nothing is missing, the rank that raised before those it took along."""
    run = whole_run(tmp_path / "run", 4)
    tables = {name: TableState(next_part=1, rows=4) for name in ("history", "samples")}
    for rank, kind in enumerate(("SIGTERM", "SIGTERM", "ValueError", "")):
        ends = (ErrorRecord("process", "", kind, "ended"),) if kind else ()
        run.manifest(rank, process_of(rank), tables=tables, errors=ends, last_sample_id=3)
    assert main(["merge", run.url]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "ended by     ValueError on rank 2, SIGTERM on ranks 0-1" in lines


def test_one_rank_is_compared_with_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is called unknown that only several ranks could tell, and one that waits is one."""
    run = whole_run(tmp_path / "run", 1)
    assert main(["merge", run.url]) == 0
    text = "same steps   not asked: the run has one rank, and none to compare it with"
    assert capsys.readouterr().out.splitlines()[1].strip() == text
    assert "  steps: of one rank, which has none to be compared with\n" in repr(merge_run(run.url))
    run = whole_run(tmp_path / "pair", 2)
    assert "not judged (no fingerprints)" in repr(merge_run(run.url))
    for rank, gap_s in enumerate((0.3, 0.01)):
        steps = [{"attempt": i, "gap_s": gap_s, "backward_s": 0.5 - gap_s} for i in range(20)]
        run.steps(rank, steps, process_of(rank))
        run.manifest(rank, process_of(rank))
    assert main(["merge", run.url]) == 0
    assert "(55% of its time), generation 0; rank 1 waits for it\n" in capsys.readouterr().out


def test_what_a_run_that_goes_on_may_still_write_is_not_known_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its first rows nobody can say that a run takes no fingerprints, and no steps."""
    run = whole_run(tmp_path / "run")
    run.manifest(1, process_of(1), status="running", written_at=datetime.now(UTC).isoformat())
    assert main(["merge", run.url]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()[1:5]]
    assert lines == [
        "same steps   not known yet: no two ranks have the same attempt",
        (
            "replicas     not known yet: none of the ranks, which still run, has written fingerprints "
            "(fingerprints=True takes them)"
        ),
        "nonfinite    not known yet: no statistic of this run tells",
        "late         not known yet: none of the ranks, which still run, has written steps",
    ]


def _found(
    code: str, severity: Severity, names: tuple[str, ...] = ("fc.weight",), attempt: int = 3
) -> dict[str, object]:
    moment = Moment(attempt=attempt)
    return Finding("change", code, severity, Action.COLLECT, "seen", names, moment=moment).to_dict()


def test_what_checks_found_is_told_by_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, the gravest first, with the ranks that saw it and those that did not."""
    run = whole_run(tmp_path / "run", 4)
    critical, info = Severity.CRITICAL, Severity.INFO
    several = ("fc.weight", "fc.bias", "out.bias")
    seen = [_found("unmoved", Severity.WARNING), _found("nan", critical, several), _found("fact", info)]
    reason = {"check": "change", "reason": "no_hook_fired: flat"}
    lost = {"truncated_findings": {"info/fact": 7}}
    run.checks(0, [{"checks_run": ["change"]}], process_of(0))
    run.checks(1, [{"findings": seen, "unavailable": [reason], "counters": lost}], process_of(1))
    run.checks(2, [{"findings": [_found("nan", critical, attempt=9)]}], process_of(2))
    assert main(["merge", run.url]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first = "first on rank 1 in generation 0, attempt 3, fc.weight"
    assert [line[13:] for line in lines if line.startswith("checks ")] == [
        f"CRITICAL nan on ranks 1-2, {first} and 2 more; not on rank 0",
        f"WARNING unmoved on rank 1, {first}; not on ranks 0,2",
        "1 kind of finding in result.json, further ones",
        "rank 3 had none",
        "1 reason why something could not be looked at, in result.json",
        "7 findings of rank 1 were counted and not kept",
    ]


def test_checks_that_found_nothing_say_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Silence would not tell a run that is well from one without checks; that one has no line."""
    run = whole_run(tmp_path / "run", 2)
    assert main(["merge", run.url]) == 0
    assert "  checks " not in capsys.readouterr().out
    for rank in range(2):
        run.checks(rank, [{"checks_run": ["frozen", "change"]}], process_of(rank))
    assert main(["merge", run.url]) == 0
    assert "  checks       nothing found; ran: change, frozen\n" in capsys.readouterr().out
    run.checks(1, [{"findings": [_found("fact", Severity.INFO)]}], process_of(1))
    assert main(["merge", run.url]) == 0
    lines = capsys.readouterr().out
    assert "  checks       1 kind of finding in result.json, none graver than information\n" in lines


def test_the_tenth_code_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five kinds have lines."""
    run = whole_run(tmp_path / "run", 1)
    run.checks(
        0, [{"findings": [_found(f"code{one}", Severity.WARNING) for one in range(10)]}], process_of(0)
    )
    assert main(["merge", run.url]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  checks ")]
    assert [line.split()[2] for line in lines[:5]] == [f"code{one}" for one in range(5)]
    assert lines[5:] == ["  checks       5 kinds of findings in result.json, further ones"]


def test_json_goes_to_standard_output_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json standard output is the result as written; everything else goes to standard error."""
    run = whole_run(tmp_path / "run")
    assert main(["merge", "--json", run.url]) == 0
    captured = capsys.readouterr()
    assert captured.out == (run.root / "merged" / "result.json").read_text()
    assert "complete" in captured.err


def test_progress_is_a_line_each_tenth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, progress is one plain line on standard error for each 10 percent."""
    run = whole_run(tmp_path / "run", 30, num_samples=1)
    assert main(["merge", run.url]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("read ")]
    assert lines == [f"read {done} of 30 ranks ({done * 100 // 30}%)" for done in range(3, 31, 3)]


def test_output_and_ranks(tmp_path: Path) -> None:
    """--output and --ranks go where they say and read what they say."""
    run = whole_run(tmp_path / "run", 4)
    assert main(["merge", run.url, "--output", str(tmp_path / "out"), "--ranks", "1-2"]) == 0
    result: Any = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["coverage"]["present_ranks"] == [1, 2]
    assert not (run.root / "merged").exists()


def test_many_ranks_are_shown_by_their_extremes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names the lowest and the highest of many ranks, and the forward."""
    run = whole_run(tmp_path / "run", 12, num_samples=1)
    for rank in range(12):
        counted(run, rank)
        run.history(
            rank,
            [{"sample_id": 0, "metric": "std", "value": 1000.0 + 1000.0 * (rank == 7)}],
            process_of(rank),
            1,
        )
    assert main(["merge", run.url]) == 0
    shown = capsys.readouterr().out.splitlines()[-1].split()
    assert shown == ["fc", "output", "std", "0", "0", "0", "1000", "0", "2000", "7", "50.0%"]


def test_parameters_are_told_apart_by_name_and_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer has several of them, and a gradient several stages."""
    run = whole_run(tmp_path / "run", num_samples=1)
    for rank in range(2):
        counted(run, rank)
        rows = [
            {"signal": "parameter_gradient", "stage": stage, "tensor_path": path, "metric": "std"}
            | {"sample_id": 0, "value": 1.0 + rank * share}
            for stage, path, share in (("local_accumulated", "weight", 3.0), ("reduced", "bias", 1.0))
        ]
        run.history(rank, rows, process_of(rank), 1)
    assert main(["merge", run.url]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert lines == [
        "fc parameter_gradient local_accumulated weight std 0 0 0 1 0 4 1 75.0%",
        "fc parameter_gradient reduced bias std 0 0 0 1 0 2 1 50.0%",
    ]


def test_names_are_never_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer whose name looks like markup is shown as it is."""
    run = whole_run(tmp_path / "run")
    for rank in range(2):
        counted(run, rank, history_rows=5)
        row = {"sample_id": 0, "layer": "blocks[red]", "metric": "std", "value": 1.0 + rank}
        run.history(rank, [row], process_of(rank), 1)
    assert main(["merge", run.url]) == 0
    assert "blocks[red]" in capsys.readouterr().out


def test_a_mistake_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake of the user exits with 2 and one sentence that names the thing."""
    run = whole_run(tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in complaint(capsys, "merge", str(empty))
    assert "nowhere" in complaint(capsys, "merge", str(tmp_path / "nowhere"))
    assert "nope" in complaint(capsys, "merge", "nope://bucket/run")
    assert "gcsfs" in complaint(capsys, "merge", "gs://bucket/run")
    assert "--storage-options" in complaint(capsys, "merge", "--storage-options", "{secret", run.url)
    assert "list" in complaint(capsys, "merge", "--storage-options", "[1]", run.url)
    assert "'x'" in complaint(capsys, "merge", "--ranks", "x", run.url)
    assert "'7'" in complaint(capsys, "merge", "--ranks", "7", run.url)
    assert str(empty) in complaint(capsys, "status", str(empty))
    file = run.write("file", b"")
    assert str(file) in complaint(capsys, "merge", "--output", str(file), run.url)


def test_storage_options_are_never_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --storage-options held does not appear in the complaint about it."""
    assert "hunter2" not in complaint(
        capsys, "merge", "--storage-options", '{"secret": "hunter2"', str(tmp_path)
    )


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """--version and --help exit with 0, and a command that does not exist with 2."""
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "merge" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["fly"]) == 2


def test_interrupted_by_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C exits with 130 and says nothing."""
    run = whole_run(tmp_path / "run")

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "plan_merge", interrupt)
    assert main(["merge", run.url]) == 130
    assert capsys.readouterr().err == ""


def test_status_of_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A live run lists each rank with its manifest's age, its last sample, rows, spool, and exits with 0."""
    run = whole_run(tmp_path / "run")
    five_minutes_ago = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - 300))
    manifest = run.manifest(
        1,
        process_of(1),
        status="running",
        last_sample_id=41,
        last_sample_at=five_minutes_ago,
        tables={"history": TableState(next_part=1, rows=3000, rows_in_spool=20)},
        counters=Counters(samples=42, errors={"reducer": 3}),
    )
    three_minutes_ago = time.time() - 180
    os.utime(manifest, (three_minutes_ago, three_minutes_ago))
    assert main(["status", run.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run run-a: 2 ranks, 1 generation"
    headings = "rank status host as of last sample id its age measured rows stored in spool dropped errors"
    assert " ".join(lines[1].split()) == headings
    assert lines[-1].split() == [
        *("1", "running", "host-a", "3", "min", "ago", "41", "5", "min", "42", "3,000", "20", "0", "3")
    ]


def test_status_shows_the_process_that_began_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two processes of one rank and generation the later one stands in the table, whatever their names."""
    run = whole_run(tmp_path / "run", 1)
    run.manifest(0, "ffff0000", started_at="2026-01-01T00:00:00Z", counters=Counters(samples=11))
    run.manifest(0, "00000001", started_at="2026-01-02T00:00:00+00:00", counters=Counters(samples=22))
    run.manifest(0, process_of(0), started_at="2026-01-01T23:00:00+00:00", counters=Counters(samples=33))
    main(["status", "--json", run.url])
    captured = capsys.readouterr()
    document: Any = json.loads(captured.out)
    assert [one["samples"] for one in document["ranks"]] == [11, 33, 22]
    table = captured.err.splitlines()
    assert table[0] == "run run-a: 1 rank, 1 generation"
    assert table[2].split()[-5] == "22"
    assert table[3] == "2 earlier processes of these ranks not shown; --json has all"


def test_status_tells_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing rank, an interrupted one, dropped rows or a bad manifest exit with 1."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    run.generation()
    run.manifest(0, process_of(0))
    assert main(["status", run.url]) == 1
    assert "missing: 1 rank (1)" in capsys.readouterr().out
    path = run.manifest(1, process_of(1), status="running")
    assert main(["status", run.url]) == 0
    os.utime(path, (1e9, 1e9))
    assert main(["status", run.url]) == 1
    assert "interrupted" in capsys.readouterr().out
    run.manifest(1, process_of(1), tables={"history": TableState(rows_dropped=2)})
    assert main(["status", run.url]) == 1
    run.manifest(1, process_of(1))
    run.write("rank-001/process-0000abcd.json", b"{}")
    assert main(["status", run.url]) == 1
    assert "rank-001/process-0000abcd.json: " in capsys.readouterr().out


def test_status_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the status is one document with every process, those of earlier generations too."""
    run = whole_run(tmp_path / "run")
    run.generation(1, world_size=1)
    run.manifest(0, "0000beef", generation=1, world_size=1)
    assert main(["status", "--json", run.url]) == 0
    captured = capsys.readouterr()
    document: Any = json.loads(captured.out)
    assert [(one["rank"], one["generation"]) for one in document["ranks"]] == [(0, 0), (0, 1), (1, 0)]
    assert document["expected_ranks"] == [0, 1]
    assert all(one["manifest_age_s"] >= 0 for one in document["ranks"])
    assert document["runs_beside"] == []
    assert "1 earlier process" in captured.err


def test_a_run_without_rows_is_not_just_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where every rank closed and none sampled, the first line of the merge says so, and it exits with 1."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    members = [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(2)]
    run.generation(0, members)
    for rank in range(2):
        run.manifest(rank, process_of(rank))
    assert main(["merge", run.url]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "run run-a: complete, but no sample was taken"
    assert "aligned" not in out
    run.manifest(1, process_of(1), status="running")
    assert main(["merge", run.url]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "run run-a: NOT COMPLETE, and no sample was found"


def test_a_run_that_is_still_written_is_merged_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that still write are named, what they wrote so far counts, and the exit code is 1."""
    run = whole_run(tmp_path / "run")
    run.manifest(1, process_of(1), status="running", tables={"history": TableState(next_part=1, rows=4)})
    run.write(f"rank-001/history.parts/.part-{process_of(1)}-000001.parquet.0123.tmp", b"PAR1")
    assert main(["merge", run.url]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "run run-a: NOT COMPLETE"
    assert "  running      1 rank (1)" in out.splitlines()
    assert "  read         8 rows of 8 samples" in out.splitlines()
    assert "set aside" not in out
    run.manifest(1, process_of(1), tables={"history": TableState(next_part=1, rows=4)})
    assert main(["merge", run.url]) == 0


def test_one_rank_is_compared_with_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merge of a world of one has no line on what the ranks have in common."""
    run = whole_run(tmp_path / "run", 1)
    assert main(["merge", run.url]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "run run-a: complete"
    assert "aligned" not in out


@pytest.mark.parametrize("command", ["merge", "status"])
def test_runs_that_lie_beside_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A folder in which further runs lie says so in one line with their ids; they are not part of the run."""
    run = whole_run(tmp_path / "run")
    assert main([command, run.url]) == 0
    assert "other run" not in capsys.readouterr().out
    whole_run(tmp_path / "run" / "run-later", run_id="later")
    assert main([command, run.url]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "1 other run lies beside this one, in run-<id>/: later"
    whole_run(tmp_path / "run" / "run-again", run_id="again")
    assert main([command, run.url]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "2 other runs lie beside this one, each in run-<id>/: again, later"
    assert "2 ranks" in out


@pytest.mark.parametrize("command", ["merge", "status"])
def test_a_folder_without_a_run_may_be_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Where there is no run.json, the sentence leaves open that the job has not attached yet."""
    assert "or the job has not attached yet" in complaint(capsys, command, str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("merge {whole}", 0),
        ("merge --json {whole}", 0),
        ("merge {partial}", 1),
        ("status {whole}", 0),
        ("compare {whole} {whole} --json", 0),
        ("compare {whole} {other} --max-change mean=0.1", 3),
        ("merge {whole}/nowhere", 2),
        ("--help", 0),
    ],
)
def test_a_closed_pipe_changes_nothing(merged_runs: dict[str, str], arguments: str, code: int) -> None:
    """Into a program that reads nothing, on both streams, a command does its work and has its exit code."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        command = [sys.executable, "-m", "torchinstruments", *arguments.format(**merged_runs).split()]
        quiet = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
        assert "Traceback" not in quiet.stderr
        assert "BrokenPipe" not in quiet.stderr
        assert quiet.returncode == code
        assert subprocess.run(command, stdout=pipe, stderr=pipe, check=False).returncode == code


@pytest.fixture(scope="module")
def merged_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two merged runs that differ, and one of which a rank is missing."""
    root = tmp_path_factory.mktemp("merged")
    whole, other, partial = (whole_run(root / name) for name in ("whole", "other", "partial"))
    other.history(1, [{"sample_id": one, "value": 100.0} for one in range(4)], process_of(1))
    for path in sorted((partial.root / "rank-001").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    for run in (whole, other):
        assert main(["merge", run.url]) == 0
    return {"whole": whole.url, "other": other.url, "partial": partial.url}


def test_status_says_where_rows_lie_and_how_to_get_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of an ended process in a spool are named with the host and the command that carries them."""
    run = whole_run(tmp_path / "run", 1)
    tables = {"history": TableState(next_part=1, rows=4, rows_in_spool=9)}
    run.manifest(0, process_of(0), tables=tables, spool_path="/spool/night 7/rank-000-0000000a")
    assert main(["status", run.url]) == 1
    out = capsys.readouterr().out
    assert "in the spool: 9 rows of rank 0; run on host-a: " in out
    assert "torchinstruments upload '/spool/night 7/rank-000-0000000a'" in out
