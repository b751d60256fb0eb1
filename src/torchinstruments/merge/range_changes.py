"""How much the range of a series over ranks differs between two runs whose worlds have different sizes.

No rank of one is that of the other then: the lowest value over ranks is held beside the lowest, the highest
beside the highest. Nothing is averaged. It needs numbers of whole tensors: shards of two worlds are cut in
different places.
"""

from typing import TYPE_CHECKING

from torchinstruments.merge.changes import (
    FOLDED_RANKS,
    LATEST_REASON,
    MEASURES,
    SIDES,
    TEXTS,
    change_between,
    ordered,
    reason_against,
    share_of_size,
    summary_columns,
    with_std,
)
from torchinstruments.merge.merged_run import MergedRun
from torchinstruments.records import Scope
from torchinstruments.store.schema import KEY_COLUMNS

if TYPE_CHECKING:
    import polars as pl

__all__ = ["NOT_WHOLE", "changes_by_range"]

NOT_WHOLE = "not_whole_tensors"
"""Why a series is not compared: a rank's number need not cover a whole tensor."""


def changes_by_range(a: MergedRun, b: MergedRun, measure: str) -> "pl.DataFrame":
    """Returns each series with the change of its lowest and of its highest value over ranks (offline).

    Memory is that of the series of `FOLDED_RANKS` ranks.

    Returns:
        One row a series, largest ``share_of_size`` first: the key, and for each side ``lowest_*``,
        ``lowest_rank_*``, ``lowest_std_*``, the same of the highest, ``num_ranks_*``, ``reason_*``,
        ``scope_*``, ``shape_*``, ``dtype_*``, ``loss_scale_lowest_*``, ``loss_scale_highest_*``, ``has_*``;
        then ``not_compared``, and of ``change`` and ``share_of_size`` each that ``*_of_lowest``, that
        ``*_of_highest`` and the larger one of the two.
    """
    import polars as pl

    of_a, of_b = _range(a, measure, "a"), _range(b, measure, "b")
    joined = of_a.join(of_b, on=list(KEY_COLUMNS), how="full", coalesce=True)
    joined = joined.with_columns(pl.col(f"has_{side}").fill_null(value=False) for side in SIDES)
    is_part = pl.any_horizontal(pl.col(f"scope_{side}") != Scope.LOCAL.value for side in SIDES)
    not_whole = (
        pl.when(is_part & pl.col("has_a") & pl.col("has_b")).then(pl.lit(NOT_WHOLE)).otherwise(pl.lit(""))
    )
    joined = joined.with_columns(reason_against(("lowest_a", "lowest_b"), not_whole).alias("not_compared"))
    joined = joined.drop(f"missing_{side}" for side in SIDES)
    compared = pl.col("not_compared") == ""
    for end in ("lowest", "highest"):
        pair, sizes = (f"{end}_a", f"{end}_b"), (f"{end}_std_a", f"{end}_std_b")
        joined = joined.with_columns(
            pl.when(compared).then(change_between(*pair)).alias(f"change_of_{end}"),
            pl.when(compared).then(share_of_size(*pair, sizes)).alias(f"share_of_size_of_{end}"),
        )
    larger = (
        pl.max_horizontal(f"{name}_of_lowest", f"{name}_of_highest").alias(name)
        for name in ("change", "share_of_size")
    )
    return ordered(joined.with_columns(larger))


def _range(run: MergedRun, measure: str, side: str) -> "pl.DataFrame":
    """Returns the range of each series over the ranks of one run."""
    import polars as pl

    value, reason, _ = MEASURES[measure]
    held: list[pl.DataFrame] = []
    for rank in run.groups or (0,):
        frame = with_std(run.rows(rank, summary_columns(measure)), value)
        held.append(
            frame.select(
                *KEY_COLUMNS,
                pl.col(value).alias("lowest"),
                pl.lit(rank, pl.Int64).alias("lowest_rank"),
                pl.col("std").alias("lowest_std"),
                pl.col(value).alias("highest"),
                pl.lit(rank, pl.Int64).alias("highest_rank"),
                pl.col("std").alias("highest_std"),
                pl.col(value).is_not_null().cast(pl.Int64).alias("num_ranks"),
                pl.col(reason).alias("reason"),
                pl.col(LATEST_REASON).alias("missing"),
                *(pl.concat_list(f"latest_{name}").alias(name) for name in TEXTS),
                "loss_scale_lowest",
                "loss_scale_highest",
            )
        )
        if len(held) > FOLDED_RANKS:
            held = [_folded(held)]
    folded = _folded(held).with_columns(
        pl.lit(value=True).alias("has"), *(pl.col(name).list.sort().list.join(", ") for name in TEXTS)
    )
    return folded.rename({name: f"{name}_{side}" for name in folded.columns if name not in KEY_COLUMNS})


def _folded(frames: "list[pl.DataFrame]") -> "pl.DataFrame":
    import polars as pl

    def at(end: str, *, descending: bool) -> list[pl.Expr]:
        # Of equal values that of the lowest rank.
        by = [pl.col(end), pl.col(f"{end}_rank")]
        return [
            pl.col(name).sort_by(by, descending=[descending, False], nulls_last=True).first()
            for name in (end, f"{end}_rank", f"{end}_std")
        ]

    return (
        pl.concat(frames)
        .group_by(list(KEY_COLUMNS), maintain_order=True)
        .agg(
            *at("lowest", descending=False),
            *at("highest", descending=True),
            pl.col("num_ranks").sum(),
            *(pl.col(name).filter(pl.col(name) != "").min().fill_null("") for name in ("reason", "missing")),
            *(pl.col(name).list.explode().unique() for name in TEXTS),
            pl.col("loss_scale_lowest").min(),
            pl.col("loss_scale_highest").max(),
        )
    )
