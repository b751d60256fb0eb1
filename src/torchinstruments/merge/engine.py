"""The merge itself: plan, read each rank, fold the readings in the order of ranks, write one answer.

Ranks are read by any `concurrent.futures.Executor` and folded in ascending order whatever the order in which
they finish, so the executor leaves no trace in the result. Only a bounded number of readings waits at any
time: memory grows with the number of series, not with the length of the run. What ranks do not agree in is
read a second time, rank beside rank, in blocks of bounded size.
"""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchinstruments.errors import StorageError
from torchinstruments.merge.abandoned import clear_abandoned
from torchinstruments.merge.arguments import check_arguments, ranks_asked_for
from torchinstruments.merge.catalogs import joined_modules
from torchinstruments.merge.check_findings import CheckFindingsFold
from torchinstruments.merge.comparison import COMPARISON_FILE, ComparisonFold
from torchinstruments.merge.comparison_blocks import compare_stretches, picture_stretches
from torchinstruments.merge.coverage import Coverage, CoverageFold
from torchinstruments.merge.entries import SummaryTable
from torchinstruments.merge.executors import ExecutorChoice, workers_for
from torchinstruments.merge.first_nonfinite import FirstNonfiniteFold
from torchinstruments.merge.index_page import encode_index
from torchinstruments.merge.layers import LayerFold
from torchinstruments.merge.mapping import MAX_WAITING_BLOCKS, in_order
from torchinstruments.merge.moments import look_at_moments
from torchinstruments.merge.outputs import file_records, open_output, write_together
from torchinstruments.merge.overview import OVERVIEW_FILE
from torchinstruments.merge.overview_choice import choose_pictured, notable_forwards, notable_ranks
from torchinstruments.merge.own_work import OwnWorkFold
from torchinstruments.merge.parts import ChangedPartError
from torchinstruments.merge.plan import MergePlan, plan_merge
from torchinstruments.merge.processes import ProcessView
from torchinstruments.merge.reading import forget_layouts, read_rank
from torchinstruments.merge.replica_blocks import compare_replicas
from torchinstruments.merge.replicas import ReplicaFold
from torchinstruments.merge.result import RESULT_SCHEMA_VERSION, SUMMARY_FILE, MergeResult
from torchinstruments.merge.sources import close_sources
from torchinstruments.merge.step_blocks import compare_steps
from torchinstruments.merge.steps import STEPS_FILE, StepFold
from torchinstruments.merge.tasks import RankReading, RankTask
from torchinstruments.merge.timeline import TIMELINE_FILE, TimelineFold
from torchinstruments.merge.trials import bounded_workers, without_harmful_parts
from torchinstruments.records import ModuleRecord
from torchinstruments.store.checks import FoundChecks
from torchinstruments.store.documents import GONE
from torchinstruments.store.inventory import SetAside, read_catalog, read_checks
from torchinstruments.store.layout import INDEX_FILE, MERGED
from torchinstruments.store.liveness import process_status, store_now_s
from torchinstruments.store.local import require_no_link
from torchinstruments.store.schema import KEY_COLUMNS
from torchinstruments.store.urls import check_url, check_writable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MergeResult", "merge_run"]

Progress = Callable[[int, int], None]
"""Called by `merge_run` in the caller's thread with the ranks done and all ranks."""


def merge_run(
    *urls: str,
    output: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    ranks: Collection[int] | None = None,
    inline_ranks: int = 16,
    progress: Progress | None = None,
    executor: ExecutorChoice = None,
    untrusted: bool = False,
) -> MergeResult:
    """Merges what the ranks of one run left into ``merged/result.json`` and the tables beside it.

    Works on a live run too, and then says that it is not complete. The parts stay as they are.

    Args:
        *urls: The run's folder, or several where hosts without a shared filesystem have one each.
        output: Folder for the result, a path or an fsspec URL; else ``merged`` in the first folder.
        storage_options: In fsspec's dialect, for all folders and a remote `output`.
        ranks: The ranks to merge, None for all. One of them that left nothing is missing.
        inline_ranks: With at most so many ranks, each rank's own summaries stand in ``result.json``; with
            more, only in ``summary.parquet``.
        progress: Called after each rank with the ranks done and all ranks; from the first one again where
            files changed or went away, and the merge begins anew.
        executor: Where ranks are read: ``"threads"`` of this process (default), ``"processes"`` of this
            machine, ``"dask"`` for the scheduler that dask is configured for, an executor of
            `concurrent.futures`, or a ``distributed.Client``; these two stay open. All give the same bytes.
            In a script, processes need the call to stand below ``if __name__ == "__main__":``.
        untrusted: Whether nobody vouches for the run. Each part is read on trial by a process with bounds of
            memory and time, and left out by name where it goes beyond them; the merge itself then reads in
            processes that are bounded too.

    Raises:
        ConfigurationError: An argument that cannot work.
        RunFormatError: A folder holds no run, one that this release does not read, or another run.
        StorageError: A store refused or did not answer.
        WorkerLostError: A worker died over the same task several times.

    Of the last two ``failures`` says which ranks could not be read. Whatever ends a merge early, Ctrl-C and
    an exception of `progress` too, the result of the merge before stays as it is.
    """
    check_arguments(inline_ranks=inline_ranks, progress=progress)
    asked = ranks_asked_for(ranks)
    if output is not None:
        check_url(output)
        check_writable(output)

    def merge_with(pool: Executor) -> MergeResult:
        for is_second in (False, True):
            plan = plan_merge(urls, storage_options, asked, is_second=is_second)
            if output is None:
                require_no_link(plan.storages[0], MERGED)
            if untrusted:
                plan = without_harmful_parts(plan)
            try:
                return _merge(plan, output, inline_ranks, progress, pool)
            except ChangedPartError as error:
                # The first time once more, with a new listing and every column: what is damaged or gone
                # is then known before any of it counts.
                if is_second:
                    raise StorageError(f"{error}: files change while they are merged; merge again") from error
            finally:
                close_sources(plan.token)
                forget_layouts()
        raise AssertionError("the second try returns or raises")

    with bounded_workers(executor) if untrusted else workers_for(executor) as workers:
        return merge_with(workers)


