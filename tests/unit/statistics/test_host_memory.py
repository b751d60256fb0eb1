"""What the collector reads of the host's memory leaves the program's tensors as they are."""

import ast
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch

import torchinstruments
from torchinstruments import combine, finite_fraction, histogram, max_abs, mean, rms, std
from torchinstruments.statistics.admission import COMPLEX, admit
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.device import pack_facts
from torchinstruments.statistics.digests import Digester
from torchinstruments.statistics.histograms import HistogramReducer
from torchinstruments.statistics.host import measure_on_host
from torchinstruments.statistics.host_memory import NUMPY_DTYPES, as_array
from torchinstruments.statistics.profile import ExactProfile

Reader: TypeAlias = Callable[[torch.Tensor], object]

REAL = (
    *NUMPY_DTYPES,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
SIZES_OF_SCRATCH = {256 * 2**20: (0, 1, 300, 5000), 1024: (300,)}
"""Sizes of tensors by the scratch that they are measured with, in one copy or in pieces."""

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda tensor: tensor,
    "table": lambda tensor: tensor.view(1, -1),
    "steps": lambda tensor: tensor[::3],
    "shifted": lambda tensor: tensor[1:],
    "transposed": lambda tensor: tensor[: tensor.numel() // 2 * 2].view(2, -1).t(),
    "expanded": lambda tensor: tensor.expand(3, -1),
}


def own_sum(tensor: torch.Tensor) -> dict[str, float]:
    """Is a reducer of a program, which may use NumPy as it likes."""
    return {"own": float(np.asarray(tensor.float()).sum())}


def batch(tensor: torch.Tensor) -> None:
    """Does what a sampled forward does, with all kinds of reducers and histograms."""
    errors: list[BaseException] = []
    reducers = (ExactProfile(), rms(), max_abs(), finite_fraction(), own_sum)
    own = HistogramReducer(name="fixed", bins=4)
    taken = ScalarBatch(
        reducers, histograms=(histogram(), own), on_error=lambda _probe, error: errors.append(error)
    )
    taken.add(tensor, histograms=True)
    taken.seal()
    assert errors == []


def readers(dtype: torch.dtype, num_bytes: int) -> dict[str, Reader]:
    """Returns everything that reads a tensor on the CPU."""
    digester = Digester(num_bytes)
    digests: dict[str, Reader] = {"digest": digester.on_host, "device digest": digester.on_device}
    if dtype in COMPLEX:
        return digests
    rules = (histogram().rule,)
    look = partial(measure_on_host, max_scratch_bytes=num_bytes)
    statistics: dict[str, Reader] = {
        "batch": batch,
        "profile": ExactProfile(num_bytes),
        "moments": combine(mean(), std()),
        "histogram": histogram(),
        "look": partial(look, is_ordered=True, rules=rules),
        "sums": partial(look, is_ordered=False),
        "packed": partial(pack_facts, is_ordered=True, rules=rules, max_scratch_bytes=num_bytes),
    }
    return digests | statistics


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("num_bytes", SIZES_OF_SCRATCH)
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
def test_a_storage_can_be_resized_after_whatever_was_measured_of_it(
    dtype: torch.dtype, num_bytes: int
) -> None:
    """For each reader, dtype, size and layout the storage's flag and the tensor's bytes are as before."""
    for size in SIZES_OF_SCRATCH[num_bytes]:
        for layout, view in LAYOUTS.items():
            for name, read in readers(dtype, num_bytes).items():
                owner = torch.arange(size).remainder(2).to(dtype)
                before = owner.view(torch.uint8).clone()
                tensor = admit(view(owner), COMPLEX)
                assert isinstance(tensor, tuple)
                if tensor[0].numel() == 0 and name in {"look", "sums"}:
                    continue
                read(tensor[0])
                assert owner.untyped_storage().resizable(), (size, layout, name)
                assert torch.equal(owner.view(torch.uint8), before), (size, layout, name)
                owner.untyped_storage().resize_(0)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_shows_the_entries_of_its_tensor(layout: str, dtype: torch.dtype) -> None:
    """It is torch's own array of them, but for the flat form of contiguous ones."""
    tensor = LAYOUTS[layout](torch.arange(24).remainder(5).to(dtype))
    expected = tensor.clone(memory_format=torch.preserve_format).numpy()
    found = as_array(tensor)
    assert found.dtype == expected.dtype
    assert found.shape == ((tensor.numel(),) if tensor.is_contiguous() else tuple(tensor.shape))
    assert np.array_equal(found.reshape(expected.shape), expected)
    assert found.ctypes.data == tensor.data_ptr()


def test_bits_of_a_dtype_that_numpy_lacks_are_read_as_asked() -> None:
    """The entries of a bfloat16 are the upper halves of those of a float32."""
    tensor = torch.tensor([1.0, -2.0, 0.0], dtype=torch.bfloat16)
    assert as_array(tensor, np.uint16).tolist() == [0x3F80, 0xC000, 0]
    with pytest.raises(KeyError):
        as_array(tensor)


def test_a_lazily_negated_tensor_shows_its_values() -> None:
    """Its memory holds them with the other sign."""
    tensor = torch.complex(torch.zeros(2), torch.tensor([1.0, -2.0])).conj().imag
    assert tensor.is_neg()
    assert as_array(tensor).tolist() == [-1.0, 2.0]


def test_memory_lives_as_long_as_a_view_of_the_array() -> None:
    """And is let go with the last one, without a collection."""
    tensor = torch.arange(100.0)
    held = weakref.ref(tensor)
    part = as_array(tensor)[10:12].view(np.uint32).view(np.float32)
    del tensor
    gc.collect()
    assert held() is not None
    assert part.tolist() == [10.0, 11.0]
    gc.disable()
    try:
        del part
        assert held() is None
    finally:
        gc.enable()


def test_memory_that_is_not_there_is_refused() -> None:
    """To read it would end the process."""
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        as_array(freed)
    with pytest.raises(ValueError, match="meta"):
        as_array(torch.ones(3, device="meta"))


PACKAGE = Path(torchinstruments.__file__).parent
TRAINING = [
    path
    for room in ("statistics", "observe", "checks", "ranks", "sinks")
    for path in sorted((PACKAGE / room).glob("**/*.py"))
]
MARKING = frozenset(
    {"numpy", "__array__", "asarray", "from_dlpack", "to_dlpack", "__dlpack__", "share_memory_", "from_numpy"}
)
OWN_BUFFERS = {
    "checks/reading": {"flat.cpu().double().numpy()"},
    "statistics/digests": {"in_block.numpy()", "self._factors_on(_HOST)[1].numpy()"},
    "statistics/packing": {"self._memory.numpy()"},
    "statistics/ways": {"torch.from_numpy(scattered(_NUM_TRIED).astype(np.float32))"},
    "statistics/ordered": {
        "copy.copy_(tensor).view(-1).numpy()",
        "patterns.view(dtype).to(torch.float64).numpy()",
        "torch.from_numpy(codes.astype(np.int32))",
        "torch.from_numpy(by_code)",
        "torch.from_numpy(codes[start:start + step])",
        "torch.bincount(piece, minlength=256).numpy()",
        "torch.from_numpy(counts)",
        "np.asarray(ranks)",
    },
}
"""Calls that share memory between torch and NumPy, of what the collector made itself."""


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_module_shares_the_memory_of_a_tensor_that_is_not_its_own(path: Path) -> None:
    """A call that marks a storage is of a buffer that is named here."""
    calls = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MARKING
    }
    assert calls == OWN_BUFFERS.get(f"{path.parent.name}/{path.stem}", set())
