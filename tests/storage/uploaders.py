"""What tests of living uploaders share: a folder for spools, and who is at work there."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

__all__ = ["WAIT_S", "root", "until", "uploader_pids"]

WAIT_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Generator[Path]:
    """Returns a folder for spools, and ends whatever uploader is still at work there afterwards."""
    folder = tmp_path / "spools"
    yield folder
    for spool in folder.iterdir() if folder.exists() else ():
        for pid in uploader_pids(spool):
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> bool:
    """Waits until something holds; returns whether it came to hold in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    return True


def uploader_pids(spool: Path) -> list[int]:
    """Returns the living uploader processes of one spool."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            arguments = Path(f"/proc/{int(name)}/cmdline").read_bytes().split(b"\0")
            if b"torchinstruments.store.uploader" in arguments and str(spool).encode() in arguments:
                found.append(int(name))
    return found
