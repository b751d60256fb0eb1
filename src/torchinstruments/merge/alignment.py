"""Whether the ranks measured the same forwards: the samples that they have in common.

Between ranks a sample is known by (generation, attempt, forward_in_attempt); where a rank saw no attempts, by
(generation, forward_index). A sample id counts one process's own samples and is never compared.
"""

from dataclasses import dataclass

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
    """Folds the keys of one rank after the other; memory is that of two ranks.

    Attributes:
        num_ranks: Ranks with samples so far.
    """

    num_ranks: int = 0
    _common: SampleKeys | None = None
    _union: SampleKeys | None = None

    def add(self, keys: SampleKeys) -> None:
        """Takes the keys of a rank; a rank without samples does not count."""
        if len(keys) == 0:
            return
        self.num_ranks += 1
        if self._common is None or self._union is None:
            self._common = self._union = keys
            return
        if not np.array_equal(keys, self._common):
            self._common = _plain(np.intersect1d(_records(self._common), _records(keys), assume_unique=True))
        if not np.array_equal(keys, self._union):
            self._union = _plain(np.union1d(_records(self._union), _records(keys)))

    @property
    def samples(self) -> SampleKeys:
        """The samples of all ranks together."""
        return np.zeros((0, len(_WITH_ATTEMPTS)), np.int64) if self._union is None else self._union

    def record(self) -> dict[str, object]:
        """Returns ``coverage.alignment``."""
        num_common = 0 if self._common is None else len(self._common)
        num_all = 0 if self._union is None else len(self._union)
        has_attempts = self._union is not None and bool((self._union[:, 1] >= 0).any())
        return {
            "key": list(_WITH_ATTEMPTS if has_attempts or num_all == 0 else _WITHOUT_ATTEMPTS),
            "ranks": self.num_ranks,
            "samples": num_all,
            "samples_common_to_all_ranks": num_common,
            "share_common_to_all_ranks": num_common / num_all if num_all else None,
        }


def _records(keys: SampleKeys) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(keys).view(_KEY).reshape(-1)


def _plain(records: npt.NDArray[np.void]) -> SampleKeys:
    return np.ascontiguousarray(records).view(np.int64).reshape(-1, len(_WITH_ATTEMPTS))
