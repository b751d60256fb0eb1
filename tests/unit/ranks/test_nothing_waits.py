"""Scaler, fused optimizer and ledger on a pretended accelerator, where a wait of the training thread raises.

Autograd knows no such device, so that the gradients are given; all that the scaler and the watch do with them
is real. What cannot be seen is how long a real device's driver holds the thread that queues an operation.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from torchinstruments.ranks import ring as ring_module
from torchinstruments.records import Evidence, Outcome
from torchinstruments.statistics import transfer as transfer_module
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.reducers import default_reducers
from unit.ranks.scaled_training import ScaledTraining, overflows
from unit.statistics.accelerator import Accelerator, AcceleratorTensor, put
from unit.statistics.streams import Streams, pretend_streams


class _Fused(Optimizer):
    """Skips on the device, as torch's fused optimizers do."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    def step(self, _: Any = None) -> None:  # pyrefly: ignore
        own: Any = self
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                gradient = parameter.grad if own.grad_scale is None else parameter.grad / own.grad_scale
                stepped = parameter - 0.5 * gradient
                parameter.fill_(torch.where(own.found_inf == 1, parameter, stepped))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """The device is there, and the host copies are counted from zero."""

    def stay(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        # Torch's own binding asks for a driver even where nothing is to be moved, as a scaler does.
        stays = self.device in (*args, options.get("device"))
        return self if stays else torch.Tensor.to(self, *args, **options)

    monkeypatch.setattr(AcceleratorTensor, "to", stay, raising=False)
    with Accelerator() as accelerator:
        yield accelerator


class _OnDevice(ScaledTraining):
    """One weight on the device, under the watch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = put(torch.tensor(4.0))
        self.optimizer = _Fused([self.weight])
        # Registering asks for a parameter, which no tensor of the device is.
        registered: Any = self.model._parameters
        registered["weight"] = self.weight

    def attempt(self, scaler: GradScaler, *, overflow: bool, unscale: bool) -> None:
        started = self.clock.forward_started(grad_enabled=True, now_s=0.0, now_us=0)
        self._closed += started.closed
        scaled = scaler.scale(put(torch.tensor(float("inf") if overflow else 1.0)))
        self.weight.grad = scaled
        if unscale:
            scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("has_streams", [False, True])
def test_unsampled_steps_with_scaler_and_ledger_never_wait_and_copy_nothing_to_the_host(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, unscale: bool, has_streams: bool
) -> None:
    """All numbers of all attempts come with one copy, when the writer thread resolves them."""
    streams = pretend_streams(monkeypatch, ring_module) if has_streams else None
    steps = "..x.xx."
    with _OnDevice() as training:
        scaler = GradScaler("ipu", init_scale=1024.0)
        weights = []
        for overflow in overflows(steps):
            training.attempt(scaler, overflow=overflow, unscale=unscale)
            weights.append(training.weight.memory.item())
        assert accelerator.num_host_copies == 0
        if streams is not None:
            assert not any(asked.startswith("wait for") for asked in streams.log)
        records = training.records()
    assert [r.outcome for r in records] == [
        Outcome.SKIPPED if overflow else Outcome.APPLIED for overflow in overflows(steps)
    ]
    assert weights == [3.5, 3.0, 3.0, 2.5, 2.5, 2.5, 2.0]
    assert [r.evidence for r in records] == [Evidence.FOUND_INF] * len(steps)
    assert [r.found_inf for r in records] == [float(overflow) for overflow in overflows(steps)]
    assert [r.scale_before for r in records] == [1024, 1024, 1024, 512, 512, 256, 128]
    assert [r.scale_after for r in records] == [1024, 1024, 512, 512, 256, 128, 128]
    if has_streams:
        assert accelerator.num_host_copies == 1


def test_the_count_sees_a_host_read_and_a_copy_of_the_training_thread(accelerator: Accelerator) -> None:
    """Without that the test before would show nothing."""
    with _OnDevice() as training:
        scaler = GradScaler("ipu", init_scale=1024.0)
        training.attempt(scaler, overflow=False, unscale=False)
        with pytest.raises(AssertionError, match="_local_scalar_dense makes the training thread wait"):
            scaler.get_scale()
        assert accelerator.num_host_copies == 0
        assert isinstance(scaler._scale, AcceleratorTensor)
        scaler._scale.cpu()
        assert accelerator.num_host_copies == 1


def test_a_sampled_delivery_makes_one_copy_and_the_ledger_none(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors, loss scale and all come in one batch."""
    streams: Streams = pretend_streams(monkeypatch, ring_module, transfer_module)
    errors: list[BaseException] = []

    def fail(_: str, error: BaseException) -> None:
        errors.append(error)

    with _OnDevice() as training:
        scaler = GradScaler("ipu", init_scale=1024.0)
        training.attempt(scaler, overflow=True, unscale=False)
        scale, _ = training.scalers.current_scale()
        assert scale is not None
        batch = ScalarBatch(default_reducers(), fail)
        tensors = [batch.add(put(torch.arange(4.0) + index)) for index in range(3)]
        place = batch.add_scalar(scale)
        batch.seal()
        assert accelerator.num_host_copies == 1
        assert not any(asked.startswith("wait for") for asked in streams.log)
        assert batch.read_scalar(place) == 512.0
        assert [batch.read(index).values[0] for index in tensors] == [1.5, 2.5, 3.5]
        assert accelerator.num_host_copies == 1
    assert errors == []
