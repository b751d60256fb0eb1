"""Parameters as they were before a write, and what the write added to them.

Small parameters of one shape lie together in the host's memory: each is copied and measured while it is in
the processor's cache, for at this size a pass over memory and an operation of its own are what costs. Others
have a buffer each. The memory is kept from step to step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchinstruments.checks.measures import (
    FEW_ALIKE,
    SCRATCH_ENTRIES,
    SMALL_ENTRIES,
    norms,
    norms_of_rows,
    sort_out,
)

__all__ = ["Copies"]


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """Small parameters of one shape and dtype.

    Attributes:
        indices: Their positions, in the order of the rows.
        rows: A row for each.
    """

    indices: tuple[int, ...]
    rows: torch.Tensor


class Copies:
    """The copies of one session. Call all of it inside `isolated`."""

    def __init__(self) -> None:
        self.indices: tuple[int, ...] = ()
        """Positions of what was copied last, in the order of all norms here."""
        self.reasons: Mapping[int, str] = {}
        """Why others could not be."""
        self._stacks: list[_Stack] = []
        self._norms: list[torch.Tensor] = []
        self._apart: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._rows: dict[tuple[torch.dtype, torch.Size, int], torch.Tensor] = {}

    def take(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Copies tensors (training thread, hot path).

        Args:
            tensors: Parameters, by position.
        """
        ready, self.reasons = sort_out(tensors)
        alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
        apart: list[int] = []
        for index, tensor in ready.items():
            if tensor.is_cpu and tensor.numel() <= SMALL_ENTRIES:
                alike.setdefault((tensor.dtype, tensor.shape), []).append(index)
            else:
                apart.append(index)
        self._stacks.clear()
        self._norms.clear()
        for (dtype, shape), indices in alike.items():
            if len(indices) < FEW_ALIKE:
                apart += indices
                continue
            key = dtype, shape, len(indices)
            rows = self._rows.get(key)
            if rows is None:
                rows = self._rows[key] = torch.empty((len(indices), *shape), dtype=dtype)
            stack = _Stack(tuple(indices), rows)
            self._stacks.append(stack)
            self._norms.append(_filled(stack, [ready[index] for index in indices]))
        self._copy_apart({index: ready[index] for index in apart})
        self.indices = (*(index for stack in self._stacks for index in stack.indices), *self._apart)

    def before(self) -> list[tuple[Sequence[int], torch.Tensor]]:
        """Returns the norms of the copies by places in `indices` (training thread, hot path)."""
        return self._placed(self._norms, self._apart)

    def change(self, tensors: Mapping[int, torch.Tensor]) -> list[tuple[Sequence[int], torch.Tensor]]:
        """Returns the norms of what was added since, likewise, and spends the copies (hot path).

        A norm is 0 if and only if every element is what it was.

        Args:
            tensors: The parameters of `indices` as they are now, by position.
        """
        now, reasons = sort_out(tensors)
        if reasons:
            raise RuntimeError(f"a parameter cannot be read after the write: {next(iter(reasons.values()))}")
        found = [_moved(stack, [now[index] for index in stack.indices]) for stack in self._stacks]
        if self._apart:
            torch._foreach_sub_(list(self._apart.values()), [now[index] for index in self._apart])
        return self._placed(found, self._apart)

    def clear(self) -> None:
        """Gives all memory back (training thread, at detach)."""
        self.indices = ()
        self.reasons = {}
        self._stacks.clear()
        self._norms.clear()
        self._apart.clear()
        self._buffers.clear()
        self._rows.clear()

    def _copy_apart(self, sources: Mapping[int, torch.Tensor]) -> None:
        buffers = self._buffers
        for index, source in sources.items():
            held = buffers.get(index)
            if (
                held is None
                or held.dtype is not source.dtype
                or held.shape != source.shape
                or held.device != source.device
            ):
                buffers[index] = torch.empty_like(source)
        self._apart = {index: buffers[index] for index in sources}
        if sources:
            torch._foreach_copy_(list(self._apart.values()), list(sources.values()))

    @staticmethod
    def _placed(
        found: Sequence[torch.Tensor], apart: Mapping[int, torch.Tensor]
    ) -> list[tuple[Sequence[int], torch.Tensor]]:
        """Returns norms of stacks, and those of the others, with their places."""
        placed: list[tuple[Sequence[int], torch.Tensor]] = []
        start = 0
        for numbers in found:
            placed.append((range(start, start + len(numbers)), numbers))
            start += len(numbers)
        others = norms(tuple(apart.values())) if apart else []
        placed += [([start + place for place in places], numbers) for places, numbers in others]
        return placed


def _pieces(stack: _Stack) -> list[tuple[int, int]]:
    """Returns the rows that fit into the processor's cache together."""
    num_rows = len(stack.indices)
    num_together = max(1, SCRATCH_ENTRIES * num_rows // stack.rows.numel())
    return [(start, min(start + num_together, num_rows)) for start in range(0, num_rows, num_together)]


def _filled(stack: _Stack, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Copies tensors into the rows, and returns the norms of these."""
    found = []
    for first, end in _pieces(stack):
        rows = stack.rows[first:end]
        torch.stack(tensors[first:end], out=rows)
        found.append(norms_of_rows(rows))
    return torch.cat(found)


def _moved(stack: _Stack, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Subtracts tensors from the rows, and returns likewise."""
    found = [
        norms_of_rows(stack.rows[first:end].sub_(torch.stack(tensors[first:end])))
        for first, end in _pieces(stack)
    ]
    return torch.cat(found)
