"""What optimizers find in the gradients, through real optimizers and loss scalers."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from torchinstruments.observe.applied import StepRelay
from torchinstruments.observe.observer import Observer
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.loss_scale import ScalerWatch
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.records import Measurement, Sample, SampleState, ScaleProvenance, Signal, Stage
from unit.observe.memory import MemorySession, observe, value

GRADIENT = frozenset((Signal.PARAMETER_GRADIENT,))


def attach(model: nn.Module, session: MemorySession) -> Observer:
    """Attaches an observer that sees optimizers and scalers."""
    clock, steps = StepClock(), StepRelay()

    def failed(probe: str, error: BaseException) -> None:
        raise AssertionError(probe) from error

    optimizers = OptimizerWatch(clock, weakref.ref(model), on_error=failed, listener=steps)
    scalers = ScalerWatch(clock, optimizers, on_error=failed)
    return observe(
        model,
        session,
        clock=clock,
        scale=scalers,
        companions=(optimizers, scalers),
        signals=GRADIENT,
        steps=steps,
    )


def at_steps(session: MemorySession) -> list[Sample]:
    """The deliveries of optimizer steps."""
    return [sample for sample in session.samples() if sample.at_step]


def applied(session: MemorySession) -> list[Measurement]:
    """All that steps found."""
    return session.of(Signal.PARAMETER_GRADIENT, Stage.APPLIED)


def one_weight(value_of: float = 1.0) -> nn.Sequential:
    """A model of one weight, whose gradient is its input."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.constant_(next(model.parameters()), value_of)
    return model


