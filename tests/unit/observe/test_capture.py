"""A sampled forward measures each call of each selected layer, as it is at that moment."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe import intake
from torchinstruments.observe.sampling import EveryNForwardsSampler, SamplingEvent
from torchinstruments.records import Execution, GradSync, SampleState, Scope
from unit.observe.memory import MemorySession, Recorder, num_hooks, observe, value


def everything(name: str, module: nn.Module) -> bool:
    """Selects every module."""
    return True


class ByThread:
    """Chooses the forwards of one thread."""

    def __init__(self, thread: int) -> None:
        self.thread = thread

    def should_sample(self, event: SamplingEvent) -> bool:
        """Returns whether the forward runs in that thread."""
        return event.forward_index >= 0 and threading.get_ident() == self.thread


def constant(linear: nn.Linear, weight: float) -> None:
    """Gives a layer one weight everywhere, and no bias."""
    nn.init.constant_(linear.weight, weight)
    nn.init.zeros_(linear.bias)


def test_every_layer_gives_the_statistics_of_its_output(session: MemorySession) -> None:
    """Values, shape, dtype, device and path are those of the tensor that the layer returned."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    observe(model, session)
    x = torch.randn(5, 4)
    hidden = model[0](x)
    output = model(x)
    first, second = session.outputs()
    assert (first.layer, second.layer) == ("0", "1")
    assert value(first) == pytest.approx(hidden.detach().numpy().astype(np.float64).mean())
    assert value(second, "p50") == pytest.approx(np.median(output.detach().numpy().astype(np.float64)))
    assert (first.shape, first.dtype, first.device, first.tensor_path) == ((5, 3), "float32", "cpu", "output")
    assert (first.mode, first.grad_enabled, first.scope, first.execution) == (
        "train",
        True,
        Scope.LOCAL,
        Execution.EAGER,
    )
    assert first.reasons == ("",) * 9


def test_a_sample_knows_its_forward(session: MemorySession) -> None:
    """Ordinal, position and gradient sync are those of the root forward; nothing failed."""
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    observe(model, session, sampler=EveryNForwardsSampler(2))
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(1))
    samples = session.samples()
    assert [(s.ordinal, s.position.forward_index) for s in samples] == [(0, 1), (1, 3)]
    assert all(s.state is SampleState.FORWARD_COMPLETE and s.settled for s in samples)
    assert all((s.modules_expected, s.modules_fired, s.errors) == (2, 2, 0) for s in samples)
    assert all(s.grad_sync is GradSync.NOT_DISTRIBUTED for s in samples)


def test_hooks_are_there_for_a_sampled_forward_alone(session: MemorySession) -> None:
    """Two permanent ones stay; the layers have theirs during a sampled forward only."""
    counts: list[int] = []

    def count(x: torch.Tensor) -> torch.Tensor:
        counts.append(num_hooks(model))
        return x

    model = nn.Sequential(nn.Linear(2, 2), Recorder(count), nn.Linear(2, 2))
    observe(model, session, sampler=EveryNForwardsSampler(2))
    for _ in range(2):
        model(torch.ones(1, 2))
        assert num_hooks(model) == 2
    assert counts == [2, 5]


def test_nested_outputs_get_stable_paths(session: MemorySession) -> None:
    """A mapping's tensors are measured one by one, and their gradients under matching paths."""

    def split(x: torch.Tensor) -> Mapping[str, object]:
        return {"logits": x * 2, "hidden_states": [x * 3, (x * 4,)], "name": "text"}

    model = Recorder(split)
    observe(model, session)
    output = model(torch.ones(2, requires_grad=True))
    (output["logits"] + output["hidden_states"][1][0]).sum().backward()
    assert [m.tensor_path for m in session.outputs()] == [
        "output.logits",
        "output.hidden_states.0",
        "output.hidden_states.1.0",
    ]
    assert {m.tensor_path: m.reasons[0] for m in session.gradients()} == {
        "grad_output.logits": "",
        "grad_output.hidden_states.0": "no_gradient",
        "grad_output.hidden_states.1.0": "",
    }


def test_calls_of_a_shared_module_are_numbered(session: MemorySession) -> None:
    """Both calls stand under the first name, and the catalog has the other as alias."""
    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear, nn.ReLU(), linear)
    observe(model, session)
    model(torch.randn(3, 2)).sum().backward()
    assert [(m.layer, m.call_index) for m in session.outputs()] == [("0", 0), ("1", 0), ("0", 1)]
    assert sorted((m.layer, m.call_index) for m in session.gradients()) == [("0", 0), ("0", 1), ("1", 0)]
    assert session.modules[0].aliases == ("2",)
    assert [m.fired for m in session.modules] == [1, 1]


