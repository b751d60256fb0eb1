"""Pictures of the run from rank to rank: loss scale, skipped steps, and which ranks measured when."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.report.extra import graph_objects
from torchinstruments.report.labels import stretch_labels

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

__all__ = ["coverage_map", "loss_scale_lines", "skipped_steps_map"]

MAX_LINES = 16
"""Lines of ranks in one picture; ranks that hold the same all along share one."""

_AXES = {"attempt": "attempt", "forward_index": "forward of the process"}
_MAX_TICKS = 12
_STRETCH = ("generation", "first", "last")


def loss_scale_lines(timeline: "pl.DataFrame") -> "go.Figure":
    """Returns the loss scale over the attempts; ranks with the same one all along share a line.

    Args:
        timeline: ``merged.timeline()``.

    Raises:
        ConfigurationError: Plotly is not installed.
    """
    go = graph_objects()
    figure = go.Figure()
    own = timeline.filter(counted_in="attempt")
    labels, ranks, scales = _matrix(own, "loss_scale_last", np.nan)
    by_line: dict[bytes, list[int]] = {}
    for place, line in enumerate(scales):
        if not np.isnan(line).all():
            by_line.setdefault(line.tobytes(), []).append(place)
    for places in sorted(by_line.values(), key=_by_size)[:MAX_LINES]:
        held = [ranks[one] for one in places]
        name = f"rank {held[0]}" if len(held) == 1 else f"ranks {ranks_text(held)}"
        values = [None if np.isnan(one) else float(one) for one in scales[places[0]]]
        figure.add_scatter(x=labels, y=values, mode="lines+markers", name=name, line={"shape": "hv"})
    left_out = len(by_line) - MAX_LINES
    title = "loss scale" if left_out <= 0 else f"loss scale, {left_out} further lines of ranks left out"
    figure.update_xaxes(title=_axis_title(own, "attempt"), type="category", nticks=_MAX_TICKS)
    figure.update_yaxes(title="loss scale", type="log", dtick=_log_ticks(scales), tickformat=",.6~g")
    return figure.update_layout(title=title, showlegend=True)


def skipped_steps_map(timeline: "pl.DataFrame") -> "go.Figure":
    """Returns how many optimizer steps each rank skipped, stretch by stretch.

    Args:
        timeline: ``merged.timeline()``.

    Raises:
        ConfigurationError: Plotly is not installed.
    """
    own = timeline.filter(counted_in="attempt")
    labels, ranks, skipped = _matrix(own, "skipped", 0.0)
    limit = max(1.0, float(skipped.max(initial=0.0)))
    figure = _map(labels, ranks, skipped, "steps skipped", (0.0, limit), "Oranges")
    if limit <= MAX_LINES:
        figure.update_traces(colorbar_dtick=1)
    figure.update_xaxes(title=_axis_title(own, "attempt"))
    return figure.update_layout(title="skipped optimizer steps")


def coverage_map(timeline: "pl.DataFrame", expected_ranks: Sequence[int] = ()) -> "go.Figure":
    """Returns which share of the forwards that any rank measured each rank measured, stretch by stretch.

    Args:
        timeline: ``merged.timeline()``.
        expected_ranks: Ranks that have a row, too: ``merged.coverage.expected_ranks``.

    Raises:
        ConfigurationError: Plotly is not installed.
    """
    axis = "attempt"
    if timeline.filter(counted_in=axis)["samples"].sum() == 0:
        axis = "forward_index"
    own = timeline.filter(counted_in=axis)
    labels, ranks, samples = _matrix(own, "samples", 0.0)
    _, _, of_any = _matrix(own, "samples_of_any_rank", 0.0)
    absent = [rank for rank in expected_ranks if rank not in ranks]
    order = np.argsort([*ranks, *absent])
    samples = np.concatenate([samples, np.zeros((len(absent), len(labels)))])[order]
    ranks = sorted([*ranks, *absent])
    expected = of_any.max(axis=0, initial=0.0)
    measured = np.flatnonzero(expected > 0)
    share = samples[:, measured] / expected[measured]
    figure = _map([labels[one] for one in measured], ranks, share, "share measured", (0.0, 1.0), "Blues")
    figure.update_xaxes(title=_axis_title(own, _AXES[axis]))
    return figure.update_layout(title="share of the measured forwards that each rank has")


def _matrix(
    own: "pl.DataFrame", column: str, missing: float
) -> tuple[list[str], list[int], npt.NDArray[np.float64]]:
    """Returns labels of stretches, ranks, and a number of each rank and stretch."""
    stretches = own.select(_STRETCH).unique().sort(_STRETCH)
    ranks = own["rank"].unique().sort().to_list()
    found = np.full((len(ranks), stretches.height), missing)
    if own.height:
        cells = own.join(stretches.with_row_index("place"), on=_STRETCH)
        rows = np.searchsorted(np.array(ranks), cells["rank"].to_numpy())
        found[rows, cells["place"].to_numpy()] = cells[column].cast(float).fill_null(missing).to_numpy()
    return stretch_labels(stretches.rows()), ranks, found


def _map(
    labels: list[str],
    ranks: list[int],
    values: npt.NDArray[np.float64],
    name: str,
    limits: tuple[float, float],
    colours: str,
) -> "go.Figure":
    go = graph_objects()
    figure = go.Figure(
        go.Heatmap(
            z=values.round(3),
            x=labels,
            y=ranks,
            zmin=limits[0],
            zmax=limits[1],
            colorscale=colours,
            colorbar={"title": {"text": name, "side": "right"}},
            hovertemplate=f"rank %{{y}}<br>%{{x}}<br>%{{z}} {name}<extra></extra>",
        )
    )
    figure.update_xaxes(type="category", nticks=_MAX_TICKS)
    return figure.update_yaxes(
        title="rank", autorange="reversed", dtick=1 if len(ranks) <= MAX_LINES else None
    )


def _axis_title(own: "pl.DataFrame", what: str) -> str:
    return what if own["generation"].n_unique() < 2 else f"{what}; g is the generation"


def _log_ticks(scales: npt.NDArray[np.float64]) -> float | None:
    """Returns a distance of ticks, doublings, where the scale changes by a few of them."""
    known = scales[np.isfinite(scales) & (scales > 0)]
    if len(known) == 0:
        return None
    return float(np.log10(2)) if known.max() / known.min() <= 2**8 else None


def _by_size(places: list[int]) -> tuple[int, int]:
    return (-len(places), places[0])
