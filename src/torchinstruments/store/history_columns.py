"""From samples to the columns of ``history``, in the order in which a part holds them.

A model that is trained gives the same measurements in the same order again and again, and with them parts
that differ in little more than numbers and times. So what follows from the frames of the deliveries and from
how samples lie in a part is a *layout*, which is kept: order, texts, and whole columns. What is left of a
part's work is to see that a layout fits, and to put the numbers into its order. Where none fits, as in the
first part and in that of an evaluation, one is made.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.records import (
    KeptFrames,
    MeasurementColumns,
    MeasurementFrame,
    Sample,
    Shapes,
    as_columns,
)
from torchinstruments.store import schema
from torchinstruments.store.columns import (
    Columns,
    NumberKind,
    Origin,
    columns_of,
    dictionary,
    numbers_column,
    optional_column,
    origin_columns,
    split_into_groups,
    table_of,
    text_column,
)
from torchinstruments.store.descriptions import Descriptions, Reasons, interned
from torchinstruments.store.row_blocks import LATEST_COLUMNS, RowBlock, finite_or_nan
from torchinstruments.store.sample_grids import KeyColumns, KeyedRows
from torchinstruments.store.schema import KEY_COLUMNS

__all__ = ["HistoryColumns", "history_columns"]

_MAX_LAYOUTS = 4
_MAX_LAYOUT_ROWS = 2 * schema.MAX_ROW_GROUP_ROWS
"""Rows of all layouts that are kept; about 140 bytes each, 400 where none shares its tensor or its frame."""

_Integers = npt.NDArray[np.int64]
_Codes = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float64]

_DESCRIBED_TEXTS = ("layer", "signal", "stage", "tensor_path", "mode", "scope", "replica_key", "execution")
_DESCRIBED_TEXTS += ("dtype", "device")
_NAMES = schema.HISTORY.names
_STAMP = schema.HISTORY.field("timestamp").type
_NO_VALUES, _NO_STAMPS = np.empty(0, np.float64), np.empty(0, np.int64)


class HistoryColumns:
    """Makes the columns of the parts of one process, and keeps what they have in common (writer thread).

    Args:
        origin: Who the rows are of.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._layouts: deque[_Layout] = deque(maxlen=_MAX_LAYOUTS)
        self._frames = KeptFrames()

    def make(self, samples: Sequence[tuple[int, Sample]]) -> Columns:
        """Returns the rows of ``history`` that some deliveries of samples hold.

        Rows are in the order (sample_id, layer in catalog order, call_index, signal, stage, tensor_path,
        backward_index, metric). A row group ends at a sample's end and has at most
        `schema.MAX_ROW_GROUP_ROWS` rows; only a sample that is larger by itself is split. A value is null
        exactly where a reason stands: one that is not finite, or that comes without a reason, is stored as
        null with ``nonfinite_result``.

        Args:
            samples: Stored sample id and delivery; a sample may be here more than once.

        Raises:
            ValueError: A measurement has not as many values or reasons as metrics.
        """
        deliveries = [
            sample.columns or as_columns(sample.measurements, self._frames) for _, sample in samples
        ]
        sample_ids = [sample_id for sample_id, _ in samples]
        layout = self._layout([one.frame for one in deliveries], sample_ids)
        values = np.concatenate([_NO_VALUES, *[one.values for one in deliveries]]).take(layout.place)
        stamps = np.concatenate([_NO_STAMPS, *[one.timestamp_us for one in deliveries]])
        stamps = stamps.take(layout.measurement)
        missing, reasons = _reasons(deliveries, values, layout)

        positions = [sample.position for _, sample in samples]
        numbers = np.array([sample_ids, [position.forward_index for position in positions]], np.int64)
        numbers = numbers.take(layout.delivery, axis=1)
        sample_id, forward_index = columns_of(numbers)
        columns = {
            **layout.columns,
            "sample_id": sample_id,
            "attempt": optional_column(
                np.int64, [position.attempt for position in positions], layout.delivery
            ),
            "forward_in_attempt": layout.kept(
                "forward_in_attempt", np.int32, [position.forward_in_attempt for position in positions]
            ),
            "micro_batch": layout.kept(
                "micro_batch", np.int32, [position.micro_batch for position in positions]
            ),
            "step_provenance": layout.text([position.step_provenance for position in positions]),
            "forward_index": forward_index,
            "timestamp": numbers_column(stamps, _STAMP),
            "grad_sync": layout.text([sample.grad_sync for _, sample in samples]),
            "loss_scale": layout.kept("loss_scale", np.float64, [sample.loss_scale for _, sample in samples]),
            "scale_provenance": layout.text([sample.scale_provenance for _, sample in samples]),
            "shape": layout.shape([one.shapes for one in deliveries]),
            "value": numbers_column(values)
            if missing is None
            else pa.array(values, pa.float64(), mask=missing),
            "unavailable_reason": reasons,
        }
        folded = values if missing is None else np.where(missing, np.nan, values)
        return Columns(
            table_of([columns[name] for name in _NAMES], "history"),
            layout.group_rows,
            layout.keyed(columns, numbers[0], stamps, folded),
        )

    def _layout(self, frames: list[MeasurementFrame], sample_ids: list[int]) -> "_Layout":
        place = {sample_id: rank for rank, sample_id in enumerate(sorted(set(sample_ids)))}
        sample_ranks = [place[sample_id] for sample_id in sample_ids]
        for layout in self._layouts:
            if layout.frames == frames and layout.sample_ranks == sample_ranks:
                return layout
        layout = _Layout(frames, sample_ranks, self._origin)
        self._layouts.appendleft(layout)
        while sum(one.num_rows for one in self._layouts) > _MAX_LAYOUT_ROWS:
            self._layouts.pop()
        return layout


