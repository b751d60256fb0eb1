"""The device path: nothing that waits, no shape that depends on data, the numbers of the host path."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchinstruments.records import Absent
from torchinstruments.statistics.device import accumulation_dtype, device_profile, pack_profile, working_dtype
from torchinstruments.statistics.profile import PROFILE_METRICS, ExactProfile
from unit.statistics.accelerator import Accelerator, put

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
SCRATCH = {"sorted": 1 << 28, "in_pieces": 64 * 100}

every_scratch = pytest.mark.parametrize("max_scratch_bytes", SCRATCH.values(), ids=SCRATCH.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Returns 1,500 entries, some of them zero, NaN or infinite where the dtype can be."""
    entries = torch.randn(1500, generator=torch.Generator().manual_seed(5)) * 3
    entries[::7] = 0.0
    if dtype.is_floating_point:
        entries[3], entries[40], entries[700] = math.nan, math.inf, -math.inf
    return entries.to(dtype).view(30, 50)


@every_scratch
@every_dtype
def test_nothing_in_it_makes_training_wait(dtype: torch.dtype, max_scratch_bytes: int) -> None:
    """Every operation runs on an accelerator that refuses reads, data-dependent shapes and host tensors."""
    expected = ExactProfile()(sample(dtype))
    with Accelerator():
        packed = pack_profile(put(sample(dtype)).t(), max_scratch_bytes=max_scratch_bytes)
        assert packed.scalars.device.type == "ipu"
        numbers = packed.scalars.cpu().tolist()
    found = packed.finish(numbers)
    assert list(found) == list(PROFILE_METRICS)
    assert found == pytest.approx(dict(expected), rel=1e-12)


def test_the_refusing_accelerator_refuses() -> None:
    """A host read, a host tensor and a data-dependent shape each fail the test that does them."""
    with Accelerator():
        numbers = put(torch.tensor([1.0, 2.0]))
        for wait in (
            lambda: numbers.sum().item(),
            lambda: bool(numbers.sum() > 1),
            lambda: torch.masked_select(numbers, numbers > 1),
            lambda: numbers + torch.ones(2),
        ):
            with pytest.raises(AssertionError):
                wait()


@every_scratch
@every_dtype
def test_it_runs_on_fake_cuda_tensors(dtype: torch.dtype, max_scratch_bytes: int) -> None:
    """Shapes and dtypes follow without data, on a device that this torch was not built for."""
    with FakeTensorMode():
        tensor = torch.empty((30, 50), dtype=dtype, device="cuda").t()
        packed = pack_profile(tensor, max_scratch_bytes=max_scratch_bytes)
    assert (packed.scalars.shape, packed.scalars.dtype) == ((14,), torch.float64)
    assert packed.scalars.device.type == "cuda"


@every_scratch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint16], ids=str)
def test_without_float64_counts_and_extremes_are_exact_all_the_same(
    dtype: torch.dtype, max_scratch_bytes: int
) -> None:
    """In float32 the moments are as good as float32 is, and nothing else loses anything."""
    tensor = sample(torch.float32).abs().to(dtype) if dtype is torch.uint16 else sample(dtype)
    packed = pack_profile(tensor, max_scratch_bytes=max_scratch_bytes)
    narrow = device_profile(tensor, 1, accumulate=torch.float32, max_scratch_bytes=max_scratch_bytes)
    assert narrow.dtype is torch.float32
    found, expected = packed.finish(narrow.tolist()), dict(ExactProfile()(tensor))
    for name in ("min", "max", "zero_fraction", "nonfinite_fraction"):
        assert found[name] == expected[name]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_without_float64_large_and_small_floats_keep_their_deviation() -> None:
    """Squares of 1e30 and of 1e-30 leave float32; the deviation does not."""
    for size in (1e30, 1e-30):
        tensor = torch.tensor([-size, size, size, -size])
        numbers = device_profile(tensor, 1, accumulate=torch.float32, max_scratch_bytes=1 << 20).tolist()
        found = pack_profile(tensor, max_scratch_bytes=1 << 20).finish(numbers)
        assert found["std"] == pytest.approx(size, rel=1e-6)


def test_counts_above_2_to_the_24_survive_float32() -> None:
    """A count travels in two halves, each of which float32 holds."""
    tensor = torch.zeros(2**24 + 3, dtype=torch.int8)
    tensor[5] = 1
    numbers = device_profile(tensor, 1, accumulate=torch.float32, max_scratch_bytes=1 << 30)
    found = pack_profile(tensor, max_scratch_bytes=1 << 30).finish(numbers.tolist())
    assert found["zero_fraction"] == (2**24 + 2) / (2**24 + 3)


def test_called_directly_the_profile_reads_its_result() -> None:
    """A user who calls it on a device gets the nine numbers, and waits for them."""
    with Accelerator():
        assert ExactProfile()(put(torch.tensor([1.0, 3.0])))["mean"] == 2.0


def test_an_empty_tensor_sends_nothing() -> None:
    """It has no numbers to bring, and says that it is empty."""
    packed = pack_profile(torch.empty(0), max_scratch_bytes=1 << 20)
    assert packed.scalars.numel() == 0
    assert packed.finish([])["nonfinite_fraction"] == Absent("empty")


def test_uint64_is_measured_in_float64() -> None:
    """The one dtype that devices hardly know is rounded to 53 bits, and still measured."""
    packed = pack_profile(torch.tensor([2**63, 2**63 + 2**40], dtype=torch.uint64), max_scratch_bytes=1 << 20)
    assert packed.finish(packed.scalars.tolist())["max"] == float(2**63 + 2**40)


@every_dtype
def test_the_working_dtype_holds_every_entry(dtype: torch.dtype) -> None:
    """The step to the dtype of comparisons and back changes nothing."""
    tensor = torch.nan_to_num(sample(torch.float32)).to(dtype)
    assert torch.equal(tensor.to(working_dtype(dtype)).to(dtype).to(torch.float64), tensor.to(torch.float64))


def test_the_accumulation_dtype_is_the_widest_that_the_device_has() -> None:
    """float64 everywhere but on Apple's devices."""
    assert accumulation_dtype(torch.device("cuda", 0)) is torch.float64
    assert accumulation_dtype(torch.device("mps")) is torch.float32
