"""Parameters and their gradients before and after the reduction, against what torch says by hand."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from torchinstruments.observe.selection import leaf_modules
from torchinstruments.records import Execution, Measurement, SampleState, Scope, Signal, Stage
from torchinstruments.statistics.histograms import histogram
from unit.observe.memory import MemorySession, observe, value

PARAMETER = frozenset((Signal.PARAMETER,))
GRADIENT = frozenset((Signal.PARAMETER_GRADIENT,))
WITH_OUTPUTS = frozenset((Signal.OUTPUT_GRADIENT, Signal.PARAMETER_GRADIENT))


def local(session: MemorySession) -> list[Measurement]:
    """Gradients before the reduction."""
    return session.of(Signal.PARAMETER_GRADIENT, Stage.LOCAL_ACCUMULATED)


def reduced(session: MemorySession) -> list[Measurement]:
    """Gradients after the reduction."""
    return session.of(Signal.PARAMETER_GRADIENT, Stage.REDUCED)


def means(measured: Collection[Measurement]) -> dict[str, float | None]:
    """Mean by full name of the parameter."""
    return {f"{m.layer}.{m.tensor_path}": m.values[m.metrics.index("mean")] for m in measured}


def reasons(measured: Collection[Measurement]) -> dict[str, str]:
    """Reason by full name of the parameter."""
    return {f"{m.layer}.{m.tensor_path}": m.reasons[0] for m in measured}


def true_means(model: nn.Module) -> dict[str, Any]:
    """Mean of each gradient that is there."""
    return {
        name: pytest.approx(parameter.grad.double().mean().item())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def weight_of(model: nn.Module) -> nn.Parameter:
    """The first parameter."""
    return next(model.parameters())


def num_parameter_hooks(model: nn.Module) -> int:
    """Post-accumulate hooks in the whole model."""
    return sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in model.parameters())


def test_parameters_are_those_that_the_forward_finds(session: MemorySession) -> None:
    """Under their own names, once a forward, in evaluation too."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3))
    observe(model, session, signals=PARAMETER)
    model(torch.randn(5, 4))
    with torch.no_grad():
        weight_of(model).fill_(7.0)
        model(torch.randn(5, 4))
    first, second = session.samples()
    assert [(m.layer, m.tensor_path, m.stage, m.call_index) for m in first.measurements] == [
        ("0", "weight", "", 0),
        ("0", "bias", "", 0),
        ("2", "weight", "", 0),
        ("2", "bias", "", 0),
    ]
    bias = first.measurements[1]
    assert (value(bias), bias.shape) == (
        pytest.approx(list(model.parameters())[1].double().mean().item()),
        (3,),
    )
    assert value(second.measurements[0]) == value(second.measurements[0], "max") == 7.0
    assert (second.settled, num_parameter_hooks(model)) == (True, 0)


def test_only_a_layers_own_parameters_are_its_rows(session: MemorySession) -> None:
    """A container has those that are registered in itself."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((2,), 3.0))
            self.inner = nn.Linear(2, 2)
            self.register_parameter("absent", None)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    model = Scaled()
    observe(model, session, selector=lambda name, _: name == "", signals=PARAMETER)
    model(torch.ones(1, 2))
    assert means(session.of(Signal.PARAMETER)) == {".scale": 3.0}


def test_a_parameter_that_is_shared_stands_under_each_module_that_has_it(session: MemorySession) -> None:
    """Its gradient is the sum over both uses, and the same in both rows."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    observe(model, session, signals=PARAMETER | GRADIENT)
    model(torch.randn(2, 3)).pow(2).sum().backward()
    assert list(means(session.of(Signal.PARAMETER))) == ["0.weight", "2.weight"]
    truth = true_means(model)["0.weight"]
    for stage in (local(session), reduced(session)):
        assert means(stage) == {"0.weight": truth, "2.weight": truth}


def test_what_cannot_be_measured_of_a_parameter_has_a_reason(session: MemorySession) -> None:
    """One that is not initialised yet is measured in the next forward; one on meta never."""
    lazy = nn.Sequential(nn.LazyLinear(2))
    observe(lazy, session, signals=PARAMETER | GRADIENT)
    lazy(torch.ones(1, 3)).sum().backward()
    assert reasons(session.of(Signal.PARAMETER)) == {"0.weight": "uninitialised", "0.bias": "uninitialised"}
    assert set(reasons(local(session)).values()) == {"uninitialised"}
    session.deliveries.clear()
    lazy.zero_grad()
    lazy(torch.ones(1, 3)).sum().backward()
    assert reasons(session.of(Signal.PARAMETER)) == {"0.weight": "", "0.bias": ""}
    assert means(reduced(session)) == {f"{name}": 1.0 for name in ("0.weight", "0.bias")}
    session.deliveries.clear()
    meta = nn.Sequential(nn.Linear(2, 2, device="meta"))
    observe(meta, session, signals=PARAMETER | GRADIENT)
    meta(torch.ones(1, 2, device="meta"))
    assert reasons(session.of(Signal.PARAMETER)) == {"0.weight": "meta_tensor", "0.bias": "meta_tensor"}
    assert session.errors == []


