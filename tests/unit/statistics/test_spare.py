"""Scratch memory that is used again."""

import threading
from collections import deque

import numpy as np
import pytest

from torchinstruments.statistics import spare
from torchinstruments.statistics.spare import LINE_BYTES, SPARE_BYTES, borrowed


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begins without blocks."""
    monkeypatch.setattr(spare, "_kept", deque(maxlen=spare._MAX_KEPT))


@pytest.mark.parametrize("num_bytes", [1, 1000, SPARE_BYTES, SPARE_BYTES + 1])
def test_it_is_as_large_as_was_asked_for_and_begins_with_a_line(num_bytes: int) -> None:
    """Whether it will be kept or not."""
    with borrowed(num_bytes) as memory:
        assert memory.size == num_bytes
        assert memory.ctypes.data % LINE_BYTES == 0
        memory[:] = 7


def test_a_block_is_lent_to_one_at_a_time_and_then_again() -> None:
    """Who borrows within a loan gets another block; what was given back is what comes next."""
    with borrowed(100) as first, borrowed(100) as second:
        assert not np.shares_memory(first, second)
        blocks = {first.ctypes.data, second.ctypes.data}
    with borrowed(SPARE_BYTES) as again:
        assert again.ctypes.data in blocks


def test_what_is_kept_is_bounded() -> None:
    """Neither many threads nor a large loan leave more behind."""
    barrier = threading.Barrier(8)

    def borrow() -> None:
        with borrowed(10):
            barrier.wait(timeout=30)

    threads = [threading.Thread(target=borrow) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with borrowed(4 * SPARE_BYTES):
        pass
    sizes = [block.size for block in spare._kept]
    assert 1 <= len(sizes) <= spare._MAX_KEPT
    assert set(sizes) == {SPARE_BYTES}


def test_a_block_comes_back_where_the_work_fails() -> None:
    """An error in between leaves nothing behind that is lost."""
    with pytest.raises(KeyError), borrowed(10):
        raise KeyError
    assert len(spare._kept) == 1
