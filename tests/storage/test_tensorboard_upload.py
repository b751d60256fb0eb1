"""Event files on their way to a real object store: whole, once, and readable by TensorBoard."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.spooling import make_claim, make_identity, make_manifest, make_part, make_target, sample_ids
from torchinstruments.sinks.event_files import HistogramFiles, open_histogram_files
from torchinstruments.store import layout
from torchinstruments.store.filesystem import Storage, open_storage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool import SpoolTarget
from torchinstruments.store.spool_folder import UPLOADER_LOCK, list_segments, process_folders
from torchinstruments.store.uploader import Uploader
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore
from unit.sinks.deliveries import histogram_record
from unit.sinks.event_reading import num_records, read_histograms

_WAIT_S = 60.0
_FOLDER = "rank-000/tensorboard"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder under which spools lie."""
    return tmp_path / "spool"


def opened(target: SpoolTarget, *, process: str = "1a2b3c4d") -> HistogramFiles:
    """Returns the histograms of a process that spools."""
    files = open_histogram_files(target, None, make_identity(process=process), make_claim("x"))
    assert files is not None
    return files


def fetched(storage: Storage, folder: Path) -> dict[str, int]:
    """Copies the event files of rank 0 here; returns their names and the records in them."""
    folder.mkdir()
    found: dict[str, int] = {}
    for entry in storage.list(_FOLDER):
        path = folder / entry.path.rpartition("/")[2]
        path.write_bytes(storage.read(entry.path))
        found[path.name] = num_records(path)
    return found


def steps(folder: Path) -> list[int]:
    """Returns the steps of the only tag in some event files."""
    (events,) = read_histograms(folder).values()
    return [event.step for event in events]


def close(target: SpoolTarget) -> bool:
    """Ends a process in order."""
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    return target.finish(_WAIT_S)


