"""The table "widest between ranks" of the merge command: the layers whose ranks lie furthest apart.

A rank that is off can show in the size of a tensor or in where it lies, such as a gradient whose sign is
turned on one rank. So of each layer's signal the ``std`` or the ``mean`` stands here, whichever lies further
apart. A mean is held against the tensor's ``std`` too, or one that is 0 but for rounding would always win.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from torchinstruments.cli.console import count_text, print_table
from torchinstruments.report.document import Record, as_list, as_number, as_record, as_records

__all__ = ["print_widest"]

_NUM_WIDEST = 5
_STD = "std"
_METRICS = (_STD, "mean")
"""Statistics that the table chooses from; where a run has neither, its first one."""

_USUAL_PATHS = frozenset({"output", "grad_output"})


@dataclass(frozen=True, slots=True)
class _Row:
    spread: float
    layer: str
    signal: str
    metric: str
    cell: Record

    def place(self) -> tuple[float, str, str]:
        return (-self.spread, self.layer, self.signal)


def print_widest(result: Record, file: TextIO) -> None:
    """Prints the widest of what two ranks have at one forward, at most five layers' signals.

    Args:
        result: ``result.json`` of a merge.
        file: Where to.
    """
    statistics = [str(one) for one in as_list(as_record(result["run"])["statistics"])]
    metrics = [one for one in _METRICS if one in statistics] or statistics[:1]
    rows: list[_Row] = []
    num_left_out = 0
    for layer in as_records(result["layers"]):
        tensors = [one for one in as_records(layer["tensors"]) if _compared(one, metrics)]
        of_numbers = [one for one in tensors if not _is_of_integers(one)]
        num_left_out += len(tensors) - len(of_numbers)
        rows += _rows(str(layer["layer"]) or "(root)", of_numbers, metrics)
    rows.sort(key=_Row.place)
    left_out = f"left out: {count_text(num_left_out, 'tensor')} of integers or bool" if num_left_out else ""
    if not rows:
        if left_out:
            print(f"\nwidest between ranks: nothing; {left_out}", file=file)
        return
    shown = rows[:_NUM_WIDEST]
    is_said = any(one.cell["differs_in"] for one in shown)
    cells = [
        [one.layer, one.signal, one.metric, *_forward_cells(one.cell), *_extreme_cells(one.cell)]
        + [f"{one.spread:.1%}"]
        + ([str(one.cell["differs_in"])] if is_said else [])
        for one in shown
    ]
    print(
        f"\nwidest between ranks: {' or '.join(metrics)} of each layer's signal, at its widest forward"
        + (f"; {left_out}" if left_out else ""),
        file=file,
    )
    print(_formula(metrics), file=file)
    headings = ["layer", "signal", "metric", "generation", "attempt", "forward"]
    headings += ["lowest", "rank of lowest", "highest", "rank of highest", "spread"]
    print_table([*headings, "ranks differ in"] if is_said else headings, cells, file=file, num_text_columns=3)


def _formula(metrics: list[str]) -> str:
    text = "spread = (highest - lowest) / larger magnitude of the two"
    return (
        f"{text}, of a mean / the tensor's largest std where that is larger"
        if metrics == list(_METRICS)
        else text
    )


def _compared(tensor: Record, metrics: list[str]) -> dict[str, Record]:
    """Returns the widest cell of each statistic that two ranks have at one forward, in the given order."""
    held = {str(one["metric"]): as_record(one["across_ranks"]) for one in as_records(tensor["statistics"])}
    return {
        one: as_record(held[one]["furthest"])
        for one in metrics
        if one in held and held[one]["furthest"] is not None
    }


def _is_of_integers(tensor: Record) -> bool:
    """Whether a tensor holds ids, lengths or a mask on every rank: what stands there is no size."""
    dtypes = [tensor["dtype"]] if tensor["dtype"] is not None else []
    if not dtypes:
        dtypes = list(as_record(as_record(tensor["ranks_differ_in"])["dtype"]))
    return all(str(one).startswith(("int", "uint", "bool")) for one in dtypes)


def _rows(layer: str, tensors: list[Record], metrics: list[str]) -> list[_Row]:
    """Returns the widest row of each signal and moment of a layer; of equal ones the first."""
    widest: dict[tuple[str, str], _Row] = {}
    for tensor in tensors:
        for row in _rows_of(layer, tensor, metrics, _signal_text(tensor, tensors)):
            held = widest.setdefault((str(tensor["signal"]), str(tensor["stage"])), row)
            if row.spread > held.spread:
                widest[str(tensor["signal"]), str(tensor["stage"])] = row
    return list(widest.values())


def _rows_of(layer: str, tensor: Record, metrics: list[str], signal: str) -> Iterator[_Row]:
    name = f"{layer} call {tensor['call_index']}" if tensor["call_index"] else layer
    for metric, cell in _compared(tensor, metrics).items():
        std = 0.0 if metric == _STD else _largest_std(tensor)
        yield _Row(_spread(cell, std), name, signal, metric, cell)


def _spread(cell: Mapping[str, object], std: float) -> float:
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
    """Returns signal and moment, and which tensor, where there are several or it has a name of its own."""
    text, path = f"{tensor['signal']} {tensor['stage']}".rstrip(), str(tensor["tensor_path"])
    others = {one["tensor_path"] for one in tensors if one["signal"] == tensor["signal"]}
    return text if path in _USUAL_PATHS and len(others) == 1 else f"{text} {path}"


def _forward_cells(cell: Record) -> list[str]:
    forward = cell["forward_in_attempt"] if cell["forward_index"] is None else cell["forward_index"]
    return ["-" if one is None else str(one) for one in (cell["generation"], cell["attempt"], forward)]


def _extreme_cells(cell: Record) -> list[str]:
    cells: list[str] = []
    for name in ("lowest", "highest"):
        one = as_record(cell[name])
        cells += [f"{as_number(one['value']):.4g}", str(one["rank"])]
    return cells
