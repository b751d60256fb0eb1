"""Opening places, and what a local folder does in trouble."""

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from torchinstruments.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageError,
    StorageNotFoundError,
)
from torchinstruments.store import local as local_module
from torchinstruments.store.filesystem import open_storage


def test_an_unknown_scheme_names_known_ones() -> None:
    """A typing error in the scheme is answered with what exists."""
    with pytest.raises(ConfigurationError, match=r"scheme 's4' of 's4://bucket/run' is not known.*s3"):
        open_storage("s4://bucket/run")


def test_a_scheme_without_its_package_names_the_package() -> None:
    """What to install is said, not what could not be imported."""
    with pytest.raises(ConfigurationError, match=r"'gs' of 'gs://bucket/run'.*[Ii]nstall gcsfs"):
        open_storage("gs://bucket/run")


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_folder_opens_by_path_and_by_url(tmp_path: Path, prefix: str) -> None:
    """Both spellings reach the same files, and people see the path."""
    storage = open_storage(f"{prefix}{tmp_path}/a run")
    storage.replace("x", b"1")
    assert (tmp_path / "a run" / "x").read_bytes() == b"1"
    assert storage.url == f"{tmp_path}/a run"
    assert storage.is_local


def test_opening_a_local_folder_imports_no_client(tmp_path: Path) -> None:
    """A training process that writes locally has neither fsspec nor what hangs on it."""
    code = (
        "import sys; from torchinstruments.store.filesystem import open_storage\n"
        f"open_storage({str(tmp_path)!r}).replace('x', b'1')\n"
        "print([name for name in ('fsspec', 's3fs', 'polars', 'torch', 'botocore') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_no_temporary_file_stays_or_shows(tmp_path: Path) -> None:
    """After writing and refused creation only the files themselves lie there; leftovers are not listed."""
    storage = open_storage(str(tmp_path))
    storage.replace("a", b"1")
    storage.create("b", b"1")
    storage.create("b", b"2")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    (tmp_path / ".a.0123.tmp").write_bytes(b"left by a crash")
    assert [entry.path for entry in storage.list()] == ["a", "b"]
    assert [entry.path for entry in storage.walk()] == ["a", "b"]


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    """Writing below a file says which path, and how to go on; reading there finds nothing."""
    (tmp_path / "file").write_text("x")
    storage = open_storage(str(tmp_path / "file"))
    with pytest.raises(
        StorageError, match=r"file/run.json cannot be written, because a file stands.*give another"
    ):
        storage.create("run.json", b"1")
    with pytest.raises(FileNotFoundError):
        storage.read("run.json")
    assert storage.list() == []


def test_a_folder_that_cannot_be_made_is_not_found() -> None:
    """A parent that allows no folder leads to one sentence with the path."""
    with pytest.raises(StorageNotFoundError, match=r"/proc/no-such-folder/run/run\.json"):
        open_storage("/proc/no-such-folder/run").create("run.json", b"1")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_refusal_says_what_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """What the kernel refuses comes back with the path and the way out."""

    def refuse(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local_module.os, "replace", refuse)
    with pytest.raises(StorageDeniedError, match=r"run.json was refused.*owner and the mode"):
        open_storage(str(tmp_path)).replace("run.json", b"1")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC reaches the caller as the operating system's own error."""

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_module.os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        open_storage(str(tmp_path)).replace("run.json", b"1")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_creation_is_exclusive_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """On a filesystem that knows no links the first creator wins too."""

    def refuse(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local_module.os, "link", refuse)
    storage = open_storage(str(tmp_path))
    assert storage.create("run.json", b"first")

    def overlook(_path: str) -> bool:
        return False

    monkeypatch.setattr(local_module.os.path, "lexists", overlook)
    assert not storage.create("run.json", b"second")
    assert storage.read("run.json") == b"first"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_link_whose_answer_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may carry out a link and report a failure; the file is the caller's all the same."""
    real = os.link

    def lose_the_answer(source: str, target: str) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(local_module.os, "link", lose_the_answer)
    assert open_storage(str(tmp_path)).create("run.json", b"mine")


def _race(folder: str, barrier: object, queue: object, number: int) -> None:
    storage = open_storage(folder)
    for race in range(20):
        barrier.wait()  # pyrefly: ignore[missing-attribute]
        won = storage.create(f"race-{race}.json", f"process {number}".encode())
        queue.put((race, number, won))  # pyrefly: ignore[missing-attribute]


def test_of_many_processes_exactly_one_creates_a_file(tmp_path: Path) -> None:
    """Eight processes race for twenty names in a folder that none has made; each has one winner."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(8), context.Queue()
    processes = [
        context.Process(target=_race, args=(str(tmp_path / "new"), barrier, queue, number))
        for number in range(8)
    ]
    for process in processes:
        process.start()
    outcomes = [queue.get(timeout=90) for _ in range(8 * 20)]
    for process in processes:
        process.join(30)
    for race in range(20):
        winners = [number for which, number, won in outcomes if which == race and won]
        assert len(winners) == 1
        assert (tmp_path / "new" / f"race-{race}.json").read_text() == f"process {winners[0]}"


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """While a file is replaced over and over, each reading has one of the versions whole."""
    storage = open_storage(str(tmp_path))
    versions = [bytes([value]) * 200_000 for value in range(4)]
    storage.replace("manifest.json", versions[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for version in versions:
                storage.replace("manifest.json", version)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            assert storage.read("manifest.json") in versions
    finally:
        stop.set()
        writer.join()


def test_a_walk_follows_a_linked_rank_folder_once(tmp_path: Path) -> None:
    """A rank's folder that was moved to another disk is read, and a loop of links ends."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "part").write_bytes(b"1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-000").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "run")
    assert [entry.path for entry in open_storage(str(tmp_path / "run")).walk()] == ["rank-000/part"]


def test_a_file_is_written_to_its_end_however_little_the_kernel_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write may take less than it was given; what is left is given to it again."""
    real = os.write

    def take_little(descriptor: int, data: memoryview) -> int:
        return real(descriptor, data[:3])

    monkeypatch.setattr(local_module.os, "write", take_little)
    storage = open_storage(str(tmp_path))
    storage.replace("new/run.json", b"0123456789")
    (tmp_path / "source").write_bytes(b"abcdefgh")
    storage.replace_together({"new/copy": tmp_path / "source"})

    assert storage.read("new/run.json") == b"0123456789"
    assert storage.read("new/copy") == b"abcdefgh"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # nobody closed it by hand
@pytest.mark.parametrize("later", range(4))
def test_an_interrupt_while_a_file_is_written_leaves_none(tmp_path: Path, later: int) -> None:
    """Whenever it comes once the file is there, nothing of it stays, and no descriptor is left open."""
    storage = open_storage(str(tmp_path))
    steps = 0

    def interrupt(frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal steps
        if frame.f_code.co_filename == local_module.__file__ and os.listdir(tmp_path):
            steps += 1
            if steps > later:
                raise KeyboardInterrupt
        return interrupt

    before, tracing = len(os.listdir("/proc/self/fd")), sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            storage.replace("run.json", b"0123456789")
    finally:
        sys.settrace(tracing)

    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before
