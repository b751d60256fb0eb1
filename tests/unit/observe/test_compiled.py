"""Compiled models observed at the boundary of what is compiled: what is seen, and nothing compiled for it."""

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import optimizer as optimizer_module
from typing_extensions import override

from torchinstruments.observe.compiled import NOTHING_COMPILED, compiled_parts
from torchinstruments.observe.sampling import EveryNForwardsSampler
from torchinstruments.records import Execution, Signal
from unit.observe.compiling import (
    FORMS,
    INSIDE,
    Block,
    Net,
    compile_as,
    counting,
    equal,
    train,
)
from unit.observe.memory import MemorySession, num_hooks, observe, traces, value

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Every test compiles for itself."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def of_layers(session: MemorySession, signal: Signal = Signal.OUTPUT) -> dict[str, tuple[str, str]]:
    """Execution and reason of each layer; the same in all samples."""
    found: dict[str, set[tuple[str, str]]] = {}
    for m in session.of(signal):
        found.setdefault(m.layer, set()).add((m.execution.value, m.reasons[0]))
    assert all(len(kinds) == 1 for kinds in found.values()), found
    return {layer: kinds.pop() for layer, kinds in found.items()}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_region_is_observed_at_its_boundary(
    session: MemorySession, form: str, checkpointed: bool
) -> None:
    """Training is the same to the last bit, nothing is compiled anew, and what is inside says that it is."""
    bare_backend, backend = counting(), counting()
    torch.manual_seed(7)
    bare = train(compile_as(form, Net(checkpointed=checkpointed), bare_backend))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(7)
    model = compile_as(form, Net(checkpointed=checkpointed), backend)
    left = traces(model)
    observer = observe(model, session, sampler=EveryNForwardsSampler(2))
    observed = train(model)
    breaks = torch._dynamo.utils.counters["graph_break"].total()
    observer.close()

    assert equal(bare, observed)
    assert backend.frame_count == bare_backend.frame_count >= 1
    assert backend.op_count == bare_backend.op_count
    assert breaks == 0
    inside = ("inside_compiled", "inside_compiled")
    if form in {"whole", "in_place"}:
        expected = {"": ("eager", ""), "head": inside}
    else:
        expected = {"blocks.0": ("eager", ""), "blocks.1": ("eager", ""), "head": ("eager", "")}
    expected |= dict.fromkeys(INSIDE, inside)
    assert of_layers(session) == expected
    seen = {layer: kind for layer, kind in expected.items() if kind != inside}
    assert of_layers(session, Signal.OUTPUT_GRADIENT) == seen
    assert {m.layer: (m.expected, m.fired) for m in session.modules} == {
        layer: (True, 3) if layer in seen else (False, 0) for layer in expected
    }
    assert session.errors == []
    assert num_hooks(model) == 0
    assert traces(model) == left


@pytest.mark.parametrize("form", ["whole", "in_place"])
def test_the_numbers_of_a_boundary_are_those_of_what_goes_over_it(session: MemorySession, form: str) -> None:
    """Output and gradient of the whole model are what the program sees of them."""
    model = compile_as(form, Net(), counting())
    observe(model, session)
    output = model(torch.ones(3, 4))
    output.retain_grad()
    output.square().sum().backward()
    assert output.grad is not None
    (forward,), (gradient,) = (
        [m for m in found if m.layer == ""] for found in (session.outputs(), session.gradients())
    )
    assert value(forward) == pytest.approx(output.mean().item())
    assert value(gradient) == pytest.approx(output.grad.mean().item())


