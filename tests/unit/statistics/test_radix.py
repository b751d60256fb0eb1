"""Selection by digits on a device."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.statistics.radix import radix_select

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=8)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 60),
    num_piece=st.integers(5, 64),
    spread=st.integers(-20, 14),
)
def test_it_finds_what_a_sort_finds(
    dtype: torch.dtype, seed: int, size: int, num_piece: int, spread: int
) -> None:
    """Every rank of a tensor that is read in pieces is the entry that stands there in the sorted tensor."""
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(size, generator=generator, dtype=torch.float64) * 2.0**spread).to(dtype)
    ranks = torch.arange(size)
    found = radix_select(lambda: tensor.split(num_piece), ranks, dtype)
    assert found.dtype is dtype
    assert torch.equal(found, tensor.sort().values)


def test_the_ends_of_int64_are_found() -> None:
    """Keys at both ends of their range do not wrap."""
    info = torch.iinfo(torch.int64)
    tensor = torch.tensor([info.max, 0, info.min, -1])
    assert radix_select(lambda: [tensor], torch.arange(4), torch.int64).tolist() == [
        info.min,
        -1,
        0,
        info.max,
    ]


def test_infinity_is_last() -> None:
    """What stands for an entry that is not finite comes behind all finite ones."""
    tensor = torch.tensor([math.inf, -3.0, 2.0])
    assert radix_select(lambda: [tensor], torch.arange(2), torch.float32).tolist() == [-3.0, 2.0]
