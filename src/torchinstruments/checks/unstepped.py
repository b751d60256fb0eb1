"""Says once that gradients come and go while no step is seen, so that no check looks at one.

A round is over without a step where a gradient that a backward left is gone, or another one, when the next
backward ends: the program has cleared it. Gradients that are accumulated stay the same tensor. Where the
caller declared how many backwards make a step, that many are a round too.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchinstruments.checks.inventory import Entry

if TYPE_CHECKING:
    import torch

__all__ = ["ALLOWED_ROUNDS", "Unstepped"]

ALLOWED_ROUNDS = 2
"""Rounds without a step before it speaks."""


class Unstepped:
    """Watches for gradients that no step ever takes, until the first step.

    Args:
        entries: What is watched, by position.
        accumulation_steps: Backwards of a round, where the caller declared them.
    """

    def __init__(self, entries: Sequence[Entry], accumulation_steps: int | None = None) -> None:
        self._entries = entries
        self._declared = accumulation_steps
        self._is_over = False
        self._num_backwards = 0
        self._num_cleared = 0
        self._kept: tuple[int, weakref.ref[torch.Tensor]] | None = None

    def step_seen(self) -> None:
        """Takes a step, applied or skipped, which ends the watch (training thread, hot path)."""
        self._is_over, self._kept = True, None

    def backward_ended(self, fired: Sequence[int]) -> int | None:
        """Takes a backward; returns, once, how many rounds had no step (autograd thread, hot path).

        Args:
            fired: Positions of the parameters that it reached.
        """
        if self._is_over:
            return None
        self._num_backwards += 1
        if self._kept is not None:
            index, reference = self._kept
            before = reference()
            self._num_cleared += before is None or self._entries[index].tensor.grad is not before
        gradient = self._entries[fired[0]].tensor.grad if fired else None
        self._kept = None if gradient is None else (fired[0], weakref.ref(gradient))
        num_rounds = self._num_cleared
        if self._declared is not None:
            # The step of the last round may be about to come.
            num_rounds = max(num_rounds, (self._num_backwards - 1) // self._declared)
        if num_rounds < ALLOWED_ROUNDS:
            return None
        self.step_seen()
        return num_rounds
