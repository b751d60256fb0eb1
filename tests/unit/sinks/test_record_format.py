"""Framing and checksums of event files."""

import random

import pytest
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

from torchinstruments.sinks.record_format import crc32c, frame


def test_the_checksum_of_the_standard_is_right() -> None:
    """RFC 3720 and every catalogue of checksums give these."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"") == 0


@pytest.mark.parametrize("size", [*range(1, 12), 508, *range(511, 520), 1023, 1024, 1025, 5000])
def test_the_checksum_agrees_with_tensorboards_own(size: int) -> None:
    """On both sides of every border between blocks."""
    data = random.Random(size).randbytes(size)
    assert crc32c(data) == pywrap_tensorflow.crc32c(data)


def test_a_frame_holds_length_data_and_two_checksums() -> None:
    """16 bytes around the data, the length first."""
    framed = frame(b"data")
    assert framed[:8] == (4).to_bytes(8, "little")
    assert framed[12:-4] == b"data"
    assert int.from_bytes(framed[-4:], "little") == pywrap_tensorflow.masked_crc32c(b"data")
    assert int.from_bytes(framed[8:12], "little") == pywrap_tensorflow.masked_crc32c(framed[:8])
