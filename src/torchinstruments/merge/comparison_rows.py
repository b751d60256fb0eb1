"""The rows of a stretch of all ranks, rank beside rank: an array of values a rank, in the order of the cells.

Ranks that run the same program write the same keys in the same order. So the cells of a run of rows are
looked up once for each kind of run and forward, and every other rank that has a run of that kind there takes
them over. Either way every row's key was looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.comparison_cells import NOT_COMPARED, CellKinds, Cells, Provenances
from torchinstruments.merge.held_groups import GroupRows, RowGroups
from torchinstruments.merge.overview_choice import Pictured
from torchinstruments.merge.row_spans import Moment, RowSpan
from torchinstruments.merge.run_kinds import Kind
from torchinstruments.merge.sources import Source

__all__ = ["AlignedRows", "ComparisonTask", "RankRows", "aligned_stretches"]

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ComparisonTask:
    """Stretches of forwards, to be read of every rank (made by the merge, run by a worker).

    Attributes:
        stretches: First and last forward of each, in ascending order.
        run_id: Parts of another run are left out.
        sources: The folders of the run, by `PartFile.source`.
        spans: Rank to its row groups with rows in any of the stretches, in the order of writing.
        pictured: What is chosen for pictures; None where none of it lies in the stretches.
    """

    stretches: tuple[tuple[Moment, Moment], ...]
    run_id: str
    sources: tuple[Source, ...]
    spans: tuple[tuple[int, tuple[RowSpan, ...]], ...]
    pictured: Pictured | None = None

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """Ranks whose parts are read."""
        return tuple(rank for rank, _ in self.spans)


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


def aligned_stretches(task: ComparisonTask) -> Iterator[AlignedRows]:
    """Reads stretch after stretch (worker: any thread, process or machine).

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: A part cannot be read any more, or not in these columns.
    """
    kinds, provenances = CellKinds(), Provenances()
    groups = RowGroups(task.run_id, task.sources, kinds, provenances)
    firsts = [first for first, _ in task.stretches[1:]]
    for (first, last), next_first in zip(task.stretches, [*firsts, None], strict=True):
        grid = _Grid(first, last, Cells(kinds), provenances)
        for rank, spans in task.spans:
            wanted = [span for span in spans if span.first <= last and first <= span.last]
            if wanted:
                grid.add_rank(rank, groups.of_stretch(wanted, next_first))
        yield grid.aligned()


@dataclass(frozen=True, slots=True)
class _CellsOfRun:
    """The cells of a run.

    Attributes:
        columns: Cell of each row that has one.
        chosen: Those rows, None for all.
        not_compared: Rows without a cell, by the place of the reason.
    """

    columns: _Integers
    chosen: _Integers | None
    not_compared: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a row group has of a stretch.

    Attributes:
        process: Process that wrote it.
        moments: Forward of each run.
        sizes: Rows in cells of each run.
        columns: The cell of each of those rows.
        values: Their values.
    """

    process: str
    moments: list[Moment]
    sizes: list[int]
    columns: _Integers
    values: _Floats


