"""The exact profile against exact rational arithmetic, on every path that it can take."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchinstruments.records import Absent
from torchinstruments.statistics import host
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.profile import PROFILE_METRICS, ExactProfile
from unit.statistics.reference import differences, reference

Measure: TypeAlias = Callable[[torch.Tensor], dict[str, float | Absent]]

FLOATS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
INTEGERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
)


def on_host(tensor: torch.Tensor, *, selects: bool = False) -> dict[str, float | Absent]:
    """Sorts or selects, or counts what is small, whichever is faster on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "prefers_selection", lambda _: selects)
        return dict(ExactProfile()(tensor))


def scanned(tensor: torch.Tensor) -> dict[str, float | Absent]:
    """Scans, or counts what is small."""
    return dict(ExactProfile(max_scratch_bytes=1)(tensor))


def by_device_operations(tensor: torch.Tensor, max_scratch_bytes: int) -> dict[str, float | Absent]:
    """Takes the way of an accelerator, on the CPU."""
    packed = ExactProfile(max_scratch_bytes).pack(tensor)
    return dict(packed.finish(packed.scalars.tolist()))


def packed_with_others(tensor: torch.Tensor) -> dict[str, float | Absent]:
    """Goes through a batch, between two neighbours; what is too large or too wide is measured by itself."""
    batch = ScalarBatch((ExactProfile(),), fail)
    batch.add(torch.tensor([math.nan, 7.0, -math.inf]).to(tensor.dtype))
    index = batch.add(tensor)
    batch.add(torch.ones(max(1, tensor.numel()), dtype=tensor.dtype))
    batch.seal()
    measured = batch.read(index)
    return {
        metric: Absent(reason) if value is None else value
        for metric, value, reason in zip(measured.metrics, measured.values, measured.reasons, strict=True)
    }


def fail(probe: str, error: BaseException) -> None:
    """Nothing may go wrong in a batch."""
    raise AssertionError(probe) from error


PATHS: dict[str, Measure] = {
    "host": on_host,
    "host_selected": partial(on_host, selects=True),
    "packed": packed_with_others,
    "host_scanned": scanned,
    "device": partial(by_device_operations, max_scratch_bytes=1 << 28),
    "device_radix": partial(by_device_operations, max_scratch_bytes=64 * 7),
}

every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def entries_of(tensor: torch.Tensor) -> list[float]:
    """Returns every entry as Python reads it; integers stay whole."""
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64).flatten().tolist()
    return [int(entry) for entry in tensor.flatten().tolist()]


def check(path: Measure, tensor: torch.Tensor) -> None:
    """Compares one path with the reference."""
    entries = entries_of(tensor)
    assert differences(dict(path(tensor)), reference(entries), entries) == []


