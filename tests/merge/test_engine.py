"""The merge of many ranks: executors, bounds, and what names ranks."""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import polars as pl
import pytest
from typing_extensions import override

from merge.run_folder import RunFolder, process_of, whole_run
from torchinstruments.errors import ConfigurationError, StorageUnreachableError
from torchinstruments.merge import mapping
from torchinstruments.merge.engine import merge_run
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.storage import Listing

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class BackwardExecutor(Executor):
    """Runs nothing until a result is asked for, and then the youngest task first."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []
        self.most_waiting = 0

    @override
    def submit(
        self, fn: Callable[Parameters, Returned], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Returned]:
        """Queues a task."""
        assert not kwargs
        future: Future[Returned] = LazyFuture(self)
        self.waiting.append((future, fn, args))
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return future

    def run_all(self) -> None:
        """Runs what is queued, youngest first."""
        for future, fn, args in reversed(self.waiting):
            future.set_result(fn(*args))
        self.waiting.clear()


class LazyFuture(Future[Any]):
    """Runs its executor's queue when it is waited for."""

    def __init__(self, executor: BackwardExecutor) -> None:
        super().__init__()
        self.executor = executor

    @override
    def result(self, timeout: float | None = None) -> Any:
        """Returns the result."""
        if not self.done():
            self.executor.run_all()
        return super().result(timeout)


@contextmanager
def executor_named(name: str) -> Generator[Executor | None]:
    """Yields an executor."""
    if name == "default":
        yield None
    elif name == "processes":
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool
    elif name == "backward":
        yield BackwardExecutor()
    else:
        with ThreadPoolExecutor(int(name)) as pool:
            yield pool


