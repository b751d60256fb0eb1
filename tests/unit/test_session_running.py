"""What a session makes of its rank in a large world: whose histograms are kept, and who takes any at all."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from torchinstruments import AlwaysSampler, DirectorySink, Observer, inject_observer, open_run
from torchinstruments.rank_place import MAX_DIRECT_WORLD_SIZE
from torchinstruments.records import ModuleRecord, RunRecord, Sample
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.histograms import HistogramReducer


class Histograms:
    """A sink that counts the histograms of each delivery."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Nothing is needed."""

    def observe(self, sample: Sample) -> None:
        """Counts."""
        self.counts.append(len(sample.histograms))

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each tensor that is measured, whether histograms are taken of it."""
    found: list[bool] = []
    add = ScalarBatch.add

    def note(
        self: ScalarBatch, tensor: torch.Tensor, *, histograms: bool | Sequence[HistogramReducer] = False
    ) -> int:
        found.append(bool(histograms))
        return add(self, tensor, histograms=histograms)

    monkeypatch.setattr(ScalarBatch, "add", note)
    return found


def attach(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank: int,
    world_size: int = MAX_DIRECT_WORLD_SIZE + 1,
    sink: Histograms | DirectorySink | None = None,
) -> tuple[nn.Module, Observer]:
    """Attaches as one rank of a world that has no store to meet at, and runs the forward that settles it."""
    monkeypatch.setenv("TORCHINSTRUMENTS_SPOOL_DIR", str(folder / "spool"))
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    if isinstance(sink, DirectorySink):
        observer = inject_observer(model, sampler=AlwaysSampler(), sink=sink)
    else:
        observer = inject_observer(
            model, output_dir=folder / "run", run_id="r", sampler=AlwaysSampler(), sink=sink
        )
    step(model)
    # Returns when the ranks have agreed, or given it up, and what was left so far is durable.
    observer.flush()
    return model, observer


def step(model: nn.Module) -> None:
    """Runs a forward and a backward."""
    model(torch.ones(3, 2)).sum().backward()


def test_in_a_large_world_the_leader_takes_histograms_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[bool]
) -> None:
    """Rank 0 of 17 has them of every tensor, and event files in its folder."""
    model, observer = attach(tmp_path, monkeypatch, rank=0)
    step(model)
    assert observer.close()
    assert taken == [True] * 8
    assert list((tmp_path / "run" / "rank-000" / "tensorboard").iterdir())


@pytest.mark.parametrize("names_folder", [False, True], ids=["output_dir", "directory_sink"])
def test_in_a_large_world_another_rank_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[bool], *, names_folder: bool
) -> None:
    """From the agreement on rank 1 of 17 pays nothing for them, has no folder of them, and has its rows."""
    sink = DirectorySink(tmp_path / "run", run_id="r") if names_folder else None
    model, observer = attach(tmp_path, monkeypatch, rank=1, sink=sink)
    taken.clear()
    step(model)
    assert observer.close()
    assert taken == [False] * 4
    assert not list((tmp_path / "run").rglob("*tensorboard*"))
    page = (tmp_path / "run" / "rank-001" / "index.md").read_text()
    assert f"more than {MAX_DIRECT_WORLD_SIZE} ranks only the leading one has them" in page
    assert observer.counters.errors == {}
    signals = (
        open_run(str(tmp_path / "run")).history().collect().group_by("sample_id", "signal").len().sort("len")
    )
    assert signals.height == 4
    assert set(signals["len"]) == {2 * 9}


def test_in_a_large_world_a_sink_of_the_user_gets_those_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[bool]
) -> None:
    """Rank 1 of 17 takes them for it, and keeps no files of its own."""
    sink = Histograms()
    model, observer = attach(tmp_path, monkeypatch, rank=1, sink=sink)
    step(model)
    assert observer.close()
    assert taken == [True] * 8
    assert sink.counts == [2] * 4
    assert not list((tmp_path / "run").rglob("*tensorboard*"))


def test_up_to_sixteen_ranks_every_rank_takes_histograms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[bool]
) -> None:
    """Rank 1 of 16 has them, and its files."""
    model, observer = attach(tmp_path, monkeypatch, rank=1, world_size=MAX_DIRECT_WORLD_SIZE)
    step(model)
    assert observer.close()
    assert taken == [True] * 8
    assert list((tmp_path / "run" / "rank-001" / "tensorboard").iterdir())
