"""Every dtype, kind of data and size against NumPy in extended precision, across every change of method.

Packed with others up to 4,096 entries; 16-bit dtypes counted instead of sorted from 65,536; sums in chunks of
65,536; pieces of 2**20; and at each of these one entry fewer and one more. What a machine would sort is
selected from as well, and the other way round.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchinstruments.records import Absent
from torchinstruments.statistics import host
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
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
)
WIDE = tuple(dtype for dtype in DTYPES if dtype.itemsize >= 4)
"""What is sorted, or selected from."""

WIDE_INTEGERS = (torch.int64, torch.uint64)
KINDS = ("normal", "offset", "rectified", "constant", "heavy", "invalid", "tiny")
SIZES = (1, 2, 3, 255, 256, 257, 4095, 4096, 4097, 65_535, 65_536, 65_537)
MILLION = 2**20
FORMATS = {
    torch.float8_e4m3fn: (3, 7, (0x7F, 0xFF), ()),
    torch.float8_e5m2: (2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), (0x7C, 0xFC)),
    torch.float8_e4m3fnuz: (3, 8, (0x80,), ()),
    torch.float8_e5m2fnuz: (2, 16, (0x80,), ()),
}
"""Bits of the mantissa, bias of the exponent, and the codes that are NaN and infinite."""

HISTOGRAMS = (histogram(), histogram(name="fixed", bins=10, value_range=(-1.0, 1.0)))


def fail(probe: str, error: BaseException) -> None:
    """Nothing may go wrong in a batch."""
    raise AssertionError(probe) from error


def take_way(monkeypatch: pytest.MonkeyPatch, *, selects: bool) -> None:
    """Sets what is done with what is neither packed nor counted, whichever is faster on this machine."""
    monkeypatch.setattr(host, "prefers_selection", lambda _: selects)


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
    if dtype in WIDE_INTEGERS and kind in {"offset", "heavy"}:
        return wide_integers(kind, size, dtype, generator)
    if not dtype.is_floating_point:
        entries = (entries * 10).abs() if dtype not in {torch.int8, torch.int16} else entries
        return entries.clamp(max=100).to(dtype)
    if kind == "invalid":
        entries[::3], entries[1::5], entries[2::7] = math.nan, math.inf, -math.inf
    return entries.to(dtype)


def wide_integers(kind: str, size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Returns whole numbers that float64 cannot hold: close together near the highest one, or anywhere."""
    if kind == "heavy":
        lowest, highest = -(2**63), 2**63 - 1
    else:
        # As a pattern of bits -1 is the highest of uint64.
        highest = -1 if dtype is torch.uint64 else 2**63 - 1
        lowest = highest - 1000
    return torch.randint(lowest, highest, (size,), generator=generator).view(dtype)


def widened(tensor: torch.Tensor) -> npt.NDArray[np.longdouble]:
    """Returns every entry exactly; 8-bit floats are decoded here, apart from torch."""
    if tensor.dtype in WIDE_INTEGERS:
        return tensor.numpy().astype(np.longdouble)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return values_of_codes(tensor.dtype)[tensor.view(torch.uint8).numpy()]
    return tensor.to(torch.float64).numpy().astype(np.longdouble)


@lru_cache(maxsize=8)
def values_of_codes(dtype: torch.dtype) -> npt.NDArray[np.longdouble]:
    """Returns what each of the 256 patterns of an 8-bit float means."""
    if dtype is torch.float8_e8m0fnu:
        # No sign and no mantissa: an exponent alone.
        return np.array([2.0 ** (code - 127) for code in range(255)] + [math.nan], dtype=np.longdouble)
    num_bits, bias, nans, infinities = FORMATS[dtype]
    values = []
    for code in range(256):
        exponent, mantissa = divmod(code & 0x7F, 1 << num_bits)
        # Without an exponent the leading bit is no hidden one.
        significand = (1 << num_bits) + mantissa if exponent else mantissa
        value = math.ldexp(significand, max(exponent, 1) - bias - num_bits)
        value = math.nan if code in nans else math.inf if code in infinities else value
        values.append(math.copysign(value, -1.0 if code & 0x80 else 1.0))
    return np.array(values, dtype=np.longdouble)


