"""Event files that grow, in a folder and in the spool."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.spooling import make_target
from torchinstruments.store import layout
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.local_target import LocalTarget
from torchinstruments.store.segments import SYNC_EVERY_S, SegmentBounds, SegmentFiles, open_segments
from unit.store.material import HandClock, MemoryTarget

BOUNDS = SegmentBounds(max_bytes=100, max_age_s=60.0)


def header() -> bytes:
    """What every file begins with."""
    return b"head"


def segments(
    folder: Path,
    clock: HandClock,
    bounds: SegmentBounds | None = None,
    require_room: Callable[[int], None] | None = None,
) -> SegmentFiles:
    """Returns the files of a process."""
    return SegmentFiles(
        folder,
        host="node a/1",
        process="1a2b3c4d",
        header=header,
        bounds=bounds,
        require_room=require_room,
        clock=clock,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files' contents by the end of their names, in the order of the names."""
    return {path.name.rpartition("1a2b3c4d.")[2]: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_file_in_place_is_whole_after_every_write(tmp_path: Path) -> None:
    """TensorBoard can follow it while it grows, and its name sorts by time."""
    files = segments(tmp_path / "new", HandClock())
    files.append(b"one")
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "events.out.tfevents.1700001000.node-a-1.1a2b3c4d.000000"
    assert path.read_bytes() == b"headone"
    files.append(b"two")
    assert path.read_bytes() == b"headonetwo"
    files.close()
    assert path.read_bytes() == b"headonetwo"


def test_a_file_in_place_is_never_finished_by_size_or_age(tmp_path: Path) -> None:
    """One file a process is what TensorBoard expects of a writer."""
    clock = HandClock()
    files = segments(tmp_path, clock)
    for _ in range(10):
        clock.now_s += 1e6
        files.tick()
        files.append(bytes(100_000))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_segment_grows_under_another_name_until_it_is_full(tmp_path: Path) -> None:
    """What is under its own name grows no more."""
    files = segments(tmp_path, HandClock(), BOUNDS)
    files.append(bytes(60))
    assert list(contents(tmp_path)) == ["000000.open"]
    files.append(bytes(60))
    files.append(b"next")
    found = contents(tmp_path)
    assert list(found) == ["000000", "000001.open"]
    assert (len(found["000000"]), found["000001.open"]) == (124, b"headnext")


def test_an_old_segment_is_finished(tmp_path: Path) -> None:
    """At the tick, however small it is; without anything new no other is begun."""
    clock = HandClock()
    files = segments(tmp_path, clock, BOUNDS)
    files.append(b"one")
    clock.now_s += 59
    files.tick()
    assert list(contents(tmp_path)) == ["000000.open"]
    clock.now_s += 1
    files.tick()
    clock.now_s += 1000
    files.tick()
    assert contents(tmp_path) == {"000000": b"headone"}


def test_closing_finishes_and_closing_again_does_nothing(tmp_path: Path) -> None:
    """A close of nothing makes no file either."""
    files = segments(tmp_path, HandClock(), BOUNDS)
    files.close()
    assert contents(tmp_path) == {}
    files.append(b"one")
    files.close()
    files.close()
    assert contents(tmp_path) == {"000000": b"headone"}


def test_what_was_written_is_synced_within_half_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for everything that waits, and not again without anything new."""
    synced: list[int] = []
    fsync = os.fsync

    def count(descriptor: int) -> None:
        synced.append(descriptor)
        fsync(descriptor)

    clock = HandClock()
    files = segments(tmp_path, clock)
    files.append(b"one")
    monkeypatch.setattr(os, "fsync", count)
    clock.now_s += SYNC_EVERY_S - 1
    files.append(b"two")
    files.tick()
    assert synced == []
    clock.now_s += 1
    files.tick()
    files.tick()
    assert len(synced) == 1
    files.append(b"three")
    files.sync()
    files.sync()
    assert len(synced) == 2


def test_half_a_record_is_taken_back_where_the_disk_is_full(tmp_path: Path) -> None:
    """The file ends with the last whole record, and goes on when there is room again."""
    files = segments(tmp_path, HandClock())
    files.append(b"one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as raised:  # noqa: PT011 - the number is looked at below
            files.append(bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    assert contents(tmp_path) == {"000000": b"headone"}
    files.append(b"two")
    assert contents(tmp_path) == {"000000": b"headonetwo"}


def test_a_file_that_could_not_be_begun_leaves_nothing(tmp_path: Path) -> None:
    """The next try has another number."""
    files = segments(tmp_path, HandClock())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError):  # noqa: PT011 - any refusal of the kernel
            files.append(b"one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == {}
    files.append(b"one")
    assert contents(tmp_path) == {"000001": b"headone"}


def test_a_name_that_is_taken_is_not_written_over(tmp_path: Path) -> None:
    """Somebody else's file stays, and the next number is used."""
    (tmp_path / "events.out.tfevents.1700001000.node-a-1.1a2b3c4d.000000").write_bytes(b"theirs")
    files = segments(tmp_path, HandClock())
    files.append(b"one")
    assert contents(tmp_path) == {"000000": b"theirs", "000001": b"headone"}


def test_where_there_is_no_room_nothing_is_written(tmp_path: Path) -> None:
    """The refusal is what comes out."""

    def refuse(num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, f"no room for {num_bytes} bytes")

    files = segments(tmp_path, HandClock(), BOUNDS, refuse)
    with pytest.raises(OSError, match="no room for 3 bytes"):
        files.append(b"one")
    assert list(tmp_path.iterdir()) == []


def test_a_target_decides_where_event_files_go(tmp_path: Path) -> None:
    """In the rank's folder, or in the spool, or nowhere."""
    local = LocalTarget(LocalStorage(str(tmp_path)), "rank-000", "1a2b3c4d")
    place = {"host": "node-a", "process": "1a2b3c4d", "header": header}
    files = open_segments(local, tmp_path / "rank-000", **place)
    assert files is not None
    files.append(b"one")
    assert contents(tmp_path / "rank-000" / layout.TENSORBOARD) == {"000000": b"headone"}

    spool = make_target(str(tmp_path / "shared"), None, tmp_path / "spool")
    files = open_segments(spool, tmp_path / "rank-000", **place)
    assert files is not None
    files.append(b"two")
    assert contents(spool.segments) == {"000000.open": b"headtwo"}
    spool.close()

    assert open_segments(MemoryTarget(), None, **place) is None


def test_event_files_leave_half_of_the_spool_to_rows(tmp_path: Path) -> None:
    """Beyond that they are refused, while parts still are not."""
    spool = make_target(str(tmp_path / "shared"), None, tmp_path / "spool", max_bytes=1000)
    files = open_segments(spool, None, host="node-a", process="1a2b3c4d", header=header)
    assert files is not None
    files.append(bytes(400))
    with pytest.raises(OSError, match="event files may fill half of it"):
        files.append(bytes(200))
    spool._started = True
    spool.write_part("history", 1, bytes(500))
    with pytest.raises(OSError, match="rows are dropped"):
        spool.write_part("history", 1, bytes(300))
    spool.close()
