"""The device path: nothing that waits, no shape that depends on data, the numbers of the host path."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from torchinstruments.records import Absent
from torchinstruments.statistics import device
from torchinstruments.statistics.bins import BinRule, sorted_counts
from torchinstruments.statistics.device import accumulation_dtype, pack_facts, working_dtype
from torchinstruments.statistics.facts import EMPTY, moment_values, named_values
from torchinstruments.statistics.host import measure_on_host
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.profile import ExactProfile
from unit.statistics.accelerator import Accelerator, operation_name, put

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
WITHOUT_SIGN = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu)
SCRATCH = {"sorted": 1 << 28, "in_pieces": 64 * 100}

every_scratch = pytest.mark.parametrize("max_scratch_bytes", SCRATCH.values(), ids=SCRATCH.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Returns 1,500 entries, some of them zero, NaN or infinite where the dtype can be."""
    entries = torch.randn(1500, generator=torch.Generator().manual_seed(5)) * 3
    entries[::7] = 0.0
    if dtype.is_floating_point:
        entries[3], entries[40], entries[700] = math.nan, math.inf, -math.inf
    if dtype in WITHOUT_SIGN:
        entries = entries.abs()
    return entries.to(dtype).view(30, 50)


RULES = (BinRule(8), BinRule(5, (-1.0, 2.5)))


def alike(found: Measured, expected: Measured) -> None:
    """Compares what a device found with what the host finds: moments to rounding, all else exactly."""
    values, right = named_values(found.facts), named_values(expected.facts)
    for metric, value in right.items():
        assert values[metric] == (value if isinstance(value, Absent) else pytest.approx(value, rel=1e-12))
    moments, wanted = found.facts.moments, expected.facts.moments
    assert (moments.total, moments.total_of_squares) == pytest.approx(
        (wanted.total, wanted.total_of_squares), rel=1e-12
    )
    for one, other in zip(found.binned, expected.binned, strict=True):
        assert one.edges.tolist() == other.edges.tolist()
        assert one.up_to.tolist() == other.up_to.tolist()


def on_host(tensor: torch.Tensor) -> Measured:
    """Returns what the host finds, histograms too."""
    return measure_on_host(tensor, is_ordered=True, rules=RULES, max_scratch_bytes=1 << 28)


@every_scratch
@every_dtype
def test_nothing_in_it_makes_training_wait(dtype: torch.dtype, max_scratch_bytes: int) -> None:
    """Every operation runs on an accelerator that refuses reads, data-dependent shapes and host tensors."""
    with Accelerator():
        packed = pack_facts(
            put(sample(dtype)).t(), is_ordered=True, rules=RULES, max_scratch_bytes=max_scratch_bytes
        )
        assert packed.scalars.device.type == "ipu"
        assert Accelerator.num_host_copies == 0
        numbers = packed.scalars.cpu().tolist()
        assert Accelerator.num_host_copies == 1
    alike(packed.finish(numbers), on_host(sample(dtype)))


@pytest.mark.parametrize("max_scratch_bytes", [1 << 28, 64 * 100])
@every_dtype
def test_without_an_order_nothing_makes_training_wait_either(
    dtype: torch.dtype, max_scratch_bytes: int
) -> None:
    """Sums alone are queued in the same way, and sort nothing."""
    with Accelerator() as accelerator, Operations() as operations:
        packed = pack_facts(put(sample(dtype)).t(), is_ordered=False, max_scratch_bytes=max_scratch_bytes)
        assert accelerator.num_host_copies == 0
        numbers = packed.scalars.cpu().tolist()
    assert operations.names.isdisjoint({"sort", "topk", "scatter_add_", "searchsorted"})
    expected = moment_values(on_host(sample(dtype)).facts)
    assert moment_values(packed.finish(numbers).facts) == pytest.approx(dict(expected), rel=1e-12)


