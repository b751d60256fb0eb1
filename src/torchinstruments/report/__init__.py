"""What people read of a merged run: one HTML file, TensorBoard scalars, and pictures from its frames.

Needs ``pip install plotly jinja2``, apart from TensorBoard's.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchinstruments.report.heat_map import rank_layer_heat_map
    from torchinstruments.report.page import write_report
    from torchinstruments.report.series_lines import series_over_ranks
    from torchinstruments.report.tensorboard import write_tensorboard
    from torchinstruments.report.timeline_plots import coverage_map, loss_scale_lines, skipped_steps_map
    from torchinstruments.report.work_plot import own_work_plot

__all__ = [
    "coverage_map",
    "loss_scale_lines",
    "own_work_plot",
    "rank_layer_heat_map",
    "series_over_ranks",
    "skipped_steps_map",
    "write_report",
    "write_tensorboard",
]

_HOMES = {
    "coverage_map": "timeline_plots",
    "loss_scale_lines": "timeline_plots",
    "own_work_plot": "work_plot",
    "rank_layer_heat_map": "heat_map",
    "series_over_ranks": "series_lines",
    "skipped_steps_map": "timeline_plots",
    "write_report": "page",
    "write_tensorboard": "tensorboard",
}


def __getattr__(name: str) -> object:
    """Loads a public name from its module at first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'torchinstruments.report' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"torchinstruments.report.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted(__all__)
