"""Ranks that ought to hold one value and hold several: who holds which, the fewest first."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.rank_sets import ranks_text

__all__ = ["MAX_VALUES", "Held", "Split", "split_of"]

MAX_VALUES = 16
"""Values that are told apart; ranks with further ones are named together."""


@dataclass(frozen=True, slots=True)
class Held:
    """A value and the ranks that hold it.

    Attributes:
        value: The value.
        ranks: Ascending, at least one.
    """

    value: int | float
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Several values where one was due.

    Attributes:
        values: At most `MAX_VALUES`; those of the fewest ranks first, of equally many the lowest rank.
        num_values: How many there are.
        further_ranks: Ranks that hold a value which is not among `values`.
    """

    values: tuple[Held, ...]
    num_values: int
    further_ranks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that hold any."""
        return sum(len(one.ranks) for one in self.values) + len(self.further_ranks)

    def record(self, shown: Callable[[int | float], object]) -> dict[str, object]:
        """Returns it as it stands in ``result.json``."""
        return {
            "values": [
                {"value": shown(one.value), "ranks": ranks_text(one.ranks), "num_ranks": len(one.ranks)}
                for one in self.values
            ],
            "num_values": self.num_values,
            "ranks_with_further_values": ranks_text(self.further_ranks),
        }


def split_of(values: npt.NDArray[np.generic], ranks: npt.NDArray[np.int64]) -> Split:
    """Returns who holds what; each rank stands there once (any worker)."""
    order = np.lexsort((ranks, values))
    values, ranks = values[order], ranks[order]
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    ends = np.append(starts[1:], len(values))
    by_number = np.lexsort((ranks[starts], ends - starts))
    shown = by_number[:MAX_VALUES].tolist()
    is_further = np.ones(len(values), np.bool_)
    for place in shown:
        is_further[starts[place] : ends[place]] = False
    return Split(
        tuple(
            Held(values[starts[place]].item(), tuple(ranks[starts[place] : ends[place]].tolist()))
            for place in shown
        ),
        len(starts),
        tuple(np.sort(ranks[is_further]).tolist()),
    )
