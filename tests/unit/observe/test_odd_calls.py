"""Whatever a program does with its model: the right value or the right reason, and never an error of ours."""

import copy
import sys
import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from torchinstruments.observe import observation, probe
from torchinstruments.records import SampleState, Signal
from torchinstruments.statistics.histograms import histogram
from unit.observe.memory import MemorySession, Recorder, observe, value

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - what a model may return


@dataclass
class Output:
    """An output with two tensors."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]


def everything(name: str, module: nn.Module) -> bool:
    """Selects every module."""
    return True


def test_data_parallel_without_devices_is_the_model(session: MemorySession) -> None:
    """Layers have the model's names, values and gradients."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    bare = MemorySession()
    twin = copy.deepcopy(model)
    observe(twin, bare)
    x = torch.randn(4, 2)
    twin(x).sum().backward()
    wrapped = nn.DataParallel(model)
    observe(wrapped, session)
    wrapped(x).sum().backward()
    assert [(m.layer, m.values) for m in session.outputs() + session.gradients()] == [
        (m.layer, m.values) for m in bare.outputs() + bare.gradients()
    ]


def test_a_functional_call_is_measured_with_the_parameters_that_it_was_given(session: MemorySession) -> None:
    """Outputs and gradients are theirs, and the model's own are as before."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = {"0.weight": torch.full((2, 2), 3.0, requires_grad=True), "0.bias": torch.zeros(2)}
    output = torch.func.functional_call(model, given, (torch.ones(1, 2),))
    (gradient,) = torch.autograd.grad(output.sum() * 5, [given["0.weight"]])
    assert value(session.outputs()[0]) == 6.0
    assert value(session.gradients()[0]) == 5.0
    assert torch.equal(gradient, torch.full((2, 2), 5.0))
    assert all(torch.equal(own[name], p) for name, p in model.named_parameters())


def test_fake_tensors_have_their_shape_and_the_reason(session: MemorySession) -> None:
    """Forward and backward run as without an observer."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    observe(model, session)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.randn(5, 4)).sum().backward()
    assert [(m.shape, m.values[0], m.reasons[0]) for m in session.outputs()] == [
        ((5, 3), None, "unsupported_layout: FakeTensor")
    ] * 2
    assert {m.reasons[0] for m in session.gradients()} == {"unsupported_layout: FakeTensor"}
    assert session.errors == []
    session.deliveries.clear()
    model.zero_grad(set_to_none=True)
    model(torch.randn(5, 4))
    assert {m.reasons[0] for m in session.outputs()} == {""}


def test_meta_tensors_have_their_shape_and_the_reason(session: MemorySession) -> None:
    """A model on the meta device is measured for its shapes."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3))
        observe(model, session)
        model(torch.randn(5, 4)).sum().backward()
    assert [(m.shape, m.device, m.reasons[0]) for m in session.outputs() + session.gradients()] == [
        ((5, 3), "meta", "meta_tensor")
    ] * 2


@pytest.mark.parametrize("kind", ["torch.jit.trace", "torch.fx"])
def test_a_forward_that_is_recorded_is_skipped_and_told_at_the_end(session: MemorySession, kind: str) -> None:
    """The recording has nothing of ours, no sample was taken, and the manifest says how many there were."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    observer = observe(inner, session)
    x = torch.ones(1, 2)
    if kind == "torch.fx":
        operations = [str(node.target) for node in make_fx(inner)(x).graph.nodes]
        assert [name for name in operations if "aten" in name] == [
            "aten.t.default",
            "aten.addmm.default",
            "aten.relu.default",
            "aten.detach.default",
        ]
    else:
        traced = torch.jit.trace(inner, x, check_trace=False)
        assert isinstance(traced, torch.jit.ScriptModule)
        assert torch.equal(traced(x), inner.eval()(x))
        session.deliveries.clear()
    assert session.deliveries == []
    observer.close()
    assert [(e.probe, e.message) for e in session.errors] == [
        ("tracing", f"1 forward under {kind} was not observed")
    ]


def test_a_symbolic_trace_through_the_model_is_skipped(session: MemorySession) -> None:
    """Its values are no tensors, and its hooks are not recorded."""

    class Outer(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)

    part = nn.Sequential(nn.Linear(2, 2))
    bare = symbolic_trace(Outer(part)).code
    observe(part, session)
    assert symbolic_trace(Outer(part)).code == bare
    assert (session.deliveries, session.errors) == ([], [])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("is_part", [True, False])
