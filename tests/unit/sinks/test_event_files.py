"""The run's own histograms in event files."""

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from torchinstruments.sinks.event_files import RETRY_AFTER_S, HistogramFiles, open_histogram_files
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.local_target import LocalTarget
from unit.sinks.deliveries import histogram_record, missing_record
from unit.sinks.event_reading import dashboard_tags, read_histograms
from unit.store.material import START_US, HandClock, MemoryTarget, claim, identity


def open_files(folder: Path, *, generation: int = 0, process: str = "1a2b3c4d") -> HistogramFiles:
    """Returns the files of a process whose rank's folder is given."""
    target = LocalTarget(LocalStorage(str(folder)), "", process)
    files = open_histogram_files(target, folder, identity(process=process), claim(generation))
    assert files is not None
    return files


def test_tensorboard_reads_back_what_was_observed(tmp_path: Path) -> None:
    """Tag, step, time, moments and buckets, as its own reader and its dashboard see them."""
    files = open_files(tmp_path, generation=1)
    record = histogram_record(
        "enc.0", call_index=2, tensor_path="output.a b", name="wide", timestamp_us=START_US + 250_000
    )
    assert files.write(7, [record]) == []
    files.close()

    folder = tmp_path / "tensorboard"
    tag = "torchinstruments/modules/enc.0/call_2/output.a%20b/histograms/wide"
    ((found, (event,)),) = read_histograms(folder).items()
    assert (found, event.step, event.wall_time) == (tag, 1_000_000_007, START_US / 1e6 + 0.25)
    value = event.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (-3.0, 9.0, 5.0, 10.0, 96.5)
    assert list(value.bucket_limit) == [math.nextafter(0.0, -math.inf), 1.0, 2.0, 9.0]
    assert list(value.bucket) == [1, 1, 2, 1]
    assert dashboard_tags(folder) == [tag]


def test_root_and_later_traversals_have_tags_of_their_own(tmp_path: Path) -> None:
    """As scalars have in a metric logger."""
    files = open_files(tmp_path)
    files.write(0, [histogram_record(""), histogram_record("a", tensor_path="grad_output", backward_index=1)])
    files.close()
    assert sorted(read_histograms(tmp_path / "tensorboard")) == [
        "torchinstruments/modules/@root/call_0/output/histograms/distribution",
        "torchinstruments/modules/a/call_0/grad_output/backward_1/histograms/distribution",
    ]


def test_without_a_histogram_there_is_no_file(tmp_path: Path) -> None:
    """Neither are TensorBoard's messages imported for it."""
    files = open_files(tmp_path)
    files.tick()
    files.flush()
    (missing,) = files.write(0, [missing_record("no_finite_entries")])
    files.close()
    assert (missing.layer, missing.reason) == ("block/0", "no_finite_entries")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_of_one_rank_are_read_together(tmp_path: Path) -> None:
    """A restart goes on in a file of its own."""
    for generation, process in enumerate(("1a2b3c4d", "5e6f7a8b")):
        files = open_files(tmp_path, generation=generation, process=process)
        files.write(0, [histogram_record("a")])
        files.close()
    (events,) = read_histograms(tmp_path / "tensorboard").values()
    assert [event.step for event in events] == [0, 1_000_000_000]


def test_a_target_without_files_on_this_host_has_no_histograms() -> None:
    """There would be nowhere to put them."""
    assert open_histogram_files(MemoryTarget(), None, identity(), claim()) is None


def test_after_a_failure_there_is_a_pause(tmp_path: Path) -> None:
    """Meanwhile histograms are missing with the same reason, and the failure is news once."""
    clock = HandClock()
    (tmp_path / "tensorboard").write_text("in the way")
    target = LocalTarget(LocalStorage(str(tmp_path)), "", "1a2b3c4d")
    opened = open_histogram_files(target, tmp_path, identity(), claim())
    assert opened is not None
    files = HistogramFiles(opened._files, first_sample_id=0, monotonic_s=clock.monotonic_s)

    (missing,) = files.write(0, [histogram_record()])
    assert missing.reason.startswith("FileExistsError")
    assert isinstance(files.take_failure(), FileExistsError)
    (tmp_path / "tensorboard").unlink()
    assert len(files.write(1, [histogram_record()])) == 1
    assert files.take_failure() is None
    clock.now_s += RETRY_AFTER_S
    assert files.write(2, [histogram_record()]) == []
    files.close()
    (events,) = read_histograms(tmp_path / "tensorboard").values()
    assert [event.step for event in events] == [2]


def test_a_killed_process_leaves_everything_that_it_wrote(tmp_path: Path) -> None:
    """Nothing waits in the process for a buffer to fill up."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from unit.sinks.deliveries import histogram_record
        from unit.sinks.test_event_files import open_files

        files = open_files(Path(sys.argv[1]))
        for ordinal in range(5):
            assert files.write(ordinal, [histogram_record("a"), histogram_record("b")]) == []
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=_environment(), check=False, timeout=100
    )
    assert done.returncode == -signal.SIGKILL
    found = read_histograms(tmp_path / "tensorboard")
    assert [[event.step for event in events] for events in found.values()] == [[0, 1, 2, 3, 4]] * 2


def test_writing_histograms_loads_no_client_of_a_network(tmp_path: Path) -> None:
    """TensorBoard's messages alone are imported, not the package around them."""
    program = textwrap.dedent(
        """
        import sys
        from torchinstruments.sinks.event_files import _encoded, _file_version
        from unit.sinks.deliveries import histogram_record

        assert "tensorboard" not in sys.modules
        assert _file_version() and _encoded(histogram_record(), 0)
        assert "tensorboard.compat.proto.event_pb2" in sys.modules
        clients = {"tensorflow", "grpc", "polars", "s3fs", "boto3", "botocore", "aiohttp", "urllib3"}
        assert not clients & set(sys.modules), clients & set(sys.modules)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    """Returns variables with which another interpreter finds the tests' own modules."""
    tests = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
