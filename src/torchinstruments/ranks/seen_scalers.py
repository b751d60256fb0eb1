"""Which of the gradient scalers of a process is believed to have scaled a loss of the model.

The loss of a backward goes through ``scale`` after its forward began. So a scaler is believed for a backward
where it alone has scaled since: not where two did, nor where none did, unless there is but one, it steps this
model's optimizers and its calls of ``scale`` cannot be seen (they are compiled). A scaler that only ever
stepped other models' optimizers has scaled nothing of this one's. As soon as an optimizer of the model steps
without a scaler beside one that steps another of its optimizers, no backward is attributed any more.
"""

import weakref
from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler

from torchinstruments.ranks.clock import StepClock

__all__ = ["SeenScalers"]

_NEVER = -1


@dataclass(slots=True, eq=False)
class _Seen:
    """One scaler that lives.

    Attributes:
        scaler: The scaler.
        scaled_at: Root forwards that had begun when it last scaled.
        is_own: Whether it has stepped an optimizer of this model.
        is_foreign: Whether it seems to belong to another model as long as it has stepped none of this one's.
    """

    scaler: weakref.ref[GradScaler]
    scaled_at: int = _NEVER
    is_own: bool = False
    is_foreign: bool = False


class SeenScalers:
    """The scalers that were seen, none of which is kept alive.

    Args:
        clock: Knows how many root forwards of the model have begun.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._seen: list[_Seen] = []
        self._latest: _Seen | None = None
        self._is_mixed = False

    def scaled(self, scaler: GradScaler) -> None:
        """Takes that a scaler has scaled something (training thread, hot path)."""
        entry = self._latest
        if entry is None or entry.scaler() is not scaler:
            entry = self._entry(scaler)
        entry.scaled_at = self._clock.num_forwards

    def stepped(self, scaler: GradScaler, *, is_own: bool) -> None:
        """Takes that a scaler was to step an optimizer of this or of another model (hot path)."""
        entry = self._latest
        if entry is None or entry.scaler() is not scaler:
            entry = self._entry(scaler)
        if is_own and entry.is_own:
            return
        entry.is_own |= is_own
        entry.is_foreign |= not is_own

    def stepped_without(self) -> None:
        """Takes that an optimizer of this model stepped without a scaler (training thread, hot path)."""
        alive = self._alive()
        if any(one.is_own for one in alive):
            self._is_mixed = True
        for one in alive:
            # Whose loss it scaled is open: not that of this step.
            one.is_foreign = True

    @property
    def is_any_alive(self) -> bool:
        """Whether one that was seen still lives (training or autograd thread, hot path)."""
        return bool(self._seen and self._alive())

    @property
    def is_any_suspect(self) -> bool:
        """Whether one may scale this model's loss (training or autograd thread, hot path)."""
        return bool(self._suspects())

    def num_scaled(self, forward_index: int) -> int:
        """Returns how many of the model's scalers have scaled since a root forward began (hot path)."""
        return sum(one.scaled_at > forward_index for one in self._suspects())

    def believed(self, forward_index: int | None) -> GradScaler | None:
        """Returns the scaler of a backward, or None where it cannot be told (training or autograd thread).

        Args:
            forward_index: Of the root forward whose backward it is; None asks for the only scaler of the
                model, whatever it has scaled.
        """
        suspects = self._suspects()
        if self._is_mixed:
            return None
        scaled = suspects
        if forward_index is not None:
            scaled = [one for one in suspects if one.scaled_at > forward_index]
            if not scaled:
                scaled = [one for one in suspects if len(suspects) == 1 and _scales_unseen(one)]
        return scaled[0].scaler() if len(scaled) == 1 else None

    def _suspects(self) -> list[_Seen]:
        return [one for one in self._alive() if one.is_own or not one.is_foreign]

    def _alive(self) -> list[_Seen]:
        return [one for one in self._seen if one.scaler() is not None]

    def _entry(self, scaler: GradScaler) -> _Seen:
        for one in self._seen:
            if one.scaler() is scaler:
                self._latest = one
                return one
        self._latest = entry = _Seen(weakref.ref(scaler))
        # Replaced, never changed: an autograd thread may be going through it.
        self._seen = [*self._alive(), entry]
        return entry


def _scales_unseen(one: _Seen) -> bool:
    return one.is_own and one.scaled_at == _NEVER
