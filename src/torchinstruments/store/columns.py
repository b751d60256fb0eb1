"""From samples and attempts to Arrow columns, in the order in which a part holds them.

Columns are built at once, never row by row. All measurements of a tensor share a *description* (layer, call,
signal, path, shape, metric names, ...), which is looked up once a measurement; everything else is a gather
by NumPy. Text columns are dictionaries in memory, so that the encoder need not hash a text a row; a file that
is written from them with ``store_schema=False`` reads back as plain text, exactly as `schema` declares.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.ma
import numpy.typing as npt
import pyarrow as pa

# pyarrow imports both at the first column that it builds, in the writer thread and perhaps at the exit. There
# their generated code would make Python forget that an interrupt is what ends the process.
import pyarrow.compute

from torchinstruments.records import (
    AttemptRecord,
    FingerprintRecord,
    Measurement,
    Position,
    Reason,
    Sample,
    SampleState,
)
from torchinstruments.store import schema
from torchinstruments.store.texts import encodable_texts

__all__ = [
    "Columns",
    "Origin",
    "SampleRow",
    "fingerprints_columns",
    "history_columns",
    "samples_columns",
    "split_into_groups",
    "steps_columns",
]

_Key = TypeVar("_Key")
_Integers = npt.NDArray[np.int64]
_Codes = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float64]
_Booleans = npt.NDArray[np.bool_]

_SORT_FIELDS = ("layer_index", "call_index", "signal", "stage", "tensor_path")
_DESCRIPTION_FIELDS = (
    *_SORT_FIELDS,
    "layer",
    "mode",
    "grad_enabled",
    "scope",
    "replica_key",
    "execution",
    "shape",
    "dtype",
    "device",
    "metrics",
)
_TEXT_FIELDS = ("signal", "stage", "tensor_path", "layer", "mode", "scope", "replica_key", "execution")
_TEXT_FIELDS += ("dtype", "device")
_DESCRIPTION = attrgetter(*_DESCRIPTION_FIELDS)
_REASONS, _VALUES = attrgetter("reasons"), attrgetter("values")
_BACKWARD, _STAMP = attrgetter("backward_index"), attrgetter("timestamp_us")


@dataclass(frozen=True, slots=True)
class Origin:
    """Who the rows of a process are of; the same in all of them.

    Attributes:
        generation: Number of the generation.
        rank: Rank in it.
        process: 8 hex digits.
    """

    generation: int
    rank: int
    process: str


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of ``samples``.

    Attributes:
        sample_id: As stored: the generation's first id and the ordinal in the process.
        position: Where its forward stands.
        started_at_us: When its forward began: microseconds since the epoch, UTC.
        state: How far it has come.
        num_backwards: Traversals of its graph that were observed.
        collection_forward_s: Seconds of the training thread for its forward.
        collection_backward_s: Seconds of the training thread for its backwards, and for what steps found.
        rows: Rows of ``history`` that it gave.
        errors: Errors while it was collected.
        modules_expected: Selected modules.
        modules_fired: Those that were called.
    """

    sample_id: int
    position: Position
    started_at_us: int
    state: SampleState
    num_backwards: int
    collection_forward_s: float
    collection_backward_s: float
    rows: int
    errors: int
    modules_expected: int
    modules_fired: int


@dataclass(frozen=True, slots=True)
class Columns:
    """A table in the inner order of a part, and where its row groups end.

    Attributes:
        table: The rows; text columns are dictionaries.
        group_rows: Rows of each row group, in order.
    """

    table: pa.Table
    group_rows: tuple[int, ...]


