"""What is due when, and what an uploader does with a store that fails for good."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from storage.spooling import make_manifest, make_part, make_run, make_target
from torchinstruments.errors import StorageUnreachableError
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.shipment import JOIN_BYTES, MAX_AGE_S, MAX_JOIN_BYTES, select_parts
from torchinstruments.store.spool_folder import LOG, UPLOADER_LOCK, SpooledPart
from torchinstruments.store.starting import UploaderStarter
from torchinstruments.store.uploader import Backoff, Uploader
from torchinstruments.store.uploader_state import UploaderState, is_handover_wanted, write_uploader_state


def _parts(*sizes: int, written_at_s: float = 1000.0) -> list[SpooledPart]:
    return [
        SpooledPart(number, "history", 1, Path(f"{number:06d}-history-1.parquet"), size, written_at_s)
        for number, size in enumerate(sizes)
    ]


def test_nothing_is_due_early() -> None:
    """Small and young parts wait for more."""
    assert select_parts(_parts(10, 10), (), now_s=1000.0 + MAX_AGE_S - 1, urgent=False) == []
    assert select_parts([], (), now_s=1000.0, urgent=True) == []


@pytest.mark.parametrize(
    ("sizes", "age_s", "urgent"),
    [((JOIN_BYTES // 2, JOIN_BYTES // 2), 0.0, False), ((10, 10), MAX_AGE_S, False), ((10, 10), 0.0, True)],
    ids=["enough", "old", "wanted"],
)
def test_parts_are_due_by_size_by_age_and_on_demand(
    sizes: tuple[int, ...], age_s: float, urgent: bool
) -> None:
    """Each reason alone makes all of them due."""
    parts = _parts(*sizes)
    assert select_parts(parts, (), now_s=1000.0 + age_s, urgent=urgent) == parts


def test_an_object_is_bounded() -> None:
    """What a long outage left is joined in pieces, and a part that is too large by itself goes alone."""
    parts = _parts(MAX_JOIN_BYTES // 2, MAX_JOIN_BYTES // 2, 1)
    assert select_parts(parts, (), now_s=1000.0, urgent=False) == parts[:2]
    parts = _parts(2 * MAX_JOIN_BYTES, 1)
    assert select_parts(parts, (), now_s=1000.0, urgent=False) == parts[:1]


def test_what_was_begun_is_due_alone() -> None:
    """After a crash exactly the parts of the unfinished object come again, whatever else lies there."""
    parts = _parts(10, 10, JOIN_BYTES)
    begun = (parts[0].path.name, parts[1].path.name)
    assert select_parts(parts, begun, now_s=1000.0, urgent=True) == parts[:2]


def test_pauses_grow_to_a_bound_and_end_with_success() -> None:
    """One second, two, four and so on up to a minute; then from the beginning."""
    now = [0.0]
    backoff = Backoff(clock=lambda: now[0], jitter=lambda: 1.0)
    assert backoff.is_due(somebody_waits=False)
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        backoff.failed(slowly=False)
        now[0] += pause_s - 0.25
        assert not backoff.is_due(somebody_waits=False)
        now[0] += 0.25
        assert backoff.is_due(somebody_waits=False)
    assert backoff.failing_since_s == 0.0
    backoff.succeeded()
    assert backoff.failing_since_s is None
    backoff.failed(slowly=False)
    now[0] += 1
    assert backoff.is_due(somebody_waits=False)


def test_pauses_are_short_while_somebody_waits_and_long_after_a_refusal() -> None:
    """A process that closes is not kept waiting for minutes; a refused one does not knock each second."""
    now = [0.0]
    backoff = Backoff(clock=lambda: now[0], jitter=lambda: 1.0)
    backoff.failed(slowly=True)
    now[0] = 5.0
    assert backoff.is_due(somebody_waits=True)
    assert not backoff.is_due(somebody_waits=False)
    now[0] = 60.0
    assert backoff.is_due(somebody_waits=False)


def test_pauses_differ_between_hosts() -> None:
    """With jitter a pause may be half as long."""
    now = [0.0]
    backoff = Backoff(clock=lambda: now[0], jitter=lambda: 0.0)
    backoff.failed(slowly=False)
    now[0] = 0.5
    assert backoff.is_due(somebody_waits=False)


def test_a_store_that_never_comes_back_is_given_up_and_nothing_deleted(tmp_path: Path) -> None:
    """Once its process has ended and the time is over the uploader ends; the spool stays for the next."""
    url = "memory://given-up/run"
    target = make_target(url, None, tmp_path)
    (spool,) = tmp_path.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    target.write_part("samples", 2, make_part([1, 2]))
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    assert not target.finish(0.0)

    def fail(_url: str, _options: Any, *, timeout_s: float) -> Any:
        raise StorageUnreachableError(f"no answer within {timeout_s} s")

    assert Uploader(spool, url, None, lock, give_up_after_s=0.5, open_remote=fail).run() == 3
    log = (spool / LOG).read_text()
    assert log.count("no answer within") == 1
    assert "gives up" in log
    assert list(spool.glob("rank-000-1a2b3c4d/*.parquet"))

    again = FileLock.acquire(spool / UPLOADER_LOCK)
    assert again is not None
    assert Uploader(spool, url, None, again).run() == 0
    assert [entry.path for entry in open_storage(url).walk()] == [
        "generations/000.json",
        "rank-000/process-1a2b3c4d.json",
        "rank-000/samples.parts/part-1a2b3c4d-000000.parquet",
        "run.json",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_fails_is_not_given_up_while_the_process_lives(tmp_path: Path) -> None:
    """As long as rows may still come, trying goes on."""
    url = "memory://kept-on/run"
    target = make_target(url, None, tmp_path)
    (spool,) = tmp_path.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    failures: list[float] = []
    enough = threading.Event()

    def fail(_url: str, _options: Any, *, timeout_s: float) -> Any:
        failures.append(timeout_s)
        if len(failures) == 3:
            enough.set()
        raise StorageUnreachableError("no answer")

    target.write_part("samples", 1, make_part([1]))
    target.upload(0.0)
    uploader = Uploader(spool, url, None, lock, give_up_after_s=0.0, open_remote=fail)
    thread = threading.Thread(target=uploader.run, daemon=True)
    thread.start()
    assert enough.wait(60)
    assert thread.is_alive()
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    target.finish(0.0)
    thread.join(60)
    assert not thread.is_alive()


def test_a_failing_uploader_is_asked_for_its_place_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that began after it has other credentials, whatever the time of day was."""
    lock = FileLock.acquire(tmp_path / UPLOADER_LOCK)
    assert lock is not None
    write_uploader_state(tmp_path, UploaderState(1, time.monotonic(), "refused"))
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s - 3600.0)
    UploaderStarter(tmp_path, "s3://bucket/run", None, in_process=False).ensure()
    assert is_handover_wanted(tmp_path)
    lock.release()


