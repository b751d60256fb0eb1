"""Runs made to hurt whoever merges them: refused by name, in bounded memory, and the rest is merged."""

import json
import multiprocessing
import os
import socket
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merge.hostile_files import Outcome, claim_small, merge_measured, nested_footer, wide_file
from merge.run_folder import RunFolder, process_of, whole_run
from merge.test_damage import CATALOG, GENERATION, MANIFEST, PROCESS, ROWS, damageable, rewrite, second_part
from torchinstruments.cli.main import main
from torchinstruments.errors import StorageError
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.plan import plan_merge
from torchinstruments.merge.trial_child import Errand
from torchinstruments.merge.trials import TRIAL_MEMORY_BYTES, Child, without_harmful_parts
from torchinstruments.store import schema
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.run import open_run
from unit.store.folders import begin_run, write_rank

MAX_EXTRA_BYTES = 200 * 2**20
"""What a merge of a tiny run may take beside its imports, whatever lies in it."""


@pytest.fixture(scope="module")
def measured() -> Generator[Callable[[RunFolder], Outcome]]:
    """Merges a run in a process of its own, forked from one that has loaded everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["merge.hostile_files", "torchinstruments.merge.engine", "polars"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:

        def run(folder: RunFolder) -> Outcome:
            return pool.submit(merge_measured, folder.url).result(timeout=60)

        yield run


def long_text(part: Path, size: int = 100_000_000) -> None:
    """One long text, which zstd makes next to nothing of."""
    rewrite(
        part,
        lambda rows: rows.slice(0, 1).set_column(
            rows.schema.get_field_index("device"), "device", pa.array(["x" * size])
        ),
        compression="zstd",
    )


def many_rows_in_a_group(part: Path) -> None:
    """A hundred thousand equal rows in one row group."""
    rewrite(part, lambda rows: rows.take([0] * 100_000), row_group_size=100_000)


def beyond_any_size(part: Path) -> None:
    """Two gigabytes that take no room on the disk."""
    with part.open("r+b") as file:
        file.truncate(2 * 2**30)
        file.seek(-4, os.SEEK_END)
        file.write(b"PAR1")


def untrue_sample_ids(part: Path) -> None:
    """Statistics that tell other samples than the rows do."""
    data = part.read_bytes()
    lowest, highest = (number.to_bytes(8, "little") for number in (10, 199))
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - footer_bytes], data[-8 - footer_bytes :]
    assert footer.count(highest) >= 1
    part.write_bytes(body + footer.replace(highest, lowest))


def untrue_sizes(part: Path) -> None:
    """A column that claims to have more bytes than the file."""
    with pq.ParquetFile(part) as file:
        packed = file.metadata.row_group(0).column(7).total_compressed_size
    claim_small(part, {packed: 2**13 - 1 if packed >= 64 else 63})


def many_processes(part: Path) -> None:
    """Rows of more processes than a part can be of."""
    names = pa.array([f"{number:08x}" for number in range(1000, 1190)])
    rewrite(part, lambda rows: rows.set_column(rows.schema.get_field_index("process"), "process", names))


def many_generations(part: Path) -> None:
    """Rows of more generations than a part can be of."""
    numbers = pa.array(range(1000, 1190), pa.int32())
    rewrite(part, lambda rows: rows.set_column(0, "generation", numbers))


def text_in_lists(part: Path) -> None:
    """A list in place of a text."""
    place = schema.HISTORY.get_field_index("layer")
    rewrite(part, lambda rows: rows.set_column(place, "layer", pa.array([[["fc"]]] * rows.num_rows)))


def local_time(part: Path) -> None:
    """A time of no zone, in other units."""
    place = schema.HISTORY.get_field_index("timestamp")
    rewrite(
        part,
        lambda rows: rows.set_column(place, "timestamp", pa.array([0] * rows.num_rows, pa.timestamp("ms"))),
    )


FILES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "one text of 100 MB": (long_text, "too_large: row group 0 has 1 rows, 1000"),
    "rows that repeat": (many_rows_in_a_group, "too_large: row group 0 has 100000 rows"),
    "columns without number": (lambda part: part.write_bytes(wide_file(40_000)), "too_large: a footer of"),
    "a few thousand columns": (
        lambda part: part.write_bytes(wide_file(3000)),
        "schema_mismatch: 3000 columns",
    ),
    "2 GiB of nothing": (beyond_any_size, "too_large: 2147483648 bytes"),
    "nested 90 levels deep": (
        lambda part: part.write_bytes(nested_footer(90)),
        "unknown_schema_version: none",
    ),
    "nested 100,000 levels deep": (lambda part: part.write_bytes(nested_footer(100_000)), "not_parquet"),
    "untrue sample ids": (untrue_sample_ids, "schema_mismatch: sample_id of row group 0 is not what"),
    "untrue sizes": (untrue_sizes, "unreadable: Invalid column metadata"),
    "rows of many processes": (many_processes, "misplaced: its rows are of more than 100"),
    "rows of many generations": (many_generations, "misplaced: its rows are of more than 100"),
    "a list where text is due": (text_in_lists, "schema_mismatch: layer list"),
    "a time without zone": (local_time, "schema_mismatch: timestamp timestamp[ms]"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_part(tmp_path: Path, kind: str, measured: Callable[[RunFolder], Outcome]) -> None:
    """It is refused by name, in little memory, and the rest is merged."""
    run = damageable(tmp_path / "run")
    part = second_part(run, "history")
    harm, reason = FILES[kind]
    harm(part)
    outcome = measured(run)
    assert list(outcome.quarantined) == [str(part.relative_to(run.root))]
    assert outcome.quarantined[str(part.relative_to(run.root))].startswith(reason)
    assert outcome.observations == [4, 4]
    assert outcome.extra_bytes < MAX_EXTRA_BYTES


def test_texts_that_are_none(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 have a part left out, in whichever column they stand."""
    run = damageable(tmp_path / "run")
    doomed: list[str] = []
    for table in ROWS:
        declared = schema.TABLE_SCHEMAS[table]
        write: Callable[..., Path] = getattr(run, table)
        names = [field.name for field in declared if pa.types.is_string(field.type)]
        for sequence, name in enumerate(names, start=1):
            part = write(1, ROWS[table], PROCESS, sequence)
            broken = pa.array([b"\xff\xfe"] * len(ROWS[table]), pa.binary()).view(pa.string())
            place = declared.get_field_index(name)
            rewrite(
                part, lambda rows, place=place, name=name, broken=broken: rows.set_column(place, name, broken)
            )
            doomed.append(str(part.relative_to(run.root)))
    coverage: Any = merge_run(run.url).result["coverage"]
    assert sorted(one["file"] for one in coverage["quarantined"]) == sorted(doomed)


