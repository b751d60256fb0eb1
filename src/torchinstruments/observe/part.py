"""What one thread has observed, side by side: what it is of, when, and where the numbers are."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from torchinstruments.observe.known_frames import KnownFrames
from torchinstruments.observe.observed import KnownObservations, Observation
from torchinstruments.statistics.batching import ScalarBatch

__all__ = ["Part"]


@dataclass(slots=True)
class Part:
    """Observations of one thread, with the batch that their numbers are in.

    Attributes:
        batch: Their numbers.
        known: The observations of earlier samples.
        frames: What the numbers of earlier samples were of (writer thread).
        histograms: Names of the histograms that are due in this sample.
        focus: Indices of the layers whose tensors have them, absent ones included; empty where none is due.
        observations: In execution order.
        timestamps_us: When each was made: microseconds since the epoch, UTC.
        indices: The place of each in the batch; -1 where there is a reason.
    """

    batch: ScalarBatch
    known: KnownObservations = field(default_factory=KnownObservations)
    frames: KnownFrames = field(default_factory=KnownFrames)
    histograms: tuple[str, ...] = ()
    focus: frozenset[int] = frozenset()
    observations: list[Observation] = field(default_factory=list)
    timestamps_us: "array[int]" = field(default_factory=lambda: array("q"))
    indices: "array[int]" = field(default_factory=lambda: array("q"))

    def add(
        self, kind: tuple[Any, ...], shape: tuple[int, ...], reason: str, timestamp_us: int, index: int
    ) -> Observation:
        """Takes what was observed (training or autograd thread, hot path).

        Args:
            kind: The fields of a `Kind`.
            shape: Local shape.
            reason: Why nothing was measured, else ``""``.
            timestamp_us: When it was observed: microseconds since the epoch, UTC.
            index: Its place in the batch; -1 where there is a reason.
        """
        observations = self.observations
        if len(self.timestamps_us) > len(observations):
            # An interrupt came between what follows, the last time.
            del self.timestamps_us[len(observations) :], self.indices[len(observations) :]
        before = observations[-1] if observations else None
        observation = None if before is None else before.follower
        if (
            observation is None
            or observation.kind != kind
            or observation.shape != shape
            or observation.reason != reason
        ):
            observation = self.known.find(before, kind, shape, reason)
        when, where = array("q", (timestamp_us,)), array("q", (index,))
        # Nothing is called, and so no signal's handler, which may run the model, comes in between.
        self.timestamps_us += when
        self.indices += where
        observations += (observation,)
        return observation

    def move_last_to(self, place: int) -> None:
        """Puts the last observation in the place of an earlier one (autograd thread, hot path)."""
        # Nothing is called, and so no interrupt comes in between, and no signal's handler.
        self.observations[place] = self.observations[-1]
        self.timestamps_us[place] = self.timestamps_us[-1]
        self.indices[place] = self.indices[-1]
        del self.observations[-1], self.timestamps_us[-1], self.indices[-1]
