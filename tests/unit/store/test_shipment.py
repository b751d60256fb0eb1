"""What a crash between any two steps of an upload leaves, and that repeating it changes nothing."""

import io
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from storage.spooling import make_claim, make_identity, make_run, sample_ids, stored_manifest
from torchinstruments.config import HistoryConfig
from torchinstruments.records import Sample, Signal
from torchinstruments.store import layout
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.shipment import MAX_AGE_S, Shipment
from torchinstruments.store.spool import SpoolTarget
from torchinstruments.store.spool_folder import UPLOADER_LOCK, list_parts, process_folders, read_progress
from torchinstruments.store.storage import Storage
from torchinstruments.store.writer import RankWriter
from unit.store.material import backward, forward, measurement, module, run_record

LAYERS = 4


class CrashedError(BaseException):
    """Ends an upload in the middle, as a signal would."""


class Rig:
    """A writer whose spool nobody uploads but the test."""

    def __init__(self, folder: Path, *, with_catalog: bool = True) -> None:
        self.url = str(folder / "run")
        target = SpoolTarget(
            self.url,
            None,
            identity=make_identity(),
            claim=make_claim(self.url),
            run=make_run(),
            folder=layout.rank_folder(0, alone=False),
            root=folder / "spools",
        )
        (self.spool,) = (folder / "spools").iterdir()
        lock = FileLock.acquire(self.spool / UPLOADER_LOCK)
        assert lock is not None
        self.lock = lock
        self.writer = RankWriter(make_identity(), make_claim(self.url), HistoryConfig(), target)
        if with_catalog:
            self.write_catalog()

    @property
    def storage(self) -> Storage:
        """The run's folder."""
        return open_storage(self.url)

    def write_catalog(self) -> None:
        """Leaves manifest and catalog in the spool."""
        self.writer.start(run_record(), [module(layer) for layer in range(LAYERS)])

    def spool_samples(self, *ordinals: int) -> None:
        """Leaves a spooled part of outputs, then one of gradients, and rows of samples after each."""
        for ordinal in ordinals:
            outputs = [measurement(layer) for layer in range(LAYERS)]
            gradients = [measurement(layer, Signal.OUTPUT_GRADIENT) for layer in reversed(range(LAYERS))]
            for delivery in (forward(ordinal, *outputs), backward(ordinal, *gradients)):
                self.spool_delivery(delivery)

    def spool_delivery(self, delivery: Sample) -> None:
        """Leaves one delivery in spooled parts of its own."""
        self.writer.add_sample(delivery)
        assert self.writer.flush()

    def shipment(self, after_put=None) -> Shipment:
        """Returns what an uploader makes of the process's folder when it begins."""
        (folder,) = process_folders(self.spool)
        return Shipment(folder, print, after_put=after_put)

    def ship(self) -> Shipment:
        """Uploads everything."""
        shipment = self.shipment()
        while shipment.ship(self.storage, urgent=True):
            pass
        return shipment

    def ship_until_put(self, number: int) -> None:
        """Uploads, and crashes right after an object was put."""
        puts: list[str] = []

        def crash(path: str) -> None:
            puts.append(path)
            if len(puts) == number:
                raise CrashedError

        with pytest.raises(CrashedError):
            self.shipment(crash).ship(self.storage, urgent=True)

    def objects(self) -> dict[str, bytes]:
        """Returns all parts that are up."""
        return {
            entry.path: self.storage.read(entry.path)
            for entry in self.storage.walk()
            if entry.path.endswith(".parquet")
        }


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A writer with a catalog."""
    return Rig(tmp_path)


def kill_at_removal(rig: Rig, number: int) -> None:
    """Uploads in a process that is killed when it is about to remove its n-th spooled part."""
    code = f"""
import os, signal, sys
from pathlib import Path
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.shipment import MAX_AGE_S, Shipment
from torchinstruments.store.spool_folder import process_folders
removals = []
def watch(event, arguments):
    if event == "os.remove" and str(arguments[0]).endswith(".parquet"):
        removals.append(arguments[0])
        if len(removals) == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
(folder,) = process_folders(Path({str(rig.spool)!r}))
sys.addaudithook(watch)
Shipment(folder, print).ship(open_storage({rig.url!r}), urgent=True)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("removal", [1, 2, 4, 5, 8])
def test_what_is_up_already_is_only_removed_after_a_crash(rig: Rig, removal: int) -> None:
    """An uploader that is killed after it counted an object, before all of its rows left the spool."""
    rig.spool_samples(0, 1)
    assert len(list_parts(process_folders(rig.spool)[0])) == 8
    kill_at_removal(rig, removal)
    put_before = rig.objects()
    left = len(list_parts(process_folders(rig.spool)[0]))
    assert left == 8 - (removal - 1)

    progress = rig.ship().progress

    objects = rig.objects()
    assert put_before.items() <= objects.items()
    assert len(objects) == 2
    assert sample_ids(rig.storage, "history") == [0] * 24 + [1] * 24
    assert sample_ids(rig.storage) == [0, 0, 1, 1]
    assert {name: (table.rows, table.next_part) for name, table in progress.tables.items()} == {
        "history": (48, 1),
        "samples": (4, 1),
    }
    assert list_parts(process_folders(rig.spool)[0]) == []


