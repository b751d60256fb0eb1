"""How much the numbers of a series differ between two runs, one rank beside the same rank of the other.

The change from ``a`` to ``b`` is ``|b - a| / max(|a|, |b|)``, and 0 where both are 0: a share of the larger
magnitude of the two, the same as the spread that the merge shows between ranks. It is at most 2, reached
between numbers of opposite sign; a number that became 0, or was 0 before, changed by 1. So it is always
finite, and does not depend on which run is called A.

That formula makes much of a number that is 0 but for rounding: it changes by all of its size between any two
runs. So what is shown first, and on which rank, goes by the *share of size*, the change against what is large
in that tensor: ``|b - a| / max(|a|, |b|, std of the tensor in A, std of it in B)``, of the same rank.
Fractions have a size of their own, and a tensor without a ``std`` has no other: there it is the change.

Not every pair of numbers may be held beside each other. Of a series whose scope differs the numbers cover
something else, and gradients are stored as observed, multiplied with the loss scale.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchinstruments.merge.merged_run import MergedRun
from torchinstruments.records import Scope, Signal
from torchinstruments.store.schema import KEY_COLUMNS

if TYPE_CHECKING:
    import polars as pl

__all__ = [
    "FOLDED_RANKS",
    "LATEST_REASON",
    "MEASURES",
    "SIDES",
    "TEXTS",
    "change_between",
    "changes_by_rank",
    "of_rank",
    "ordered",
    "reason_against",
    "share_of_size",
    "summary_columns",
    "values_gained",
    "values_lost",
    "with_std",
]

MEASURES = {
    "recent_window": ("recent_window_mean", "recent_window_unavailable_reason", "recent_window_observations"),
    "latest": ("latest_value", "latest_unavailable_reason", "observations"),
}
"""What can be compared, with its columns of ``summary.parquet``: value, reason, rows behind it."""

SIDES = ("a", "b")
"""The two runs."""

TEXTS = ("scope", "shape", "dtype")
"""What is kept of a series' latest row beside its number."""

FOLDED_RANKS = 16
"""Ranks whose series are held at once."""

SCOPE_DIFFERS = "scope_differs"
"""Why a series is not compared: the numbers of the two runs do not cover the same tensor."""

LATEST_REASON = "latest_unavailable_reason"
"""Column of ``summary.parquet``: why the latest row has no value."""

LOSS_SCALE_DIFFERS = "loss_scale_differs"
"""Why a gradient is not compared: it was multiplied with another loss scale in the other run."""

_GRADIENTS = (Signal.OUTPUT_GRADIENT.value, Signal.PARAMETER_GRADIENT.value)
_FRACTIONS = ("zero_fraction", "finite_fraction", "nonfinite_fraction")


def summary_columns(measure: str) -> list[str]:
    """Returns the columns of ``summary.parquet`` that a measure needs."""
    extra = [LATEST_REASON, "latest_sample_id", "loss_scale_lowest", "loss_scale_highest"]
    names = [*KEY_COLUMNS, *MEASURES[measure], *(f"latest_{name}" for name in TEXTS), *extra]
    return list(dict.fromkeys(names))


