"""A direct ``forward`` is measured like a call, once, and leaves nothing behind."""

import copy
import inspect
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe.direct import replicated
from torchinstruments.observe.sampling import EveryNForwardsSampler
from torchinstruments.records import SampleState
from unit.observe.memory import MemorySession, Recorder, observe, traces, value


class Direct(nn.Module):
    """Calls one part directly and the other one as it should be called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.inside: list[dict[str, list[str]]] = []

    @override
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Returns the output of both."""
        self.inside.append(traces(self))
        return self.second(self.first.forward(x)) * scale


class Called(nn.Module):
    """Calls the same parts, both as they should be called."""

    def __init__(self, twin: Direct) -> None:
        super().__init__()
        self.first = twin.first
        self.second = twin.second

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of both."""
        return self.second(self.first(x))


def test_a_direct_forward_is_measured_like_a_call_and_once(session: MemorySession) -> None:
    """Layers, values and gradients are those of a model that calls its parts."""
    model = Direct()
    called = MemorySession()
    x = torch.randn(3, 4)
    twin = Called(model)
    observe(twin, called)
    twin(x).sum().backward()
    observe(model, session, capture_direct_forwards=True)
    model(x).sum().backward()
    assert [(m.layer, m.call_index, m.values) for m in session.outputs()] == [
        (m.layer, m.call_index, m.values) for m in called.outputs()
    ]
    assert [(m.layer, m.values) for m in session.gradients()] == [
        (m.layer, m.values) for m in called.gradients()
    ]
    assert session.errors == []


def test_without_being_asked_a_direct_forward_is_not_measured(session: MemorySession) -> None:
    """Nothing stands in the place of a forward."""
    model = Direct()
    observe(model, session)
    model(torch.ones(1, 4))
    assert [m.layer for m in session.outputs()] == ["second"]
    assert "forward" not in vars(model)


def test_a_direct_forward_of_the_model_is_a_root_forward(session: MemorySession) -> None:
    """It is counted, sampled and differentiated like a call, beside calls."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session, capture_direct_forwards=True)
    model.forward(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    assert observer.counters.forwards == 2
    assert [(s.ordinal, s.position.forward_index, s.state) for s in session.samples()] == [
        (0, 0, SampleState.FORWARD_COMPLETE),
        (0, 0, SampleState.BACKWARD_OBSERVED),
        (1, 1, SampleState.FORWARD_COMPLETE),
        (1, 1, SampleState.BACKWARD_OBSERVED),
    ]
    assert [len(s.measurements) for s in session.samples()] == [1, 1, 1, 1]


@pytest.mark.parametrize("directly", [True, False])
def test_a_model_that_is_one_layer_is_measured_once(session: MemorySession, directly: bool) -> None:
    """Its output is that of the root, whichever way it was made."""
    model = nn.Linear(2, 2)
    observe(model, session, capture_direct_forwards=True)
    x = torch.ones(1, 2)
    output = model.forward(x) if directly else model(x)
    (measured,) = session.outputs()
    assert (measured.layer, measured.call_index, value(measured, "max")) == ("", 0, output.max().item())


def test_layers_have_an_override_during_a_sampled_forward_alone(session: MemorySession) -> None:
    """In a forward that is not sampled no module below the model has anything of ours."""
    model = Direct()
    observe(model, session, sampler=EveryNForwardsSampler(2), capture_direct_forwards=True)
    model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    during = {"first": ["forward", "_forward_hooks"], "second": ["forward", "_forward_hooks"]}
    assert model.inside == [{}, during, {}]


def test_everything_is_as_before_after_the_end(session: MemorySession) -> None:
    """The instances have no entry more than they had."""
    model = Direct()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    observer = observe(model, session, capture_direct_forwards=True)
    model(torch.ones(1, 4))
    model.forward(torch.ones(1, 4))
    observer.close()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_an_override_that_was_there_is_called_and_put_back(session: MemorySession) -> None:
    """On the model and on a layer; the very same objects stand there afterwards."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, model.first.weight) * 2

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return Direct.forward(model, x, 2.0)

    model = Direct()
    vars(model.first)["forward"] = twice
    vars(model)["forward"] = doubled
    x = torch.randn(3, 4)
    bare = model(x)
    observer = observe(model, session, capture_direct_forwards=True)
    assert torch.equal(model(x), bare)
    assert torch.equal(model.forward(x), bare)
    assert [m.layer for m in session.outputs()] == ["first", "second"] * 2
    assert copy.deepcopy(model).forward is doubled
    observer.close()
    assert vars(model.first)["forward"] is twice
    assert vars(model)["forward"] is doubled


def test_what_another_tool_put_over_it_stays_and_works(session: MemorySession) -> None:
    """Its calls are measured once; after the end it calls the model's own forward."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session, capture_direct_forwards=True)
    below = model.forward

    def half(x: torch.Tensor) -> torch.Tensor:
        return below(x) / 2

    vars(model)["forward"] = half
    model(torch.ones(1, 2))
    assert (observer.counters.forwards, len(session.outputs())) == (1, 1)
    model.forward(torch.ones(1, 2))
    assert (observer.counters.forwards, len(session.outputs())) == (2, 2)
    observer.close()
    assert vars(model)["forward"] is half
    assert torch.equal(model(torch.ones(1, 2)), model[0](torch.ones(1, 2)) / 2)
    assert len(session.outputs()) == 2


def test_copies_and_pickles_have_no_trace_of_it(session: MemorySession, tmp_path: Path) -> None:
    """Deep and shallow copies, averages and files of the whole model; none of them is observed."""
    model = Direct()
    observe(model, session, capture_direct_forwards=True)
    x = torch.ones(1, 4)
    expected = model(x)
    seen = len(session.deliveries)
    torch.save(model, tmp_path / "model.pt")
    for twin in (
        copy.deepcopy(model),
        AveragedModel(model).module,
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert not {"forward", "__getstate__"} & set(vars(twin))
        assert torch.equal(twin(x), expected)
        assert torch.equal(twin.forward(x), expected)
    assert not {"forward", "__getstate__"} & set(vars(copy.copy(model)))
    assert len(session.deliveries) == seen
    assert list(model.state_dict()) == list(Direct().state_dict())
    model.forward(x)
    assert len(session.deliveries) == seen + 1


def test_a_copy_made_inside_a_sampled_forward_runs_its_own_parameters(session: MemorySession) -> None:
    """A layer's override does not tie the copy to the original."""
    twins: list[nn.Module] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not twins:
                twins.extend((copy.deepcopy(self), pickle.loads(pickle.dumps(self.fc))))
            return self.fc.forward(x)

    model = Model()
    x = torch.ones(1, 2)
    observe(model, session, capture_direct_forwards=True)
    expected = model(x)
    seen = len(session.outputs())
    assert torch.equal(twins[1](x), expected)
    with torch.no_grad():
        for twin in twins:
            for parameter in twin.parameters():
                parameter.zero_()
            assert torch.equal(twin(x), torch.zeros(1, 2))
            assert torch.equal(twin.forward(x), torch.zeros(1, 2))
    assert (len(session.outputs()), seen) == (1, 1)


def test_a_state_of_the_models_own_making_is_kept(session: MemorySession) -> None:
    """What the class leaves out of a pickle stays out."""

    class Forgetful(nn.Sequential):
        @override
        def __getstate__(self) -> dict[str, Any]:
            return {**vars(self), "note": "left behind"}

    model = Forgetful(nn.Linear(2, 2))
    observe(model, session, capture_direct_forwards=True)
    twin = copy.deepcopy(model)
    assert vars(twin)["note"] == "left behind"
    assert not {"forward", "__getstate__"} & set(vars(twin))


def test_a_forward_still_looks_like_the_models_own(session: MemorySession) -> None:
    """Trainers that ask a model what it takes get the same answer."""
    model = Direct()
    signature = inspect.signature(model.forward)
    observe(model, session, capture_direct_forwards=True)
    assert inspect.signature(model.forward) == signature
    assert model.forward.__name__ == "forward"
    assert model.forward.__func__ is Direct.forward
    assert model.forward.__doc__ == Direct.forward.__doc__
    assert not hasattr(model.forward, "no_such_attribute")


@pytest.mark.parametrize("strict", [True, False])
def test_an_observed_model_can_be_exported(session: MemorySession, strict: bool) -> None:
    """The program has the model's operations alone, and nothing was sampled."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.randn(3, 2)
    bare = torch.export.export(model, (x,), strict=strict)
    observe(model, session, capture_direct_forwards=True)
    program = torch.export.export(model, (x,), strict=strict)
    assert [node.target for node in program.graph.nodes] == [node.target for node in bare.graph.nodes]
    assert (session.deliveries, session.errors) == ([], [])


@pytest.mark.filterwarnings("ignore:torchinstruments. the model was compiled after:RuntimeWarning")
@pytest.mark.parametrize("place", ["whole", "in_place", "function"])
def test_an_observed_model_can_be_compiled(session: MemorySession, place: str) -> None:
    """One graph without a break, and the same outputs."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.randn(3, 2)
    expected = model(x)
    observe(model, session, capture_direct_forwards=True)
    compiled: Any = model
    if place == "whole":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    elif place == "in_place":
        model.compile(backend="eager", fullgraph=True)
    else:
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    assert {error.probe for error in session.errors} <= {"compiled"}


def test_an_exception_in_a_direct_forward_is_the_users_and_ends_the_sample(session: MemorySession) -> None:
    """KeyboardInterrupt too; the next forward is measured as usual."""

    def fail(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise errors.pop()
        return x

    errors: list[BaseException] = [KeyboardInterrupt(), ValueError("the model's own")]
    model = nn.Sequential(nn.Identity(), Recorder(fail))
    observe(model, session, capture_direct_forwards=True)
    with pytest.raises(ValueError, match="the model's own"):
        model.forward(torch.ones(1))
    with pytest.raises(KeyboardInterrupt):
        model.forward(torch.ones(1))
    model.forward(-torch.ones(1))
    assert [s.state for s in session.samples()] == [
        SampleState.FAILED,
        SampleState.FAILED,
        SampleState.FORWARD_COMPLETE,
    ]
    assert session.errors == []


def test_a_layer_that_raises_directly_has_no_row(session: MemorySession) -> None:
    """The model may catch it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = nn.Linear(3, 3)
            self.good = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.bad.forward(x)
            except RuntimeError:
                return self.good.forward(x)

    observe(model := Model(), session, capture_direct_forwards=True)
    model(torch.ones(1, 2))
    assert [m.layer for m in session.outputs()] == ["good"]


def test_a_forward_that_calls_itself_is_measured_at_each_level(session: MemorySession) -> None:
    """Called or not, each run of a layer is one; those of the model belong to the outermost."""

    class Layer(nn.Module):
        @override
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return x if depth == 0 else self.forward(x, depth - 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        @override
        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            return self.layer(x) if depth == 0 else self.forward(x, depth - 1)

    model = Model()
    observer = observe(model, session, capture_direct_forwards=True)
    model.forward(torch.ones(1))
    model(torch.ones(1))
    assert observer.counters.forwards == 2
    assert [(m.layer, m.call_index) for m in session.outputs()] == [
        ("layer", 0),
        ("layer", 1),
        ("layer", 2),
    ] * 2


def test_a_parent_and_its_child_may_both_capture(session: MemorySession) -> None:
    """Each measures each call once, and whichever goes first, nothing stays."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.child.forward(self.child(x))

    model = Model()
    inner = MemorySession()
    child_observer = observe(model.child, inner, capture_direct_forwards=True)
    observer = observe(model, session, capture_direct_forwards=True)
    output = model(torch.ones(1, 2))
    assert [m.call_index for m in session.outputs()] == [0, 1]
    assert [(s.ordinal, len(s.measurements)) for s in inner.samples()] == [(0, 1), (1, 1)]
    assert session.outputs()[1].values == inner.outputs()[1].values
    child_observer.close()
    assert torch.equal(model(torch.ones(1, 2)), output)
    observer.close()
    assert traces(model) == {}
    assert "forward" not in vars(model)


def test_an_override_removed_below_another_one_does_not_come_back(session: MemorySession) -> None:
    """The child's observer may end inside a sampled forward of the parent."""
    model = nn.Sequential(nn.Linear(2, 2), Recorder(lambda x: (inner_observer.close(), x)[1]))
    inner_observer = observe(model[0], MemorySession(), capture_direct_forwards=True)
    observer = observe(model, session, capture_direct_forwards=True)
    model(torch.ones(1, 2))
    # What stands there after a sampled forward is the watch for calls outside the model.
    assert vars(model[0])["forward"].previous is None
    observer.close()
    assert "forward" not in vars(model[0])


def test_a_checkpointed_forward_gives_the_same_gradients_and_one_row(session: MemorySession) -> None:
    """The checkpoint keeps the override that it was given, which does nothing in the backward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block.forward, x, use_reentrant=False)

    def step(model: Model) -> torch.Tensor:
        model.zero_grad()
        model(torch.ones(2, 4, requires_grad=True)).pow(2).sum().backward()
        assert model.block.weight.grad is not None
        return model.block.weight.grad.clone()

    model = Model()
    bare = step(model)
    observer = observe(model, session, capture_direct_forwards=True)
    assert torch.equal(step(model), bare)
    assert [m.layer for m in session.outputs()] == ["block"]
    assert [(m.layer, m.reasons[0]) for m in session.gradients()] == [("block", "")]
    assert observer.counters.forwards == 1


def test_a_replica_runs_its_own_forward(session: MemorySession) -> None:
    """torch.nn.DataParallel gives its replicas the entries of the module that they were made of."""
    model = nn.Linear(2, 2)
    observe(model, session, capture_direct_forwards=True)
    replica: Any = model._replicate_for_data_parallel()
    replica.weight = torch.zeros(2, 2)
    replica.bias = torch.zeros(2)
    assert torch.equal(replica(torch.ones(1, 2)), torch.zeros(1, 2))
    assert torch.equal(model(torch.ones(1, 2)), model.forward(torch.ones(1, 2)))


def test_parts_that_are_copied_for_several_devices_are_left_alone_and_said_so(
    session: MemorySession,
) -> None:
    """There an override would run the original in place of the copy."""
    seen: list[dict[str, list[str]]] = []
    parallel: Any = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(
        parallel,
        Recorder(lambda x: (seen.append(traces(model)), x)[1]),
    )
    assert replicated(model) == frozenset()
    parallel.device_ids = [0, 1]
    assert replicated(model) == {id(parallel.module), id(parallel.module[0])}
    with pytest.warns(RuntimeWarning, match="runs copies of the model on several devices"):
        observe(model, session, capture_direct_forwards=True)
    parallel.device_ids = []
    model(torch.ones(1, 2))
    assert seen[0]["0.module.0"] == ["_forward_hooks"]
    assert seen[0]["1"] == ["forward", "_forward_hooks"]


def test_another_threads_direct_forward_is_not_measured(session: MemorySession) -> None:
    """Only the thread whose forward is sampled counts."""
    linear = nn.Linear(2, 2)

    def meet(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=linear.forward, args=(torch.full((1, 2), 7.0),))
        other.start()
        other.join()
        return x

    model = nn.Sequential(linear, Recorder(meet))
    observe(model, session, capture_direct_forwards=True)
    model(torch.ones(1, 2))
    assert [(m.layer, m.call_index) for m in session.outputs()] == [("0", 0), ("1", 0)]


def test_an_error_surfaces_at_the_next_direct_forward_of_the_model(session: MemorySession) -> None:
    """As it does at the next call."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session, policy=ErrorPolicy.RAISE, capture_direct_forwards=True)
    session.sink_error = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        model.forward(torch.ones(1, 2))
    model.forward(torch.ones(1, 2))


def test_training_is_bit_identical_with_captured_direct_forwards(session: MemorySession) -> None:
    """Outputs, gradients, parameters and the random state after ten steps."""

    def train(model: Direct) -> list[torch.Tensor]:
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        left: list[torch.Tensor] = []
        for _ in range(10):
            optimizer.zero_grad()
            output = model.forward(torch.randn(8, 4))
            output.square().mean().backward()
            left.append(output.detach().clone())
            left.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
            optimizer.step()
        return [*left, *model.state_dict().values(), torch.get_rng_state()]

    model = Direct()
    twin = copy.deepcopy(model)
    bare = train(model)
    observer = observe(twin, session, capture_direct_forwards=True)
    observed = train(twin)
    assert all(torch.equal(a, b) for a, b in zip(bare, observed, strict=True))
    assert observer.counters.samples == 10