def history_columns(samples: Sequence[tuple[int, Sample]], origin: Origin) -> Columns:
    """Returns the rows of ``history`` that some deliveries of samples hold; see `HistoryColumns.make`."""
    return HistoryColumns(origin).make(samples)


class _Layout:
    """What parts with the same frames in the same samples have in common; an entry a row in its order.

    Args:
        frames: What the measurements of each delivery are of.
        sample_ranks: The place of the sample of each delivery among those of the part.
        origin: Who the rows are of.

    Attributes:
        num_rows: Its rows.
        measurement: Which measurement a row is of.
        place: Where a row's value stands among those of all measurements, one after the other.
        delivery: Which delivery a row is of.
        columns: Columns that are always the same, by name.
        group_rows: Rows of each row group.
        no_reason_column: The column of reasons where none has one.
    """

    def __init__(self, frames: list[MeasurementFrame], sample_ranks: list[int], origin: Origin) -> None:
        self.frames, self.sample_ranks = frames, sample_ranks
        per_delivery = [len(one.described) for one in frames]
        distinct, described_by = interned(
            chain.from_iterable(one.described for one in frames), sum(per_delivery)
        )
        catalog = Descriptions(distinct)
        num_metrics = catalog.num_metrics[described_by]
        delivery_of = np.repeat(np.arange(len(per_delivery)), per_delivery)
        rank_of = np.array(sample_ranks, np.int64)[delivery_of]
        order = np.lexsort((catalog.sort_rank[described_by], rank_of))

        first_value = np.cumsum(num_metrics) - num_metrics
        lengths = num_metrics[order]
        self.measurement = np.repeat(order, lengths)
        description = described_by[self.measurement]
        slot = np.arange(len(self.measurement)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slot = catalog.first_metric[description] + slot
        self.num_rows = len(self.measurement)
        self.place = first_value[self.measurement] + catalog.metric_order[slot]
        self.delivery = delivery_of[self.measurement]
        self.group_rows = split_into_groups(rank_of[self.measurement])

        of_origin = zip(schema.HISTORY.names, origin_columns(origin, self.num_rows), strict=False)
        self.columns: dict[str, pa.Array] = {
            **dict(of_origin),
            **{name: catalog.text(name, description) for name in _DESCRIBED_TEXTS},
            "call_index": pa.array(catalog.call_index[description]),
            "backward_index": pa.array(catalog.backward_index[description]),
            "grad_enabled": pa.array(catalog.grad_enabled[description]),
            "metric": dictionary(catalog.metric_codes[slot], catalog.metric_names),
        }
        self.no_reason_column = dictionary(np.zeros(self.num_rows, np.int32), [""])
        self._kept: dict[str, tuple[str | Sequence[float | None], pa.Array]] = {}
        self._keys: KeyColumns | None = None
        self._scales: tuple[pa.Array, _Floats] | None = None
        self._texts: dict[str, pa.Array] = {}
        self._shapes: list[Shapes] | None = None
        self._shape_column = dictionary(np.zeros(0, np.int32), [])

    def kept(self, name: str, kind: NumberKind, values: Sequence[float | None]) -> pa.Array:
        """Returns what each delivery has as a column; the same as the last time where they have the same."""
        # As text, since there are two zeros of fractions, and what is not a number equals nothing.
        key = repr(values) if kind is np.float64 else values
        kept = self._kept.get(name)
        if kept is None or kept[0] != key:
            kept = self._kept[name] = (key, optional_column(kind, values, self.delivery))
        return kept[1]

    def keyed(
        self, columns: Mapping[str, pa.Array], ids: _Integers, stamps: _Integers, values: _Floats
    ) -> KeyedRows:
        """Returns the rows of a part as they are folded.

        Args:
            columns: All of it by name.
            ids: Sample of each row.
            stamps: When each was observed.
            values: NaN where one is missing.
        """
        if self._keys is None:
            batch = pa.RecordBatch.from_arrays([columns[name] for name in KEY_COLUMNS], names=KEY_COLUMNS)
            self._keys = KeyColumns(batch, same_samples=True)
        if self._scales is None or self._scales[0] is not columns["loss_scale"]:
            self._scales = (columns["loss_scale"], finite_or_nan(columns["loss_scale"]))
        block = RowBlock(
            series=_NO_STAMPS,
            sample_id=ids,
            timestamp_us=stamps,
            value=values,
            loss_scale=self._scales[1],
            reason=columns["unavailable_reason"],
            latest={name: columns[name] for name in LATEST_COLUMNS},
        )
        return KeyedRows(self._keys, block)

    def text(self, values: Sequence[str]) -> pa.Array:
        """Returns what each delivery has as a column; kept where it is the same code in all of them."""
        if not values or values.count(values[0]) < len(values):
            return text_column(values, self.delivery)
        column = self._texts.get(values[0])
        if column is None:
            column = self._texts[values[0]] = text_column(values, self.delivery)
        return column

    def shape(self, shapes: list[Shapes]) -> pa.Array:
        """Returns the column of shapes, those of each delivery given; made anew only where one is another."""
        if shapes != self._shapes:
            distinct, codes = interned(chain.from_iterable(shapes), sum(map(len, shapes)))
            texts = ["x".join(map(str, shape)) for shape in distinct]
            self._shapes, self._shape_column = shapes, dictionary(codes[self.measurement], texts)
        return self._shape_column


def _reasons(
    deliveries: Sequence[MeasurementColumns], values: _Floats, layout: _Layout
) -> tuple[npt.NDArray[np.bool_] | None, pa.Array]:
    """Returns where values are missing, None for nowhere, and the column that says why."""
    finite = np.isfinite(values)
    if bool(finite.all()) and not any(one.reasons for one in deliveries):
        return None, layout.no_reason_column
    given: dict[int, str] = {}
    start = 0
    for one in deliveries:
        given |= {start + place: reason for place, reason in one.reasons.items()}
        start += one.frame.num_scalars
    reasons = Reasons(dict(sorted(given.items())), start)
    reason = reasons.codes[layout.place]
    reason = np.where((reason == reasons.none) & ~finite, reasons.nonfinite, reason)
    return reason != reasons.none, dictionary(reason, reasons.texts)