def test_inputs_of_a_region_are_measured(session: MemorySession) -> None:
    """By a wrapper's hook and by a slot alike."""
    model = nn.Sequential(Block(), Block())
    model[0].compile(backend="eager")
    wrapper = torch.compile(model[1], backend="eager")
    assert isinstance(wrapper, nn.Module)
    model[1] = wrapper
    observe(model, session, signals=(Signal.INPUT, Signal.OUTPUT))
    model(torch.full((1, 4), 2.0))
    inputs = {m.layer: m for m in session.of(Signal.INPUT) if not m.reasons[0]}
    outputs = {m.layer: m for m in session.outputs() if not m.reasons[0]}
    assert set(inputs) == set(outputs) == {"0", "1"}
    assert value(inputs["0"]) == 2.0
    assert value(inputs["1"]) == value(outputs["0"])


def test_a_region_without_a_chosen_layer_is_no_layer(session: MemorySession) -> None:
    """A selector that leaves the blocks out gets none of their boundaries."""
    model = compile_as("blocks", Net(), counting())
    observe(model, session, selector=lambda name, _: name == "head")
    model(torch.ones(1, 4))
    assert of_layers(session) == {"head": ("eager", "")}


def test_a_region_inside_another_one_has_no_boundary(session: MemorySession) -> None:
    """Blocks that were compiled in place run as part of the whole once that is compiled."""
    model = compile_as("blocks_in_place", Net(), counting())
    whole = torch.compile(model, backend=(backend := counting()), fullgraph=True)
    assert isinstance(whole, nn.Module)
    observe(whole, session, sampler=EveryNForwardsSampler(2))
    train(whole)
    hidden = ("inside_compiled", "inside_compiled")
    assert of_layers(session) == {"": ("eager", "")} | dict.fromkeys((*INSIDE, "head"), hidden)
    assert backend.frame_count == 1


def test_a_wrapper_around_compiled_code_is_the_boundary(session: MemorySession) -> None:
    """DataParallel over a model that is compiled in place is called from outside of it."""
    model = Net()
    model.compile(backend="eager", fullgraph=True)
    wrapper = DataParallel(model)
    observe(wrapper, session)
    wrapper(torch.ones(1, 4))
    assert of_layers(session)[""] == ("eager", "")
    assert of_layers(session)["head"] == ("inside_compiled", "inside_compiled")


def test_what_torch_was_told_to_leave_alone_is_not_compiled() -> None:
    """A forward under torch.compiler.disable runs as it is written."""
    block = Block()
    vars(block)["forward"] = torch.compiler.disable(block.forward)
    assert compiled_parts(nn.Sequential(block)) == NOTHING_COMPILED


@pytest.mark.parametrize("first", ["first of its class", "another one before"])
@pytest.mark.parametrize("form", ["whole", "in_place"])
def test_a_model_that_is_compiled_after_attach_is_seen_from_its_second_forward_on(
    session: MemorySession, form: str, first: str
) -> None:
    """One warning, one graph, the same numbers, also where the compiler has met an observed model before."""
    if first == "another one before":
        earlier = MemorySession()
        other = Net()
        observer = observe(other, earlier)
        with pytest.warns(RuntimeWarning, match="compiled after the observer was attached"):
            compile_as(form, other, counting())(torch.ones(3, 4))
        observer.close()
    bare_backend, backend = counting(), counting()
    torch.manual_seed(7)
    bare = train(compile_as(form, Net(), bare_backend))
    if first == "first of its class":
        torch._dynamo.reset()
    torch.manual_seed(7)
    model = Net()
    observer = observe(model, session)
    with pytest.warns(RuntimeWarning, match="compiled after the observer was attached") as caught:
        observed = train(compile_as(form, model, backend))
    observer.close()
    assert len([w for w in caught if "torchinstruments" in str(w.message)]) == 1
    assert equal(bare, observed)
    assert backend.frame_count <= 1
    assert observer.counters.forwards == 5
    hidden = ("inside_compiled", "inside_compiled")
    assert of_layers(session) == {"": ("eager", "")} | dict.fromkeys((*INSIDE, "head"), hidden)
    assert {m.layer: m.expected for m in session.modules} == {"": True} | dict.fromkeys(
        (*INSIDE, "head"), False
    )
    assert {error.probe for error in session.errors} == {"compiled"}
    assert num_hooks(model) == 0