def pipe(path: Path) -> None:
    """A pipe, which nobody ever writes into."""
    os.mkfifo(path)


def socket_file(path: Path) -> None:
    """A socket that nobody listens at."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


NO_FILES: Mapping[str, Callable[[Path], None]] = {
    "pipe": pipe,
    "socket": socket_file,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_not_opened(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe would wait for ever, a device has no end; each is named, and status and frames go on too."""
    run = whole_run(tmp_path / "run")
    part = f"rank-001/history.parts/part-{PROCESS}-000001.parquet"
    for name in (MANIFEST, CATALOG, GENERATION, part):
        (run.root / name).unlink(missing_ok=True)
        NO_FILES[kind](run.root / name)
    coverage: Any = merge_run(run.url).result["coverage"]
    found = {one["file"]: one["reason"].partition(":")[0] for one in coverage["quarantined"]}
    assert found == {
        GENERATION: "unreadable",
        MANIFEST: "unreadable",
        CATALOG: "unreadable",
        part: "empty_file",
    }
    with_frames = open_run(run.url)
    assert with_frames.history().collect().height == 8
    assert {one.path for one in with_frames.quarantined} == set(found)
    assert main(["status", run.url]) == 1
    assert MANIFEST in capsys.readouterr().out
    (run.root / "run.json").unlink()
    NO_FILES[kind](run.root / "run.json")
    with pytest.raises(StorageError, match=r"run\.json is no file"):
        merge_run(run.url)


