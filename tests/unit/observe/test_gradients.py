"""Gradients are those of the right tensor, forward and backward, and memory is bounded when none comes."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe import gradients
from torchinstruments.records import SampleState, ScaleProvenance, Signal
from unit.observe.memory import MemorySession, Recorder, num_hooks, observe, value


def backwards(session: MemorySession) -> list[tuple[int, int | None, list[tuple[str, str]]]]:
    """Ordinal, backward index, and layer with reason of each traversal."""
    return [
        (s.ordinal, s.backward_index, [(m.layer, m.reasons[0]) for m in s.measurements])
        for s in session.samples()
        if s.backward_index is not None
    ]


def test_gradients_are_those_of_the_outputs(session: MemorySession) -> None:
    """They equal what autograd itself says, and follow the layers backwards."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    observe(model, session)
    x = torch.randn(5, 4)
    model(x).pow(2).sum().backward()
    hidden = model[0](x)
    activated = model[1](hidden)
    output = model[2](activated)
    truth = torch.autograd.grad(output.pow(2).sum(), [output, activated, hidden])
    measured = session.gradients()
    assert [m.layer for m in measured] == ["2", "1", "0"]
    for measurement, gradient in zip(measured, truth, strict=True):
        assert measurement.signal is Signal.OUTPUT_GRADIENT
        assert measurement.tensor_path == "grad_output"
        assert measurement.backward_index == 0
        assert measurement.shape == tuple(gradient.shape)
        assert value(measurement) == pytest.approx(gradient.double().mean().item())
        assert value(measurement, "max") == gradient.max().item()


def test_each_layer_round_an_in_place_relu_has_its_own_gradient(session: MemorySession) -> None:
    """The one before it is masked, its own is not."""
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(inplace=True))
    observe(model, session)
    x = torch.randn(8, 4)
    (model(x) * 3).sum().backward()
    share_off = (model[0](x) <= 0).double().mean().item()
    relu, linear = session.gradients()
    assert (relu.layer, linear.layer) == ("1", "0")
    assert (value(relu, "min"), value(relu, "max"), value(relu, "zero_fraction")) == (3.0, 3.0, 0.0)
    assert value(linear, "zero_fraction") == share_off > 0


def test_outstanding_forwards_keep_their_gradients_apart_in_any_order(session: MemorySession) -> None:
    """Backwards in reversed order reach the samples of their own forwards."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    losses = [model(torch.ones(batch, 2)).sum() * batch for batch in (1, 2, 3)]
    for loss in reversed(losses):
        loss.backward()
    found = [(s.ordinal, value(s.measurements[0]), s.measurements[0].shape) for s in session.samples()[3:]]
    assert found == [(2, 3.0, (3, 2)), (1, 2.0, (2, 2)), (0, 1.0, (1, 2))]


def test_forwards_without_gradients_settle_at_once(session: MemorySession) -> None:
    """Under no_grad and inference_mode there are outputs, marked so, and nothing about gradients."""
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    observe(model, session)
    with torch.no_grad():
        model(torch.ones(1, 2))
    with torch.inference_mode():
        model(torch.ones(1, 2))
    samples = session.samples()
    assert [(s.state, s.settled, s.position.grad_enabled) for s in samples] == [
        (SampleState.FORWARD_COMPLETE, True, False)
    ] * 2
    assert [(m.grad_enabled, m.mode, m.reasons[0]) for m in session.outputs()] == [(False, "eval", "")] * 2
    assert session.gradients() == []


def test_a_forward_with_gradients_waits_and_is_settled_by_its_backward(session: MemorySession) -> None:
    """The forward's delivery says that more may come, the backward's that nothing more is expected."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    model(torch.ones(1, 2)).sum().backward()
    forward, backward = session.samples()
    assert (forward.settled, backward.settled) == (False, True)
    assert (forward.backward_index, backward.backward_index) == (None, 0)
    assert backward.state is SampleState.BACKWARD_OBSERVED
    assert forward.position == backward.position


