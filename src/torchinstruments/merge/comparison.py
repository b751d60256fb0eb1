"""``comparison.parquet``, the section ``comparison`` of ``result.json``, and what `layers` says of it.

The table grows with the run, so that it is written to a temporary file and not held: what stays in memory is
one row a series.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.merge.cell_widths import Width
from torchinstruments.merge.comparison_blocks import COMPARISON_SCHEMA, ComparisonBlock, Widest
from torchinstruments.merge.comparison_cells import NOT_COMPARED
from torchinstruments.merge.comparison_plan import ComparisonPlan
from torchinstruments.merge.mode_splits import ModeSplits
from torchinstruments.merge.overview import OverviewFold
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.store.schema import MAX_ROW_GROUP_ROWS
from torchinstruments.store.series import SeriesKey

__all__ = ["COMPARISON_FILE", "ComparisonFold"]

COMPARISON_FILE = "comparison.parquet"

MAX_WIDEST = 20
"""Series that stand in the section: those whose widest cell is widest, of those with a furthest rank."""

_KEPT_FOR_MADS = MAX_WIDEST // 2
"""Places for series with a distance in median deviations, however many others go before them."""

_AMBIGUOUS, _REPEATED = "two_processes", "repeated"

_Integers = npt.NDArray[np.int64]


class ComparisonFold:
    """Takes stretch after stretch in the order of the run; a context that owns a temporary folder.

    Attributes:
        plan: Where the rows of all ranks lie.
        folder: The folder, in which other tables may wait for their place too.
        overview: What is chosen for pictures.
    """

    def __init__(self) -> None:
        self.plan = ComparisonPlan()
        self._folder = tempfile.TemporaryDirectory(prefix="torchinstruments-merge-")
        self.folder = Path(self._folder.name)
        self._table = _TableFile(self.folder / COMPARISON_FILE)
        self._widest = _WidestRows()
        self.overview = OverviewFold()
        self._combined: dict[SeriesKey, dict[str, object]] = {}
        self._num_compared = 0
        self._num_without_value = 0
        self._not_compared: Counter[str] = Counter()
        self._ambiguous: Counter[int] = Counter()
        self._modes = ModeSplits()

    def __enter__(self) -> Self:
        """Returns the fold."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Deletes the folder."""
        self._table.close()
        self._folder.cleanup()

    def add_block(self, block: ComparisonBlock) -> None:
        """Takes what was found in a stretch; stretches come in the order of the run."""
        self._table.add(block.table)
        self._widest.add(block.widest)
        self.overview.add(block.overview)
        self._combined.update({one.key: one.record() for one in block.combined})
        self._num_compared += block.num_compared
        self._num_without_value += block.num_without_value
        self._not_compared.update(block.not_compared)
        self._not_compared[_REPEATED] += block.num_repeated
        self._ambiguous.update(block.ambiguous)
        self._modes = self._modes.joined(block.modes)

    def file(self) -> Path:
        """Returns the finished table; nothing can be added afterwards."""
        self._table.close()
        return self._table.path

    def record(self) -> dict[str, object]:
        """Returns the section ``comparison``."""
        not_compared = {reason: self._not_compared[reason] for reason in NOT_COMPARED}
        not_compared[_AMBIGUOUS] = self._ambiguous.total()
        not_compared[_REPEATED] = self._not_compared[_REPEATED]
        rows = self.plan.num_rows
        paired = self._num_compared + self._num_without_value + sum(not_compared.values())
        return {
            "cells": self._table.num_rows,
            "cells_in": COMPARISON_FILE,
            "rows": rows,
            "rows_compared": self._num_compared,
            "rows_without_value": self._num_without_value,
            "rows_of_one_rank": rows - paired,
            "rows_not_compared": not_compared,
            "ambiguous_ranks": ranks_text(self._ambiguous),
            "forwards_in_different_modes": self._modes.forwards,
            "first_in_different_modes": self._modes.first,
            "widest": self._widest.section(),
        }

    def of_series(self) -> dict[SeriesKey, dict[str, object]]:
        """Returns what ``across_ranks`` of a series says of its cells."""
        return self._widest.of_series()

    def combined(self) -> dict[SeriesKey, dict[str, object]]:
        """Returns the number of a whole tensor that the parts of a series give, at the latest forward."""
        return self._combined


