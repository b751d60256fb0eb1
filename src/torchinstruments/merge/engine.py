"""The merge itself: plan, read each rank, fold the readings in the order of ranks, write one answer.

Ranks are read by any `concurrent.futures.Executor` and folded in ascending order whatever the order in which
they finish, so the executor leaves no trace in the result. Only a bounded number of readings waits at any
time: memory grows with the number of series, not with the length of the run.
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from torchinstruments.errors import ConfigurationError, StorageError, TorchInstrumentsError
from torchinstruments.merge.catalogs import joined_modules
from torchinstruments.merge.coverage import CoverageFold
from torchinstruments.merge.entries import SummaryTable
from torchinstruments.merge.layers import LayerFold
from torchinstruments.merge.plan import MergePlan, plan_merge
from torchinstruments.merge.processes import ProcessView
from torchinstruments.merge.reading import read_rank
from torchinstruments.merge.result import RESULT_FILE, RESULT_SCHEMA_VERSION, SUMMARY_FILE, MergeResult
from torchinstruments.merge.sources import close_sources
from torchinstruments.merge.tasks import RankReading, RankTask
from torchinstruments.records import ModuleRecord
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.inventory import SetAside, read_catalog
from torchinstruments.store.layout import MERGED
from torchinstruments.store.liveness import process_status, store_now_s
from torchinstruments.store.manifest import encode_document
from torchinstruments.store.schema import KEY_COLUMNS
from torchinstruments.store.urls import check_url, check_writable

__all__ = ["MergeResult", "merge_run"]

MAX_WAITING = 64
"""Ranks that are read ahead of the one that is folded next."""

_MAX_THREADS = 16

Progress = Callable[[int, int], None]
"""Called by `merge_run` in the caller's thread with the ranks done and all ranks."""


