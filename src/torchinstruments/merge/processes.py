"""The section ``ranks`` of ``result.json``: every process that held a rank, by its manifest and its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.merge.tasks import ProcessRows
from torchinstruments.store.clocks import seconds_of
from torchinstruments.store.entries import timestamp_text
from torchinstruments.store.manifest import Manifest

__all__ = ["ProcessView", "ended_by", "overlapping_ranks", "rows_dropped", "rows_in_spool", "tables_behind"]

MAX_SHOWN_ERRORS = 5
"""Errors of a process that are shown; its manifest has more."""

_MAX_NAMED = 20

_ENDED = "process"
"""The probe of the errors that say what ended a process."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process that held a rank.

    Attributes:
        rank: Rank in whose folder it wrote.
        process: 8 hex digits.
        manifest: None where there is no readable one.
        status: ``running``, ``closed``, ``interrupted``, or ``unknown`` without a manifest.
        rows: What was read of it, None where no part could be.
    """

    rank: int
    process: str
    manifest: Manifest | None
    status: str
    rows: ProcessRows | None

    @property
    def generations(self) -> tuple[int, ...]:
        """Generations that it belonged to, by manifest, else by its rows."""
        if self.manifest is not None:
            return (self.manifest.generation,)
        return self.rows.generations if self.rows is not None else ()

    def record(self) -> dict[str, object]:
        """Returns its entry in ``ranks``."""
        manifest, rows = self.manifest, self.rows
        generations = self.generations
        found: dict[str, object] = {
            "rank": self.rank,
            "process": self.process,
            "generation": generations[0] if len(generations) == 1 else None,
            "status": self.status,
        }
        found |= _identity(manifest)
        found |= {
            "samples": rows.samples if rows else 0,
            "missed_samples": rows.missed_samples if rows else 0,
            "rows": rows.rows.get("history", 0) if rows else 0,
            "rows_by_table": dict(rows.rows) if rows else {},
            "rows_dropped": rows_dropped(manifest) if manifest else None,
            "rows_in_spool": rows_in_spool(manifest) if manifest else None,
            "last_sample_id": self._last_sample_id(),
            "last_sample_at": self._last_sample_at(),
        }
        return found | _costs(manifest)

    def _last_sample_id(self) -> int | None:
        if self.rows is not None and self.rows.last_sample_id is not None:
            return self.rows.last_sample_id
        return self.manifest.last_sample_id if self.manifest is not None else None

    def _last_sample_at(self) -> str | None:
        if self.rows is not None and self.rows.last_sample_at_us is not None:
            return timestamp_text(self.rows.last_sample_at_us)
        return (self.manifest.last_sample_at or None) if self.manifest is not None else None

    def lifetime_us(self) -> tuple[int, int] | None:
        """Returns when it was surely alive: first and last microsecond since the epoch, None if unknown."""
        times: list[int] = []
        if self.manifest is not None:
            times += _microseconds(self.manifest.started_at, self.manifest.written_at)
        if self.rows is not None:
            seen = (self.rows.first_sample_at_us, self.rows.last_sample_at_us)
            times += [time for time in seen if time is not None]
        return (min(times), max(times)) if times else None


def ended_by(views: Sequence[ProcessView]) -> list[dict[str, object]]:
    """Returns what ended processes before their time, by kind, that of the fewest ranks first."""
    ranks: dict[str, set[int]] = {}
    for view in views:
        for error in view.manifest.errors if view.manifest is not None else ():
            if error.probe == _ENDED:
                ranks.setdefault(error.type, set()).add(view.rank)
    ordered = sorted(ranks.items(), key=lambda one: (len(one[1]), min(one[1]), one[0]))
    return [{"kind": kind, "ranks": ranks_text(own), "num_ranks": len(own)} for kind, own in ordered]


def overlapping_ranks(views: Sequence[ProcessView]) -> list[dict[str, object]]:
    """Returns the rank numbers that two processes of one generation cannot both have held.

    They held it at the same time, or one after the other and gave out the same sample ids: two starts that
    could not reach the store to count generations.
    """
    by_place: dict[tuple[int, int], list[ProcessView]] = {}
    for view in views:
        for generation in view.generations:
            by_place.setdefault((view.rank, generation), []).append(view)
    found: list[dict[str, object]] = []
    for (rank, generation), held in sorted(by_place.items()):
        colliding = _collisions(held)
        processes = sorted({name for pair in [*_overlaps(held), *colliding] for name in pair})
        if processes:
            found.append(
                {
                    "rank": rank,
                    "generation": generation,
                    "processes": processes,
                    "same_sample_ids": bool(colliding),
                }
            )
    return found


def _collisions(views: Sequence[ProcessView]) -> list[tuple[str, str]]:
    """Pairs of processes with samples of the same ids, which only the process tells apart."""
    spans = [
        (view.rows.first_sample_id, view.rows.last_sample_id, view.process)
        for view in views
        if view.rows is not None
        and view.rows.first_sample_id is not None
        and view.rows.last_sample_id is not None
    ]
    return [
        (process, other)
        for place, (first, last, process) in enumerate(spans)
        for other_first, other_last, other in spans[place + 1 :]
        if first <= other_last and other_first <= last
    ]


def _overlaps(views: Sequence[ProcessView]) -> list[tuple[str, str]]:
    lives = [(life, view.process) for view in views if (life := view.lifetime_us()) is not None]
    pairs: list[tuple[str, str]] = []
    for place, ((first, last), process) in enumerate(lives):
        for (other_first, other_last), other in lives[place + 1 :]:
            if first <= other_last and other_first <= last:
                pairs.append((process, other))
    return pairs


def rows_dropped(manifest: Manifest) -> int:
    """Returns the rows that a process gave up, of all tables."""
    by_table = {table: state.rows_dropped for table, state in manifest.tables.items()}
    # The counter covers history from the queue on, the table state from the writer on.
    history = max(by_table.pop("history", 0), manifest.counters.rows_dropped)
    return history + sum(by_table.values())


def rows_in_spool(manifest: Manifest) -> int:
    """Returns the durable rows that have not reached the run's folder yet, of all tables."""
    return sum(state.rows_in_spool for state in manifest.tables.values())