def history_columns(samples: Sequence[tuple[int, Sample]], origin: Origin) -> Columns:
    """Returns the rows of ``history`` that some deliveries of samples hold (writer thread).

    Rows are in the order (sample_id, layer in catalog order, call_index, signal, stage, tensor_path,
    backward_index, metric). A row group ends at a sample's end and has at most `schema.MAX_ROW_GROUP_ROWS`
    rows; only a sample that is larger by itself is split. A value is null exactly where a reason stands: one
    that is not finite, or that comes without a reason, is stored as null with ``nonfinite_result``.

    Args:
        samples: Stored sample id and delivery; a sample may be here more than once.
        origin: Who the rows are of.

    Raises:
        ValueError: A measurement has not as many values or reasons as metrics.
    """
    measured = [measurement for _, sample in samples for measurement in sample.measurements]
    descriptions, described = _intern(map(_DESCRIPTION, measured), len(measured))
    patterns, pattern_of = _intern(map(_REASONS, measured), len(measured))
    catalog, reasons = _Descriptions(descriptions), _Reasons(patterns)
    num_metrics = catalog.num_metrics[described]
    observed = _flatten_values(measured)
    if not num_metrics.sum() == len(observed) == reasons.lengths[pattern_of].sum():
        raise ValueError("a measurement needs one value and one reason for each of its metrics")

    per_delivery = np.fromiter((len(sample.measurements) for _, sample in samples), np.int64, len(samples))
    delivery_of = np.repeat(np.arange(len(samples)), per_delivery)
    sample_ids = np.fromiter((sample_id for sample_id, _ in samples), np.int64, len(samples))
    backward = np.fromiter(map(_BACKWARD, measured), np.int32, len(measured))
    order = np.lexsort((backward, catalog.sort_rank[described], sample_ids[delivery_of]))

    # From here on one entry a row: which measurement, and which of its metrics, the row is of.
    first_value = np.cumsum(num_metrics) - num_metrics
    of = np.repeat(order, num_metrics[order])
    slot = np.arange(len(of)) - np.repeat(
        np.cumsum(num_metrics[order]) - num_metrics[order], num_metrics[order]
    )
    description = described[of]
    slot = catalog.first_metric[description] + slot
    metric_slot = catalog.metric_order[slot]
    delivery = delivery_of[of]

    values = observed[first_value[of] + metric_slot]
    reason = reasons.codes[reasons.first[pattern_of[of]] + metric_slot]
    finite = np.isfinite(values)
    reason = np.where((reason == reasons.none) & ~finite, reasons.nonfinite, reason)
    missing = reason != reasons.none

    positions = [sample.position for _, sample in samples]
    stamps = np.fromiter(map(_STAMP, measured), np.int64, len(measured))
    table = pa.Table.from_arrays(
        [
            *_origin_columns(origin, len(of)),
            pa.array(sample_ids[delivery]),
            _optional(pa.int64(), [position.attempt for position in positions], delivery),
            pa.array(np.array([position.forward_in_attempt for position in positions], np.int32)[delivery]),
            _optional(pa.int32(), [position.micro_batch for position in positions], delivery),
            _text([position.step_provenance for position in positions], delivery),
            pa.array(_integers([position.forward_index for position in positions])[delivery]),
            pa.array(stamps[of]).cast(schema.HISTORY.field("timestamp").type),
            catalog.text("layer", description),
            pa.array(catalog.call_index[description]),
            catalog.text("signal", description),
            catalog.text("stage", description),
            catalog.text("tensor_path", description),
            pa.array(backward[of]),
            catalog.text("mode", description),
            pa.array(catalog.grad_enabled[description]),
            _text([sample.grad_sync for _, sample in samples], delivery),
            _optional(pa.float64(), [sample.loss_scale for _, sample in samples], delivery),
            _text([sample.scale_provenance for _, sample in samples], delivery),
            catalog.text("scope", description),
            catalog.text("replica_key", description),
            catalog.text("execution", description),
            catalog.text("shape", description),
            catalog.text("dtype", description),
            catalog.text("device", description),
            _dictionary(catalog.metric_codes[slot], catalog.metric_names),
            pa.array(values, pa.float64(), mask=missing),
            _dictionary(reason, reasons.texts),
        ],
        schema=schema.in_memory(schema.HISTORY),
    )
    return Columns(table, split_into_groups(sample_ids[delivery]))


def samples_columns(rows: Sequence[SampleRow], origin: Origin) -> Columns:
    """Returns rows of ``samples`` by sample id (writer thread)."""
    ordered = sorted(rows, key=attrgetter("sample_id"))
    everyone = np.arange(len(ordered))
    positions = [row.position for row in ordered]
    table = pa.Table.from_arrays(
        [
            *_origin_columns(origin, len(ordered)),
            pa.array([row.sample_id for row in ordered], pa.int64()),
            pa.array([position.attempt for position in positions], pa.int64()),
            pa.array([position.forward_in_attempt for position in positions], pa.int32()),
            pa.array([position.micro_batch for position in positions], pa.int32()),
            pa.array([position.forward_index for position in positions], pa.int64()),
            _stamps([row.started_at_us for row in ordered]),
            _text([row.state for row in ordered], everyone),
            pa.array([row.num_backwards for row in ordered], pa.int32()),
            pa.array([row.collection_forward_s for row in ordered], pa.float64()),
            pa.array([row.collection_backward_s for row in ordered], pa.float64()),
            pa.array([row.rows for row in ordered], pa.int64()),
            pa.array([row.errors for row in ordered], pa.int32()),
            pa.array([row.modules_expected for row in ordered], pa.int32()),
            pa.array([row.modules_fired for row in ordered], pa.int32()),
        ],
        schema=schema.in_memory(schema.SAMPLES),
    )
    return Columns(table, _even_groups(len(ordered)))