def test_an_uploader_whose_lock_was_removed_leaves_the_spool_to_the_next_one(tmp_path: Path) -> None:
    """Somebody removed the spool, and it was made again: two would put different rows under one name."""
    url = "memory://lock-was-removed/run"
    target = make_target(url, None, tmp_path)
    (spool,) = tmp_path.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    target.write_part("samples", 2, make_part([1, 2]))
    (spool / UPLOADER_LOCK).unlink()
    of_the_next = FileLock.acquire(spool / UPLOADER_LOCK)
    assert of_the_next is not None
    assert Uploader(spool, url, None, lock, once=True).run() == 0
    assert list(spool.glob("rank-000-1a2b3c4d/*.parquet"))
    assert of_the_next.is_at(spool / UPLOADER_LOCK)
    of_the_next.release()


def test_a_folder_of_another_release_is_left_alone(tmp_path: Path) -> None:
    """What cannot be understood is neither uploaded nor deleted, and does not hold up the rest."""
    url = f"memory://{make_run().nonce}/run"
    target = make_target(url, None, tmp_path)
    (spool,) = tmp_path.iterdir()
    strange = spool / "rank-001-deadbeef"
    strange.mkdir()
    (strange / "about.json").write_text('{"format": 99}')
    target.write_part("samples", 1, make_part([1]))
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    assert target.finish(60.0)
    assert (strange / "about.json").exists()
    assert "rank-001-deadbeef was not written by this release" in (spool / LOG).read_text()


def test_documents_for_people_arrive(tmp_path: Path) -> None:
    """A page that is no JSON goes up like the others, and once more when it changed."""
    url = f"memory://{make_run().nonce}/run"
    target = make_target(url, None, tmp_path)
    for text in (b"at attach", b"at the close"):
        target.write_document("index.md", text)
        target.write_document("result.json", b"[]")
        assert target.upload(60.0)
        assert open_storage(url).read("rank-000/index.md") == text
    assert open_storage(url).read("rank-000/result.json") == b"[]"
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    assert target.finish(60.0)


@pytest.mark.parametrize("there", [None, b"of a later process"], ids=["nobody", "a-later-process"])
def test_a_killed_process_leaves_its_page_only_where_there_is_none(
    tmp_path: Path, there: bytes | None
) -> None:
    """Its spool may be found long after another process of the rank has closed."""
    url = f"memory://{make_run().nonce}/run"
    target = make_target(url, None, tmp_path)
    (spool,) = tmp_path.iterdir()
    uploader_lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert uploader_lock is not None
    target.write_document("index.md", b"of the killed one")
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="running"))
    assert target._lock is not None
    target._lock.release()
    if there is not None:
        open_storage(url).replace("rank-000/index.md", there)

    assert Uploader(spool, url, None, uploader_lock).run() == 0

    assert open_storage(url).read("rank-000/index.md") == (there or b"of the killed one")
    assert open_storage(url).read("rank-000/process-1a2b3c4d.json")