class _TableFile:
    """Writes ``comparison.parquet`` in row groups of bounded size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_rows = 0
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        floats = [field.name for field in COMPARISON_SCHEMA if pa.types.is_floating(field.type)]
        texts = [field.name for field in COMPARISON_SCHEMA if pa.types.is_string(field.type)]
        self._writer = pq.ParquetWriter(
            path,
            pa.schema(_as_dictionary(field) for field in COMPARISON_SCHEMA),
            compression="zstd",
            use_dictionary=texts,
            use_byte_stream_split=floats,
            store_schema=False,
        )

    def add(self, table: pa.Table) -> None:
        self.num_rows += table.num_rows
        self._num_waiting += table.num_rows
        self._waiting.append(table)
        if self._num_waiting >= MAX_ROW_GROUP_ROWS:
            self._write(whole_groups=True)

    def close(self) -> None:
        if self._writer is not None:
            self._write(whole_groups=False)
            self._writer.close()
            self._writer = None

    def _write(self, *, whole_groups: bool) -> None:
        if self._writer is None or self._num_waiting == 0:
            return
        table = pa.concat_tables(self._waiting).unify_dictionaries().combine_chunks()
        end = table.num_rows
        if whole_groups:
            end -= end % MAX_ROW_GROUP_ROWS
        self._writer.write_table(table.slice(0, end), row_group_size=MAX_ROW_GROUP_ROWS)
        self._waiting, self._num_waiting = [table.slice(end)], table.num_rows - end


class _WidestRows:
    """The widest row of each series so far."""

    def __init__(self) -> None:
        self._numbers: dict[SeriesKey, int] = {}
        self._rows: pa.Table | None = None
        self._samples: _Integers = np.zeros(0, np.int64)
        self._without_mads: _Integers = np.zeros(0, np.int64)
        self._width: _Integers = np.zeros(0, np.int64)
        self._size = np.zeros(0)

    def add(self, found: Widest) -> None:
        if len(found.keys) == 0:
            return
        known = len(self._numbers)
        series = np.array([self._numbers.setdefault(key, len(self._numbers)) for key in found.keys], np.int64)
        more = len(self._numbers) - known
        self._samples = np.append(self._samples, np.zeros(more, np.int64))
        self._without_mads = np.append(self._without_mads, np.zeros(more, np.int64))
        self._width = np.append(self._width, np.full(more, -1))
        self._size = np.append(self._size, np.full(more, -np.inf))
        self._samples[series] += found.samples
        self._without_mads[series] += found.samples_without_mads
        width, size = self._width[series], self._size[series]
        # The first of equal ones stays.
        is_wider = (found.width > width) | ((found.width == width) & (found.size > size))
        chosen = series[is_wider]
        self._width[chosen], self._size[chosen] = found.width[is_wider], found.size[is_wider]
        places = np.arange(len(self._numbers))
        places[chosen] = known + np.flatnonzero(is_wider)
        joined = found.rows if self._rows is None else pa.concat_tables([self._rows, found.rows])
        self._rows = joined.unify_dictionaries().combine_chunks().take(pa.array(places))

    def of_series(self) -> dict[SeriesKey, dict[str, object]]:
        if self._rows is None:
            return {}
        counts = zip(self._samples.tolist(), self._without_mads.tolist(), strict=True)
        return {
            key: {
                "compared_cells": samples,
                "cells_where_mad_is_zero": without,
                "furthest": _furthest_record(row),
            }
            for key, (samples, without), row in zip(
                self._numbers, counts, self._rows.to_pylist(), strict=True
            )
        }

    def section(self) -> list[dict[str, object]]:
        if self._rows is None:
            return []
        keys = list(self._numbers)
        by_width: dict[int, list[int]] = {width: [] for width in Width}
        for one in sorted(range(len(keys)), key=lambda one: (-self._size[one], keys[one])):
            by_width[int(self._width[one])].append(one)
        in_mads = by_width[Width.IN_MADS]
        clear = by_width[Width.CLEAR][: MAX_WIDEST - min(len(in_mads), _KEPT_FOR_MADS)]
        shown = [*clear, *in_mads, *by_width[Width.SLIGHT]][:MAX_WIDEST]
        rows = self._rows.take(pa.array(shown, pa.int64())).to_pylist()
        return [keys[one]._asdict() | _furthest_record(row) for one, row in zip(shown, rows, strict=True)]


def _furthest_record(row: Mapping[str, object]) -> dict[str, object]:
    """Returns the widest cell of a series as it stands in ``result.json``."""
    return {
        "rank": row["furthest_rank"],
        "value": row["furthest_value"],
        "mads": row["furthest_mads"],
        "unavailable_reason": row["unavailable_reason"],
        "median_of_ranks": row["median_of_ranks"],
        "mad_of_ranks": row["mad_of_ranks"],
        "lowest": {"rank": row["lowest_rank"], "value": row["lowest_value"]},
        "highest": {"rank": row["highest_rank"], "value": row["highest_value"]},
        "num_ranks": row["num_ranks"],
        "num_ranks_without_value": row["num_ranks_without_value"],
        "generation": row["generation"],
        "attempt": row["attempt"],
        "forward_in_attempt": row["forward_in_attempt"],
        "forward_index": row["forward_index"],
        "mode": row["mode"],
        "backward_index": row["backward_index"],
        "scope": row["scope"],
        "replica_key": row["replica_key"],
        "differs_in": row["differs_in"],
    }


def _as_dictionary(field: pa.Field) -> pa.Field:
    if pa.types.is_string(field.type):
        return field.with_type(pa.dictionary(pa.int32(), pa.string()))
    return field
