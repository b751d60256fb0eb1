"""Values that wait, and what they come from."""

import math
from collections.abc import Mapping, Sequence

import torch

from torchinstruments.records import Absent
from torchinstruments.statistics.held import Derived, Seen, SeenOnDevice, Waiting, finished, lone_number
from torchinstruments.statistics.measuring import look
from torchinstruments.statistics.profile import ExactProfile
from torchinstruments.statistics.transfer import DeviceNumbers


def sent(numbers: list[float]) -> tuple[DeviceNumbers, slice]:
    """Returns numbers that have been sent, and where they stand."""
    device = DeviceNumbers(torch.device("cpu"), torch.float64)
    where = device.add(torch.tensor(numbers))
    device.send()
    return device, where


def test_a_packed_result_is_finished_from_its_own_numbers() -> None:
    """All of its metrics come from the one call."""

    def finish(numbers: Sequence[float]) -> Mapping[str, float | Absent]:
        return {"a": sum(numbers), "b": Absent("empty")}

    assert finished(Waiting(*sent([3.0, 4.0]), finish)) == {"a": 7.0, "b": Absent("empty")}


def test_a_lone_number_is_finite_or_says_why_not() -> None:
    """It stands under the name of its metric."""
    assert finished(Waiting(*sent([3.0]), lone_number("x"))) == {"x": 3.0}
    assert finished(Waiting(*sent([math.inf]), lone_number("x"))) == {"x": Absent("nonfinite_result")}


def test_values_follow_from_a_look_whether_it_was_taken_here_or_on_a_device() -> None:
    """Both kinds of look give the facts that the reducer asks for."""
    tensor = torch.tensor([1.0, 3.0])
    measured = look(tensor, is_ordered=True)
    on_device = SeenOnDevice(*sent([0.0]), lambda _numbers: measured)
    for seen in (Seen(measured), on_device):
        values = finished(Derived(ExactProfile(), seen))
        assert values == ExactProfile()(tensor)


def test_what_was_never_sent_becomes_the_reason() -> None:
    """The writer thread goes on."""
    device = DeviceNumbers(torch.device("cpu"), torch.float64)
    lone = Waiting(device, device.add(torch.ones(1)), lone_number("x"))
    assert finished(lone) == Absent("reducer_error: RuntimeError: they were never sent to the host")
