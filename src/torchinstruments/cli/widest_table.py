"""The table "widest between ranks" of the merge command: the layers whose ranks lie furthest apart."""

from typing import TextIO

from torchinstruments.cli.console import count_text, print_table
from torchinstruments.report.document import Record, as_number, as_record
from torchinstruments.report.spreads import spreads

__all__ = ["print_widest"]

_NUM_WIDEST = 5


def print_widest(result: Record, file: TextIO) -> None:
    """Prints the widest of what two ranks have at one forward, at most five layers' signals.

    Args:
        result: ``result.json`` of a merge.
        file: Where to.
    """
    found = spreads(result)
    number = found.num_left_out
    left_out = f"left out: {count_text(number, 'tensor')} of integers or bool" if number else ""
    if not found.rows:
        if left_out:
            print(f"\nwidest between ranks: nothing; {left_out}", file=file)
        return
    shown = found.rows[:_NUM_WIDEST]
    is_said = any(one.series["differs_in"] for one in shown)
    cells = [
        [one.layer, one.signal, str(one.series["metric"])]
        + [*_forward_cells(one.series), *_extreme_cells(one.series), f"{one.share:.1%}"]
        + ([str(one.series["differs_in"])] if is_said else [])
        for one in shown
    ]
    print(
        f"\nwidest between ranks: {' or '.join(found.metrics)} of each layer's signal, at its widest forward"
        + (f"; {left_out}" if left_out else ""),
        file=file,
    )
    print(found.formula, file=file)
    headings = ["layer", "signal", "metric", "generation", "attempt", "forward"]
    headings += ["lowest", "rank of lowest", "highest", "rank of highest", "spread"]
    print_table([*headings, "ranks differ in"] if is_said else headings, cells, file=file, num_text_columns=3)


def _forward_cells(cell: Record) -> list[str]:
    forward = cell["forward_in_attempt"] if cell["forward_index"] is None else cell["forward_index"]
    return ["-" if one is None else str(one) for one in (cell["generation"], cell["attempt"], forward)]


def _extreme_cells(cell: Record) -> list[str]:
    cells: list[str] = []
    for name in ("lowest", "highest"):
        one = as_record(cell[name])
        cells += [f"{as_number(one['value']):.4g}", str(one["rank"])]
    return cells
