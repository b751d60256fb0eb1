"""``torchinstruments status``: where each rank stands by its manifest; reads no part, works on a live run."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from torchinstruments.cli.command import Command, add_place_arguments, storage_options
from torchinstruments.cli.console import age_text, count_text, print_table, shown_text
from torchinstruments.cli.folders import Folders, open_folders, print_runs_beside

if TYPE_CHECKING:
    from torchinstruments.store.inventory import Inventory, ManifestFile

__all__ = ["COMMAND"]

_HEADINGS = (
    "rank",
    "status",
    "host",
    "as of",
    "last sample id",
    "its age",
    "measured",
    "rows stored",
    "in spool",
    "dropped",
    "errors",
)
_NUM_TEXT_COLUMNS = 3
_MAX_NAMED_FILES = 10


@dataclass(frozen=True, slots=True)
class _ProcessStatus:
    """Where one process stands.

    Samples and errors are as the process had counted them when its manifest was written; the last sample and
    the rows are what was durable by then, so the two need not agree while it runs.

    Attributes:
        rank: Its rank.
        process: 8 hex digits.
        generation: Its generation.
        status: ``running``, ``closed`` or ``interrupted``.
        host: Host name.
        started_at: When the process attached, ISO 8601 UTC, by its host's clock.
        manifest_age_s: Seconds since its manifest was written, which is what everything here is as of.
        samples: Root forwards measured.
        last_sample_id: Last durable sample.
        last_sample_at: When that one began, ISO 8601 UTC.
        last_sample_age_s: Seconds since then, by this host's clock.
        rows: Rows of ``history`` where readers look.
        rows_in_spool: Rows of all tables that still lie in the host's spool.
        spool_path: Where that is on its host, ``""`` where it has none.
        rows_dropped: Rows of all tables that were given up.
        errors: Errors of collection.
    """

    rank: int
    process: str
    generation: int
    status: str
    host: str
    started_at: str
    manifest_age_s: float | None
    samples: int
    last_sample_id: int | None
    last_sample_at: str | None
    last_sample_age_s: float | None
    rows: int
    rows_in_spool: int
    spool_path: str
    rows_dropped: int
    errors: int


@dataclass(frozen=True, slots=True)
class _RunStatus:
    run_id: str
    generations: int
    expected_ranks: list[int]
    expected_ranks_known: bool
    missing_ranks: list[int]
    ranks_without_manifest: list[int]
    runs_beside: list[str]
    set_aside: list[dict[str, str]]
    ranks: list[_ProcessStatus]


def _run(arguments: argparse.Namespace) -> int:
    from torchinstruments.store.inventory import take_inventory

    folders = open_folders(arguments.urls, storage_options(arguments))
    found = _status(take_inventory(*folders.storages), folders, time.time())
    if arguments.as_json:
        from torchinstruments.store.manifest import encode_document

        sys.stdout.write(encode_document(found).decode())
    file = sys.stderr if arguments.as_json else sys.stdout
    _print_status(found, file)
    print_runs_beside(folders, file)
    return 0 if _is_well(found) else 1


COMMAND = Command(
    name="status",
    summary="list the ranks of a run: last sample and its age, rows, drops, status",
    description="Lists the ranks of a run by what their manifests say. A job rewrites them at most once a "
    "minute and at least every 5 minutes; 'as of' is the age of each. 'measured' and 'errors' are what a "
    "process had counted by then, 'last sample id' (they count from 0), 'its age' and 'rows stored' what of "
    "it was durable; ages are by this host's clock. Reads no measurement, so it is quick, and works while "
    "the job runs.",
    example="torchinstruments status runs/first",
    exit_codes="0 nothing is missing, 1 a rank is missing or interrupted, a file cannot be read, or rows "
    "were dropped or wait in a spool that nobody carries, 2 could not",
    add_arguments=add_place_arguments,
    run=_run,
)


def _status(inventory: "Inventory", folders: Folders, now_s: float) -> _RunStatus:
    from torchinstruments.merge.expected import expectations
    from torchinstruments.store.liveness import store_now_s

    store_s = store_now_s(inventory, clock_s=now_s)
    wanted = expectations(inventory.run, inventory.generations)
    expected = sorted({rank for one in wanted for rank in one.ranks})
    present = [rank for rank, found in inventory.ranks.items() if found.manifests or found.parts]
    return _RunStatus(
        run_id=inventory.run.run_id,
        generations=len(inventory.generations),
        expected_ranks=expected,
        expected_ranks_known=all(one.is_known for one in wanted),
        missing_ranks=sorted(set(expected) - set(present)),
        ranks_without_manifest=[rank for rank in present if not inventory.ranks[rank].manifests],
        runs_beside=list(folders.runs_beside),
        set_aside=[
            {"file": f"{inventory.storages[one.source].url.rstrip('/')}/{one.path}", "reason": one.reason}
            for one in inventory.set_aside
        ],
        ranks=[
            _process_status(inventory, one, store_s, now_s)
            for one in sorted(inventory.manifests, key=_by_start)
        ],
    )


def _by_start(found: "ManifestFile") -> tuple[int, int, float, str]:
    """Orders the processes of a rank by when they began; within a generation nothing else tells."""
    from torchinstruments.store.clocks import seconds_of

    manifest = found.manifest
    started_s = seconds_of(manifest.started_at)
    if started_s is None:
        started_s = float("-inf")
    return (manifest.rank, manifest.generation, started_s, manifest.process)


def _process_status(
    inventory: "Inventory", found: "ManifestFile", store_s: float, now_s: float
) -> _ProcessStatus:
    from torchinstruments.merge.processes import rows_dropped, rows_in_spool
    from torchinstruments.store.liveness import process_status

    manifest = found.manifest
    history = manifest.tables.get("history")
    return _ProcessStatus(
        rank=manifest.rank,
        process=manifest.process,
        generation=manifest.generation,
        status=process_status(inventory, found, store_s).value,
        host=manifest.host,
        started_at=manifest.started_at,
        manifest_age_s=_manifest_age_s(found, store_s, now_s),
        samples=manifest.counters.samples,
        last_sample_id=manifest.last_sample_id,
        last_sample_at=manifest.last_sample_at or None,
        last_sample_age_s=_age_s(manifest.last_sample_at, now_s),
        rows=history.rows if history is not None else 0,
        rows_in_spool=rows_in_spool(manifest),
        spool_path=manifest.spool_path,
        rows_dropped=rows_dropped(manifest),
        errors=sum(manifest.counters.errors.values()),
    )


def _manifest_age_s(found: "ManifestFile", store_s: float, now_s: float) -> float | None:
    """Both times by the store's clock where it tells one, else by that of the host that wrote and by ours."""
    if found.modified_at is not None:
        return max(0.0, store_s - found.modified_at)
    return _age_s(found.manifest.written_at, now_s)