@pytest.fixture
def noisy_run(tmp_path: Path) -> RunFolder:
    """A run of 5 ranks whose parts hold random values, out of order and with holes."""
    random = np.random.default_rng(1)
    run = RunFolder(tmp_path / "run", world_size=5, window=7).run()
    run.generation()
    for rank in range(5):
        run.manifest(rank, process_of(rank))
        for part in range(3):
            rows = [
                {
                    "sample_id": int(sample),
                    "attempt": int(sample),
                    "layer": f"layer{layer}",
                    "metric": metric,
                    "value": float(random.normal()) if random.random() < 0.9 else None,
                    "unavailable_reason": "overflow",
                }
                for sample in random.permutation(20) + 20 * part
                for layer in range(3 + rank % 2)
                for metric in ("mean", "std")
            ]
            run.history(rank, rows, process_of(rank), part)
        run.samples(rank, [{"sample_id": i} for i in range(60 - rank)], process_of(rank))
        nonfinite = {"metric": "nonfinite_fraction", "layer": "layer0", "attempt": 40 + rank // 2}
        run.history(rank, [{"sample_id": 60, "value": 0.5} | nonfinite], process_of(rank), 3)
        steps = [{"attempt": i, "scale_before": float(random.integers(8) == 0)} for i in range(3000)]
        run.steps(rank, steps, process_of(rank))
        digests = [{"attempt": i, "digest": int(random.integers(8) == 0)} for i in range(0, 3000, 7)]
        run.fingerprints(rank, digests, process_of(rank))
    return run


def test_every_executor_gives_the_same_bytes(
    noisy_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, one or four, spawned processes and an executor that works backwards give the same bytes."""
    # So that there are several blocks; where they are cut is the caller's decision alone.
    monkeypatch.setattr("torchinstruments.merge.ranges.MAX_BLOCK_ROWS", 500)
    monkeypatch.setattr("torchinstruments.merge.comparison_plan.MAX_BLOCK_VALUES", 5 * 40)
    tables = (
        "summary.parquet",
        "steps.parquet",
        "comparison.parquet",
        "overview.parquet",
        "timeline.parquet",
    )
    seen: dict[str, set[bytes]] = {file: set() for file in ("result.json", "index.md", *tables)}
    for name in ("default", "1", "4", "backward", "processes"):
        output = tmp_path / name
        with executor_named(name) as executor:
            merged = merge_run(noisy_run.url, output=str(output), executor=executor)
        assert merged.url == str(output)
        for file, contents in seen.items():
            contents.add((output / file).read_bytes())
    assert {file: len(contents) for file, contents in seen.items()} == dict.fromkeys(seen, 1)
    assert not (noisy_run.root / "merged").exists()


def test_a_shuffled_listing_gives_the_same_bytes(
    noisy_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order a store lists its files, every file of the merge is the same."""
    walk = LocalStorage.walk
    random = np.random.default_rng(3)

    def shuffled(self: LocalStorage, enters: Callable[[str], bool] | None = None) -> Listing:
        found = walk(self, enters)
        return [found[place] for place in random.permutation(len(found))]

    merge_run(noisy_run.url, output=str(tmp_path / "sorted"))
    monkeypatch.setattr(LocalStorage, "walk", shuffled)
    merge_run(noisy_run.url, output=str(tmp_path / "shuffled"))
    files = sorted(path.name for path in (tmp_path / "sorted").iterdir())
    assert files == [
        "comparison.parquet",
        "index.md",
        "overview.parquet",
        "result.json",
        "steps.parquet",
        "summary.parquet",
        "timeline.parquet",
    ]
    for name in files:
        assert (tmp_path / "sorted" / name).read_bytes() == (tmp_path / "shuffled" / name).read_bytes(), name


def test_summary_names_every_rank(noisy_run: RunFolder) -> None:
    """summary.parquet has a row a rank and series, and agrees with Polars over the rows themselves."""
    summary = merge_run(noisy_run.url).summary()
    files = sorted(noisy_run.root.glob("rank-*/history.parts/*.parquet"))
    expected = (
        pl.scan_parquet(files)
        .group_by("rank", "layer", "metric")
        .agg(
            observations=pl.len().cast(pl.Int64),
            unavailable_observations=pl.col("value").is_null().sum().cast(pl.Int64),
            minimum_value=pl.col("value").min(),
            maximum_value=pl.col("value").max(),
            latest_value=pl.col("value").sort_by("sample_id").last(),
            recent_window_mean=pl.col("value").sort_by("sample_id").tail(7).mean(),
        )
        .sort("rank", "layer", "metric")
        .collect()
    )
    assert summary["rank"].is_sorted()
    found = summary.select(expected.columns)
    assert found.drop("recent_window_mean").equals(expected.drop("recent_window_mean"))
    means = zip(found["recent_window_mean"], expected["recent_window_mean"], strict=True)
    assert all(left == pytest.approx(right, rel=1e-12) for left, right in means)


def test_extrema_across_ranks_name_rank_and_sample(tmp_path: Path) -> None:
    """Lowest and highest values over ranks stand with their rank and sample; ties take the lowest rank."""
    run = RunFolder(tmp_path / "run", world_size=3).run()
    for rank, values in enumerate([[2.0, 5.0], [2.0, 9.0], [4.0, 5.0]]):
        run.manifest(rank, process_of(rank))
        run.history(rank, [{"sample_id": i, "value": v} for i, v in enumerate(values)], process_of(rank))
    layers: Any = merge_run(run.url).result["layers"]
    across = layers[0]["tensors"][0]["statistics"][0]["across_ranks"]
    compared = {name: across.pop(name) for name in ("compared_cells", "cells_where_mad_is_zero", "furthest")}
    assert (compared["compared_cells"], compared["furthest"]["rank"]) == (1, 1)
    assert across == {
        "ranks": 3,
        "lowest": {"rank": 0, "value": 2.0, "sample_id": 0},
        "highest": {"rank": 1, "value": 9.0, "sample_id": 1},
        "latest": {
            "lowest": {"rank": 0, "value": 5.0, "sample_id": 1},
            "highest": {"rank": 1, "value": 9.0, "sample_id": 1},
        },
    }


def test_there_is_no_mean_over_ranks(noisy_run: RunFolder) -> None:
    """Every mean in the result stands inside the windows of one rank."""
    result: Any = merge_run(noisy_run.url).result

    def means(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if isinstance(node, dict):
            for key, value in node.items():
                if "mean" in key or "average" in key:
                    yield (*path, key)
                yield from means(value, (*path, key))
        elif isinstance(node, list):
            for value in node:
                yield from means(value, path)

    found = list(means(result, ()))
    assert found
    assert all(path[-4] == "ranks" and path[-2].endswith("_window") for path in found)


def test_ranks_that_differ_in_shape_are_told_apart(tmp_path: Path) -> None:
    """A tensor whose latest shape differs between ranks says which ranks hold which."""
    run = RunFolder(tmp_path / "run", world_size=4).run()
    for rank in range(4):
        run.manifest(rank, process_of(rank))
        shape = "7x4" if rank == 3 else "8x4"
        run.history(rank, [{"sample_id": 0, "value": 1.0, "shape": shape}], process_of(rank))
    layers: Any = merge_run(run.url).result["layers"]
    tensor = layers[0]["tensors"][0]
    assert tensor["latest_shape"] is None
    assert tensor["ranks_differ_in"] == {"latest_shape": {"7x4": "3", "8x4": "0-2"}}
    assert tensor["dtype"] == "float32"


def test_beyond_inline_ranks_the_summaries_stand_in_the_table(tmp_path: Path) -> None:
    """With more ranks than may stand inline, entries point at summary.parquet; extrema stay."""
    run = whole_run(tmp_path / "run", 3)
    merged = merge_run(run.url, inline_ranks=2)
    layers: Any = merged.result["layers"]
    statistic = layers[0]["tensors"][0]["statistics"][0]
    assert "ranks" not in statistic
    assert statistic["ranks_in"] == "summary.parquet"
    assert statistic["across_ranks"]["highest"]["rank"] == 2
    assert merged.summary()["rank"].to_list() == [0, 1, 2]
    inline: Any = merge_run(run.url, inline_ranks=3).result["layers"]
    assert set(inline[0]["tensors"][0]["statistics"][0]["ranks"]) == {"0", "1", "2"}
    with pytest.raises(ConfigurationError, match="-1"):
        merge_run(run.url, inline_ranks=-1)


def test_many_ranks(tmp_path: Path) -> None:
    """64 ranks are merged in one call, none inline by default, each in the table."""
    run = whole_run(tmp_path / "run", 64, num_samples=2)
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    merged = merge_run(run.url, progress=note)
    assert merged.complete
    assert seen == [(done, 64) for done in range(1, 65)]
    assert merged.summary()["rank"].to_list() == list(range(64))
    assert repr(merged).splitlines()[0] == f"MergeResult('{run.url}/merged', ranks='0-63', complete)"


def test_only_so_many_readings_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks there are, only a bounded number of them is read ahead."""
    monkeypatch.setattr(mapping, "MAX_WAITING", 3)
    run = whole_run(tmp_path / "run", 8, num_samples=1)
    executor = BackwardExecutor()
    assert merge_run(run.url, executor=executor).complete
    assert executor.most_waiting <= 3


@pytest.mark.parametrize(("weight", "waiting"), [(4, 4), (64, 4), (3, 3), (1, 2)])
def test_the_more_series_the_fewer_readings_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: int, waiting: int
) -> None:
    """Readings that wait have a bounded number of series in all, but for a few that always may."""
    monkeypatch.setattr(mapping, "MAX_WAITING", 4)
    monkeypatch.setattr(mapping, "MAX_WAITING_BLOCKS", 2)
    run = whole_run(tmp_path / "run", 8, num_samples=1)
    series = len({tuple(row) for row in merge_run(run.url).summary().select("layer", "metric").iter_rows()})
    monkeypatch.setattr(mapping, "MAX_WAITING_WEIGHT", weight * series)
    executor = BackwardExecutor()
    assert merge_run(run.url, executor=executor).complete
    assert executor.most_waiting == waiting


def test_merging_again_changes_nothing(tmp_path: Path) -> None:
    """A second merge reads the parts alone and gives the same bytes."""
    run = whole_run(tmp_path / "run")
    merge_run(run.url)
    first = (run.root / "merged" / "result.json").read_bytes()
    merge_run(run.url)
    assert (run.root / "merged" / "result.json").read_bytes() == first


def test_a_store_that_does_not_answer_ends_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stops answering is no bad file: the merge fails and says so, and writes nothing."""
    run = whole_run(tmp_path / "run")
    read = LocalStorage.read

    def fail(self: LocalStorage, path: str) -> bytes:
        if path.endswith(".parquet"):
            raise StorageUnreachableError("no answer")
        return read(self, path)

    monkeypatch.setattr(LocalStorage, "read", fail)
    with pytest.raises(StorageUnreachableError) as caught:
        merge_run(run.url)
    assert caught.value.failures == {0: "no answer"}
    assert not (run.root / "merged").exists()


def test_a_part_that_may_not_be_read_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that vanished since it was listed is set aside by name."""
    run = whole_run(tmp_path / "run")
    read = LocalStorage.read

    def vanish(self: LocalStorage, path: str) -> bytes:
        if path.startswith("rank-001/history"):
            raise FileNotFoundError(path)
        return read(self, path)

    monkeypatch.setattr(LocalStorage, "read", vanish)
    coverage: Any = merge_run(run.url).result["coverage"]
    assert [one["reason"] for one in coverage["quarantined"]] == ["unreadable: it is gone"]


def test_large_parts_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part beyond the bound is decoded twice instead of held, and each row counts once."""
    run = whole_run(tmp_path / "run")
    rows = [{"sample_id": i, "value": 1.0, "process": "000000ee"} for i in range(10, 20)]
    run.history(0, rows, process_of(0), 1)
    held = merge_run(run.url, output=str(tmp_path / "held")).result
    monkeypatch.setattr("torchinstruments.merge.reading.MAX_HELD_ROWS", 2)
    monkeypatch.setattr("torchinstruments.merge.parts.MAX_FETCHED_BYTES", 10)
    assert merge_run(run.url, output=str(tmp_path / "twice")).result == held


def test_no_url_is_refused() -> None:
    """A merge of nothing says what to give."""
    with pytest.raises(ConfigurationError, match="URL"):
        merge_run()


def test_the_offline_side_imports_no_torch() -> None:
    """Importing the merge and the command line imports neither torch nor, for the latter, Polars or Arrow."""
    code = (
        "import sys, torchinstruments.cli, torchinstruments.cli.main\n"
        "assert not {'torch', 'polars', 'pyarrow', 'rich', 'fsspec'} & set(sys.modules), sys.modules\n"
        "import torchinstruments.merge.engine\n"
        "assert not {'torch', 'polars'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
