"""Whether the ranks measured the same forwards: the samples that they have in common.

Between ranks a sample is known by (generation, attempt, forward_in_attempt); where a rank saw no attempts, by
(generation, forward_index). A sample id counts one process's own samples and is never compared.

A sample is common to all ranks where each rank of its own generation measured it: a world that was restarted
with fewer ranks measures no less for that.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["AlignmentFold", "SampleKeys", "sample_keys"]

SampleKeys = npt.NDArray[np.int64]
"""Sorted and distinct keys, shape ``[samples, 3]``: generation, attempt or -1, ordinal of the forward."""

_WITH_ATTEMPTS = ("generation", "attempt", "forward_in_attempt")
_WITHOUT_ATTEMPTS = ("generation", "forward_index")
_KEY = np.dtype([("generation", np.int64), ("attempt", np.int64), ("forward", np.int64)])


def sample_keys(
    generation: npt.NDArray[np.int64],
    attempt: npt.NDArray[np.int64],
    forward_in_attempt: npt.NDArray[np.int64],
    forward_index: npt.NDArray[np.int64],
) -> SampleKeys:
    """Returns the keys of samples; `attempt` is -1 where there is none."""
    forward = np.where(attempt >= 0, forward_in_attempt, forward_index)
    keys = np.stack([generation, attempt, forward], axis=1)
    if len(keys) == 0:
        return keys
    keys = keys[np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))]
    differs = np.append(True, (keys[1:] != keys[:-1]).any(axis=1))
    return np.ascontiguousarray(keys[differs])


@dataclass(slots=True)
class AlignmentFold:
    """Folds the keys of one rank after the other; memory is that of two ranks."""

    _ranks: dict[int, set[int]] = field(default_factory=dict)
    _common: dict[int, SampleKeys] = field(default_factory=dict)
    _union: dict[int, SampleKeys] = field(default_factory=dict)

    def add(self, rank: int, keys: SampleKeys) -> None:
        """Takes the keys of a rank; a rank without samples in any generation does not count."""
        generations, starts = np.unique(keys[:, 0], return_index=True)
        for generation, own in zip(generations.tolist(), np.split(keys, starts[1:]), strict=False):
            self._ranks.setdefault(generation, set()).add(rank)
            common = self._common.setdefault(generation, own)
            union = self._union.setdefault(generation, own)
            if not np.array_equal(own, common):
                found = np.intersect1d(_records(common), _records(own), assume_unique=True)
                self._common[generation] = _plain(found)
            if not np.array_equal(own, union):
                self._union[generation] = _plain(np.union1d(_records(union), _records(own)))

    @property
    def samples(self) -> SampleKeys:
        """The samples of all ranks together."""
        unions = [self._union[generation] for generation in sorted(self._union)]
        return np.concatenate(unions) if unions else np.zeros((0, len(_WITH_ATTEMPTS)), np.int64)

    def record(self, ranks_by_generation: Mapping[int, Collection[int]]) -> dict[str, object]:
        """Returns ``coverage.alignment``.

        Args:
            ranks_by_generation: Ranks that were expected or present in each generation. One of them that has
                samples in other generations alone leaves none of this one common to all.
        """
        ranks = {rank for found in self._ranks.values() for rank in found}
        num_common = num_all = 0
        has_attempts = False
        for generation, union in self._union.items():
            num_all += len(union)
            has_attempts = has_attempts or bool((union[:, 1] >= 0).any())
            if ranks.intersection(ranks_by_generation.get(generation, ())) <= self._ranks[generation]:
                num_common += len(self._common[generation])
        return {
            "key": list(_WITH_ATTEMPTS if has_attempts or num_all == 0 else _WITHOUT_ATTEMPTS),
            "ranks": len(ranks),
            "samples": num_all,
            "samples_common_to_all_ranks": num_common,
            "share_common_to_all_ranks": num_common / num_all if num_all else None,
        }


def _records(keys: SampleKeys) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(keys).view(_KEY).reshape(-1)


def _plain(records: npt.NDArray[np.void]) -> SampleKeys:
    return np.ascontiguousarray(records).view(np.int64).reshape(-1, len(_WITH_ATTEMPTS))