def test_an_exported_model_is_exported_as_it_is(session: MemorySession, strict: bool, is_part: bool) -> None:
    """The program is the same, nothing was sampled, and the manifest says how many forwards there were."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    whole = nn.Sequential(model, nn.ReLU()) if is_part else model
    x = torch.randn(3, 2)
    bare = torch.export.export(whole, (x,), strict=strict)
    observer = observe(model, session)
    for _ in range(2):
        program = torch.export.export(whole, (x,), strict=strict)
        assert str(program) == str(bare)
        assert list(program.state_dict) == list(bare.state_dict)
        assert torch.equal(program.module()(x), bare.module()(x))
    assert (session.deliveries, session.errors) == ([], [])
    observer.close()
    assert [(e.probe, e.message) for e in session.errors] == [
        ("tracing", "2 forwards under torch.export were not observed")
    ]
    assert observer.counters.forwards == 0


def test_a_model_that_is_compiled_is_not_taken_for_an_exported_one(session: MemorySession) -> None:
    """What torch.compile traces is one graph, as without an observer, and is no export."""
    # Code that was made for an equal model would run in its place, and is not traced again.
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    with pytest.warns(RuntimeWarning, match="compiled after the observer was attached"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2))
    observer.close()
    assert [error.probe for error in session.errors] == ["compiled"]


def test_lazy_modules_are_measured_from_their_first_forward(session: MemorySession) -> None:
    """The catalog learns their types and parameters when they do, and gradients come too."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d())
    observer = observe(model, session)
    assert [(m.type, m.parameter_count) for m in session.modules] == [
        ("LazyLinear", 0),
        ("ReLU", 0),
        ("LazyBatchNorm1d", 0),
    ]
    model(torch.randn(8, 3)).sum().backward()
    observer.flush()
    assert [(m.type, m.parameter_count) for m in session.modules] == [
        ("Linear", 16),
        ("ReLU", 0),
        ("BatchNorm1d", 8),
    ]
    assert {m.reasons[0] for m in session.outputs() + session.gradients()} == {""}
    assert session.errors == []


def test_a_lazy_module_may_be_called_directly(session: MemorySession) -> None:
    """Its class changes under the override, whose forward is that of the moment."""
    model = nn.Sequential(nn.LazyLinear(4))
    observe(model, session, capture_direct_forwards=True)
    model(torch.ones(1, 3))
    model.forward(torch.ones(1, 3))
    assert [m.shape for m in session.outputs()] == [(1, 4)] * 2
    assert type(model[0]) is nn.Linear


def test_dataclasses_named_tuples_and_keys_of_any_type_have_paths(session: MemorySession) -> None:
    """Outputs and their gradients, one row set each; paths that read alike are told apart."""

    def spread(x: torch.Tensor) -> dict[Any, Any]:
        return {
            1: Output(x * 1, [x * 2]),
            ("a", 2): Pair(x * 3, x * 4),
            "a.b": x * 5,
            "a": {"b": x * 6},
        }

    model = Recorder(spread)
    observe(model, session)
    output = model(torch.ones(2, requires_grad=True))
    paths = {
        "1.logits": 1.0,
        "1.hidden.0": 2.0,
        "('a', 2).left": 3.0,
        "('a', 2).right": 4.0,
        "a.b": 5.0,
        "a.b#2": 6.0,
    }
    assert {m.tensor_path: value(m) for m in session.outputs()} == {
        f"output.{path}": number for path, number in paths.items()
    }
    pair = output[("a", 2)]
    (output[1].logits + output[1].hidden[0] + pair.left + pair.right + output["a.b"]).sum().backward()
    assert {m.tensor_path: m.reasons[0] for m in session.gradients()} == {
        **{f"grad_output.{path}": "" for path in paths},
        "grad_output.a.b#2": "no_gradient",
    }


