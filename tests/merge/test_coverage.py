"""What a merge says was expected and was there, and what it sets aside."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from merge.run_folder import RunFolder, counted, process_of, whole_rank, whole_run
from torchinstruments.errors import ConfigurationError, RunFormatError, StorageError
from torchinstruments.merge.engine import merge_run
from torchinstruments.records import Counters, Member, ModuleRecord
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.manifest import TableState
from torchinstruments.store.run import open_run


def coverage_of(run: RunFolder, **arguments: Any) -> dict[str, Any]:
    """Merges a run and returns the section."""
    coverage: Any = merge_run(run.url, **arguments).result["coverage"]
    return coverage


def test_a_whole_run_is_complete(tmp_path: Path) -> None:
    """A run in which every rank left everything is complete."""
    merged = merge_run(whole_run(tmp_path / "run").url)
    assert merged.complete
    coverage: Any = merged.result["coverage"]
    assert coverage["expected_ranks"] == coverage["present_ranks"] == [0, 1]
    assert coverage["complete"]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """Of a world of 3 where a rank left nothing, that rank is named and the others are merged."""
    run = RunFolder(tmp_path / "run", world_size=3).run()
    run.generation(0, [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(3)])
    whole_rank(run, 0)
    whole_rank(run, 2)
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    generations: Any = merged.result["generations"]
    assert not merged.complete
    assert (coverage["present_ranks"], coverage["missing_ranks"]) == ([0, 2], [1])
    assert generations[0]["missing_ranks"] == [1]
    assert set(merged.summary()["rank"]) == {0, 2}


def test_a_rank_with_a_manifest_and_no_rows_is_present(tmp_path: Path) -> None:
    """A rank that attached and measured nothing is there."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    run.generation()
    whole_rank(run, 0)
    run.manifest(1, process_of(1))
    coverage = coverage_of(run)
    assert (coverage["present_ranks"], coverage["missing_ranks"]) == ([0, 1], [])
    assert coverage["alignment"]["ranks_without_samples"] == [1]
    assert coverage["complete"]


def emptied(_: bytes) -> bytes:
    """A file that was opened and never written."""
    return b""


def truncated(data: bytes) -> bytes:
    """A file that was cut off."""
    return data[:200]


def garbage(_: bytes) -> bytes:
    """A file of something else."""
    return b"x" * 500


def damaged(data: bytes) -> bytes:
    """A file whose pages are damaged and whose footer is not."""
    return data[:4] + bytes(255 - byte for byte in data[4:600]) + data[600:]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (emptied, "empty_file"),
        (truncated, "truncated"),
        (garbage, "not_parquet"),
        (damaged, "unreadable"),
    ],
    ids=["zero-byte", "truncated", "not Parquet", "damaged page"],
)
def test_a_bad_part_is_set_aside(tmp_path: Path, spoil: Callable[[bytes], bytes], reason: str) -> None:
    """A bad part is named with its reason, leaves no trace in the numbers, and the rest is merged."""
    run = whole_run(tmp_path / "run")
    counted(run, 1)
    part = run.history(
        1, [{"sample_id": i, "value": -1e9, "layer": f"bad{i}"} for i in range(10, 400)], process_of(1), 1
    )
    part.write_bytes(spoil(part.read_bytes()))
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert not merged.complete
    [one] = coverage["quarantined"]
    assert one["file"] == f"rank-001/history.parts/part-{process_of(1)}-000001.parquet"
    assert one["reason"].startswith(reason)
    summary = merged.summary()
    assert summary["observations"].to_list() == [4, 4]
    assert summary["layer"].unique().to_list() == ["fc"]


