"""What a digest is: the sum of a block of words, on the host and on a device.

The bytes of a tensor are words ``x_i`` of 8, the last one filled with zeros, in blocks of 32,768 words. Those
of a block's first half are multiplied by one factor and moved up in memory by 4 bytes, those of its second
half by another one and by 2 bytes; both are laid over each other by an exclusive or. The words ``z_i`` that
this gives make the sum of ``w_i * z_i``, and the digest is the sum of the blocks, each times a multiplier of
its own: all modulo 2^64, all factors odd and fixed. Zeros at the end change nothing.

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

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "BLOCK_WORDS",
    "HALF_WORDS",
    "WORD_BYTES",
    "HostSums",
    "Words",
    "device_sums",
    "multipliers",
    "weights",
]

Words = npt.NDArray[np.uint64]

WORD_BYTES = 8
BLOCK_WORDS = 32_768
"""Words that share one multiplier; on a host the pieces that stay in its cache."""
HALF_WORDS = BLOCK_WORDS // 2

_LANE_BYTES = 2
_LANES = WORD_BYTES // _LANE_BYTES
# Lanes of the empty word before a half that are left out where it is moved up: by 4 bytes, and by 2.
_SKIPPED_FIRST = 2
_SKIPPED_SECOND = 3
_FACTOR_FIRST = 0xD6E8_FEB8_6659_FD93
_FACTOR_SECOND = 0xA076_1D64_78BD_642F
_HOST_FACTORS = (np.array([_FACTOR_FIRST], np.uint64), np.array([_FACTOR_SECOND], np.uint64))
_SEED_OF_WEIGHTS = 0
_SEED_OF_MULTIPLIERS = 1 << 40
_STRIDE = 0x9E37_79B9_7F4A_7C15
# Shift and factor of each step of splitmix64.
_STEPS = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB), (31, 1))


class HostSums:
    """Sums of blocks in the host's memory; it keeps what one block needs beside its words, for one thread.

    Args:
        weights_: See `weights`.
    """

    def __init__(self, weights_: Words) -> None:
        self._weights = weights_
        # Of each half the products, between two empty words.
        self._first = np.zeros(HALF_WORDS + 2, np.uint64)
        self._second = np.zeros(HALF_WORDS + 2, np.uint64)
        self._mixed = np.empty(HALF_WORDS + 1, np.uint64)
        self._first_lanes = self._first.view(np.uint16)[_SKIPPED_FIRST:]
        self._second_lanes = self._second.view(np.uint16)[_SKIPPED_SECOND:]
        self._lanes = self._mixed.view(np.uint16)

    def of_block(self, words: Words) -> int:
        """Returns the sum of up to a block of words; modulo 2^64 only once it is reduced (hot path)."""
        num_first = min(len(words), HALF_WORDS)
        num_lanes = (num_first + 1) * _LANES
        num_over = 0
        np.multiply(words[:num_first], _HOST_FACTORS[0], out=self._first[1 : num_first + 1])
        self._first[num_first + 1] = 0
        if len(words) > num_first:
            num_second = len(words) - num_first
            np.multiply(words[num_first:], _HOST_FACTORS[1], out=self._second[1 : num_second + 1])
            self._second[num_second + 1] = 0
            num_over = (num_second + 1) * _LANES
            np.bitwise_xor(
                self._first_lanes[:num_over], self._second_lanes[:num_over], out=self._lanes[:num_over]
            )
        if num_over < num_lanes:
            self._lanes[num_over:num_lanes] = self._first_lanes[num_over:num_lanes]
        mixed = self._mixed[: num_first + 1]
        np.multiply(mixed, self._weights[: num_first + 1], out=mixed)
        return int(np.add.reduce(mixed))

    def of_rows(self, words: Words) -> Words:
        """Returns the sum of each row (hot path).

        Args:
            words: Rows that end with an empty word, all together no more than a half.
        """
        num_words = words.size
        np.multiply(words.reshape(-1), _HOST_FACTORS[0], out=self._first[1 : num_words + 1])
        self._lanes[: num_words * _LANES] = self._first_lanes[: num_words * _LANES]
        mixed = self._mixed[:num_words].reshape(words.shape)
        np.multiply(mixed, self._weights[: words.shape[1]], out=mixed)
        sums: Words = np.add.reduce(mixed, axis=1)
        return sums


def device_sums(words: torch.Tensor, weights_: torch.Tensor) -> torch.Tensor:
    """Returns the sums of blocks wherever they lie, one in a row (training thread, hot path).

    Args:
        words: Rows of int64, no longer than a block.
        weights_: See `weights`.
    """
    num_words = words.shape[1]
    num_first = min(num_words, HALF_WORDS)
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
