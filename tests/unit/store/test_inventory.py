"""What is found in a run's folders, and what is set aside."""

import os
from pathlib import Path

import pytest

from torchinstruments.errors import RunFormatError
from torchinstruments.store import layout
from torchinstruments.store.catalog import ModuleCatalog
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.inventory import Inventory, SetAside, read_catalog, take_inventory
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.manifest import encode_document
from unit.store.folders import begin_run, write_rank, writer
from unit.store.material import generation_record, run_record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run of two ranks, and the storage it lies in."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage)
    for rank in range(2):
        write_rank(storage, rank)
    return tmp_path


def take(folder: Path) -> Inventory:
    """Returns the inventory of one local folder."""
    return take_inventory(LocalStorage(str(folder)))


def test_everything_of_a_run_is_found_under_its_rank(folder: Path) -> None:
    """Manifests, catalogs and parts of each table are there, and nothing is strange."""
    inventory = take(folder)

    assert list(inventory.ranks) == [0, 1]
    assert inventory.run == run_record()
    assert inventory.generations == (generation_record(),)
    for rank, found in inventory.ranks.items():
        assert [one.manifest.rank for one in found.manifests] == [rank]
        assert [one.process for one in found.catalogs] == [f"{rank:08x}"]
        assert sorted(found.parts) == ["history", "samples", "steps"]
        assert [(part.sequence, part.rank) for part in found.parts["history"]] == [(0, rank)]
    assert (inventory.set_aside, inventory.strange) == ((), ())


def test_the_newest_time_is_that_of_the_runs_own_files(folder: Path) -> None:
    """A user's file in the same folder does not make a dead run look alive."""
    (folder / "notes.txt").write_text("mine")
    os.utime(folder / "notes.txt", (4e9, 4e9))
    os.utime(folder / "rank-001" / "process-00000001.json", (3e9, 3e9))

    assert take(folder).newest_at == 3e9


def test_a_world_of_one_is_found_in_the_runs_own_folder(tmp_path: Path) -> None:
    """Its manifest tells its rank, since no folder does."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage, world_size=1)
    write_rank(storage, 0, alone=True, world_size=1)

    inventory = take(tmp_path)

    assert list(inventory.ranks) == [0]
    assert [part.path for part in inventory.ranks[0].parts["steps"]] == [
        "steps.parts/part-00000000-000000.parquet"
    ]


def test_parts_come_in_the_order_of_writing_across_restarts(tmp_path: Path) -> None:
    """Generations count, not the digits of processes, and sequences are numbers, not text."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage, generations=2)
    write_rank(storage, 0, "ffffffff", generation=0)
    write_rank(storage, 0, "00000001", generation=1)
    parts = tmp_path / "rank-000" / "history.parts"
    # Where its manifest still says that it runs, it may have written what that does not count.
    manifest = tmp_path / "rank-000" / "process-00000001.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"closed"', b'"running"'))
    for sequence in (2, 10, 1_000_000):
        (parts / f"part-00000001-{sequence:06d}.parquet").write_bytes(b"x")

    found = take(tmp_path).ranks[0].parts["history"]

    assert [(part.process, part.sequence) for part in found] == [
        ("ffffffff", 0),
        ("00000001", 0),
        ("00000001", 2),
        ("00000001", 10),
        ("00000001", 1_000_000),
    ]


def test_files_that_do_not_belong_there_are_named(folder: Path) -> None:
    """A stray file among the parts is strange; a temporary one is a write that has not ended."""
    (folder / "rank-000" / "history.parts" / "copy of part.parquet").write_bytes(b"x")
    (folder / "rank-000" / "history.parts" / ".part-00000000-000001.parquet.tmp").write_bytes(b"x")
    (folder / "rank-001" / "what.json").write_bytes(b"{}")
    (folder / "generations" / "latest.json").write_bytes(b"{}")

    assert take(folder).strange == (
        (0, "generations/latest.json"),
        (0, "rank-000/history.parts/copy of part.parquet"),
        (0, "rank-001/what.json"),
    )