def test_a_part_that_breaks_in_its_middle_counts_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part whose last pages are damaged leaves no trace of its sound first row groups either."""
    monkeypatch.setattr("torchinstruments.merge.parts.BATCH_ROWS", 1000)
    run = whole_run(tmp_path / "run")
    counted(run, 1)
    part = run.history(1, [{"sample_id": i, "value": float(i)} for i in range(10, 90_010)], process_of(1), 1)
    data = part.read_bytes()
    with pq.ParquetFile(part) as file:
        last = file.metadata.row_group(2).column(file.schema_arrow.get_field_index("value"))
    start = last.data_page_offset + 40
    wrecked = bytes(255 - byte for byte in data[start : start + 2000])
    part.write_bytes(data[:start] + wrecked + data[start + 2000 :])
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert coverage["quarantined"][0]["reason"].startswith("unreadable")
    assert merged.summary()["observations"].to_list() == [4, 4]


def test_a_rank_that_did_not_come_back_is_missing_from_its_generation(tmp_path: Path) -> None:
    """A rank that was there before a restart and not after it is present, and missing from the generation."""
    run = whole_run(tmp_path / "run")
    run.generation(1)
    run.manifest(0, "000000f0", generation=1)
    merged = merge_run(run.url)
    generations: Any = merged.result["generations"]
    coverage: Any = merged.result["coverage"]
    assert coverage["missing_ranks"] == []
    assert [generation["missing_ranks"] for generation in generations] == [[], [1]]
    assert not merged.complete


def test_an_unknown_schema_version_of_a_part_is_set_aside(tmp_path: Path) -> None:
    """A part of a later schema is set aside by its version."""
    run = whole_run(tmp_path / "run")
    counted(run, 0)
    run.history(0, [{"sample_id": 9, "value": 1.0}], process_of(0), 1, schema_version=99)
    [one] = coverage_of(run)["quarantined"]
    assert one["reason"] == "unknown_schema_version: 99"


def test_an_unknown_schema_version_of_the_run_is_refused(tmp_path: Path) -> None:
    """A run of a later schema is not merged at all."""
    run = RunFolder(tmp_path / "run", schema_version=99).run()
    with pytest.raises(RunFormatError, match="99"):
        merge_run(run.url)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    """A folder without run.json is no run, and nothing is written into it."""
    with pytest.raises(RunFormatError, match=r"run\.json"):
        merge_run(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_parts_of_another_run_are_counted_and_left_out(tmp_path: Path) -> None:
    """A part that another run left here is counted, not merged, and not called bad."""
    run = whole_run(tmp_path / "run")
    run.history(0, [{"sample_id": 9, "value": 99.0}], "000000ff", 0, run_id="run-b")
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert (coverage["foreign_parts"], coverage["quarantined"]) == (1, [])
    assert not merged.complete
    assert merged.summary()["maximum_value"].to_list() == [3.0, 13.0]


def test_a_file_that_is_no_part_is_named(tmp_path: Path) -> None:
    """A file between parts that has no part's name is set aside by name."""
    run = whole_run(tmp_path / "run")
    run.write("rank-000/history.parts/notes.txt", b"mine")
    [one] = coverage_of(run)["quarantined"]
    assert one == {"file": "rank-000/history.parts/notes.txt", "reason": "unexpected_name"}


def test_rows_that_disagree_are_reported_and_kept(tmp_path: Path) -> None:
    """Rows that tell another rank than their folder are reported with their number, and merged."""
    run = whole_run(tmp_path / "run")
    counted(run, 1, history_rows=6)
    rows = [{"sample_id": 9, "value": 9.0, "rank": 5}, {"sample_id": 10, "value": 10.0}]
    path = run.history(1, rows, process_of(1), 1)
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert coverage["disagreements"] == [
        {
            "file": str(path.relative_to(run.root)),
            "column": "rank",
            "found": "5",
            "expected": "1",
            "rows": 1,
        }
    ]
    assert coverage["quarantined"] == []
    assert merged.summary().filter(rank=1)["observations"].to_list() == [6]


def test_rows_of_another_generation_than_the_manifest_are_reported(tmp_path: Path) -> None:
    """Rows that tell another generation than the manifest of their process are reported."""
    run = whole_run(tmp_path / "run")
    counted(run, 0, history_rows=5)
    run.history(0, [{"sample_id": 9, "value": 9.0}], process_of(0), 1, generation=4)
    [one] = coverage_of(run)["disagreements"]
    assert (one["column"], one["found"], one["expected"], one["rows"]) == ("generation", "4", "0", 1)


