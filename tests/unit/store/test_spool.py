"""The writing side of the spool, with the uploader held off."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from storage.spooling import make_claim, make_manifest, make_part, make_target
from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool import SpoolTarget
from torchinstruments.store.spool_folder import (
    ABOUT,
    PROGRESS,
    UPLOADER_LOCK,
    WRITER_LOCK,
    Progress,
    TableProgress,
    list_parts,
    process_folders,
    read_about,
    read_progress,
    spool_folder_name,
    write_atomically,
)

_URL = "s3://bucket/run"


@pytest.fixture
def held(tmp_path: Path) -> Generator[SpoolTarget]:
    """Makes a spool and holds its uploader's lock, so that none is started."""
    target = make_target(_URL, {"key": "k", "secret": "s"}, tmp_path)
    (spool,) = tmp_path.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    yield target
    lock.release()


def test_parts_lie_in_the_order_of_writing(held: SpoolTarget) -> None:
    """One count over all tables, with the rows in each name; they are durable when the call returns."""
    held.write_part("history", 3, make_part([1, 2, 3], "history"))
    held.write_part("samples", 1, make_part([1]))
    held.write_part("history", 2, make_part([4, 5], "history"))
    assert [part.path.name for part in list_parts(Path(held.path))] == [
        "000000-history-3.parquet",
        "000001-samples-1.parquet",
        "000002-history-2.parquet",
    ]
    state = held.state()
    assert {name: table.rows_in_spool for name, table in state.tables.items()} == {"history": 5, "samples": 1}
    assert not held.direct


def test_the_folder_says_whose_it_is(held: SpoolTarget) -> None:
    """Whoever takes it over knows where the rows go, and nothing of how to get in there."""
    about = read_about(Path(held.path))
    assert (about.url, about.folder, about.process, about.generation) == (_URL, "rank-000", "1a2b3c4d", 0)
    assert (about.verified, about.beside, about.run.run_id) == (True, False, "night-7")


def test_a_claim_beside_is_remembered(tmp_path: Path) -> None:
    """The uploader learns that the run's folder lies beside the address."""
    target = make_target(_URL, None, tmp_path, claim=make_claim(f"{_URL}/run-night-7"))
    assert read_about(Path(target.path)).beside


def test_the_writers_lock_tells_that_it_lives(held: SpoolTarget) -> None:
    """It is held from the moment the folder appears until the closing."""
    lock = Path(held.path) / WRITER_LOCK
    assert not FileLock.is_free(lock)
    held.write_document("process-1a2b3c4d.json", make_manifest(held, status="closed"))
    assert not held.finish(0.0)
    assert FileLock.is_free(lock)


def test_after_closing_nothing_more_is_taken(held: SpoolTarget) -> None:
    """A part or document that comes later is refused, not lost in a folder that is given up."""
    held.write_document("process-1a2b3c4d.json", make_manifest(held, status="closed"))
    held.finish(0.0)
    with pytest.raises(OSError, match="was closed"):
        held.write_part("samples", 1, make_part([1]))
    with pytest.raises(OSError, match="was closed"):
        held.write_document("x.json", b"{}")


def test_a_process_that_leaves_documents_alone_can_give_its_folder_up(held: SpoolTarget) -> None:
    """A leader that does not observe has no manifest to close, and is done once its record lies here."""
    held.write_document("modules-1a2b3c4d.json", b"{}")
    held.close()
    held.close()
    assert FileLock.is_free(Path(held.path) / WRITER_LOCK)
    assert (Path(held.path) / "closed").exists()


def test_finishing_before_the_closed_manifest_keeps_it_open(held: SpoolTarget) -> None:
    """Waiting for an upload in the middle of a run gives nothing up."""
    held.write_document("process-1a2b3c4d.json", make_manifest(held, status="running"))
    assert not held.finish(0.0)
    held.write_part("samples", 1, make_part([1]))


def test_a_full_spool_refuses_like_a_full_disk(tmp_path: Path) -> None:
    """Beyond its bound, over all processes of the host, a part is refused and the reason is told."""
    first = make_target(_URL, None, tmp_path, process="00000001", max_bytes=10**6)
    (spool,) = tmp_path.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    part = make_part(range(100))
    first.write_part("samples", 100, part)
    second = make_target(_URL, None, tmp_path, process="00000002", max_bytes=len(part) + 1)
    with pytest.raises(OSError, match=r"holds .* bytes of at most") as caught:
        second.write_part("samples", 100, part)
    assert caught.value.errno == errno.ENOSPC
    assert "rows are dropped until" in second.state().last_error
    for written in list_parts(Path(first.path)):
        written.path.unlink()
    second.write_part("samples", 100, part)
    assert second.state().last_error == ""
    lock.release()