def from_bits(patterns: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor whose entries have these bits."""
    bits = FLOATS[dtype]
    width = 8 * dtype.itemsize
    if bits.is_signed:
        patterns = [pattern - (1 << width) if pattern >> (width - 1) else pattern for pattern in patterns]
    return torch.tensor(patterns, dtype=bits).view(dtype)


@every_float
@every_path
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_bit_patterns_of_any_float_dtype_are_measured_exactly(
    path: Measure, dtype: torch.dtype, data: st.DataObject
) -> None:
    """NaN, infinities, denormals, negative zero: whatever bits a float dtype can hold."""
    width = 8 * dtype.itemsize
    patterns = data.draw(st.lists(st.integers(0, (1 << width) - 1), max_size=30))
    check(path, from_bits(patterns, dtype))


@every_path
@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(
        st.sampled_from(
            [0.0, -0.0, 1.0, 1.5, -2.0, math.inf, -math.inf, math.nan, 5e-324, 1e-320, 1e308, -1e308, 1e8]
        )
        | st.floats(-1e3, 1e3),
        max_size=40,
    )
)
@example(values=[1e308, -1e308])
@example(values=[1.7e308] * 3 + [-1.7e308])
@example(values=[5e-324, 0.0, 0.0])
@example(values=[3e-200, 1e-200])
def test_float64_of_any_size_neither_overflows_nor_vanishes(path: Measure, values: list[float]) -> None:
    """Mean and deviation of the largest and of the smallest float64 are as exact as any."""
    check(path, torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@every_path
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_integers_are_measured_exactly(path: Measure, dtype: torch.dtype, data: st.DataObject) -> None:
    """Every integer dtype, up to its own ends."""
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    values = data.draw(st.lists(st.integers(low, high), max_size=30))
    check(path, torch.tensor(values, dtype=dtype))


@every_path
def test_a_small_spread_of_large_int64_is_not_lost(path: Measure) -> None:
    """Neighbours near 2**62 differ by one, which float64 cannot tell apart."""
    check(path, torch.arange(1000, dtype=torch.int64) + 2**62)


@pytest.mark.parametrize("path", [on_host, PATHS["host_selected"], scanned])
def test_uint64_above_int64_is_exact_on_the_host(path: Measure) -> None:
    """The upper half of uint64 is neither wrapped nor rounded before it is measured."""
    check(path, torch.tensor([2**64 - 1, 2**64 - 2, 2**63, 7], dtype=torch.uint64))


@every_path
def test_2_to_the_24_plus_1_stays_itself(path: Measure) -> None:
    """A whole number that float32 cannot hold is not rounded to it."""
    assert path(torch.tensor([2**24 + 1], dtype=torch.int64))["max"] == 16777217.0


@every_float
@every_path
def test_an_empty_tensor_has_no_statistic(path: Measure, dtype: torch.dtype) -> None:
    """All nine say that it is empty, the fractions too."""
    assert path(torch.empty((3, 0), dtype=dtype)) == dict.fromkeys(PROFILE_METRICS, Absent("empty"))


@every_path
def test_a_tensor_without_a_finite_entry_has_its_fractions(path: Measure) -> None:
    """Seven statistics say why they are missing; the fractions are known."""
    found = path(torch.tensor([math.nan, math.inf, -math.inf, math.nan]))
    assert (found["zero_fraction"], found["nonfinite_fraction"]) == (0.0, 1.0)
    assert {found[name] for name in PROFILE_METRICS[:7]} == {Absent("no_finite_entries")}


@every_float
@every_path
def test_a_constant_tensor_has_no_spread(path: Measure, dtype: torch.dtype) -> None:
    """The deviation of equal entries is 0 to the last bit, and every other statistic is the entry."""
    tensor = torch.full((1013,), 0.1).to(dtype)
    found = path(tensor)
    assert found["std"] == 0.0
    assert {found[name] for name in ("mean", "min", "max", "p25", "p50", "p75")} == {float(tensor[0])}


@every_path
def test_a_single_number_is_measured(path: Measure) -> None:
    """A tensor without dimensions is one entry."""
    check(path, torch.tensor(-2.5))


@every_path
def test_negative_zero_is_a_zero(path: Measure) -> None:
    """The sign of a zero does not hide it."""
    assert path(torch.tensor([-0.0, 0.0, 1.0, math.nan]))["zero_fraction"] == 0.5


@every_path
def test_a_small_spread_at_a_large_offset_is_exact(path: Measure) -> None:
    """Accumulation around the median keeps the digits that an offset of 1e8 would cost."""
    generator = torch.Generator().manual_seed(0)
    check(path, torch.randn(500, generator=generator, dtype=torch.float64) + 1e8)
    check(path, (torch.randn(500, generator=generator) * 50 + 1e8).to(torch.float32))


def non_contiguous() -> dict[str, torch.Tensor]:
    """Returns tensors whose entries do not lie in the order of their indices."""
    base = torch.randn(12, 10, 6, generator=torch.Generator().manual_seed(1))
    base[3, 4] = math.nan
    base[5, :, 2] = 0.0
    return {
        "transposed": base.transpose(0, 2),
        "strided": base[::2, 1::3],
        "one_column": base[:, 3, 2],
        "expanded": base[:, :1, :].expand(12, 9, 6),
        "expanded_number": torch.tensor(3.0).expand(4, 5),
        "expanded_and_transposed": base[:, :, :1].expand(12, 10, 7).transpose(0, 2),
        "overlapping": base.flatten().unfold(0, 5, 2),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "half_strided": base.to(torch.float16)[:, ::2],
        "float8_transposed": base.to(torch.float8_e5m2).transpose(0, 1),
        "bool_strided": (base > 0)[:, 1::2],
    }


@pytest.mark.parametrize("name", non_contiguous())
@every_path
def test_a_tensor_is_measured_however_it_lies_in_memory(path: Measure, name: str) -> None:
    """Transposed, strided, expanded and overlapping views are measured as if they were copied first."""
    check(path, non_contiguous()[name])


def numpy_reference(entries: np.ndarray) -> dict[str, float]:
    """Returns the statistics of finite float64 entries as NumPy computes them."""
    quartiles = np.quantile(entries, [0.25, 0.5, 0.75])
    return {
        "mean": float(entries.mean()),
        "std": float(entries.std()),
        "min": float(entries.min()),
        "max": float(entries.max()),
        **dict(zip(("p25", "p50", "p75"), quartiles.tolist(), strict=True)),
    }


@every_float
@every_path
def test_many_entries_agree_on_every_path(path: Measure, dtype: torch.dtype) -> None:
    """Sizes at which the cheapest form changes give the same numbers."""
    size = 2_000 if path is PATHS["device_radix"] else 40_000
    entries = torch.randn(size, generator=torch.Generator().manual_seed(2), dtype=torch.float64).abs() + 0.5
    tensor = entries.to(dtype)
    found = path(tensor)
    expected = numpy_reference(tensor.to(torch.float64).numpy())
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_scratch_bytes", [1 << 28, 1 << 20])
def test_more_than_2_to_the_24_entries_are_exact(dtype: torch.dtype, max_scratch_bytes: int) -> None:
    """Beyond the size that torch's own quantile takes, in one copy and in bounded scratch."""
    size = 2**24 + 11
    tensor = torch.empty(size).normal_(100.0, 1.0, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = ExactProfile(max_scratch_bytes)(tensor)
    expected = numpy_reference(tensor.to(torch.float64).numpy())
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert (found["zero_fraction"], found["nonfinite_fraction"]) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_nan_among_2_to_the_25_shows(dtype: torch.dtype) -> None:
    """The fraction is a count over a size, which no accumulation in float32 can hide."""
    tensor = torch.ones(2**25, dtype=dtype)
    tensor[12345] = math.nan
    found = ExactProfile()(tensor)
    assert found["nonfinite_fraction"] == 2.0**-25
    assert found["std"] == 0.0


def numpy_state() -> str:
    """Returns the whole state of NumPy's global generator as text."""
    state: Any = np.random.get_state()
    return f"{state[1].tobytes().hex()} {state[2:]}"


@every_path
def test_measuring_leaves_the_tensor_and_the_random_states_alone(path: Measure) -> None:
    """Neither the entries nor any generator is different afterwards."""
    tensor = torch.randn(100, 7)
    tensor[5, 5] = math.nan
    before = tensor.clone().view(torch.int32)
    states = torch.get_rng_state(), numpy_state(), random.getstate()
    path(tensor)
    path(tensor.t())
    assert torch.equal(tensor.view(torch.int32), before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert numpy_state() == states[1]
    assert random.getstate() == states[2]


def test_a_program_that_lets_numpy_raise_is_not_interrupted() -> None:
    """Squares of tiny numbers underflow without a FloatingPointError."""
    with np.errstate(all="raise"):
        found = ExactProfile()(torch.tensor([1e-40, 3e-40, 1e38]))
    assert isinstance(found["std"], float)


def test_an_expanded_tensor_is_not_copied_out() -> None:
    """A number that is repeated two to the fortieth times is measured at once."""
    found = ExactProfile()(torch.tensor([1.0, 2.0]).expand(2**39, 2))
    assert (found["p25"], found["p50"], found["p75"], found["mean"]) == (1.0, 1.5, 2.0, 1.5)


def test_inference_tensors_are_measured() -> None:
    """Tensors made in inference mode, which refuse much outside of it, are measured there."""
    with torch.inference_mode():
        tensor = torch.tensor([1.0, 3.0])
    assert ExactProfile()(tensor)["mean"] == 2.0