def test_a_selected_root_and_its_parts_are_measured_once_each(session: MemorySession) -> None:
    """The root comes last, with the tensor that the model returned."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session, selector=everything)
    model(torch.randn(3, 2)).sum().backward()
    inner, root = session.outputs()
    assert (inner.layer, root.layer) == ("0", "")
    assert inner.values == root.values
    assert sorted(m.layer for m in session.gradients()) == ["", "0"]


def test_a_model_that_is_one_layer_is_measured(session: MemorySession) -> None:
    """The permanent hook takes its output."""
    model = nn.Linear(2, 2)
    observe(model, session)
    output = model(torch.randn(3, 2))
    (root,) = session.outputs()
    assert value(root, "max") == output.max().item()


def test_values_are_those_before_an_in_place_operation(session: MemorySession) -> None:
    """The layer before an in-place ReLU shows its negative outputs, the ReLU shows none."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))
    observe(model, session)
    x = torch.randn(16, 4)
    before = model[0](x).detach()
    model(x)
    linear, relu = session.outputs()
    assert value(linear, "min") == before.min().item() < 0
    assert value(relu, "min") == 0.0


def test_an_output_without_tensors_has_rows_that_say_so(session: MemorySession) -> None:
    """All known metrics are there with their reason instead of a value."""

    def nothing(x: torch.Tensor) -> None:
        return None

    model = nn.Sequential(Recorder(nothing))
    observe(model, session)
    model(torch.ones(1))
    (nothing,) = session.outputs()
    assert len(nothing.metrics) == 9
    assert nothing.values == (None,) * 9
    assert set(nothing.reasons) == {"no_tensor_output"}


def test_an_unsupported_tensor_has_rows_that_say_why_and_its_siblings_are_measured(
    session: MemorySession,
) -> None:
    """A complex and a sparse output keep their reason; the plain one beside them has values."""

    def mixed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 1j, x.to_sparse(), x * 2

    model = Recorder(mixed)
    observe(model, session)
    output = model(torch.ones(2, 2, requires_grad=True))
    output[2].sum().backward()
    reasons = [m.reasons[0].split(":")[0] for m in session.outputs()]
    assert reasons == ["unsupported_dtype", "unsupported_layout", ""]
    assert session.outputs()[0].dtype == "complex64"
    assert {m.tensor_path: m.reasons[0].split(":")[0] for m in session.gradients()} == {
        "grad_output.0": "no_gradient",
        "grad_output.1": "unsupported_layout",
        "grad_output.2": "",
    }


def test_an_exception_in_forward_leaves_a_failed_sample_and_no_hooks(session: MemorySession) -> None:
    """What was measured before it is kept, and the next forward is measured as usual."""

    def maybe(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise ValueError("the model's own")
        return x

    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear, Recorder(maybe))
    observe(model, session)
    constant(linear, 1.0)
    with pytest.raises(ValueError, match="the model's own"):
        model(torch.ones(1, 2))
    assert num_hooks(model) == 2
    model(-torch.ones(1, 2)).sum().backward()
    failed, complete, backward = session.samples()
    assert (failed.state, failed.settled, failed.modules_fired) == (SampleState.FAILED, True, 1)
    assert [m.layer for m in failed.measurements] == ["0"]
    assert (complete.state, complete.ordinal) == (SampleState.FORWARD_COMPLETE, 1)
    assert backward.ordinal == 1


def test_a_forward_inside_an_except_block_has_not_failed(session: MemorySession) -> None:
    """An exception that was there before is not this forward's."""
    model = nn.Sequential(nn.ReLU())
    observe(model, session)
    try:
        int("before")
    except ValueError:
        model(torch.ones(1))
    assert session.samples()[0].state is SampleState.FORWARD_COMPLETE


def test_a_layer_whose_exception_is_caught_by_the_model_has_no_row(session: MemorySession) -> None:
    """The forward is complete, with one layer fewer."""

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("caught")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = Recorder(fail)
            self.good = nn.ReLU()

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.bad(x)
            except ValueError:
                return self.good(x)

    model = Model()
    observe(model, session)
    model(torch.ones(1))
    (sample,) = session.samples()
    assert (sample.state, sample.modules_expected, sample.modules_fired) == (
        SampleState.FORWARD_COMPLETE,
        2,
        1,
    )
    assert [m.layer for m in sample.measurements] == ["good"]


