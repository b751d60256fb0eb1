"""The rows of a stretch of all ranks, rank beside rank: an array of values a rank, in the order of the cells.

Ranks that run the same program write the same keys in the same order. So the keys of a row group are first
held against those of the row group before it at the same place of another rank; only where they differ are
the cells of its rows looked up one by one. Either way every row's key is looked at.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.comparison_cells import NOT_COMPARED, PROVENANCE, Cells, Provenances
from torchinstruments.merge.overview_choice import Pictured
from torchinstruments.merge.parts import reread_groups
from torchinstruments.merge.repeated_runs import repeated_runs
from torchinstruments.merge.row_spans import Moment
from torchinstruments.merge.sources import Source
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.row_blocks import floats
from torchinstruments.store.schema import KEY_COLUMNS

__all__ = ["COMPARED_COLUMNS", "AlignedRows", "ComparisonTask", "RankRows", "read_aligned"]

_PLACE_COLUMNS = ("generation", "attempt", "forward_in_attempt")
_VARIANT_COLUMNS = ("backward_index", "mode", "scope", "replica_key")
_LAYOUT = (*_PLACE_COLUMNS, *KEY_COLUMNS, *_VARIANT_COLUMNS, *PROVENANCE)
_KINDS = (*KEY_COLUMNS, *_VARIANT_COLUMNS, *PROVENANCE)
COMPARED_COLUMNS = (*_LAYOUT, "forward_index", "value")
"""Columns of ``history`` that a comparison reads."""

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ComparisonTask:
    """A stretch of forwards, to be read of every rank (made by the merge, run by a worker).

    Attributes:
        first: The first forward.
        last: The last forward.
        run_id: Parts of another run are left out.
        sources: The folders of the run, by `PartFile.source`.
        parts: Rank to its parts with rows in the stretch, in the order of writing, and the row groups.
        pictured: What is chosen for pictures; None where none of it lies in the stretch.
    """

    first: Moment
    last: Moment
    run_id: str
    sources: tuple[Source, ...]
    parts: tuple[tuple[int, tuple[tuple[PartFile, tuple[int, ...]], ...]], ...]
    pictured: Pictured | None = None

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """Ranks whose parts are read."""
        return tuple(rank for rank, _ in self.parts)


@dataclass(frozen=True, slots=True)
class RankRows:
    """The values of one rank in cells of whole tensors, and its values in cells of parts of tensors.

    Attributes:
        rank: The rank.
        values: By the number among cells of whole tensors; NaN where it has none. Cells that were first seen
            on a later rank lie beyond its end.
        part_columns: Cells of parts, ascending, shape ``[values]``.
        part_values: Their values, shape ``[values]``.
    """

    rank: int
    values: _Floats
    part_columns: npt.NDArray[np.int32]
    part_values: _Floats


@dataclass(frozen=True, slots=True)
class AlignedRows:
    """A stretch of all ranks.

    Attributes:
        cells: Which cells there are.
        ranks: Those with rows in it, ascending.
        without_value: Ranks that have a row and no value, shape ``[cells]``.
        differing: Bits of `PROVENANCE` that are not the same on all ranks with a row, shape ``[cells]``.
        sizes: Entries of the tensor on the first rank with a row, -1 without a shape; shape ``[cells]``.
        not_compared: `NOT_COMPARED` to rows.
        ambiguous: Rank to rows of forwards that two of its processes have; they are not compared.
        num_repeated: Rows of a cell that a later row of the same process replaces.
        num_rows: Rows of the stretch.
    """

    cells: Cells
    ranks: tuple[RankRows, ...]
    without_value: _Integers
    differing: _Integers
    sizes: _Integers
    not_compared: dict[str, int]
    ambiguous: dict[int, int]
    num_repeated: int
    num_rows: int


def read_aligned(task: ComparisonTask) -> AlignedRows:
    """Reads a stretch (worker: any thread, process or machine).

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: A part cannot be read any more, or not in these columns.
    """
    grid = _Grid(task)
    ranks = tuple(grid.rank(rank, parts) for rank, parts in task.parts)
    size = len(grid.cells)
    return AlignedRows(
        cells=grid.cells,
        ranks=ranks,
        without_value=_grown(grid.without_value, size, 0),
        differing=_grown(grid.differing, size, 0),
        sizes=grid.sizes(),
        not_compared=grid.not_compared,
        ambiguous=grid.ambiguous,
        num_repeated=grid.num_repeated,
        num_rows=grid.num_rows,
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """A row group whose rows have found their cells.

    Attributes:
        batch: Its key columns.
        has_value: Which rows have one, shape ``[rows]``.
        chosen: Rows in cells of the stretch, or None for all.
        columns: The cell of each of those.
        moment: The number of the forward of each of those.
        provenance: The number of the combination of each of those.
        num_inside: Rows of the stretch.
        not_compared: Rows of the stretch that belong to no cell, by the place of the reason.
    """

    batch: pa.RecordBatch
    has_value: _Flags
    chosen: _Integers | None
    columns: _Integers
    moment: _Integers
    provenance: _Integers
    num_inside: int
    not_compared: tuple[int, ...]


class _Grid:
    def __init__(self, task: ComparisonTask) -> None:
        self._task = task
        self.cells = Cells(task.first, task.last)
        self.without_value: _Integers = np.zeros(0, np.int64)
        self.differing: _Integers = np.zeros(0, np.int64)
        self.not_compared = dict.fromkeys(NOT_COMPARED, 0)
        self.ambiguous: dict[int, int] = {}
        self.num_repeated = 0
        self.num_rows = 0
        self._provenances = Provenances()
        self._first_provenance: _Integers = np.zeros(0, np.int64)
        self._layouts: dict[int, _Layout] = {}

    def rank(self, rank: int, parts: tuple[tuple[PartFile, tuple[int, ...]], ...]) -> RankRows:
        """Takes all rows of a rank; ranks come in ascending order."""
        found: list[tuple[str, _Layout, _Floats]] = []
        place = 0
        for part, groups in parts:
            for batch in reread_groups(self._task.sources, self._task.run_id, part, COMPARED_COLUMNS, groups):
                layout = self._layout(place, batch)
                place += 1
                self.num_rows += layout.num_inside
                for reason, rows in zip(NOT_COMPARED, layout.not_compared, strict=True):
                    self.not_compared[reason] += rows
                if len(layout.columns):
                    values = floats(batch, "value")
                    values = values if layout.chosen is None else values[layout.chosen]
                    found.append((part.process, layout, values))
        return self._joined(rank, self._unambiguous(rank, found))

    def sizes(self) -> _Integers:
        """Returns the entries of each cell's tensor."""
        return self._provenances.sizes(_grown(self._first_provenance, len(self.cells), -1))

    def _layout(self, place: int, batch: pa.RecordBatch) -> _Layout:
        has_value = np.isfinite(floats(batch, "value"))
        known = self._layouts.get(place)
        if known is None or not _is_same(known, batch, has_value):
            known = self._layouts[place] = self._laid_out(batch, has_value)
        return known

    def _laid_out(self, batch: pa.RecordBatch, has_value: _Flags) -> _Layout:
        moment = self.cells.moment_numbers(batch)
        inside = np.flatnonzero(moment >= 0)
        chosen: _Integers | None = None
        rows = batch
        if len(inside) < len(moment):
            chosen, moment = inside, moment[inside]
            # Rows of a sample lie together and samples in their order, so that this is nearly always so.
            is_one_piece = len(inside) > 0 and int(inside[-1] - inside[0]) + 1 == len(inside)
            rows = batch.slice(int(inside[0]), len(inside)) if is_one_piece else batch.take(pa.array(inside))
        none = np.zeros(0, np.int64)
        if len(inside) == 0:
            return _Layout(batch, has_value, chosen, none, none, none, 0, (0,) * len(NOT_COMPARED))
        # A row without a value may belong to a cell to which one with a value would not.
        alike = repeated_runs(rows, moment, _KINDS, [has_value[inside]])
        series, variant = (numbers[alike.position] for numbers in self.cells.kinds(alike.rows))
        columns = self.cells.columns(moment, series, variant)
        provenance = self._provenances.numbers(alike.rows)[alike.position]
        lost = tuple(int((columns == -1 - one).sum()) for one in range(len(NOT_COMPARED)))
        if any(lost):
            kept = np.flatnonzero(columns >= 0)
            chosen = kept if chosen is None else chosen[kept]
            columns, moment, provenance = columns[kept], moment[kept], provenance[kept]
        self._compare_provenance(columns, provenance)
        return _Layout(batch, has_value, chosen, columns, moment, provenance, len(inside), lost)

    def _compare_provenance(self, columns: _Integers, provenance: _Integers) -> None:
        size = len(self.cells)
        self._first_provenance = _grown(self._first_provenance, size, -1)
        self.differing = _grown(self.differing, size, 0)
        held = self._first_provenance[columns]
        is_new = held < 0
        if bool(is_new.any()):
            # Backwards, so that of rows with the same cell the first one stays.
            self._first_provenance[columns[is_new][::-1]] = provenance[is_new][::-1]
            held = self._first_provenance[columns]
        differs = np.flatnonzero(held != provenance)
        if len(differs):
            bits = self._provenances.differing(held[differs], provenance[differs])
            np.bitwise_or.at(self.differing, columns[differs], bits)

    def _unambiguous(
        self, rank: int, found: list[tuple[str, _Layout, _Floats]]
    ) -> list[tuple[_Integers, _Floats]]:
        """Returns cells and values, without those of forwards that two processes have."""
        holders: dict[int, str] = {}
        twice: set[int] = set()
        for process, layout, _ in found:
            for moment in _runs(layout.moment):
                if holders.setdefault(moment, process) != process:
                    twice.add(moment)
        if not twice:
            return [(layout.columns, values) for _, layout, values in found]
        kept: list[tuple[_Integers, _Floats]] = []
        for _, layout, values in found:
            is_single = ~np.isin(layout.moment, list(twice))
            lost = len(is_single) - int(is_single.sum())
            self.ambiguous[rank] = self.ambiguous.get(rank, 0) + lost
            kept.append((layout.columns[is_single], values[is_single]))
        return kept

    def _joined(self, rank: int, found: list[tuple[_Integers, _Floats]]) -> RankRows:
        self.without_value = _grown(self.without_value, len(self.cells), 0)
        values = np.full(self.cells.num_whole, np.nan)
        is_there = np.zeros(self.cells.num_whole, np.bool_)
        part_columns: list[_Integers] = [np.zeros(0, np.int64)]
        part_values: list[_Floats] = [np.zeros(0)]
        for columns, own in found:
            finite = np.where(np.isfinite(own), own, np.nan)
            places = self.cells.whole[columns]
            is_whole = places >= 0
            if not bool(is_whole.all()):
                part_columns.append(columns[~is_whole])
                part_values.append(finite[~is_whole])
                places, finite = places[is_whole], finite[is_whole]
            values[places] = finite
            is_there[places] = True
        lacking = np.flatnonzero(is_there & np.isnan(values))
        if len(lacking):
            self.without_value[np.flatnonzero(self.cells.whole >= 0)[lacking]] += 1
        in_parts, of_parts = _last_of_each(np.concatenate(part_columns), np.concatenate(part_values))
        self.num_repeated += sum(len(columns) for columns, _ in found) - int(is_there.sum()) - len(in_parts)
        is_lacking = np.isnan(of_parts)
        self.without_value[in_parts[is_lacking]] += 1
        return RankRows(rank, values, in_parts[~is_lacking].astype(np.int32), of_parts[~is_lacking])


