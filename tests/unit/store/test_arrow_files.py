"""The folders of a run as a filesystem of Arrow."""

import os
from pathlib import Path

import pytest
from pyarrow import fs

from torchinstruments.store.arrow_files import StorageFiles, arrow_path
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.local import LocalStorage


def test_a_file_is_read_from_the_folder_that_its_path_names(tmp_path: Path) -> None:
    """Local and remote folders lie side by side."""
    (tmp_path / "a b.bin").write_bytes(b"local")
    memory = open_storage(f"memory://arrow-{os.getpid()}")
    memory.create("sub/a=b.bin", b"remote")
    files = fs.PyFileSystem(StorageFiles([LocalStorage(str(tmp_path)), memory]))

    with files.open_input_file(arrow_path(0, "a b.bin")) as file:
        assert file.read() == b"local"
    with files.open_input_file(arrow_path(1, "sub/a=b.bin")) as file:
        file.seek(2)
        assert file.read() == b"mote"


def test_nothing_can_be_written_or_deleted_through_it(tmp_path: Path) -> None:
    """A reader of a run has no way to harm it."""
    (tmp_path / "a").write_bytes(b"x")
    files = fs.PyFileSystem(StorageFiles([LocalStorage(str(tmp_path))]))

    for attempt in (
        lambda: files.delete_file("0/a"),
        lambda: files.delete_dir("0"),
        lambda: files.create_dir("0/b"),
        lambda: files.move("0/a", "0/b"),
        lambda: files.copy_file("0/a", "0/b"),
        lambda: files.open_output_stream("0/b"),
        lambda: files.open_append_stream("0/a"),
    ):
        with pytest.raises(PermissionError, match="a run is only read"):
            attempt()
    assert (tmp_path / "a").read_bytes() == b"x"
