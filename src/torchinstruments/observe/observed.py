"""What a tensor of one call is, as one and the same object for as long as it stays the same.

A model that trains gives the same tensors in the same order in each sample, and nothing of them is new but
times and numbers. So a hook looks first at what followed upon the tensor before it the last time, and makes
an `Observation` only of what was not known. Whoever reads samples sees by identity that nothing has changed,
and has no object to fetch for each tensor.

Nothing here refers to a tensor or a module.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torchinstruments.records import Execution, Scope, Signal, Stage

__all__ = ["Kind", "KnownObservations", "Observation"]

_MAX_KINDS = 32_768
"""Kinds that are known; about 400 bytes each."""


class Kind(NamedTuple):
    """What a tensor is, whatever its shape: of the fields of a `Description` those that a hook knows.

    Attributes:
        layer: Name of the layer.
        layer_index: Its position in the catalog.
        call_index: Ordinal of the call in its forward.
        signal: What was measured.
        stage: Of a parameter's gradient.
        tensor_path: Path of the tensor.
        mode: ``train`` or ``eval``.
        grad_enabled: Whether gradients were enabled.
        scope: What the numbers cover.
        replica_key: Of a part of a sharded tensor: which part, and which ranks have the same.
        execution: How the call ran.
        dtype: Without ``torch.``.
        device: As torch writes it.
    """

    layer: str
    layer_index: int
    call_index: int
    signal: Signal
    stage: Stage
    tensor_path: str
    mode: str
    grad_enabled: bool
    scope: Scope
    replica_key: str
    execution: Execution
    dtype: str
    device: str


@dataclass(slots=True, eq=False)
class Observation:
    """One tensor, or why there is none, in as many samples as it is the same; compared by identity.

    Attributes:
        kind: What it is.
        shape: Local shape.
        reason: Why nothing was measured, else ``""``.
        follower: What came after it the last time (training or autograd thread, hot path).
    """

    kind: Kind
    shape: tuple[int, ...]
    reason: str
    follower: "Observation | None" = None


class KnownObservations:
    """The observations of earlier samples (training and autograd threads, hot path).

    They are bounded, and threads need not agree: whatever one of them finds is compared before it is used.
    """

    def __init__(self) -> None:
        self._by_kind: dict[tuple[Any, ...], Observation] = {}

    def find(
        self, before: Observation | None, kind: tuple[Any, ...], shape: tuple[int, ...], reason: str
    ) -> Observation:
        """Returns the observation that is of this kind and shape and has this reason, to follow from now on.

        Args:
            before: What was observed before it; None at the beginning.
            kind: The fields of a `Kind`.
            shape: Local shape.
            reason: Why nothing was measured, else ``""``.
        """
        known = None if before is None else before.follower
        if known is None or known.kind != kind:
            known = self._by_kind.get(kind) or self._new(kind, shape, reason)
        if known.shape != shape or known.reason != reason:
            known = Observation(known.kind, shape, reason, known.follower)
        if before is not None:
            before.follower = known
        return known

    def _new(self, kind: tuple[Any, ...], shape: tuple[int, ...], reason: str) -> Observation:
        """Returns the first observation of a kind."""
        if len(self._by_kind) >= _MAX_KINDS:
            self._by_kind.clear()
        observation = Observation(Kind._make(kind), shape, reason)
        return self._by_kind.setdefault(observation.kind, observation)