def test_parts_that_a_manifest_counts_and_nobody_finds_are_lost(tmp_path: Path) -> None:
    """Parts that a manifest counts and that do not lie there are lost; gaps that it announces are not."""
    run = whole_run(tmp_path / "run")
    tables = {"history": TableState(next_part=5, missing=(2,)), "samples": TableState(next_part=1)}
    run.manifest(0, process_of(0), tables=tables)
    coverage = coverage_of(run)
    assert coverage["missing_parts"] == [
        {"rank": 0, "process": process_of(0), "table": "history", "parts": 3, "first_numbers": [1, 3, 4]}
    ]
    assert not coverage["complete"]


def test_dropped_and_spooled_rows_are_counted(tmp_path: Path) -> None:
    """Rows given up, or still in a host's spool, are counted and make a run incomplete."""
    run = whole_run(tmp_path / "run")
    tables = {"history": TableState(next_part=1, rows_dropped=3, rows_in_spool=40)}
    run.manifest(1, process_of(1), tables=tables, host="host-b", counters=Counters(rows_dropped=7, errors={}))
    coverage = coverage_of(run)
    assert (coverage["rows_dropped"], coverage["rows_in_spool"]) == (7, {"host-b": 40})
    assert not coverage["complete"]


def test_a_silent_manifest_means_an_interrupted_rank(tmp_path: Path) -> None:
    """A running process whose manifest is long overdue by the store's times counts as interrupted."""
    run = whole_run(tmp_path / "run")
    path = run.manifest(1, process_of(1), status="running")
    run.manifest(0, process_of(0), status="running")
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    coverage = coverage_of(run)
    assert (coverage["interrupted_ranks"], coverage["running_ranks"]) == ([1], [0])


def test_a_process_of_an_earlier_generation_is_over(tmp_path: Path) -> None:
    """A process that never closed and whose group restarted is interrupted, however fresh its manifest."""
    run = whole_run(tmp_path / "run")
    run.manifest(1, process_of(1), status="running")
    run.generation(1, [Member(0, "000000f0", "host-a", 0, observing=True)], world_size=1)
    run.manifest(0, "000000f0", generation=1, world_size=1)
    assert coverage_of(run)["interrupted_ranks"] == [1]


def test_a_rank_number_held_twice_at_once_is_an_overlap(tmp_path: Path) -> None:
    """Two processes that held one rank at the same time are named; one after the other they are not."""
    run = whole_run(tmp_path / "run")
    run.manifest(1, "000000f1")
    found = coverage_of(run)["overlapping_ranks"]
    assert found == [
        {"rank": 1, "generation": 0, "processes": [process_of(1), "000000f1"], "same_sample_ids": False}
    ]
    run.manifest(
        1, "000000f1", started_at="2026-02-01T00:00:00+00:00", written_at="2026-02-01T01:00:00+00:00"
    )
    assert coverage_of(run)["overlapping_ranks"] == []


def test_two_starts_that_counted_the_same_sample_ids_are_an_overlap(tmp_path: Path) -> None:
    """One after the other they held a rank of one generation, which the store would have counted apart."""
    run = whole_run(tmp_path / "run", 1)
    later = {"started_at": "2026-02-01T00:00:00+00:00", "written_at": "2026-02-01T01:00:00+00:00"}
    table = {"samples": TableState(next_part=1, rows=2)}
    run.manifest(0, "000000f1", verified=False, tables=table, last_sample_id=1, **later)
    at = datetime(2026, 2, 1, tzinfo=UTC)
    run.samples(0, [{"sample_id": one, "started_at": at} for one in range(2)], "000000f1")
    coverage = coverage_of(run)
    assert coverage["overlapping_ranks"] == [
        {"rank": 0, "generation": 0, "processes": [process_of(0), "000000f1"], "same_sample_ids": True}
    ]
    assert coverage["unverified_ranks"] == [0]
    assert not coverage["complete"]
    # Those of another generation begin elsewhere, and of the same one ids that go on are nobody else's.
    run.samples(0, [{"sample_id": 4 + one, "started_at": at} for one in range(2)], "000000f1")
    assert coverage_of(run)["overlapping_ranks"] == []


