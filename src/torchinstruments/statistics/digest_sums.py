"""What a digest is: the sum of a block of words, on the host and on a device.

The bytes of a tensor are words ``x_i`` of 8, the last one filled with zeros, in blocks of 32,768 words, of
which the last may be shorter. Those of a block's first half are multiplied by one factor and moved up in
memory by 4 bytes, those of its second half by another one and by 2 bytes; both are laid over each other by an
exclusive or. A block of up to 1,024 words has no second half, and of an odd number the first half has one
more. The words ``z_i`` that this gives make the sum of ``w_i * z_i``, and the digest is the sum of the
blocks, each times a multiplier of its own: all modulo 2^64, all factors odd and fixed.

Any change within one word changes the digest with certainty. Its product with an odd factor differs. The
product lies in two words ``z_i``, its lower bytes at the top of the earlier one, its upper bytes at the
bottom of the later one; so the lowest bits in which the two differ do not have the same place, and no odd
weights make them cancel.

Changes of several words cancel with a probability of about 2^-32 at worst. An odd factor cannot spread the
top bit of a word, so that two changes of it alone would always cancel; the move brings it to bit 31 from the
first half and to bit 15 from the second, before the weights come. Two changes of the top bit in one block are
seen with certainty, for no two weights are equal, or each other's negative, in their lower 33 bits.

Laying the halves over each other spares half the weights, and passes over the memory are what the time goes
into. Sums of integers do not depend on the order of adding: neither threads, nor pieces, nor a device's
schedule can change a digest.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "BLOCK_WORDS",
    "HALF_WORDS",
    "WHOLE_WORDS",
    "WORD_BYTES",
    "HostSums",
    "Words",
    "device_sums",
    "multipliers",
    "weights",
]

Words = npt.NDArray[np.uint64]
_Lanes = npt.NDArray[np.uint16]

WORD_BYTES = 8
BLOCK_WORDS = 32_768
"""Words that share one multiplier; on a host the pieces that stay in its cache."""
HALF_WORDS = BLOCK_WORDS // 2
WHOLE_WORDS = 1024
"""Words of a block up to which it has no second half."""

_LANE_BYTES = 2
_LANES = WORD_BYTES // _LANE_BYTES
# Lanes of the empty word before a half that are left out where it is moved up: by 4 bytes, and by 2.
_SKIPPED_FIRST = 2
_SKIPPED_SECOND = 3
_FACTOR_FIRST = 0xD6E8_FEB8_6659_FD93
_FACTOR_SECOND = 0xA076_1D64_78BD_642F
# Without a dimension they are multiplied by in half a microsecond less.
_HOST_FACTORS = (np.array(_FACTOR_FIRST, np.uint64), np.array(_FACTOR_SECOND, np.uint64))
_LINE_BYTES = 64
_MAX_LENGTHS = 64
_MAX_RUNS = 8
# Asked for the sums from one place on, NumPy needs less time around the numbers than for a sum.
_FROM_FIRST = np.zeros(1, np.intp)
_HALF_WORD = np.array(32, np.uint64)
_SEED_OF_WEIGHTS = 0
_SEED_OF_MULTIPLIERS = 1 << 40
_STRIDE = 0x9E37_79B9_7F4A_7C15
# Shift and factor of each step of splitmix64.
_STEPS = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB), (31, 1))


class _Views(NamedTuple):
    """Where in the memory of `HostSums` the parts of a block of one length go.

    Attributes:
        num_first: Words of the first half.
        first: Their products.
        second: Products of the second half.
        laid_over: Lanes of both halves as far as the second one reaches, and where they are laid together.
        bare: Where lanes of the first half go that are beyond that, and these, if there are any.
        mixed: What both make.
        weights: Of that.
    """

    num_first: int
    first: Words
    second: Words
    laid_over: tuple[_Lanes, _Lanes, _Lanes]
    bare: tuple[_Lanes, _Lanes] | None
    mixed: Words
    weights: Words


class HostSums:
    """Sums of blocks in the host's memory; it keeps what one block needs beside its words, for one thread.

    Args:
        weights_: See `weights`.
    """

    def __init__(self, weights_: Words) -> None:
        self._weights = weights_
        # Of each half the products, between two empty words.
        self._first = _at_line(HALF_WORDS + 2, 1)
        self._second = _at_line(HALF_WORDS + 2, 1)
        self._mixed = _at_line(HALF_WORDS + 1, 0)
        self._first_lanes: _Lanes = self._first.view(np.uint16)[_SKIPPED_FIRST:]
        self._second_lanes: _Lanes = self._second.view(np.uint16)[_SKIPPED_SECOND:]
        self._lanes: _Lanes = self._mixed.view(np.uint16)
        self._views: dict[int, _Views] = {}
        self._weights_of_runs: dict[tuple[int, ...], tuple[Words, Words, npt.NDArray[np.intp]]] = {}

    def of_block(self, words: Words) -> int:
        """Returns the sum of up to a block of words; modulo 2^64 only once it is reduced (hot path)."""
        num_words = len(words)
        views = self._views.get(num_words)
        if views is None:
            views = self._new_views(num_words)
        num_first, first, second, laid_over, bare, mixed, weights_ = views
        # Behind the products another length may have left its own.
        self._first[num_first + 1] = 0
        if num_first == num_words:
            np.multiply(words, _HOST_FACTORS[0], first)
        else:
            np.multiply(words[:num_first], _HOST_FACTORS[0], first)
            np.multiply(words[num_first:], _HOST_FACTORS[1], second)
            self._second[num_words - num_first + 1] = 0
            np.bitwise_xor(*laid_over)
        if bare is not None:
            np.copyto(*bare)
        np.multiply(mixed, weights_, mixed)
        return int(np.add.reduceat(mixed, _FROM_FIRST)[0])

    def of_runs(self, words: Words, sizes: tuple[int, ...]) -> Words:
        """Returns the sums of blocks that lie side by side (hot path).

        Args:
            words: Of all blocks, together no more than a half.
            sizes: Words of each block, none of which has a second half.
        """
        kept = self._weights_of_runs.get(sizes)
        if kept is None:
            kept = self._new_weights_of_runs(sizes)
        weights_of_lower, weights_of_upper, starts = kept
        # What of a product is moved into one word and into the next is weighted where it is, for there is no
        # empty word between two blocks.
        lower = self._first[1 : len(words) + 1]
        upper = self._mixed[: len(words)]
        np.multiply(words, _HOST_FACTORS[0], lower)
        np.right_shift(lower, _HALF_WORD, upper)
        np.left_shift(lower, _HALF_WORD, lower)
        np.multiply(upper, weights_of_upper, upper)
        np.multiply(lower, weights_of_lower, lower)
        np.add(upper, lower, upper)
        sums: Words = np.add.reduceat(upper, starts)
        return sums

    def _new_weights_of_runs(self, sizes: tuple[int, ...]) -> tuple[Words, Words, npt.NDArray[np.intp]]:
        """Returns the weights of lower and upper halves of products, and where blocks start; keeps them."""
        kept = (
            np.concatenate([self._weights[:size] for size in sizes]),
            np.concatenate([self._weights[1 : size + 1] for size in sizes]),
            np.cumsum([0, *sizes[:-1]], dtype=np.intp),
        )
        if len(self._weights_of_runs) >= _MAX_RUNS:
            self._weights_of_runs.clear()
        self._weights_of_runs[sizes] = kept
        return kept

    def _new_views(self, num_words: int) -> _Views:
        """Returns the views for a length, and keeps them: each costs as much as some hundred words."""
        num_first = _num_first(num_words)
        num_second = num_words - num_first
        num_over = (num_second + 1) * _LANES if num_second else 0
        num_lanes = (num_first + 1) * _LANES
        bare = (self._lanes[num_over:num_lanes], self._first_lanes[num_over:num_lanes])
        views = _Views(
            num_first,
            self._first[1 : num_first + 1],
            self._second[1 : num_second + 1],
            (self._first_lanes[:num_over], self._second_lanes[:num_over], self._lanes[:num_over]),
            bare if num_over < num_lanes else None,
            self._mixed[: num_first + 1],
            self._weights[: num_first + 1],
        )
        if len(self._views) >= _MAX_LENGTHS:
            self._views.clear()
        self._views[num_words] = views
        return views


def device_sums(words: torch.Tensor, weights_: torch.Tensor) -> torch.Tensor:
    """Returns the sums of blocks wherever they lie, one in a row (training thread, hot path).

    Args:
        words: Rows of int64, no longer than a block.
        weights_: See `weights`.
    """
    num_words = words.shape[1]
    num_first = _num_first(num_words)
    num_lanes = (num_first + 1) * _LANES
    lanes = _device_products(words.narrow(1, 0, num_first), _FACTOR_FIRST).narrow(
        1, _SKIPPED_FIRST, num_lanes
    )
    if num_words == num_first:
        mixed = lanes.clone(memory_format=torch.contiguous_format)
    else:
        second = _device_products(words.narrow(1, num_first, num_words - num_first), _FACTOR_SECOND)
        num_over = second.shape[1] - _LANES
        second = second.narrow(1, _SKIPPED_SECOND, num_over)
        if num_over == num_lanes:
            mixed = lanes.bitwise_xor(second)
        else:
            mixed = lanes.clone(memory_format=torch.contiguous_format)
            mixed.narrow(1, 0, num_over).bitwise_xor_(second)
    return mixed.view(torch.int64).mul_(weights_.narrow(0, 0, num_first + 1)).sum(1)


def weights(device: torch.device) -> torch.Tensor:
    """Returns the weights of the words of a block, as int64, made on the device itself."""
    return _odd_factors(_SEED_OF_WEIGHTS, HALF_WORDS + 1, device)


def multipliers(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns the multipliers of blocks from one on, as int64, made on the device itself."""
    return _odd_factors(_SEED_OF_MULTIPLIERS + first, count, device)


def _num_first(num_words: int) -> int:
    """Returns how many words the first half of a block has."""
    return num_words if num_words <= WHOLE_WORDS else (num_words + 1) // 2


def _at_line(num_words: int, place: int) -> Words:
    """Returns zeros of which the word at a place begins a line of the cache: less is read and written so."""
    memory = np.zeros(num_words * WORD_BYTES + _LINE_BYTES, np.uint8)
    start = -(memory.ctypes.data + place * WORD_BYTES) % _LINE_BYTES
    return memory[start : start + num_words * WORD_BYTES].view(np.uint64)


def _device_products(words: torch.Tensor, factor: int) -> torch.Tensor:
    """Returns the products of rows of words, each row between two empty words, as lanes."""
    num_rows, num_words = words.shape
    rows = words.new_empty((num_rows, num_words + 2))
    # The first and the last of each in one call.
    rows.as_strided((num_rows, 2), (num_words + 2, num_words + 1)).zero_()
    torch.mul(words, _signed(factor), out=rows.narrow(1, 1, num_words))
    return rows.view(torch.int16)


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
