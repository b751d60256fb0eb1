"""Order statistics without a sorted copy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.statistics.scanned import ScannedEntries


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64], ids=str
)
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 60), spread=st.integers(0, 30))
def test_every_rank_is_what_a_sort_puts_there(dtype: torch.dtype, seed: int, size: int, spread: int) -> None:
    """All ranks at once, for numbers that share many of their leading bits and for those that do not."""
    entries = (
        torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0**spread
    )
    tensor = (entries if dtype.is_signed else entries.abs()).to(dtype)
    found = ScannedEntries(tensor).at(range(size))
    assert found == sorted(tensor.tolist())


def test_the_tensor_is_read_and_not_changed() -> None:
    """Keys are made in copies."""
    tensor = torch.tensor([5, -3, 2**40])
    assert ScannedEntries(tensor).at([0, 1, 2]) == [-3, 5, 2**40]
    assert tensor.tolist() == [5, -3, 2**40]
