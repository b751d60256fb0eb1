"""The sections ``coverage`` and ``generations`` of ``result.json``: what was expected, and what was there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchinstruments.merge.alignment import AlignmentFold
from torchinstruments.merge.catalogs import FiredModules
from torchinstruments.merge.expected import expectations
from torchinstruments.merge.plan import MergePlan
from torchinstruments.merge.processes import (
    ProcessView,
    ended_by,
    overlapping_ranks,
    rows_dropped,
    rows_in_spool,
    tables_behind,
)
from torchinstruments.merge.tasks import RankReading
from torchinstruments.records import Member
from torchinstruments.store.inventory import SetAside
from torchinstruments.store.liveness import ProcessStatus
from torchinstruments.store.sorting import DUPLICATE

__all__ = ["Coverage", "CoverageFold"]

_FOREIGN = "foreign_run"


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was there.

    Attributes:
        coverage: The section.
        generations: The section.
        is_complete: Whether nothing is missing and nothing was set aside.
        ranks_by_generation: Generation to the ranks that were expected or present in it.
    """

    coverage: dict[str, object]
    generations: list[dict[str, object]]
    is_complete: bool
    ranks_by_generation: dict[int, list[int]]


@dataclass(slots=True)
class CoverageFold:
    """Gathers what the readings of all ranks say of themselves, without their summaries.

    Attributes:
        plan: What was to be read.
        fired: Which layers never fired.
        alignment: Which samples the ranks have in common.
        set_aside: Files that were left out.
    """

    plan: MergePlan
    fired: FiredModules = field(default_factory=FiredModules)
    alignment: AlignmentFold = field(default_factory=AlignmentFold)
    set_aside: list[SetAside] = field(default_factory=list)
    _views: list[ProcessView] = field(default_factory=list)
    _num_foreign: int = 0
    _disagreements: list[dict[str, object]] = field(default_factory=list)
    _without_samples: list[int] = field(default_factory=list)

    def add(self, reading: RankReading, views: Sequence[ProcessView]) -> None:
        """Takes a rank; ranks come in ascending order."""
        self._views += views
        self.set_aside += reading.set_aside
        self._num_foreign += reading.foreign_parts
        self.alignment.add(reading.rank, reading.keys)
        if views and len(reading.keys) == 0:
            self._without_samples.append(reading.rank)
        for one in reading.disagreements:
            self._disagreements.append(
                {
                    "file": self._name(one.source, one.path),
                    "column": one.column,
                    "found": one.found,
                    "expected": one.expected,
                    "rows": one.rows,
                }
            )

    def result(self) -> Coverage:
        """Returns the sections."""
        generations, missing_somewhere = self._generations()
        expected = sorted({rank for one in self._expectations() for rank in one.ranks})
        present = sorted({view.rank for view in self._views})
        asked = self.plan.asked_ranks or frozenset()
        # Who asks for a rank by its number expects it, whatever the policy says.
        due = sorted({*expected, *(asked - set(present))})
        quarantined = self._quarantined()
        documents = sum(one.reason == _FOREIGN for one in self.plan.inventory.set_aside)
        missing_parts = self._missing_parts()
        surplus = self._rows_beyond_manifests()
        dropped = sum(rows_dropped(view.manifest) for view in self._views if view.manifest is not None)
        spooled = self._rows_in_spool()
        sections: dict[str, object] = {
            "complete": False,
            "expected_ranks": due,
            "expected_ranks_known": all(one.is_known for one in self._expectations()),
            "present_ranks": present,
            "missing_ranks": sorted(set(due) - set(present)),
            "unexpected_ranks": sorted(set(present) - set(expected)),
            "interrupted_ranks": self._ranks_that_are(ProcessStatus.INTERRUPTED),
            "running_ranks": self._ranks_that_are(ProcessStatus.RUNNING),
            "unverified_ranks": sorted(
                {view.rank for view in self._views if view.manifest and not view.manifest.verified}
            ),
            "ended_by": ended_by(self._views),
            "overlapping_ranks": overlapping_ranks(self._views),
            "quarantined": quarantined,
            "foreign_parts": self._num_foreign,
            "foreign_documents": documents,
            "duplicate_parts": sum(one.reason == DUPLICATE for one in self.plan.inventory.set_aside),
            "missing_parts": missing_parts,
            "unexpected_files": self._unexpected_files(),
            "disagreements": [*self._disagreements, *surplus],
            "rows_dropped": dropped,
            "rows_in_spool": spooled,
            "alignment": self.alignment.record(self._ranks_by_generation())
            | {"ranks_without_samples": self._without_samples},
            "modules_never_fired": self.fired.record(),
        }
        sections["complete"] = is_complete = not (
            missing_somewhere
            or not sections["expected_ranks_known"]
            or sections["missing_ranks"]
            or sections["interrupted_ranks"]
            or sections["running_ranks"]
            or sections["overlapping_ranks"]
            or quarantined
            or self._num_foreign
            or documents
            or missing_parts
            or surplus
            or dropped
            or spooled
        )
        return Coverage(sections, generations, is_complete, self._ranks_by_generation())

    def _ranks_by_generation(self) -> dict[int, list[int]]:
        found = {one.generation: set(one.ranks) for one in self._expectations()}
        for view in self._views:
            for generation in view.generations:
                found.setdefault(generation, set()).add(view.rank)
        return {generation: sorted(ranks) for generation, ranks in sorted(found.items())}

    def _expectations(self) -> list["_Wanted"]:
        run, generations = self.plan.inventory.run, self.plan.inventory.generations
        asked = self.plan.asked_ranks
        return [
            _Wanted(
                one.generation, [rank for rank in one.ranks if asked is None or rank in asked], one.is_known
            )
            for one in expectations(run, generations)
        ]

    def _generations(self) -> tuple[list[dict[str, object]], bool]:
        wanted = {one.generation: one for one in self._expectations()}
        records: list[dict[str, object]] = []
        is_any_missing = False
        for generation in self.plan.inventory.generations:
            expected = wanted[generation.generation].ranks
            present = sorted({v.rank for v in self._views if generation.generation in v.generations})
            missing = sorted(set(expected) - set(present))
            is_any_missing = is_any_missing or bool(missing)
            records.append(
                {
                    "generation": generation.generation,
                    "world_size": generation.world_size,
                    "leader_process": generation.leader_process,
                    "started_at": generation.started_at,
                    "first_sample_id": generation.first_sample_id,
                    "members_complete": generation.members_complete,
                    "expected_ranks": expected,
                    "present_ranks": present,
                    "missing_ranks": missing,
                    "members": [
                        {
                            "rank": member.rank,
                            "process": member.process,
                            "host": member.host,
                            "local_rank": member.local_rank,
                            "observing": member.observing,
                        }
                        for member in sorted(generation.members, key=_by_rank)
                    ],
                }
            )
        return records, is_any_missing

    def _ranks_that_are(self, status: str) -> list[int]:
        return sorted({view.rank for view in self._views if view.status == status})

    def _quarantined(self) -> list[dict[str, object]]:
        left_out = [*self.plan.inventory.set_aside, *self.set_aside]
        named = {
            (self._name(one.source, one.path), one.reason)
            for one in left_out
            if one.reason not in {DUPLICATE, _FOREIGN}
        }
        strange = {(self._name(*one), "unexpected_name") for one in self._strange(in_parts=True)}
        return [{"file": name, "reason": reason} for name, reason in sorted(named | strange)]

    def _unexpected_files(self) -> list[str]:
        return [self._name(*one) for one in self._strange(in_parts=False)]

    def _strange(self, *, in_parts: bool) -> Iterable[tuple[int, str]]:
        # Between parts a file may be a part under a wrong name; beside them it is none.
        return [one for one in self.plan.inventory.strange if (".parts/" in one[1]) == in_parts]

    def _missing_parts(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for view in self._views:
            # A process that runs may have written a part between the listing and its manifest's reading.
            if view.manifest is None or view.status == ProcessStatus.RUNNING:
                continue
            listed: dict[str, set[int]] = {}
            for table, parts in self.plan.inventory.ranks[view.rank].parts.items():
                listed[table] = {part.sequence for part in parts if part.process == view.process}
            for table, lost in tables_behind(view.manifest, listed).items():
                found.append({"rank": view.rank, "process": view.process, "table": table} | lost)
        return found

    def _rows_beyond_manifests(self) -> list[dict[str, object]]:
        """What closed processes left more of than they counted: files that somebody copied or replaced."""
        found: list[dict[str, object]] = []
        for view in self._views:
            if view.manifest is None or view.rows is None or view.status != ProcessStatus.CLOSED:
                continue
            for table, rows in sorted(view.rows.rows.items()):
                state = view.manifest.tables.get(table)
                if state is None or state.rows_in_spool or rows <= state.rows:
                    continue
                found.append(
                    {
                        "file": self._manifest_name(view),
                        "column": f"rows of {table}",
                        "found": str(rows),
                        "expected": str(state.rows),
                        "rows": rows - state.rows,
                    }
                )
        return found

    def _manifest_name(self, view: ProcessView) -> str:
        for one in self.plan.inventory.ranks[view.rank].manifests:
            if one.manifest.process == view.process:
                return self._name(one.source, one.path)
        raise AssertionError("a view with a manifest comes from one")

    def _rows_in_spool(self) -> dict[str, int]:
        by_host: dict[str, int] = {}
        for view in self._views:
            if view.manifest is not None and (rows := rows_in_spool(view.manifest)):
                by_host[view.manifest.host] = by_host.get(view.manifest.host, 0) + rows
        return dict(sorted(by_host.items()))

    def _name(self, source: int, path: str) -> str:
        """A file by its path below the run's folder; of several folders, with its folder before it."""
        storages = self.plan.storages
        return path if len(storages) == 1 else f"{storages[source].url.rstrip('/')}/{path}"


@dataclass(frozen=True, slots=True)
class _Wanted:
    generation: int
    ranks: list[int]
    is_known: bool


def _by_rank(member: Member) -> int:
    return member.rank
