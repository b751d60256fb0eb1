"""What a killed merge leaves in the folder for temporary files."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from merge.run_folder import whole_run
from torchinstruments.merge import abandoned
from torchinstruments.merge.comparison import ComparisonFold
from torchinstruments.merge.engine import merge_run


def left(folder: Path, age_s: float) -> Path:
    """Makes a folder as a killed merge leaves it."""
    folder.mkdir()
    table = folder / "comparison.parquet"
    table.write_bytes(b"x")
    for path in (table, folder):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_old_tables_of_killed_merges_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in which nothing was written for days; one at work, a link and other folders stay."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    name = abandoned.TEMPORARY_PREFIX
    old = left(temporary / f"{name}old", abandoned.MIN_AGE_S + 60)
    recent = left(temporary / f"{name}recent", abandoned.MIN_AGE_S - 600)
    at_work = left(temporary / f"{name}at-work", abandoned.MIN_AGE_S + 60)
    os.utime(at_work / "comparison.parquet")
    other = left(temporary / "another-program", abandoned.MIN_AGE_S + 60)
    elsewhere = left(tmp_path / "elsewhere", abandoned.MIN_AGE_S + 60)
    link = temporary / f"{name}link"
    link.symlink_to(elsewhere)
    assert merge_run(whole_run(tmp_path / "run").url).complete
    assert not old.exists()
    assert sorted(temporary.iterdir()) == sorted([recent, at_work, other, link])
    assert (elsewhere / "comparison.parquet").exists()


def test_the_tables_of_merges_are_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that a merge works in is one that a later merge knows."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ComparisonFold():
        [folder] = tmp_path.iterdir()
        assert folder.name.startswith(abandoned.TEMPORARY_PREFIX)
