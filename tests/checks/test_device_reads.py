"""Numbers of a pretended accelerator, where every wait of the training thread raises but a fetch."""

import copy
import io
from collections.abc import Iterator

import pytest
import torch

from checks.training import batch, mlp, train
from torchinstruments.checks import ChecksSession
from torchinstruments.checks.check import Measured
from torchinstruments.checks.measures import norms
from torchinstruments.checks.reading import Reading
from torchinstruments.statistics.isolation import functions_off, isolated
from unit.statistics.accelerator import Accelerator, put

TENSORS = [
    torch.tensor([3.0, 4.0]),
    torch.zeros(3),
    torch.tensor([1.0, float("nan")]),
    torch.tensor([1e-30, 0.0]),
    torch.full((400,), 30_000.0, dtype=torch.float16),
    torch.tensor([1e200, 1e200], dtype=torch.float64),
    torch.tensor([2.0], dtype=torch.bfloat16),
]
EXPECTED = [5.0, 0.0, float("nan"), 1e-30, 600_000.0, 1e200, 2.0]


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """The device is there, and the host copies are counted from zero."""
    with Accelerator() as found:
        yield found


def test_norms_of_all_checks_come_to_the_host_in_one_copy(accelerator: Accelerator) -> None:
    """Whatever their dtypes; nothing is read before."""
    on_device = [put(tensor) for tensor in TENSORS]
    reading = Reading()
    with torch.no_grad():
        columns = [reading.add(norms(on_device)) for _ in range(3)]
        assert accelerator.num_host_copies == 0
        reading.fetch()
    assert accelerator.num_host_copies == 1
    assert reading.num_host_reads == 1
    for column in columns:
        assert column.numbers.tolist() == pytest.approx(EXPECTED, nan_ok=True)


def test_norms_on_the_host_are_the_same() -> None:
    """Large tensors are added up in pieces, and views of every kind are taken."""
    with functions_off(), isolated("cpu"):
        reading = Reading()
        measured = Measured.of(dict(enumerate(TENSORS)), reading)
        large = torch.full((3, 400_000), 0.5)
        more = Measured.of({0: large, 1: large.T, 2: torch.complex(large[:1], large[:1])}, reading)
        reading.fetch()
    assert measured.norms.tolist()[:5] == pytest.approx(EXPECTED[:5], nan_ok=True)
    assert measured.norms[5] == pytest.approx(1e200 * 2**0.5)
    exact = 0.5 * 1_200_000**0.5
    assert more.norms.tolist() == pytest.approx([exact, exact, 0.5 * 800_000**0.5], rel=1e-6)


def test_copies_and_pickles_of_a_watched_model_are_not_watched() -> None:
    """An average of the weights, a saved model."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_nonfinite_grad_check()
    with session:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        other = copy.deepcopy(model)
        (other(batch()).sum() * float("inf")).backward()
        train(model, steps=2)
    buffer.seek(0)
    assert isinstance(torch.load(buffer, weights_only=False), torch.nn.Sequential)
    assert session.report().counters["backwards"] == 2
    assert session.report().findings == ()
