"""One series over the run: a line a rank, and a band from the lowest to the highest rank."""

from typing import TYPE_CHECKING

from torchinstruments.errors import ConfigurationError
from torchinstruments.report.extra import graph_objects
from torchinstruments.report.labels import forward_label, label_text

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

__all__ = ["series_over_ranks"]


def series_over_ranks(
    overview: "pl.DataFrame",
    layer: str,
    *,
    metric: str = "std",
    signal: str = "output",
    stage: str = "",
    call_index: int = 0,
    tensor_path: str | None = None,
) -> "go.Figure":
    """Returns one line a rank, ``median_of_ranks``, and a band from the lowest to the highest of all ranks.

    Args:
        overview: ``merged.overview()``.
        layer: Name in the model.
        metric: A statistic.
        signal: As in ``history``.
        stage: As in ``history``.
        call_index: Which call of the layer.
        tensor_path: Which tensor; None for the first one.

    Raises:
        ConfigurationError: There is no such series, or plotly is not installed.
    """
    go = graph_objects()
    own = overview.filter(
        layer=layer, metric=metric, signal=signal, stage=stage, call_index=call_index, backward_index=0
    )
    if not own.is_empty():
        own = own.filter(tensor_path=own["tensor_path"].min() if tensor_path is None else tensor_path)
    if own.is_empty():
        raise ConfigurationError(
            f"no series with layer={layer!r}, metric={metric!r}, signal={signal!r}, stage={stage!r}, "
            f"call_index={call_index}, tensor_path={tensor_path!r} is in the overview"
        )
    names_generation = own["generation"].n_unique() > 1
    rows = own.with_columns(
        place=[forward_label(one, names_generation=names_generation) for one in own.iter_rows(named=True)]
    )
    figure = go.Figure()
    band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    figure.add_scatter(x=rows["place"].to_list(), y=rows["lowest_value"].to_list(), showlegend=False, **band)
    figure.add_scatter(
        x=rows["place"].to_list(),
        y=rows["highest_value"].to_list(),
        fill="tonexty",
        name="lowest to highest rank",
        **band,
    )
    lines = rows.select("place", "ranks", "values").explode("ranks", "values")
    for (rank,), line in lines.group_by("ranks", maintain_order=True):
        figure.add_scatter(
            x=line["place"].to_list(), y=line["values"].to_list(), mode="lines+markers", name=f"rank {rank}"
        )
    if rows["median_of_ranks"].null_count() < rows.height:
        figure.add_scatter(
            x=rows["place"].to_list(),
            y=rows["median_of_ranks"].to_list(),
            mode="lines",
            line={"dash": "dot"},
            name="median_of_ranks",
        )
    figure.update_xaxes(type="category")
    title = f"{layer or '(root)'} {signal} {stage}".rstrip()
    return figure.update_layout(title=label_text(f"{title} {metric}"), yaxis_title=label_text(metric))