def exact(entries: npt.NDArray[np.longdouble]) -> dict[str, float | Absent]:
    """Returns statistics in extended precision."""
    finite = np.sort(entries[np.isfinite(entries)])
    fractions: dict[str, float | Absent] = {
        "zero_fraction": int((entries == 0).sum()) / entries.size,
        "nonfinite_fraction": (entries.size - finite.size) / entries.size,
        "finite_fraction": finite.size / entries.size,
    }
    if finite.size == 0:
        names = ("mean", "std", "min", "max", "p25", "p50", "p75", "rms", "max_abs")
        return dict.fromkeys(names, Absent("no_finite_entries")) | fractions
    # Distances from the lowest entry keep the digits that sums of large and close numbers would lose.
    distances = finite - finite[0]
    offset = distances.sum() / finite.size
    values = {
        "mean": finite[0] + offset,
        "std": np.sqrt(((distances - offset) ** 2).sum() / finite.size),
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


def check(found: Mapping[str, float | Absent], entries: npt.NDArray[np.longdouble]) -> None:
    """Extremes and fractions are equal; the rest is right to a few bits of the largest entry.

    The deviation is right to a few bits of the range, wherever that lies.
    """
    expected = {name: value for name, value in exact(entries).items() if name in found}
    assert found.keys() == expected.keys()
    finite = entries[np.isfinite(entries)]
    largest = float(np.abs(finite).max(initial=0.0))
    spread = float(finite.max() - finite.min()) if finite.size else 0.0
    for name, value in found.items():
        right = expected[name]
        is_number = isinstance(right, float) and isinstance(value, float)
        if is_number and name in {"mean", "std", "rms", "p25", "p50", "p75"}:
            assert abs(value - right) <= 1e-14 * (spread if name == "std" else largest), name
        else:
            assert value == right, name


def check_histogram(found: MeasuredHistogram, entries: npt.NDArray[np.longdouble]) -> None:
    """Counts are equal to those of comparisons in extended precision, which holds every entry and edge."""
    finite = entries[np.isfinite(entries)]
    if finite.size == 0:
        assert found.unavailable_reason == "no_finite_entries"
        return
    edges = np.array(found.edges, dtype=np.longdouble)
    up_to = [int((finite < edge).sum()) for edge in edges[:-1]] + [int((finite <= edges[-1]).sum())]
    assert found.counts == tuple(np.diff(up_to).tolist())
    assert (found.underflow, found.overflow) == (up_to[0], finite.size - up_to[-1])
    assert found.finite_count == sum(found.counts) + found.underflow + found.overflow
    scale = float(np.abs(finite).sum())
    assert found.total == pytest.approx(float(finite.sum()), rel=0, abs=1e-14 * scale)
    assert found.total_of_squares == pytest.approx(float((finite**2).sum()), rel=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "selects"), [*((dtype, False) for dtype in DTYPES), *((dtype, True) for dtype in WIDE)], ids=str
)
def test_statistics_and_histograms_are_exact_at_every_size(
    dtype: torch.dtype, kind: str, selects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch of all sizes gives, for each tensor, what extended precision gives."""
    take_way(monkeypatch, selects=selects)
    reducers = (ExactProfile(), rms(), max_abs(), finite_fraction())
    batch = ScalarBatch(reducers, fail, HISTOGRAMS)
    tensors = [entries_of(kind, size, dtype) for size in SIZES]
    places = [batch.add(tensor, histograms=True) for tensor in tensors]
    batch.seal()
    for tensor, place in zip(tensors, places, strict=True):
        entries = widened(tensor)
        measured = batch.read(place)
        found = {
            metric: Absent(reason) if value is None else value
            for metric, value, reason in zip(measured.metrics, measured.values, measured.reasons, strict=True)
        }
        assert len(found) == 12
        check(found, entries)
        for one in batch.read_histograms(place):
            check_histogram(one, entries)


@pytest.mark.parametrize("size", [MILLION - 1, MILLION, MILLION + 1])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, "invalid"),
        (torch.bfloat16, "invalid"),
        (torch.float64, "invalid"),
        (torch.float8_e4m3fnuz, "invalid"),
        (torch.uint64, "heavy"),
        (torch.uint64, "offset"),
    ],
    ids=str,
)
def test_around_a_million_entries_pieces_add_up(
    dtype: torch.dtype, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorted, selected, counted, and scanned in bounded memory: the same counts, and moments to rounding."""
    tensor = entries_of(kind, size, dtype)
    entries = widened(tensor)
    ways = [(1 << 28, False), (1 << 20, False)] + [(1 << 28, True)] * (
        dtype in {torch.float32, torch.float64}
    )
    for max_scratch_bytes, selects in ways:
        take_way(monkeypatch, selects=selects)
        batch = ScalarBatch((ExactProfile(max_scratch_bytes),), fail, HISTOGRAMS)
        place = batch.add(tensor, histograms=True)
        batch.seal()
        measured = batch.read(place)
        found = {
            metric: value
            for metric, value in zip(measured.metrics, measured.values, strict=True)
            if value is not None
        }
        assert len(found) == 9
        check(found, entries)
        for one in batch.read_histograms(place):
            check_histogram(one, entries)