def test_a_spool_is_one_for_each_run_and_address(tmp_path: Path) -> None:
    """Ranks of a run share a folder, other runs and addresses have their own."""
    for rank, process in enumerate(("00000001", "00000002")):
        make_target(_URL, None, tmp_path, rank=rank, process=process)
    make_target("s3://bucket/other", None, tmp_path, process="00000003")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(
        [spool_folder_name("night-7", _URL), spool_folder_name("night-7", "s3://bucket/other")]
    )
    assert len(process_folders(tmp_path / spool_folder_name("night-7", _URL))) == 2


def test_only_its_owner_may_look_into_it(held: SpoolTarget) -> None:
    """Folders are 0700, whatever the umask."""
    for folder in (Path(held.path), Path(held.path).parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_an_unusable_spool_raises_for_the_caller(tmp_path: Path) -> None:
    """Where the spool cannot be made, the one who attaches hears of it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_target(_URL, None, tmp_path / "file")


def test_writing_to_the_spool_imports_no_client(tmp_path: Path) -> None:
    """A training process with a remote folder has neither a network client nor Polars in it."""
    code = (
        "import sys; from pathlib import Path\n"
        "from storage.spooling import make_manifest, make_part, make_target\n"
        "from torchinstruments.store.locks import FileLock\n"
        f"target = make_target('s3://bucket/run', dict(key='k'), Path({str(tmp_path)!r}))\n"
        "lock = FileLock.acquire(Path(target.path).parent / 'uploader.lock')\n"
        "target.write_part('samples', 1, make_part([1]))\n"
        "target.write_document('process-1a2b3c4d.json', make_manifest(target, status='closed'))\n"
        "target.finish(0.2)\n"
        "print([name for name in ('fsspec', 's3fs', 'polars', 'torch', 'botocore') if name in sys.modules])"
    )
    tests = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": tests}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_a_folder_that_was_removed_is_made_again(held: SpoolTarget) -> None:
    """It is private and locked, says whose it is, has its documents, and counts what is lost, told once."""
    folder = Path(held.path)
    held.write_part("history", 3, make_part([1, 2, 3], "history"))
    held.write_part("history", 2, make_part([4, 5], "history"))
    held.write_document("modules-1a2b3c4d.json", b"{}")
    up = TableProgress(next_part=1, rows=3, bytes=100, through=0)
    write_atomically(folder, PROGRESS, Progress(tables={"history": up}, verified=True))
    assert held.state().tables["history"].rows_in_spool == 2
    shutil.rmtree(folder)
    held.write_part("history", 1, make_part([6], "history"))

    assert folder.stat().st_mode & 0o777 == 0o700
    assert read_about(folder).process == "1a2b3c4d"
    assert not FileLock.is_free(folder / WRITER_LOCK)
    assert (folder / "documents" / "modules-1a2b3c4d.json").read_bytes() == b"{}"
    assert read_progress(folder) == Progress(tables={"history": up}, verified=True, is_behind=True)
    state = held.state().tables["history"]
    assert (state.next_part, state.rows, state.rows_in_spool, state.rows_dropped) == (1, 3, 1, 2)
    with pytest.raises(OSError, match=r"was removed, or a part of it, .* rows that lay in it are lost"):
        held.require_in_place()
    held.require_in_place()


def test_what_a_cleaner_leaves_of_a_folder_is_kept(held: SpoolTarget) -> None:
    """Old files go, as a cleaner of ``/tmp`` takes them; what they said is written again beside the rows."""
    folder = Path(held.path)
    held.write_part("samples", 1, make_part([1]))
    write_atomically(folder, PROGRESS, Progress(served="x"))
    for name in (ABOUT, WRITER_LOCK):
        (folder / name).unlink()
    held.write_document("process-1a2b3c4d.json", make_manifest(held, status="running"))
    assert read_about(folder).run.run_id == "night-7"
    assert not FileLock.is_free(folder / WRITER_LOCK)
    assert read_progress(folder) == Progress(served="x")
    state = held.state().tables["samples"]
    assert (state.rows_in_spool, state.rows_dropped) == (1, 0)