@pytest.mark.parametrize(
    ("policy", "members", "complete", "expected", "known"),
    [
        ("all", [], False, [0, 1, 2], True),
        ("all", [(0, True), (1, False), (2, True)], True, [0, 2], True),
        ("rank0", [], False, [0], True),
        ("ranks:0,2,9", [], False, [0, 2], True),
        ("node", [(0, True), (1, False), (2, True)], True, [0, 2], True),
        ("node", [(0, True)], False, [0], False),
        ("callable:mine", [], False, [], False),
    ],
)
def test_the_rank_policy_tells_who_is_expected(
    tmp_path: Path,
    policy: str,
    members: list[tuple[int, bool]],
    complete: bool,
    expected: list[int],
    known: bool,
) -> None:
    """Expected ranks come from policy and members; where these do not tell, the section says so."""
    run = RunFolder(tmp_path / "run", world_size=3, rank_policy=policy).run()
    run.generation(
        0,
        [Member(rank, process_of(rank), "host-a", rank, observing=observing) for rank, observing in members],
        complete=complete,
    )
    run.manifest(0, process_of(0))
    coverage = coverage_of(run)
    assert (coverage["expected_ranks"], coverage["expected_ranks_known"]) == (expected, known)


def test_a_run_is_not_complete_while_nobody_knows_who_was_expected(tmp_path: Path) -> None:
    """A policy that only ranks themselves can apply, and a leader that did not hear of all: exit code 1."""
    run = RunFolder(tmp_path / "run", world_size=2, rank_policy="callable:mine").run()
    member = Member(0, process_of(0), "host-a", 0, observing=True)
    run.generation(0, [member], complete=False)
    whole_rank(run, 0)
    assert not coverage_of(run)["complete"]
    run.generation(0, [member, Member(1, process_of(1), "host-a", 1, observing=False)], complete=True)
    assert coverage_of(run)["complete"]


def test_without_generations_the_run_tells_who_is_expected(tmp_path: Path) -> None:
    """Where no generation was recorded, the world of run.json counts."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    whole_rank(run, 0)
    assert coverage_of(run)["missing_ranks"] == [1]


def test_alignment_tells_the_share_of_common_samples(tmp_path: Path) -> None:
    """Samples are matched by generation, attempt and forward, not by id; missed ones do not count."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    run.generation()
    run.manifest(0, process_of(0))
    run.manifest(1, process_of(1))
    run.samples(0, [{"sample_id": i, "attempt": 10 + i} for i in range(4)], process_of(0))
    run.samples(
        1,
        [
            {"sample_id": 0, "attempt": 11},
            {"sample_id": 1, "attempt": 12, "state": "forward_complete"},
            {"sample_id": 1, "attempt": 12},
            {"sample_id": 2, "attempt": 13, "state": "missed"},
        ],
        process_of(1),
    )
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    ranks: Any = merged.result["ranks"]
    alignment = coverage["alignment"]
    assert alignment["key"] == ["generation", "attempt", "forward_in_attempt"]
    assert (alignment["samples"], alignment["samples_common_to_all_ranks"]) == (4, 2)
    assert alignment["share_common_to_all_ranks"] == 0.5
    assert [(rank["samples"], rank["missed_samples"]) for rank in ranks] == [(4, 0), (2, 1)]


def _generations_of(tmp_path: Path, ranks: list[list[int]], world_sizes: list[int]) -> dict[str, Any]:
    """Returns the alignment of a run in which the ranks of each generation have four samples each."""
    run = RunFolder(tmp_path / "run", world_size=world_sizes[0]).run()
    for generation, world_size in enumerate(world_sizes):
        run.generation(generation, world_size=world_size)
        for rank in range(world_size):
            process = f"{generation}{rank:07x}"
            run.manifest(rank, process, generation=generation)
            if rank in ranks[generation]:
                rows = [{"sample_id": one, "attempt": one} for one in range(4)]
                run.samples(rank, rows, process, generation=generation)
    return coverage_of(run)["alignment"]


def test_a_sample_is_judged_by_the_ranks_of_its_generation(tmp_path: Path) -> None:
    """Three ranks, then two after a restart: each measured whatever it could."""
    alignment = _generations_of(tmp_path, [[0, 1, 2], [0, 1]], [3, 2])
    assert (alignment["ranks"], alignment["samples"], alignment["samples_common_to_all_ranks"]) == (3, 8, 8)
    assert alignment["share_common_to_all_ranks"] == 1.0


