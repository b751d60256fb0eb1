"""Which form a CPU tensor is measured in."""

import pytest
import torch

from torchinstruments.statistics import host
from torchinstruments.statistics.ordered import CountedEntries, SortedEntries
from torchinstruments.statistics.scanned import ScannedEntries
from torchinstruments.statistics.selected import SelectedEntries


@pytest.mark.parametrize(
    ("dtype", "size", "max_scratch_bytes", "form"),
    [
        (torch.float32, 1000, 4000, SortedEntries),
        (torch.float32, 1001, 4000, ScannedEntries),
        (torch.float64, 1000, 4000, ScannedEntries),
        (torch.bfloat16, 1000, 4000, SortedEntries),
        (torch.bfloat16, 1001, 4000, CountedEntries),
        (torch.float16, 65_535, 1 << 28, SortedEntries),
        (torch.float16, 65_536, 1 << 28, CountedEntries),
        (torch.int16, 10, 1 << 28, SortedEntries),
        (torch.float8_e4m3fn, 1, 1 << 28, CountedEntries),
        (torch.bool, 1, 1 << 28, CountedEntries),
    ],
)
def test_the_form_follows_dtype_size_and_bound(
    dtype: torch.dtype, size: int, max_scratch_bytes: int, form: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is sorted only where it fits; small dtypes are counted."""
    monkeypatch.setattr(host, "prefers_selection", lambda _: False)
    assert type(host._ordered(torch.zeros(size, dtype=dtype), max_scratch_bytes)) is form


@pytest.mark.parametrize(
    ("dtype", "size", "max_scratch_bytes", "form"),
    [
        (torch.float32, 1000, 8000, SelectedEntries),
        (torch.float32, 1000, 7999, SortedEntries),
        (torch.float32, 1000, 3999, ScannedEntries),
        (torch.uint64, 1000, 16_000, SelectedEntries),
        (torch.float32, 999, 8000, SortedEntries),
        (torch.bfloat16, 1000, 8000, SortedEntries),
        (torch.bfloat16, 65_536, 1 << 28, CountedEntries),
    ],
)
def test_where_selecting_is_faster_wide_dtypes_are_selected_from(
    dtype: torch.dtype, size: int, max_scratch_bytes: int, form: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the size on that the machine prefers it for, and where the worst of data would fit."""
    monkeypatch.setattr(host, "prefers_selection", lambda num_entries: num_entries >= 1000)
    assert type(host._ordered(torch.zeros(size, dtype=dtype), max_scratch_bytes)) is form