def _identity(manifest: Manifest | None) -> dict[str, object]:
    if manifest is None:
        return {"host": None, "local_rank": None, "world_size": None, "device": None, "verified": None}
    return {
        "host": manifest.host,
        "local_rank": manifest.local_rank,
        "node_rank": manifest.node_rank,
        "world_size": manifest.world_size,
        "device": manifest.device,
        "mesh_coordinates": list(manifest.mesh_coordinates),
        "mesh_axis_names": list(manifest.mesh_axis_names),
        "launcher": manifest.launcher,
        "restart_count": manifest.restart_count,
        "verified": manifest.verified,
        "started_at": manifest.started_at,
    }


def _costs(manifest: Manifest | None) -> dict[str, object]:
    if manifest is None:
        return {"errors": {}, "last_errors": [], "counters": None}
    counters = manifest.counters
    return {
        "errors": dict(sorted(counters.errors.items())),
        "last_errors": [
            {"probe": error.probe, "module": error.module, "type": error.type, "message": error.message}
            for error in manifest.errors[-MAX_SHOWN_ERRORS:]
        ],
        "counters": {
            "forwards": counters.forwards,
            "parts": counters.parts,
            "bytes": counters.bytes,
            "collection_s": counters.collection_s,
            "writer_s": counters.writer_s,
            "histograms_missing": dict(sorted(counters.histograms_missing.items())),
        },
    }


def _microseconds(*times: str) -> list[int]:
    # A manifest of another hand may tell no time; its rows tell too.
    found = [seconds_of(text) for text in times]
    return [round(seconds * 1_000_000) for seconds in found if seconds is not None]


def tables_behind(manifest: Manifest, found: Mapping[str, set[int]]) -> dict[str, dict[str, object]]:
    """Returns the parts that a manifest counts as written and that do not lie there.

    Args:
        manifest: Of one process.
        found: Table to the numbers of the parts that were listed.
    """
    behind: dict[str, dict[str, object]] = {}
    for table, state in sorted(manifest.tables.items()):
        there = found.get(table, set()) | set(state.missing)
        below = sum(1 for number in there if number < state.next_part)
        lost = state.next_part - below
        if lost > 0:
            named: list[int] = []
            number = 0
            while len(named) < min(lost, _MAX_NAMED):
                if number not in there:
                    named.append(number)
                number += 1
            behind[table] = {"parts": lost, "first_numbers": named}
    return behind