def merge_run(
    *urls: str,
    output: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    ranks: Collection[int] | None = None,
    inline_ranks: int = 16,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> MergeResult:
    """Merges what the ranks of one run left into ``merged/result.json`` and ``merged/summary.parquet``.

    Works on a live run too, and then says that it is not complete. The parts stay as they are.

    Args:
        *urls: The run's folder, or several where hosts without a shared filesystem have one each.
        output: Folder for the two files, a path or an fsspec URL; else ``merged`` in the first folder.
        storage_options: In fsspec's dialect, for all folders and a remote `output`.
        ranks: The ranks to merge, None for all.
        inline_ranks: With at most so many ranks, each rank's own summaries stand in ``result.json``; with
            more, only in ``summary.parquet``.
        progress: Called after each rank with the ranks done and all ranks.
        executor: Where ranks are read; else threads of this process. It stays open.

    Raises:
        ConfigurationError: An argument that cannot work.
        RunFormatError: A folder holds no run, one that this release does not read, or another run.
        StorageError: A store refused or did not answer.
    """
    if isinstance(inline_ranks, bool) or inline_ranks < 0:
        raise ConfigurationError(f"inline_ranks={inline_ranks!r} is not possible; give 0 or more")
    if output is not None:
        check_url(output)
        check_writable(output)
    plan = plan_merge(urls, storage_options, ranks)
    try:
        if executor is not None:
            return _merge(plan, output, inline_ranks, progress, executor)
        pool = ThreadPoolExecutor(_num_threads(), thread_name_prefix="torchinstruments-merge")
        try:
            return _merge(plan, output, inline_ranks, progress, pool)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    finally:
        close_sources(plan.token)


def _num_threads() -> int:
    return max(2, min(_MAX_THREADS, 2 * (os.cpu_count() or 1)))


def _merge(
    plan: MergePlan, output: str | None, inline_ranks: int, progress: Progress | None, executor: Executor
) -> MergeResult:
    statistics = plan.inventory.run.statistics
    layers = LayerFold(statistics, inline=len(plan.tasks) <= inline_ranks)
    coverage = CoverageFold(plan)
    table = SummaryTable()
    views: list[ProcessView] = []
    now_s = store_now_s(plan.inventory)
    for done, reading in enumerate(_readings(plan.tasks, executor), start=1):
        modules = _modules(plan, reading.rank, coverage.set_aside)
        of_rank = _views(plan, reading, now_s)
        layers.add_modules(reading.rank, modules.values())
        layers.add_rank(reading.rank, reading.summaries)
        table.add(reading.rank, reading.summaries)
        coverage.fired.add(reading.rank, modules, reading.summaries)
        coverage.add(reading, of_rank)
        views += of_rank
        if progress is not None:
            progress(done, len(plan.tasks))
    found = coverage.result()
    result: dict[str, object] = {
        "schema_version": RESULT_SCHEMA_VERSION,
        "run": _run_section(plan),
        "coverage": found.coverage,
        "generations": found.generations,
        "ranks": [view.record() for view in views],
        "layers": layers.records(),
    }
    return _written(plan, output, result, table.encoded(), is_complete=found.is_complete)


def _readings(tasks: Sequence[RankTask], executor: Executor) -> Iterator[RankReading]:
    """Yields the readings in the order of the tasks; at most `MAX_WAITING` are under way."""
    waiting: deque[Future[RankReading]] = deque()
    try:
        for task in tasks:
            waiting.append(executor.submit(read_rank, task))
            if len(waiting) >= MAX_WAITING:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _modules(plan: MergePlan, rank: int, set_aside: list[SetAside]) -> dict[str, ModuleRecord]:
    catalogs = []
    for file in plan.inventory.ranks[rank].catalogs:
        catalog = read_catalog(plan.inventory, file)
        if isinstance(catalog, SetAside):
            set_aside.append(catalog)
        else:
            catalogs.append(catalog)
    return joined_modules(catalogs)


def _views(plan: MergePlan, reading: RankReading, now_s: float) -> list[ProcessView]:
    inventory = plan.inventory
    manifests = {one.manifest.process: one for one in inventory.ranks[reading.rank].manifests}
    # Manifests come by generation, so that the latest process of a rank stands last among them.
    views = [
        ProcessView(
            rank=reading.rank,
            process=process,
            manifest=found.manifest,
            status=process_status(inventory, found, now_s).value,
            rows=reading.processes.get(process),
        )
        for process, found in manifests.items()
    ]
    views += [
        ProcessView(rank=reading.rank, process=process, manifest=None, status="unknown", rows=rows)
        for process, rows in reading.processes.items()
        if process not in manifests
    ]
    return views


def _run_section(plan: MergePlan) -> dict[str, object]:
    run = plan.inventory.run
    return {
        "run_id": run.run_id,
        "created_at": run.created_at,
        "versions": dict(run.versions),
        "sampling": dict(run.sampling),
        "signals": list(run.signals),
        "statistics": list(run.statistics),
        "history": dict(run.history),
        "rank_policy": run.rank_policy,
        "world_size": run.world_size,
        "launcher": run.launcher,
        "series_key": list(KEY_COLUMNS),
        "merged_ranks": [task.rank for task in plan.tasks],
        "ranks_were_chosen": plan.asked_ranks is not None,
        "folders": len(plan.sources),
    }


def _written(
    plan: MergePlan, output: str | None, result: dict[str, object], summary: bytes, *, is_complete: bool
) -> MergeResult:
    if output is None:
        storage = plan.storages[0].child(MERGED)
    else:
        storage = open_storage(output, plan.sources[0].storage_options)
    try:
        storage.replace(SUMMARY_FILE, summary)
        # Last, so that a result never speaks of a summary that is not there.
        storage.replace(RESULT_FILE, encode_document(result))
    except TorchInstrumentsError:
        raise
    except OSError as error:
        raise StorageError(
            f"the result could not be written to {storage.url} ({error.strerror or error}); make room there, "
            f"or give another folder with --output, in Python output="
        ) from error
    return MergeResult(result, storage.url, is_complete, storage)