def test_finished_segments_go_up_and_the_open_one_does_not(
    seaweed: ObjectStore, bucket: str, root: Path, tmp_path: Path
) -> None:
    """Each is one object under the name that it has for ever; at the end none is left in the spool."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root)
    files = opened(target)
    for ordinal in range(2):
        files.write(ordinal, [histogram_record("a")])
    files.close()
    files.write(2, [histogram_record("a")])
    assert target.upload(_WAIT_S)

    storage = open_storage(url, seaweed.storage_options)
    assert list(fetched(storage, tmp_path / "first").values()) == [3]
    assert steps(tmp_path / "first") == [0, 1]
    files.close()
    assert close(target)
    names = fetched(storage, tmp_path / "all")
    assert list(names.values()) == [3, 2]
    assert all(name.endswith(f".here.1a2b3c4d.00000{number}") for number, name in enumerate(names))
    assert steps(tmp_path / "all") == [0, 1, 2]
    _until_gone(target.segments.parent)


def test_what_a_killed_process_left_goes_up(
    seaweed: ObjectStore, bucket: str, root: Path, tmp_path: Path
) -> None:
    """Also the segment that it was writing, with everything that it wrote."""
    url = f"s3://{bucket}/run"
    program = textwrap.dedent(
        """
        import os, pickle, signal, sys
        from pathlib import Path
        from storage.spooling import make_target
        from storage.test_tensorboard_upload import opened
        from unit.sinks.deliveries import histogram_record

        url, options, root = pickle.loads(bytes.fromhex(sys.argv[1]))
        target = make_target(url, options, root)
        target.keep_alive()
        files = opened(target)
        for ordinal in range(4):
            if ordinal == 2:
                files.close()
            assert files.write(ordinal, [histogram_record("a")]) == []
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    errand = pickle.dumps((url, seaweed.storage_options, root)).hex()
    done = subprocess.run(
        [sys.executable, "-c", program, errand], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == -signal.SIGKILL

    other = make_target(url, seaweed.storage_options, root, rank=1, process="5e6f7a8b")
    other.write_part("samples", 1, make_part([1]))
    (left,) = [folder for folder in process_folders(root.iterdir().__next__()) if "1a2b3c4d" in folder.name]
    _until_gone(left)
    storage = open_storage(url, seaweed.storage_options)
    assert list(fetched(storage, tmp_path / "all").values()) == [3, 3]
    assert steps(tmp_path / "all") == [0, 1, 2, 3]
    other.close()


class _CrashedError(BaseException):
    """Ends an uploader in the middle, as a signal would."""


def test_a_crash_after_a_put_doubles_no_segment(
    seaweed: ObjectStore, bucket: str, root: Path, tmp_path: Path
) -> None:
    """The same bytes go under the same name again."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root)
    (spool,) = root.iterdir()
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    files = opened(target)
    for ordinal in range(3):
        files.write(ordinal, [histogram_record("a")])
        files.close()
    puts: list[str] = []

    def crash(path: str) -> None:
        puts.append(path)
        raise _CrashedError

    target.upload(0.0)
    with pytest.raises(_CrashedError):
        Uploader(spool, url, seaweed.storage_options, lock, after_put=crash).run()
    assert len(list_segments(process_folders(spool)[0], open_too=True)) == 3
    assert target.upload(_WAIT_S)
    assert puts[0].startswith(f"{_FOLDER}/events.out.tfevents.")
    storage = open_storage(url, seaweed.storage_options)
    assert list(fetched(storage, tmp_path / "all").values()) == [2, 2, 2]
    assert steps(tmp_path / "all") == [0, 1, 2]
    assert close(target)


def test_a_segment_that_is_up_is_never_put_again(
    bucket: str,
    root: Path,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
) -> None:
    """What grows later goes into other objects, so that upload stays linear in what was observed."""
    url = f"s3://{bucket}/run"
    target = make_target(url, proxied(), root)
    files = opened(target)
    for ordinal in range(3):
        files.write(ordinal, [histogram_record("a")])
        files.close()
        assert target.upload(_WAIT_S)
    assert close(target)
    puts = [entry.target for entry in fault_proxy.log if entry.method == "PUT" and "tfevents" in entry.target]
    assert len(puts) == len(set(puts)) == 3


def test_an_outage_holds_segments_back_and_loses_none(
    bucket: str,
    root: Path,
    tmp_path: Path,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
    seaweed: ObjectStore,
) -> None:
    """They wait in the spool beside the rows."""
    url = f"s3://{bucket}/run"
    fault_proxy.status(503, "SlowDown")
    target = make_target(url, proxied(), root)
    files = opened(target)
    target.write_part("samples", 1, make_part([1]))
    files.write(0, [histogram_record("a")])
    files.close()
    assert not target.upload(1.0)
    assert len(list(target.segments.iterdir())) == 1
    fault_proxy.clear()
    assert target.upload(_WAIT_S)
    storage = open_storage(url, seaweed.storage_options)
    assert sample_ids(storage) == [1]
    assert list(fetched(storage, tmp_path / "all").values()) == [2]
    assert close(target)


def test_event_files_are_no_strangers_in_a_run(seaweed: ObjectStore, bucket: str, root: Path) -> None:
    """They lie beside the parts of the same rank, on a store as in a folder."""
    url = f"s3://{bucket}/run"
    target = make_target(url, seaweed.storage_options, root)
    files = opened(target)
    target.write_part("samples", 1, make_part([1]))
    files.write(0, [histogram_record("a")])
    files.close()
    assert close(target)
    storage = open_storage(url, seaweed.storage_options)
    names = {entry.path.partition("/")[2].partition("/")[0] for entry in storage.walk() if "/" in entry.path}
    assert {layout.TENSORBOARD, "samples.parts"} <= names


def _until_gone(folder: Path) -> None:
    end_s = time.monotonic() + _WAIT_S
    while folder.exists():
        assert time.monotonic() < end_s, list(folder.rglob("*"))
        time.sleep(0.1)
