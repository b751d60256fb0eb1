"""Which forwards the row groups of a rank have rows of, so that a stretch of a run can be found again.

A footer tells the sample ids of a row group of ``history``; what these samples are known by between ranks is
told by the rank's ``samples``. So nothing is decoded for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from torchinstruments.store.inventory import PartFile
from torchinstruments.store.schema import HISTORY

__all__ = ["GroupIds", "Moment", "RowSpan", "group_ids", "row_spans"]

Moment = tuple[int, int, int]
"""Generation, attempt or -1, and ordinal of the forward in it; without attempts, of the process."""

_SAMPLE_ID = HISTORY.get_field_index("sample_id")

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupIds:
    """What the footer of a part tells of one row group.

    Attributes:
        part: The part.
        group: Number of the row group in it.
        rows: Rows.
        first: Lowest sample id.
        last: Highest sample id.
    """

    part: PartFile
    group: int
    rows: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The forwards that a row group of ``history`` has rows of.

    Attributes:
        part: The part.
        group: Number of the row group in it.
        rows: Rows.
        first: The first forward.
        last: The last forward.
    """

    part: PartFile
    group: int
    rows: int
    first: Moment
    last: Moment


def group_ids(part: PartFile, metadata: pq.FileMetaData) -> list[GroupIds]:
    """Returns what the footer of an inspected part of ``history`` tells of its samples (worker)."""
    found: list[GroupIds] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        statistics = group.column(_SAMPLE_ID).statistics
        found.append(GroupIds(part, number, group.num_rows, statistics.min, statistics.max))
    return found


def row_spans(groups: Sequence[GroupIds], sample_id: _Integers, moments: _Integers) -> list[RowSpan]:
    """Returns the forwards of the row groups of one process (worker).

    Args:
        groups: Its row groups, in the order of writing.
        sample_id: Its samples, shape ``[samples]``; every sample of the row groups is among them.
        moments: `Moment` of each, shape ``[samples, 3]``.
    """
    in_time = np.lexsort((moments[:, 2], moments[:, 1], moments[:, 0]))
    place = np.empty(len(in_time), np.int64)
    place[in_time] = np.arange(len(in_time))
    by_id = np.argsort(sample_id, kind="stable")
    ids, places = sample_id[by_id], place[by_id]
    spans: list[RowSpan] = []
    for one in groups:
        low = int(np.searchsorted(ids, one.first))
        high = int(np.searchsorted(ids, one.last, side="right"))
        if low == high:
            continue
        own = places[low:high]
        first, last = (moments[in_time[place]].tolist() for place in (int(own.min()), int(own.max())))
        spans.append(
            RowSpan(
                one.part, one.group, one.rows, (first[0], first[1], first[2]), (last[0], last[1], last[2])
            )
        )
    return spans
