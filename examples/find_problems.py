"""Makes five known faults on purpose, and shows the number in which each is seen first.

Every fault is trained three times from one seed: *baseline* has no fault, in *broken* it begins after four
samples, and *fixed* has the same fault beside a change that helps against it. A table for each has a row
for each sample: baseline and broken are equal to the last bit in the first four, and no longer in the
fifth; the line below it says in which layer first. The same series are drawn in one HTML page, for which
plotly is needed (``pip install plotly jinja2``). What is seen here is no threshold for another
model.

    python examples/find_problems.py --output-dir /tmp/problems
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import plotly.express as px
import polars as pl
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  the name that everybody knows it by

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer

HEALTHY_SAMPLES = 4
VARIANTS = ("baseline", "broken", "fixed")


class Net(nn.Module):
    """Eight numbers to one.

    Args:
        fixed: Whether there is the change that helps.
    """

    def __init__(self, *, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.faulty = False
        self.first = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rows of mean 0 and deviation 1 where that is the fix, else what it was given."""
        return F.layer_norm(x, x.shape[-1:]) if self.fixed else x


class Rectified(Net):
    """The fault: a bias falls far below zero. The fix: normalise before the activation."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__(fixed=fixed)
        self.active = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 1)."""
        return self.head(self.active(self.normalised(self.first(x) - (20.0 if self.faulty else 0.0))))


class Saturated(Net):
    """The fault: the input is no longer scaled to about 1. The fix: the model scales it."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__(fixed=fixed)
        self.gate = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 1)."""
        return self.head(self.gate(self.first(self.normalised(x * (255.0 if self.faulty else 1.0)))))


class Growing(Net):
    """The fault: the gain of residual branches grows. The fix: each of them reads normalised input."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__(fixed=fixed)
        self.gain = 0.2
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 1)."""
        self.gain *= 1.5 if self.faulty else 1.0
        x = self.first(x)
        for branch in self.branches:
            x = x + self.gain * branch(self.normalised(x))
        return self.head(x)


class Logarithm(nn.Module):
    """The natural logarithm, a layer of its own so that it has a name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of every entry."""
        return x.log()


class Invalid(Net):
    """The fault: zeros reach a logarithm. The fix: a bound below."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__(fixed=fixed)
        self.active = nn.ReLU()
        self.log = Logarithm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 1)."""
        x = self.active(self.first(x)) + (0.0 if self.faulty else 1.0)
        return self.head(self.log(x.clamp(min=1e-3) if self.fixed else x))


class Detached(Net):
    """The fault: a branch is detached, for a log of its values. The fix: only what is logged is detached."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__(fixed=fixed)
        self.branch = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 1)."""
        side = self.branch(x)
        self.logged = side.detach()
        return self.head(self.first(x) + (self.logged if self.faulty and not self.fixed else side))


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault, and the series that shows it."""

    name: str
    model: type[Net]
    layer: str
    signal: str
    metric: str


PROBLEMS = (
    Problem("inactive ReLUs", Rectified, "active", "output", "zero_fraction"),
    Problem("sigmoid saturation", Saturated, "first", "output_gradient", "std"),
    Problem("growing scale", Growing, "branches.5", "output", "std"),
    Problem("invalid arithmetic", Invalid, "log", "output", "nonfinite_fraction"),
    Problem("detached branch", Detached, "branch", "output_gradient", "std"),
)


def train(problem: Problem, variant: str, folder: str, num_samples: int) -> pl.DataFrame:
    """Trains one variant, every forward of it measured, and returns its history."""
    torch.manual_seed(0)
    model = problem.model(fixed=variant == "fixed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    observer = inject_observer(model, output_dir=folder, sampler=AlwaysSampler(), histograms=())
    try:
        for sample in range(num_samples):
            model.faulty = sample >= HEALTHY_SAMPLES and variant != "baseline"
            x = torch.randn(32, 8, generator=generator)
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        remove_observer(model)
    return open_run(observer.url).history().with_columns(pl.lit(variant).alias("variant")).collect()


def first_difference(history: pl.DataFrame) -> str:
    """Returns where broken is not what baseline is, for the first time."""
    key = ["sample_id", "layer", "call_index", "signal", "metric"]
    baseline, broken = (history.filter(variant=name) for name in ("baseline", "broken"))
    both = broken.join(baseline, on=key, suffix="_baseline")
    differing = both.filter(pl.col("value").ne_missing(pl.col("value_baseline"))).sort("timestamp")
    return "sample {sample_id}, {layer} {signal}".format(**differing.row(0, named=True))


def draw(series: pl.DataFrame, path: Path) -> None:
    """Draws the series of all faults, one below the other; a cross stands where a number is missing."""
    figure = px.line(
        series,
        x="sample_id",
        y="value",
        color="variant",
        facet_col="problem",
        facet_col_wrap=1,
        facet_row_spacing=0.05,
        color_discrete_map={"baseline": "#9ecae9", "broken": "#d62728", "fixed": "#1b7837"},
        markers=True,
        template="plotly_white",
        title="Five faults; each begins at the dashed line",
        height=1400,
    )
    figure.update_traces(line_width=7, selector={"name": "baseline"})
    figure.update_traces(line_dash="dot", selector={"name": "fixed"})
    figure.update_yaxes(matches=None, title="")
    for problem in series["problem"].unique():
        figure.update_annotations(text=problem, selector={"text": f"problem={problem}"})
    figure.add_vline(x=HEALTHY_SAMPLES - 0.5, line_dash="dash", line_color="grey")
    for row, title in enumerate(reversed(series["problem"].unique(maintain_order=True)), 1):
        shown = series.filter(problem=title)
        missing = shown.filter(pl.col("value").is_null())
        figure.add_scatter(
            x=missing["sample_id"],
            y=[shown["value"].min()] * missing.height,
            text=missing["unavailable_reason"],
            mode="markers+text",
            textposition="top center",
            marker={"symbol": "x", "color": "#d62728"},
            showlegend=False,
            row=row,
            col=1,
        )
    figure.write_html(path)


def main() -> None:
    """Trains all variants, prints a table for each fault, and draws them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", default=os.environ.get("OUTPUT_DIR", "runs/problems"))
    parser.add_argument("--samples", type=int, default=10, help="of each variant (default: %(default)s)")
    options = parser.parse_args()
    pl.Config(tbl_rows=-1, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True)

    drawn: list[pl.DataFrame] = []
    for problem in PROBLEMS:
        folder = f"{options.output_dir}/{problem.name.replace(' ', '-')}"
        history = pl.concat(train(problem, one, f"{folder}/{one}", options.samples) for one in VARIANTS)
        series = history.filter(layer=problem.layer, signal=problem.signal, metric=problem.metric)
        title = f"{problem.name}: {problem.layer} {problem.signal} {problem.metric}"
        drawn.append(series.with_columns(pl.lit(title).alias("problem")))
        # A value that is missing has its reason in its place.
        shown = pl.coalesce(pl.col("value").round_sig_figs(4).cast(pl.String), "unavailable_reason")
        print(title)
        print(series.with_columns(shown.alias("shown")).pivot("variant", index="sample_id", values="shown"))
        print(f"the first number that differs between baseline and broken: {first_difference(history)}\n")
    page = Path(options.output_dir, "problems.html")
    draw(pl.concat(drawn), page)
    print(f"plots: {page}")


if __name__ == "__main__":
    main()