def _last_of_each(columns: _Integers, values: _Floats) -> tuple[_Integers, _Floats]:
    """Returns the cells in ascending order, each with its last value."""
    order = np.argsort(columns, kind="stable")
    columns, values = columns[order], values[order]
    is_last = np.ones(len(columns), np.bool_)
    is_last[:-1] = columns[1:] != columns[:-1]
    return columns[is_last], values[is_last]


def _is_same(known: _Layout, batch: pa.RecordBatch, has_value: _Flags) -> bool:
    """Returns whether a row group has the keys of another one, row by row."""
    if batch.num_rows != known.batch.num_rows or not np.array_equal(has_value, known.has_value):
        return False
    names = _LAYOUT
    if batch.column("attempt").null_count:
        names = (*_LAYOUT, "forward_index")
    return all(batch.column(name).equals(known.batch.column(name)) for name in names)


def _runs(numbers: _Integers) -> list[int]:
    """Returns each number that differs from the one before it."""
    if len(numbers) == 0:
        return []
    return numbers[np.append(True, numbers[1:] != numbers[:-1])].tolist()


def _grown(values: _Integers, size: int, filling: int) -> _Integers:
    if len(values) >= size:
        return values
    return np.concatenate([values, np.full(size - len(values), filling, np.int64)])
