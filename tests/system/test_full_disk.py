"""A disk that is really full while a model trains: training goes on, and nothing is lost in silence."""

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from torchinstruments import AlwaysSampler, HistoryConfig, inject_observer, open_run

pytestmark = pytest.mark.system


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def make_model() -> nn.Module:
    """Returns a small model."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(model: nn.Module, num_steps: int) -> None:
    """Runs forwards and backwards."""
    for _ in range(num_steps):
        model(torch.randn(3, 4)).sum().backward()


def fill(disk: Path) -> Path:
    """Fills a disk to the last byte and returns the file that does."""
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"0" * 2**21)
    return filler


def test_rows_wait_for_space_and_arrive_when_it_returns(small_disk: Path) -> None:
    """While the disk is full a flush says no; after space was freed every row is there once."""
    model = make_model()
    observer = inject_observer(
        model,
        output_dir=small_disk / "run",
        sampler=AlwaysSampler(),
        history_config=HistoryConfig(buffer_rows=100),
    )
    train(model, 1)
    assert observer.flush()
    filler = fill(small_disk)
    train(model, 20)
    with pytest.warns(RuntimeWarning, match=r"storage failed.*No space left.*training goes on"):
        assert not observer.flush()
    filler.unlink()
    train(model, 1)
    assert observer.close()
    assert observer.counters.rows_dropped == 0
    run = open_run(observer.url)
    assert run.samples().collect()["sample_id"].sort().to_list() == list(range(22))
    assert run.history().collect().height == observer.counters.rows == 22 * 6 * 9


def test_a_disk_that_stays_full_is_said_at_close(small_disk: Path) -> None:
    """Training ends, close returns False, and the user reads that the rest is lost."""
    model = make_model()
    observer = inject_observer(model, output_dir=small_disk / "run", sampler=AlwaysSampler())
    train(model, 1)
    assert observer.flush()
    fill(small_disk)
    train(model, 20)
    with pytest.warns(RuntimeWarning) as caught:
        assert not observer.close(timeout_s=5.0)
    said = " ".join(str(warning.message) for warning in caught)
    assert "No space left" in said
    assert "lost" in said or "given up" in said


def test_a_disk_that_becomes_read_only_and_writable_again(small_disk: Path) -> None:
    """One warning while it refuses, and every row is there once it takes them."""
    model = make_model()
    # An event file that is open for writing would keep the disk from becoming read-only.
    observer = inject_observer(model, output_dir=small_disk / "run", sampler=AlwaysSampler(), histograms=())
    train(model, 1)
    assert observer.flush()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            train(model, 2)
            assert not observer.flush()
    assert [str(one.message).partition(":")[2][:16] for one in told] == [" storage failed:"]
    assert "Read-only file system" in str(told[0].message)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert observer.close()
    run = open_run(observer.url)
    assert run.samples().collect()["sample_id"].sort().to_list() == list(range(7))
    assert run.history().collect().height == observer.counters.rows == 7 * 6 * 9
    assert observer.counters.rows_dropped == 0