@pytest.mark.parametrize("signals", [GRADIENT, WITH_OUTPUTS])
def test_gradients_are_those_of_the_parameters(session: MemorySession, signals: frozenset[Signal]) -> None:
    """Alone in the process nothing is reduced, so that both stages are what the backward left."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    observe(model, session, signals=signals)
    model(torch.randn(5, 4)).pow(2).sum().backward()
    assert means(local(session)) == true_means(model)
    assert means(reduced(session)) == true_means(model)
    forward, backward = session.samples()
    assert (forward.settled, backward.settled) == (False, True)
    assert (backward.state, backward.backward_index) == (SampleState.BACKWARD_OBSERVED, 0)
    assert {m.scope for m in backward.measurements} == {Scope.LOCAL}
    assert session.errors == []


def test_what_several_micro_batches_added_up_to_is_measured(session: MemorySession) -> None:
    """A gradient knows no forwards: the second backward's rows hold the sum."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    observe(model, session, signals=GRADIENT)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert [value(m) for m in local(session)] == [1.0, 2.0]
    assert [value(m) for m in reduced(session)] == [1.0, 2.0]


def test_two_losses_are_two_traversals_of_the_parameters(session: MemorySession) -> None:
    """What the first does not reach says so, and has its rows in the second."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(2, 1, bias=False)
            self.right = nn.Linear(2, 1, bias=False)

        @override
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.left(x), self.right(x)

    model = Heads()
    observe(model, session, signals=GRADIENT)
    left, right = model(torch.ones(1, 2))
    left.sum().backward()
    (3 * right.sum()).backward()
    found = [(m.layer, m.backward_index, m.reasons[0], m.values[0]) for m in local(session)]
    assert found == [("left", 0, "", 1.0), ("right", 0, "no_gradient", None), ("right", 1, "", 3.0)]
    assert [m.reasons[0] for m in reduced(session)] == ["", "no_gradient", ""]


def test_a_gradient_that_is_asked_for_adds_to_no_parameter(session: MemorySession) -> None:
    """torch.autograd.grad through the outputs leaves none, and an old one is not taken for new."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    weight_of(model).grad = torch.full((1, 2), 9.0)
    observe(model, session, signals=GRADIENT)
    x = torch.ones(1, 2, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    assert reasons(local(session)) == reasons(reduced(session)) == {"0.weight": "no_gradient"}


class Branches(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(2, 1, bias=False)
        self.right = nn.Linear(2, 1, bias=False)

    @override
    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the output of the layer of a name."""
        return self.get_submodule(name)(x)


def test_what_an_earlier_attempt_left_in_a_gradient_is_no_gradient_of_this_one(
    session: MemorySession,
) -> None:
    """Of a layer that a backward adds nothing to, both stages say so, as long as its gradient stands."""
    model = Branches()
    observe(model, session, signals=GRADIENT)
    for name in ("left", "right"):
        model(torch.ones(1, 2), name).sum().backward()
    for stage in (local(session), reduced(session)):
        first, second = stage[:2], stage[2:]
        assert reasons(first) == {"left.weight": "", "right.weight": "no_gradient"}
        assert reasons(second) == {"left.weight": "no_gradient", "right.weight": ""}
        assert means(second) == {"left.weight": None, "right.weight": 1.0}


def test_what_a_loss_adds_beside_the_outputs_is_reduced_too(session: MemorySession) -> None:
    """A penalty of an unused layer may be added before the backward comes to an output."""
    model = Branches()
    with torch.no_grad():
        model.right.weight.fill_(4.0)
    observe(model, session, signals=GRADIENT)
    output = model(torch.ones(1, 2), "left")
    # Later nodes go first, so that the penalty's are over when the output's turn comes.
    (output.sum() + model.right.weight.sum()).backward()
    assert means(reduced(session)) == {"left.weight": 1.0, "right.weight": 1.0}


def test_a_backward_of_something_else_is_not_this_samples(session: MemorySession) -> None:
    """A penalty of the weights alone comes through no output."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    observe(model, session, signals=GRADIENT)
    output = model(torch.ones(1, 2))
    weight_of(model).pow(2).sum().backward()
    assert len(session.samples()) == 1
    model.zero_grad()
    output.sum().backward()
    assert means(local(session)) == {"0.weight": 1.0}


def test_a_later_forward_takes_the_gradients_over(session: MemorySession) -> None:
    """Two forwards and one backward: what comes is of both, and stands beside the last."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    observe(model, session, signals=WITH_OUTPUTS)
    (model(torch.ones(1, 2)) + model(torch.ones(1, 2))).sum().backward()
    found = {
        (s.ordinal, m.stage): (m.reasons[0], m.values[0]) for s in session.samples() for m in s.measurements
    }
    lost = "no_gradient: another forward with gradients began before this one's backward"
    assert found[0, "local_accumulated"] == found[0, "reduced"] == (lost, None)
    assert found[1, "local_accumulated"] == found[1, "reduced"] == ("", 2.0)


def test_an_evaluation_forward_before_the_backward_changes_nothing(session: MemorySession) -> None:
    """It adds to no gradient."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    observe(model, session, signals=GRADIENT)
    output = model(torch.ones(1, 2))
    with torch.no_grad():
        model(torch.zeros(1, 2))
    output.sum().backward()
    assert [(s.ordinal, m.values[0]) for s in session.samples() for m in s.measurements] == [(0, 1.0)] * 2


def test_frozen_parameters_have_values_and_no_gradients(session: MemorySession) -> None:
    """A model with adapters would have thousands of rows that say nothing."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    observe(model, session, signals=PARAMETER | GRADIENT)
    model(torch.ones(1, 2)).sum().backward()
    assert len(session.of(Signal.PARAMETER)) == 4
    assert sorted(reasons(local(session))) == ["1.bias", "1.weight"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parameters_have_one_row_a_backward(session: MemorySession, reentrant: bool) -> None:
    """Reentrant checkpointing adds inside a traversal of its own; used twice there, the last value counts."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                found = checkpoint(self.inner, x, use_reentrant=reentrant)
                assert isinstance(found, torch.Tensor)
                x = found
            return x

    model = Twice()
    observe(model, session, signals=GRADIENT)
    model(torch.randn(3, 2, requires_grad=True)).pow(2).sum().backward()
    truth = true_means(model)
    assert means(local(session)) == means(reduced(session)) == truth
    assert len(local(session)) == len(reduced(session)) == 1


def test_sparse_gradients_have_a_reason(session: MemorySession) -> None:
    """They are no strided tensors."""
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    observe(model, session, signals=GRADIENT)
    model(torch.tensor([1, 2])).sum().backward()
    assert reasons(local(session)) == {"0.weight": "unsupported_layout: sparse_coo"}


def test_a_hook_of_the_program_that_takes_the_gradient_away_comes_later(session: MemorySession) -> None:
    """What the backward had added is seen first, and then that nothing is left."""

    def take_away(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    weight_of(model).register_post_accumulate_grad_hook(take_away)
    observe(model, session, signals=GRADIENT)
    model(torch.ones(1, 2)).sum().backward()
    assert means(local(session)) == {"0.weight": 1.0}
    assert reasons(reduced(session)) == {"0.weight": "no_gradient"}


def test_histograms_of_parameters_have_their_stage(session: MemorySession) -> None:
    """Layers in focus draw them like outputs."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    observe(model, session, signals=PARAMETER | GRADIENT, histograms=(histogram(),))
    model(torch.ones(1, 2)).sum().backward()
    drawn = [(h.signal, h.stage, h.tensor_path, h.finite_count) for h in session.histograms()]
    assert drawn == [
        (Signal.PARAMETER, "", "weight", 2),
        (Signal.PARAMETER_GRADIENT, "local_accumulated", "weight", 2),
        (Signal.PARAMETER_GRADIENT, "reduced", "weight", 2),
    ]


def test_hooks_stay_until_the_next_forward_and_go_with_the_observer(session: MemorySession) -> None:
    """An unsampled forward finds none, and neither does a model that is observed no more."""
    model = nn.Sequential(nn.Linear(2, 1))
    observer = observe(model, session, signals=GRADIENT)
    output = model(torch.ones(1, 2))
    assert num_parameter_hooks(model) == 2
    output.sum().backward()
    with observer.paused():
        model(torch.ones(1, 2))
        assert num_parameter_hooks(model) == 0
    model(torch.ones(1, 2))
    observer.close()
    assert num_parameter_hooks(model) == 0


def test_a_forward_that_raises_leaves_no_hook(session: MemorySession) -> None:
    """Its gradients will not come."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            raise ValueError("no")

    model = Failing()
    observe(model, session, signals=GRADIENT)
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(1, 2))
    assert num_parameter_hooks(model) == 0
    assert session.samples()[0].state is SampleState.FAILED


def test_copies_and_pickles_in_the_middle_of_a_sample_have_no_hooks(session: MemorySession) -> None:
    """They train unseen."""
    model = nn.Sequential(nn.Linear(2, 1))
    observe(model, session, signals=PARAMETER | GRADIENT, selector=leaf_modules())
    output = model(torch.ones(1, 2))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert num_parameter_hooks(twin) == 0
        twin(torch.ones(1, 2)).sum().backward()
    assert len(session.samples()) == 1
    output.sum().backward()
    assert len(session.samples()) == 2


def test_nothing_keeps_a_model_alive(session: MemorySession) -> None:
    """Neither hooks on its parameters nor what is awaited."""
    model = nn.Sequential(nn.Linear(2, 1))
    observe(model, session, signals=PARAMETER | GRADIENT)
    model(torch.ones(1, 2)).sum().backward()
    gone = weakref.ref(weight_of(model))
    session.deliveries.clear()
    del model
    gc.collect()
    assert gone() is None


def test_training_is_bit_identical_with_and_without(session: MemorySession) -> None:
    """Gradients, parameters and random state after steps with dropout, clipping and zeroed gradients."""

    def train(*, observed: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 2))
        if observed:
            observe(model, session, signals=frozenset(Signal))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(2):
                model(torch.randn(3, 4)).pow(2).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        left = [p.grad for p in model.parameters() if p.grad is not None]
        return [p.detach() for p in model.parameters()] + left + [torch.get_rng_state()]

    for with_observer, without in zip(train(observed=True), train(observed=False), strict=True):
        assert torch.equal(with_observer, without)
    assert session.errors == []


@pytest.mark.parametrize("whole", [False, True])
def test_parameters_of_compiled_code_are_measured_and_compile_nothing_anew(
    session: MemorySession,
    whole: bool,
) -> None:
    """Its layers take no hooks; its parameters are tensors like any other."""
    counter = CompileCounterWithBackend("aot_eager")
    inner = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    block = torch.compile(inner, backend=counter)
    assert isinstance(block, nn.Module)
    model = block if whole else nn.Sequential(block)
    observer = observe(model, session, signals=PARAMETER | GRADIENT)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 3)).pow(2).sum().backward()
        with observer.paused():
            model(torch.randn(4, 3))
    assert counter.frame_count == 1
    assert means(local(session)[-2:]) == means(reduced(session)[-2:])
    assert list(means(reduced(session)[-2:]).values()) == list(true_means(inner).values())
    assert {m.execution for m in session.of(Signal.PARAMETER)} == {Execution.INSIDE_COMPILED}
    assert session.errors == []


