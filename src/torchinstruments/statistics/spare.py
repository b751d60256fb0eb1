"""Scratch memory that is used again.

A page that the system hands out anew costs more than most of what is done with it, and whether memory which
was given back comes from the system again depends on what else the program has on its heap.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["LINE_BYTES", "SPARE_BYTES", "borrowed"]

SPARE_BYTES = 1 << 21
"""Of a block that is kept."""

_MAX_KEPT = 3
"""Blocks that wait to be used again; other threads than one have to do with what is left of them."""

LINE_BYTES = 64
"""Of a cache, on nearly all processors; elsewhere only speed suffers."""

# It takes and gives in one step each, whichever threads are about, and drops what is too much.
_kept: deque[npt.NDArray[np.uint8]] = deque(maxlen=_MAX_KEPT)


class borrowed:  # noqa: N801 - reads as what it does
    """Lends memory of any contents (any thread).

    No vector of a processor crosses the end of a cache line in it. NumPy's own begins 16 bytes into a line,
    which makes each pass over it a seventh slower.

    Args:
        num_bytes: How much, at least 1; more than `SPARE_BYTES` is not kept.
    """

    __slots__ = ("_block", "_num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        try:
            is_spare = num_bytes <= SPARE_BYTES
            self._block = _kept.pop() if is_spare else _aligned(num_bytes)
        except IndexError:
            self._block = _aligned(SPARE_BYTES)

    def __enter__(self) -> npt.NDArray[np.uint8]:
        return self._block[: self._num_bytes]

    def __exit__(self, *_: object) -> None:
        if self._num_bytes <= SPARE_BYTES:
            _kept.append(self._block)


def _aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns memory that begins with a cache line."""
    memory = np.empty(num_bytes + LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes]