def test_one_tensor_under_several_names_has_rows_for_each(session: MemorySession) -> None:
    """Twice in one output and from several modules: the whole gradient stands under each."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), Recorder(lambda x: (x, x)))
    observe(model, session, selector=everything)
    left, right = model(torch.ones(1, 2))
    (left + 2 * right).sum().backward()
    assert [(m.layer, m.tensor_path) for m in session.outputs()] == [
        ("0", "output"),
        ("1", "output"),
        ("2", "output.0"),
        ("2", "output.1"),
        ("", "output.0"),
        ("", "output.1"),
    ]
    assert len({m.values for m in session.outputs()}) == 1
    assert len(session.gradients()) == 6
    assert {value(m) for m in session.gradients()} == {3.0}


def test_a_view_that_is_changed_in_place_says_so_and_keeps_its_value(session: MemorySession) -> None:
    """Its value is that before the change; its gradient is lost, and the row gives the reason."""
    linear = nn.Linear(2, 4)
    model = nn.Sequential(linear, Recorder(lambda x: x.view(-1)), nn.ReLU(inplace=True))
    observe(model, session)
    x = torch.randn(3, 2)
    with torch.no_grad():
        before = nn.functional.linear(x, linear.weight, linear.bias)
    (model(x) * 3).sum().backward()
    view = session.outputs()[1]
    assert value(view, "min") == before.min().item() < 0
    reasons = {m.layer: m.reasons[0] for m in session.gradients()}
    assert reasons == {
        "0": "",
        "1": "no_gradient: none came, or a view was changed in place, which loses its hook",
        "2": "",
    }
    gradient = next(m for m in session.gradients() if m.layer == "0")
    assert value(gradient, "zero_fraction") == (before <= 0).double().mean().item() > 0


def test_custom_autograd_functions_are_measured_with_the_gradients_that_they_make(
    session: MemorySession,
) -> None:
    """A straight-through rounding: its own gradient and the one that it hands on."""

    class Round(torch.autograd.Function):
        @staticmethod
        @override
        def forward(*args: Any, **_kwargs: Any) -> Any:
            return args[1].round()

        @staticmethod
        @override
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            return grad_outputs[0] * 7

    model = nn.Sequential(Recorder(lambda x: x * 1), Recorder(Round.apply))
    observe(model, session)
    model(torch.full((2,), 0.7, requires_grad=True)).sum().backward()
    assert [(m.layer, value(m)) for m in session.outputs()] == [
        ("0", pytest.approx(0.7)),
        ("1", 1.0),
    ]
    assert [(m.layer, value(m)) for m in session.gradients()] == [("1", 1.0), ("0", 7.0)]


def test_what_other_tools_hooks_make_of_an_output_is_what_is_measured(session: MemorySession) -> None:
    """On a layer and on the model, attached before or after: the value that the caller gets."""

    def doubled(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    model = nn.Sequential(Recorder(lambda x: x + 1))
    model[0].register_forward_hook(doubled)
    model.register_forward_hook(doubled)
    observe(model, session, selector=everything)
    model.register_forward_hook(doubled)
    output = model(torch.ones(2, requires_grad=True))
    output.sum().backward()
    assert [(m.layer, value(m)) for m in session.outputs()] == [("0", 4.0), ("", output[0].item())]
    assert output[0].item() == 16.0
    assert [(m.layer, value(m)) for m in session.gradients()] == [("", 1.0), ("0", 4.0)]


def test_parent_and_child_observers_measure_the_same_numbers(session: MemorySession) -> None:
    """Each has its own samples, forward and backward, and neither sees the other."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    inner = MemorySession()
    observe(model, session)
    observe(model[0], inner)
    model(torch.randn(3, 2)).sum().backward()
    model[0](torch.randn(3, 2)).sum().backward()
    assert [s.ordinal for s in session.samples()] == [0, 0]
    assert [s.ordinal for s in inner.samples()] == [0, 0, 1, 1]
    assert inner.outputs()[0].values == session.outputs()[0].values
    assert inner.gradients()[0].values == session.gradients()[1].values


