"""Numbers on their way to the host."""

import pytest
import torch

from torchinstruments.statistics.transfer import DeviceNumbers
from unit.statistics.accelerator import Accelerator, put


def test_numbers_come_back_from_where_they_were_put() -> None:
    """Tensors of different shapes and dtypes share one copy and are found again."""
    with Accelerator():
        numbers = DeviceNumbers(torch.device("ipu"), torch.float64)
        first = numbers.add(put(torch.tensor([[1.0], [2.0]])))
        second = numbers.add(put(torch.tensor(3, dtype=torch.int32)))
        numbers.send()
        assert (numbers.read(first), numbers.read(second)) == ([1.0, 2.0], [3.0])


def test_numbers_that_were_never_sent_say_so() -> None:
    """Reading before sending is an error, not a wait."""
    numbers = DeviceNumbers(torch.device("cpu"), torch.float64)
    where = numbers.add(torch.ones(1))
    with pytest.raises(RuntimeError, match="never sent"):
        numbers.read(where)


def test_a_failed_copy_is_named_when_its_numbers_are_read() -> None:
    """What the device raised on the training thread is what the writer thread hears."""
    numbers = DeviceNumbers(torch.device("ipu"), torch.float64)
    with Accelerator():
        where = numbers.add(put(torch.ones(1)))
    numbers._parts.append(torch.ones(1))
    with pytest.raises(AssertionError, match="mixes"), Accelerator():
        numbers.send()
    with pytest.raises(RuntimeError, match="AssertionError: cat mixes tensors"):
        numbers.read(where)
