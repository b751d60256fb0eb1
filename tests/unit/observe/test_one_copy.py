"""How many copies to the host a sampled step makes on the training thread, on a pretended accelerator.

Autograd knows no such device: the model runs on the CPU, and what is measured of it is taken to lie on the
device. So the training is real, and so is all that is measured of it, sent and read.
"""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim import SGD

from torchinstruments.observe import observation as observation_module
from torchinstruments.observe.applied import StepRelay
from torchinstruments.observe.observation import DEFAULT_SIGNALS
from torchinstruments.observe.sampling import EveryNForwardsSampler
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.records import Absent, SampleState, Scope, Signal
from torchinstruments.statistics import isolation as isolation_module
from torchinstruments.statistics import transfer as transfer_module
from torchinstruments.statistics.admission import admit
from unit.observe.memory import MemorySession, observe
from unit.statistics.accelerator import Accelerator, put
from unit.statistics.streams import Streams, pretend_streams

COMPLETE, OBSERVED = SampleState.FORWARD_COMPLETE, SampleState.BACKWARD_OBSERVED


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """What is measured lies on the device, which has streams."""

    def admit_to_device(tensor: torch.Tensor) -> tuple[torch.Tensor, Scope] | Absent:
        admitted = admit(tensor)
        return admitted if isinstance(admitted, Absent) else (put(admitted[0]), admitted[1])

    def no_modes() -> int:
        return 0

    monkeypatch.setattr(observation_module, "admit", admit_to_device)
    # The device is a dispatch mode itself, which `isolated` would turn off.
    monkeypatch.setattr(isolation_module, "_len_torch_dispatch_stack", no_modes)
    with Accelerator():
        yield pretend_streams(monkeypatch, transfer_module)


class Training:
    """A model and its optimizer, observed.

    Args:
        session: Keeps what is delivered.
        every: How many forwards there are to one that is sampled.
        with_gradients: Whether the gradients that steps find are measured too.
    """

    def __init__(self, session: MemorySession, *, every: int = 1, with_gradients: bool = False) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        clock, steps = StepClock(), StepRelay()
        watch = OptimizerWatch(clock, weakref.ref(self.model), on_error=_raise, listener=steps)
        self.observer = observe(
            self.model,
            session,
            clock=clock,
            steps=steps,
            sampler=EveryNForwardsSampler(every),
            companions=(watch,),
            signals={*DEFAULT_SIGNALS, *([Signal.PARAMETER_GRADIENT] * with_gradients)},
        )

    def forward(self) -> torch.Tensor:
        """Returns the loss."""
        return self.model(torch.randn(5, 3)).square().sum()

    def step(self) -> None:
        """Trains one step."""
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _raise(probe: str, error: BaseException) -> None:
    raise AssertionError(probe) from error


def values(session: MemorySession) -> list[tuple[object, tuple[float | None, ...]]]:
    """What all measurements of all deliveries belong to, and their numbers."""
    assert session.errors == []
    return [
        ((sample.state, sample.at_step, m.layer, m.signal, m.stage, m.tensor_path, m.metrics), m.values)
        for sample in session.samples()
        for m in sample.measurements
    ]


@pytest.mark.parametrize("with_gradients", [False, True])
def test_an_unsampled_step_copies_nothing_and_a_sampled_one_once(
    streams: Streams, session: MemorySession, with_gradients: bool
) -> None:
    """Forward, backward and, where they are measured, the gradients of the step come together."""
    training = Training(session, every=2, with_gradients=with_gradients)
    for num_samples in range(1, 4):
        training.step()
        assert Accelerator.num_host_copies == num_samples - 1
        training.step()
        assert Accelerator.num_host_copies == num_samples
    assert len(session.deliveries) == 3 * (3 if with_gradients else 2)
    assert not any(asked.startswith("wait for") for asked in streams.log)
    training.observer.close()


@pytest.mark.parametrize("with_gradients", [False, True])
def test_what_comes_in_one_copy_is_what_is_measured_without_a_device(
    request: pytest.FixtureRequest, with_gradients: bool
) -> None:
    """The same deliveries in the same order, with the same numbers."""
    on_host, on_device = MemorySession(), MemorySession()
    for name, session in (("", on_host), ("streams", on_device)):
        if name:
            request.getfixturevalue(name)
        torch.manual_seed(0)
        training = Training(session, with_gradients=with_gradients)
        training.step()
        training.step()
        training.observer.close()
    found, expected = values(on_device), values(on_host)
    assert len(found) > 0
    assert [key for key, _ in found] == [key for key, _ in expected]
    for (_, numbers), (_, right) in zip(found, expected, strict=True):
        assert numbers == pytest.approx(right, rel=1e-12, abs=1e-15)


@pytest.mark.usefixtures("streams")
def test_a_forward_without_a_backward_is_sent_when_the_next_one_begins(session: MemorySession) -> None:
    """An evaluation forward is one too; what it measures itself waits for nothing."""
    training = Training(session)
    training.forward()
    assert Accelerator.num_host_copies == 0
    with torch.no_grad():
        training.forward()
    assert Accelerator.num_host_copies == 2
    assert [sample.state for sample in session.samples()] == [COMPLETE, COMPLETE]
    assert Accelerator.num_host_copies == 2
    training.observer.close()


def test_the_writer_thread_fetches_what_it_reads_before_a_backward_comes(
    streams: Streams, session: MemorySession
) -> None:
    """On a stream of its own; the training thread then sends the rest alone."""
    training = Training(session)
    loss = training.forward()
    streams.log.clear()
    [forward] = session.samples()
    assert (forward.state, {m.reasons for m in forward.measurements}) == (COMPLETE, {("",) * 9})
    assert (Accelerator.num_host_copies, streams.log) == (1, ["side waits for training"])
    loss.backward()
    assert Accelerator.num_host_copies == 2
    assert [sample.state for sample in session.samples()] == [COMPLETE, OBSERVED]
    assert Accelerator.num_host_copies == 2
    training.observer.close()
