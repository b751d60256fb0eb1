"""A heat map: layers down, ranks across, how far each value is from the median over ranks."""

from typing import TYPE_CHECKING

import numpy as np

from torchinstruments.errors import ConfigurationError
from torchinstruments.report.extra import graph_objects
from torchinstruments.report.labels import label_text, layer_label

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

__all__ = ["MADS_ENDS", "SHARE_ENDS", "rank_layer_heat_map"]

MADS_ENDS = (5.0, 10.0)
"""Colours end at the largest distance in median deviations, but never below the first or above the second."""

SHARE_ENDS = (0.5, 1.0)
"""The same of shares."""


def rank_layer_heat_map(
    overview: "pl.DataFrame",
    *,
    metric: str = "std",
    signal: str = "output",
    stage: str = "",
    generation: int | None = None,
    attempt: int | None = None,
) -> "go.Figure":
    """Returns how far each rank's value is from ``median_of_ranks``, layer by layer, at one forward.

    The distance is in median deviations over ranks; where two ranks alone have a value, or half of the ranks
    hold the same one, it is divided by the larger magnitude of value and median instead.

    Args:
        overview: ``merged.overview()``.
        metric: A statistic.
        signal: As in ``history``.
        stage: As in ``history``.
        generation: Of the forward; None for the last one that has this signal.
        attempt: Of the forward; None for the last one.

    Raises:
        ConfigurationError: Nothing of that was chosen for pictures, or plotly is not installed.
    """
    import polars as pl

    go = graph_objects()
    own = overview.filter(metric=metric, signal=signal, stage=stage, backward_index=0).filter("all_groups")
    if generation is not None:
        own = own.filter(generation=generation)
    if attempt is not None:
        own = own.filter(attempt=attempt)
    if own.is_empty():
        raise ConfigurationError(
            f"the overview has no forward with metric={metric!r}, signal={signal!r}, stage={stage!r}, "
            f"generation={generation}, attempt={attempt}; its own columns say which it has"
        )
    place = ("generation", "attempt", "forward_in_attempt", "forward_index")
    last = own.select(place).row(-1, named=True)
    own = own.filter(pl.col(name).eq_missing(pl.lit(value)) for name, value in last.items())
    cells = own.with_row_index("row").explode("ranks", "values", "distances")
    ranks = cells["ranks"].unique().sort().to_list()
    shown = np.full((own.height, len(ranks)), np.nan)
    texts = np.full(shown.shape, "", object)
    number = {rank: position for position, rank in enumerate(ranks)}
    for one in cells.iter_rows(named=True):
        where = one["row"], number[one["ranks"]]
        shown[where], unit = _distance(one)
        texts[where] = f"{one['values']:.6g}, {shown[where]:.3g} {unit}"
    lowest_end, highest_end = MADS_ENDS if (own["mad_of_ranks"] > 0).any() else SHARE_ENDS
    limit = min(max(float(np.nanmax(np.abs(shown), initial=0.0)), lowest_end), highest_end)
    figure = go.Figure(
        go.Heatmap(
            z=shown,
            x=[str(rank) for rank in ranks],
            y=[label_text(layer_label(one)) for one in own.iter_rows(named=True)],
            customdata=texts,
            hovertemplate="%{y}<br>rank %{x}<br>%{customdata}<extra></extra>",
            colorscale="RdBu_r",
            zmid=0.0,
            zmin=-limit,
            zmax=limit,
        )
    )
    figure.update_xaxes(title="rank", type="category")
    figure.update_yaxes(autorange="reversed", type="category")
    title = f"{signal} {stage}".rstrip() + f" {metric}, distance from median_of_ranks"
    return figure.update_layout(title=label_text(title), height=min(1200, 160 + 18 * own.height))


def _distance(one: dict[str, float]) -> tuple[float, str]:
    distance, mad, median = one["distances"], one["mad_of_ranks"], one["median_of_ranks"]
    if distance is None:
        return float("nan"), "from the median"
    if mad:
        return distance / mad, "median deviations from the median"
    size = max(abs(one["values"]), abs(one["values"] - distance if median is None else median))
    return (distance / size if size else 0.0), "of the larger magnitude from the median"