def test_a_second_backward_through_a_kept_graph_has_the_next_index(session: MemorySession) -> None:
    """Both traversals are measured with their own values."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    first, second = session.gradients()
    assert (first.backward_index, second.backward_index) == (0, 1)
    assert (value(first), value(second)) == (1.0, 2.0)


def test_two_losses_are_two_traversals_and_what_the_first_misses_says_so(session: MemorySession) -> None:
    """The second head has no gradient in the first traversal and one in the second."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(2, 2)
            self.left = nn.Linear(2, 1)
            self.right = nn.Linear(2, 1)

        @override
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.trunk(x)
            return self.left(h), self.right(h)

    model = Heads()
    observe(model, session)
    left, right = model(torch.ones(1, 2))
    left.sum().backward(retain_graph=True)
    right.sum().backward()
    assert backwards(session) == [
        (0, 0, [("left", ""), ("trunk", ""), ("right", "no_gradient")]),
        (0, 1, [("right", ""), ("trunk", "")]),
    ]
    missing = session.gradients()[2]
    assert (missing.shape, missing.dtype, missing.values[0]) == ((1, 1), "float32", None)


def test_a_gradient_penalty_is_a_traversal_of_its_own_and_comes_out_right(session: MemorySession) -> None:
    """Parameters get the same gradients with and without an observer."""

    def step(model: nn.Module) -> list[torch.Tensor]:
        x = torch.full((3, 2), 0.5, requires_grad=True)
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.sum() + slope.pow(2).sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return gradients

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    bare = step(model)
    observe(model, session)
    observed = step(model)
    assert all(torch.equal(a, b) for a, b in zip(bare, observed, strict=True))
    assert [(ordinal, index) for ordinal, index, _ in backwards(session)] == [(0, 0), (0, 1)]


def test_a_backward_inside_the_forward_is_delivered_after_it(session: MemorySession) -> None:
    """A model that differentiates its own energy gives forward, inner and outer traversal in this order."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return force

    model = Energy()
    observe(model, session)
    model(torch.ones(1, 2)).sum().backward()
    assert [s.backward_index for s in session.samples()] == [None, 0, 1]
    assert all(s.modules_fired == 2 for s in session.samples())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_are_measured_once(session: MemorySession, use_reentrant: bool) -> None:
    """Recomputation adds nothing; the reentrant form hides gradients inside, and its rows say so."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.last = nn.Linear(2, 1)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.inner, x, use_reentrant=use_reentrant))

    model = Model()
    bare_x = torch.ones(3, 2, requires_grad=True)
    model(bare_x).sum().backward()
    bare = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    observe(model, session)
    model(torch.ones(3, 2, requires_grad=True)).sum().backward()
    assert all(
        torch.equal(p.grad, g) for p, g in zip(model.parameters(), bare, strict=True) if p.grad is not None
    )
    assert [(m.layer, m.call_index) for m in session.outputs()] == [
        ("inner.0", 0),
        ("inner.1", 0),
        ("last", 0),
    ]
    reason = "reentrant_checkpoint" if use_reentrant else ""
    assert {m.layer: m.reasons[0] for m in session.gradients()} == {
        "inner.0": reason,
        "inner.1": reason,
        "last": "",
    }
    assert num_hooks(model) == 2


def gate(x: torch.Tensor) -> torch.Tensor:
    """Two operations, one of which a policy saves."""
    return x * x.sigmoid()