class Operations(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes one operation and runs it."""
        self.names.add(operation_name(func))
        return func(*args, **(kwargs or {}))


def test_the_refusing_accelerator_refuses() -> None:
    """A host read, a host tensor and a data-dependent shape each fail the test that does them."""
    with Accelerator() as accelerator:
        numbers = put(torch.tensor([1.0, 2.0]))
        for wait in (
            lambda: numbers.sum().item(),
            lambda: bool(numbers.sum() > 1),
            lambda: torch.masked_select(numbers, numbers > 1),
            lambda: numbers + torch.ones(2),
            lambda: torch.histc(numbers),
            lambda: torch.linspace(numbers.min(), numbers.max(), 3, device="ipu"),
            lambda: torch.kthvalue(numbers, 1),
        ):
            with pytest.raises(AssertionError):
                wait()
        assert accelerator.num_host_copies == 0
        assert numbers.cpu().tolist() == [1.0, 2.0]
        assert accelerator.num_host_copies == 1


@every_scratch
@every_dtype
def test_it_runs_on_fake_cuda_tensors(dtype: torch.dtype, max_scratch_bytes: int) -> None:
    """Shapes and dtypes follow without data, on a device that this torch was not built for."""
    with FakeTensorMode():
        tensor = torch.empty((30, 50), dtype=dtype, device="cuda").t()
        packed = pack_facts(tensor, is_ordered=True, rules=RULES, max_scratch_bytes=max_scratch_bytes)
        sums = pack_facts(tensor, is_ordered=False, max_scratch_bytes=max_scratch_bytes)
    assert (packed.scalars.shape, packed.scalars.dtype) == ((16 + 3 * 9 + 3 * 6,), torch.float64)
    assert sums.scalars.shape == (10,)
    assert packed.scalars.device.type == sums.scalars.device.type == "cuda"


@every_scratch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint16], ids=str)
def test_without_float64_counts_and_extremes_are_exact_all_the_same(
    dtype: torch.dtype, max_scratch_bytes: int
) -> None:
    """In float32 the moments are as good as float32 is, and nothing else loses anything."""
    tensor = sample(torch.float32).abs().to(dtype) if dtype is torch.uint16 else sample(dtype)
    packed = pack_facts(
        tensor, is_ordered=True, rules=RULES, max_scratch_bytes=max_scratch_bytes, accumulate=torch.float32
    )
    assert packed.scalars.dtype is torch.float32
    found, expected = packed.finish(packed.scalars.tolist()), on_host(tensor)
    values, wanted = named_values(found.facts), dict(named_values(expected.facts))
    for name in ("min", "max", "zero_fraction", "nonfinite_fraction"):
        assert values[name] == wanted[name]
    assert values == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    entries = np.sort(tensor.to(torch.float64).flatten().numpy())
    for one in found.binned:
        assert (np.diff(one.edges) > 0).all()
        assert one.up_to.tolist() == sorted_counts(entries[np.isfinite(entries)], one.edges).tolist()


def narrow(tensor: torch.Tensor, **wanted: Any) -> Measured:
    """Returns what a device without float64 finds."""
    packed = pack_facts(
        tensor, is_ordered=True, max_scratch_bytes=1 << 30, accumulate=torch.float32, **wanted
    )
    return packed.finish(packed.scalars.tolist())


def test_without_float64_large_and_small_floats_keep_their_deviation() -> None:
    """Squares of 1e30 and of 1e-30 leave float32; the deviation and the sum of squares do not."""
    for size in (1e30, 1e-30):
        found = narrow(torch.tensor([-size, size, size, -size])).facts.moments
        assert found.std == pytest.approx(size, rel=1e-6)
        assert found.total_of_squares == pytest.approx(4 * size * size, rel=1e-6)


def test_counts_above_2_to_the_24_survive_float32() -> None:
    """A count travels in two halves, each of which float32 holds."""
    tensor = torch.zeros(2**24 + 3, dtype=torch.int8)
    tensor[5] = 1
    found = narrow(tensor, rules=(BinRule(2, (-1.0, 1.0)),))
    assert found.facts.num_zero == 2**24 + 2
    assert found.binned[0].up_to.tolist() == [0, 0, 2**24 + 3]


@pytest.mark.parametrize(
    "entries",
    [
        [7.0, 7.0],
        [0.0, -0.0],
        [1.0, math.nextafter(1.0, 2.0)],
        [5e-324, 1e-323],
        [-1e100, 1e100, math.nan],
        [math.nan, math.inf],
        [1e8, 1e8 + 1e-8],
    ],
)
def test_ranges_of_any_width_have_the_edges_of_the_host(entries: list[float]) -> None:
    """Constant, narrow and huge ranges are widened on the device as they are on the host."""
    tensor = torch.tensor(entries, dtype=torch.float64)
    packed = pack_facts(tensor, is_ordered=True, rules=RULES, max_scratch_bytes=1 << 20)
    alike(packed.finish(packed.scalars.tolist()), on_host(tensor))


@pytest.mark.parametrize(
    "entries",
    [
        [2**63 - 1, 2**63 - 1],
        [-(2**63), 2**63 - 1, 0],
        [2**62 + 1, 2**62 + 3],
        [-(2**62) - 1, 5],
        [2**53 + 1, 2**53 + 1],
    ],
)
def test_whole_numbers_beyond_float64_fall_into_the_bins_of_the_host(entries: list[int]) -> None:
    """Edges reach around the extremes, and comparisons with them are those of whole numbers."""
    tensor = torch.tensor(entries, dtype=torch.int64)
    packed = pack_facts(tensor, is_ordered=True, rules=RULES, max_scratch_bytes=1 << 20)
    found, expected = packed.finish(packed.scalars.tolist()), on_host(tensor)
    assert [one.edges.tolist() for one in found.binned] == [one.edges.tolist() for one in expected.binned]
    assert [one.up_to.tolist() for one in found.binned] == [one.up_to.tolist() for one in expected.binned]


def test_called_directly_the_profile_reads_its_result() -> None:
    """A user who calls it on a device gets the nine numbers, and waits for them."""
    with Accelerator():
        assert ExactProfile()(put(torch.tensor([1.0, 3.0])))["mean"] == 2.0


def test_an_empty_tensor_sends_nothing() -> None:
    """It has no numbers to bring, and says that it is empty."""
    packed = pack_facts(torch.empty(0), is_ordered=True, rules=RULES, max_scratch_bytes=1 << 20)
    assert packed.scalars.numel() == 0
    assert packed.finish([]) == Measured(EMPTY)


@every_scratch
@pytest.mark.parametrize(
    "entries",
    [
        [2**64 - 1, 2**64 - 1000, 2**64 - 500],
        [2**63, 2**63 - 1, 2**63 + 1],
        [0, 2**64 - 1],
        [0, 0, 1, 5],
        [2**53 + 1, 2**53 + 3, 2**53 + 2],
        [2**63 + 1025, 2**63 + 3072, 2**62],
        [0, 2**63 - 1],
    ],
)
def test_uint64_is_as_exact_as_on_the_host(entries: list[int], max_scratch_bytes: int) -> None:
    """Devices hardly know it, float64 does not hold it, and yet distances, order and bins are right."""
    tensor = torch.tensor(entries, dtype=torch.uint64).repeat(300)
    packed = pack_facts(tensor, is_ordered=True, rules=RULES, max_scratch_bytes=max_scratch_bytes)
    found, expected = packed.finish(packed.scalars.tolist()), on_host(tensor)
    alike(found, expected)
    exact = list(entries)
    mean = sum(exact) / len(exact)
    assert moment_values(found.facts)["mean"] == pytest.approx(mean, rel=1e-15)
    spread = math.sqrt(sum((len(exact) * entry - sum(exact)) ** 2 for entry in exact) / len(exact) ** 3)
    assert moment_values(found.facts)["std"] == pytest.approx(spread, rel=1e-12, abs=1e-6)
    sums = pack_facts(tensor, is_ordered=False, max_scratch_bytes=max_scratch_bytes)
    without_order = moment_values(sums.finish(sums.scalars.tolist()).facts)
    assert without_order["std"] == pytest.approx(spread, rel=1e-12, abs=1e-6)


@every_scratch
@pytest.mark.parametrize(
    "entries",
    [
        [2**63 - 1, 2**63 - 1000, 2**63 - 500],
        [-(2**63), -(2**63) + 700],
        [2**53 + 1, 2**53 + 3, 2**53 + 2],
        [0, 2**63 - 1],
    ],
)
def test_int64_beyond_float64_is_as_exact_as_on_the_host(entries: list[int], max_scratch_bytes: int) -> None:
    """The deviation comes from distances, which are whole numbers."""
    tensor = torch.tensor(entries, dtype=torch.int64).repeat(300)
    packed = pack_facts(tensor, is_ordered=True, rules=RULES, max_scratch_bytes=max_scratch_bytes)
    alike(packed.finish(packed.scalars.tolist()), on_host(tensor))


@every_dtype
def test_the_working_dtype_holds_every_entry(dtype: torch.dtype) -> None:
    """The step to the dtype of comparisons and back changes nothing."""
    entries = sample(torch.float32)
    entries = torch.nan_to_num(entries.abs() if dtype in WITHOUT_SIGN else entries, 0.0, 0.0, 0.0).to(dtype)
    there = entries.to(working_dtype(dtype))
    assert torch.equal(there.to(dtype).to(torch.float64), entries.to(torch.float64))


def test_the_accumulation_dtype_is_the_widest_that_the_device_has() -> None:
    """float64 everywhere but on Apple's devices."""
    assert accumulation_dtype(torch.device("cuda", 0)) is torch.float64
    assert accumulation_dtype(torch.device("mps")) is torch.float32


@pytest.mark.parametrize("num_entries", [1, 2, 3, 4, 5, 7])
def test_counts_at_the_edge_of_a_half_are_whole(num_entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count just below, at and just above what one of its two numbers holds."""
    monkeypatch.setattr(device, "_HALF_COUNT", 4)
    tensor = torch.zeros(num_entries)
    rule = BinRule(2, (-1.0, 1.0))
    packed = pack_facts(tensor, is_ordered=True, rules=(rule,), max_scratch_bytes=1 << 20)
    found = packed.finish(packed.scalars.tolist())
    assert (found.facts.num_entries, found.facts.num_zero) == (num_entries, num_entries)
    assert found.binned[0].up_to.tolist() == [0, 0, num_entries]
    assert max(packed.scalars.tolist()[:4]) < 4


def test_both_halves_of_a_count_fit_float32() -> None:
    """The largest of each, for as many entries as any memory holds."""
    half = device._HALF_COUNT
    for count in (half - 1, half, half + 1, half * half - 1):
        high, low = device._halves(torch.tensor(count))
        assert int(high.to(torch.float32)) * half + int(low.to(torch.float32)) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint64, torch.int8], ids=str)
@pytest.mark.parametrize("spare_bytes", [-1, 0, 1])
def test_what_just_fits_is_sorted_and_what_does_not_is_selected(dtype: torch.dtype, spare_bytes: int) -> None:
    """The bound of the scratch decides by the byte, and both ways give the numbers of the host."""
    tensor = sample(dtype)
    needed = tensor.numel() * (5 * working_dtype(dtype).itemsize + 16)
    with Operations() as operations:
        packed = pack_facts(tensor, is_ordered=True, max_scratch_bytes=needed + spare_bytes)
    assert ("scatter_add_" in operations.names) is (spare_bytes < 0)
    assert ("sort" in operations.names) is (spare_bytes >= 0)
    found = packed.finish(packed.scalars.tolist())
    expected = measure_on_host(tensor, is_ordered=True, max_scratch_bytes=1 << 28)
    alike(found, expected)


@pytest.mark.parametrize("num_entries", [99, 100, 101, 200, 201])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_pieces_of_every_size_leave_no_entry_out(num_entries: int, is_ordered: bool) -> None:
    """The last piece may hold one entry or be full."""
    tensor = torch.arange(num_entries, dtype=torch.float32)
    rules = (BinRule(4),) if is_ordered else ()
    packed = pack_facts(tensor, is_ordered=is_ordered, rules=rules, max_scratch_bytes=64 * 100 // 2)
    found = packed.finish(packed.scalars.tolist())
    moments = moment_values(found.facts)
    assert moments["mean"] == (num_entries - 1) / 2
    assert (found.facts.minimum, found.facts.maximum) == (0.0, num_entries - 1)
    if is_ordered:
        assert found.binned[0].up_to.tolist()[-1] == num_entries
