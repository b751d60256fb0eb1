"""What an observer needs from the rooms above it: somewhere to leave samples, and a few facts.

The observer never sees a folder, a thread or a store. It is given a session, and this is its shape.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch.optim import Optimizer

from torchinstruments.records import Counters, Outbox, ScaleProvenance

__all__ = ["Companion", "ScaleSource", "Session"]


class Session(Outbox, Protocol):
    """One observer's connection to its run. Nothing here raises, but for what `close` documents."""

    @property
    def url(self) -> str:
        """Where the run lies, without secrets (any thread)."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks of the world; 1 until it is known (training thread, hot path)."""
        ...

    def begin(self) -> bool:
        """Returns whether this rank observes (training thread, once, at the first root forward).

        What could not be known at attach, the rank above all, is settled here. Where it was settled before,
        it returns at once.
        """
        ...

    def wants_histograms(self) -> bool:
        """Returns whether anyone keeps histograms of this rank (training or autograd thread, hot path).

        True until it is known.
        """
        ...

    def counters(self, observed: Counters) -> Counters:
        """Returns what the observer counted, with rows, parts, bytes, writer seconds added (any thread)."""
        ...

    def pending_error(self) -> BaseException | None:
        """Returns the first error of a sink or of the storage that was not returned yet (training thread)."""
        ...

    def flush(self, timeout_s: float | None = None) -> bool:
        """Returns whether everything left so far became durable in time (any thread but the writer)."""
        ...

    def close(self, timeout_s: float | None = None) -> bool:
        """Ends the run for this process; returns whether all of it became durable in time. Idempotent."""
        ...


class ScaleSource(Protocol):
    """Knows the loss scale: `torchinstruments.ranks.loss_scale.ScalerWatch`, or a stand-in."""

    def current_scale(self, forward_index: int | None = None) -> tuple[torch.Tensor | None, ScaleProvenance]:
        """Returns the scale as a tensor, not read here, and how it is known (autograd thread, hot path).

        It is that of the backward of a root forward, where one is given.
        """
        ...

    def scale_left(
        self, optimizer: Optimizer, forward_index: int
    ) -> tuple[torch.Tensor | float | None, ScaleProvenance]:
        """Returns the factor that is still in the gradients of a root forward that an optimizer has.

        Beside it stands how it is known (training thread, hot path).
        """
        ...


class Companion(Protocol):
    """Something that watches training as long as an observer does: optimizer hooks, the loss scaler."""

    def attach(self) -> None:
        """Begins to watch (training thread, at attach)."""
        ...

    def detach(self) -> None:
        """Leaves no trace. Idempotent (any thread)."""
        ...


Companions = Iterable[Companion]