def test_a_keyboard_interrupt_leaks_nothing_into_the_next_forward(session: MemorySession) -> None:
    """Hooks that it left are removed by the next root forward, and its sample counts as failed."""

    def interrupt(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise KeyboardInterrupt
        return x

    model = nn.Sequential(nn.Identity(), Recorder(interrupt))
    observe(model, session)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1))
    assert num_hooks(model) == 4
    model(-torch.ones(1))
    assert num_hooks(model) == 2
    interrupted, complete = session.samples()
    assert (interrupted.state, complete.state) == (SampleState.FAILED, SampleState.FORWARD_COMPLETE)
    assert (len(interrupted.measurements), len(complete.measurements)) == (1, 2)


def test_a_call_of_the_root_inside_a_call_of_it_belongs_to_the_outer_one(session: MemorySession) -> None:
    """One sample holds both, and calls are numbered over all of it."""

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        @override
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self.act(x if depth == 0 else self(x, depth - 1))

    model = Recursive()
    observer = observe(model, session)
    model(torch.ones(1))
    (sample,) = session.samples()
    assert [(m.layer, m.call_index) for m in sample.measurements] == [("act", 0), ("act", 1), ("act", 2)]
    assert observer.counters.forwards == 1


def test_forwards_of_other_threads_are_not_captured(session: MemorySession) -> None:
    """While one thread's forward is measured, another thread runs the same layers unmeasured."""
    inside, done = threading.Event(), threading.Event()
    main = threading.get_ident()

    def meet(x: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() == main:
            inside.set()
            assert done.wait(10)
        return x

    model = nn.Sequential(nn.ReLU(), Recorder(meet), nn.ReLU())
    observe(model, session, sampler=ByThread(main))

    def other() -> None:
        assert inside.wait(10)
        for _ in range(5):
            model[0](torch.full((1,), 7.0))
        model(torch.full((1,), 7.0))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    model(torch.ones(1))
    thread.join()
    (sample,) = session.samples()
    assert [value(m) for m in sample.measurements] == [1.0, 1.0, 1.0]


def test_forwards_of_several_threads_are_samples_of_their_own(session: MemorySession) -> None:
    """Each has its own ordinal, its own values and its own gradients."""
    linear = nn.Linear(2, 2)
    constant(linear, 0.5)
    model = nn.Sequential(linear, nn.ReLU())
    observe(model, session)
    barrier = threading.Barrier(4)

    def train(number: int) -> None:
        barrier.wait(10)
        for _ in range(5):
            (model(torch.full((1, 2), float(number))).sum() * number).backward()

    threads = [threading.Thread(target=train, args=(number,)) for number in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples = session.samples()
    assert sorted(s.ordinal for s in samples if s.backward_index is None) == list(range(20))
    assert sorted(s.position.forward_index for s in samples if s.backward_index is None) == list(range(20))
    forward = {s.ordinal: value(s.measurements[0]) for s in samples if s.backward_index is None}
    for s in samples:
        assert len(s.measurements) == 2
        assert {value(m) for m in s.measurements} == {forward[s.ordinal]}
    assert num_hooks(model) == 2


class _TakenMeanwhile(deque[Any]):
    """A queue that another thread empties between a look at its length and a take."""

    @override
    def __len__(self) -> int:
        return super().__len__() + 1


def test_what_another_thread_has_sent_meanwhile_is_no_error(session: MemorySession) -> None:
    """Threads that begin a forward at the same time send what waits together, each a part of it."""
    model = nn.Sequential(nn.Linear(2, 2))
    probe = observe(model, session)._probe
    assert probe is not None
    probe._tracker._transfers = _TakenMeanwhile()
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert session.errors == []
    assert [sample.ordinal for sample in session.samples() if sample.backward_index is None] == [0, 1, 2]


def test_the_tensors_of_one_forward_are_bounded(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound nothing is measured, and one error says so."""
    monkeypatch.setattr(intake, "MAX_OBSERVATIONS", 3)
    relu = nn.ReLU()
    model = nn.Sequential(*[relu] * 5)
    observe(model, session)
    with pytest.warns(RuntimeWarning, match="more than 3 tensors in one forward"):
        model(torch.ones(1))
    (sample,) = session.samples()
    assert (len(sample.measurements), sample.errors) == (3, 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_layers_inside_compiled_code_say_so_and_the_rest_is_measured(session: MemorySession) -> None:
    """Nothing is compiled anew for a sampled forward."""
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compilations.append(1)
        return graph.forward

    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = torch.compile(block, backend=backend)
    assert isinstance(compiled, nn.Module)
    model = nn.Sequential(nn.Linear(2, 2), compiled)
    observe(model, session, sampler=EveryNForwardsSampler(2))
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
    assert len(compilations) == 1
    forward = session.samples()[0]
    assert {m.layer: (m.execution, m.reasons[0]) for m in forward.measurements} == {
        "1.0": (Execution.INSIDE_COMPILED, "inside_compiled"),
        "1.1": (Execution.INSIDE_COMPILED, "inside_compiled"),
        "0": (Execution.EAGER, ""),
        "1": (Execution.EAGER, ""),
    }
    assert session.errors == []


def test_dispatch_modes_and_autocast_see_nothing_of_the_measuring(session: MemorySession) -> None:
    """A mode counts the same operations with an observer, and a reducer computes in full precision."""
    precisions: list[torch.dtype] = []

    def gram(tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        product = tensor.float() @ tensor.float().T
        precisions.append(product.dtype)
        return {"gram": product.sum()}

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with FlopCounterMode(display=False) as bare:
        model(x).sum().backward()
    observe(model, session, reducers=(gram,))
    with FlopCounterMode(display=False) as counted, torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    assert counted.get_total_flops() == bare.get_total_flops()
    assert precisions == [torch.float32] * 4
    assert [m.dtype for m in session.outputs()] == ["bfloat16"] * 2


def test_a_functional_transform_is_left_alone_and_said_so(session: MemorySession) -> None:
    """Per-sample gradients by torch.func are unchanged; the rows name the transform."""
    model = nn.Sequential(nn.Linear(2, 1))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(5, 2)

    def loss(p: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, p, (one,)).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    bare = per_sample(parameters, x)
    observe(model, session)
    observed = per_sample(parameters, x)
    assert all(torch.equal(bare[name], observed[name]) for name in bare)
    assert all(m.reasons[0].startswith("unsupported_layout") for m in session.outputs())
    assert len(session.outputs()) == 1


def test_a_traced_model_has_no_trace_of_the_observer(session: MemorySession) -> None:
    """torch.jit.trace records the model's operations alone."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.randn(1, 2)
    bare = torch.jit.trace(model, x)
    assert isinstance(bare, torch.jit.ScriptModule)
    observe(model, session)
    traced = torch.jit.trace(model, x, check_trace=False)
    assert isinstance(traced, torch.jit.ScriptModule)
    assert str(traced.inlined_graph).count("aten::") == str(bare.inlined_graph).count("aten::")
    assert session.deliveries == []


class NoItems(dict[str, torch.Tensor]):
    """An output that cannot be gone through."""

    @override
    def items(self) -> Any:
        raise ValueError("no items \udc80")


def test_an_output_that_cannot_be_read_has_rows_that_say_so(session: MemorySession) -> None:
    """Its siblings are measured, and the error is counted."""
    model = nn.Sequential(Recorder(lambda x: [NoItems(), x]))
    observe(model, session, policy=ErrorPolicy.IGNORE)
    model(torch.ones(2))
    assert [(m.tensor_path, m.reasons[0]) for m in session.outputs()] == [
        ("output.0", "unreadable_output: ValueError: no items \\udc80"),
        ("output.1", ""),
    ]
    assert [error.message for error in session.errors] == ["no items \\udc80"]


def test_a_model_that_returns_a_generator_has_rows_that_say_so(session: MemorySession) -> None:
    """Its layers run after its forward, when nothing is measured any more."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield self.fc(x)

    model = Lazy()
    observe(model, session, selector=everything)
    assert len(list(model(torch.ones(1, 2)))) == 1
    assert [(m.layer, m.reasons[0]) for m in session.outputs()] == [
        ("", "no_tensor_output"),
        ("fc", "no_tensor_output: the model returned a generator, which runs after its forward"),
    ]
    assert [record.fired for record in session.modules] == [1, 0]


def test_names_of_modules_that_are_not_utf8_can_be_stored(session: MemorySession) -> None:
    """In the catalog and in every row."""
    model = nn.Sequential()
    model.add_module("fc\udc80", nn.Linear(2, 2))
    observe(model, session)
    model(torch.ones(1, 2)).sum().backward()
    names = {record.layer for record in session.modules} | {m.layer for m in session.outputs()}
    assert names | {m.layer for m in session.gradients()} == {"fc\\udc80"}