def test_scripted_children_run_and_their_parents_are_measured(session: MemorySession) -> None:
    """A scripted module takes no hook, as its rows say each time; the layer after it shows its output."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model = nn.Sequential(scripted, nn.Identity())
    with pytest.warns(RuntimeWarning, match="the layer '0.0' is a scripted module, which takes no hooks"):
        observe(model, session, capture_direct_forwards=True)
    output = model(torch.ones(1, 2))
    output.sum().backward()
    measured = [m for m in session.outputs() if not m.reasons[0]]
    assert {m.layer: value(m) for m in measured} == {"1": pytest.approx(output.mean().item())}
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 2))
    unseen = [m for m in session.outputs() if m.layer.startswith("0.")]
    assert [(m.layer, m.mode, m.grad_enabled, m.execution, m.values[0], m.reasons[0]) for m in unseen] == [
        (layer, mode, grad_enabled, "eager", None, "scripted_module")
        for mode, grad_enabled in (("train", True), ("eval", False))
        for layer in ("0.0", "0.1")
    ]


def test_threads_with_their_own_grad_modes_do_not_mix(session: MemorySession) -> None:
    """A thread that evaluates while another one trains has rows of its own kind."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    barrier = threading.Barrier(2)

    def evaluate() -> None:
        barrier.wait(10)
        with torch.no_grad():
            for _ in range(20):
                model(torch.ones(1, 2))

    thread = threading.Thread(target=evaluate)
    thread.start()
    barrier.wait(10)
    for _ in range(20):
        model(torch.ones(1, 2)).sum().backward()
    thread.join()
    states = [(s.state, s.position.grad_enabled) for s in session.samples()]
    assert states.count((SampleState.FORWARD_COMPLETE, False)) == 20
    assert states.count((SampleState.FORWARD_COMPLETE, True)) == 20
    assert states.count((SampleState.BACKWARD_OBSERVED, True)) == 20