def test_links_lead_the_listing_nowhere(tmp_path: Path) -> None:
    """Folders that are none of a run are not looked into, wherever they lead."""
    run = whole_run(tmp_path / "run")
    for name in ("elsewhere", "rank-001/tensorboard", "rank-001/history.parts/deeper", "merged-before"):
        (run.root / name).symlink_to("/")
    coverage: Any = merge_run(run.url).result["coverage"]
    assert coverage["quarantined"] == [{"file": "rank-001/history.parts/deeper", "reason": "unexpected_name"}]


@pytest.mark.parametrize("name", ["outside", "run/rank-000"])
def test_the_result_is_not_written_through_a_link(tmp_path: Path, name: str) -> None:
    """A run that brings a link in place of its folder of results has it written nowhere."""
    run = whole_run(tmp_path / "run")
    elsewhere = tmp_path / name
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "result.json").write_text("mine")
    (run.root / "merged").symlink_to(elsewhere)
    with pytest.raises(StorageError, match=r"merged in .* is a link, and nothing is written through one"):
        merge_run(run.url)
    assert (elsewhere / "result.json").read_text() == "mine"
    assert not (elsewhere / "summary.parquet").exists()


NAMES = (
    "rank-99999999999999999999",
    "rank-" + "9" * 240,
    "rank-²³⁴",
    "rank-001\n",
    "rank-001 ",
    "rank-\x1b[31m",
)


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_no_rank(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder whose name tells no rank makes none, and nothing that it is called reaches a terminal raw."""
    run = whole_run(tmp_path / "run")
    (run.root / name / "history.parts").mkdir(parents=True)
    (run.root / name / "history.parts" / f"part-{PROCESS}-000007.parquet").write_bytes(b"PAR1")
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    assert coverage["present_ranks"] == [0, 1]
    main(["merge", run.url])
    main(["status", run.url])
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err


PART_NAMES = (
    f"part-{PROCESS}-{'9' * 200}.parquet",
    f"part-{PROCESS}-000001.parquet\n",
    "part-\x1b]0;x\x07-000001.parquet",
    "part-" + "a" * 230 + ".parquet",
    f"part-{PROCESS}-\u0660\u0660\u0660\u0660\u0660\u0661.parquet",
    os.fsdecode(b"part-\xff.parquet"),
)


def test_names_of_parts_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is named as a file that does not belong there, and shown without its control characters."""
    run = whole_run(tmp_path / "run")
    for name in PART_NAMES:
        (run.root / "rank-001/history.parts" / name).write_bytes(b"PAR1")
    assert main(["merge", run.url]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("unexpected_name") == len(PART_NAMES)
    assert "\x1b" not in shown.out + shown.err
    result = json.loads((run.root / "merged/result.json").read_bytes())
    assert len(result["coverage"]["quarantined"]) == len(PART_NAMES)


@pytest.mark.parametrize(
    ("file", "field", "value", "reason"),
    [
        ("run.json", "sampling", "deep", "run.json"),
        ("run.json", "rank_policy", "ranks:" + "9" * 6000, ""),
        ("run.json", "world_size", 2**31, ""),
        ("run.json", "world_size", 2**40, "run.json"),
    ],
)
def test_a_hostile_run_document(
    tmp_path: Path,
    file: str,
    field: str,
    value: object,
    reason: str,
    measured: Callable[[RunFolder], Outcome],
) -> None:
    """What run.json says is bounded, or the run is refused with a sentence."""
    run = whole_run(tmp_path / "run")
    (run.root / GENERATION).unlink()
    nested: object = json.loads("[" * 500 + "]" * 500)
    record = json.loads((run.root / file).read_bytes())
    run.write(file, json.dumps(record | {field: {"x": nested} if value == "deep" else value}).encode())
    if reason:
        with pytest.raises(Exception, match=reason):
            merge_run(run.url)
        return
    outcome = measured(run)
    assert outcome.observations == [4, 4]
    assert not outcome.expected_ranks_known
    assert outcome.extra_bytes < MAX_EXTRA_BYTES


def test_many_generations_of_large_worlds(tmp_path: Path, measured: Callable[[RunFolder], Outcome]) -> None:
    """The ranks that documents merely claim are named up to a bound, and then said to be unknown."""
    run = whole_run(tmp_path / "run")
    for number in range(1, 400):
        run.generation(number, world_size=500_000, complete=False)
    outcome = measured(run)
    assert outcome.observations == [4, 4]
    assert not outcome.expected_ranks_known
    assert outcome.extra_bytes < 1.5 * 2**30


FINDINGS: Mapping[str, object] = {
    "names are a number": {"code": "x", "names": 5},
    "an attempt is a list": {"code": "x", "attempt": [1]},
    "a code is an object": {"code": {"a": 1}},
    "nested": "deep",
}


@pytest.mark.parametrize("kind", FINDINGS)
def test_hostile_reports_of_checks(tmp_path: Path, kind: str) -> None:
    """A report that is not shaped like one is set aside by name."""
    run = whole_run(tmp_path / "run")
    nested: object = json.loads("[" * 300 + "]" * 300)
    finding = FINDINGS[kind] if kind != "nested" else {"code": "x", "evidence": nested}
    run.checks(1, [{"findings": [finding]}], PROCESS)
    coverage: Any = merge_run(run.url).result["coverage"]
    [one] = coverage["quarantined"]
    assert one["file"] == f"rank-001/checks-{PROCESS}.json"
    assert one["reason"].startswith("schema_mismatch: ")


def test_a_catalog_of_a_million_layers(tmp_path: Path, measured: Callable[[RunFolder], Outcome]) -> None:
    """It is refused by its number of layers."""
    run = whole_run(tmp_path / "run")
    record = json.loads((run.root / CATALOG).read_bytes())
    one = json.dumps(record["modules"][0])
    modules = ",".join([one.replace('"fc"', f'"{number}"') for number in range(300_000)])
    head = json.dumps(record | {"modules": []}).encode()
    run.write(CATALOG, head.replace(b'"modules": []', b'"modules": [' + modules.encode() + b"]"))
    outcome = measured(run)
    assert list(outcome.quarantined) == [CATALOG]
    assert (
        outcome.quarantined[CATALOG] == "schema_mismatch: it has 300000 layers, and at most 250000 are read"
    )
    assert outcome.extra_bytes < 2 * MAX_EXTRA_BYTES


def test_thousands_of_folders_between_parts(tmp_path: Path) -> None:
    """Each is named once; the time that takes grows with their number and not with its square."""
    run = whole_run(tmp_path / "run")
    parts = run.root / "rank-001/history.parts"
    for number in range(20_000):
        (parts / f"d{number}").mkdir()
    coverage: Any = merge_run(run.url).result["coverage"]
    assert len(coverage["quarantined"]) == 20_000


def test_duplicate_keys_and_huge_numbers(tmp_path: Path) -> None:
    """The last of two equal keys counts, as everywhere in JSON, and numbers beyond 64 bits break nothing."""
    run = whole_run(tmp_path / "run")
    record = json.loads((run.root / MANIFEST).read_bytes())
    record["last_sample_id"] = 10**300
    record["tables"]["history"]["next_part"] = 10**300
    text = json.dumps(record)
    run.write(MANIFEST, (text[:-1] + ', "host": "a", "host": "b"}').encode())
    merged = merge_run(run.url)
    ranks: Any = merged.result["ranks"]
    assert [one["host"] for one in ranks] == ["host-a", "b"]
    assert main(["status", "--json", run.url]) == 0
    assert process_of(1) == PROCESS


def bomb(part: Path, size: int) -> None:
    """One text that unpacks to so many bytes, in a file whose footer says that it is small."""
    long_text(part, size)
    with pq.ParquetFile(part) as file:
        group = file.metadata.row_group(0)
        sizes = {group.total_byte_size: 1000}
        sizes |= {
            size: 100
            for number in range(group.num_columns)
            if (size := group.column(number).total_uncompressed_size) > 2**20
        }
    claim_small(part, sizes)


def test_a_bomb_is_found_on_trial(tmp_path: Path) -> None:
    """A page that unpacks to more than may be, whatever its footer says, is named; the rest stays."""
    run = damageable(tmp_path / "run")
    part = second_part(run, "history")
    bomb(part, 150_000_000)
    assert part.stat().st_size < 30_000
    plan = plan_merge([run.url], None, None)
    found = without_harmful_parts(plan, memory_bytes=128 * 2**20)
    [one] = found.inventory.set_aside
    assert one.path == str(part.relative_to(run.root))
    assert one.reason == "over_memory_limit: reading it takes more than 134217728 bytes"
    kept = {part.path for task in found.tasks for parts in task.parts.values() for part in parts}
    assert one.path not in kept
    assert len(kept) == 8


def test_a_part_that_takes_too_long_is_named(tmp_path: Path) -> None:
    """A process that does not answer in time is ended, and the part has the reason."""
    run = damageable(tmp_path / "run")
    [task, _] = plan_merge([run.url], None, None).tasks
    child = Child(TRIAL_MEMORY_BYTES, limit_s=0)
    errand = Errand(run.url, task.parts["history"][0], run.run_id, window=3, generation=0, limit_s=60)
    assert child.ask(errand) == "over_time_limit: reading it takes more than 0 s"
    assert child.is_over


def test_a_link_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    """Of a run that nobody vouches for, no file is read that lies elsewhere."""
    run = damageable(tmp_path / "run")
    part = second_part(run, "history")
    part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(tmp_path / "elsewhere.parquet")
    found = without_harmful_parts(plan_merge([run.url], None, None))
    [one] = found.inventory.set_aside
    assert one.reason == "misplaced: it is a link that leads out of the run's folder"


def test_an_untrusted_run_is_merged_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing does harm the bytes are those of an ordinary merge."""
    run = damageable(tmp_path / "run")
    second_part(run, "history").write_bytes(b"PAR1")
    main(["merge", run.url])
    before = {path.name: path.read_bytes() for path in (run.root / "merged").iterdir()}
    assert main(["merge", "--untrusted", run.url]) == 1
    assert before == {path.name: path.read_bytes() for path in (run.root / "merged").iterdir()}
    assert main(["merge", "--untrusted", "--executor", "threads", run.url]) == 2
    assert "untrusted cannot be read by executor='threads'" in capsys.readouterr().err


def test_an_untrusted_run_in_an_object_store() -> None:
    """The bytes of a remote part are read on trial on this host, by a process that knows no address."""
    storage = open_storage("memory://hostile-trial")
    begin_run(storage)
    write_rank(storage)
    storage.replace("rank-000/history.parts/part-00000000-000009.parquet", b"PAR1" + bytes(50) + b"PAR1")
    plan = plan_merge(["memory://hostile-trial"], None, None)
    assert without_harmful_parts(plan).tasks == plan.tasks


ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"


def test_nothing_that_a_terminal_obeys_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run ids, layers, hosts, statistics and errors are anybody's text; they are shown escaped."""
    run = damageable(tmp_path / "run")
    for path in sorted(run.root.rglob("*.json")):
        text = path.read_text().replace("host-a", f"host{ESCAPES}").replace('"Linear"', json.dumps(ESCAPES))
        path.write_text(text.replace('"std"', json.dumps(ESCAPES)))
    record = json.loads((run.root / "run.json").read_bytes())
    for name in ("merge", "status"):
        assert main([name, run.url]) == 1
    hostile = RunFolder(tmp_path / f"other{ESCAPES}", run_id=f"run{ESCAPES}", world_size=2).run()
    hostile.manifest(0, "0000000a", status="running", host=ESCAPES)
    hostile.write(f"rank-000/history.parts/part-{ESCAPES}.parquet", b"")
    for name in ("merge", "status"):
        assert main([name, hostile.url]) == 1
    main(["compare", hostile.url, run.url])
    shown = capsys.readouterr()
    assert record["run_id"] in shown.out
    assert "\\x1b]0;owned" in shown.out
    for one in ("\x1b", "\x07", "\u202e", "\x9b"):
        assert one not in shown.out + shown.err
