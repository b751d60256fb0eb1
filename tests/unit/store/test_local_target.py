"""Parts into a local folder: numbers without gaps, nothing written over, failures that can be repeated."""

import errno
import shutil
from pathlib import Path

import pytest

from torchinstruments.errors import RunFormatError
from torchinstruments.store.filesystem import LocalStorage
from torchinstruments.store.local_target import LocalTarget


class _Failing(LocalStorage):
    """A folder on a disk that is full from time to time."""

    fails_before = False
    fails_after = False

    def create(self, path: str, data: bytes) -> bool:  # pyrefly: ignore[missing-override-decorator]
        """Fails before or after the writing, where it is told to."""
        if self.fails_before:
            raise OSError(errno.ENOSPC, "No space left on device")
        created = super().create(path, data)
        if self.fails_after:
            raise OSError(errno.EIO, "Input/output error")
        return created


@pytest.fixture
def storage(tmp_path: Path) -> _Failing:
    """Opens a new folder."""
    return _Failing(str(tmp_path))


def test_parts_are_numbered_by_table(storage: _Failing) -> None:
    """Each table counts from 0, and the state tells rows and bytes of what lies there."""
    target = LocalTarget(storage, "rank-003", "1a2b3c4d")
    target.write_part("history", 10, b"12345")
    target.write_part("history", 20, b"123")
    target.write_part("steps", 1, b"1")
    assert [entry.path for entry in storage.walk()] == [
        "rank-003/history.parts/part-1a2b3c4d-000000.parquet",
        "rank-003/history.parts/part-1a2b3c4d-000001.parquet",
        "rank-003/steps.parts/part-1a2b3c4d-000000.parquet",
    ]
    state = target.state()
    history = state.tables["history"]
    assert (history.next_part, history.rows, history.bytes, history.rows_in_spool) == (2, 30, 8, 0)
    assert state.tables["steps"].next_part == 1
    assert state.last_error == ""
    assert target.direct
    assert target.finish(0.0)


def test_a_rank_that_is_alone_uses_the_runs_folder(storage: _Failing) -> None:
    """Without a rank's folder parts and documents lie in the run's own."""
    target = LocalTarget(storage, "", "1a2b3c4d")
    target.write_part("samples", 1, b"1")
    target.write_document("process-1a2b3c4d.json", b"{}")
    assert [entry.path for entry in storage.walk()] == [
        "process-1a2b3c4d.json",
        "samples.parts/part-1a2b3c4d-000000.parquet",
    ]


def test_a_failed_write_uses_up_no_number(storage: _Failing) -> None:
    """On a full disk the caller hears of it, and the same part comes under the same number later."""
    target = LocalTarget(storage, "", "1a2b3c4d")
    storage.fails_before = True
    with pytest.raises(OSError, match="No space left"):
        target.write_part("samples", 1, b"1")
    assert "No space left" in target.state().last_error
    storage.fails_before = False
    target.write_part("samples", 1, b"1")
    assert target.state().last_error == ""
    assert (target.state().tables["samples"].next_part, target.state().tables["samples"].rows) == (1, 1)


def test_a_part_whose_writing_failed_late_is_not_there_twice(storage: _Failing) -> None:
    """A file that appeared although its writing was reported as failed is replaced by the repetition."""
    target = LocalTarget(storage, "", "1a2b3c4d")
    storage.fails_after = True
    with pytest.raises(OSError, match="Input/output"):
        target.write_part("samples", 1, b"one row")
    storage.fails_after = False
    target.write_part("samples", 2, b"that row and another")
    assert [storage.read(entry.path) for entry in storage.walk()] == [b"that row and another"]


def test_somebody_elses_file_is_left_alone(storage: _Failing) -> None:
    """A name that is taken is skipped, and the number counted as one that holds no part of this process."""
    storage.replace("samples.parts/part-1a2b3c4d-000000.parquet", b"theirs")
    target = LocalTarget(storage, "", "1a2b3c4d")
    target.write_part("samples", 1, b"mine")
    assert storage.read("samples.parts/part-1a2b3c4d-000000.parquet") == b"theirs"
    assert storage.read("samples.parts/part-1a2b3c4d-000001.parquet") == b"mine"
    samples = target.state().tables["samples"]
    assert (samples.next_part, samples.missing) == (2, (0,))


def test_the_numbers_that_were_skipped_are_listed_up_to_a_bound(storage: _Failing) -> None:
    """However many names are taken, the manifest stays small: the first hundred are named."""
    for number in range(120):
        storage.replace(f"samples.parts/part-1a2b3c4d-{number:06d}.parquet", b"theirs")
    target = LocalTarget(storage, "", "1a2b3c4d")
    target.write_part("samples", 1, b"mine")
    samples = target.state().tables["samples"]
    assert samples.next_part == 121
    assert samples.missing == tuple(range(100))


def test_a_folder_that_was_removed_comes_back_with_its_documents_and_is_told_of_once(
    storage: _Failing, tmp_path: Path
) -> None:
    """Whatever is written next brings it back; parts go on by their numbers, and the next look says it."""

    def restore() -> None:
        storage.create("run.json", b"run")

    restore()
    target = LocalTarget(storage, "rank-003", "1a2b3c4d", restore=restore)
    target.write_document("modules-1a2b3c4d.json", b"modules")
    target.write_document("process-1a2b3c4d.json", b"first")
    target.write_part("history", 10, b"12345")
    target.require_in_place()

    shutil.rmtree(tmp_path)
    target.write_part("history", 10, b"123456")

    assert {entry.path: storage.read(entry.path) for entry in storage.walk()} == {
        "rank-003/history.parts/part-1a2b3c4d-000001.parquet": b"123456",
        "rank-003/modules-1a2b3c4d.json": b"modules",
        "rank-003/process-1a2b3c4d.json": b"first",
        "run.json": b"run",
    }
    with pytest.raises(OSError, match="was removed while this process wrote to it; it was made again"):
        target.require_in_place()
    target.require_in_place()
    (tmp_path / "run.json").unlink()
    with pytest.raises(OSError, match="was removed"):
        target.require_in_place()
    assert storage.read("run.json") == b"run"


def test_a_folder_that_cannot_come_back_is_an_error_of_the_storage(storage: _Failing, tmp_path: Path) -> None:
    """The part waits like on a full disk."""

    def restore() -> None:
        raise RunFormatError("another run is there now")

    target = LocalTarget(storage, "", "1a2b3c4d", restore=restore)
    target.write_document("process-1a2b3c4d.json", b"{}")
    shutil.rmtree(tmp_path)
    with pytest.raises(OSError, match="another run is there now"):
        target.write_part("history", 1, b"1")
