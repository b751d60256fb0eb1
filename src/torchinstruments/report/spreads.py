"""How far apart the ranks of each tensor lie at one forward, relative to the size of the value."""

from dataclasses import dataclass

from torchinstruments.report.document import Record, as_list, as_number, as_record, as_records

__all__ = ["Spread", "spread_metric", "spreads"]

_USUAL_METRIC = "std"
"""Statistic of the table of widest layers; where a run has none, its first one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The widest cell of one series.

    Attributes:
        share: Highest minus lowest value over ranks, divided by the larger magnitude of the two.
        layer: Name in the model.
        series: The series, with the cell: lowest and highest with their ranks, and the forward.
    """

    share: float
    layer: str
    series: Record


def spread_metric(result: Record) -> str:
    """Returns the statistic in which ranks are held beside each other, from ``result.json``."""
    statistics = [str(one) for one in as_list(as_record(result["run"])["statistics"])]
    return _USUAL_METRIC if _USUAL_METRIC in statistics else next(iter(statistics), _USUAL_METRIC)


def spreads(result: Record) -> list[Spread]:
    """Returns the spread of each tensor that two ranks have at one forward, the widest first."""
    metric = spread_metric(result)
    found: list[Spread] = []
    for layer in as_records(result["layers"]):
        for tensor in as_records(layer["tensors"]):
            for statistic in as_records(tensor["statistics"]):
                furthest = as_record(statistic["across_ranks"])["furthest"]
                if statistic["metric"] != metric or furthest is None:
                    continue
                cell = as_record(furthest)
                low, high = (as_number(as_record(cell[name])["value"]) for name in ("lowest", "highest"))
                size = max(abs(low), abs(high))
                series = {**tensor, **cell, "layer": layer["layer"], "metric": metric}
                # Divided first: the difference may be beyond double precision.
                share = high / size - low / size if size else 0.0
                found.append(Spread(share, str(layer["layer"]), series))
    found.sort(key=_place)
    return found


def _place(one: Spread) -> tuple[object, ...]:
    return (
        -one.share,
        one.layer,
        *(str(one.series[name]) for name in ("call_index", "signal", "tensor_path")),
    )