def test_layers_captured_into_a_graph_inside_a_forward_are_skipped_with_the_reason(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of ours becomes part of the graph; the layers outside of it are measured."""
    capturing = [False]

    def is_capturing() -> bool:
        return capturing[0]

    def capture(x: torch.Tensor) -> torch.Tensor:
        capturing[0] = not capturing[0]
        return x * 1

    monkeypatch.setattr(observation, "is_capturing_graph", is_capturing)
    monkeypatch.setattr(probe, "is_capturing_graph", is_capturing)
    seen: list[int] = []

    def count(tensor: torch.Tensor) -> dict[str, float]:
        assert not capturing[0]
        seen.append(1)
        return {"count": float(tensor.numel())}

    model = nn.Sequential(nn.Linear(2, 2), Recorder(capture), nn.Linear(2, 2), Recorder(capture))
    observe(model, session, reducers=(count,))
    model(torch.ones(1, 2)).sum().backward()
    assert {m.layer: m.reasons[0] for m in session.outputs()} == {
        "0": "",
        "1": "graph_capture",
        "2": "graph_capture",
        "3": "",
    }
    assert {m.layer: m.reasons[0] for m in session.gradients()} == {
        "0": "",
        "1": "graph_capture",
        "2": "graph_capture",
        "3": "",
    }
    assert len(seen) == 4


class Functions(TorchFunctionMode):
    """Keeps the name of every function that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Keeps every operation that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Curious(torch.Tensor):
    """Keeps the name of every function that is called with it."""

    seen: list[str] = []  # noqa: RUF012 - of the class, for the results of operations have no state

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", ["function mode", "dispatch mode", "subclass"])
def test_who_watches_the_operations_of_a_model_does_not_see_the_observer(
    session: MemorySession, kind: str
) -> None:
    """The same calls in the same order with all signals measured as without an observer."""

    def watched() -> list[str]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        if with_observer:
            observe(model, session, signals=(*Signal,), histograms=(histogram(),), fingerprints=True)
        x = torch.randn(3, 4)
        if kind == "subclass":
            Curious.seen.clear()
            model(x.as_subclass(Curious)).sum().backward()
            return list(Curious.seen)
        mode = Functions() if kind == "function mode" else Operations()
        with mode:
            model(x).sum().backward()
        return mode.seen

    with_observer = False
    alone = watched()
    with_observer = True
    assert watched() == alone
    assert len(alone) > 4
    assert {m.signal for s in session.samples() for m in s.measurements} == set(Signal)


def shallow(module: nn.Module) -> nn.Module:
    """A copy that shares everything with the module, its hooks and its slot too."""
    twin = copy.copy(module)
    vars(twin).update(vars(module))
    return twin


@pytest.mark.parametrize("copied", [copy.copy, shallow])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_shallow_copy_of_the_model_is_not_the_model(
    session: MemorySession, copied: Any, is_fused: bool
) -> None:
    """It has the dictionaries of the model, and so its hooks; a call of it counts nothing."""
    model = nn.TransformerEncoderLayer(4, 1, 4, 0.0) if is_fused else nn.Sequential(nn.Linear(4, 4))
    observer = observe(model, session)
    twin = copied(model)
    x = torch.ones(1, 2, 4)
    twin(x).sum().backward()
    assert observer.counters.forwards == 0
    assert session.deliveries == []
    model(x).sum().backward()
    twin(x).sum().backward()
    assert observer.counters.forwards == 1
    assert [sample.position.forward_index for sample in session.samples()] == [0, 0]


def test_a_shallow_copy_of_a_layer_is_not_the_layer(session: MemorySession) -> None:
    """Whether it is made before or in a sampled forward, and each has the rows of its own calls."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = copy.copy(self.first)
            self.second.register_parameter("bias", None)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first: torch.Tensor = self.first(x)
            passing: torch.Tensor = copy.copy(self.first)(x)
            second: torch.Tensor = self.second(first + passing)
            return second

    model = Model()
    assert model.first._forward_hooks is model.second._forward_hooks
    observe(model, session, signals=(Signal.INPUT, Signal.OUTPUT))
    model(torch.ones(3, 2))
    assert [(m.layer, m.call_index) for m in session.outputs()] == [("first", 0), ("second", 0)]
    assert [(m.layer, m.call_index) for m in session.of(Signal.INPUT)] == [("first", 0), ("second", 0)]
    assert session.errors == []


@pytest.mark.filterwarnings("ignore:torchinstruments. 2 forwards of the model ran as a whole")
def test_a_model_that_is_checkpointed_as_a_whole_says_why_there_are_no_gradients(
    session: MemorySession,
) -> None:
    """Its forwards have no gradients, the recomputation is no forward, and the end tells how many."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    observer = observe(model, session, signals=(*Signal,))
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        checkpoint(model, x, use_reentrant=True).sum().backward()
    first = session.samples()[0]
    missing = {
        (m.layer, m.signal, m.stage, m.tensor_path, m.reasons[0])
        for m in first.measurements
        if m.values[0] is None
    }
    assert missing == {
        ("0", Signal.OUTPUT_GRADIENT, "", "grad_output", "reentrant_checkpoint"),
        ("1", Signal.OUTPUT_GRADIENT, "", "grad_output", "reentrant_checkpoint"),
        *(
            ("0", Signal.PARAMETER_GRADIENT, stage, name, "reentrant_checkpoint")
            for stage in ("local_accumulated", "reduced", "applied")
            for name in ("weight", "bias")
        ),
    }
    with torch.no_grad(), pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        checkpoint(model, x.detach(), use_reentrant=True)
    assert {m.reasons[0] for m in session.samples()[-1].measurements} == {""}
    observer.close()
    assert observer.counters.errors == {"checkpointed": 2}


class Deep(nn.Module):
    """Calls its layer from a recursion that leaves as many levels of the stack as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.room = 0

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frame, depth = sys._getframe(), 0
        while frame is not None:
            frame, depth = frame.f_back, depth + 1
        return self.down(sys.getrecursionlimit() - depth - self.room, x)

    def down(self, levels: int, x: torch.Tensor) -> torch.Tensor:
        """Goes down and calls the layer there."""
        if levels > 0:
            return self.down(levels - 1, x)
        out: torch.Tensor = self.layer(x)
        return out


def least_room(model: Deep) -> int:
    """The levels that the layer needs at least."""
    for room in range(100):
        model.room = room
        try:
            model(torch.ones(1, 2))
        except RecursionError:
            continue
        return room
    raise AssertionError("it always fails")


@pytest.mark.filterwarnings("ignore:torchinstruments")
@pytest.mark.parametrize("signals", [(Signal.OUTPUT,), (Signal.INPUT, Signal.OUTPUT)])
def test_a_model_that_recurses_deeply_is_not_stopped_by_a_hook(
    session: MemorySession, signals: tuple[Signal, ...]
) -> None:
    """Of the stack a hook needs one level, and what it had no room for is counted and reported."""
    model = Deep()
    alone = least_room(model)
    observe(model, session, signals=signals)
    assert least_room(model) <= alone + 1
    last = session.samples()[-1]
    assert last.state is SampleState.FORWARD_COMPLETE
    assert last.errors == 1
    assert {e.type for e in session.errors} == {"RecursionError"}
    assert "left a hook no room on the stack" in session.errors[-1].message
    model.room = alone + 60
    session.deliveries.clear()
    model(torch.ones(1, 2))
    assert [m.reasons[0] for m in session.outputs()] == [""]