@pytest.mark.parametrize("form", ["blocks", "blocks_in_place", "forwards"])
def test_blocks_that_are_compiled_after_attach_are_observed_as_a_whole(
    session: MemorySession, form: str
) -> None:
    """One warning; the catalog says what is expected from then on, and the blocks are layers."""
    model, backend = Net(), counting()
    observe(model, session)
    train(model, 1)
    with pytest.warns(RuntimeWarning, match="4 of the selected layers are inside compiled code") as caught:
        train(compile_as(form, model, backend), 4)
    assert len([w for w in caught if "torchinstruments" in str(w.message)]) == 1
    assert backend.frame_count <= 2
    assert {m.layer: m.expected for m in session.modules} == dict.fromkeys(INSIDE, False) | {
        "head": True,
        "blocks.0": True,
        "blocks.1": True,
    }
    last = {m.layer: m.execution for m in session.samples()[-2].measurements}
    assert last == dict.fromkeys(INSIDE, Execution.INSIDE_COMPILED) | dict.fromkeys(
        ("head", "blocks.0", "blocks.1"), Execution.EAGER
    )


def test_a_model_that_is_called_inside_compiled_code_alone_is_told_of(session: MemorySession) -> None:
    """A compiled step has no boundary that is the model's; one warning says so and training goes on."""
    model, backend = Net(), counting()
    observer = observe(model, session)

    @torch.compile(backend=backend, fullgraph=True)
    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    with pytest.warns(RuntimeWarning, match="it is called inside compiled code"):
        loss(torch.ones(3, 4)).backward()
    for _ in range(2):
        loss(torch.ones(3, 4)).backward()
    assert backend.frame_count == 1
    assert observer.counters.forwards == 0


def test_a_followed_model_is_still_seen_where_it_is_called_itself(session: MemorySession) -> None:
    """An evaluation of the uncompiled model is a forward of its own, once."""
    model = Net()
    observer = observe(model, session)
    compiled = compile_as("whole", model, counting())
    with pytest.warns(RuntimeWarning, match="compiled after"):
        compiled(torch.ones(3, 4))
    compiled(torch.ones(3, 4))
    model(torch.ones(3, 4))
    compiled(torch.ones(3, 4))
    assert observer.counters.forwards == 3
    observer.close()
    compiled(torch.ones(3, 4))
    assert observer.counters.forwards == 3


def test_an_in_place_model_gets_its_slot_back(session: MemorySession) -> None:
    """While it is observed its call runs through the observer, and afterwards as torch left it."""
    model = compile_as("in_place", Net(), counting())
    before = vars(model)["_compiled_call_impl"]
    observer = observe(model, session)
    assert vars(model)["_compiled_call_impl"] is not before
    observer.close()
    assert vars(model)["_compiled_call_impl"] is before