def test_results_derived_copies_and_other_folders_are_left_alone(folder: Path) -> None:
    """What this package or its user keeps beside the parts is no finding."""
    for name in (
        "merged/summary.parquet",
        "rank-000/history.parquet",
        "tensorboard/events",
        "checkpoints/a/b.pt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    other = LocalStorage(str(folder / "run-other"))
    begin_run(other, run_id="other")
    write_rank(other, 5, run_id="other")

    inventory = take(folder)

    assert list(inventory.ranks) == [0, 1]
    assert (inventory.set_aside, inventory.strange) == ((), ())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty_file"),
        (b"{", "not_json: Input data was truncated"),
        (b"\xff\xfe", "not_json: JSON is malformed: invalid character (byte 0)"),
        (b'{"a":' * 100_000, "not_json: "),
        (b'{"schema_version": 99}', "unknown_schema_version: 99"),
        (b'{"schema_version": 1}', "schema_mismatch: Object missing required field `run_id`"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_set_aside_by_name(folder: Path, data: bytes, reason: str) -> None:
    """Its rank keeps its parts, and the others keep everything."""
    (folder / "rank-001" / "process-00000001.json").write_bytes(data)

    inventory = take(folder)

    (aside,) = inventory.set_aside
    assert (aside.source, aside.path) == (0, "rank-001/process-00000001.json")
    assert aside.reason.startswith(reason)
    assert len(inventory.ranks[1].parts) == 3
    assert len(inventory.ranks[0].manifests) == 1


def test_documents_of_another_run_are_set_aside_as_foreign(folder: Path) -> None:
    """A manifest and a generation that were copied here from another run do not count."""
    writer(LocalStorage(str(folder)), 0, "0000000f", run_id="run-2").start(run_record(), ())
    (folder / "generations" / "001.json").write_bytes(encode_document(generation_record(1, "run-2")))

    inventory = take(folder)

    assert [(aside.path, aside.reason) for aside in inventory.set_aside] == [
        ("generations/001.json", "foreign_run"),
        ("rank-000/process-0000000f.json", "foreign_run"),
    ]
    assert len(inventory.generations) == 1


def test_documents_under_anothers_name_are_set_aside_as_misplaced(folder: Path) -> None:
    """A manifest in another rank's folder or under another process's name, and a renamed generation."""
    manifest = (folder / "rank-000" / "process-00000000.json").read_bytes()
    (folder / "rank-001" / "process-00000000.json").write_bytes(manifest)
    (folder / "rank-000" / "process-00000009.json").write_bytes(manifest)
    (folder / "generations" / "007.json").write_bytes(encode_document(generation_record(0)))

    inventory = take(folder)

    assert [aside.reason for aside in inventory.set_aside] == [
        "misplaced: it is of generation 0",
        "misplaced: it is of process 00000000",
        "misplaced: it is of rank 0",
    ]


def test_a_document_that_is_too_large_is_not_read(folder: Path) -> None:
    """A sparse file of gigabytes costs nothing."""
    with (folder / "rank-000" / "process-00000000.json").open("ab") as file:
        file.truncate(2**33)

    (aside,) = take(folder).set_aside

    assert aside.reason == f"too_large: {2**33} bytes"


def test_a_catalog_is_read_when_it_is_asked_for(folder: Path) -> None:
    """Its layers come in catalog order; one that is broken is set aside."""
    inventory = take(folder)
    catalog = read_catalog(inventory, inventory.ranks[0].catalogs[0])
    assert isinstance(catalog, ModuleCatalog)
    assert [module.layer for module in catalog.modules] == ["layer99", "layer98"]

    (folder / "rank-000" / "modules-00000000.json").write_bytes(b"")

    aside = read_catalog(inventory, inventory.ranks[0].catalogs[0])
    assert aside == SetAside(0, "rank-000/modules-00000000.json", "empty_file")


def test_a_catalog_of_another_run_is_set_aside_as_foreign(folder: Path) -> None:
    """Its layers would be mixed with ours."""
    writer(LocalStorage(str(folder)), 0, "0000000f", run_id="run-2").start(run_record(), ())
    inventory = take(folder)
    foreign = next(file for file in inventory.ranks[0].catalogs if file.process == "0000000f")

    assert read_catalog(inventory, foreign) == SetAside(0, "rank-000/modules-0000000f.json", "foreign_run")


def test_several_folders_of_one_run_are_one_inventory(tmp_path: Path) -> None:
    """Hosts without a shared filesystem have one folder each; every file keeps its folder's index."""
    storages = [LocalStorage(str(tmp_path / name)) for name in ("host-a", "host-b")]
    for rank, storage in enumerate(storages):
        begin_run(storage)
        write_rank(storage, rank)

    inventory = take_inventory(*storages)

    assert [(rank, found.parts["history"][0].source) for rank, found in inventory.ranks.items()] == [
        (0, 0),
        (1, 1),
    ]
    assert len(inventory.generations) == 1


def test_a_part_that_lies_in_two_folders_counts_once_and_the_longer_file_does(tmp_path: Path) -> None:
    """A copy that was cut off does not stand in for the whole one."""
    storages = [LocalStorage(str(tmp_path / name)) for name in ("cut", "whole")]
    for storage in storages:
        begin_run(storage)
        write_rank(storage, 0)
    cut = tmp_path / "cut" / "rank-000" / "history.parts" / "part-00000000-000000.parquet"
    size = len(cut.read_bytes())
    cut.write_bytes(cut.read_bytes()[:100])

    inventory = take_inventory(*storages)

    assert [part.source for part in inventory.ranks[0].parts["history"]] == [1]
    reason = f"truncated: a copy of it has {size} bytes"
    assert SetAside(0, "rank-000/history.parts/part-00000000-000000.parquet", reason) in inventory.set_aside


def test_folders_of_two_runs_are_refused_by_name(tmp_path: Path) -> None:
    """The sentence names both runs and both folders."""
    storages = [LocalStorage(str(tmp_path / name)) for name in ("a", "b")]
    for run_id, storage in zip(("run-1", "run-2"), storages, strict=True):
        begin_run(storage, run_id=run_id)

    with pytest.raises(
        RunFormatError, match=r"a holds the run 'run-1', but .*b the run 'run-2'; give folders of one"
    ):
        take_inventory(*storages)


def test_an_empty_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """The sentence says what is missing and which folder to give."""
    with pytest.raises(
        RunFormatError, match=r"holds no run, for there is no run\.json in it; give the folder"
    ):
        take(tmp_path)


def test_a_run_of_a_later_schema_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """The sentence names both versions."""
    (tmp_path / layout.RUN_FILE).write_bytes(encode_document(run_record(schema_version=99)))

    with pytest.raises(RunFormatError, match=r"has schema version 99, and this release reads version 1; use"):
        take(tmp_path)


def test_a_broken_run_file_is_refused_with_its_reason(tmp_path: Path) -> None:
    """Nothing else says what the rest of the folder means."""
    (tmp_path / layout.RUN_FILE).write_bytes(b"")

    with pytest.raises(RunFormatError, match=r"run\.json in .* cannot be read \(empty_file\)"):
        take(tmp_path)


def test_an_object_store_in_memory_gives_the_same_inventory(folder: Path) -> None:
    """What is found does not depend on where it lies."""
    memory = open_storage(f"memory://inventory-{os.getpid()}")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            memory.create(path.relative_to(folder).as_posix(), path.read_bytes())

    found, local = take_inventory(memory), take(folder)

    assert [one.manifest for one in found.manifests] == [one.manifest for one in local.manifests]
    for rank in local.ranks:
        for table, parts in local.ranks[rank].parts.items():
            assert [part.path for part in found.ranks[rank].parts[table]] == [part.path for part in parts]
