"""The bytes of tensors in logical order, as a digest reads them: in pieces, or of small tensors at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchinstruments.statistics.admission import COMPLEX
from torchinstruments.statistics.digest_sums import BLOCK_WORDS, WORD_BYTES
from torchinstruments.statistics.pieces import flat_pieces

__all__ = ["BLOCK_BYTES", "byte_pieces", "joined_words", "padded_rows", "small_groups"]

BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES
# Each is an entry of its own for `torch.stack`, which need not be so for their bytes.
_ALONE = COMPLEX | {torch.bool}
_BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class _Group:
    """Places of tensors that are read together.

    Attributes:
        places: In order.
        bytes_left: Memory that further ones may take.
    """

    places: list[int]
    bytes_left: int


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


def small_groups(
    tensors: Sequence[torch.Tensor], small_bytes: int, group_bytes: int, *, of_one_shape: bool
) -> Iterator[list[int]]:
    """Yields the places of tensors that are to be read together, and of each other one by itself.

    Args:
        tensors: Plain strided tensors of one device.
        small_bytes: Up to which they are read together with others of their dtype.
        group_bytes: Memory that the words of one group may take.
        of_one_shape: Whether all of a group have the same shape, for `padded_rows`. Else flat ones of whole
            words are together whatever their size, for `joined_words`.
    """
    groups: dict[tuple[torch.dtype, torch.Size | None], _Group] = {}
    for place, tensor in enumerate(tensors):
        num_bytes = tensor.nbytes
        if not 0 < num_bytes <= small_bytes or (dtype := tensor.dtype) in _ALONE:
            yield [place]
            continue
        is_any_size = not of_one_shape and num_bytes % WORD_BYTES == 0 and tensor.dim() == 1
        kind = (dtype, None if is_any_size else tensor.shape)
        # A last word that is filled, and an empty one.
        needed = num_bytes + 2 * WORD_BYTES
        group = groups.get(kind)
        if group is None:
            groups[kind] = group = _Group([], group_bytes)
        elif group.bytes_left < needed:
            yield group.places
            groups[kind] = group = _Group([], group_bytes)
        group.places.append(place)
        group.bytes_left -= needed
    for group in groups.values():
        yield group.places


def padded_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the words of small tensors, a row each, the last word filled with zeros.

    Args:
        tensors: Of one shape and dtype.
    """
    # It moves entries, and changes none.
    rows = torch.stack(list(tensors)).view(len(tensors), -1).view(torch.uint8)
    num_missing = -rows.shape[1] % WORD_BYTES
    return (torch.constant_pad_nd(rows, (0, num_missing)) if num_missing else rows).view(torch.int64)


def joined_words(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Returns the words of small tensors side by side, and how many each has.

    Args:
        tensors: Of a group that may be of several sizes.
    """
    if tensors[0].dim() == 1 and tensors[0].nbytes % WORD_BYTES == 0:
        joined = torch.cat(list(tensors)).view(torch.int64)
        return joined, tuple([tensor.nbytes // WORD_BYTES for tensor in tensors])
    rows = padded_rows(tensors)
    return rows, (rows.shape[1],) * len(tensors)


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
