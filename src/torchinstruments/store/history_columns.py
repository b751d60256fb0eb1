"""From samples to the columns of ``history``, in the order in which a part holds them.

A model that is trained gives the same measurements in the same order again and again, and with them parts
that differ in little more than numbers and times. So what follows from the descriptions of the measurements
and from how samples lie in a part is a *frame*, which is kept: order, texts, and whole columns. What is left
of a part's work is to see that a frame fits, and to put the numbers into its order. Where none fits, as in
the first part and in that of an evaluation, one is made.
"""

from collections import deque
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.records import Measurement, Sample
from torchinstruments.store import schema
from torchinstruments.store.columns import (
    Columns,
    Origin,
    dictionary,
    origin_columns,
    split_into_groups,
    text_column,
)
from torchinstruments.store.descriptions import Descriptions, Reasons, described, interned

__all__ = ["HistoryColumns", "history_columns"]

_MAX_FRAMES = 4
_MAX_FRAME_ROWS = 2 * schema.MAX_ROW_GROUP_ROWS
"""Rows of all frames that are kept; about 120 bytes each."""

_Integers = npt.NDArray[np.int64]
_Codes = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float64]

_REASONS, _VALUES = attrgetter("reasons"), attrgetter("values")
_SHAPE, _STAMP = attrgetter("shape"), attrgetter("timestamp_us")
_DESCRIBED_TEXTS = ("layer", "signal", "stage", "tensor_path", "mode", "scope", "replica_key", "execution")
_DESCRIBED_TEXTS += ("dtype", "device")
_SCHEMA = schema.in_memory(schema.HISTORY)