def _merge(
    plan: MergePlan, output: str | None, inline_ranks: int, progress: Progress | None, executor: Executor
) -> MergeResult:
    clear_abandoned()
    with ComparisonFold() as comparison, SummaryTable(comparison.folder / SUMMARY_FILE) as table:
        return _folded(plan, output, inline_ranks, progress, executor, comparison, table)


def _folded(
    plan: MergePlan,
    output: str | None,
    inline_ranks: int,
    progress: Progress | None,
    executor: Executor,
    comparison: ComparisonFold,
    table: SummaryTable,
) -> MergeResult:
    # Before anything is read, for a place that is refused.
    storage = open_output(plan, output)
    statistics = plan.inventory.run.statistics
    layers = LayerFold(statistics, inline=len(plan.tasks) <= inline_ranks)
    coverage = CoverageFold(plan)
    views: list[ProcessView] = []
    now_s = store_now_s(plan.inventory)
    ranks = _RankFolds()
    # Closed at once when the caller's progress raises: an executor that stays open gets no more to do.
    with closing(in_order(executor, read_rank, plan.tasks, weight=_num_series)) as readings:
        for done, (task, reading) in enumerate(zip(plan.tasks, readings, strict=True), start=1):
            modules = _modules(plan, reading.rank, coverage.set_aside)
            of_rank = _views(plan, reading, now_s)
            layers.add_modules(reading.rank, modules.values())
            layers.add_rank(reading.rank, reading.summaries)
            table.add(reading.rank, reading.summaries)
            coverage.fired.add(reading.rank, modules, reading)
            coverage.add(reading, of_rank)
            ranks.add(task, reading, modules, of_rank)
            ranks.check_findings.add_rank(reading.rank, _checks(plan, reading.rank, coverage.set_aside))
            comparison.plan.add_rank(reading.rank, reading.row_spans)
            views += of_rank
            if progress is not None:
                progress(done, len(plan.tasks))
    forget_layouts()
    _require_presence(plan, coverage.set_aside)
    found = coverage.result()
    ranks.look_closer(plan, found, executor)
    sections = ranks.sections()
    samples = coverage.alignment.samples
    pictured = choose_pictured(
        samples,
        layers.series_by_metric,
        comparison.plan.ranks,
        notable_ranks(sections, layers.extreme_ranks()),
        notable_forwards(sections),
    )
    stretches = comparison.plan.tasks(
        samples, layers.num_series, plan.inventory.run.run_id, plan.sources, pictured
    )
    if comparison.plan.num_ranks > 1:
        for blocks in in_order(executor, compare_stretches, stretches, max_waiting=MAX_WAITING_BLOCKS):
            for block in blocks:
                comparison.add_block(block)
    else:
        for overviews in in_order(executor, picture_stretches, stretches, max_waiting=MAX_WAITING_BLOCKS):
            for overview in overviews:
                comparison.overview.add(overview)
    files: dict[str, bytes | Path] = {
        SUMMARY_FILE: table.file(),
        STEPS_FILE: ranks.steps.encoded(),
        COMPARISON_FILE: comparison.file(),
        OVERVIEW_FILE: comparison.overview.encoded(pictured, len(samples)),
        TIMELINE_FILE: ranks.timeline.encoded(samples),
    }
    result: dict[str, object] = {
        "schema_version": RESULT_SCHEMA_VERSION,
        "run": _run_section(plan),
        "files": file_records(files),
        "coverage": found.coverage,
        "generations": found.generations,
        "ranks": [view.record() for view in views],
        **sections,
        "comparison": comparison.record(),
        "layers": layers.records(comparison.of_series(), comparison.combined()),
    }
    files[INDEX_FILE] = encode_index(result)
    result["files"] = file_records(files)
    # In a thread of its own: Ctrl-C comes before the first file is replaced, or after the last one.
    with ThreadPoolExecutor(1) as writer:
        # A thread that runs already is waited for wherever the interruption comes.
        writer.submit(int).result()
        writer.submit(write_together, storage, files, result).result()
    return MergeResult(result, storage.url, found.is_complete, storage)


