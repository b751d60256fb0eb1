"""Where a run is cut for the comparison: stretches of forwards whose values of all ranks fit in memory."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchinstruments.merge.alignment import SampleKeys
from torchinstruments.merge.comparison_rows import ComparisonTask
from torchinstruments.merge.overview_choice import Pictured
from torchinstruments.merge.row_spans import Moment, RowSpan
from torchinstruments.merge.sources import Source
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.schema import MAX_ROW_GROUP_ROWS

__all__ = ["ComparisonPlan"]

MAX_BLOCK_VALUES = 256 * MAX_ROW_GROUP_ROWS
"""Values of all ranks in a stretch, 8 bytes each: what a worker's memory goes by, however long the run is.

A single forward is never cut: of a run with more series than this divided by its ranks, it is all of them.
"""

MAX_BLOCK_CELLS = MAX_ROW_GROUP_ROWS
"""Cells of a stretch, some 150 bytes each in the table that a worker gives back and that waits for its turn.

A row group of a rank is read again in every stretch that it reaches into, so that they should not be shorter
than a row group.
"""


@dataclass(slots=True)
class ComparisonPlan:
    """Gathers where the rows of all ranks lie, then cuts the run."""

    _spans: list[tuple[int, tuple[RowSpan, ...]]] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        """Ranks that have rows."""
        return len(self._spans)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have rows, ascending."""
        return [rank for rank, _ in self._spans]

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return sum(span.rows for _, spans in self._spans for span in spans)

    def add_rank(self, rank: int, spans: tuple[RowSpan, ...]) -> None:
        """Takes where the rows of a rank lie; ranks come in ascending order."""
        if spans:
            self._spans.append((rank, spans))

    def tasks(
        self,
        moments: SampleKeys,
        num_series: int,
        run_id: str,
        sources: tuple[Source, ...],
        pictured: Pictured | None = None,
    ) -> Iterator[ComparisonTask]:
        """Yields what to compare, by forward; of a single rank only what is pictured.

        Args:
            moments: The forwards of all ranks, sorted.
            num_series: Series of all ranks.
            run_id: Parts of another run are left out.
            sources: The folders of the run.
            pictured: What is chosen for pictures, None for nothing.
        """
        if self.num_ranks == 0 or len(moments) == 0:
            return
        num_cells = min(MAX_BLOCK_CELLS, MAX_BLOCK_VALUES // self.num_ranks)
        size = max(1, num_cells // max(1, num_series))
        firsts = [_moment(row) for row in moments[::size].tolist()]
        lasts = [
            _moment(moments[min(start + size, len(moments)) - 1].tolist())
            for start in range(0, len(moments), size)
        ]
        parts = self._parts_of_blocks(firsts)
        for first, last, own in zip(firsts, lasts, parts, strict=True):
            shown = pictured if pictured is not None and pictured.between(first, last) else None
            if self.num_ranks > 1 or shown is not None:
                yield ComparisonTask(first, last, run_id, sources, tuple(own), shown)

    def _parts_of_blocks(
        self, firsts: Sequence[Moment]
    ) -> list[list[tuple[int, tuple[tuple[PartFile, tuple[int, ...]], ...]]]]:
        """Returns for each stretch what lies in it, by rank and in the order of writing."""
        found: list[list[tuple[int, tuple[tuple[PartFile, tuple[int, ...]], ...]]]] = [[] for _ in firsts]
        for rank, spans in self._spans:
            own: dict[int, dict[PartFile, list[int]]] = {}
            for span in spans:
                low, high = bisect_right(firsts, span.first), bisect_right(firsts, span.last)
                for block in range(max(low - 1, 0), high):
                    own.setdefault(block, {}).setdefault(span.part, []).append(span.group)
            for block, parts in own.items():
                found[block].append((rank, tuple((part, tuple(groups)) for part, groups in parts.items())))
        return found


def _moment(row: Sequence[int]) -> Moment:
    return (row[0], row[1], row[2])