def steps_columns(records: Sequence[AttemptRecord], origin: Origin) -> Columns:
    """Returns rows of ``steps`` by attempt, optimizer and its own count (writer thread)."""
    ordered = sorted(records, key=attrgetter("attempt", "optimizer", "optimizer_attempt"))
    everyone = np.arange(len(ordered))

    def column(name: str) -> pa.Array:
        return pa.array([getattr(record, name) for record in ordered], schema.STEPS.field(name).type)

    def text(name: str) -> pa.Array:
        return _text([getattr(record, name) for record in ordered], everyone)

    table = pa.Table.from_arrays(
        [
            *_origin_columns(origin, len(ordered)),
            *(column(name) for name in ("attempt", "optimizer", "optimizer_attempt", "global_step")),
            *(column(name) for name in ("first_forward_index", "last_forward_index", "micro_batches")),
            *(column(name) for name in ("micro_batches_declared", "micro_batches_synced")),
            *(text(name) for name in ("last_micro_batch_sync", "outcome", "evidence")),
            *(column(name) for name in ("found_inf", "scale_before", "scale_after", "lr")),
            _stamps([record.started_at_us for record in ordered]),
            *(column(name) for name in ("gap_s", "forward_s", "backward_s", "optimizer_s")),
            text("clock"),
        ],
        schema=schema.in_memory(schema.STEPS),
    )
    return Columns(table, _even_groups(len(ordered)))


def fingerprints_columns(records: Sequence[FingerprintRecord], origin: Origin) -> Columns:
    """Returns rows of ``fingerprints`` by attempt, and in an attempt as they came (writer thread)."""
    ordered = sorted(records, key=attrgetter("attempt"))
    everyone = np.arange(len(ordered))
    attempts = _integers(record.attempt for record in ordered)
    texts = ("tensor", "kind", "replica_key")
    table = pa.Table.from_arrays(
        [
            *_origin_columns(origin, len(ordered)),
            pa.array(attempts),
            *(_text([getattr(record, name) for record in ordered], everyone) for name in texts),
            _text(["x".join(map(str, record.shape)) for record in ordered], everyone),
            _text([record.dtype for record in ordered], everyone),
            pa.array([record.digest for record in ordered], pa.uint64()),
        ],
        schema=schema.in_memory(schema.FINGERPRINTS),
    )
    return Columns(table, split_into_groups(attempts))


class _Descriptions:
    """The distinct descriptions of a table, as arrays to gather from.

    Attributes:
        sort_rank: Rank by (layer_index, call_index, signal, stage, tensor_path); equal where those are.
        num_metrics: Metrics of each description.
        first_metric: Where those of each begin in `metric_order` and `metric_codes`.
        metric_order: For each description its metrics' positions, in the order of their names.
        metric_codes: For each description its metrics in that order, as indices into `metric_names`.
        metric_names: Distinct names.
        call_index: Call index of each description.
        grad_enabled: Whether gradients were enabled, of each description.
    """

    def __init__(self, keys: Sequence[tuple[Any, ...]]) -> None:
        columns = zip(*keys, strict=True) if keys else ((),) * len(_DESCRIPTION_FIELDS)
        self._fields = dict(zip(_DESCRIPTION_FIELDS, columns, strict=True))
        for name in _TEXT_FIELDS:
            self._fields[name] = encodable_texts(self._fields[name])
        self._fields["shape"] = tuple(["x".join(map(str, shape)) for shape in self._fields["shape"]])
        sort_keys = list(zip(*[self._fields[name] for name in _SORT_FIELDS], strict=True))
        ranks = {key: rank for rank, key in enumerate(sorted(set(sort_keys)))}
        self.sort_rank = _integers([ranks[key] for key in sort_keys])
        self.call_index = np.array(self._fields["call_index"], np.int32)
        self.grad_enabled = np.array(self._fields["grad_enabled"], np.bool_)
        given: tuple[tuple[str, ...], ...] = self._fields["metrics"]
        cleaned = {names: encodable_texts(names) for names in set(given)}
        metrics = tuple([cleaned[names] for names in given])
        self.num_metrics = _integers([len(names) for names in metrics])
        self.first_metric = np.cumsum(self.num_metrics) - self.num_metrics
        orders = {names: sorted(range(len(names)), key=names.__getitem__) for names in set(metrics)}
        self.metric_order = _integers(chain.from_iterable(orders[names] for names in metrics))
        codes = {name: code for code, name in enumerate(sorted({n for names in orders for n in names}))}
        self.metric_names = list(codes)
        self.metric_codes = _integers(
            codes[names[slot]] for names in metrics for slot in orders[names]
        ).astype(np.int32)

    def text(self, name: str, descriptions: _Codes) -> pa.Array:
        """Returns one text field of the given descriptions as a dictionary."""
        return _text(self._fields[name], descriptions)


