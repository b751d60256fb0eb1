"""The bytes of tensors in logical order, as a digest reads them: in pieces, or of small tensors at once."""

from collections.abc import Iterator, Sequence

import torch

from torchinstruments.statistics.admission import COMPLEX
from torchinstruments.statistics.digest_sums import BLOCK_WORDS, WORD_BYTES
from torchinstruments.statistics.pieces import flat_pieces

__all__ = ["BLOCK_BYTES", "byte_pieces", "padded_rows", "small_groups"]

BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES
# Each is an entry of its own for `torch.stack`, which need not be so for their bytes.
_ALONE = COMPLEX | {torch.bool}
_BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def byte_pieces(tensor: torch.Tensor, piece_bytes: int) -> Iterator[torch.Tensor]:
    """Yields a tensor's bytes in logical order, flat, all pieces but the last of the same whole blocks.

    Args:
        tensor: A plain strided tensor on any device.
        piece_bytes: Whole blocks. What lies in no order is copied, in pieces of this size.
    """
    bits = _as_integers(tensor)
    num_entries = piece_bytes // bits.itemsize
    if bits.numel() == 0:
        return
    if bits.is_contiguous():
        # A single entry is contiguous whatever its stride, and flat by no view of torch's own.
        flat = bits.as_strided((bits.numel(),), (1,))
        yield from flat.view(torch.uint8).split(piece_bytes)
        return
    held: list[torch.Tensor] = []
    num_held = 0
    for piece in flat_pieces(bits, num_entries):
        start = 0
        while start < piece.numel():
            taken = min(piece.numel() - start, num_entries - num_held)
            held.append(piece.narrow(0, start, taken))
            start += taken
            num_held += taken
            if num_held == num_entries:
                yield _joined(held)
                held.clear()
                num_held = 0
    if held:
        yield _joined(held)


def small_groups(tensors: Sequence[torch.Tensor], small_bytes: int, group_bytes: int) -> Iterator[list[int]]:
    """Yields the places of tensors that are to be read together, and of each other one by itself.

    Args:
        tensors: Plain strided tensors of one device.
        small_bytes: Up to which they are read together with others of their shape and dtype.
        group_bytes: Memory that the rows of one group may take.
    """
    groups: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for place, tensor in enumerate(tensors):
        num_bytes = tensor.nbytes
        dtype = tensor.dtype
        if num_bytes > small_bytes or num_bytes == 0 or dtype in _ALONE:
            yield [place]
            continue
        kind = (dtype, tensor.shape)
        group = groups.get(kind)
        if group is None:
            groups[kind] = group = list[int]()
        group.append(place)
        if (len(group) + 1) * (num_bytes + 2 * WORD_BYTES) > group_bytes:
            yield groups.pop(kind)
    yield from groups.values()


def padded_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the words of small tensors, a row each, the last word filled with zeros.

    Args:
        tensors: Of one group.
    """
    # It moves entries, and changes none.
    rows = torch.stack(list(tensors)).view(len(tensors), -1).view(torch.uint8)
    num_missing = -rows.shape[1] % WORD_BYTES
    return (torch.constant_pad_nd(rows, (0, num_missing)) if num_missing else rows).view(torch.int64)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same bits as integers, whose copies nothing rounds or quiets (training thread, hot path).

    It copies nothing, unless a conjugation is still to be applied.
    """
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.itemsize not in _BITS_OF:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS_OF[tensor.itemsize])


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Returns flat pieces as one, as bytes."""
    dense = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    # The last piece may be a single entry, as which it has any stride.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
