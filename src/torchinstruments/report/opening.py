"""On which forward, signal, statistic and layer a page opens: there, where ranks differ most."""

from typing import TYPE_CHECKING

from torchinstruments.report.document import Record, as_record, as_records
from torchinstruments.report.labels import forward_label, label_text, layer_label, signal_label
from torchinstruments.report.spreads import spread_metrics

if TYPE_CHECKING:
    import polars as pl

__all__ = ["opening_row", "row_choice"]

_SERIES = (
    "layer",
    "call_index",
    "signal",
    "stage",
    "tensor_path",
    "metric",
    "mode",
    "backward_index",
    "scope",
)
_FORWARD = ("generation", "attempt", "forward_in_attempt", "forward_index")


def opening_row(result: Record, overview: "pl.DataFrame") -> Record | None:
    """Returns a row that at least two ranks have a value of; None where there is no such row.

    It is of the first series of ``comparison.widest`` that is pictured, at its widest forward or, if that is
    not pictured, where its ranks are furthest apart. Two ranks have no such list: it is the pictured cell
    with the largest spread.

    Args:
        result: ``result.json``.
        overview: The rows of ``overview.parquet``.
    """
    import polars as pl

    low, high = pl.col("lowest_value"), pl.col("highest_value")
    size = pl.max_horizontal(low.abs(), high.abs())
    rows = overview.filter(pl.col("all_groups") & (pl.col("num_ranks") > 1)).with_columns(
        # Divided first: the difference may be beyond double precision.
        spread=pl.when(size > 0).then(high / size - low / size).otherwise(0.0)
    )
    for one in as_records(as_record(result["comparison"])["widest"]):
        own = _like(rows, one, _SERIES)
        if not own.is_empty():
            there = _like(own, one, _FORWARD)
            return _furthest(own if there.is_empty() else there)
    usual = rows.filter(metric=next(iter(spread_metrics(result)), ""))
    return _furthest(rows if usual.is_empty() else usual)


def row_choice(row: Record, *, names_generation: bool) -> dict[str, object]:
    """Returns what is chosen on the page to show a row of the overview or a cell of the result."""
    return {
        "column": label_text(layer_label(row)),
        "choice": label_text(signal_label(row)),
        "metric": label_text(str(row["metric"])),
        "forward": forward_label(row, names_generation=names_generation),
    }


def _like(rows: "pl.DataFrame", one: Record, names: tuple[str, ...]) -> "pl.DataFrame":
    import polars as pl

    return rows.filter(pl.col(name).eq_missing(pl.lit(one[name])) for name in names)


def _furthest(rows: "pl.DataFrame") -> Record | None:
    if rows.is_empty():
        return None
    return rows.row(rows["spread"].arg_max() or 0, named=True)
