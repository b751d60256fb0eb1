"""The tables among the facts of a page: in which tensors ranks are apart, and which rank is furthest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchinstruments.report.document import as_record, as_records
from torchinstruments.report.labels import forward_label, layer_label
from torchinstruments.report.opening import row_choice
from torchinstruments.report.spreads import spreads
from torchinstruments.report.texts import shown_text

__all__ = ["FactTable", "furthest_table", "spread_table"]

_MAX_SPREADS = 10

_WITHOUT_MADS = {"mad_is_zero": "none, half hold the same", "overflow": "none, too large"}


@dataclass(frozen=True, slots=True)
class FactTable:
    """A table among the facts.

    Attributes:
        cells: Texts of each row.
        choices: What a click on each row chooses.
    """

    cells: list[list[str]]
    choices: list[dict[str, object]]

    def add(self, texts: Sequence[str], choice: dict[str, object]) -> None:
        """Takes a row."""
        self.cells.append([shown_text(text, 200) for text in texts])
        self.choices.append(choice)


def furthest_table(result: Mapping[str, object], *, names_generation: bool) -> FactTable:
    """Returns the series in which a rank is furthest from the others."""
    found = FactTable([], [])
    for one in as_records(as_record(result["comparison"])["widest"]):
        mads = one["mads"]
        texts = [
            layer_label(one),
            f"{one['signal']} {one['stage']}".rstrip(),
            str(one["metric"]),
            str(one["rank"]),
            f"{one['value']:.6g}",
            f"{one['median_of_ranks']:.6g}",
            _WITHOUT_MADS[str(one["unavailable_reason"])] if mads is None else f"{mads:.3g}",
            forward_label(one, names_generation=names_generation),
        ]
        found.add(texts, row_choice(one, names_generation=names_generation) | {"rank": one["rank"]})
    return found


def spread_table(result: Mapping[str, object], *, names_generation: bool) -> FactTable:
    """Returns the tensors whose ranks lie furthest apart."""
    found = FactTable([], [])
    for spread in spreads(result).rows[:_MAX_SPREADS]:
        one = spread.series
        low, high = as_record(one["lowest"]), as_record(one["highest"])
        texts = [
            spread.layer,
            spread.signal,
            str(one["metric"]),
            f"{low['value']:.4g}",
            str(low["rank"]),
            f"{high['value']:.4g}",
            str(high["rank"]),
            f"{spread.share:.1%}",
            forward_label(one, names_generation=names_generation),
            str(one["differs_in"]),
        ]
        found.add(texts, row_choice(one, names_generation=names_generation) | {"rank": None})
    return found
