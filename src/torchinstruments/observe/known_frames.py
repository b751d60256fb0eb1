"""What the numbers of earlier deliveries were of, found again by the identity of observations."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torchinstruments.observe.observed import Kind, Observation
from torchinstruments.records import KeptFrames, MeasurementFrame, Shapes

__all__ = ["KnownFrames"]

_MAX_FRAMES = 8
_MAX_TENSORS = 32_768
"""Tensors of all deliveries that are known; about 40 bytes each beside what is known of them anyway."""


@dataclass(slots=True)
class _Known:
    """What one delivery was of.

    Attributes:
        observations: Of each tensor.
        kinds: Theirs.
        metrics: Names of the numbers of each.
        backward_index: Which traversal of the graph it was.
        frame: What it was found to be.
        shapes: Those of the tensors.
    """

    observations: Sequence[Observation]
    kinds: list[Kind]
    metrics: Sequence[tuple[str, ...]]
    backward_index: int
    frame: MeasurementFrame
    shapes: Shapes


class KnownFrames:
    """The frames of the last deliveries of an observer (writer thread).

    Nearly all deliveries consist of observations of an earlier one. Of those that do not only shapes may be
    new; the rest is compared by value.
    """

    def __init__(self) -> None:
        self._known: deque[_Known] = deque(maxlen=_MAX_FRAMES)
        self._kept = KeptFrames()

    def find(
        self,
        observations: list[Observation],
        metrics: list[tuple[str, ...]],
        backward_index: int,
    ) -> tuple[MeasurementFrame, Shapes]:
        """Returns the frame and the shapes of a delivery: the same objects as before, where they equal them.

        Args:
            observations: Of each tensor.
            metrics: Names of the numbers of each.
            backward_index: Which traversal of the graph it was.
        """
        for known in self._known:
            if (
                known.observations == observations
                and known.backward_index == backward_index
                and known.metrics == metrics
            ):
                return known.frame, known.shapes
        kinds = [one.kind for one in observations]
        shapes = [one.shape for one in observations]
        for known in self._known:
            if known.kinds == kinds and known.backward_index == backward_index and known.metrics == metrics:
                if known.shapes != shapes:
                    known.shapes = shapes
                known.observations = observations
                return known.frame, known.shapes
        frame, shapes = self._kept.find(
            # The fields of a `Description`, without the call that makes one.
            [
                (*kind[:4], kind.stage.value, kind.tensor_path, backward_index, *kind[6:], names)
                for kind, names in zip(kinds, metrics, strict=True)
            ],
            shapes,
        )
        self._known.appendleft(_Known(observations, kinds, metrics, backward_index, frame, shapes))
        while len(self._known) > 1 and sum(len(known.kinds) for known in self._known) > _MAX_TENSORS:
            self._known.pop()
        return frame, shapes
