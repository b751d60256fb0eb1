"""The section ``replicas`` of ``result.json``: whether ranks that have to hold equal parameters do.

Only rows with a replica key are judged. Two ranks that differ do not tell which of them went wrong: the ranks
of each digest are named, the fewest first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torchinstruments.merge.fingerprint_rows import FINGERPRINT_RANGE, FingerprintReading
from torchinstruments.merge.ranges import BlockTask, Range, RangeFold
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.merge.replica_blocks import Judged, ReplicaBlock, Replicated, TensorHistory
from torchinstruments.merge.sources import Source
from torchinstruments.merge.splits import Split

__all__ = ["ReplicaFold"]

MAX_SHOWN = 100
"""Tensors that differed whose history stands in ``result.json``."""

_UNKEYED = ""

_Moment = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _At:
    """A generation and attempt at which a tensor was compared on some ranks."""

    moment: _Moment
    num_ranks: int

    def record(self) -> dict[str, object]:
        return {"generation": self.moment[0], "attempt": self.moment[1], "num_ranks": self.num_ranks}


@dataclass(slots=True)
class _Divergence:
    """A tensor that differed, from the first time on."""

    tensor: Replicated
    order: tuple[int, int, int]
    first: _At
    last: _At
    split: Split
    shape: str
    dtype: str
    equal_before: _At | None
    differing: int = 0
    equal_after: _At | None = None

    def record(self) -> dict[str, object]:
        sizes = [len(one.ranks) for one in self.split.values]
        after, enough = self.equal_after, None
        if after is not None:
            # Fewer ranks than differed say nothing of those that are not there.
            enough = after.num_ranks >= self.last.num_ranks
        return {
            "generation": self.first.moment[0],
            "attempt": self.first.moment[1],
            "tensor": self.tensor.tensor,
            "kind": self.tensor.kind,
            "replica_key": self.tensor.replica_key,
            "shape": self.shape,
            "dtype": self.dtype,
            **self.split.record(_digest_text),
            "has_majority": 2 * sizes[-1] > self.split.num_ranks,
            "last_equal_before": self.equal_before.record() if self.equal_before else None,
            "differing_attempts": self.differing,
            "last_differing": self.last.record(),
            "healed": False if after is None else (True if enough else None),
            "equal_again": after.record() if after else None,
        }


@dataclass(slots=True)
class ReplicaFold:
    """Gathers the fingerprints of all ranks, then the blocks in which replicas are not the same."""

    _ranges: RangeFold = field(default_factory=lambda: RangeFold(FINGERPRINT_RANGE))
    _has_rows: bool = False
    _covered: set[tuple[int, int]] = field(default_factory=set)
    _judged: int = 0
    _differing: int = 0
    _ambiguous: set[int] = field(default_factory=set)
    _found: dict[Replicated, _Divergence] = field(default_factory=dict)
    _equal: dict[Replicated, _At] = field(default_factory=dict)

    def add_rank(self, rank: int, reading: FingerprintReading) -> None:
        """Takes what was read of a rank; ranks come in ascending order."""
        self._has_rows = self._has_rows or reading.rows > 0
        self._ranges.add(rank, reading.ranges, reading.spans)

    def tasks(self, run_id: str, sources: tuple[Source, ...]) -> Iterable[BlockTask]:
        """Returns the stretches that have to be compared rank beside rank, once all ranks were added."""
        blocks, self._covered = self._ranges.blocks(ignored_group=_UNKEYED)
        return self._ranges.tasks(blocks, run_id, sources)

    def add_block(self, block: ReplicaBlock) -> None:
        """Takes what was found in a stretch; stretches come in the order of `tasks`."""
        self._judged += block.judged
        self._differing += block.differing
        self._ambiguous |= set(block.ambiguous_ranks)
        for one in block.tensors:
            self._add_tensor(block.generation, one)

    def record(self) -> dict[str, object]:
        """Returns the section, once all blocks were added."""
        uniform = self._uniform()
        judged = self._judged + self._judged_outside_blocks()
        keyed = [one for one in self._ranges.ranges() if one.group != _UNKEYED]
        bits = 0
        for one in keyed:
            bits |= one.ranks
        for divergence in self._found.values():
            _complete(divergence, uniform.get(divergence.tensor.replica_key, []))
        found = sorted(self._found.values(), key=_by_order)
        healed = [one for one in found if one.record()["healed"]]
        reason = ""
        if not judged:
            reason = "no_fingerprints" if not self._has_rows else "no_replica_keys"
            if keyed:
                is_alone = all(_names_one_rank(one.group) for one in keyed)
                reason = "no_replicas" if is_alone else "no_common_attempts"
        return {
            "equal": not found if judged else None,
            "unavailable_reason": reason,
            "judged_attempts": judged,
            "replica_keys": len({one.group for one in keyed}),
            "ranks": ranks_text(self._ranges.ranks_in(bits)),
            "first_divergence": found[0].record() if found else None,
            "differing_attempts": self._differing,
            "diverged_tensors": len(found),
            "healed_tensors": len(healed),
            "ambiguous_ranks": ranks_text(self._ambiguous),
            "tensors": [one.record() for one in found[:MAX_SHOWN]],
        }

    def _add_tensor(self, generation: int, one: TensorHistory) -> None:
        def at(judged: Judged | None) -> _At | None:
            return None if judged is None else _At((generation, judged.attempt), judged.num_ranks)

        first, last, before, after = map(
            at, (one.first_differing, one.last_differing, one.equal_before, one.equal_after)
        )
        known = self._found.get(one.tensor)
        if first is None or last is None or one.split is None:
            if known is None and before is not None:
                self._equal[one.tensor] = before
            elif known is not None and known.equal_after is None:
                known.equal_after = after
            return
        if known is None:
            known = self._found[one.tensor] = _Divergence(
                one.tensor,
                (*first.moment, one.place),
                first,
                last,
                one.split,
                one.shape,
                one.dtype,
                before or self._equal.pop(one.tensor, None),
            )
        known.last, known.equal_after = last, after
        known.differing += one.differing

    def _uniform(self) -> dict[str, list[Range]]:
        """Returns by replica key the ranges in which all of its ranks, at least two, hold the same."""
        found: dict[str, list[Range]] = {}
        for one in self._ranges.ranges():
            if one.group != _UNKEYED and one.is_uniform and one.num_ranks > 1:
                found.setdefault(one.group, []).append(one)
        return found

    def _judged_outside_blocks(self) -> int:
        bits: dict[tuple[int, int], int] = {}
        for ranges in self._uniform().values():
            for one in ranges:
                place = (one.generation, one.number)
                if place not in self._covered:
                    bits[place] = bits.get(place, 0) | one.bits
        return sum(one.bit_count() for one in bits.values())


def _complete(divergence: _Divergence, uniform: list[Range]) -> None:
    """Takes into a divergence what the ranges before and after it say, in which its key was the same."""
    for one in uniform:
        first, last = (one.generation, one.first), (one.generation, one.last)
        before, after = divergence.equal_before, divergence.equal_after
        if last < divergence.first.moment and (before is None or last > before.moment):
            divergence.equal_before = _At(last, one.num_ranks)
        if first > divergence.last.moment and (after is None or first < after.moment):
            divergence.equal_after = _At(first, one.num_ranks)


def _names_one_rank(replica_key: str) -> bool:
    """Returns whether a key says that no other rank holds the same: a part of a model that is only spread."""
    return replica_key.rpartition("ranks=")[2].isdecimal()


def _by_order(one: _Divergence) -> tuple[int, int, int]:
    return one.order


def _digest_text(value: float) -> str:
    return f"{int(value):016x}"