def test_selective_checkpointing_computes_the_same_gradients(session: MemorySession) -> None:
    """No result of the measuring is taken for one that the policy saves."""
    saved = [torch.ops.aten.mul.Tensor, torch.ops.aten.mm.default]

    def build_step(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        contexts = partial(create_selective_checkpoint_contexts, saved)
        x = torch.randn(4, 8, requires_grad=True)
        loss = model(x, contexts).pow(2).sum()
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return gradients

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), Recorder(gate), nn.Linear(8, 8))

        @override
        def forward(self, x: torch.Tensor, contexts: Any) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)

    def spread(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        # Operations that the policy saves.
        return {"spread": (tensor * tensor).sum() * tensor.abs().sum()}

    model = Model()
    bare = build_step(model)
    observe(model, session, reducers=(spread,))
    observed = build_step(model)
    assert all(torch.equal(a, b) for a, b in zip(bare, observed, strict=True))
    assert len(session.outputs()) == 4
    assert session.errors == []


def test_a_backward_that_raises_is_given_up_at_the_next_forward(session: MemorySession) -> None:
    """What it had brought is delivered as failed, and the exception reaches the user."""

    class Broken(torch.autograd.Function):
        @staticmethod
        @override
        def forward(*args: Any, **_kwargs: Any) -> Any:
            return args[1].clone()

        @staticmethod
        @override
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            raise ValueError(f"in backward of {len(grad_outputs)}")

    model = nn.Sequential(nn.Linear(2, 2), Recorder(Broken.apply), nn.Linear(2, 2))
    observe(model, session)
    with pytest.raises(ValueError, match="in backward"):
        model(torch.ones(1, 2)).sum().backward()
    assert len(session.deliveries) == 1
    with torch.no_grad():
        model(torch.ones(1, 2))
    failed = session.samples()[1]
    assert (failed.ordinal, failed.state, failed.settled) == (0, SampleState.FAILED, True)
    assert [m.layer for m in failed.measurements] == ["2", "1"]


def test_hooks_do_not_keep_activations_alive(session: MemorySession) -> None:
    """An output and the sample's bookkeeping go with the graph when no backward comes."""
    outputs: list[weakref.ref[torch.Tensor]] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        outputs.append(weakref.ref(y))
        return y

    model = nn.Sequential(nn.Linear(2, 2), Recorder(note))
    observer = observe(model, session)
    output = model(torch.ones(1, 2))
    probe = observer._probe
    assert probe is not None
    (pending,) = probe._tracker._samples
    assert pending() is not None
    del output
    gc.collect()
    assert outputs[0]() is None
    assert pending() is None


def test_graphs_that_stay_without_a_backward_are_bounded(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest sample is given up with an error that says so; the others still get their gradients."""
    monkeypatch.setattr(gradients, "MAX_OUTSTANDING", 2)
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    with pytest.warns(RuntimeWarning, match="more than 2 sampled forwards wait"):
        losses = [model(torch.ones(1, 2)).sum() for _ in range(3)]
    for loss in losses:
        loss.backward()
    assert [ordinal for ordinal, _, _ in backwards(session)] == [1, 2]
    assert session.errors[0].probe == "gradient"


def test_graphs_that_went_do_not_count_against_the_bound(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many forwards whose outputs are dropped leave nothing behind."""
    monkeypatch.setattr(gradients, "MAX_OUTSTANDING", 2)
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    for _ in range(10):
        model(torch.ones(1, 2))
    assert session.errors == []


def test_a_parameter_that_a_layer_returns_keeps_no_hook(session: MemorySession) -> None:
    """Its gradient counts for the backward of that forward; a later one finds no hook of ours."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        @override
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            return self.weight

    model = Weight()
    observer = observe(model, session)
    model(torch.ones(1)).sum().backward()
    assert [(m.layer, m.reasons[0]) for m in session.gradients()] == [("", "")]
    with observer.paused():
        for _ in range(2):
            model(torch.ones(1)).sum().backward()
    assert len(session.deliveries) == 2
    assert not model.weight._backward_hooks


def test_the_loss_scale_is_the_one_at_the_end_of_the_backward(session: MemorySession) -> None:
    """It is taken along as a number that later changes of the scaler do not touch."""
    scale = torch.tensor([1024.0])
    asked_for: list[int | None] = []

    class Scaler:
        def current_scale(
            self, forward_index: int | None = None
        ) -> tuple[torch.Tensor | None, ScaleProvenance]:
            asked_for.append(forward_index)
            return scale, ScaleProvenance.GRADSCALER

        def scale_left(
            self, optimizer: Optimizer, forward_index: int
        ) -> tuple[torch.Tensor | float | None, ScaleProvenance]:
            raise AssertionError(f"no step was expected, of {optimizer} after forward {forward_index}")

    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session, scale=Scaler())
    (model(torch.ones(1, 2)).sum() * scale.item()).backward()
    assert asked_for == [None, 0]
    scale.fill_(1.0)
    forward, backward = session.samples()
    assert (forward.loss_scale, forward.scale_provenance) == (None, ScaleProvenance.GRADSCALER)
    assert (backward.loss_scale, backward.scale_provenance) == (1024.0, ScaleProvenance.GRADSCALER)
    assert value(backward.measurements[0]) == 1024.0


def test_without_a_watch_for_scalers_the_scale_is_unknown(session: MemorySession) -> None:
    """Nothing is claimed that nobody looked for."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    model(torch.ones(1, 2)).sum().backward()
    assert {(s.loss_scale, s.scale_provenance) for s in session.samples()} == {
        (None, ScaleProvenance.UNKNOWN)
    }


def test_a_module_that_returns_its_input_shares_the_gradient(session: MemorySession) -> None:
    """One tensor returned by two layers has a row for each."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    observe(model, session)
    model(torch.ones(1, 2)).sum().backward()
    assert sorted((m.layer, value(m)) for m in session.gradients()) == [("0", 1.0), ("1", 1.0)]


class OnlyLeft(torch.autograd.Function):
    """Two outputs; what does not depend on the loss has no gradient, not even zeros."""

    @staticmethod
    @override
    def forward(*args: Any, **_kwargs: Any) -> Any:
        ctx, x = args
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> torch.Tensor | None:
        left, right = gradients
        assert right is None
        return None if left is None else left * 2


def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two views."""
    return x.chunk(2, 1)


def vectors(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Left vectors and singular values, of which the test takes the first."""
    return tuple(torch.linalg.svd(x, full_matrices=False))[:2]


@pytest.mark.parametrize("split", [halves, torch.unbind, vectors, OnlyLeft.apply])
def test_an_undefined_gradient_is_none_and_no_error(session: MemorySession, split: Any) -> None:
    """Autograd runs the hooks of all outputs of an operation, with None for those that nothing depends on."""
    model = nn.Sequential(nn.Linear(4, 4), Recorder(split))
    observe(model, session, policy=ErrorPolicy.RAISE)
    for _ in range(2):
        model(torch.rand(2, 4))[0].sum().backward()
    assert session.errors == []
    first = [(m.layer, m.tensor_path, m.reasons[0]) for m in session.samples()[1].measurements]
    assert ("1", "grad_output.0", "") in first
    assert ("1", "grad_output.1", "no_gradient") in first
    assert ("0", "grad_output", "") in first
    assert len(first) == 3
    missing = next(m for m in session.gradients() if m.tensor_path == "grad_output.1")
    assert (missing.shape, missing.dtype) == (session.outputs()[2].shape, "float32")


def test_a_leaf_with_an_undefined_gradient_has_none_either(session: MemorySession) -> None:
    """A parameter that a module puts out is watched by a tensor hook as well, which is given None."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        @override
        def forward(*args: Any, **_kwargs: Any) -> Any:
            return args[1] * 2

        @staticmethod
        @override
        def backward(ctx: Any, *gradients: torch.Tensor) -> None:
            return None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.out = Recorder(lambda _: self.weight)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Nothing.apply(self.out(x))
            return out

    model = Model()
    observe(model, session, signals=(*Signal,), selector=lambda name, _: name == "out", steps=None)
    model(torch.ones(2)).sum().backward()
    assert session.errors == []
    assert [(m.layer, m.reasons[0]) for m in session.gradients()] == [("out", "no_gradient")]


class Guarded(torch.Tensor):
    """A tensor that refuses what the observer asks it and counts what it is asked."""

    asked: list[str] = []  # noqa: RUF012 - of the class, for the results of operations have no state
    refused = ""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == cls.refused:
            raise NotImplementedError(f"no {name}")
        cls.asked.append(name)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("refused", ["_is_view", "register_hook"])
def test_a_subclass_that_refuses_questions_has_its_gradients_all_the_same(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Its own functions are not asked, and every gradient stands under its own layer."""
    monkeypatch.setattr(Guarded, "refused", refused)
    model = nn.Sequential(
        Recorder(lambda x: (x * 2).as_subclass(Guarded)),
        Recorder(lambda x: x.as_subclass(torch.Tensor) * 3),
        nn.Linear(2, 2, bias=False),
    )
    observe(model, session)
    x = torch.ones(1, 2, requires_grad=True)
    (model(x) * 5).sum().backward()
    assert session.errors == []
    (weight,) = model.parameters()
    through = (weight.sum(0) * 5).sum().item() / 2
    assert {m.layer: value(m) for m in session.gradients()} == {
        "2": 5.0,
        "1": pytest.approx(through),
        "0": pytest.approx(3 * through),
    }


def test_a_hook_that_cannot_be_placed_costs_its_own_gradient(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was placed before the exception finds no target, and the next one has a number of its own."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    observe(model, session)
    placed = torch.Tensor.register_hook
    calls: list[object] = []

    def place_and_raise(tensor: torch.Tensor, hook: Any) -> Any:
        calls.append(hook)
        handle = placed(tensor, hook)
        if len(calls) == 2:
            raise MemoryError("no room")
        return handle

    monkeypatch.setattr(torch.Tensor, "register_hook", place_and_raise)
    (model(torch.ones(1, 2)) * 7).sum().backward()
    assert [(e.probe, e.module, e.type) for e in session.errors] == [("gradient", "1", "MemoryError")]
    found = {m.layer: m for m in session.gradients()}
    assert len(session.gradients()) == 3
    assert value(found["2"]) == 7.0
    assert found["1"].reasons[0] == "reducer_error: MemoryError: no room"
    assert found["0"].reasons[0] == ""
    assert [m.layer for m in session.samples()[1].measurements] == ["2", "0"]