class _Grid:
    def __init__(self, first: Moment, last: Moment, cells: Cells, provenances: Provenances) -> None:
        self._first, self._last = first, last
        self._cells, self._provenances = cells, provenances
        self._ranks: list[RankRows] = []
        self._without_value: _Integers = np.zeros(0, np.int64)
        self._differing: _Integers = np.zeros(0, np.int64)
        self._first_provenance: _Integers = np.zeros(0, np.int64)
        self._not_compared = dict.fromkeys(NOT_COMPARED, 0)
        self._ambiguous: dict[int, int] = {}
        self._num_repeated = 0
        self._num_rows = 0
        self._known: dict[tuple[Moment, Kind], _CellsOfRun] = {}
        self._compared: set[tuple[Moment, Kind, Kind]] = set()

    def add_rank(self, rank: int, groups: Iterator[GroupRows]) -> None:
        """Takes all rows of a rank; ranks come in ascending order."""
        found = [taken for group in groups if (taken := self._take(group)) is not None]
        self._ranks.append(self._joined(rank, self._unambiguous(rank, found)))

    def aligned(self) -> AlignedRows:
        """Returns the stretch."""
        size = len(self._cells)
        return AlignedRows(
            cells=self._cells,
            ranks=tuple(self._ranks),
            without_value=_grown(self._without_value, size, 0),
            differing=_grown(self._differing, size, 0),
            sizes=self._provenances.sizes(_grown(self._first_provenance, size, -1)),
            not_compared=self._not_compared,
            ambiguous=self._ambiguous,
            num_repeated=self._num_repeated,
            num_rows=self._num_rows,
        )

    def _take(self, group: GroupRows) -> _Taken | None:
        moments = [_moment(row) for row in group.moments.tolist()]
        inside = [place for place, one in enumerate(moments) if self._first <= one <= self._last]
        if not inside:
            return None
        moments = [moments[place] for place in inside]
        kinds = [group.cells[place] for place in inside]
        starts = group.starts[inside].tolist()
        of_runs = self._cells_of(moments, kinds)
        for one, kind in zip(of_runs, kinds, strict=True):
            self._num_rows += len(kind)
            for reason, rows in zip(NOT_COMPARED, one.not_compared, strict=True):
                self._not_compared[reason] += rows
        self._compare_provenance(moments, kinds, [group.provenances[place] for place in inside], of_runs)
        if inside[-1] - inside[0] + 1 == len(inside) and all(one.chosen is None for one in of_runs):
            # Samples lie in their order and nearly all rows have a cell, so that this is nearly always so.
            values = group.values[starts[0] : starts[-1] + len(kinds[-1])]
        else:
            values = np.concatenate(
                [
                    group.values[start : start + len(kind)][slice(None) if one.chosen is None else one.chosen]
                    for start, kind, one in zip(starts, kinds, of_runs, strict=True)
                ]
            )
        return _Taken(
            process=group.process,
            moments=moments,
            sizes=[len(one.columns) for one in of_runs],
            columns=np.concatenate([one.columns for one in of_runs]),
            values=values,
        )

    def _cells_of(self, moments: list[Moment], kinds: list[Kind]) -> list[_CellsOfRun]:
        """Returns the cells of some runs; those of a kind and forward that were not seen are looked up."""
        known, places = self._known, list(zip(moments, kinds, strict=True))
        new = {place: None for place in places if place not in known}
        if not new:
            return [known[place] for place in places]
        lengths = [len(kind) for _, kind in new]
        numbers = np.array([self._cells.moment_number(moment) for moment, _ in new], np.int64)
        series, variant = (
            np.concatenate([kind.numbers[one] for _, kind in new]).astype(np.int64) for one in range(2)
        )
        columns = self._cells.columns(np.repeat(numbers, lengths), series, variant)
        own: dict[tuple[Moment, Kind], _CellsOfRun] = {}
        end = 0
        for place, length in zip(new, lengths, strict=True):
            start, end = end, end + length
            own[place] = _cells_of_run(columns[start:end])
            if place[1].is_known:
                known[place] = own[place]
        return [own.get(place) or known[place] for place in places]

    def _compare_provenance(
        self,
        moments: list[Moment],
        kinds: list[Kind],
        provenances: list[Kind],
        of_runs: list[_CellsOfRun],
    ) -> None:
        """Holds what stands beside values against what stood there first, once for equal runs."""
        columns: list[_Integers] = []
        numbers: list[npt.NDArray[np.int32]] = []
        for moment, kind, provenance, one in zip(moments, kinds, provenances, of_runs, strict=True):
            place = (moment, kind, provenance)
            if place in self._compared:
                continue
            if kind.is_known and provenance.is_known:
                self._compared.add(place)
            columns.append(one.columns)
            own = provenance.numbers[0]
            numbers.append(own if one.chosen is None else own[one.chosen])
        size = len(self._cells)
        self._first_provenance = _grown(self._first_provenance, size, -1)
        self._differing = _grown(self._differing, size, 0)
        if not columns:
            return
        joined, provenance_of = np.concatenate(columns), np.concatenate(numbers).astype(np.int64)
        held = self._first_provenance[joined]
        is_new = held < 0
        if bool(is_new.any()):
            # Backwards, so that of rows with the same cell the first one stays.
            self._first_provenance[joined[is_new][::-1]] = provenance_of[is_new][::-1]
            held = self._first_provenance[joined]
        differs = np.flatnonzero(held != provenance_of)
        if len(differs):
            bits = self._provenances.differing(held[differs], provenance_of[differs])
            np.bitwise_or.at(self._differing, joined[differs], bits)

    def _unambiguous(self, rank: int, found: list[_Taken]) -> list[tuple[_Integers, _Floats]]:
        """Returns cells and values, without those of forwards that two processes have."""
        holders: dict[Moment, str] = {}
        twice: set[Moment] = set()
        if len({one.process for one in found}) > 1:
            for one in found:
                # A forward of which nothing can be compared is held by nobody.
                own = (moment for moment, size in zip(one.moments, one.sizes, strict=True) if size)
                twice.update(m for m in own if holders.setdefault(m, one.process) != one.process)
        if not twice:
            return [(one.columns, one.values) for one in found]
        kept: list[tuple[_Integers, _Floats]] = []
        for one in found:
            is_single = np.repeat([moment not in twice for moment in one.moments], one.sizes)
            lost = len(is_single) - int(is_single.sum())
            self._ambiguous[rank] = self._ambiguous.get(rank, 0) + lost
            kept.append((one.columns[is_single], one.values[is_single]))
        return kept

    def _joined(self, rank: int, found: list[tuple[_Integers, _Floats]]) -> RankRows:
        self._without_value = _grown(self._without_value, len(self._cells), 0)
        values = np.full(self._cells.num_whole, np.nan)
        is_there = np.zeros(self._cells.num_whole, np.bool_)
        part_columns: list[_Integers] = [np.zeros(0, np.int64)]
        part_values: list[_Floats] = [np.zeros(0)]
        for columns, own in found:
            places = self._cells.whole[columns]
            is_whole = places >= 0
            of_whole = own
            if not bool(is_whole.all()):
                part_columns.append(columns[~is_whole])
                part_values.append(own[~is_whole])
                places, of_whole = places[is_whole], own[is_whole]
            values[places] = of_whole
            is_there[places] = True
        lacking = np.flatnonzero(is_there & np.isnan(values))
        if len(lacking):
            self._without_value[np.flatnonzero(self._cells.whole >= 0)[lacking]] += 1
        in_parts, of_parts = _last_of_each(np.concatenate(part_columns), np.concatenate(part_values))
        self._num_repeated += sum(len(columns) for columns, _ in found) - int(is_there.sum()) - len(in_parts)
        is_lacking = np.isnan(of_parts)
        self._without_value[in_parts[is_lacking]] += 1
        return RankRows(rank, values, in_parts[~is_lacking].astype(np.int32), of_parts[~is_lacking])


def _last_of_each(columns: _Integers, values: _Floats) -> tuple[_Integers, _Floats]:
    """Returns the cells in ascending order, each with its last value."""
    order = np.argsort(columns, kind="stable")
    columns, values = columns[order], values[order]
    is_last = np.ones(len(columns), np.bool_)
    is_last[:-1] = columns[1:] != columns[:-1]
    return columns[is_last], values[is_last]


def _cells_of_run(columns: _Integers) -> _CellsOfRun:
    if int(columns.min()) >= 0:
        return _CellsOfRun(columns, None, (0,) * len(NOT_COMPARED))
    lost = tuple(int((columns == -1 - one).sum()) for one in range(len(NOT_COMPARED)))
    chosen = np.flatnonzero(columns >= 0)
    return _CellsOfRun(columns[chosen], chosen, lost)


def _moment(row: list[int]) -> Moment:
    return (row[0], row[1], row[2])


def _grown(values: _Integers, size: int, filling: int) -> _Integers:
    if len(values) >= size:
        return values
    return np.concatenate([values, np.full(size - len(values), filling, np.int64)])