class _Reasons:
    """The distinct tuples of reasons of a table, as arrays to gather from.

    Attributes:
        texts: Distinct reasons.
        codes: For each tuple its reasons, as indices into `texts`.
        lengths: How many each tuple has.
        first: Where those of each tuple begin in `codes`.
        none: Index of the empty text.
        nonfinite: Index of the reason for a value that came without one.
    """

    def __init__(self, patterns: Sequence[tuple[str, ...]]) -> None:
        codes: dict[str, int] = {"": 0, Reason.NONFINITE_RESULT.value: 1}
        self.none, self.nonfinite = 0, 1
        self.codes = _integers(
            codes.setdefault(reason, len(codes))
            for pattern in patterns
            for reason in encodable_texts(pattern)
        ).astype(np.int32)
        self.lengths = _integers([len(pattern) for pattern in patterns])
        self.first = np.cumsum(self.lengths) - self.lengths
        self.texts = list(codes)


def _intern(keys: Iterable[_Key], count: int) -> tuple[list[_Key], _Codes]:
    """Returns the distinct keys in the order of first sight, and for each key its place among them."""
    codes: dict[_Key, int] = {}
    indices = np.fromiter((codes.setdefault(key, len(codes)) for key in keys), np.int32, count)
    return list(codes), indices


def _flatten_values(measured: Sequence[Measurement]) -> _Floats:
    """Returns all values in the order of the measurements; NaN where one is missing."""
    try:
        return np.fromiter(chain.from_iterable(map(_VALUES, measured)), np.float64)
    except TypeError:  # None among them
        return np.array([*chain.from_iterable(map(_VALUES, measured))], np.float64)


def _origin_columns(origin: Origin, count: int) -> list[pa.Array]:
    return [
        pa.array(np.full(count, origin.generation, np.int32)),
        pa.array(np.full(count, origin.rank, np.int32)),
        _dictionary(np.zeros(count, np.int32), [origin.process]),
    ]


def _integers(values: Iterable[int]) -> _Integers:
    return np.fromiter(values, np.int64)


def _stamps(microseconds: Sequence[int]) -> pa.Array:
    return pa.array(microseconds, pa.timestamp("us", tz="UTC"))


def _optional(kind: pa.DataType, values: Sequence[float | None], rows: _Integers) -> pa.Array:
    """Returns the values at the given indices, with nulls where they are None."""
    return pa.array(values, kind).take(pa.array(rows))


def _text(values: Sequence[str], rows: _Integers | _Codes) -> pa.Array:
    """Returns the texts at the given indices as a dictionary."""
    codes: dict[str, int] = {}
    texts = encodable_texts(values)
    indices = np.fromiter((codes.setdefault(text, len(codes)) for text in texts), np.int32, len(texts))
    # Most of them are the same in all rows of a part.
    gathered = indices[rows] if len(codes) > 1 else np.zeros(len(rows), np.int32)
    return _dictionary(gathered, list(codes))


def _dictionary(indices: _Codes, texts: Sequence[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(texts, pa.string()))


def split_into_groups(keys: _Integers) -> tuple[int, ...]:
    """Returns rows of each row group: whole samples, as many as fit; a larger one is split by itself.

    Args:
        keys: What the rows are grouped by, equal rows together: sample ids. Shape ``[rows]``.
    """
    starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    lengths = np.diff(starts, append=len(keys))
    groups: list[int] = []
    open_rows = 0
    for length in lengths.tolist():
        if open_rows and open_rows + length > schema.MAX_ROW_GROUP_ROWS:
            groups.append(open_rows)
            open_rows = 0
        open_rows += length
        while open_rows > schema.MAX_ROW_GROUP_ROWS:
            groups.append(schema.MAX_ROW_GROUP_ROWS)
            open_rows -= schema.MAX_ROW_GROUP_ROWS
    if open_rows:
        groups.append(open_rows)
    return tuple(groups)


def _even_groups(count: int) -> tuple[int, ...]:
    full, rest = divmod(count, schema.MAX_ROW_GROUP_ROWS)
    return (schema.MAX_ROW_GROUP_ROWS,) * full + ((rest,) if rest else ())