def of_rank(a: MergedRun, b: MergedRun, rank: int, measure: str) -> "pl.DataFrame":
    """Returns each series that both runs have of one rank, or one of them (offline).

    Columns: the key, ``rank``, and for each side ``a``, ``b``, ``std_*``, ``reason_*``, ``rows_*``,
    ``sample_id_*``, ``scope_*``, ``shape_*``, ``dtype_*``, ``loss_scale_lowest_*``, ``loss_scale_highest_*``,
    ``has_*``; then ``not_compared``, ``change`` and ``share_of_size``, which are null where a side has no
    value.
    """
    import polars as pl

    value, reason, rows = MEASURES[measure]
    sides = []
    for run, side in zip((a, b), SIDES, strict=True):
        names = {value: side, reason: f"reason_{side}", rows: f"rows_{side}", "std": f"std_{side}"}
        names["latest_sample_id"] = f"sample_id_{side}"
        names |= {f"latest_{name}": f"{name}_{side}" for name in TEXTS}
        names |= {f"loss_scale_{end}": f"loss_scale_{end}_{side}" for end in ("lowest", "highest")}
        frame = with_std(run.rows(rank, summary_columns(measure)), value)
        frame = frame.with_columns(pl.col(LATEST_REASON).alias(f"missing_{side}"))
        frame = frame.rename(names).drop(LATEST_REASON, strict=False)
        sides.append(frame.with_columns(pl.lit(value=True).alias(f"has_{side}")))
    joined = sides[0].join(sides[1], on=list(KEY_COLUMNS), how="full", coalesce=True)
    joined = joined.with_columns(
        pl.lit(rank, pl.Int64).alias("rank"),
        *(pl.col(f"has_{side}").fill_null(value=False) for side in SIDES),
    ).with_columns(reason_against(SIDES).alias("not_compared"))
    joined = joined.drop(f"missing_{side}" for side in SIDES)
    compared = pl.col("not_compared") == ""
    return joined.with_columns(
        pl.when(compared).then(change_between("a", "b")).alias("change"),
        pl.when(compared).then(share_of_size("a", "b", ("std_a", "std_b"))).alias("share_of_size"),
    )


def with_std(frame: "pl.DataFrame", value: str) -> "pl.DataFrame":
    """Returns the series of a rank with ``std``: that of their tensor; null of fractions, and without one.

    Args:
        frame: Series with their key.
        value: Column that holds their values.
    """
    import polars as pl

    tensor = [name for name in KEY_COLUMNS if name != "metric"]
    std = pl.col(value).filter(pl.col("metric") == "std").first().over(tensor)
    return frame.with_columns(pl.when(~pl.col("metric").is_in(_FRACTIONS)).then(std).alias("std"))


def reason_against(values: tuple[str, str], otherwise: "pl.Expr | None" = None) -> "pl.Expr":
    """Returns why the two sides of a row may not be held beside each other, ``""`` where they may.

    Where one side was not measured, its tensor has no scope; the reason is then that of the missing value.

    Args:
        values: Columns of the two sides' values.
        otherwise: The reason where nothing here speaks against it.
    """
    import polars as pl

    other_scope = pl.col("scope_a") != pl.col("scope_b")
    is_scaled = pl.col("signal").is_in(_GRADIENTS) & ~pl.col("metric").is_in(_FRACTIONS)
    other_scale = pl.any_horizontal(
        pl.col(f"loss_scale_{end}_a").fill_null(1.0) != pl.col(f"loss_scale_{end}_b").fill_null(1.0)
        for end in ("lowest", "highest")
    )
    is_in_both = pl.col("has_a") & pl.col("has_b")
    not_measured = [
        pl.when(pl.col(value).is_null() & (pl.col(f"scope_{side}") == Scope.UNKNOWN.value))
        .then(pl.col(f"missing_{side}").str.split(":").list.first())
        .replace("", None)
        for value, side in zip(values[::-1], SIDES[::-1], strict=True)
    ]
    return (
        pl.when(is_in_both & other_scope)
        .then(pl.coalesce(*not_measured, pl.lit(SCOPE_DIFFERS)))
        .when(is_in_both & is_scaled & other_scale)
        .then(pl.lit(LOSS_SCALE_DIFFERS))
        .otherwise(pl.lit("") if otherwise is None else otherwise)
    )


def change_between(first: str, second: str) -> "pl.Expr":
    """Returns the change between two columns; null where either is."""
    return share_of_size(first, second, ())


def share_of_size(first: str, second: str, sizes: tuple[str, ...]) -> "pl.Expr":
    """Returns the difference of two columns as a share of the largest magnitude in them and in `sizes`."""
    import polars as pl

    a, b = pl.col(first), pl.col(second)
    larger = pl.max_horizontal(pl.col(name).abs() for name in (first, second, *sizes))
    # Divided first, so that the difference of two huge numbers does not overflow.
    share = (b / larger - a / larger).abs()
    return pl.when(a.is_null() | b.is_null()).then(None).when(larger == 0).then(0.0).otherwise(share)