def test_optimizer_steps_are_looked_at_only_where_a_slot_may_be_displaced(session: MemorySession) -> None:
    """The hook is the whole process's, and each step pays for it; it goes with the observer."""
    gc.collect()  # one pair serves all who watch, those of earlier tests too until they are collected
    hooks = optimizer_module._global_optimizer_post_hooks
    before = len(hooks)
    for model, more in ((Net(), 0), (compile_as("in_place", Net(), counting()), 1)):
        observer = observe(model, session)
        assert len(hooks) == before + more
        observer.close()
        assert len(hooks) == before


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of training."""
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("before", ["in place", "hooks"])
def test_a_model_that_is_compiled_again_is_seen_from_the_next_step_on(
    session: MemorySession, before: str
) -> None:
    """Torch overwrites the slot without a word; one warning, one forward unseen, and the new code runs."""
    first, second = counting(), counting()
    model = Net()
    if before == "in place":
        model.compile(backend=first)
    observer = observe(model, session)
    if before == "hooks":
        model.compile(backend=first)
        with pytest.warns(RuntimeWarning, match="compiled after the observer was attached"):
            model(torch.ones(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    seen = observer.counters.forwards
    model.compile(backend=second)
    compiled = vars(model)["_compiled_call_impl"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            _step(model, optimizer)
    told = [str(one.message) for one in caught if "torchinstruments" in str(one.message)]
    # Hooks inside tell of the second time as of the first one, of which the user knows.
    assert len(told) == (1 if before == "in place" else 0)
    assert all("compiled in place" in sentence for sentence in told)
    assert observer.counters.forwards == seen + 3
    assert second.frame_count == 1
    assert session.errors[-1].probe == "compiled"
    observer.close()
    assert vars(model)["_compiled_call_impl"] is compiled


def test_a_model_that_is_compiled_again_and_never_stepped_is_told_of(session: MemorySession) -> None:
    """Nothing but the end looks at it."""
    model = Net()
    model.compile(backend=counting())
    observer = observe(model, session)
    model(torch.ones(3, 4))
    model.compile(backend=counting())
    model(torch.ones(3, 4))
    assert observer.counters.forwards == 1
    with pytest.warns(RuntimeWarning, match="none was seen since then"):
        observer.close()
    assert [error.probe for error in session.errors] == ["compiled"]


def test_a_fused_model_that_is_compiled_after_attach_is_seen_from_the_next_step_on(
    session: MemorySession,
) -> None:
    """It has a slot and no hooks, so that tracing it tells nothing."""
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    observer = observe(model, session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 3, 4)).sum().backward()
        optimizer.step()

    step()
    model.compile(backend=counting())
    with pytest.warns(RuntimeWarning, match="compiled in place"):
        step()
    step()
    assert observer.counters.forwards == 2
    observer.close()


class _Function(nn.Module):
    """Calls a layer in a function that is compiled, and never another one."""

    def __init__(self, *, on_instance: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        if on_instance:
            vars(self)["function"] = torch.compile(self.function, backend="eager")

    def function(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 4) -> the same."""
        return self.inner(x).relu()

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 4) -> the same."""
        return self.function(x)


class _Method(_Function):
    """The same with a method that is compiled for all instances."""

    function = torch.compile(_Function.function, backend="eager")


@pytest.mark.parametrize("kind", ["instance", "class"])
def test_layers_in_a_compiled_function_say_that_they_may_be_inside(session: MemorySession, kind: str) -> None:
    """In every sample, and those beside it are measured; the catalog says that they never fired."""
    part = _Method(on_instance=False) if kind == "class" else _Function(on_instance=True)
    model = nn.Sequential(part, nn.Linear(4, 2))
    observer = observe(model, session)
    for _ in range(3):
        model(torch.ones(3, 4)).sum().backward()
    observer.close()
    found = {layer: (how, why.partition(":")[0]) for layer, (how, why) in of_layers(session).items()}
    inside = ("inside_compiled", "inside_compiled")
    assert found == {"0.inner": inside, "0.unused": inside, "1": ("eager", "")}
    assert len(session.of(Signal.OUTPUT)) == 3 * 3
    assert {m.layer: (m.expected, m.fired) for m in session.modules} == {
        "0.inner": (True, 0),
        "0.unused": (True, 0),
        "1": (True, 3),
    }


def test_layers_that_are_not_called_in_a_model_without_compiled_functions_have_no_rows(
    session: MemorySession,
) -> None:
    """Nothing tells why, and compiled functions elsewhere in the program are no reason."""
    model = nn.Sequential(_Function(on_instance=False), nn.Linear(4, 2))
    torch.compile(torch.relu, backend="eager")(torch.ones(1))
    observer = observe(model, session)
    model(torch.ones(3, 4))
    observer.close()
    assert of_layers(session) == {"0.inner": ("eager", ""), "1": ("eager", "")}
