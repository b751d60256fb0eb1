"""Code of the program's own leaves nothing behind."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchinstruments.statistics.foreign import foreign_code, own_copy


def test_the_random_state_and_the_modes_are_put_back() -> None:
    """After an exception too."""
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)

    def careless() -> None:
        with foreign_code(torch.device("cpu")):
            torch.randn(7)
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        careless()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.randn(4), expected)


def test_what_was_not_touched_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may draw meanwhile, and a write would take its numbers back."""

    class Generator:
        def __init__(self) -> None:
            self.inner = torch.Generator()
            self.written: list[torch.Tensor] = []

        def get_state(self) -> torch.Tensor:
            return self.inner.get_state()

        def set_state(self, state: torch.Tensor) -> None:
            self.written.append(state)

    generator = Generator()

    class Device:
        default_generators = (generator,)

    monkeypatch.setattr(torch, "cuda", Device)
    with foreign_code(torch.device("cuda")):
        pass
    assert generator.written == []
    with foreign_code(torch.device("cuda", 0)):
        torch.rand(1, generator=generator.inner)
    assert len(generator.written) == 1


def test_modes_of_the_program_see_nothing_of_it() -> None:
    """A sampler is called wherever the program calls its model."""
    with FakeTensorMode(), torch.device("meta"):
        with foreign_code(torch.device("meta")):
            pass
        assert torch.ones(1).device.type == "meta"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.bool, torch.float8_e8m0fnu]
)
def test_a_copy_has_the_same_entries_and_memory_of_its_own(dtype: torch.dtype) -> None:
    """Of any dtype and layout."""
    tensor = torch.ones(4, 3).to(dtype).t()
    copy = own_copy(tensor)
    assert (copy.shape, copy.dtype) == (tensor.shape, dtype)
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert torch.equal(copy.float(), tensor.float())


def test_what_an_expanded_tensor_repeats_is_copied_once() -> None:
    """Else a tensor of a few bytes would need as much memory as its shape says."""
    tensor = torch.arange(3.0)[:, None].expand(3, 10**12)
    copy = own_copy(tensor)
    assert copy.shape == tensor.shape
    assert copy.untyped_storage().nbytes() == 12
    assert copy[:, 7].tolist() == [0.0, 1.0, 2.0]
