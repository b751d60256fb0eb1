"""TensorBoard's framing of records in an event file.

A record is its length (8 bytes, little-endian), a checksum of those, the data, and a checksum of the data.
The checksum is CRC-32C (Castagnoli, reversed polynomial 0x82F63B78), rotated right by 15 bits, plus
0xA282EAD8.

TensorBoard has a writer of its own, but its package imports every filesystem client that it can find, such as
boto3, which must not come into a training process; and it computes the checksum byte by byte in Python.
Here a block is done at once: the checksum is linear over XOR, so that each byte contributes a table's entry
that depends on its value and on its distance from the block's end.
"""

import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["crc32c", "frame"]

_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_BLOCK_BYTES = 512
_STATE_BYTES = 4


def frame(data: bytes) -> bytes:
    """Returns a record as it lies in an event file."""
    length = struct.pack("<Q", len(data))
    return length + _masked(crc32c(length)) + data + _masked(crc32c(data))


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C of some bytes (RFC 3720, appendix B.4)."""
    table = _table()
    values = np.frombuffer(data, np.uint8)
    state = 0xFFFFFFFF
    for start in range(0, len(data), _BLOCK_BYTES):
        block = values[start : start + _BLOCK_BYTES]
        if len(block) < _STATE_BYTES:
            for value in block.tolist():
                state = int(table[0, (state ^ value) & 0xFF]) ^ (state >> 8)
            continue
        mixed = block.copy()
        mixed[:_STATE_BYTES] ^= np.frombuffer(struct.pack("<I", state), np.uint8)
        distances = np.arange(len(block) - 1, -1, -1)
        state = int(np.bitwise_xor.reduce(table[distances, mixed]))
    return state ^ 0xFFFFFFFF


def _masked(checksum: int) -> bytes:
    rotated = (checksum >> 15) | (checksum << 17)
    return struct.pack("<I", (rotated + _MASK_DELTA) & 0xFFFFFFFF)


@cache
def _table() -> NDArray[np.uint32]:
    """Returns what a byte contributes, by its distance from the block's end and by its value."""
    table = np.empty((_BLOCK_BYTES, 256), np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = np.where(row & 1, (row >> 1) ^ np.uint32(_POLYNOMIAL), row >> 1).astype(np.uint32)
    table[0] = row
    for distance in range(1, _BLOCK_BYTES):
        previous = table[distance - 1]
        table[distance] = table[0, previous & 0xFF] ^ (previous >> np.uint32(8))
    return table
