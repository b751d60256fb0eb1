"""The numbers of the interactive pictures, packed for a browser: small, and out of reach of any text in them.

Everything is gzip in base64, so that nothing that came from a run stands in the page as text. Numbers lie
column by column with their bytes apart, which halves them once more.
"""

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchinstruments.report.labels import forward_label, label_text, layer_label, signal_label

if TYPE_CHECKING:
    import polars as pl

__all__ = ["PackedOverview", "embedded", "embedded_json", "pack_overview"]

_FORWARD = ("generation", "attempt", "forward_in_attempt", "forward_index")
_COLUMN = ("layer", "call_index", "tensor_path", "scope")
_CHOICE = ("signal", "stage", "mode", "backward_index")
_DISTANCE_BITS = 12
_SIGNALS = ("output", "output_gradient", "input", "parameter", "parameter_gradient")


@dataclass(frozen=True, slots=True)
class PackedOverview:
    """What a browser needs for the heat map and the series.

    Attributes:
        names: Texts, and where each column of numbers lies, for JSON.
        numbers: The columns, one behind the other.
    """

    names: dict[str, object]
    numbers: bytes


def pack_overview(overview: "pl.DataFrame", layers: Sequence[str]) -> PackedOverview:
    """Packs the rows of ``overview.parquet``.

    Args:
        overview: The rows, or those of some forwards.
        layers: The layers in the order of the model.
    """
    import polars as pl

    order = {layer: place for place, layer in enumerate(layers)}
    forwards = overview.select(*_FORWARD, "all_groups").unique(_FORWARD).sort(_FORWARD)
    places = forwards.with_row_index("forward").select("forward", *_FORWARD)
    columns = overview.select(_COLUMN).unique().rows(named=True)
    columns.sort(key=lambda one: (order.get(one["layer"], len(order)), *(one[name] for name in _COLUMN)))
    choices = overview.select(_CHOICE).unique().rows(named=True)
    choices.sort(key=lambda one: (_SIGNALS.index(one["signal"]), *(one[name] for name in _CHOICE[1:])))
    column_names, of_columns = _numbered([layer_label(one) for one in columns])
    choice_names, of_choices = _numbered([signal_label(one) for one in choices])
    metrics = sorted(overview["metric"].unique().to_list())
    schema = overview.schema
    own = overview.join(places, on=_FORWARD, nulls_equal=True)
    for name, keys, rows, numbers in (
        ("column", _COLUMN, columns, of_columns),
        ("choice", _CHOICE, choices, of_choices),
    ):
        frame = pl.DataFrame(rows, schema={one: schema[one] for one in keys})
        own = own.join(frame.with_columns(pl.Series(name, numbers, pl.Int32)), on=keys)
    own = own.with_columns(pl.col("metric").cast(pl.Enum(metrics)).to_physical()).sort(
        "choice", "metric", "column", "forward"
    )
    names_generation = forwards["generation"].n_unique() > 1
    packer = _Packer()
    for name in ("choice", "metric", "column", "forward", "num_ranks", "num_ranks_without_value"):
        packer.add(name, own[name].cast(pl.Int32).to_numpy())
    for name in ("lowest", "highest"):
        packer.add(f"{name}_rank", own[f"{name}_rank"].to_numpy())
        packer.add(f"{name}_value", _single(own[f"{name}_value"].to_numpy()))
    for name in ("median_of_ranks", "mad_of_ranks"):
        packer.add(name, _single(own[name].fill_null(float("nan")).to_numpy()))
    packer.add("num_shown", own["ranks"].list.len().cast(pl.Int32).to_numpy())
    shown = own.select("median_of_ranks", "ranks", "values", "distances").explode(
        "ranks", "values", "distances"
    )
    shown = shown.filter(pl.col("ranks").is_not_null())
    packer.add("rank", shown["ranks"].cast(pl.Int32).to_numpy())
    packer.add("distance", _coarse(_single(shown["distances"].fill_null(float("nan")).to_numpy())))
    # Of a whole tensor the value is the sum of the median and the distance.
    is_whole = pl.col("median_of_ranks").is_not_null() & pl.col("distances").is_not_null()
    value = shown.select(pl.when(is_whole).then(float("nan")).otherwise(pl.col("values"))).to_series()
    packer.add("value", _single(value.fill_null(float("nan")).to_numpy()))
    names: dict[str, object] = {
        "columns": [label_text(one) for one in column_names],
        "choices": [label_text(one) for one in choice_names],
        "metrics": [label_text(one) for one in metrics],
        "forwards": [
            {
                "label": forward_label(one, names_generation=names_generation),
                "generation": one["generation"],
                "attempt": one["attempt"],
                "forward": one["forward_in_attempt"]
                if one["forward_index"] is None
                else one["forward_index"],
                "all_groups": one["all_groups"],
            }
            for one in forwards.iter_rows(named=True)
        ],
        "arrays": packer.places,
    }
    return PackedOverview(names, packer.data())


def embedded(data: bytes) -> str:
    """Returns bytes as they stand in the page."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def embedded_json(document: object) -> str:
    """Returns a document as it stands in the page."""
    return embedded(json.dumps(document, allow_nan=False).encode())


def _numbered(labels: Sequence[str]) -> tuple[list[str], list[int]]:
    """Returns the distinct labels, and for each label its place among them."""
    known: dict[str, int] = {}
    numbers = [known.setdefault(label, len(known)) for label in labels]
    return list(known), numbers


class _Packer:
    """Columns of four-byte numbers, the first bytes of all of them, then the second ones, and so on."""

    def __init__(self) -> None:
        self.places: dict[str, dict[str, object]] = {}
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, name: str, values: npt.NDArray[np.int32] | npt.NDArray[np.float32]) -> None:
        raw = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        assert raw.dtype.itemsize == 4
        data = raw.view(np.uint8).reshape(-1, 4).T.tobytes()
        kind = "float" if raw.dtype.kind == "f" else "integer"
        self.places[name] = {"start": self._size, "length": len(raw), "kind": kind}
        self._parts.append(data)
        self._size += len(data)

    def data(self) -> bytes:
        return b"".join(self._parts)


def _single(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _coarse(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns the values with as many bits as an eye tells apart: a part in some thousand."""
    fraction, exponent = np.frexp(values)
    scale = np.float32(1 << _DISTANCE_BITS)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ldexp(np.round(fraction * scale) / scale, exponent).astype(np.float32)
