"""Ten thousand flushes of one writer: nothing grows but the rows on the disk."""

import os
import resource
import threading
from pathlib import Path

import pytest

from torchinstruments.config import HistoryConfig
from torchinstruments.store.filesystem import LocalStorage
from torchinstruments.store.local_target import LocalTarget
from torchinstruments.store.writer import RankWriter
from unit.store.material import attempt, claim, forward, identity, module, run_record

NUM_FLUSHES = 10_000
LOOKS = 5
SAMPLE_EVERY = 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.timeout(300)
def test_memory_files_and_threads_stay_flat_and_bytes_are_linear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fifth of the flushes adds as many bytes as any other, and the last ones no memory."""
    # What a disk takes for a sync is not looked at here.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    who = identity()
    target = LocalTarget(LocalStorage(str(tmp_path)), "", who.process)
    writer = RankWriter(who, claim(), HistoryConfig(buffer_rows=1_000), target)
    writer.start(run_record(), [module(0)])
    memory: list[int] = []
    written: list[int] = []
    descriptors: list[int] = []
    threads: list[int] = []
    for turn in range(NUM_FLUSHES):
        if turn % SAMPLE_EVERY == 0:
            writer.add_sample(forward(turn // SAMPLE_EVERY))
        writer.add_attempts([attempt(turn)])
        assert writer.flush()
        if (turn + 1) % (NUM_FLUSHES // LOOKS) == 0:
            memory.append(_resident_bytes())
            written.append(writer.counters().bytes)
            descriptors.append(len(os.listdir("/proc/self/fd")))
            threads.append(threading.active_count())

    manifest = (tmp_path / f"process-{who.process}.json").stat().st_size
    print(f"resident {[value >> 20 for value in memory]} MiB, written {written}, manifest {manifest} bytes")
    assert writer.counters().parts >= NUM_FLUSHES
    assert set(descriptors) == {descriptors[0]}
    assert set(threads) == {threads[0]}
    steps = [after - before for before, after in zip([0, *written], written, strict=False)]
    assert max(steps) < 1.1 * min(steps)
    # Tallies of the last samples and the allocator's own share; a list of all parts would be far more.
    assert memory[-1] - memory[1] < 16 * 2**20
    assert manifest < 20_000
