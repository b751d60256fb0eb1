"""From the spool to a real object store, through crashes and outages: everything arrives, and once."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from storage.spooling import (
    make_claim,
    make_identity,
    make_manifest,
    make_part,
    make_run,
    make_target,
    sample_ids,
    stored_manifest,
)
from storage.uploaders import WAIT_S, root, until, uploader_pids
from torchinstruments import merge_run, open_run
from torchinstruments.config import HistoryConfig
from torchinstruments.records import Signal
from torchinstruments.store import layout
from torchinstruments.store.claim import ClaimRequest, claim_run, ensure_run
from torchinstruments.store.documents import decode_generation, decode_run
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool_folder import LOG, UPLOADER_LOCK, list_parts, process_folders
from torchinstruments.store.uploader import Uploader
from torchinstruments.store.writer import RankWriter
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore
from unit.store.material import backward, forward, measurement, module, run_record

__all__ = ["root"]


def test_parts_and_documents_arrive(seaweed: ObjectStore, bucket: str, root: Path) -> None:
    """Small parts are joined in their order, the manifest tells what is up, and the spool is cleared."""
    url = f"s3://{bucket}/run"
    storage = open_storage(url, seaweed.storage_options)
    target = make_target(url, seaweed.storage_options, root)
    for first in range(0, 50, 10):
        target.write_part("samples", 10, make_part(range(first, first + 10)))
        target.write_part("history", 10, make_part(range(first, first + 10), "history"))
    target.write_document("modules-1a2b3c4d.json", b"{}")
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="running"))
    assert target.finish(WAIT_S)
    target.write_part("samples", 10, make_part(range(50, 60)))
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    assert target.finish(WAIT_S)

    assert sample_ids(storage) == list(range(60))
    assert sample_ids(storage, "history") == list(range(50))
    assert storage.read("rank-000/modules-1a2b3c4d.json") == b"{}"
    manifest = stored_manifest(storage)
    assert manifest.status == "closed"
    samples = manifest.tables["samples"]
    assert (samples.rows, samples.rows_in_spool, samples.rows_dropped) == (60, 0, 0)
    parts = storage.list("rank-000/samples.parts")
    assert samples.next_part == len(parts)
    assert samples.bytes == sum(part.size_bytes for part in parts)
    assert target.state().tables["samples"].rows == 60
    assert until(lambda: not list(root.iterdir()))


def test_an_uploader_outlives_its_writer(seaweed: ObjectStore, bucket: str, root: Path) -> None:
    """A training process that is killed leaves its rows in the spool, and they arrive."""
    url = f"s3://{bucket}/run"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from storage.spooling import make_manifest, make_part, make_target\n"
        f"target = make_target({url!r}, {seaweed.storage_options!r}, Path({str(root)!r}))\n"
        "target.write_document('process-1a2b3c4d.json', make_manifest(target, status='running'))\n"
        "target.write_part('samples', 3, make_part([1, 2, 3]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    storage = open_storage(url, seaweed.storage_options)
    assert until(lambda: not list(root.iterdir()))
    assert sample_ids(storage) == [1, 2, 3]
    assert stored_manifest(storage).status == "running"


def test_many_processes_share_one_uploader(seaweed: ObjectStore, bucket: str, root: Path) -> None:
    """Four ranks on a host see to it that one uploader lives, and it serves all of them."""
    url = f"s3://{bucket}/run"
    targets = [
        make_target(url, seaweed.storage_options, root, rank=rank, process=f"{rank:08x}") for rank in range(4)
    ]
    threads = [threading.Thread(target=target.keep_alive) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (spool,) = root.iterdir()
    assert until(lambda: len(uploader_pids(spool)) == 1)  # a name may show a moment after the start
    for rank, target in enumerate(targets):
        target.write_part("samples", 1, make_part([rank]))
        target.write_document(
            f"process-{rank:08x}.json",
            make_manifest(target, status="closed", rank=rank, process=f"{rank:08x}"),
        )
    assert all(target.finish(WAIT_S) for target in targets)
    storage = open_storage(url, seaweed.storage_options)
    for rank in range(4):
        assert sample_ids(storage, folder=f"rank-{rank:03d}") == [rank]


def test_a_second_uploader_leaves_at_once(seaweed: ObjectStore, bucket: str, root: Path) -> None:
    """While one is at work, another one for the same spool ends without doing anything."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root)
    (spool,) = root.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    done = subprocess.run(
        [sys.executable, "-m", "torchinstruments.store.uploader", str(spool)],
        input=_errand(url, seaweed.storage_options),
        env=_environment(),
        check=False,
        timeout=60,
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not (spool / LOG).exists()
    lock.release()
    assert target.finish(WAIT_S)


def test_a_killed_uploader_is_replaced(seaweed: ObjectStore, bucket: str, root: Path) -> None:
    """A process that waits for its rows starts a new uploader where the old one was killed."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root)
    target.write_part("samples", 1, make_part([1]))
    assert target.upload(WAIT_S)
    (spool,) = root.iterdir()
    (pid,) = uploader_pids(spool)
    os.kill(pid, signal.SIGKILL)
    target.write_part("samples", 1, make_part([2]))
    assert target.upload(WAIT_S)
    assert pid not in uploader_pids(spool)
    assert sample_ids(open_storage(url, seaweed.storage_options)) == [1, 2]


class _CrashedError(BaseException):
    """Ends an uploader in the middle, as a signal would."""


@pytest.mark.parametrize("crash_after", [1, 2])
def test_a_crash_after_a_put_neither_doubles_nor_loses(
    seaweed: ObjectStore, bucket: str, root: Path, crash_after: int
) -> None:
    """An uploader that dies between putting an object and deleting its rows is repeated without a trace."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root)
    (spool,) = root.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    for first in range(0, 30, 10):
        target.write_part("samples", 10, make_part(range(first, first + 10)))
        target.write_part("history", 10, make_part(range(first, first + 10), "history"))
    target.upload(0.0)
    puts: list[str] = []

    def crash(path: str) -> None:
        puts.append(path)
        if len(puts) == crash_after:
            raise _CrashedError

    with pytest.raises(_CrashedError):
        Uploader(spool, url, seaweed.storage_options, lock, after_put=crash).run()
    target.write_part("samples", 10, make_part(range(30, 40)))
    assert target.upload(WAIT_S)

    storage = open_storage(url, seaweed.storage_options)
    assert sample_ids(storage) == list(range(40))
    assert sample_ids(storage, "history") == list(range(30))
    state = target.state().tables["samples"]
    assert (state.rows, state.rows_in_spool) == (40, 0)


def test_after_an_outage_everything_arrives_once(
    bucket: str,
    root: Path,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
    seaweed: ObjectStore,
) -> None:
    """While the store answers 503 rows wait in the spool and the reason shows; afterwards all are there."""
    url = f"s3://{bucket}/run"
    fault_proxy.status(503, "SlowDown")
    target = make_target(url, proxied(), root)
    for first in range(0, 50, 10):
        target.write_part("samples", 10, make_part(range(first, first + 10)))
    assert not target.upload(1.0)
    assert until(
        lambda: "SlowDown" in target.state().last_error or "StorageUnreachable" in target.state().last_error
    )
    assert target.state().tables["samples"].rows_in_spool == 50
    fault_proxy.clear()
    assert target.upload(WAIT_S)
    assert sample_ids(open_storage(url, seaweed.storage_options)) == list(range(50))
    assert target.state().last_error == ""


def test_lost_answers_and_resets_change_nothing(
    bucket: str,
    root: Path,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
    seaweed: ObjectStore,
) -> None:
    """A put that was carried out unanswered, one that was reset and one that was cut arrive once each."""
    url = f"s3://{bucket}/run"
    fault_proxy.drop_response(method="PUT", times=1)
    fault_proxy.reset(method="PUT", times=1)
    fault_proxy.reset_body(100, method="PUT", times=1)
    target = make_target(url, proxied(), root)
    target.write_part("samples", 100, make_part(range(100)))
    target.write_part("history", 100, make_part(range(100), "history"))
    assert target.upload(WAIT_S)
    storage = open_storage(url, seaweed.storage_options)
    assert sample_ids(storage) == list(range(100))
    assert sample_ids(storage, "history") == list(range(100))
    assert {"drop_response", "reset", "reset_body"} <= {entry.action for entry in fault_proxy.log}


def test_a_stalled_put_is_given_up_and_repeated(
    bucket: str,
    root: Path,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
    seaweed: ObjectStore,
) -> None:
    """A store that accepts a put and never answers holds nothing up for ever."""
    url = f"s3://{bucket}/run"
    fault_proxy.stall(method="PUT", times=1)
    target = make_target(url, proxied(), root)
    (spool,) = root.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    target.write_part("samples", 2, make_part([1, 2]))

    def impatient(url: str, storage_options: Any, *, timeout_s: float) -> Any:
        return open_storage(url, storage_options, timeout_s=min(timeout_s, 2.0))

    uploader = Uploader(spool, url, proxied(), lock, open_remote=impatient)
    thread = threading.Thread(target=uploader.run, daemon=True)
    thread.start()
    assert target.upload(WAIT_S)
    assert "stall" in {entry.action for entry in fault_proxy.log}
    assert sample_ids(open_storage(url, seaweed.storage_options)) == [1, 2]
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    assert target.finish(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_refusal_is_reported_and_does_not_stop_the_writer(
    bucket: str, root: Path, seaweed: ObjectStore
) -> None:
    """With wrong credentials rows stay in the spool, and the reason reaches the writer's state."""
    url = f"s3://{bucket}/run"
    target = make_target(url, {**seaweed.storage_options, "secret": "not-the-secret"}, root)
    target.write_part("samples", 1, make_part([1]))
    assert not target.upload(0.0)
    assert until(lambda: "StorageDeniedError" in target.state().last_error)
    target.write_part("samples", 1, make_part([2]))
    assert target.state().tables["samples"].rows_in_spool == 2
    (spool,) = root.iterdir()
    assert (spool / LOG).read_text().count("StorageDeniedError") == 1


def test_no_secret_is_on_disk(bucket: str, root: Path, seaweed: ObjectStore) -> None:
    """Neither the spool, its log, nor the uploader's arguments and variables hold the secret."""
    url = f"s3://{bucket}/run"
    secret = "do-not-store-this-secret"
    target = make_target(url, {**seaweed.storage_options, "secret": secret}, root)
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="running"))
    target.write_part("samples", 1, make_part([1]))
    assert until(lambda: "StorageDeniedError" in target.state().last_error)
    (spool,) = root.iterdir()
    files = [path for path in spool.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert secret.encode() not in path.read_bytes(), path
        assert seaweed.key.encode() not in path.read_bytes(), path
    for pid in uploader_pids(spool):
        for name in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert (spool.stat().st_mode & 0o777) == 0o700
    assert all((folder.stat().st_mode & 0o777) == 0o700 for folder in process_folders(spool))


def test_an_unverified_run_is_claimed_by_its_uploader(seaweed: ObjectStore, bucket: str, root: Path) -> None:
    """A run whose store was down at attach gets its run.json and its generation before its first part."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root, claim=make_claim(url, verified=False))
    target.write_part("samples", 1, make_part([1]))
    assert target.upload(WAIT_S)
    storage = open_storage(url, seaweed.storage_options)
    assert decode_run(storage.read(layout.RUN_FILE)).run_id == "night-7"
    generation = decode_generation(storage.read(layout.generation_file(0)))
    assert (generation.leader_process, generation.world_size) == ("1a2b3c4d", 2)
    assert sample_ids(storage) == [1]


def test_an_unverified_run_leaves_another_runs_folder_alone(
    seaweed: ObjectStore, bucket: str, root: Path
) -> None:
    """Where the folder turns out to hold another run, the rows go beside it."""
    url = f"s3://{bucket}/run"
    storage = open_storage(url, seaweed.storage_options)
    ensure_run(storage, make_run("other"))
    target = make_target(url, seaweed.storage_options, root, claim=make_claim(url, verified=False))
    target.write_part("samples", 1, make_part([1]))
    assert target.upload(WAIT_S)
    assert sample_ids(storage) == []
    assert sample_ids(storage.child("run-night-7")) == [1]


def test_a_host_with_a_disk_of_its_own_has_a_run_of_its_own(tmp_path: Path, root: Path) -> None:
    """The leader claimed the folder on another host; here the uploader writes who and what the run is."""
    url = str(tmp_path / "run")
    target = make_target(url, None, root, claim=make_claim(url, verified=True))
    target.write_part("samples", 1, make_part([1]))
    assert target.upload(WAIT_S)
    storage = open_storage(url)
    assert decode_run(storage.read(layout.RUN_FILE)).run_id == "night-7"
    assert decode_generation(storage.read(layout.generation_file(0))).world_size == 2
    assert open_run(url).samples().collect()["sample_id"].to_list() == [1]


def test_a_run_that_was_claimed_beside_uploads_there(seaweed: ObjectStore, bucket: str, root: Path) -> None:
    """What the leader claimed beside another run is where all rows and members go."""
    url = f"s3://{bucket}/run"
    storage = open_storage(url, seaweed.storage_options)
    ensure_run(storage, make_run("other"))
    run = make_run()
    request = ClaimRequest(run=run, world_size=2, leader_process="1a2b3c4d", started_at="")
    claim = claim_run(storage, request)
    target = make_target(url, seaweed.storage_options, root, claim=claim)
    target.write_part("samples", 1, make_part([1]))
    record = decode_generation(storage.child("run-night-7").read(layout.generation_file(0)))
    target.write_members(
        type(record)(
            **{name: getattr(record, name) for name in type(record).__slots__ if name != "members_complete"},
            members_complete=True,
        )
    )
    assert target.upload(WAIT_S)
    assert sample_ids(storage.child("run-night-7")) == [1]
    stored = decode_generation(storage.child("run-night-7").read(layout.generation_file(0)))
    assert stored.members_complete


def test_asked_to_end_an_uploader_hurries(seaweed: ObjectStore, bucket: str, root: Path) -> None:
    """On SIGTERM everything that is spooled goes up, small as it is, before the process ends."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root)
    target.keep_alive()
    (spool,) = root.iterdir()
    assert until(lambda: (spool / LOG).exists() and "begins" in (spool / LOG).read_text())
    target.write_part("samples", 1, make_part([1]))
    (pid,) = uploader_pids(spool)
    os.kill(pid, signal.SIGTERM)
    storage = open_storage(url, seaweed.storage_options)
    assert until(lambda: sample_ids(storage) == [1])
    assert target.upload(WAIT_S)


def test_a_part_that_cannot_be_read_does_not_hold_up_the_rest(
    seaweed: ObjectStore, bucket: str, root: Path
) -> None:
    """A damaged spooled part is set aside and its rows are counted; its neighbours arrive."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root)
    (spool,) = root.iterdir()
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="running"))
    lock = None
    while lock is None:
        for pid in uploader_pids(spool):
            os.kill(pid, signal.SIGKILL)
        lock = FileLock.acquire(spool / UPLOADER_LOCK, timeout_s=5)
    target.write_part("samples", 1, make_part([1]))
    target.write_part("samples", 7, make_part(range(7)))
    target.write_part("samples", 1, make_part([2]))
    (folder,) = process_folders(spool)
    list_parts(folder)[1].path.write_bytes(b"PAR1 nonsense")
    lock.release()
    assert target.upload(WAIT_S)
    storage = open_storage(url, seaweed.storage_options)
    assert sample_ids(storage) == [1, 2]
    samples = stored_manifest(storage).tables["samples"]
    assert (samples.rows, samples.rows_dropped, samples.rows_in_spool) == (2, 7, 0)
    assert len(list((spool / "unreadable").iterdir())) == 1


@pytest.mark.parametrize("is_bucket", [True, False], ids=["bucket", "folder"])
def test_a_run_whose_place_was_deleted_is_a_run_again(
    moto_store: ObjectStore, root: Path, is_bucket: bool
) -> None:
    """What says which run it is, generation and documents are there again; the merge counts lost parts."""
    import s3fs

    bucket = moto_store.make_bucket(f"deleted-{uuid.uuid4().hex[:12]}")
    url = f"s3://{bucket}/run"
    storage = open_storage(url, moto_store.storage_options)
    client = s3fs.S3FileSystem(**moto_store.storage_options, use_listings_cache=False)
    ensure_run(storage, make_run())
    target = make_target(url, moto_store.storage_options, root)
    target.write_document("modules-1a2b3c4d.json", b"{}")
    target.write_part("samples", 2, make_part([1, 2]))
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="running"))
    assert target.upload(WAIT_S)
    client.rm(f"{bucket}/run", recursive=True)
    if is_bucket:
        client.call_s3("delete_bucket", Bucket=bucket)
    target.write_part("samples", 1, make_part([3]))
    if is_bucket:
        assert not target.upload(2.0)
        assert "StorageNotFoundError" in target.state().last_error
        moto_store.make_bucket(bucket)
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    assert target.finish(WAIT_S)

    assert sample_ids(storage) == [3]
    assert decode_run(storage.read(layout.RUN_FILE)).run_id == make_run().run_id
    assert decode_generation(storage.read(layout.generation_file(0))).generation == 0
    assert storage.read("rank-000/modules-1a2b3c4d.json") == b"{}"
    merged = str(root.parent / "merged")
    result: Any = merge_run(url, storage_options=moto_store.storage_options, output=merged).result
    assert [(one["table"], one["parts"]) for one in result["coverage"]["missing_parts"]] == [("samples", 1)]


@pytest.mark.parametrize("removed", ["the process", "the run", "the root"])
def test_a_spool_that_was_removed_goes_on(tmp_path: Path, root: Path, removed: str) -> None:
    """What was up stays under its names, what lay there is lost and counted, the rest arrives."""
    url = str(tmp_path / "shared run")
    target = make_target(url, None, root)
    target.write_part("samples", 3, make_part([0, 1, 2]))
    assert target.upload(WAIT_S)
    target.write_part("samples", 1, make_part([3]))  # small and young: it waits
    assert target.state().tables["samples"].rows == 3
    folder = Path(target.path)
    shutil.rmtree({"the process": folder, "the run": folder.parent, "the root": root}[removed])
    target.write_part("samples", 2, make_part([4, 5]))
    with pytest.raises(OSError, match="was removed, or a part of it,"):
        target.require_in_place()
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    assert target.finish(WAIT_S)
    storage = open_storage(url)
    assert sample_ids(storage) == [0, 1, 2, 4, 5]
    samples = stored_manifest(storage).tables["samples"]
    assert (samples.rows, samples.rows_in_spool, samples.rows_dropped) == (5, 0, 1)
    assert samples.next_part == len(storage.list("rank-000/samples.parts"))
    assert until(lambda: not list(root.iterdir()))


def test_memory_is_served_by_a_thread(root: Path) -> None:
    """What only this process can reach is uploaded from within it, by the same code."""
    url = "memory://spool-test/run"
    target = make_target(url, None, root)
    target.write_part("samples", 2, make_part([1, 2]))
    assert target.upload(WAIT_S)
    assert [thread.name for thread in threading.enumerate()].count("torchinstruments-uploader") == 1
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    assert target.finish(WAIT_S)
    storage = open_storage(url)
    assert sample_ids(storage) == [1, 2]
    assert stored_manifest(storage).status == "closed"
    assert until(lambda: not list(root.iterdir()))


def test_a_folder_on_a_shared_disk_goes_through_the_same_spool(tmp_path: Path, root: Path) -> None:
    """A local address works too, for worlds that are too large to write many small files to one server."""
    url = str(tmp_path / "shared run")
    target = make_target(url, None, root)
    target.write_part("history", 3, make_part([1, 2, 3], "history"))
    assert target.upload(WAIT_S)
    assert sample_ids(open_storage(url), "history") == [1, 2, 3]


def test_joined_parts_keep_a_samples_rows_together(tmp_path: Path, root: Path) -> None:
    """A gradient that was spooled later stands beside its layer's output, in the order of the catalog."""
    url = str(tmp_path / "run")
    target = make_target(url, None, root)
    (spool,) = root.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    writer = RankWriter(make_identity(), make_claim(url), HistoryConfig(), target)
    writer.start(run_record(), [module(layer) for layer in range(2)])
    outputs = [measurement(layer) for layer in (0, 1)]
    gradients = [measurement(layer, Signal.OUTPUT_GRADIENT) for layer in (1, 0)]
    for delivery in (forward(1, *outputs), forward(2, *outputs), backward(1, *gradients)):
        writer.add_sample(delivery)
        writer.flush()
    writer.add_sample(backward(2, *gradients))
    lock.release()
    assert writer.close(WAIT_S)

    (part,) = open_storage(url).list("rank-000/history.parts")
    rows = pq.read_table(Path(url) / part.path).to_pylist()
    assert [(row["sample_id"], row["layer"], row["signal"]) for row in rows[::3]] == [
        (ordinal, layer, name)
        for ordinal in (1, 2)
        for layer in ("layer99", "layer98")
        for name in ("output", "output_gradient")
    ]
    assert [row["metric"] for row in rows[:3]] == ["mean", "std", "zero_fraction"]
    assert pq.ParquetFile(Path(url) / part.path).num_row_groups == 1


def _environment() -> dict[str, str]:
    tests = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}


def _errand(url: str, storage_options: dict[str, Any]) -> bytes:
    return pickle.dumps((url, storage_options))