def test_a_step_without_a_sample_costs_no_hook_and_no_measurement(session: MemorySession) -> None:
    """Whatever the signals are."""
    model = nn.Sequential(nn.Linear(2, 1))
    observer = observe(model, session, signals=frozenset(Signal))
    with observer.paused():
        output = model(torch.ones(1, 2))
        assert num_parameter_hooks(model) == 0
        assert not output._backward_hooks
        output.sum().backward()
    assert session.deliveries == []


def test_threads_that_share_a_model_leave_no_hook(session: MemorySession) -> None:
    """Forwards at the same time take each other's parameters over."""
    model = nn.Sequential(nn.Linear(2, 1))
    observer = observe(model, session, signals=GRADIENT)
    barrier = threading.Barrier(2)

    def run() -> None:
        for _ in range(20):
            barrier.wait()
            model(torch.ones(1, 2)).sum().backward()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    observer.close()
    assert num_parameter_hooks(model) == 0
    assert session.errors == []


def test_a_parameter_that_takes_no_hook_costs_its_own_gradient_alone(session: MemorySession) -> None:
    """It says so, and its neighbour is measured."""

    class Stubborn(nn.Parameter):
        @override
        def register_post_accumulate_grad_hook(self, hook: object) -> None:  # type: ignore[override]
            raise RuntimeError("no hooks here")

    model = nn.Sequential(nn.Linear(2, 1))
    model[0].weight = Stubborn(torch.ones(1, 2))
    observe(model, session, signals=GRADIENT)
    model(torch.ones(1, 2)).sum().backward()
    expected = "reducer_error: RuntimeError: no hooks here"
    assert reasons(local(session)) == reasons(reduced(session)) == {"0.weight": expected, "0.bias": ""}
    assert [error.message for error in session.errors] == ["no hooks here"]
