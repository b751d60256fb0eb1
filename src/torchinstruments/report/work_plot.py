"""A picture of the section ``own_work``: time between steps, a rank's own, beside the rest of an attempt."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchinstruments.report.document import as_integer, as_number, as_records
from torchinstruments.report.extra import graph_objects, require_report_extra

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["own_work_plot"]


def own_work_plot(own_work: Mapping[str, object], generation: int | None = None) -> "go.Figure":
    """Returns what each rank takes between its steps, and what forward, backward and optimizer take.

    The first is its own work; the second holds collectives, in which it also waits for others.

    Args:
        own_work: ``merged.result["own_work"]``.
        generation: Which one; None for the last that has times of ranks.

    Raises:
        ConfigurationError: Plotly is not installed.
    """
    require_report_extra()
    from plotly.subplots import make_subplots

    go = graph_objects()
    titles = ("gap_s, own work; dotted: median_of_ranks", "other_s, forward, backward, optimizer and waiting")
    figure = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.09)
    found = [one for one in as_records(own_work["generations"]) if one["ranks"]]
    if generation is not None:
        found = [one for one in found if one["generation"] == generation]
    if not found:
        return figure
    last = found[-1]
    ranks = sorted(as_records(last["ranks"]), key=_rank)
    labels = [str(_rank(one)) for one in ranks]
    for column, name in enumerate(("gap_s", "other_s"), start=1):
        values = [as_number(one[name]) for one in ranks]
        bars = go.Bar(
            x=labels, y=values, name=name, hovertemplate=f"rank %{{x}}<br>{name} %{{y:.4g}} s<extra></extra>"
        )
        figure.add_trace(bars, row=1, col=column)
    median = as_number(last["gap_s_median_of_ranks"])
    figure.add_hline(y=median, line={"dash": "dot"}, row=1, col=1)
    figure.update_xaxes(title="rank", type="category")
    figure.update_yaxes(title="seconds, median over attempts", row=1, col=1)
    figure.update_yaxes(rangemode="tozero", tickformat=".3~g")
    left_out = as_integer(last["ranks_left_out"])
    more = f", the {len(ranks)} latest ranks, {left_out} further left out" if left_out else ""
    return figure.update_layout(title=f"generation {last['generation']}{more}", showlegend=False)


def _rank(record: Mapping[str, object]) -> int:
    return as_integer(record["rank"])