def changes_by_rank(a: MergedRun, b: MergedRun, ranks: Iterable[int], measure: str) -> "pl.DataFrame":
    """Returns each series with the rank whose change is the largest share of the tensor's size (offline).

    Memory is that of the series of `FOLDED_RANKS` ranks.

    Returns:
        One row a series, largest ``share_of_size`` first: what `of_rank` has of the rank with the largest,
        its change being ``change_on_rank``, for ``change`` is the largest over ranks; then
        ``ranks_compared``, ``ranks_lost`` (a value in A and none in B), ``ranks_gained``,
        ``ranks_only_in_a``, ``ranks_only_in_b``, ``ranks_not_compared``: lists of ranks, empty for none.
    """
    held: list[pl.DataFrame] = []
    for rank in ranks:
        held.append(_with_lists(of_rank(a, b, rank, measure)))
        if len(held) > FOLDED_RANKS:
            held = [_folded(held)]
    return _folded(held)


def _with_lists(frame: "pl.DataFrame") -> "pl.DataFrame":
    import polars as pl

    in_both = pl.col("has_a") & pl.col("has_b")
    compared = in_both & (pl.col("not_compared") == "")
    which = {
        "ranks_compared": pl.col("change").is_not_null(),
        "ranks_lost": compared & pl.col("a").is_not_null() & pl.col("b").is_null(),
        "ranks_gained": compared & pl.col("a").is_null() & pl.col("b").is_not_null(),
        "ranks_only_in_a": pl.col("has_a") & ~pl.col("has_b"),
        "ranks_only_in_b": pl.col("has_b") & ~pl.col("has_a"),
        "ranks_not_compared": in_both & (pl.col("not_compared") != ""),
    }
    none = pl.lit([], dtype=pl.List(pl.Int64))
    return frame.with_columns(
        pl.col("change").alias("change_on_rank"),
        *(
            pl.when(chosen).then(pl.concat_list("rank")).otherwise(none).alias(name)
            for name, chosen in which.items()
        ),
    )


def _folded(frames: "list[pl.DataFrame]") -> "pl.DataFrame":
    import polars as pl

    joined = pl.concat(frames).sort(
        "share_of_size", "change_on_rank", "rank", descending=[True, True, False], nulls_last=True
    )
    lists = [name for name in joined.columns if name.startswith("ranks_")]
    others = [name for name in joined.columns if name not in {*KEY_COLUMNS, *lists}]
    folded = joined.group_by(list(KEY_COLUMNS), maintain_order=True).agg(
        *(pl.col(name).max() if name == "change" else pl.col(name).first() for name in others),
        *(pl.col(name).list.explode().drop_nulls().sort() for name in lists),
    )
    return ordered(folded)


def ordered(frame: "pl.DataFrame") -> "pl.DataFrame":
    """Returns series with the largest share of size first, then by their change, equal ones by their key."""
    descending = [True, True, *(False for _ in KEY_COLUMNS)]
    return frame.sort("share_of_size", "change", *KEY_COLUMNS, descending=descending, nulls_last=True)


def values_lost(changes: "pl.DataFrame") -> "pl.DataFrame":
    """Returns the series that have a value in A and none in B; rank by rank, on any rank (offline)."""
    return _one_sided(changes, "ranks_lost", "a", "b")


def values_gained(changes: "pl.DataFrame") -> "pl.DataFrame":
    """Returns the series that have a value in B and none in A; rank by rank, on any rank (offline)."""
    return _one_sided(changes, "ranks_gained", "b", "a")


def _one_sided(changes: "pl.DataFrame", ranks: str, there: str, gone: str) -> "pl.DataFrame":
    if ranks in changes.columns:
        return changes.filter(changes[ranks].list.len() > 0)
    is_compared = changes[f"has_{gone}"] & (changes["not_compared"] == "")
    return changes.filter(
        is_compared & changes[f"lowest_{there}"].is_not_null() & changes[f"lowest_{gone}"].is_null()
    )
