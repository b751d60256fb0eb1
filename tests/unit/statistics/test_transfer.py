"""Numbers on their way to the host."""

import pytest
import torch

from torchinstruments.statistics.transfer import DeviceNumbers, Transfer
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


def test_a_transfer_brings_what_is_left_with_it_in_one_copy_for_each_device() -> None:
    """Each finds its own numbers again; what is left later has the next copy."""
    transfer, errors = Transfer(), list[BaseException]()
    several = [DeviceNumbers(torch.device("ipu"), torch.float64) for _ in range(3)]
    with Accelerator() as accelerator:
        places = [one.add(put(torch.arange(2.0) + index)) for index, one in enumerate(several)]
        for one in several[:2]:
            one.leave(transfer)
        transfer.send(lambda _, error: errors.append(error))
        assert accelerator.num_host_copies == 0
        found = [one.read(place) for one, place in zip(several[:2], places[:2], strict=True)]
        assert (found, accelerator.num_host_copies) == ([[0.0, 1.0], [1.0, 2.0]], 1)
        several[2].leave(transfer)
        transfer.send(lambda _, error: errors.append(error))
        assert several[2].read(places[2]) == [2.0, 3.0]
    assert errors == []


def test_what_is_read_before_it_is_sent_is_fetched_and_not_sent_again() -> None:
    """The reader waits for no sender."""
    transfer, errors = Transfer(), list[BaseException]()
    first, second = (DeviceNumbers(torch.device("ipu"), torch.float64) for _ in range(2))
    with Accelerator() as accelerator:
        places = first.add(put(torch.ones(1))), second.add(put(torch.zeros(1)))
        first.leave(transfer)
        assert first.read(places[0]) == [1.0]
        second.leave(transfer)
        transfer.send(lambda _, error: errors.append(error))
        assert (first.read(places[0]), second.read(places[1])) == ([1.0], [0.0])
        assert accelerator.num_host_copies == 2
    assert errors == []


def test_a_copy_that_fails_is_told_once_and_named_in_all_that_it_would_have_brought() -> None:
    """What is left on other devices is sent all the same."""
    transfer, errors = Transfer(), list[tuple[str, BaseException]]()
    first, second = (DeviceNumbers(torch.device("ipu"), torch.float64) for _ in range(2))
    with Accelerator():
        places = first.add(put(torch.ones(1))), second.add(put(torch.ones(1)))
        whole = DeviceNumbers(torch.device("ipu"), torch.int64)
        place = whole.add(put(torch.ones(1, dtype=torch.int64)))
        for one in (first, second, whole):
            one.leave(transfer)
        assert second.gathered is not None
        second.gathered.numbers = torch.ones(1)  # cat refuses what lies elsewhere
        transfer.send(lambda probe, error: errors.append((probe, error)))
        assert [(probe, type(error)) for probe, error in errors] == [("reducer", AssertionError)]
        for one, lost in zip((first, second), places, strict=True):
            with pytest.raises(RuntimeError, match="AssertionError: cat mixes tensors"):
                one.read(lost)
        assert whole.read(place) == [1]
