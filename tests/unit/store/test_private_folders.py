"""A spool lies in a folder of its user's own, or nowhere."""

import os
import stat
from pathlib import Path

import pytest

from storage.spooling import make_target
from torchinstruments.store.private_folders import make_private_folder, own_spool_root


def test_a_folder_and_its_missing_parents_are_private(tmp_path: Path) -> None:
    """Nobody else can look in, whatever the umask is."""
    old = os.umask(0)
    try:
        make_private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_open_folder_of_ones_own_is_closed(tmp_path: Path) -> None:
    """One that was made by hand, for everybody, is made private."""
    (tmp_path / "spool").mkdir()
    os.chmod(tmp_path / "spool", 0o777)
    make_private_folder(tmp_path / "spool")
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700


def test_a_link_is_refused(tmp_path: Path) -> None:
    """Somebody who knows a spool's name cannot lead rows elsewhere."""
    target = make_target("s3://bucket/run", None, tmp_path / "elsewhere")
    spool = Path(target.path).parent
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / spool.name).symlink_to(tmp_path)
    with pytest.raises(OSError, match="is a symbolic link"):
        make_target("s3://bucket/run", None, tmp_path / "here")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="is no folder"):
        make_private_folder(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused_and_a_shared_root_is_divided(tmp_path: Path) -> None:
    """In a root of somebody else each user has a folder; a spool of somebody else is refused."""
    (tmp_path / "root").mkdir()
    assert own_spool_root(tmp_path / "root") == tmp_path / "root"
    os.chown(tmp_path / "root", 4711, 4711)
    assert own_spool_root(tmp_path / "root") == tmp_path / "root" / f"user-{os.geteuid()}"
    target = make_target("s3://bucket/run", None, tmp_path / "root")
    spool = Path(target.path).parent
    assert spool.parent == tmp_path / "root" / f"user-{os.geteuid()}"
    os.chown(spool, 4711, 4711)
    with pytest.raises(OSError, match=f"belongs to user 4711, not to {os.geteuid()}"):
        make_target("s3://bucket/run", None, tmp_path / "root", process="aaaaaaaa")