def test_a_rank_that_measured_nothing_in_one_generation_leaves_nothing_common_there(tmp_path: Path) -> None:
    """It was expected there, and it measured in another one."""
    alignment = _generations_of(tmp_path, [[0, 1, 2], [0, 1]], [3, 3])
    assert (alignment["samples"], alignment["samples_common_to_all_ranks"]) == (8, 4)
    assert alignment["share_common_to_all_ranks"] == 0.5


def test_without_attempts_forwards_are_matched_by_index(tmp_path: Path) -> None:
    """Where no optimizer was seen, samples are matched by the index of their forward."""
    run = RunFolder(tmp_path / "run", world_size=2).run()
    for rank in range(2):
        run.manifest(rank, process_of(rank))
        rows = [{"sample_id": i, "attempt": None, "forward_index": 7 * i + rank} for i in range(2)]
        run.samples(rank, rows, process_of(rank))
    alignment = coverage_of(run)["alignment"]
    assert alignment["key"] == ["generation", "forward_index"]
    assert alignment["share_common_to_all_ranks"] == 0.0


def test_modules_that_never_fired_are_listed_with_their_ranks(tmp_path: Path) -> None:
    """A layer that never fired is listed; one with values in spite of a stale catalog is not."""
    run = whole_run(tmp_path / "run", 2)
    for rank in range(2):
        modules = [
            ModuleRecord("fc", "Linear", (), 1, 1, fired=0),
            ModuleRecord("unused", "Linear", ("old",), 1, 1, fired=0),
            ModuleRecord("odd", "Linear", (), 1, 1, fired=rank),
        ]
        run.catalog(rank, modules, process_of(rank))
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    layers: Any = merged.result["layers"]
    assert coverage["modules_never_fired"] == [
        {"layer": "unused", "type": "Linear", "ranks": "0-1", "reasons": {"not_called": "0-1"}},
        {"layer": "odd", "type": "Linear", "ranks": "0", "reasons": {"not_called": "0"}},
    ]
    assert [layer["layer"] for layer in layers] == ["fc", "unused", "odd"]
    assert (layers[1]["tensors"], layers[1]["aliases"]) == ([], ["old"])


def test_a_bad_document_is_set_aside(tmp_path: Path) -> None:
    """A catalog and a manifest that cannot be read are named, and the rank is merged from its parts."""
    run = whole_run(tmp_path / "run")
    run.write(f"rank-001/modules-{process_of(1)}.json", b"{")
    run.write(f"rank-001/process-{process_of(1)}.json", b"")
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    ranks: Any = merged.result["ranks"]
    files = {one["file"]: one["reason"] for one in coverage["quarantined"]}
    assert files[f"rank-001/process-{process_of(1)}.json"] == "empty_file"
    assert files[f"rank-001/modules-{process_of(1)}.json"].startswith("not_json")
    assert (ranks[1]["status"], ranks[1]["rows"]) == ("unknown", 4)


def test_chosen_ranks_only(tmp_path: Path) -> None:
    """With ranks given, only those are read and expected."""
    run = whole_run(tmp_path / "run", 4)
    merged = merge_run(run.url, ranks={1, 3})
    coverage: Any = merged.result["coverage"]
    assert merged.complete
    assert coverage["expected_ranks"] == coverage["present_ranks"] == [1, 3]
    assert set(merged.summary()["rank"]) == {1, 3}
    with pytest.raises(ConfigurationError, match="9"):
        merge_run(run.url, ranks={9})


def test_a_list_of_members_that_names_fewer_than_there_are_is_not_complete(tmp_path: Path) -> None:
    """Whatever it says of itself: ranks may be missing that nobody can name."""
    run = whole_run(tmp_path / "run")
    members = [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(2)]
    run.generation(0, members, world_size=10**9)
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert not merged.complete
    assert (coverage["expected_ranks"], coverage["expected_ranks_known"]) == ([0, 1], False)