class HistoryColumns:
    """Makes the columns of the parts of one process, and keeps what they have in common (writer thread).

    Args:
        origin: Who the rows are of.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._frames: deque[_Frame] = deque(maxlen=_MAX_FRAMES)

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
        measured = [measurement for _, sample in samples for measurement in sample.measurements]
        sample_ids = np.fromiter((sample_id for sample_id, _ in samples), np.int64, len(samples))
        frame = self._frame(measured, [len(sample.measurements) for _, sample in samples], sample_ids)
        if [*map(len, map(_VALUES, measured))] != frame.lengths:
            raise _uneven()
        values = _flatten_values(measured)[frame.place]
        missing, reasons = _reasons(measured, values, frame)

        delivery = frame.delivery
        positions = [sample.position for _, sample in samples]
        stamps = np.fromiter(map(_STAMP, measured), np.int64, len(measured))[frame.measurement]
        varying = {
            "sample_id": pa.array(sample_ids[delivery]),
            "attempt": _optional(pa.int64(), [position.attempt for position in positions], frame),
            "forward_in_attempt": pa.array(
                np.array([position.forward_in_attempt for position in positions], np.int32)[delivery]
            ),
            "micro_batch": _optional(pa.int32(), [position.micro_batch for position in positions], frame),
            "step_provenance": text_column([position.step_provenance for position in positions], delivery),
            "forward_index": pa.array(
                np.array([position.forward_index for position in positions], np.int64)[delivery]
            ),
            "timestamp": pa.array(stamps).cast(schema.HISTORY.field("timestamp").type),
            "grad_sync": text_column([sample.grad_sync for _, sample in samples], delivery),
            "loss_scale": _optional(pa.float64(), [sample.loss_scale for _, sample in samples], frame),
            "scale_provenance": text_column([sample.scale_provenance for _, sample in samples], delivery),
            "shape": frame.shape(measured),
            "value": pa.array(values, pa.float64(), mask=missing),
            "unavailable_reason": reasons,
        }
        columns = {**frame.columns, **varying}
        table = pa.Table.from_arrays([columns[name] for name in _SCHEMA.names], schema=_SCHEMA)
        return Columns(table, frame.group_rows)

    def _frame(
        self, measured: Sequence[Measurement], per_delivery: list[int], sample_ids: _Integers
    ) -> "_Frame":
        keys = [*map(described, measured)]
        ranks = np.unique(sample_ids, return_inverse=True)[1]
        arrangement = (per_delivery, ranks.tolist())
        for frame in self._frames:
            if frame.arrangement == arrangement and frame.keys == keys:
                return frame
        frame = _Frame(keys, arrangement, measured, self._origin)
        self._frames.appendleft(frame)
        while sum(one.num_rows for one in self._frames) > _MAX_FRAME_ROWS:
            self._frames.pop()
        return frame


def history_columns(samples: Sequence[tuple[int, Sample]], origin: Origin) -> Columns:
    """Returns the rows of ``history`` that some deliveries of samples hold; see `HistoryColumns.make`."""
    return HistoryColumns(origin).make(samples)


class _Frame:
    """What parts with the same measurements in the same samples have in common; an entry a row in its order.

    Args:
        keys: Description of each measurement.
        arrangement: Measurements of each delivery, and the place of its sample among those of the part.
        measured: The measurements.
        origin: Who the rows are of.

    Attributes:
        num_rows: Its rows.
        lengths: Rows of each measurement.
        measurement: Which measurement a row is of.
        first_value: Where the values of each measurement begin among all of them.
        place: Where a row's value and reason stand among those of all measurements, one after the other.
        delivery: Which delivery a row is of.
        delivery_array: The same.
        columns: Columns that are always the same, by name.
        group_rows: Rows of each row group.
        no_reasons: The reasons of each measurement where none has one.
        no_reason_column: The column of reasons where none has one.
    """

    def __init__(
        self,
        keys: list[tuple[Any, ...]],
        arrangement: tuple[list[int], list[int]],
        measured: Sequence[Measurement],
        origin: Origin,
    ) -> None:
        self.keys, self.arrangement = keys, arrangement
        distinct, described_by = interned(keys, len(keys))
        catalog = Descriptions(distinct)
        num_metrics = catalog.num_metrics[described_by]
        per_delivery, sample_ranks = arrangement
        delivery_of = np.repeat(np.arange(len(per_delivery)), per_delivery)
        rank_of = np.array(sample_ranks, np.int64)[delivery_of]
        order = np.lexsort((catalog.sort_rank[described_by], rank_of))

        self.first_value = np.cumsum(num_metrics) - num_metrics
        lengths = num_metrics[order]
        self.measurement = np.repeat(order, lengths)
        description = described_by[self.measurement]
        slot = np.arange(len(self.measurement)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slot = catalog.first_metric[description] + slot
        self.num_rows = len(self.measurement)
        self.lengths: list[int] = num_metrics.tolist()
        self.place = self.first_value[self.measurement] + catalog.metric_order[slot]
        self.delivery = delivery_of[self.measurement]
        self.delivery_array = pa.array(self.delivery)
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
        empty = {length: ("",) * length for length in set(self.lengths)}
        self.no_reasons = [empty[length] for length in self.lengths]
        self.no_reason_column = dictionary(np.zeros(self.num_rows, np.int32), [""])
        self._shapes: list[tuple[int, ...]] = []
        self._shape_column = dictionary(np.zeros(0, np.int32), [])
        self.shape(measured)

    def shape(self, measured: Sequence[Measurement]) -> pa.Array:
        """Returns the column of shapes, which is made anew only where one is another."""
        shapes = [*map(_SHAPE, measured)]
        if shapes != self._shapes:
            distinct, codes = interned(shapes, len(shapes))
            texts = ["x".join(map(str, shape)) for shape in distinct]
            self._shapes, self._shape_column = shapes, dictionary(codes[self.measurement], texts)
        return self._shape_column


def _reasons(
    measured: Sequence[Measurement], values: _Floats, frame: _Frame
) -> tuple[npt.NDArray[np.bool_] | None, pa.Array]:
    """Returns where values are missing, None for nowhere, and the column that says why."""
    given = [*map(_REASONS, measured)]
    finite = np.isfinite(values)
    if given == frame.no_reasons and bool(finite.all()):
        return None, frame.no_reason_column
    patterns, pattern_of = interned(given, len(given))
    reasons = Reasons(patterns)
    if reasons.lengths[pattern_of].tolist() != frame.lengths:
        raise _uneven()
    first = (reasons.first[pattern_of] - frame.first_value)[frame.measurement]
    reason = reasons.codes[first + frame.place]
    reason = np.where((reason == reasons.none) & ~finite, reasons.nonfinite, reason)
    return reason != reasons.none, dictionary(reason, reasons.texts)


def _flatten_values(measured: Sequence[Measurement]) -> _Floats:
    """Returns all values in the order of the measurements; NaN where one is missing."""
    try:
        return np.fromiter(chain.from_iterable(map(_VALUES, measured)), np.float64)
    except TypeError:  # None among them
        return np.array([*chain.from_iterable(map(_VALUES, measured))], np.float64)


def _optional(kind: pa.DataType, values: Sequence[float | None], frame: _Frame) -> pa.Array:
    """Returns what each delivery has as a column, with nulls where that is None."""
    return pa.array(values, kind).take(frame.delivery_array)


def _uneven() -> ValueError:
    return ValueError("a measurement needs one value and one reason for each of its metrics")
