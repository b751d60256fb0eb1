"""Row groups of ``history`` whose rows were numbered, kept until the last stretch that they reach into.

Ranks cut their parts in different places, and late gradients lie in a later one, so that a row group reaches
into several stretches. It is decoded once for all of them that a task has, and what is kept of it is little:
its values, and what its runs of rows mean, which row groups of other ranks have in common with it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.comparison_cells import PROVENANCE, CellKinds, Provenances
from torchinstruments.merge.known_columns import DecodedRows, KnownColumns
from torchinstruments.merge.parts import reread_groups
from torchinstruments.merge.row_spans import Moment, RowSpan
from torchinstruments.merge.run_kinds import Kind, RunKinds, Runs
from torchinstruments.merge.sources import Source
from torchinstruments.records import Scope
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.row_blocks import floats
from torchinstruments.store.schema import KEY_COLUMNS
from torchinstruments.store.series import codes_of

__all__ = ["COMPARED_COLUMNS", "GroupRows", "RowGroups"]

MAX_HELD_BYTES = 160 * 2**20
"""Of row groups that a task keeps for its next stretches; what is beyond this is decoded again."""

_CELL_COLUMNS = (*KEY_COLUMNS, "backward_index", "mode", "scope", "replica_key")
_PLACE_COLUMNS = ("generation", "attempt", "forward_in_attempt", "forward_index")
COMPARED_COLUMNS = (*_PLACE_COLUMNS, *_CELL_COLUMNS, *PROVENANCE, "value")
"""Columns of ``history`` that a comparison reads."""

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows of a row group, in runs of one forward each.

    Attributes:
        process: Process that wrote it.
        values: Of its rows, NaN where there is none or none that is finite.
        moments: `Moment` of each run, shape ``[runs, 3]``.
        starts: First row of each run, shape ``[runs]``.
        cells: Series and variant of the rows of each run.
        provenances: `Provenances` of the rows of each run.
    """

    process: str
    values: _Floats
    moments: _Integers
    starts: _Integers
    cells: list[Kind]
    provenances: list[Kind]

    @property
    def size_bytes(self) -> int:
        """What it holds that no other row group has."""
        own = (kind for kind in (*self.cells, *self.provenances) if not kind.is_known)
        return (
            self.values.nbytes
            + self.moments.nbytes
            + 24 * len(self.starts)
            + sum(one.nbytes for kind in own for one in kind.numbers)
        )


class RowGroups:
    """Reads the row groups that stretch after stretch needs (worker).

    Args:
        run_id: Parts of another run are left out.
        sources: The folders of the run.
        cells: Numbers series and variants.
        provenances: Numbers what stands beside the values.
    """

    def __init__(
        self, run_id: str, sources: tuple[Source, ...], cells: CellKinds, provenances: Provenances
    ) -> None:
        self._run_id, self._sources = run_id, sources
        self._cells = RunKinds(_CELL_COLUMNS, cells.numbers)
        self._provenances = RunKinds(PROVENANCE, lambda rows: (provenances.numbers(rows),))
        self._columns = KnownColumns("history", COMPARED_COLUMNS)
        self._held: dict[tuple[PartFile, int], GroupRows] = {}
        self._held_bytes = 0

    def of_stretch(self, spans: Sequence[RowSpan], next_first: Moment | None) -> Iterator[GroupRows]:
        """Yields the row groups of a rank that reach into a stretch, in the order of writing.

        Args:
            spans: Those row groups.
            next_first: The first forward of the stretch that comes next, None after the last one.

        Raises:
            StorageError: A store did not answer.
            ChangedPartError: A part cannot be read any more, or not in these columns.
        """
        for part, of_part in groupby(spans, key=lambda span: span.part):
            wanted = list(of_part)
            lacking = [span.group for span in wanted if (part, span.group) not in self._held]
            batches = reread_groups(self._sources, self._run_id, part, self._columns, lacking)
            with contextlib.closing(batches):
                for span in wanted:
                    found = self._held.pop((part, span.group), None)
                    if found is None:
                        found = self._group(part, next(batches))
                    else:
                        self._held_bytes -= found.size_bytes
                    if next_first is not None and span.last >= next_first:
                        self._hold((part, span.group), found)
                    yield found

    def _hold(self, place: tuple[PartFile, int], group: GroupRows) -> None:
        if self._held_bytes + group.size_bytes <= MAX_HELD_BYTES:
            self._held[place] = group
            self._held_bytes += group.size_bytes

    def _group(self, part: PartFile, rows: DecodedRows) -> GroupRows:
        batch = rows.batch
        values = floats(batch, "value")
        is_finite = np.isfinite(values)
        moments, runs = rows.made(_PLACE_COLUMNS, _runs)
        scope_of, scopes = codes_of(batch.column("scope"))
        is_other = np.array([one not in {Scope.LOCAL, Scope.LOCAL_SHARD} for one in scopes], np.bool_)
        # Without a known scope a row with a value has no cell, and one without a value has one.
        further = is_other[scope_of] & is_finite if bool(is_other.any()) else None
        return GroupRows(
            process=part.process,
            values=values if bool(is_finite.all()) else np.where(is_finite, values, np.nan),
            moments=moments,
            starts=runs.starts,
            cells=rows.made((*_PLACE_COLUMNS, *_CELL_COLUMNS), self._kinds_of_cells)
            if further is None
            else self._cells.find(batch, runs, further),
            provenances=rows.made((*_PLACE_COLUMNS, *PROVENANCE), self._kinds_of_provenances),
        )

    def _kinds_of_cells(self, batch: pa.RecordBatch) -> list[Kind]:
        return self._cells.find(batch, _runs(batch)[1])

    def _kinds_of_provenances(self, batch: pa.RecordBatch) -> list[Kind]:
        return self._provenances.find(batch, _runs(batch)[1])


def _runs(batch: pa.RecordBatch) -> tuple[_Integers, Runs]:
    """Returns the forward of each run of rows, and where the runs lie."""
    generation, attempt, forward = (_whole(batch, name) for name in _PLACE_COLUMNS[:3])
    if batch.column("attempt").null_count:
        forward = np.where(attempt < 0, _whole(batch, "forward_index"), forward)
    differs = np.ones(len(attempt), np.bool_)
    differs[1:] = generation[1:] != generation[:-1]
    for column in (attempt, forward):
        differs[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(differs)
    moments = np.stack([column[starts] for column in (generation, attempt, forward)], axis=1)
    return moments.astype(np.int64), Runs(starts, np.diff(np.append(starts, len(attempt))))


def _whole(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.integer]:
    """Returns a column of whole numbers as wide as it is, -1 where it is null."""
    column = batch.column(name)
    return (column.fill_null(-1) if column.null_count else column).to_numpy(zero_copy_only=False)
