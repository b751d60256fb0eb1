"""A lock that lives as long as its process, whatever becomes of it."""

import os
import subprocess
import sys
from pathlib import Path

from torchinstruments.store.locks import FileLock


def test_only_one_holds_it(tmp_path: Path) -> None:
    """The second one to ask, in the same process too, is told so, and has it after the release."""
    path = tmp_path / "lock"
    lock = FileLock.acquire(path)
    assert lock is not None
    assert FileLock.acquire(path) is None
    assert FileLock.acquire(path, timeout_s=0.1) is None
    assert not FileLock.is_free(path)
    lock.release()
    lock.release()
    assert FileLock.is_free(path)
    again = FileLock.acquire(path)
    assert again is not None
    again.release()


def test_a_missing_file_is_a_free_lock(tmp_path: Path) -> None:
    """Asking does not make the file."""
    assert FileLock.is_free(tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


def test_it_is_free_when_its_holder_was_killed(tmp_path: Path) -> None:
    """The kernel gives it back, without anybody's help."""
    path = tmp_path / "lock"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from torchinstruments.store.locks import FileLock\n"
        "lock = FileLock.acquire(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert not FileLock.is_free(path)
        process.kill()
        process.wait()
        assert FileLock.is_free(path)


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    """A data loader's worker that outlives its parent holds nothing: its copy is closed at the fork."""
    path = tmp_path / "lock"
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from torchinstruments.store.locks import FileLock\n"
        "lock = FileLock.acquire(Path(sys.argv[1]))\n"
        "if os.fork() == 0:\n"
        "    print(lock.descriptor, flush=True); sys.stdin.read(); os._exit(0)\n"
        "os._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"-1\n"
        process.wait()
        assert FileLock.is_free(path)


def test_a_held_lock_is_handed_to_a_child_without_a_gap(tmp_path: Path) -> None:
    """The child that inherits the descriptor holds the lock after its parent closed it, until it ends."""
    path = tmp_path / "lock"
    lock = FileLock.acquire(path)
    assert lock is not None
    code = (
        "import sys; from pathlib import Path\n"
        "from torchinstruments.store.locks import FileLock\n"
        "lock = FileLock.adopt(int(sys.argv[2]), Path(sys.argv[1]))\n"
        "print(lock is not None, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(lock.descriptor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(lock.descriptor,),
    ) as process:
        lock.close()
        assert not FileLock.is_free(path)
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        assert not FileLock.is_free(path)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        assert FileLock.is_free(path)


def test_a_descriptor_of_another_file_is_not_adopted(tmp_path: Path) -> None:
    """A number that a parent gave is believed only if it is the lock's own file."""
    (tmp_path / "lock").touch()
    with (tmp_path / "other").open("w") as other:
        assert FileLock.adopt(other.fileno(), tmp_path / "lock") is None
    assert FileLock.adopt(99_999, tmp_path / "lock") is None


def test_a_lock_on_a_removed_file_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    """Its last holder removes the file: whoever comes then locks the file that is there."""
    path = tmp_path / "lock"
    old = FileLock.acquire(path)
    assert old is not None
    path.unlink()
    new = FileLock.acquire(path)
    assert new is not None
    assert os.fstat(new.descriptor).st_ino == path.stat().st_ino
    old.release()
    new.release()
