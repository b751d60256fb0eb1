"""A number of 64 bits for the bytes of a tensor: equal bytes give equal numbers, on any device.

The bytes are read in logical order, in blocks of 262,144; what is missing of the last 8 is zeros. Each byte
is mixed with the one that stands 3 places behind it in its block, by an exclusive or; the last three are left
as they are. Words ``x_i`` of 8 mixed bytes make the sum of ``w_i * x_i`` modulo 2^64, and the digest is the
sum of the blocks, each times a multiplier of its own. All factors are odd and fixed. Sums of integers do not
depend on the order of adding: neither threads, nor pieces, nor a device's schedule can change a digest. Two
NaNs of other bits, and -0 and +0, are different bytes. Length and type are not in the digest; they stand
beside it.

A change of one bit, or of several within 4 aligned bytes, changes the digest with certainty: it reaches two
words at most, in which the lowest bits that differ do not have the same place, so that no odd factors make
them cancel. Other changes cancel with a probability of about 2^-24 at worst, as long as they are not of one
bit in every third byte of a stretch, and nothing else: no dtype has entries of three bytes.

The mixing loses nothing, for it can be undone from the end of a block. It keeps changes away from the top bit
of a word alone, which an odd factor cannot spread, so that two of them would cancel. An odd distance does so
for every dtype of more than one byte: with 4, the signs of both float32 of a word would come out as that bit,
and a tensor be taken for its negative. A bit that changes in every byte is left in the last three.

Where the tensor lies in the host's memory NumPy computes it, which is twice as fast there as the same in
torch, and its result is a number at once. Elsewhere it is a 0-d int64 tensor, for torch wraps modulo 2^64
too.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from torchinstruments.statistics.host_memory import as_array
from torchinstruments.statistics.measuring import MAX_SCRATCH_BYTES
from torchinstruments.statistics.pieces import flat_pieces

__all__ = ["BLOCK_WORDS", "Digester", "unsigned"]

_Words = npt.NDArray[np.uint64]

BLOCK_WORDS = 32_768
"""Words that share one multiplier; on a host the pieces that stay in its cache."""

_WORD_BYTES = 8
_DISTANCE = 3
_BLOCK_BYTES = BLOCK_WORDS * _WORD_BYTES
_NUM_MULTIPLIERS = 16_384
_SEED_OF_WEIGHTS = 0
_SEED_OF_MULTIPLIERS = 1 << 40
_STRIDE = 0x9E37_79B9_7F4A_7C15
# Shift and factor of each step of splitmix64.
_STEPS = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB), (31, 1))
_ALL_64 = 0xFFFF_FFFF_FFFF_FFFF
_BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# On a device a piece needs its products, and while it is gathered the pieces that it is gathered from.
_COPIES_EACH = 4


class Digester:
    """Computes digests; it keeps the factors of each device that it met.

    Args:
        max_scratch_bytes: Bound of the memory that one digest takes beside its tensor and the factors.
    """

    def __init__(self, max_scratch_bytes: int = MAX_SCRATCH_BYTES) -> None:
        self._piece_bytes = max(1, max_scratch_bytes // (_COPIES_EACH * _BLOCK_BYTES)) * _BLOCK_BYTES
        self._host_factors: tuple[_Words, _Words] | None = None
        self._factors: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_host(self, tensor: torch.Tensor) -> int:
        """Returns the digest of a tensor in the host's memory (training thread, hot path).

        Call it inside `isolated`.

        Args:
            tensor: A plain strided tensor on the CPU.
        """
        weights, multipliers = self._factors_on_host()
        num_bytes = tensor.nbytes
        if (
            num_bytes <= _BLOCK_BYTES
            and num_bytes % _WORD_BYTES == 0
            and tensor.is_contiguous()
            and not tensor.is_conj()
        ):
            # Models have hundreds of these, each of which costs what is done around the numbers.
            data = as_array(_as_integers(tensor)).reshape(-1).view(np.uint8)
            mixed = data.copy()
            ahead = mixed[:-_DISTANCE]
            ahead ^= data[_DISTANCE:]
            words = mixed.view(np.uint64)
            words *= weights[: len(words)]
            return int(np.add.reduce(words)) * int(multipliers[0]) & _ALL_64
        scratch = np.empty(min(num_bytes + _WORD_BYTES, _BLOCK_BYTES), np.uint8)
        total, block = 0, 0
        for data in _host_pieces(tensor, self._piece_bytes):
            for first in range(0, len(data), _BLOCK_BYTES):
                in_block = _host_sum(data[first : first + _BLOCK_BYTES], scratch, weights)
                total += in_block * _host_multiplier(multipliers, block)
                block += 1
        return total & _ALL_64

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the digest as a 0-d int64 tensor where the tensor lies (training thread, hot path).

        Call it inside `isolated`. Nothing is read here; `unsigned` gives the number that `on_host` would.

        Args:
            tensor: A plain strided tensor on any device.
        """
        weights, multipliers = self._factors_on(tensor.device)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        block = 0
        for piece in _byte_pieces(tensor, self._piece_bytes):
            num_blocks, num_last = divmod(piece.numel(), _BLOCK_BYTES)
            sums: list[torch.Tensor] = []
            if num_blocks:
                whole = piece.narrow(0, 0, num_blocks * _BLOCK_BYTES).view(num_blocks, _BLOCK_BYTES)
                sums.append(_device_sums(whole, weights))
            if num_last:
                last = piece.narrow(0, num_blocks * _BLOCK_BYTES, num_last).view(1, num_last)
                sums.append(_device_sums(last, weights))
            in_blocks = torch.cat(sums)
            num_blocks = in_blocks.numel()
            if block + num_blocks <= _NUM_MULTIPLIERS:
                factors = multipliers.narrow(0, block, num_blocks)
            else:
                factors = _odd_factors(_SEED_OF_MULTIPLIERS + block, num_blocks, tensor.device)
            total = total + (in_blocks * factors).sum()
            block += num_blocks
        return total

    def _factors_on_host(self) -> tuple[_Words, _Words]:
        """Returns the same as `_factors_on`, for NumPy."""
        if self._host_factors is None:
            weights, multipliers = self._factors_on(torch.device("cpu"))
            self._host_factors = (weights.numpy().view(np.uint64), multipliers.numpy().view(np.uint64))
        return self._host_factors

    def _factors_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights in a block and the multipliers of blocks, made on the device itself."""
        if device not in self._factors:
            self._factors[device] = (
                _odd_factors(_SEED_OF_WEIGHTS, BLOCK_WORDS, device),
                _odd_factors(_SEED_OF_MULTIPLIERS, _NUM_MULTIPLIERS, device),
            )
        return self._factors[device]


def unsigned(digest: int) -> int:
    """Returns what a number that was read from an int64 tensor is without its sign (writer thread)."""
    return digest & _ALL_64


def _odd_factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns numbers ``first`` and following of splitmix64, made odd, as int64."""
    mixed = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    mixed.mul_(_signed(_STRIDE))
    for shift, factor in _STEPS:
        mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(_signed(factor))
    return mixed.bitwise_or_(1)


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Returns int64 words shifted to the right, with zeros from the left."""
    return torch.bitwise_right_shift(words, shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(factor: int) -> int:
    """Returns the same 64 bits as torch takes them."""
    return factor - (1 << 64) if factor >> 63 else factor


def _host_sum(data: npt.NDArray[np.uint8], scratch: npt.NDArray[np.uint8], weights: _Words) -> int:
    """Returns the sum of a block of at least one byte; modulo 2^64 only once it is reduced.

    Args:
        data: All bytes of the block.
        scratch: As many bytes, and those that fill the last word; aligned to words.
        weights: Of words.
    """
    num_bytes = len(data)
    num_words = -(-num_bytes // _WORD_BYTES)
    num_mixed = max(num_bytes - _DISTANCE, 0)
    np.bitwise_xor(data[:num_mixed], data[_DISTANCE:], out=scratch[:num_mixed])
    scratch[num_mixed:num_bytes] = data[num_mixed:]
    scratch[num_bytes : num_words * _WORD_BYTES] = 0
    words = scratch[: num_words * _WORD_BYTES].view(np.uint64)
    np.multiply(words, weights[:num_words], out=words)
    return int(np.add.reduce(words))


def _host_multiplier(multipliers: _Words, block: int) -> int:
    """Returns the multiplier of a block."""
    if block < len(multipliers):
        return int(multipliers[block])
    factor = _odd_factors(_SEED_OF_MULTIPLIERS + block, 1, torch.device("cpu"))
    return unsigned(int(factor[0]))


def _host_pieces(tensor: torch.Tensor, piece_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields the bytes of a tensor on the CPU as `_byte_pieces` does, those of a contiguous one in one piece.

    What is yielded need not be aligned to words; NumPy reads it all the same.
    """
    if tensor.is_contiguous() and not tensor.is_conj():
        yield as_array(_as_integers(tensor).view(-1)).view(np.uint8)
    else:
        for piece in _byte_pieces(tensor, piece_bytes):
            yield as_array(piece)


def _device_sums(blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the sums of blocks of bytes, one in a row, all but the last word of each whole."""
    num_bytes = blocks.shape[1]
    mixed = torch.constant_pad_nd(blocks, (0, -num_bytes % _WORD_BYTES))
    if num_bytes > _DISTANCE:
        num_mixed = num_bytes - _DISTANCE
        mixed.narrow(1, 0, num_mixed).bitwise_xor_(blocks.narrow(1, _DISTANCE, num_mixed))
    words = mixed.view(torch.int64)
    return words.mul_(weights.narrow(0, 0, words.shape[1])).sum(1)


def _byte_pieces(tensor: torch.Tensor, piece_bytes: int) -> Iterator[torch.Tensor]:
    """Yields a tensor's bytes in logical order, flat, all pieces but the last of the same whole blocks."""
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


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Returns flat pieces as one, as bytes."""
    dense = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    # The last piece may be a single entry, as which it has any stride.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same bits as integers, whose copies nothing rounds or quiets; it copies nothing."""
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.itemsize not in _BITS_OF:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS_OF[tensor.itemsize])