@pytest.mark.parametrize("put", [1, 2])
def test_what_was_put_stays_as_it_is_though_more_rows_came_before_it_was_counted(rig: Rig, put: int) -> None:
    """A crash between put and progress: the same bytes come again, and what came since goes after them."""
    rig.spool_samples(0, 1)
    rig.ship_until_put(put)
    put_before = rig.objects()
    assert len(put_before) == put
    rig.spool_samples(2)

    rig.ship()

    objects = rig.objects()
    assert put_before.items() <= objects.items()
    assert sample_ids(rig.storage, "history") == [0] * 24 + [1] * 24 + [2] * 24
    assert sample_ids(rig.storage) == [0, 0, 1, 1, 2, 2]
    assert len(objects) == 4 if put == 2 else 3


def test_a_catalog_that_came_after_the_crash_does_not_change_what_was_put(tmp_path: Path) -> None:
    """The order of the rows was settled when the joining was begun; later objects follow the catalog."""
    rig = Rig(tmp_path, with_catalog=False)

    def spool(ordinal: int) -> None:
        rig.spool_delivery(forward(ordinal, measurement(2)))
        rig.spool_delivery(backward(ordinal, measurement(0, Signal.OUTPUT_GRADIENT)))

    spool(0)
    rig.ship_until_put(1)
    put_before = rig.objects()
    rig.write_catalog()
    spool(1)

    rig.ship()

    objects = rig.objects()
    assert put_before.items() <= objects.items()
    layers = [
        pq.read_table(io.BytesIO(data)).column("layer").to_pylist()[::3]
        for path, data in sorted(objects.items())
        if "history" in path
    ]
    assert layers == [["layer97", "layer99"], ["layer99", "layer97"]]


def test_joined_rows_are_in_the_order_of_the_catalog(rig: Rig) -> None:
    """Parts of outputs and of gradients become one, layer by layer as the catalog lists them."""
    rig.spool_samples(0, 1)

    rig.ship()

    (data,) = [data for path, data in rig.objects().items() if "history" in path]
    rows = pq.read_table(io.BytesIO(data)).to_pylist()
    layers = [f"layer{99 - layer}" for layer in range(LAYERS)]
    assert [(row["sample_id"], row["layer"], row["signal"]) for row in rows[::3]] == [
        (ordinal, layer, name)
        for ordinal in (0, 1)
        for layer in layers
        for name in ("output", "output_gradient")
    ]


def test_what_was_put_before_the_folder_was_removed_is_counted_and_stays(rig: Rig) -> None:
    """The writer had not read how far the uploader was: nothing is put over, and no row counts as dropped."""
    rig.spool_samples(0)
    before = rig.ship()
    up = rig.objects()
    (folder,) = process_folders(rig.spool)
    assert not before.was_made_again()
    shutil.rmtree(folder)
    rig.spool_samples(1)
    assert before.was_made_again()
    assert read_progress(folder).is_behind
    assert not rig.writer.close(0.0)
    shipment = rig.ship()
    assert {path: data for path, data in rig.objects().items() if path in up} == up
    assert sample_ids(rig.storage) == [0, 0, 1, 1]
    for table, state in shipment.progress.tables.items():
        manifest = stored_manifest(rig.storage).tables[table]
        assert (manifest.rows, manifest.rows_dropped) == (state.rows, 0), table
        assert state.rows == sum(
            pq.read_metadata(io.BytesIO(data)).num_rows
            for path, data in rig.objects().items()
            if f"/{table}.parts/" in path
        )
    assert not shipment.progress.is_behind


def test_parts_go_up_in_time_though_the_clock_was_set_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as old as the uploader has seen them lie there, and not younger than their files say."""
    rig.spool_samples(0)
    shipment = rig.shipment()
    shipment.ship(rig.storage, urgent=False)
    assert rig.objects() == {}
    wall_s, monotonic_s = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: wall_s - 7200.0)
    shipment.ship(rig.storage, urgent=False)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic_s + MAX_AGE_S + 60.0)
    assert rig.objects() == {}
    shipment.ship(rig.storage, urgent=False)
    assert {path.split("/")[1] for path in rig.objects()} == {"history.parts", "samples.parts"}
