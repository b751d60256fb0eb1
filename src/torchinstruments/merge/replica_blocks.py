"""A stretch of ``fingerprints`` of all ranks side by side: which tensors differ inside a replica key."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.block_rows import block_batches, is_ambiguous
from torchinstruments.merge.ranges import Block, BlockTask
from torchinstruments.merge.splits import Split, split_of
from torchinstruments.store.row_blocks import integers
from torchinstruments.store.series import texts_of

__all__ = ["Judged", "ReplicaBlock", "Replicated", "TensorHistory", "compare_replicas"]

_COLUMNS = ("generation", "attempt", "tensor", "kind", "replica_key", "shape", "dtype", "digest")
_TEXTS = ("tensor", "kind", "replica_key")
_MAX_TABLE = 65_536

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Replicated:
    """A tensor that several ranks have to hold with equal bytes.

    Attributes:
        tensor: Its name.
        kind: ``parameter`` or ``buffer``.
        replica_key: Which ranks, and what they share.
    """

    tensor: str
    kind: str
    replica_key: str


@dataclass(frozen=True, slots=True)
class Judged:
    """An attempt in which the digests of a tensor were compared.

    Attributes:
        attempt: The attempt.
        num_ranks: Ranks that had one, at least two.
    """

    attempt: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class TensorHistory:
    """What a stretch says of one tensor that was compared in it.

    Attributes:
        tensor: The tensor.
        place: Its place among those of the stretch, in the order of the model.
        differing: Attempts in which it differs.
        first_differing: The first of them.
        last_differing: The last of them.
        split: Who held what in the first one.
        shape: Of the first one.
        dtype: Of the first one.
        equal_before: The last attempt before the first differing one, or the last one of all.
        equal_after: The first attempt after the last differing one, or the first one of all.
    """

    tensor: Replicated
    place: int
    differing: int
    first_differing: Judged | None
    last_differing: Judged | None
    split: Split | None
    shape: str
    dtype: str
    equal_before: Judged | None
    equal_after: Judged | None


@dataclass(frozen=True, slots=True)
class ReplicaBlock:
    """What was found in a stretch.

    Attributes:
        generation: Its generation.
        judged: Attempts in which anything was compared.
        differing: Attempts in which anything differs.
        ambiguous_ranks: Ranks of which two processes have rows of one attempt; those rows are not compared.
        tensors: Those that were compared.
    """

    generation: int
    judged: int
    differing: int
    ambiguous_ranks: tuple[int, ...]
    tensors: tuple[TensorHistory, ...]


def compare_replicas(task: BlockTask) -> tuple[ReplicaBlock, ...]:
    """Compares stretches of fingerprints, each by itself (worker: any thread, process or machine).

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: A part cannot be read any more, or not in these columns.
    """
    columns = _Columns(task)
    return tuple(_compared(_Rows(columns, block), block.generation) for block in task.blocks)


def _compared(rows: "_Rows", generation: int) -> ReplicaBlock:
    groups = rows.groups()
    is_judged = groups.num_ranks > 1
    differs = is_judged & groups.differs
    by_tensor: dict[int, list[int]] = {}
    for group in np.flatnonzero(is_judged).tolist():
        by_tensor.setdefault(int(groups.tensor[group]), []).append(group)
    return ReplicaBlock(
        generation=generation,
        judged=len(np.unique(groups.attempt[is_judged])),
        differing=len(np.unique(groups.attempt[differs])),
        ambiguous_ranks=rows.ambiguous_ranks,
        tensors=tuple(_history(rows, groups, differs, one, by_tensor[one]) for one in sorted(by_tensor)),
    )


@dataclass(frozen=True, slots=True)
class _Groups:
    """One entry an attempt and tensor, by attempt; rows of a group lie together from its start on."""

    attempt: _Integers
    tensor: _Integers
    start: _Integers
    num_ranks: _Integers
    differs: npt.NDArray[np.bool_]


class _Columns:
    """Rows with a replica key, of all stretches, as they were read."""

    def __init__(self, task: BlockTask) -> None:
        self.tensors: list[Replicated] = []
        self.looks: list[tuple[str, str]] = []
        self._numbers: dict[Replicated, int] = {}
        found: list[list[npt.NDArray[np.generic]]] = []
        look_numbers: dict[tuple[str, str], int] = {}
        for rank, process, batch in block_batches(task, _COLUMNS):
            columns = [texts_of(batch.column(name)) for name in _TEXTS]
            is_keyed = np.array([bool(key) for key in columns[-1][1]], np.bool_)[columns[-1][0]]
            attempt = integers(batch, "attempt")
            looks = [texts_of(batch.column(name)) for name in ("shape", "dtype")]
            look = self._numbered(looks, look_numbers, self.looks)
            found.append(
                [
                    column[is_keyed]
                    for column in (
                        attempt,
                        self._tensor_numbers(columns),
                        np.full(len(attempt), rank, np.int32),
                        np.full(len(attempt), process, np.int32),
                        look,
                        batch.column("digest").to_numpy(zero_copy_only=False),
                    )
                ]
            )
        none = [np.zeros(0, np.int64)] * 5
        whole = [np.concatenate(column) for column in zip(*found, strict=True)] if found else none
        self.attempt, self.tensor, self.rank, self.process, self.look = whole[:5]
        self.digest = whole[5] if found else np.zeros(0, np.uint64)

    def _tensor_numbers(self, columns: list[tuple[_Integers, list[str]]]) -> npt.NDArray[np.int32]:
        """Returns a number a row, in the order of first sight: that of the model."""
        packed, size = np.zeros(len(columns[0][0]), np.int64), 1
        for positions, texts in columns:
            packed = packed * max(len(texts), 1) + positions
            size *= max(len(texts), 1)
        first, where = _first_and_place(packed, size)
        numbers = np.zeros(len(first), np.int32)
        for place in np.argsort(first).tolist():
            row = int(first[place])
            key = Replicated(*(texts[int(positions[row])] for positions, texts in columns))
            numbers[place] = self._numbers.setdefault(key, len(self._numbers))
            if len(self._numbers) > len(self.tensors):
                self.tensors.append(key)
        return numbers[where]

    def _numbered(
        self,
        columns: list[tuple[_Integers, list[str]]],
        numbers: dict[tuple[str, str], int],
        pairs: list[tuple[str, str]],
    ) -> npt.NDArray[np.int32]:
        (left, left_texts), (right, right_texts) = columns
        width = max(len(right_texts), 1)
        first, where = _first_and_place(left * width + right, len(left_texts) * width)
        found = np.zeros(len(first), np.int32)
        for place, row in enumerate(first.tolist()):
            pair = (left_texts[int(left[row])], right_texts[int(right[row])])
            found[place] = numbers.setdefault(pair, len(numbers))
            if len(numbers) > len(pairs):
                pairs.append(pair)
        return found[where]


class _Rows:
    """Rows of one stretch, sorted by attempt, tensor and rank."""

    def __init__(self, columns: _Columns, block: Block) -> None:
        self.tensors, self._looks = columns.tensors, columns.looks
        places = np.flatnonzero((columns.attempt >= block.first) & (columns.attempt <= block.last))
        attempt, tensor, digest = columns.attempt[places], columns.tensor[places], columns.digest[places]
        rank, process, look = (
            columns.rank[places].astype(np.int64),
            columns.process[places],
            columns.look[places],
        )
        ambiguous = is_ambiguous(rank, attempt, process)
        self.ambiguous_ranks: tuple[int, ...] = tuple(np.unique(rank[ambiguous]).tolist())
        kept = np.flatnonzero(~ambiguous)
        order = kept[np.lexsort((rank[kept], tensor[kept], attempt[kept]))]
        self._attempt, self._tensor, self._rank = attempt[order], tensor[order], rank[order]
        self._look, self._digest = look[order], digest[order]

    def groups(self) -> _Groups:
        size = len(self._attempt)
        is_start = np.ones(size, np.bool_)
        is_start[1:] = (self._attempt[1:] != self._attempt[:-1]) | (self._tensor[1:] != self._tensor[:-1])
        starts = np.flatnonzero(is_start)
        if size == 0:
            return _Groups(starts, starts, starts, starts, is_start)
        lowest = np.minimum.reduceat(self._digest, starts)
        highest = np.maximum.reduceat(self._digest, starts)
        counts = np.diff(np.append(starts, size))
        return _Groups(self._attempt[starts], self._tensor[starts], starts, counts, lowest != highest)

    def split(self, start: int, num_ranks: int) -> Split:
        there = slice(start, start + num_ranks)
        return split_of(self._digest[there], self._rank[there])

    def look(self, start: int) -> tuple[str, str]:
        return self._looks[int(self._look[start])]


def _first_and_place(packed: _Integers, size: int) -> tuple[_Integers, _Integers]:
    """Returns the first row of each distinct number, and the place among these of each row's number.

    Args:
        packed: Numbers from 0 on, shape ``[rows]``.
        size: They are below it.
    """
    if size > max(_MAX_TABLE, 4 * len(packed)):
        _, first, where = np.unique(packed, return_index=True, return_inverse=True)
        return first, where
    # By a table, without sorting: few tensors stand in many rows.
    table = np.full(size, -1, np.int64)
    table[packed[::-1]] = np.arange(len(packed) - 1, -1, -1)
    distinct = np.flatnonzero(table >= 0)
    first = table[distinct]
    table[distinct] = np.arange(len(distinct))
    return first, table[packed]


def _history(
    rows: _Rows, groups: _Groups, differs: npt.NDArray[np.bool_], tensor: int, judged: list[int]
) -> TensorHistory:
    def at(group: int) -> Judged:
        return Judged(int(groups.attempt[group]), int(groups.num_ranks[group]))

    differing = [group for group in judged if differs[group]]
    if not differing:
        return TensorHistory(
            rows.tensors[tensor], tensor, 0, None, None, None, "", "", at(judged[-1]), at(judged[0])
        )
    first, last = differing[0], differing[-1]
    before = [group for group in judged if group < first]
    after = [group for group in judged if group > last]
    start = int(groups.start[first])
    return TensorHistory(
        rows.tensors[tensor],
        tensor,
        len(differing),
        at(first),
        at(last),
        rows.split(start, int(groups.num_ranks[first])),
        *rows.look(start),
        equal_before=at(before[-1]) if before else None,
        equal_after=at(after[0]) if after else None,
    )
