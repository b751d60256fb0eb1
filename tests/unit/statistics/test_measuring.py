"""One look at a tensor, on the host and on a device."""

import pytest
import torch

from torchinstruments.statistics.bins import BinRule
from torchinstruments.statistics.facts import moment_values, named_values
from torchinstruments.statistics.measuring import look
from torchinstruments.statistics.profile import ExactProfile
from unit.statistics.accelerator import Accelerator, put


def test_a_look_on_a_device_waits_once_and_sees_what_the_host_sees() -> None:
    """Facts and histogram come in one copy."""
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(1))
    rules = (BinRule(7),)
    with Accelerator() as accelerator:
        found = look(put(tensor), is_ordered=False, rules=rules)
        assert accelerator.num_host_copies == 1
    expected = look(tensor, is_ordered=False, rules=rules)
    assert named_values(found.facts) == pytest.approx(dict(named_values(expected.facts)), rel=1e-13)
    assert found.binned[0].edges.tolist() == expected.binned[0].edges.tolist()
    assert found.binned[0].up_to.tolist() == expected.binned[0].up_to.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [5, 70_000])
def test_without_an_order_the_sums_are_the_same(dtype: torch.dtype, size: int) -> None:
    """Two passes without a sort find what the sorted entries give, quartiles left out."""
    tensor = (torch.randn(size, generator=torch.Generator().manual_seed(2)) * 1000).to(dtype)
    plain, ordered = look(tensor, is_ordered=False).facts, look(tensor, is_ordered=True).facts
    assert (plain.quartiles, len(ordered.quartiles)) == ((), 3)
    assert (plain.num_zero, plain.minimum, plain.maximum) == (
        ordered.num_zero,
        ordered.minimum,
        ordered.maximum,
    )
    assert moment_values(plain) == pytest.approx(dict(moment_values(ordered)), rel=1e-13, abs=1e-13)


def test_a_reducer_that_leaves_its_numbers_on_a_device_finishes_them_on_the_host() -> None:
    """The packed numbers become the nine values without the device."""
    tensor = torch.tensor([1.0, 3.0, 0.0])
    packed = ExactProfile().pack(tensor)
    assert packed.finish(packed.scalars.tolist()) == pytest.approx(dict(ExactProfile()(tensor)), rel=1e-15)
