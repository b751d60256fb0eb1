"""The copy of a rank's history in one file."""

from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from torchinstruments.store import schema
from torchinstruments.store.derived import write_history_copy
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.run import open_run
from unit.store.folders import begin_run, samples, write_rank, writer
from unit.store.material import run_record


def copy_of(folder: Path) -> Path:
    """Returns the copy that was made."""
    path = write_history_copy(folder, "run-1")
    assert path is not None
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A rank with many small parts, of two generations."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage, generations=2)
    one = writer(storage, 0, "ffffffff", buffer_rows=1)
    one.start(run_record(), ())
    for delivery in samples(5):
        one.add_sample(delivery)
    one.close(0)
    write_rank(storage, 0, "00000000", generation=1)
    return tmp_path / "rank-000"


def test_the_copy_holds_all_rows_of_all_generations_in_the_order_of_writing(folder: Path) -> None:
    """It is what the parts hold, in one file with the declared schema."""
    path = copy_of(folder)

    assert path == folder / "history.parquet"
    assert_frame_equal(pl.read_parquet(path), open_run(str(folder.parent)).history().collect())
    assert pq.read_schema(path).remove_metadata().equals(schema.HISTORY)


def test_many_small_parts_become_one_row_group(folder: Path) -> None:
    """The copy costs less than the parts: it has one footer."""
    path = copy_of(folder)

    assert pq.read_metadata(path).num_row_groups == 1
    assert "RLE_DICTIONARY" in pq.read_metadata(path).row_group(0).column(10).encodings
    assert path.stat().st_size * 4 < sum(part.stat().st_size for part in (folder / "history.parts").iterdir())


def test_a_part_that_cannot_be_read_is_left_out(folder: Path) -> None:
    """The rest is copied, and nothing is raised."""
    parts = sorted((folder / "history.parts").iterdir())
    parts[0].write_bytes(b"PAR1")
    (folder / "history.parts" / "notes.txt").write_text("mine")

    path = copy_of(folder)

    assert set(pl.read_parquet(path)["process"]) == {"ffffffff"}


def test_too_much_is_not_copied(folder: Path) -> None:
    """Above its bound there is no copy, since the parts can be read as they are."""
    assert write_history_copy(folder, "run-1", max_bytes=1000) is None
    assert not (folder / "history.parquet").exists()


def test_a_copy_that_takes_too_long_is_given_up_and_leaves_nothing(folder: Path) -> None:
    """Closing does not wait for it longer than it may."""
    assert write_history_copy(folder, "run-1", timeout_s=-1.0) is None
    assert [path.name for path in folder.iterdir() if "history.parquet" in path.name] == []


def test_parts_of_another_run_are_not_copied(folder: Path) -> None:
    """A copy is of one run only."""
    assert write_history_copy(folder, "run-2") is None


def test_a_new_copy_takes_the_place_of_the_old(folder: Path) -> None:
    """Closing a later generation renews it."""
    (folder / "history.parquet").write_bytes(b"old")

    path = copy_of(folder)

    assert pq.read_metadata(path).num_rows == 5 * 12 + 3 * 12


def test_a_folder_without_parts_gives_no_copy(tmp_path: Path) -> None:
    """There is nothing to copy."""
    assert write_history_copy(tmp_path, "run-1") is None