def test_folders_called_like_a_rank_are_named(tmp_path: Path) -> None:
    """One that holds anything stands in the result once, though nothing says whose it is."""
    run = whole_run(tmp_path / "run")
    names = ["rank--01", "rank-01", "rank-x", "rank-\u0660\u0660\u0661"]
    for name in names:
        shutil.copytree(run.root / "rank-001", run.root / name)
    (run.root / "rank-parts/history.parts").mkdir(parents=True)
    (run.root / "rank-parts/history.parts/part-0000000a-000000.parquet").write_bytes(b"x")
    (run.root / "rank-empty").mkdir()
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert coverage["unexpected_files"] == sorted([*names, "rank-parts"])
    assert (coverage["present_ranks"], coverage["duplicate_parts"], merged.complete) == ([0, 1], 0, True)


def test_a_chosen_rank_that_left_nothing_is_missing(tmp_path: Path) -> None:
    """Who asks for a rank hears of it, also where the world never had it."""
    run = whole_run(tmp_path / "run", 3)
    merged = merge_run(run.url, ranks=[0, 9])
    coverage: Any = merged.result["coverage"]
    assert not merged.complete
    assert (coverage["expected_ranks"], coverage["present_ranks"]) == ([0, 9], [0])
    assert (coverage["missing_ranks"], coverage["unexpected_ranks"]) == ([9], [])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"ranks": ["0"]}, r"ranks=\['0'\] is not possible"),
        ({"ranks": [True]}, r"ranks=\[True\] is not possible"),
        ({"ranks": [-1]}, r"ranks=\[-1\] is not possible"),
        ({"ranks": [0, 2**31]}, "numbers from 0 to 2147483647"),
        ({"ranks": [[0]]}, r"ranks=\[\[0\]\] is not possible"),
        ({"ranks": 0}, "ranks=0 is not possible; give a collection"),
        ({"ranks": "0-1"}, "ranks='0-1' is not possible"),
        ({"ranks": {0: 1}}, "is not possible; give a collection"),
        ({"ranks": []}, r"ranks=\[\] names no rank"),
        ({"inline_ranks": "a"}, "inline_ranks='a' is not possible; give 0 or more"),
        ({"inline_ranks": 1.5}, "inline_ranks=1.5 is not possible"),
        ({"inline_ranks": True}, "inline_ranks=True is not possible"),
        ({"progress": 3}, "progress=3 cannot be called"),
        ({"storage_options": 3}, "storage_options is of type int"),
        ({"storage_options": {3: "s3cr3t"}}, "storage_options is of type dict"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_in_a_sentence(
    tmp_path: Path, arguments: dict[str, Any], sentence: str
) -> None:
    """With the value, what is allowed, and no secret."""
    run = whole_run(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        merge_run(run.url, **arguments)
    assert "\n" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    assert not (run.root / "merged").exists()


def test_ranks_as_numpy_has_them(tmp_path: Path) -> None:
    """A number is a number, whoever made it."""
    run = whole_run(tmp_path / "run", 3)
    assert merge_run(run.url, ranks=list(np.arange(2))).coverage.present_ranks == (0, 1)


def test_several_folders_of_one_run(tmp_path: Path) -> None:
    """Folders of hosts without a shared filesystem are one run; files are named with their folder."""
    first = RunFolder(tmp_path / "a", world_size=2).run()
    second = RunFolder(tmp_path / "b", world_size=2).run()
    first.generation()
    whole_rank(first, 0)
    whole_rank(second, 1)
    second.write("rank-001/history.parts/part-0000000b-000001.parquet", b"")
    merged = merge_run(first.url, second.url, first.url)
    coverage: Any = merged.result["coverage"]
    assert coverage["present_ranks"] == [0, 1]
    assert coverage["quarantined"][0]["file"].startswith(second.url)
    assert merged.url == f"{first.url}/merged"


def test_folders_of_two_runs_are_refused(tmp_path: Path) -> None:
    """Folders of different runs are not one, and both ids are named."""
    first = RunFolder(tmp_path / "a", run_id="run-a").run()
    second = RunFolder(tmp_path / "b", run_id="run-b").run()
    with pytest.raises(RunFormatError, match=r"run-a.*run-b"):
        merge_run(first.url, second.url)


def test_the_same_process_in_two_folders_counts_once(tmp_path: Path) -> None:
    """A part that lies in two of the folders is read once, and the copy is counted."""
    first = whole_run(tmp_path / "a")
    second = whole_run(tmp_path / "b")
    merged = merge_run(first.url, second.url)
    coverage: Any = merged.result["coverage"]
    assert coverage["duplicate_parts"] == 4
    assert merged.complete
    assert merged.summary()["observations"].to_list() == [4, 4]


def test_result_and_errors_of_a_rank(tmp_path: Path) -> None:
    """A rank's entry tells who it was and what telemetry did and failed at there."""
    run = whole_run(tmp_path / "run")
    counters = Counters(forwards=9, errors={"reducer": 2}, collection_s=0.5)
    run.manifest(0, process_of(0), counters=counters, device="cuda:0")
    ranks: Any = merge_run(run.url).result["ranks"]
    assert ranks[0]["errors"] == {"reducer": 2}
    assert ranks[0]["counters"]["forwards"] == 9
    assert (ranks[0]["device"], ranks[0]["host"], ranks[0]["status"]) == ("cuda:0", "host-a", "closed")
    assert (ranks[0]["samples"], ranks[0]["last_sample_id"]) == (4, 3)
    assert ranks[0]["last_sample_at"] == "2026-01-01T00:00:03.000000+00:00"


def test_result_is_strict_json_in_a_fixed_order(tmp_path: Path) -> None:
    """The written document is what the call returns, its sections in their order, and no number is NaN."""
    run = whole_run(tmp_path / "run")
    merged = merge_run(run.url)
    text = (run.root / "merged" / "result.json").read_text()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    written = json.loads(text, parse_constant=refuse)
    assert written == merged.result
    assert list(written) == [
        "schema_version",
        "run",
        "files",
        "coverage",
        "generations",
        "ranks",
        "steps",
        "replicas",
        "first_nonfinite",
        "findings",
        "own_work",
        "comparison",
        "layers",
    ]


def test_a_part_that_its_closed_process_never_counted_is_set_aside(tmp_path: Path) -> None:
    """As a copy under the next number, whose rows would else count twice."""
    run = whole_run(tmp_path / "run")
    part = run.root / "rank-001" / "history.parts" / f"part-{process_of(1)}-000000.parquet"
    part.with_name(f"part-{process_of(1)}-000001.parquet").write_bytes(part.read_bytes())
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert not merged.complete
    assert coverage["quarantined"] == [
        {
            "file": f"rank-001/history.parts/part-{process_of(1)}-000001.parquet",
            "reason": "beyond_manifest",
        }
    ]
    assert merged.summary()["observations"].to_list() == [4, 4]


@pytest.mark.parametrize("changes", [{"status": "running"}, {"rows_in_spool": 1}])
def test_a_part_that_a_process_may_not_have_counted_yet_is_read(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """While it runs, and while rows of it still lie in a spool."""
    run = whole_run(tmp_path / "run")
    spooled = changes.pop("rows_in_spool", 0)
    states = {name: TableState(1, rows=4, rows_in_spool=spooled) for name in ("history", "samples")}
    run.manifest(1, process_of(1), tables=states, **changes)
    run.history(1, [{"sample_id": 9, "value": 1.0}], process_of(1), 1)
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert coverage["quarantined"] == coverage["disagreements"] == []
    assert merged.summary()["observations"].to_list() == [4, 5]


def test_rows_beyond_what_a_closed_process_counted_make_a_run_incomplete(tmp_path: Path) -> None:
    """As where a part was replaced by a longer one."""
    run = whole_run(tmp_path / "run")
    run.history(1, [{"sample_id": one, "value": 1.0} for one in range(6)], process_of(1), 0)
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert not merged.complete
    assert coverage["disagreements"] == [
        {
            "file": f"rank-001/process-{process_of(1)}.json",
            "column": "rows of history",
            "found": "6",
            "expected": "4",
            "rows": 2,
        }
    ]


def test_samples_that_only_history_knows_are_counted_and_aligned(tmp_path: Path) -> None:
    """After a kill between the two tables."""
    run = whole_run(tmp_path / "run")
    rows = [
        {"sample_id": one, "value": 1.0, "attempt": one, "forward_index": one, "metric": metric}
        for one in range(6)
        for metric in ("mean", "std")
    ]
    run.manifest(1, process_of(1), status="running")
    run.history(1, rows, process_of(1), 0)
    run.samples(1, [{"sample_id": 0}, {"sample_id": 1}], process_of(1), 0)
    result: Any = merge_run(run.url).result
    assert [(one["samples"], one["last_sample_id"]) for one in result["ranks"]] == [(4, 3), (6, 5)]
    alignment = result["coverage"]["alignment"]
    assert (alignment["samples"], alignment["samples_common_to_all_ranks"]) == (6, 4)


@pytest.mark.parametrize("rank", ["3000000000", "12345678901234567890"])
def test_a_folder_of_a_rank_that_cannot_be_is_set_aside(tmp_path: Path, rank: str) -> None:
    """Its number does not fit the column of ranks."""
    run = whole_run(tmp_path / "run")
    shutil.copytree(run.root / "rank-001", run.root / f"rank-{rank}")
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert not merged.complete
    assert coverage["present_ranks"] == [0, 1]
    assert coverage["quarantined"] == [
        {"file": f"rank-{rank}", "reason": "misplaced: there is no rank above 2147483647"}
    ]


def test_a_manifest_of_a_rank_that_cannot_be_is_set_aside(tmp_path: Path) -> None:
    """In a world of one its folder does not tell the rank."""
    run = whole_run(tmp_path / "run", world_size=1)
    run.manifest(3_000_000_000, process_of(0))
    [one] = coverage_of(run)["quarantined"]
    assert one["reason"] == "schema_mismatch: its rank is 3000000000"


def test_a_run_of_no_ranks_is_refused(tmp_path: Path) -> None:
    """No program writes such a record."""
    run = whole_run(tmp_path / "run")
    record = json.loads((run.root / "run.json").read_bytes()) | {"world_size": 0}
    run.write("run.json", json.dumps(record).encode())
    with pytest.raises(RunFormatError, match=r"run\.json in .* cannot be read .*world_size is 0"):
        merge_run(run.url)


def test_a_full_disk_is_told_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result may lie elsewhere."""
    run = whole_run(tmp_path / "run")

    def full(self: LocalStorage, files: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalStorage, "replace_together", full)
    with pytest.raises(StorageError, match=r"written to .*/run/merged \(No space left.*--output"):
        merge_run(run.url)


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_folder_and_a_dangling_link_among_parts_are_named(tmp_path: Path, is_empty: bool) -> None:
    """Something was to be there."""
    run = whole_run(tmp_path / "run")
    parts = run.root / "rank-001" / "history.parts"
    folder = parts / f"part-{process_of(2)}-000000.parquet"
    folder.mkdir()
    if not is_empty:
        (folder / "inside").write_bytes(b"x")
    (parts / f"part-{process_of(2)}-000001.parquet").symlink_to(tmp_path / "nowhere")
    (parts / "loop").symlink_to(parts / "loop")
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert not merged.complete
    assert coverage["quarantined"] == [
        {"file": "rank-001/history.parts/loop", "reason": "unexpected_name"},
        {"file": str(folder.relative_to(run.root)), "reason": "unexpected_name"},
        {
            "file": f"rank-001/history.parts/part-{process_of(2)}-000001.parquet",
            "reason": "unreadable: it is gone",
        },
    ]


@pytest.mark.parametrize("url", [None, 3, ["a"], "a\0b", "caf\udce9"])
def test_what_is_no_address_is_refused(url: Any) -> None:
    """With a sentence, whatever it is."""
    with pytest.raises(ConfigurationError, match="the address of the run"):
        merge_run(url)
    with pytest.raises(ConfigurationError, match="the address of the run"):
        open_run(url)
    with pytest.raises(ConfigurationError, match="the address of the run"):
        merge_run("run", output=["a"] if url is None else url)  # pyrefly: ignore[bad-argument-type]