def _age_s(text: str, now_s: float) -> float | None:
    from torchinstruments.store.clocks import seconds_of

    seconds = seconds_of(text)
    return None if seconds is None else now_s - seconds


def _is_well(found: _RunStatus) -> bool:
    """Whether nothing is missing; rows in the spool of a process that runs are on their way."""
    return not (found.missing_ranks or found.set_aside) and all(
        process.status != "interrupted"
        and process.rows_dropped == 0
        and (process.rows_in_spool == 0 or process.status == "running")
        for process in found.ranks
    )


def _print_status(found: _RunStatus, file: TextIO) -> None:
    from torchinstruments.merge.rank_sets import ranks_text

    latest = {process.rank: process for process in found.ranks}
    generations = count_text(found.generations, "generation")
    print(f"run {shown_text(found.run_id)}: {count_text(len(latest), 'rank')}, {generations}", file=file)
    if latest:
        cells = [_cells(process) for process in latest.values()]
        print_table(_HEADINGS, cells, file=file, num_text_columns=_NUM_TEXT_COLUMNS)
    if len(found.ranks) > len(latest):
        earlier = count_text(len(found.ranks) - len(latest), "earlier process", "earlier processes")
        print(f"{earlier} of these ranks not shown; --json has all", file=file)
    if found.missing_ranks:
        missing = count_text(len(found.missing_ranks), "rank")
        print(f"missing: {missing} ({ranks_text(found.missing_ranks)})", file=file)
    if found.ranks_without_manifest:
        unknown = count_text(len(found.ranks_without_manifest), "rank")
        print(f"parts without a manifest: {unknown} ({ranks_text(found.ranks_without_manifest)})", file=file)
    if not found.expected_ranks_known:
        print("not known in full which ranks observe: the rank policy does not tell", file=file)
    _print_left(found.ranks, file)
    _print_set_aside(found.set_aside, file)


def _print_left(processes: Sequence[_ProcessStatus], file: TextIO) -> None:
    """Says on which host rows lie that no live process carries, and how they get from there."""
    left = [one for one in processes if one.rows_in_spool and one.spool_path and one.status != "running"]
    for one in left[:_MAX_NAMED_FILES]:
        print(
            f"in the spool: {count_text(one.rows_in_spool, 'row')} of rank {one.rank}; run on "
            f"{shown_text(one.host)}: torchinstruments upload {shown_text(shlex.quote(one.spool_path))}",
            file=file,
        )
    if len(left) > _MAX_NAMED_FILES:
        print(f"in the spool: {count_text(len(left) - _MAX_NAMED_FILES, 'more rank')}", file=file)


def _print_set_aside(set_aside: Sequence[dict[str, str]], file: TextIO) -> None:
    for one in set_aside[:_MAX_NAMED_FILES]:
        print(shown_text(f"set aside: {one['file']}: {one['reason']}"), file=file)
    if len(set_aside) > _MAX_NAMED_FILES:
        print(f"set aside: {count_text(len(set_aside) - _MAX_NAMED_FILES, 'more file')}", file=file)


def _cells(process: _ProcessStatus) -> list[str]:
    written_s, age_s = process.manifest_age_s, process.last_sample_age_s
    return [
        str(process.rank),
        process.status,
        process.host,
        "-" if written_s is None else f"{age_text(written_s)} ago",
        "-" if process.last_sample_id is None else str(process.last_sample_id),
        "-" if age_s is None else age_text(age_s),
        f"{process.samples:,}",
        f"{process.rows:,}",
        f"{process.rows_in_spool:,}",
        f"{process.rows_dropped:,}",
        f"{process.errors:,}",
    ]
