"""Where a run is cut for the comparison: stretches of forwards whose values of all ranks fit in memory.

A worker gets several of them that follow each other.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchinstruments.merge.alignment import SampleKeys
from torchinstruments.merge.comparison_rows import ComparisonTask
from torchinstruments.merge.overview_choice import Pictured
from torchinstruments.merge.row_spans import Moment, RowSpan
from torchinstruments.merge.sources import Source
from torchinstruments.store.schema import MAX_ROW_GROUP_ROWS

__all__ = ["ComparisonPlan"]

MAX_BLOCK_VALUES = 128 * MAX_ROW_GROUP_ROWS
"""Values of all ranks in a stretch, 8 bytes each: what a worker's memory goes by, however long the run is.

A single forward is never cut: of a run with more series than this divided by its ranks, it is all of them.
"""

MAX_BLOCK_CELLS = MAX_ROW_GROUP_ROWS
"""Cells of a stretch, some 150 bytes each in the table that a worker makes of it."""

MAX_TASK_CELLS = 4 * MAX_ROW_GROUP_ROWS
"""Cells of the stretches that a worker compares one after the other, and gives back together.

A row group of a rank is decoded once for all of them, and again for each other task that it reaches into, so
that these should be longer than a row group.
"""

_FEW_TASKS, _MIN_TASK_VALUES = 4, 256 * MAX_ROW_GROUP_ROWS
"""A run is cut into so many tasks at least, where each has so many values: some seconds of a worker."""


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
        num_series = max(1, num_series)
        size = max(1, min(MAX_BLOCK_CELLS, MAX_BLOCK_VALUES // self.num_ranks) // num_series)
        stretches = [
            (_moment(moments[start].tolist()), _moment(moments[start:][:size][-1].tolist()))
            for start in range(0, len(moments), size)
        ]
        num_tasks = max(
            math.ceil(len(stretches) / max(1, MAX_TASK_CELLS // (size * num_series))),
            min(_FEW_TASKS, len(moments) * num_series * self.num_ranks // _MIN_TASK_VALUES),
        )
        length = math.ceil(len(stretches) / num_tasks)
        chosen = [tuple(stretches[start : start + length]) for start in range(0, len(stretches), length)]
        for own, spans in zip(chosen, self._spans_of_tasks([one[0][0] for one in chosen]), strict=True):
            shown = [one for one in own if pictured is not None and pictured.between(*one)]
            wanted = own if self.num_ranks > 1 else tuple(shown)
            if wanted:
                yield ComparisonTask(wanted, run_id, sources, tuple(spans), pictured if shown else None)

    def _spans_of_tasks(self, firsts: Sequence[Moment]) -> list[list[tuple[int, tuple[RowSpan, ...]]]]:
        """Returns for each task, by its first forward, what reaches into it, by rank."""
        found: list[list[tuple[int, tuple[RowSpan, ...]]]] = [[] for _ in firsts]
        for rank, spans in self._spans:
            own: dict[int, list[RowSpan]] = {}
            for span in spans:
                low, high = bisect_right(firsts, span.first), bisect_right(firsts, span.last)
                for task in range(max(low - 1, 0), high):
                    own.setdefault(task, []).append(span)
            for task, of_task in own.items():
                found[task].append((rank, tuple(of_task)))
        return found


def _moment(row: Sequence[int]) -> Moment:
    return (row[0], row[1], row[2])
