"""Running, closed or interrupted, from a store's own times."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import override

from torchinstruments.store.inventory import take_inventory
from torchinstruments.store.liveness import (
    LOCAL_MARGIN_S,
    REMOTE_MARGIN_S,
    ProcessStatus,
    process_status,
    store_now_s,
)
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.storage import Storage
from unit.store.folders import begin_run, write_rank, writer
from unit.store.material import run_record

WRITTEN_S = 1_800_000_000.0
DUE_S = 300.0


class RemoteStorage(LocalStorage):
    """A local folder that calls itself remote."""

    @property
    @override
    def is_local(self) -> bool:
        """False."""
        return False


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A folder with one process that has not closed, and whose files are all of one time."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage)
    writer(storage, 0).start(run_record(), ())
    for path in tmp_path.rglob("*.json"):
        os.utime(path, (WRITTEN_S, WRITTEN_S))
    return tmp_path


def status_of(storage: Storage, now_s: float | None, process: str = "00000000") -> ProcessStatus:
    """Returns the status of one process."""
    inventory = take_inventory(storage)
    (found,) = [one for one in inventory.manifests if one.manifest.process == process]
    return process_status(inventory, found, now_s)


@pytest.mark.parametrize(
    ("late_s", "expected"),
    [
        (0, "running"),
        (DUE_S, "running"),
        (DUE_S + LOCAL_MARGIN_S, "running"),
        (DUE_S + LOCAL_MARGIN_S + 1, "interrupted"),
    ],
)
def test_a_process_is_interrupted_once_its_next_write_is_overdue_by_the_margin(
    running: Path, late_s: float, expected: str
) -> None:
    """The manifest promised when it would be rewritten."""
    assert status_of(LocalStorage(str(running)), WRITTEN_S + late_s) == expected


def test_a_remote_folder_has_the_margin_of_its_clock(running: Path) -> None:
    """An object store's clock may be a quarter of an hour from ours."""
    storage = RemoteStorage(str(running))

    assert status_of(storage, WRITTEN_S + DUE_S + REMOTE_MARGIN_S) == "running"
    assert status_of(storage, WRITTEN_S + DUE_S + REMOTE_MARGIN_S + 1) == "interrupted"


def test_a_closed_process_stays_closed(tmp_path: Path) -> None:
    """However old its manifest is."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage)
    write_rank(storage, 0)

    assert status_of(storage, WRITTEN_S * 2) == "closed"


def test_a_later_generation_ends_the_processes_of_the_one_before(running: Path) -> None:
    """A restart is seen at once, without waiting for a heartbeat to be overdue."""
    storage = LocalStorage(str(running))
    writer(storage, 0, "0000000f", generation=1).start(run_record(), ())
    os.utime(running / "rank-000" / "process-0000000f.json", (WRITTEN_S, WRITTEN_S))

    assert status_of(storage, WRITTEN_S) == "interrupted"
    assert status_of(storage, WRITTEN_S, "0000000f") == "running"


def test_now_is_never_before_the_newest_file(running: Path) -> None:
    """A reader whose clock is slow still sees what is overdue."""
    inventory = take_inventory(LocalStorage(str(running)))

    assert store_now_s(inventory, clock_s=WRITTEN_S - 100) == WRITTEN_S
    assert store_now_s(inventory, clock_s=WRITTEN_S + 100) == WRITTEN_S + 100


def test_a_file_from_the_far_future_does_not_make_others_overdue(running: Path) -> None:
    """Some host's clock was wrong while it was written, and has been set right since."""
    inventory = take_inventory(LocalStorage(str(running)))

    assert store_now_s(inventory, clock_s=WRITTEN_S - 3600) == WRITTEN_S - 3600


def test_a_store_that_tells_no_times_is_judged_by_what_the_manifest_says(running: Path) -> None:
    """Its own time of writing stands in, with the wide margin."""
    inventory = take_inventory(LocalStorage(str(running)))
    (found,) = inventory.manifests
    untimed = replace(
        found, modified_at=None, manifest=replace(found.manifest, written_at="2026-01-01T00:00:00+00:00")
    )
    written_s = 1_767_225_600.0

    assert process_status(inventory, untimed, written_s + DUE_S + REMOTE_MARGIN_S) == "running"
    assert process_status(inventory, untimed, written_s + DUE_S + REMOTE_MARGIN_S + 1) == "interrupted"


def test_a_time_that_is_none_counts_as_overdue(running: Path) -> None:
    """Text that is no date does not keep a dead process alive, and does not raise."""
    inventory = take_inventory(LocalStorage(str(running)))
    (found,) = inventory.manifests
    broken = replace(found, modified_at=None, manifest=replace(found.manifest, written_at="yesterday"))

    assert process_status(inventory, broken, WRITTEN_S) == "interrupted"
