"""Series of two runs as records: what each side has, on which rank, and what else differs beside it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchinstruments.merge.changes import of_rank
from torchinstruments.merge.merged_run import MergedRun
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.store.schema import KEY_COLUMNS

if TYPE_CHECKING:
    import polars as pl

__all__ = ["MAX_INLINE_RANKS", "Entries"]

MAX_INLINE_RANKS = 16
"""With more ranks than this only the one with the largest share of size has its numbers in a record."""

_SIDES = ("a", "b")
_TEXTS = ("scope", "shape", "dtype")
_Row = Mapping[str, object]


class Entries:
    """Makes records of the series that are shown.

    Args:
        runs: Both runs.
        ranks: Those that are compared, None where ranges over ranks are.
        measure: What is compared.
    """

    def __init__(self, runs: tuple[MergedRun, MergedRun], ranks: Sequence[int] | None, measure: str) -> None:
        self._runs = runs
        self._ranks = ranks
        self._measure = measure

    def records(self, changes: "pl.DataFrame") -> list[dict[str, object]]:
        """Returns a record of each series.

        Args:
            changes: Rows of `changes_by_rank` or `changes_by_range`.
        """
        rows = changes.to_dicts()
        if self._ranks is None:
            return [_key(row) | _by_range(row) | _beside(row) for row in rows]
        found = [_key(row) | _by_rank(row) | _beside(row) for row in rows]
        if len(self._ranks) <= MAX_INLINE_RANKS:
            for record, pairs in zip(found, self._pairs(changes, self._ranks), strict=True):
                record["ranks"] = pairs
        return found

    def _pairs(self, changes: "pl.DataFrame", ranks: Sequence[int]) -> list[dict[str, object]]:
        """Reads what the shown series have on each rank."""
        names = list(KEY_COLUMNS)
        found: list[dict[str, object]] = [{} for _ in range(changes.height)]
        places = changes.select(names).with_row_index("place")
        for rank in ranks if changes.height else ():
            own = of_rank(*self._runs, rank, self._measure).join(places, on=names)
            for row in own.to_dicts():
                found[row["place"]][str(rank)] = _pair(row)
        return found


def _key(row: _Row) -> dict[str, object]:
    return {name: row[name] for name in KEY_COLUMNS}


def _by_rank(row: _Row) -> dict[str, object]:
    found: dict[str, object] = {"change": row["change"], "share_of_size": row["share_of_size"]}
    found["largest"] = None
    if row["change"] is not None:
        found["largest"] = {"rank": row["rank"]} | _pair({**row, "change": row["change_on_rank"]})
    for name in ("compared", "lost", "gained"):
        held = row[f"ranks_{name}"]
        found[f"ranks_{name}"] = ranks_text(held) if isinstance(held, list) else ""
    return found


def _pair(row: _Row) -> dict[str, object]:
    found: dict[str, object] = {"change": row["change"], "share_of_size": row["share_of_size"]}
    for side in _SIDES:
        there = row[f"has_{side}"]
        found[side] = {
            "value": row[side],
            "unavailable_reason": row[f"reason_{side}"] if there else "no_rows",
            "observations": row[f"rows_{side}"] if there else 0,
            "latest_sample_id": row[f"sample_id_{side}"],
        }
    return found


def _by_range(row: _Row) -> dict[str, object]:
    found: dict[str, object] = {"change": row["change"], "share_of_size": row["share_of_size"]}
    for end in ("lowest", "highest"):
        pair: dict[str, object] = {name: row[f"{name}_of_{end}"] for name in ("change", "share_of_size")}
        for side in _SIDES:
            value = row[f"{end}_{side}"]
            there = {"rank": row[f"{end}_rank_{side}"], "value": value}
            pair[side] = None if value is None else there
        found[end] = pair
    for side in _SIDES:
        found[f"ranks_with_value_{side}"] = row[f"num_ranks_{side}"]
        found[f"unavailable_reason_{side}"] = row[f"reason_{side}"] if row[f"lowest_{side}"] is None else ""
    return found


def _beside(row: _Row) -> dict[str, object]:
    """What else is known of both, since a number alone can mislead: of other tensors, at another scale."""
    found: dict[str, object] = {}
    for side in _SIDES:
        low, high = row[f"loss_scale_lowest_{side}"], row[f"loss_scale_highest_{side}"]
        found[f"loss_scale_{side}"] = None if low is None else {"lowest": low, "highest": high}
        found |= {f"{name}_{side}": row[f"{name}_{side}"] for name in _TEXTS}
    names = (*_TEXTS, "loss_scale")
    found["differs_in"] = [name for name in names if found[f"{name}_a"] != found[f"{name}_b"]]
    return found
