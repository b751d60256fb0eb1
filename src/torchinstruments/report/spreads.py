"""The tensors whose ranks lie furthest apart at one forward, relative to the size of the value.

A rank that is off can show in the size of a tensor or in where it lies, such as a gradient whose sign is
turned on one rank. So of each layer's signal the ``std`` or the ``mean`` stands here, whichever lies further
apart. A mean is held against the tensor's ``std`` too, or one that is 0 but for rounding would always win.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchinstruments.report.document import Record, as_list, as_number, as_record, as_records

__all__ = ["Spread", "Spreads", "spread_metrics", "spreads"]

_STD = "std"
_METRICS = (_STD, "mean")
"""Statistics that are chosen from; where a run has neither, its first one."""

_USUAL_PATHS = frozenset({"output", "grad_output"})


@dataclass(frozen=True, slots=True)
class Spread:
    """The widest cell of one signal of a layer.

    Attributes:
        share: Highest minus lowest value over ranks, divided by the larger magnitude of the two; of a mean
            by the tensor's largest ``std``, where that is larger.
        layer: Name in the model, and which call of it.
        signal: Signal and moment; which tensor, where there are several or it has a name of its own.
        series: The series, with the cell: lowest and highest with their ranks, and the forward.
    """

    share: float
    layer: str
    signal: str
    series: Record

    def place(self) -> tuple[float, str, str]:
        """Returns what it is ordered by: the widest first, equal ones by their names."""
        return (-self.share, self.layer, self.signal)


@dataclass(frozen=True, slots=True)
class Spreads:
    """What two ranks have at one forward.

    Attributes:
        rows: The widest of each signal of each layer, the widest first.
        metrics: Statistics that were chosen from.
        num_left_out: Tensors of integers or bool: what stands there is no size.
    """

    rows: list[Spread]
    metrics: list[str]
    num_left_out: int

    @property
    def formula(self) -> str:
        """How a spread is computed."""
        text = "spread = (highest - lowest) / larger magnitude of the two"
        if self.metrics != list(_METRICS):
            return text
        return f"{text}, of a mean / the tensor's largest std where that is larger"


def spread_metrics(result: Record) -> list[str]:
    """Returns the statistics in which ranks are held beside each other, from ``result.json``."""
    statistics = [str(one) for one in as_list(as_record(result["run"])["statistics"])]
    return [one for one in _METRICS if one in statistics] or statistics[:1]


def spreads(result: Record) -> Spreads:
    """Returns where ranks lie apart, from ``result.json``."""
    metrics = spread_metrics(result)
    rows: list[Spread] = []
    num_left_out = 0
    for layer in as_records(result["layers"]):
        tensors = [one for one in as_records(layer["tensors"]) if _compared(one, metrics)]
        of_numbers = [one for one in tensors if not _is_of_integers(one)]
        num_left_out += len(tensors) - len(of_numbers)
        rows += _rows(str(layer["layer"]), of_numbers, metrics)
    rows.sort(key=Spread.place)
    return Spreads(rows, metrics, num_left_out)


def _compared(tensor: Record, metrics: list[str]) -> dict[str, Record]:
    """Returns the widest cell of each statistic that two ranks have at one forward, in the given order."""
    held = {str(one["metric"]): as_record(one["across_ranks"]) for one in as_records(tensor["statistics"])}
    return {
        one: as_record(held[one]["furthest"])
        for one in metrics
        if one in held and held[one]["furthest"] is not None
    }


def _is_of_integers(tensor: Record) -> bool:
    """Whether a tensor holds ids, lengths or a mask on every rank."""
    dtypes = [tensor["dtype"]] if tensor["dtype"] is not None else []
    if not dtypes:
        dtypes = list(as_record(as_record(tensor["ranks_differ_in"])["dtype"]))
    return all(str(one).startswith(("int", "uint", "bool")) for one in dtypes)


def _rows(layer: str, tensors: list[Record], metrics: list[str]) -> list[Spread]:
    """Returns the widest row of each signal and moment of a layer; of equal ones the first."""
    widest: dict[tuple[str, str], Spread] = {}
    for tensor in tensors:
        for row in _rows_of(layer, tensor, metrics, _signal_text(tensor, tensors)):
            held = widest.setdefault((str(tensor["signal"]), str(tensor["stage"])), row)
            if row.share > held.share:
                widest[str(tensor["signal"]), str(tensor["stage"])] = row
    return list(widest.values())


def _rows_of(layer: str, tensor: Record, metrics: list[str], signal: str) -> Iterator[Spread]:
    name = layer or "(root)"
    name = f"{name} call {tensor['call_index']}" if tensor["call_index"] else name
    for metric, cell in _compared(tensor, metrics).items():
        std = 0.0 if metric == _STD else _largest_std(tensor)
        series = {**tensor, **cell, "layer": layer, "metric": metric}
        yield Spread(_share(cell, std), name, signal, series)


def _share(cell: Mapping[str, object], std: float) -> float:
    low, high = (as_number(as_record(cell[name])["value"]) for name in ("lowest", "highest"))
    size = max(abs(low), abs(high), std)
    # Divided first: the difference may be beyond double precision.
    return high / size - low / size if size else 0.0


def _largest_std(tensor: Record) -> float:
    """Returns the largest ``std`` that any rank ever had of a tensor, 0 where none has one."""
    for one in as_records(tensor["statistics"]):
        highest = as_record(one["across_ranks"])["highest"]
        if one["metric"] == _STD and highest is not None:
            return as_number(as_record(highest)["value"])
    return 0.0


def _signal_text(tensor: Record, tensors: list[Record]) -> str:
    text, path = f"{tensor['signal']} {tensor['stage']}".rstrip(), str(tensor["tensor_path"])
    others = {one["tensor_path"] for one in tensors if one["signal"] == tensor["signal"]}
    return text if path in _USUAL_PATHS and len(others) == 1 else f"{text} {path}"
