"""Masks of attention among buffers: zeros and negative infinity, which are meant to be there."""

import torch

from torchinstruments.checks.measures import local_part
from torchinstruments.checks.tensor_scan import Scanned, read, scan
from torchinstruments.records import Absent
from torchinstruments.statistics.admission import admit

__all__ = ["is_mask", "lifted", "looks_like_a_mask"]


def looks_like_a_mask(scanned: Scanned) -> bool:
    """Returns whether values are zero and below, with nothing above, and no NaN."""
    return scanned.num_nan == scanned.num_posinf == 0 and scanned.maximum == 0


def is_mask(buffer: torch.Tensor) -> bool:
    """Returns whether a buffer with infinities is a mask; reads it. Call it inside `isolated`.

    Args:
        buffer: Real, with at least one element.
    """
    admitted = admit(buffer)
    if isinstance(admitted, Absent):
        return False
    found = scan(admitted[0])
    (numbers,) = read([found.packed()])
    return looks_like_a_mask(found.unpacked(numbers))


def lifted(mask: torch.Tensor) -> torch.Tensor:
    """Returns what is finite where a mask is as it was: it without its negative infinities (hot path)."""
    own = local_part(mask)
    own = own if own.itemsize > 1 else own.float()
    return own.masked_fill(own == -torch.inf, 0)