def _num_series(reading: RankReading) -> int:
    return len(reading.summaries)


def _require_presence(plan: MergePlan, set_aside: Collection[SetAside]) -> None:
    """Has the folders listed once more where a file went away between the listing and its reading."""
    if plan.is_second:
        return
    for one in (*plan.inventory.set_aside, *set_aside):
        if one.reason == GONE:
            raise ChangedPartError(f"{plan.storages[one.source].url.rstrip('/')}/{one.path} is gone")


@dataclass(slots=True)
class _RankFolds:
    """The sections that hold rank beside rank.

    Attributes:
        steps: Whether all ranks did the same.
        replicas: Whether their replicas are equal.
        first_nonfinite: Which rank went wrong first.
        own_work: Which rank is late by its own work.
        check_findings: What training checks found.
        timeline: How each rank came through the run.
    """

    steps: StepFold = field(default_factory=StepFold)
    replicas: ReplicaFold = field(default_factory=ReplicaFold)
    first_nonfinite: FirstNonfiniteFold = field(default_factory=FirstNonfiniteFold)
    own_work: OwnWorkFold = field(default_factory=OwnWorkFold)
    check_findings: CheckFindingsFold = field(default_factory=CheckFindingsFold)
    timeline: TimelineFold = field(default_factory=TimelineFold)

    def add(
        self,
        task: RankTask,
        reading: RankReading,
        modules: Mapping[str, ModuleRecord],
        views: Collection[ProcessView],
    ) -> None:
        """Takes a rank; ranks come in ascending order."""
        self.steps.add_rank(reading.rank, reading.steps)
        self.replicas.add_rank(reading.rank, reading.fingerprints)
        unreadable = [(one.source, one.path) for one in reading.set_aside]
        self.first_nonfinite.add_rank(task, reading.nonfinite, modules, unreadable)
        hosts = {one.manifest.generation: one.manifest.host for one in views if one.manifest is not None}
        self.own_work.add(reading.rank, reading.steps.timings, hosts)
        self.timeline.add_rank(reading.rank, reading.steps.timeline, reading.keys)

    def sections(self) -> dict[str, object]:
        """Returns the sections in their order, once all was looked at; to be asked once."""
        return {
            "steps": self.steps.record(),
            "replicas": self.replicas.record(),
            "first_nonfinite": self.first_nonfinite.record(),
            "findings": self.check_findings.record(),
            "own_work": self.own_work.record(),
        }

    def look_closer(self, plan: MergePlan, found: Coverage, executor: Executor) -> None:
        """Reads a second time what does not agree, once all ranks were added."""
        run_id = plan.inventory.run.run_id
        step_tasks = self.steps.tasks(run_id, plan.sources)
        for step_blocks in in_order(executor, compare_steps, step_tasks, max_waiting=MAX_WAITING_BLOCKS):
            for step_block in step_blocks:
                self.steps.add_block(step_block)
        replica_tasks = self.replicas.tasks(run_id, plan.sources)
        for replica_blocks in in_order(
            executor, compare_replicas, replica_tasks, max_waiting=MAX_WAITING_BLOCKS
        ):
            for replica_block in replica_blocks:
                self.replicas.add_block(replica_block)
        tasks = self.first_nonfinite.tasks(plan.tasks, found.ranks_by_generation)
        self.first_nonfinite.add_answers(in_order(executor, look_at_moments, tasks))


def _modules(plan: MergePlan, rank: int, set_aside: list[SetAside]) -> dict[str, ModuleRecord]:
    catalogs = []
    for file in plan.inventory.ranks[rank].catalogs:
        catalog = read_catalog(plan.inventory, file)
        if isinstance(catalog, SetAside):
            set_aside.append(catalog)
        else:
            catalogs.append(catalog)
    return joined_modules(catalogs)


def _checks(plan: MergePlan, rank: int, set_aside: list[SetAside]) -> list[FoundChecks]:
    documents: list[FoundChecks] = []
    for file in plan.inventory.ranks[rank].checks:
        found = read_checks(plan.inventory, file)
        if isinstance(found, SetAside):
            set_aside.append(found)
        else:
            documents.append(found)
    return documents


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
