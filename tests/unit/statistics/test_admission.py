"""Which tensors are measured, as what, and why not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from typing_extensions import override

from torchinstruments.records import Absent, Scope
from torchinstruments.statistics.admission import COMPLEX, admit, is_readable


def admitted_as(tensor: torch.Tensor) -> tuple[torch.Tensor, Scope]:
    """Returns what is measured of a tensor that must be admitted."""
    admitted = admit(tensor)
    assert not isinstance(admitted, Absent), admitted.reason
    return admitted


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks in a process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_a_plain_tensor_is_admitted_as_a_view() -> None:
    """It is detached and shares the memory."""
    tensor = torch.ones(3, requires_grad=True)
    admitted, scope = admitted_as(tensor)
    assert is_readable(tensor)
    assert scope is Scope.LOCAL
    assert admitted.data_ptr() == tensor.data_ptr()
    assert (type(admitted), admitted.requires_grad) == (torch.Tensor, False)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.bool,
        torch.uint16,
    ],
    ids=str,
)
def test_every_real_dtype_is_admitted(dtype: torch.dtype) -> None:
    """Floats of all sizes, whole numbers and booleans."""
    assert admitted_as(torch.zeros(2, dtype=dtype))[0].dtype is dtype


def test_a_parameter_is_admitted_as_a_tensor() -> None:
    """Parameters are outputs of some modules."""
    assert type(admitted_as(torch.nn.Parameter(torch.ones(2)))[0]) is torch.Tensor


def test_a_subclass_without_behaviour_is_admitted_as_a_plain_tensor() -> None:
    """Its memory is that of a tensor, and its own functions are not called."""

    class Labelled(torch.Tensor):
        @classmethod
        @override
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("a foreign function ran")

    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.ones(2).as_subclass(Labelled)
    assert type(admitted_as(tensor)[0]) is torch.Tensor


def test_a_lazy_negative_is_admitted_as_what_it_means() -> None:
    """The imaginary part of a conjugate carries its sign as a bit, which reading the memory would miss."""
    imaginary = torch.tensor([1 + 2j]).conj().imag
    assert imaginary.is_neg()
    assert not is_readable(imaginary)
    assert admitted_as(imaginary)[0].numpy().tolist() == [-2.0]


def refused() -> dict[str, tuple[torch.Tensor, str]]:
    """Returns tensors that cannot be measured, with the reasons."""
    with FakeTensorMode():
        fake = torch.ones(2)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    shrunk = torch.ones(1000)
    strided, beyond = shrunk[::2], shrunk[100:]
    shrunk.untyped_storage().resize_(400)
    return {
        "complex": (torch.zeros(2, dtype=torch.complex64), "unsupported_dtype: complex64"),
        "quantized": (
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "unsupported_dtype: qint8",
        ),
        "bits": (torch.empty(2, dtype=torch.bits8), "unsupported_dtype: bits8"),
        "sparse": (torch.eye(2).to_sparse(), "unsupported_layout: sparse_coo"),
        "meta": (torch.empty(2, device="meta"), "meta_tensor"),
        "fake": (fake, "unsupported_layout: FakeTensor"),
        "freed": (freed, "unsupported_layout: its memory was freed"),
        "shrunk": (shrunk, "unsupported_layout: its memory is smaller than its shape"),
        "strided": (strided, "unsupported_layout: its memory is smaller than its shape"),
        "beyond": (beyond, "unsupported_layout: its memory is smaller than its shape"),
    }


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "name",
    [
        "complex",
        "quantized",
        "bits",
        "sparse",
        "meta",
        "fake",
        "freed",
        "shrunk",
        "strided",
        "beyond",
    ],
)
def test_what_cannot_be_measured_says_why(name: str) -> None:
    """Each kind has its reason code, with the detail that tells it apart, and no bytes but complex ones."""
    tensor, reason = refused()[name]
    assert admit(tensor) == Absent(reason)
    assert is_readable(tensor) == (tensor.dtype in COMPLEX)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    """Rows of different lengths are no strided tensor, in either of their two forms."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    refusal = admit(nested)
    assert not is_readable(nested)
    assert isinstance(refusal, Absent)
    assert refusal.reason.startswith("unsupported_layout: ")


def test_inside_a_function_transform_a_tensor_is_refused() -> None:
    """There it stands for many tensors, or for a derivative."""
    found: list[object] = []

    def watched(tensor: torch.Tensor):
        assert not is_readable(tensor)
        found.append(admit(tensor))
        return tensor * 2

    torch.func.vmap(watched)(torch.ones(3))
    assert found == [Absent("unsupported_layout: inside a torch.func transform")]


def test_a_subclass_that_raises_is_refused() -> None:
    """Whatever a foreign tensor raises, the hook that asks goes on."""

    class Hostile(torch.Tensor):
        @property
        @override
        def is_meta(self) -> bool:  # pyrefly: ignore
            raise RuntimeError("do not ask")

    refusal = admit(torch.ones(2).as_subclass(Hostile))
    assert refusal == Absent("unsupported_layout: Hostile raised RuntimeError: do not ask")


def test_a_shard_is_admitted_as_this_ranks_part(mesh: DeviceMesh) -> None:
    """It is the local tensor itself, and says that it is a part."""
    local = torch.arange(3.0)
    admitted, scope = admitted_as(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    assert (scope, admitted.tolist()) == (Scope.LOCAL_SHARD, [0.0, 1.0, 2.0])
    assert type(admitted) is torch.Tensor


def test_a_replicated_tensor_is_whole(mesh: DeviceMesh) -> None:
    """Its local part is all of it."""
    replicated = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
    assert admitted_as(replicated)[1] is Scope.LOCAL


def test_a_partial_sum_is_no_tensor_yet(mesh: DeviceMesh) -> None:
    """Its local values are none of the tensor's."""
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    assert admit(partial) == Absent("partial_placement")


def test_a_sharded_parameter_with_gradients_is_admitted(mesh: DeviceMesh) -> None:
    """Its local part is detached, outside of ``no_grad`` too."""
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False))
    admitted, scope = admitted_as(parameter)
    assert (type(admitted), admitted.requires_grad, scope) == (torch.Tensor, False, Scope.LOCAL_SHARD)


def test_a_collective_that_is_under_way_is_not_waited_for(mesh: DeviceMesh) -> None:
    """Touching its result would end the overlap that it exists for."""
    result = functional.all_reduce(torch.ones(3), "sum", mesh.get_group())
    assert isinstance(result, functional.AsyncCollectiveTensor)
    assert admit(result) == Absent("async_collective")
    assert not result.completed
    result.wait()


def test_a_shard_whose_collective_is_under_way_is_not_waited_for(mesh: DeviceMesh) -> None:
    """So is the local part of a distributed tensor."""
    result = functional.all_reduce(torch.ones(3), "sum", mesh.get_group())
    assert isinstance(result, functional.AsyncCollectiveTensor)
    assert admit(DTensor.from_local(result, mesh, [Shard(0)], run_check=False)) == Absent("async_collective")
    assert not result.completed
    result.wait()


def test_what_lies_within_a_shrunk_memory_is_admitted() -> None:
    """So are an empty tensor and one that repeats an entry, which need little memory or none."""
    shrunk = torch.ones(1000)
    within = [shrunk[:100], shrunk[:99:2], shrunk[99:100].expand(5000), shrunk[500:500]]
    shrunk.untyped_storage().resize_(400)
    assert [admitted_as(tensor)[0].numel() for tensor in within] == [100, 50, 5000, 0]
