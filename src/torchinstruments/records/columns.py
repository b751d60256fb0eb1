"""The measurements of a delivery as columns: what they are of, and beside it numbers and times.

A model that is trained gives the same measurements in the same order again and again. What they are of is a
`MeasurementFrame`, one and the same object from sample to sample, so that whoever takes samples can see by
its identity that nothing is new but times and numbers. Those are arrays, and no object stands for a number.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torchinstruments.records.codes import Execution, Scope, Signal

__all__ = [
    "Description",
    "KeptFrames",
    "Measurement",
    "MeasurementColumns",
    "MeasurementFrame",
    "Shapes",
    "as_columns",
]

_MAX_FRAMES = 8
_MAX_FRAME_TENSORS = 32_768
"""Tensors of all frames that are kept; about 400 bytes each."""

Shapes: TypeAlias = list[tuple[int, ...]]
"""A shape for each tensor."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """All scalars of one tensor at one moment: some rows of ``history``.

    Attributes:
        layer: As in `ModuleRecord`.
        layer_index: Position in the catalog, the order of rows inside a part.
        call_index: Ordinal of the layer's call in this forward.
        signal: What was measured.
        stage: `Stage` of a parameter gradient, else ``""``.
        tensor_path: ``output``, ``output.logits``, ``grad_output.0``, ``input.mask``; of a parameter its own
            name in its module, ``weight``.
        backward_index: Which traversal of the graph; 0 for outputs and the first one.
        timestamp_us: When it was observed: microseconds since the epoch, UTC.
        mode: ``train`` or ``eval``, of the module.
        grad_enabled: Whether gradients were enabled at the call.
        scope: What the numbers cover.
        replica_key: Set where equality between ranks is provable.
        execution: How the program ran.
        shape: Local shape.
        dtype: ``float32``, without ``torch.``.
        device: ``cpu``, ``cuda:0``.
        metrics: Names, in the order of the reducers.
        values: Finite numbers; None where there is a reason.
        reasons: ``""`` beside a value, else a `Reason` with or without detail.
    """

    layer: str
    layer_index: int
    call_index: int
    signal: Signal
    stage: str
    tensor_path: str
    backward_index: int
    timestamp_us: int
    mode: str
    grad_enabled: bool
    scope: Scope
    replica_key: str
    execution: Execution
    shape: tuple[int, ...]
    dtype: str
    device: str
    metrics: tuple[str, ...]
    values: tuple[float | None, ...]
    reasons: tuple[str, ...]


_Filled: Any = make_dataclass("_Filled", [(one.name, one.type) for one in fields(Measurement)], slots=True)
"""A `Measurement` while its fields are set, which takes three times as long where they are frozen."""


class Description(NamedTuple):
    """What a measurement is of: its fields without time, shape and numbers.

    A shape is no part of it, since it may be another in every sample.
    """

    layer: str
    layer_index: int
    call_index: int
    signal: Signal
    stage: str
    tensor_path: str
    backward_index: int
    mode: str
    grad_enabled: bool
    scope: Scope
    replica_key: str
    execution: Execution
    dtype: str
    device: str
    metrics: tuple[str, ...]


_DESCRIPTION = attrgetter(*Description._fields)


class MeasurementFrame:
    """What the measurements of a delivery are of; compared by identity.

    Args:
        described: A `Description` for each tensor, or its fields in the same order.

    Attributes:
        described: The descriptions.
        lengths: How many numbers each tensor has.
        num_scalars: How many all have.
    """

    __slots__ = ("described", "lengths", "num_scalars")

    def __init__(self, described: Iterable[tuple[Any, ...]]) -> None:
        self.described = [*map(Description._make, described)]
        self.lengths = [len(one.metrics) for one in self.described]
        self.num_scalars = sum(self.lengths)


class KeptFrames:
    """The frames of the last deliveries of a process, and the shapes that came with them (writer thread).

    They are bounded: of deliveries that all differ the last few are kept.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[MeasurementFrame, Shapes]] = deque(maxlen=_MAX_FRAMES)

    def find(self, described: list[tuple[Any, ...]], shapes: Shapes) -> tuple[MeasurementFrame, Shapes]:
        """Returns the frame and the shapes that equal these: the same objects as before, where they did.

        Args:
            described: The fields of a `Description` for each tensor, in its order.
            shapes: Their shapes.
        """
        for place, (frame, known) in enumerate(self._kept):
            if frame.described == described:
                if known != shapes:
                    self._kept[place] = frame, shapes
                    return frame, shapes
                return frame, known
        frame = MeasurementFrame(described)
        self._kept.appendleft((frame, shapes))
        while len(self._kept) > 1 and sum(len(known) for _, known in self._kept) > _MAX_FRAME_TENSORS:
            self._kept.pop()
        return frame, shapes


@dataclass(frozen=True, slots=True, eq=False)
class MeasurementColumns:
    """The measurements of a delivery.

    All sinks get the same arrays, so they are made read-only.

    Attributes:
        frame: What they are of.
        shapes: The shape of each tensor.
        timestamp_us: When each was observed: microseconds since the epoch, UTC; int64.
        values: The numbers of all tensors, one tensor after the other; NaN where one is missing; float64.
        reasons: Why, by the place of the number; none where nothing is missing.
    """

    frame: MeasurementFrame
    shapes: Shapes
    timestamp_us: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    reasons: Mapping[int, str]

    def __post_init__(self) -> None:
        """Keeps a sink from changing what the others and the folder get."""
        self.timestamp_us.flags.writeable = False
        self.values.flags.writeable = False

    def measurements(self) -> tuple[Measurement, ...]:
        """Returns an object for each tensor (writer thread)."""
        values: list[float | None] = self.values.tolist()
        for place in np.flatnonzero(np.isnan(self.values)).tolist():
            values[place] = None
        reasons = [""] * len(values)
        for place, reason in self.reasons.items():
            reasons[place] = reason
        made: list[Measurement] = []
        start = 0
        for one, shape, timestamp_us in zip(
            self.frame.described, self.shapes, self.timestamp_us.tolist(), strict=True
        ):
            stop = start + len(one.metrics)
            # In the order of a measurement's fields: by name it takes half as long again.
            filled = _Filled(
                *one[:7],
                timestamp_us,
                *one[7:12],
                shape,
                *one[12:],
                tuple(values[start:stop]),
                tuple(reasons[start:stop]),
            )
            filled.__class__ = Measurement
            made.append(filled)
            start = stop
        return tuple(made)


def as_columns(measured: Sequence[Measurement], frames: KeptFrames) -> MeasurementColumns:
    """Returns measurements as columns.

    Args:
        measured: The measurements.
        frames: What earlier ones were of.

    Raises:
        ValueError: One has not as many values or reasons as metrics.
    """
    frame, shapes = frames.find([*map(_DESCRIPTION, measured)], [one.shape for one in measured])
    for counts in ([len(one.values) for one in measured], [len(one.reasons) for one in measured]):
        if counts != frame.lengths:
            raise ValueError("a measurement needs one value and one reason for each of its metrics")
    reasons = enumerate(chain.from_iterable(one.reasons for one in measured))
    return MeasurementColumns(
        frame=frame,
        shapes=shapes,
        timestamp_us=np.array([one.timestamp_us for one in measured], np.int64),
        values=np.array([*chain.from_iterable(one.values for one in measured)], np.float64),
        reasons={place: reason for place, reason in reasons if reason},
    )
