"""Who steps: the ordinals of optimizers and of their tries, and the outermost step that runs."""

from dataclasses import dataclass, field

from torchinstruments.ranks.window import Judgement, Span
from torchinstruments.records import Evidence, Outcome

__all__ = ["OptimizerOrdinals", "RunningStep"]


@dataclass
class RunningStep:
    """The outermost step that runs now.

    Attributes:
        key: Names its optimizer.
        started_s: When it began.
        in_backward: Whether a backward runs around it.
        inner_s: What runs inside it and is none of its time.
        inner_spans: Its parts; None where they are not kept.
        nested: Keys of the steps inside it, the innermost last.
        judgement: What a scaler said of a step inside it.
    """

    key: int
    started_s: float
    in_backward: bool
    inner_s: float = 0.0
    inner_spans: list[Span] | None = None
    nested: list[int] = field(default_factory=list)
    judgement: Judgement | None = None

    def knows(self, key: int) -> bool:
        """Returns whether it, or a step inside it, is one of this optimizer (hot path)."""
        return key == self.key or key in self.nested

    def ends_nested(self, key: int) -> bool:
        """Takes the end of a step inside it; returns False where it is its own end (hot path)."""
        if key not in self.nested:
            return False
        # The innermost first: a subclass's step may call its parent's, under the same key.
        del self.nested[len(self.nested) - 1 - self.nested[::-1].index(key) :]
        return True

    def take(self, judgement: Judgement) -> None:
        """Takes what became of a step inside it; of several none speaks for all of it (hot path)."""
        is_first = self.judgement is None
        self.judgement = judgement if is_first else Judgement(Outcome.UNKNOWN, Evidence.NONE)


class OptimizerOrdinals:
    """Numbers optimizers in the order of first sight, and the tries of each."""

    def __init__(self) -> None:
        self._ordinals: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._num_optimizers = 0

    def next_attempt(self, key: int) -> tuple[int, int]:
        """Returns the ordinal of an optimizer and that of its next try (hot path)."""
        if key not in self._ordinals:
            self._ordinals[key] = self._num_optimizers
            self._num_optimizers += 1
        attempt = self._attempts.get(key, 0)
        self._attempts[key] = attempt + 1
        return self._ordinals[key], attempt

    def ordinal(self, key: int) -> int:
        """Returns the ordinal of an optimizer, or the one that it would get now (hot path)."""
        return self._ordinals.get(key, self._num_optimizers)

    def forget(self, key: int) -> None:
        """Lets a new optimizer under this key have a new ordinal (any thread)."""
        self._ordinals.pop(key, None)
        self._attempts.pop(key, None)
