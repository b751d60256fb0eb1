"""What one sampled forward leaves in its part: tensors as they are, and why something of them is missing."""

import torch

from torchinstruments.observe.faults import Tally
from torchinstruments.observe.leaves import Leaves, gradient_path
from torchinstruments.observe.observation import (
    Call,
    error_reason,
    note_tensor,
    take_absence,
    take_tensor,
)
from torchinstruments.observe.observed import Observation
from torchinstruments.observe.part import Part
from torchinstruments.records import Reason, Signal

__all__ = ["MAX_OBSERVATIONS", "Intake"]

MAX_OBSERVATIONS = 100_000
"""Tensors of one sampled forward that are measured, over all layers and calls."""

_PROBE = "forward"


class Intake:
    """Takes the tensors of one forward's calls, as far as their signals are asked for.

    Args:
        part: Where everything goes.
        signals: What is measured.
        tally: Takes errors.
    """

    def __init__(self, part: Part, signals: frozenset[Signal], tally: Tally) -> None:
        self.part = part
        self.signals = signals
        self._tally = tally
        self._num_noted = 0
        self._is_full = False

    def has_room(self) -> bool:
        """Returns whether another tensor may be taken; the first that may not is reported (hot path)."""
        if max(len(self.part.observations), self._num_noted) < MAX_OBSERVATIONS:
            return True
        if not self._is_full:
            self._is_full = True
            sentence = f"more than {MAX_OBSERVATIONS} tensors in one forward; the rest is not measured"
            self._tally.fail(_PROBE, RuntimeError(sentence))
        return False

    def take(self, call: Call, signal: Signal, path: str, tensor: torch.Tensor) -> Observation:
        """Measures a tensor, or only looks at what it is where its signal is not asked for (hot path)."""
        try:
            if signal in self.signals:
                return take_tensor(self.part, call, signal, path, tensor)
            self._num_noted += 1
            return note_tensor(call, signal, path, tensor)
        except Exception as error:  # noqa: BLE001 - the sample goes on with the next tensor
            self._tally.fail(_PROBE, error)
            return take_absence(self.part, call, signal, path, error_reason(error))

    def lack_gradient(self, call: Call, path: str, reason: str, output: Observation) -> None:
        """Says why the gradient of an output will not come (training thread, hot path)."""
        if Signal.OUTPUT_GRADIENT in self.signals:
            take_absence(self.part, call, Signal.OUTPUT_GRADIENT, gradient_path(path), reason, output)

    def lack_call(self, call: Call, reason: str) -> None:
        """Says of a layer that was not seen to be called why nothing of its calls is there (hot path)."""
        if Signal.INPUT in self.signals:
            take_absence(self.part, call, Signal.INPUT, "input", reason)
        self._lack_output(call, "output", reason)

    def lack_inputs(self, call: Call, leaves: Leaves) -> None:
        """Says what of the arguments of a call could not be gone through (training thread, hot path)."""
        for path, unreadable in self._unreadable(leaves):
            reason = Reason.UNREADABLE_INPUT.with_error(unreadable)
            take_absence(self.part, call, Signal.INPUT, path, reason)
        if not leaves.tensors and not leaves.unreadable and self.has_room():
            take_absence(self.part, call, Signal.INPUT, "input", Reason.NO_TENSOR_INPUT.value)

    def lack_outputs(self, call: Call, leaves: Leaves) -> None:
        """Says what of an output could not be gone through (training thread, hot path)."""
        for path, unreadable in self._unreadable(leaves):
            self._lack_output(call, path, Reason.UNREADABLE_OUTPUT.with_error(unreadable))
        if not leaves.tensors and not leaves.unreadable and self.has_room():
            self._lack_output(call, "output", Reason.NO_TENSOR_OUTPUT.value)

    def _lack_output(self, call: Call, path: str, reason: str) -> None:
        """Says why an output is missing, or its gradient where that alone is asked for."""
        if Signal.OUTPUT in self.signals:
            take_absence(self.part, call, Signal.OUTPUT, path, reason)
        elif Signal.OUTPUT_GRADIENT in self.signals and call.grad_enabled:
            take_absence(self.part, call, Signal.OUTPUT_GRADIENT, gradient_path(path), reason)

    def _unreadable(self, leaves: Leaves) -> list[tuple[str, Exception]]:
        """Reports what could not be read, and returns as much of it as there is room for."""
        if leaves.truncated:
            self._tally.fail(_PROBE, RuntimeError(leaves.truncated))
        found = []
        for path, unreadable in leaves.unreadable:
            self._tally.fail(_PROBE, unreadable)
            if self.has_room():
                found.append((path, unreadable))
        return found
