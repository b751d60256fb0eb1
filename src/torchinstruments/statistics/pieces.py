"""A tensor as flat pieces of bounded size, in whatever order costs no copy.

Statistics do not depend on the order of entries, so a transposed tensor is read as it lies in memory, and
an expanded one is read once: an entry that is repeated is known by its number of repetitions.
"""

from collections.abc import Iterator

import numpy as np
import torch

from torchinstruments.statistics.host_memory import as_array
from torchinstruments.statistics.moments import Array

__all__ = ["ONE_THREAD", "finite_pieces", "flat_pieces", "replaced", "replaced_pieces", "without_repeats"]

ONE_THREAD = 32_768
"""Entries up to which an operation of torch stays in the thread that calls it."""


def without_repeats(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns a view in memory order without repeated entries, and how often each entry of it counts.

    A dimension of stride 0, as ``expand`` and the gradient of ``sum`` make it, holds the same entries again
    and again. Dropping it changes no statistic but the positions of quartiles, which take the factor back in.

    Args:
        tensor: Any strided tensor with at least one entry.
    """
    repeats = 1
    if tensor.is_contiguous():
        return tensor, repeats
    for dimension in reversed(range(tensor.ndim)):
        if tensor.stride(dimension) == 0 and tensor.shape[dimension] > 1:
            repeats *= tensor.shape[dimension]
            tensor = tensor.select(dimension, 0)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order), repeats


def flat_pieces(tensor: torch.Tensor, num_entries: int) -> Iterator[torch.Tensor]:
    """Yields all entries in flat pieces; only pieces that do not lie densely in memory are copied.

    Args:
        tensor: Any strided tensor with at least one entry.
        num_entries: Entries of a piece at most, and so the bound of each copy.
    """
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(num_entries)
    elif tensor.numel() <= num_entries:
        yield _dense(tensor)
    else:
        rows = num_entries * tensor.shape[0] // tensor.numel()
        for piece in tensor.split(max(1, rows)):
            if piece.numel() <= num_entries:
                yield _dense(piece)
            else:
                yield from flat_pieces(piece[0], num_entries)


def finite_pieces(tensor: torch.Tensor, num_entries: int) -> Iterator[Array]:
    """Yields the finite entries of a CPU tensor in flat arrays; they may share its memory.

    Args:
        tensor: Of a dtype that NumPy knows, with at least one entry.
        num_entries: Entries that are looked at for a piece at most.
    """
    for piece in flat_pieces(tensor, num_entries):
        entries = as_array(piece)
        if entries.dtype.kind == "f":
            finite = np.isfinite(entries)
            if not finite.all():
                # The places first: NumPy finds many without a branch, where a mask has one for each.
                entries = entries.take(np.flatnonzero(finite))
        yield entries


def replaced_pieces(tensor: torch.Tensor, num_entries: int, other: float | None) -> Iterator[Array]:
    """Yields all entries of a CPU tensor in flat arrays, with another in place of each that is not finite.

    Each array lasts until the next one is asked for.

    Args:
        tensor: Of a dtype that NumPy knows, with at least one entry.
        num_entries: Entries of a piece at most.
        other: An entry, or zero; None where all are finite, and are not looked at.
    """
    if other is not None:
        memory = torch.empty(min(num_entries, tensor.numel()), dtype=tensor.dtype, device="cpu")
        for piece in flat_pieces(tensor, num_entries):
            yield as_array(replaced(piece, other, memory))
    elif tensor.is_contiguous():
        flat: Array = as_array(tensor.view(-1))
        yield from (flat[start : start + num_entries] for start in range(0, flat.size, num_entries))
    else:
        yield from (as_array(piece) for piece in flat_pieces(tensor, num_entries))


def replaced(entries: torch.Tensor, other: float, memory: torch.Tensor) -> torch.Tensor:
    """Returns entries with another in place of each that is not finite; a part of the memory.

    torch does so in one vectorised pass, NumPy with a branch for each entry.

    Args:
        entries: Flat, on the CPU, of a floating-point dtype.
        other: Finite, and a number of that dtype.
        memory: Flat, of that dtype, at least as large.
    """
    result = memory.narrow(0, 0, entries.numel())
    for source, target in zip(entries.split(ONE_THREAD), result.split(ONE_THREAD), strict=True):
        torch.nan_to_num(source, other, other, other, out=target)
    return result


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the entries in a flat tensor without gaps; a copy, unless they lie so already."""
    if (
        tensor.is_cpu
        and tensor.ndim == 2
        and tensor.stride(0) == 1
        and tensor.stride(1) > tensor.shape[0] > 1
    ):
        # Rows of a transposed tensor. Copied as they lie and then turned over, which torch does in tiles:
        # several times as fast as entry by entry where the stride is a power of two, as most are.
        tensor = tensor.t().contiguous().t()
    flat = tensor.reshape(-1)
    return flat if flat.is_contiguous() else flat.clone(memory_format=torch.contiguous_format)