def test_a_step_finds_what_clipping_left(session: MemorySession) -> None:
    """A delivery of its own, beside those of the forward and the backward."""
    model = nn.Sequential(nn.Linear(4, 2))
    observer = attach(model, session)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).pow(2).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    truth = [p.grad.double().mean().item() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    forward, backward, step = session.samples()
    assert [value(m) for m in step.measurements] == [pytest.approx(one) for one in truth]
    assert [(m.tensor_path, m.stage) for m in step.measurements] == [
        ("weight", "applied"),
        ("bias", "applied"),
    ]
    assert (forward.at_step, backward.at_step, step.at_step) == (False, False, True)
    assert (step.ordinal, step.position, step.backward_index) == (0, forward.position, None)
    assert (step.state, step.settled) == (SampleState.BACKWARD_OBSERVED, True)
    assert (step.loss_scale, step.scale_provenance) == (None, ScaleProvenance.NONE_SEEN)
    observer.close()


def test_the_last_sample_of_an_attempt_has_what_its_step_found(session: MemorySession) -> None:
    """Of several micro-batches the last; and the attempt after it has a step of its own."""
    model = one_weight()
    observer = attach(model, session)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.step()
    assert [(s.ordinal, value(s.measurements[0])) for s in at_steps(session)] == [(2, 3.0), (5, 3.0)]
    observer.close()


def test_a_sample_before_unsampled_micro_batches_has_the_whole_sum(session: MemorySession) -> None:
    """What a step finds is of the attempt; and a step of a later attempt is none of the sample's."""
    model = one_weight()
    observer = attach(model, session)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    with observer.paused():
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert [value(m) for m in applied(session)] == [2.0]
    observer.close()


def test_each_optimizer_tells_of_its_own_parameters(session: MemorySession) -> None:
    """Two of them in one attempt are two deliveries; what none has, has no row."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
    observer = attach(model, session)
    model(torch.ones(1, 1)).sum().backward()
    for layer in (model[1], model[0]):
        SGD(layer.parameters(), lr=0.1).step()
    assert [[m.layer for m in s.measurements] for s in at_steps(session)] == [["1"], ["0"]]
    observer.close()


def test_a_parameter_without_a_gradient_says_so_at_the_step_too(session: MemorySession) -> None:
    """The optimizer passes it over."""
    model = one_weight()
    observer = attach(model, session)
    model(torch.ones(1, 1))
    SGD(model.parameters(), lr=0.1).step()
    assert [m.reasons[0] for m in applied(session)] == ["no_gradient"]
    assert at_steps(session)[0].state is SampleState.FORWARD_COMPLETE
    observer.close()


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_scaler_has_unscaled_what_an_ordinary_optimizer_finds(
    session: MemorySession, unscale_first: bool
) -> None:
    """The factor is one there, and the scale in the stages before."""
    model = one_weight()
    observer = attach(model, session)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.full((1, 1), 0.5)).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    _, backward, step = session.samples()
    assert [value(m) for m in backward.measurements] == [4.0, 4.0]
    assert (backward.loss_scale, backward.scale_provenance) == (8.0, ScaleProvenance.GRADSCALER)
    assert [value(m) for m in step.measurements] == [0.5]
    assert (step.loss_scale, step.scale_provenance) == (1.0, ScaleProvenance.GRADSCALER)
    observer.close()


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_fused_optimizer_finds_scaled_gradients_unless_they_were_unscaled(
    session: MemorySession, unscale_first: bool
) -> None:
    """It divides by the scale itself, so the number and the factor beside it say the same together."""
    model = one_weight()
    observer = attach(model, session)
    optimizer = AdamW(model.parameters(), fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.full((1, 1), 0.5)).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(2.0)
    step = at_steps(session)[0]
    expected = (0.5, 1.0) if unscale_first else (4.0, 8.0)
    assert (value(step.measurements[0]), step.loss_scale) == expected
    observer.close()


def test_a_step_beside_the_scaler_finds_scaled_gradients(session: MemorySession) -> None:
    """And whoever asks leaves no entry with the scaler."""
    model = one_weight()
    observer = attach(model, session)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    SGD(model.parameters(), lr=0.1).step()
    step = at_steps(session)[0]
    assert (value(step.measurements[0]), step.loss_scale) == (8.0, None)
    assert not scaler._per_optimizer_states
    observer.close()


def test_a_skipped_step_says_so(session: MemorySession) -> None:
    """Once for each parameter, with the shape that it has."""
    model = one_weight()
    observer = attach(model, session)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    for x in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 1), x)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    skipped, stepped = applied(session)
    assert (skipped.reasons[0], skipped.values[0], skipped.shape) == ("step_skipped", None, (1, 1))
    assert value(stepped) == 1.0
    observer.close()


def closure_of(model: nn.Module, optimizer: Optimizer) -> Callable[[], float]:
    """A closure that runs one forward and backward."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.full((1, 1), 2.0)).sum().pow(2)
        loss.backward()
        return loss.item()

    return closure


def test_a_closure_that_runs_once_leaves_what_was_applied(session: MemorySession) -> None:
    """The forward is inside the step, so that its gradient is there when the step ends."""
    model = one_weight()
    observer = attach(model, session)
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.step(closure_of(model, optimizer))
    assert [(s.ordinal, value(s.measurements[0])) for s in at_steps(session)] == [(0, 8.0), (1, 8.0)]
    observer.close()


def test_a_closure_that_runs_several_times_leaves_none_that_can_be_told(session: MemorySession) -> None:
    """LBFGS looks for its step along several gradients."""
    model = one_weight()
    observer = attach(model, session)
    optimizer = LBFGS(model.parameters(), max_iter=4)
    optimizer.step(closure_of(model, optimizer))
    assert len({s.ordinal for s in session.samples()}) > 1
    assert [m.reasons[0] for m in applied(session)] == ["several_evaluations"]
    observer.close()


def test_an_optimizer_in_the_backward_is_part_of_it(session: MemorySession) -> None:
    """Each parameter has its own; what they find comes with the backward's delivery."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    own = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    observer = attach(model, session)
    model(torch.ones(1, 1)).sum().backward()
    assert at_steps(session) == []
    accumulated = session.of(Signal.PARAMETER_GRADIENT, Stage.LOCAL_ACCUMULATED)
    assert len(accumulated) == len(applied(session)) == 4
    assert [value(m) for m in applied(session)] == [value(m) for m in accumulated]
    observer.close()


def test_a_removed_observer_is_told_of_no_step(session: MemorySession) -> None:
    """And what it awaited is dropped."""
    model = one_weight()
    observer = attach(model, session)
    model(torch.ones(1, 1)).sum().backward()
    observer.close()
    SGD(model.parameters(), lr=0.1).step()
    assert applied(session) == []
