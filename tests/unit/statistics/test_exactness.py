"""Every dtype, kind of data and size against NumPy in extended precision, across every change of method.

Packed with others up to 4,096 entries; 16-bit dtypes counted instead of sorted from 65,536; sums in chunks of
65,536; pieces of a million; and at each of these one entry fewer and one more.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchinstruments.records import Absent
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.histograms import MeasuredHistogram, histogram
from torchinstruments.statistics.profile import ExactProfile
from torchinstruments.statistics.reducers import finite_fraction, max_abs, rms

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.bool,
)
KINDS = ("normal", "offset", "rectified", "constant", "heavy", "invalid", "tiny")
SIZES = (1, 2, 3, 255, 256, 257, 4095, 4096, 4097, 65_535, 65_536, 65_537)
HISTOGRAMS = (histogram(), histogram(name="fixed", bins=10, value_range=(-1.0, 1.0)))


def fail(probe: str, error: BaseException) -> None:
    """Nothing may go wrong in a batch."""
    raise AssertionError(probe) from error


def entries_of(kind: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns entries of one kind."""
    generator = torch.Generator().manual_seed(size)
    entries = torch.randn(size, generator=generator, dtype=torch.float64)
    if kind == "offset":
        entries += 100.0
    elif kind == "rectified":
        entries.clamp_(min=0.0)
    elif kind == "constant":
        entries.fill_(0.1)
    elif kind == "heavy":
        entries = entries**5
    elif kind == "tiny":
        entries *= 1e-38
    if not dtype.is_floating_point:
        entries = (entries * 10).abs() if dtype not in {torch.int8, torch.int16} else entries
        return entries.clamp(max=100).to(dtype)
    if kind == "invalid":
        entries[::3], entries[1::5], entries[2::7] = math.nan, math.inf, -math.inf
    return entries.to(dtype)


def exact(entries: npt.NDArray[np.float64]) -> dict[str, float | Absent]:
    """Returns statistics in extended precision."""
    finite = np.sort(entries[np.isfinite(entries)]).astype(np.longdouble)
    fractions: dict[str, float | Absent] = {
        "zero_fraction": int((entries == 0).sum()) / entries.size,
        "nonfinite_fraction": (entries.size - finite.size) / entries.size,
        "finite_fraction": finite.size / entries.size,
    }
    if finite.size == 0:
        names = ("mean", "std", "min", "max", "p25", "p50", "p75", "rms", "max_abs")
        return dict.fromkeys(names, Absent("no_finite_entries")) | fractions
    mean = finite.sum() / finite.size
    values = {
        "mean": mean,
        "std": np.sqrt(((finite - mean) ** 2).sum() / finite.size),
        "min": finite[0],
        "max": finite[-1],
        "rms": np.sqrt((finite**2).sum() / finite.size),
        "max_abs": max(abs(finite[0]), abs(finite[-1])),
    }
    for quarters in (1, 2, 3):
        below, rest = divmod((finite.size - 1) * quarters, 4)
        gap = finite[min(below + 1, finite.size - 1)] - finite[below]
        values[f"p{25 * quarters}"] = finite[below] + gap * rest / 4
    return {name: float(value) for name, value in values.items()} | fractions


def check(
    found: Mapping[str, float | Absent], expected: Mapping[str, float | Absent], largest: float
) -> None:
    """Extremes and fractions are equal; the rest is right to a few bits of the largest entry."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        right = expected[name]
        is_number = isinstance(right, float) and isinstance(value, float)
        if is_number and name in {"mean", "std", "rms", "p25", "p50", "p75"}:
            assert abs(value - right) <= 1e-14 * largest, name
        else:
            assert value == right, name


def check_histogram(found: MeasuredHistogram, entries: npt.NDArray[np.float64]) -> None:
    """Counts are equal to those of comparisons in float64, which holds every entry here."""
    finite = entries[np.isfinite(entries)]
    if finite.size == 0:
        assert found.unavailable_reason == "no_finite_entries"
        return
    edges = np.array(found.edges)
    up_to = [int((finite < edge).sum()) for edge in edges[:-1]] + [int((finite <= edges[-1]).sum())]
    assert found.counts == tuple(np.diff(up_to).tolist())
    assert (found.underflow, found.overflow) == (up_to[0], finite.size - up_to[-1])
    assert found.finite_count == sum(found.counts) + found.underflow + found.overflow
    wide = finite.astype(np.longdouble)
    scale = float(np.abs(wide).sum())
    assert found.total == pytest.approx(float(wide.sum()), rel=0, abs=1e-14 * scale)
    assert found.total_of_squares == pytest.approx(float((wide**2).sum()), rel=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_and_histograms_are_exact_at_every_size(dtype: torch.dtype, kind: str) -> None:
    """One batch of all sizes gives, for each tensor, what extended precision gives."""
    reducers = (ExactProfile(), rms(), max_abs(), finite_fraction())
    batch = ScalarBatch(reducers, fail, HISTOGRAMS)
    tensors = [entries_of(kind, size, dtype) for size in SIZES]
    places = [batch.add(tensor, histograms=True) for tensor in tensors]
    batch.seal()
    for tensor, place in zip(tensors, places, strict=True):
        entries = tensor.to(torch.float64).numpy()
        measured = batch.read(place)
        found = {
            metric: Absent(reason) if value is None else value
            for metric, value, reason in zip(measured.metrics, measured.values, measured.reasons, strict=True)
        }
        finite = np.abs(entries[np.isfinite(entries)])
        check(found, exact(entries), float(finite.max(initial=0.0)))
        for one in batch.read_histograms(place):
            check_histogram(one, entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_beyond_a_million_entries_pieces_add_up(dtype: torch.dtype) -> None:
    """Sorted, counted, and scanned in bounded memory: the same counts, and moments to rounding."""
    tensor = entries_of("invalid", 2**20 + 3, dtype)
    entries = tensor.to(torch.float64).numpy()
    finite = np.abs(entries[np.isfinite(entries)])
    for max_scratch_bytes in (1 << 28, 1 << 20):
        batch = ScalarBatch((ExactProfile(max_scratch_bytes),), fail, HISTOGRAMS)
        place = batch.add(tensor, histograms=True)
        batch.seal()
        measured = batch.read(place)
        found = dict(zip(measured.metrics, measured.values, strict=True))
        expected = {name: value for name, value in exact(entries).items() if name in found}
        check({name: value for name, value in found.items() if value is not None}, expected, finite.max())
        for one in batch.read_histograms(place):
            check_histogram(one, entries)
