"""A number of 64 bits for the bytes of a tensor: equal bytes give equal numbers, on any device.

What the number is stands in `digest_sums`. Two NaNs of other bits, and -0 and +0, are different bytes. Length
and type are not in the digest; they stand beside it.

Where the tensor lies in the host's memory NumPy computes it, which is twice as fast there as the same in
torch, and its result is a number at once. Elsewhere it is a 0-d int64 tensor, for torch wraps modulo 2^64
too. Small tensors cost more around the numbers than for them, so those of a model are copied side by side and
digested together; each has the digest that it would have alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from torchinstruments.statistics.digest_bytes import (
    BLOCK_BYTES,
    byte_pieces,
    joined_words,
    padded_rows,
    small_groups,
)
from torchinstruments.statistics.digest_sums import (
    BLOCK_WORDS,
    HALF_WORDS,
    WHOLE_WORDS,
    WORD_BYTES,
    HostSums,
    Words,
    device_sums,
    multipliers,
    weights,
)
from torchinstruments.statistics.host_memory import as_bytes, as_words
from torchinstruments.statistics.isolation import functions_off, isolated
from torchinstruments.statistics.measuring import MAX_SCRATCH_BYTES

__all__ = ["Digester", "unsigned"]

_HOST = torch.device("cpu")
_NUM_MULTIPLIERS = 16_384
_ALL_64 = 0xFFFF_FFFF_FFFF_FFFF
# On a device a piece needs its products, and while it is gathered the pieces that it is gathered from.
_COPIES_EACH = 4
SMALL_BYTES = WHOLE_WORDS * WORD_BYTES
"""Tensors up to this are read together on the host: beyond it the copy costs more than a call for each, and
they would have second halves."""
SMALL_BYTES_ON_DEVICE = HALF_WORDS * WORD_BYTES
"""The same on a device, where a call costs more and a copy less."""
# What lies in no order is gathered on the host in one piece up to the first, and beyond it in pieces that
# stay in the cache: fresh memory costs more than the copy. Not where these would be of few rows, for a line
# of memory holds entries of many.
_FRESH_BYTES = 8 << 20
_CACHED_BYTES = 8 * BLOCK_BYTES
_MIN_ROWS = 32


class Digester:
    """Computes digests; it keeps the factors of each device that it met.

    Args:
        max_scratch_bytes: Bound of the memory that one digest takes beside its tensor and the factors.
    """

    def __init__(self, max_scratch_bytes: int = MAX_SCRATCH_BYTES) -> None:
        self._piece_bytes = max(1, max_scratch_bytes // (_COPIES_EACH * BLOCK_BYTES)) * BLOCK_BYTES
        # The program may make its observer inside a mode of its own, of fake tensors for one.
        with functions_off(), isolated("cpu"):
            self._first_multiplier = unsigned(int(multipliers(0, 1, _HOST)[0]))
        self._host_multipliers: Words | None = None
        # With memory that no thread works with at the moment.
        self._spare_sums: list[HostSums] = []
        self._factors: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_host(self, tensor: torch.Tensor) -> int:
        """Returns the digest of a tensor in the host's memory (training thread, hot path).

        Call it inside `isolated`.

        Args:
            tensor: A plain strided tensor on the CPU.
        """
        sums = self._taken_sums()
        digest = self._on_host(tensor, sums)
        self._spare_sums.append(sums)
        return digest

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the digest as a 0-d int64 tensor where the tensor lies (training thread, hot path).

        Call it inside `isolated`. Nothing is read here; `unsigned` gives the number that `on_host` would.

        Args:
            tensor: A plain strided tensor on any device.
        """
        in_block, of_blocks = self._factors_on(tensor.device)
        total: torch.Tensor | None = None
        block = 0
        for piece in byte_pieces(tensor, self._piece_bytes):
            num_blocks, num_last = divmod(piece.numel(), BLOCK_BYTES)
            parts: list[torch.Tensor] = []
            if num_blocks:
                whole = _as_device_words(piece.narrow(0, 0, num_blocks * BLOCK_BYTES))
                parts.append(device_sums(whole.view(num_blocks, -1), in_block))
            if num_last:
                last = _as_device_words(piece.narrow(0, num_blocks * BLOCK_BYTES, num_last))
                parts.append(device_sums(last.view(1, -1), in_block))
            sums = parts[0] if len(parts) == 1 else torch.cat(parts)
            num_blocks = sums.numel()
            if block + num_blocks <= _NUM_MULTIPLIERS:
                factors = of_blocks.narrow(0, block, num_blocks)
            else:
                factors = multipliers(block, num_blocks, tensor.device)
            of_piece = sums.mul_(factors).sum()
            total = of_piece if total is None else total + of_piece
            block += num_blocks
        return torch.zeros((), dtype=torch.int64, device=tensor.device) if total is None else total

    def several_on_host(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[int | None], list[tuple[int, Exception]]]:
        """Returns the digests of all tensors, of small ones together (training thread, hot path).

        Call it inside `isolated`.

        Args:
            tensors: As for `on_host`.

        Returns:
            A digest for each; None for one that raised, and its place with what it raised.
        """
        digests: list[int | None] = [None] * len(tensors)
        failures: list[tuple[int, Exception]] = []
        alone: list[int] = []
        for group in small_groups(tensors, SMALL_BYTES, HALF_WORDS * WORD_BYTES, of_one_shape=False):
            if len(group) > 1:
                try:
                    of_group = self._runs_on_host([tensors[place] for place in group])
                except Exception:  # noqa: BLE001 - each by itself tells whose it is
                    alone += group
                else:
                    for place, digest in zip(group, of_group, strict=True):
                        digests[place] = digest
            else:
                alone += group
        sums = self._taken_sums()
        for place in alone:
            try:
                digests[place] = self._on_host(tensors[place], sums)
            except Exception as error:  # noqa: BLE001 - one tensor's failure is its own
                # Without its traceback, whose frames hold the tensors and, by this list, itself.
                failures.append((place, error.with_traceback(None)))
        self._spare_sums.append(sums)
        return digests, failures

    def several_on_device(
        self, tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Sequence[int], torch.Tensor | Exception]]:
        """Yields the digests of all tensors of one device, those of small ones together.

        Call it inside `isolated` (training thread, hot path).

        Args:
            tensors: As for `on_device`, all of the same one.

        Yields:
            Places and an int64 tensor of their digests; or a place, and what its tensor raised.
        """
        groups = small_groups(tensors, SMALL_BYTES_ON_DEVICE, self._piece_bytes, of_one_shape=True)
        waiting = list(groups)
        while waiting:
            places = waiting.pop()
            found: torch.Tensor | Exception
            try:
                if len(places) == 1:
                    found = self.on_device(tensors[places[0]])
                else:
                    found = self._rows_on_device([tensors[place] for place in places])
            except Exception as error:  # noqa: BLE001 - as on the host
                if len(places) > 1:
                    waiting.extend([place] for place in places)
                    continue
                found = error
            yield places, found

    def _on_host(self, tensor: torch.Tensor, sums: HostSums) -> int:
        """Returns the digest of a tensor."""
        num_bytes = tensor.nbytes
        if num_bytes <= BLOCK_BYTES and num_bytes % WORD_BYTES == 0 and tensor.is_contiguous():
            # Models have hundreds of these, each of which costs what is done around the numbers.
            words = as_words(tensor, num_bytes // WORD_BYTES)
            if words.flags.aligned and not tensor.is_conj():
                return sums.of_block(words) * self._first_multiplier & _ALL_64
        total, block = 0, 0
        for data in self._host_pieces(tensor):
            for words in _blocks(data):
                total += sums.of_block(words) * self._host_multiplier(block)
                block += 1
        return total & _ALL_64

    def _runs_on_host(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Returns the digests of small tensors of one group."""
        joined, sizes = joined_words(tensors)
        sums = self._taken_sums()
        of_runs = sums.of_runs(as_words(joined, joined.numel()), sizes)
        self._spare_sums.append(sums)
        digests: list[int] = np.multiply(of_runs, np.uint64(self._first_multiplier)).tolist()
        return digests

    def _rows_on_device(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the digests of small tensors of one group."""
        device = tensors[0].device
        in_block, of_blocks = self._factors_on(device)
        rows = padded_rows(tensors)
        return device_sums(rows, in_block).mul_(of_blocks.narrow(0, 0, 1))

    def _host_pieces(self, tensor: torch.Tensor) -> Iterator[npt.NDArray[np.uint8]]:
        """Yields the bytes of a tensor on the CPU as `byte_pieces` does, those of a contiguous one in one."""
        if tensor.is_contiguous() and not tensor.is_conj():
            yield as_bytes(tensor)
            return
        piece_bytes = self._piece_bytes
        if tensor.nbytes > _FRESH_BYTES and tensor.nbytes // tensor.shape[0] <= _CACHED_BYTES // _MIN_ROWS:
            piece_bytes = min(piece_bytes, _CACHED_BYTES)
        for piece in byte_pieces(tensor, piece_bytes):
            yield as_bytes(piece)

    def _taken_sums(self) -> HostSums:
        """Returns sums for this thread alone, until they are put back."""
        try:
            return self._spare_sums.pop()
        except IndexError:
            in_block, _ = self._factors_on(_HOST)
            return HostSums(in_block.numpy().view(np.uint64))

    def _host_multiplier(self, block: int) -> int:
        """Returns the multiplier of a block."""
        if block < _NUM_MULTIPLIERS:
            if self._host_multipliers is None:
                self._host_multipliers = self._factors_on(_HOST)[1].numpy().view(np.uint64)
            return int(self._host_multipliers[block])
        return unsigned(int(multipliers(block, 1, _HOST)[0]))

    def _factors_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights in a block and the multipliers of blocks, made on the device itself."""
        if device not in self._factors:
            self._factors[device] = (weights(device), multipliers(0, _NUM_MULTIPLIERS, device))
        return self._factors[device]


def unsigned(digest: int) -> int:
    """Returns what a number that was read from an int64 tensor is without its sign (writer thread)."""
    return digest & _ALL_64


def _blocks(data: npt.NDArray[np.uint8]) -> Iterator[Words]:
    """Yields the words of blocks on the host, the last one filled with zeros."""
    words: Words = data[: len(data) // WORD_BYTES * WORD_BYTES].view(np.uint64)
    num_whole = len(words)
    if not words.flags.aligned:
        # NumPy reads what is not aligned piecemeal.
        num_whole = 0
    elif len(data) % WORD_BYTES:
        num_whole -= num_whole % BLOCK_WORDS
    for first in range(0, num_whole, BLOCK_WORDS):
        yield words[first : min(first + BLOCK_WORDS, num_whole)]
    for first in range(num_whole * WORD_BYTES, len(data), BLOCK_BYTES):
        part = data[first : first + BLOCK_BYTES]
        copy = np.zeros(-(-len(part) // WORD_BYTES), np.uint64)
        copy.view(np.uint8)[: len(part)] = part
        yield copy


def _as_device_words(data: torch.Tensor) -> torch.Tensor:
    """Returns flat bytes on a device as int64 words, the last one filled with zeros."""
    num_missing = -data.numel() % WORD_BYTES
    if num_missing:
        data = torch.constant_pad_nd(data, (0, num_missing))
    elif data.storage_offset() % WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64)
