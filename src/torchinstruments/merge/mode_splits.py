"""Forwards that ranks ran in different modes, ``train`` here and ``eval`` there.

The mode is part of a cell's key, so that numbers of such a forward have nothing to be compared with. That is
a fact of its own, not a gap. Ranks may hold different layers, and one layer may be in ``eval`` on all ranks:
what counts is a series that one rank measured in one mode and another rank in another.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.comparison_rows import AlignedRows, RankRows
from torchinstruments.merge.splits import Split, split_of

__all__ = ["ModeSplits", "mode_splits"]

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModeSplits:
    """Forwards that ranks ran in different modes, of some consecutive stretches.

    Attributes:
        forwards: How many.
        first: The first one as it stands in ``result.json``; None where there is none.
    """

    forwards: int = 0
    first: dict[str, object] | None = None

    def joined(self, later: "ModeSplits") -> "ModeSplits":
        """Returns this together with a later stretch."""
        return ModeSplits(self.forwards + later.forwards, self.first or later.first)


def mode_splits(rows: AlignedRows) -> ModeSplits:
    """Returns the forwards of a stretch that ranks ran in different modes (worker)."""
    cells = rows.cells
    modes = sorted({one.mode for one in cells.variants})
    if len(modes) < 2:
        return ModeSplits()
    moment, series, variant = cells.described()
    bit = np.array([1 << modes.index(one.mode) for one in cells.variants], np.int64)[variant]
    kept = np.flatnonzero(_are_several(_joined_bits(moment, bit))[moment])
    place = np.unique(moment[kept] * len(cells.series) + series[kept], return_inverse=True)[1]
    kept = kept[_are_several(_joined_bits(place, bit[kept]))[place]]
    split_at: list[tuple[int, Split]] = []
    ranks = np.array([one.rank for one in rows.ranks], np.int64)
    for number in sorted(np.unique(moment[kept]).tolist(), key=cells.moments.__getitem__):
        own = kept[moment[kept] == number]
        held = np.array([_held_bits(rows, one, own, bit[own]) for one in rows.ranks], np.int64)
        split = split_of(held[held > 0], ranks[held > 0])
        if split.num_values > 1:
            split_at.append((number, split))
    if not split_at:
        return ModeSplits()
    number, split = split_at[0]
    generation, attempt, forward = cells.moments[number]
    layers = {cells.series[one].layer for one in series[kept[moment[kept] == number]].tolist()}
    return ModeSplits(
        len(split_at),
        {
            "generation": generation,
            "attempt": attempt if attempt >= 0 else None,
            "forward_in_attempt": forward if attempt >= 0 else None,
            "forward_index": forward if attempt < 0 else None,
            "layer": min(layers),
            "num_layers": len(layers),
        }
        | split.record(lambda held: ",".join(one for at, one in enumerate(modes) if int(held) >> at & 1)),
    )


def _joined_bits(group: _Integers, bits: _Integers) -> _Integers:
    """Returns the bits of each group, by its number."""
    joined = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    np.bitwise_or.at(joined, group, bits)
    return joined


def _are_several(bits: _Integers) -> npt.NDArray[np.bool_]:
    return (bits & (bits - 1)) != 0


def _held_bits(rows: AlignedRows, rank: RankRows, own: _Integers, bits: _Integers) -> int:
    """Returns the modes of those of some cells that a rank has a value of."""
    whole = rows.cells.whole[own]
    values = np.append(rank.values, np.nan)[np.where(whole >= 0, np.minimum(whole, len(rank.values)), -1)]
    is_held = np.isfinite(values) | np.isin(own, rank.part_columns)
    return int(np.bitwise_or.reduce(bits[is_held], initial=0))
