"""Every kind of damaged file is set aside by name with a reason code, and the rest is merged."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merge.run_folder import RunFolder, process_of, whole_run
from torchinstruments.cli.main import main
from torchinstruments.errors import RunFormatError
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.known_columns import KnownColumns
from torchinstruments.merge.parts import OpenPart, _open_fetched, known_batches
from torchinstruments.store import schema
from torchinstruments.store.documents import MAX_DOCUMENT_BYTES, UnusableFileError
from torchinstruments.store.inspection import Expected
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.manifest import TableState

PROCESS = process_of(1)
MANIFEST = f"rank-001/process-{PROCESS}.json"
CATALOG = f"rank-001/modules-{PROCESS}.json"
GENERATION = "generations/000.json"
ROWS: Mapping[str, list[dict[str, Any]]] = {
    "history": [{"sample_id": one, "value": -1e9, "layer": f"bad{one % 7}"} for one in range(10, 200)],
    "samples": [{"sample_id": one} for one in range(10, 200)],
    "steps": [{"attempt": one, "micro_batches": 2} for one in range(50, 200)],
    "fingerprints": [{"attempt": one, "digest": 9} for one in range(50, 200)],
}


def damageable(root: Path) -> RunFolder:
    """Writes a run of two ranks with rows in all tables, the second of which still writes."""
    run = whole_run(root)
    for rank in range(2):
        run.steps(rank, [{"attempt": one} for one in range(20)], process_of(rank))
        run.fingerprints(rank, [{"attempt": one} for one in range(5)], process_of(rank))
    run.manifest(1, PROCESS, status="running", tables={name: TableState(next_part=2) for name in ROWS})
    return run


def second_part(run: RunFolder, table: str) -> Path:
    """Writes a second part of rank 1."""
    write: Callable[..., Path] = getattr(run, table)
    return write(1, ROWS[table], PROCESS, 1)


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], **settings: Any) -> None:
    """Writes a part again with other rows or columns, under the metadata that it had."""
    with pq.ParquetFile(path) as file:
        own = {key: value for key, value in file.metadata.metadata.items() if key.startswith(b"torchi")}
        table = change(file.read())
    size = settings.pop("row_group_size", 30_000)
    with pq.ParquetWriter(path, table.schema, store_schema=False, **settings) as writer:
        writer.write_table(table, row_group_size=size)
        writer.add_key_value_metadata(own)


def with_value(table: pa.Table, name: str, value: object, row: int = 3) -> pa.Table:
    """Returns a table with another value in one row."""
    place = table.schema.get_field_index(name)
    kind = table.schema.field(name).type
    column = table.column(name).combine_chunks()
    values = (column.view(pa.int64()) if pa.types.is_timestamp(kind) else column).to_pylist()
    values[row] = value
    plain = pa.int64() if pa.types.is_timestamp(kind) else kind
    return table.set_column(place, pa.field(name, kind), pa.array(values, plain).cast(kind))


def set_aside(run: RunFolder) -> list[tuple[str, str]]:
    """Merges a run, and returns the files that were set aside; nothing of them may be in the numbers."""
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    steps: Any = merged.result["steps"]
    replicas: Any = merged.result["replicas"]
    json.dumps(merged.result, allow_nan=False)
    assert merged.summary()["observations"].to_list() == [4, 4]
    assert [(one["rank"], one["attempts"]) for one in steps["ranks"]] == [(0, 20), (1, 20)]
    assert (replicas["equal"], replicas["judged_attempts"]) == (True, 5)
    assert not merged.complete
    return [(one["file"], one["reason"]) for one in coverage["quarantined"]]


TABLE_DAMAGE: Mapping[str, tuple[Callable[[pa.Table, str], pa.Table], str]] = {
    "a column is missing": (lambda table, key: table.drop_columns([key]), "schema_mismatch: "),
    "a further column": (
        lambda table, _: table.append_column("more", pa.nulls(table.num_rows)),
        "schema_mismatch: ",
    ),
    "another order": (
        lambda table, _: table.select(list(reversed(table.schema.names))),
        "schema_mismatch: ",
    ),
    "another type": (
        lambda table, _: table.set_column(0, "generation", pa.nulls(table.num_rows, pa.string())),
        "schema_mismatch: generation string where generation int32 is due",
    ),
    "nulls in a key": (
        lambda table, key: with_value(table, key, None),
        "schema_mismatch: {key} is null in 1 rows",
    ),
    "a number below zero": (
        lambda table, _: with_value(table, "generation", -7),
        "schema_mismatch: generation -7 is below 0",
    ),
}


@pytest.mark.parametrize("kind", TABLE_DAMAGE)
@pytest.mark.parametrize(
    ("table", "key"),
    [("history", "layer"), ("samples", "state"), ("steps", "outcome"), ("fingerprints", "tensor")],
)
def test_a_part_of_another_shape(tmp_path: Path, table: str, key: str, kind: str) -> None:
    """Columns, types, nulls and ranges are those of the table, or the part counts not at all."""
    run = damageable(tmp_path / "run")
    part = second_part(run, table)
    change, reason = TABLE_DAMAGE[kind]
    rewrite(part, lambda rows: change(rows, key))
    [(file, found)] = set_aside(run)
    assert file == str(part.relative_to(run.root))
    assert found.startswith(reason.format(key=key))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("sample_id", -1, "sample_id -1 is below 0"),
        ("attempt", -1, "attempt -1 is below 0"),
        ("call_index", -(2**31), "call_index -2147483648 is below 0"),
        ("timestamp", -(2**63), "timestamp is outside of the years 1970 to 9999"),
        ("timestamp", 2**63 - 1, "timestamp is outside of the years 1970 to 9999"),
        ("process", None, "process is null in 1 rows"),
        ("metric", None, "metric is null in 1 rows"),
    ],
)
def test_a_row_that_no_process_writes(tmp_path: Path, name: str, value: object, reason: str) -> None:
    """What a reader would take for something else is refused with the part that holds it."""
    run = damageable(tmp_path / "run")
    rewrite(second_part(run, "history"), lambda rows: with_value(rows, name, value))
    assert [found for _, found in set_aside(run)] == [f"schema_mismatch: {reason}"]


def claims_more(data: bytes) -> bytes:
    """A part whose footer claims more rows than its row groups hold."""
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - footer_bytes : -8]
    # The first of these varints is the number of rows of the file.
    held, claimed = (bytes([(rows << 1 & 0x7F) | 0x80, rows << 1 >> 7]) for rows in (190, 8000))
    assert footer.count(held) > 3
    return data[: -8 - footer_bytes] + footer.replace(held, claimed, 1) + data[-8:]


FILE_DAMAGE: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    "zero bytes": (lambda _: b"", "empty_file"),
    "one byte": (lambda data: data[:1], "not_parquet"),
    "the magic word alone": (lambda data: data[:4], "truncated"),
    "no footer": (lambda data: data[: len(data) // 2], "truncated"),
    "half a footer": (lambda data: data[:-300], "truncated"),
    "without its last byte": (lambda data: data[:-1], "truncated"),
    "another format": (lambda _: b"{}" * 300, "not_parquet"),
    "encrypted": (lambda data: b"PARE" + data[4:-4] + b"PARE", "not_parquet"),
    "a footer longer than the file": (lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", "truncated"),
    "a footer of something else": (lambda data: data[:-400] + bytes(392) + data[-8:], "not_parquet"),
    "fewer rows than it claims": (claims_more, "unreadable: 8000 rows are not those of its row groups"),
}


@pytest.mark.parametrize("kind", FILE_DAMAGE)
def test_a_part_that_is_no_whole_file(tmp_path: Path, kind: str) -> None:
    """Whatever is left of it, it is named."""
    run = damageable(tmp_path / "run")
    part = second_part(run, "history")
    damage, reason = FILE_DAMAGE[kind]
    part.write_bytes(damage(part.read_bytes()))
    [(file, found)] = set_aside(run)
    assert file == str(part.relative_to(run.root))
    assert found.startswith(reason)


def test_a_part_with_a_row_group_beyond_the_bound(tmp_path: Path) -> None:
    """Memory is that of one row group of ours, whatever a file holds."""
    run = damageable(tmp_path / "run")
    part = second_part(run, "steps")
    rewrite(part, lambda rows: pa.concat_tables([rows] * 300), row_group_size=45_000)
    assert [found.partition(", ")[0] for _, found in set_aside(run)] == [
        "too_large: row group 0 has 45000 rows"
    ]


def test_no_flipped_bit_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    """Every column is opened, which may raise, before the footer is asked about it, which may not."""
    run = whole_run(tmp_path / "run")
    data = second_part(run, "history").read_bytes()
    expected = Expected("history", run.run_id)
    known = KnownColumns("history", schema.HISTORY.names)
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    reasons: set[str] = set()
    for bit in range(8 * begin, 8 * len(data), 23):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            with _open_fetched(bytes(damaged), expected) as file:
                for rows in known_batches(OpenPart(file, bytes(damaged)), known):
                    assert rows.batch.num_rows == file.metadata.num_rows
        except (UnusableFileError, pa.ArrowException, OSError) as error:
            reasons.add(str(error))
    assert any("histogram size mismatch" in reason for reason in reasons)


@pytest.mark.parametrize("table", ROWS)
def test_flipped_bits(tmp_path: Path, table: str) -> None:
    """A part of which any bits differ counts as it was written, or not at all; never a traceback."""
    run = damageable(tmp_path / "run")
    untouched = merge_run(run.url)
    part = second_part(run, table)
    whole = merge_run(run.url)
    data = part.read_bytes()
    random = np.random.default_rng(3)
    outcomes: set[str] = set()
    for number in range(15):
        damaged = bytearray(data)
        for place in random.integers(4, len(data) - 8, 1 + number % 4).tolist():
            damaged[place] ^= 1 << int(random.integers(8))
        part.write_bytes(damaged)
        merged = merge_run(run.url)
        coverage: Any = merged.result["coverage"]
        if coverage["quarantined"] or coverage["foreign_parts"]:
            outcomes.add("left out")
            assert merged.summary().equals(untouched.summary())
            assert merged.result["replicas"] == untouched.result["replicas"]
            assert merged.result["steps"] == untouched.result["steps"]
        else:
            outcomes.add("read")
            assert merged.summary().equals(whole.summary())
            assert merged.result["replicas"] == whole.result["replicas"]
            assert merged.result["steps"] == whole.result["steps"]
    assert "left out" in outcomes


@pytest.mark.parametrize(("table", "column"), [("history", "forward_in_attempt"), ("fingerprints", "shape")])
def test_damage_in_a_column_that_only_a_closer_look_reads(tmp_path: Path, table: str, column: str) -> None:
    """Of a part whose summary was possible nothing counts either, once a closer look fails."""
    run = damageable(tmp_path / "run")
    part = second_part(run, table)
    with pq.ParquetFile(part) as file:
        group = file.metadata.row_group(0)
        chunk = group.column(file.schema_arrow.get_field_index(column))
        end = chunk.dictionary_page_offset + chunk.total_compressed_size
    data = bytearray(part.read_bytes())
    data[end - 1] ^= 0xFF
    part.write_bytes(data)
    run.fingerprints(0, [{"attempt": one} for one in range(50, 60)], process_of(0), 1)
    [(file_name, found)] = set_aside(run)
    assert file_name == str(part.relative_to(run.root))
    assert found.startswith("unreadable: ")


DOCUMENT_DAMAGE: Mapping[str, tuple[bytes, str]] = {
    "zero bytes": (b"", "empty_file"),
    "cut off": (b'{"schema_version": 1, "run_', "not_json"),
    "binary": (bytes(range(256)), "not_json"),
    "UTF-16": ('{"schema_version": 1}'.encode("utf-16"), "not_json"),
    "no UTF-8": (b'{"schema_version": 1, "run_id": "\xff"}', "not_json"),
    "a lone surrogate": (b'{"schema_version": 1, "run_id": "\\ud800"}', "not_json"),
    "not strict": (b'{"schema_version": 1, "x": NaN}', "not_json"),
    "two documents": (b'{"schema_version": 1}{}', "not_json"),
    "nested deeply": (b'{"schema_version": 1, "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not_json"),
    "a number too large": (b'{"schema_version": 1, "x": 1' + b"0" * 400 + b"}", "schema_mismatch"),
    "null": (b"null", "schema_mismatch"),
    "an array": (b"[]", "schema_mismatch"),
    "no version": (b"{}", "schema_mismatch"),
    "a version of another type": (b'{"schema_version": "1"}', "schema_mismatch"),
    "a later version": (b'{"schema_version": 2}', "unknown_schema_version: 2"),
    "fields are missing": (b'{"schema_version": 1}', "schema_mismatch"),
}


@pytest.mark.parametrize("kind", DOCUMENT_DAMAGE)
def test_documents_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    """Manifest, catalog and generation are set aside, the rows are merged; of run.json the user is told."""
    run = whole_run(tmp_path / "run")
    data, reason = DOCUMENT_DAMAGE[kind]
    for name in (MANIFEST, CATALOG, GENERATION):
        run.write(name, data)
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    found = {one["file"]: one["reason"] for one in coverage["quarantined"]}
    assert sorted(found) == [GENERATION, CATALOG, MANIFEST]
    assert all(one.startswith(reason) for one in found.values()), found
    assert merged.summary()["observations"].to_list() == [4, 4]
    run.write("run.json", data)
    with pytest.raises(RunFormatError, match=r"run\.json|schema version"):
        merge_run(run.url)


@pytest.mark.parametrize(
    ("file", "field", "value", "reason"),
    [
        (MANIFEST, "tables", {"../../secret": {}}, "schema_mismatch: it has a table '../../secret'"),
        (
            MANIFEST,
            "tables",
            {"history": {"next_part": -1}},
            "schema_mismatch: a count of history is below 0",
        ),
        (MANIFEST, "process", "../../../etc", "misplaced: it is of process ../../../etc"),
        (MANIFEST, "process", "0000000a", "misplaced: it is of process 0000000a"),
        (MANIFEST, "rank", 7, "misplaced: it is of rank 7"),
        (MANIFEST, "generation", -1, "schema_mismatch: its generation is -1"),
        (MANIFEST, "generation", 2**70, "schema_mismatch: its generation is 1180591620717411303424"),
        (MANIFEST, "counters", [], "schema_mismatch: Expected `object`, got `array`"),
        (GENERATION, "generation", 3, "misplaced: it is of generation 3"),
        (GENERATION, "world_size", 0, "schema_mismatch: world_size is 0, and a run has at least one rank"),
        (GENERATION, "first_sample_id", -5, "schema_mismatch: first_sample_id is -5"),
        (CATALOG, "modules", {"fc": 1}, "schema_mismatch: Expected `array`, got `object`"),
    ],
)
def test_a_document_that_says_what_cannot_be(
    tmp_path: Path, file: str, field: str, value: object, reason: str
) -> None:
    """It is refused, a path outside of its folder among it, and nothing there is looked at."""
    run = whole_run(tmp_path / "run")
    record = json.loads((run.root / file).read_bytes()) | {field: value}
    run.write(file, json.dumps(record).encode())
    coverage: Any = merge_run(run.url).result["coverage"]
    [one] = coverage["quarantined"]
    assert one["file"] == file
    assert one["reason"].startswith(reason)


@pytest.mark.parametrize("time", ["", "soon", "0001-01-01T00:00:00", "9999-12-31T23:59:59-12:00", "x" * 5000])
def test_times_that_are_none(tmp_path: Path, time: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest that tells no time tells the rest all the same."""
    run = whole_run(tmp_path / "run")
    run.manifest(1, PROCESS, started_at=time, written_at=time, last_sample_at=time)
    assert merge_run(run.url).result["coverage"]["present_ranks"] == [0, 1]  # type: ignore[index]
    assert main(["status", "--json", run.url]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 2


@pytest.mark.parametrize("is_empty", [True, False])
def test_folders_where_documents_are_due(tmp_path: Path, is_empty: bool) -> None:
    """A folder that has the name of a document is named."""
    run = whole_run(tmp_path / "run")
    for name in (MANIFEST, CATALOG, GENERATION):
        (run.root / name).unlink()
        (run.root / name).mkdir()
        if not is_empty:
            run.write(f"{name}/inside.json", b"{}")
    coverage: Any = merge_run(run.url).result["coverage"]
    assert coverage["quarantined"] == [
        {"file": name, "reason": "unreadable: it is a folder"} for name in (GENERATION, CATALOG, MANIFEST)
    ]
    (run.root / "run.json").unlink()
    (run.root / "run.json").mkdir()
    with pytest.raises(RunFormatError, match=r"no run.json"):
        merge_run(run.url)


def test_documents_beyond_any_size_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their size in the listing is enough."""
    run = whole_run(tmp_path / "run")
    read = LocalStorage.read
    seen: list[str] = []

    def note(self: LocalStorage, path: str) -> bytes:
        seen.append(path)
        return read(self, path)

    monkeypatch.setattr(LocalStorage, "read", note)
    with (run.root / MANIFEST).open("ab") as file:
        file.truncate(MAX_DOCUMENT_BYTES + 1)
    coverage: Any = merge_run(run.url).result["coverage"]
    assert coverage["quarantined"] == [
        {"file": MANIFEST, "reason": f"too_large: {MAX_DOCUMENT_BYTES + 1} bytes"}
    ]
    assert MANIFEST not in seen
    seen.clear()
    with (run.root / "run.json").open("ab") as file:
        file.truncate(MAX_DOCUMENT_BYTES + 1)
    with pytest.raises(RunFormatError, match="too_large"):
        merge_run(run.url)
    assert seen == []


def test_a_file_that_goes_away_is_looked_for_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part, a manifest and a catalog that vanish after the listing are no bad files: it is taken anew."""
    run = whole_run(tmp_path / "run", 3)
    doomed = [
        run.root / f"rank-001/history.parts/part-{PROCESS}-000000.parquet",
        run.root / MANIFEST,
        run.root / CATALOG,
    ]
    walk = LocalStorage.walk
    listings: list[int] = []

    def walk_then_vanish(self: LocalStorage, enters: Any) -> Any:
        found = walk(self)
        listings.append(len(found))
        if doomed:
            doomed.pop(0).unlink()
        return found

    monkeypatch.setattr(LocalStorage, "walk", walk_then_vanish)
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    # Twice and no more; what goes away again is named.
    assert [one - listings[0] for one in listings] == [0, -1]
    assert [(one["file"], one["reason"]) for one in coverage["quarantined"]] == [
        (MANIFEST, "unreadable: it is gone")
    ]
    assert merged.summary()["rank"].to_list() == [0, 2]
    again: Any = merge_run(run.url).result["coverage"]
    assert again["quarantined"] == []
    assert again["present_ranks"] == [0, 1, 2]


NAMES = [
    'say "fc"',
    "it's",
    "two\nlines\r\n\ttab",
    "[bold red]markup[/]",
    "<script>alert(1)</script>",
    "a/b\\c/../d",
    "層.0",
    "e\u0301 \u202e\u2028\x00\x1b[31m",
    "",
    "x" * 10_000,
]


def test_names_of_layers_are_anybodys_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names with quotes, newlines, markup, slashes and 10,000 characters come back as they are, each once."""
    run = whole_run(tmp_path / "run", 2)
    for rank in range(2):
        rows = [
            {"sample_id": 0, "layer": name, "metric": "std", "value": float(rank + place)}
            for place, name in enumerate(NAMES)
        ]
        wrong = {"sample_id": 1, "layer": NAMES[7], "metric": "nonfinite_fraction", "value": 1.0}
        rows.append(wrong)
        run.history(rank, rows, process_of(rank), 1)
        run.manifest(rank, process_of(rank), tables={"history": TableState(next_part=2, rows=15)})
    assert main(["merge", run.url]) == 0
    out = capsys.readouterr().out
    assert len(out) < 6000
    assert all(one.isprintable() for line in out.split("\n") for one in line)
    result = json.loads((run.root / "merged" / "result.json").read_bytes())
    assert sorted(layer["layer"] for layer in result["layers"]) == sorted([*NAMES, "fc"])
    by_name = {layer["layer"]: layer for layer in result["layers"]}
    assert result["first_nonfinite"]["first"]["layer"] == NAMES[7]
    for place, name in enumerate(NAMES):
        across = by_name[name]["tensors"][0]["statistics"][0]["across_ranks"]
        assert across["highest"] == {"rank": 1, "value": float(1 + place), "sample_id": 0}
    assert set(schema.KEY_COLUMNS) == set(result["run"]["series_key"])
