"""What layers are given is measured before they run, under paths that stay, whichever way they are called."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from torchinstruments.observe.leaves import MAX_TENSORS, tensors_given
from torchinstruments.observe.selection import leaf_modules
from torchinstruments.records import Execution, Measurement, SampleState, Signal
from unit.observe.memory import MemorySession, Recorder, num_hooks, observe, value

INPUT = frozenset((Signal.INPUT,))
BOTH = frozenset((Signal.INPUT, Signal.OUTPUT))


def everything(name: str, module: nn.Module) -> bool:
    """Selects every module."""
    return True


def placed(measured: list[Measurement]) -> list[tuple[str, int, str]]:
    """Layer, call and path of each."""
    return [(m.layer, m.call_index, m.tensor_path) for m in measured]


def paths(*args: object, **kwargs: object) -> list[str]:
    """The paths of the arguments of a call."""
    return [path for path, _ in tensors_given(args, kwargs).tensors]


def test_paths_follow_how_the_arguments_were_given() -> None:
    """One by place is the input itself, several are numbered, and names are names."""
    x = torch.ones(1)
    assert paths(x) == ["input"]
    assert paths(x, mask=x) == ["input", "input.mask"]
    assert paths(x, None, x) == ["input.0", "input.2"]
    assert paths((x, {"a": x})) == ["input.0", "input.1.a"]
    assert paths(query=x, key=[x]) == ["input.query", "input.key.0"]
    assert paths({"mask": x}, mask=x) == ["input.mask", "input.mask#2"]
    assert paths(1, "text") == paths() == []


def test_the_tensors_of_one_call_are_bounded() -> None:
    """What is left out is said."""
    found = tensors_given(tuple(torch.ones(1) for _ in range(MAX_TENSORS + 1)), {})
    assert len(found.tensors) == MAX_TENSORS
    assert found.truncated == f"more than {MAX_TENSORS} tensors in one input; the rest is not measured"


def test_inputs_are_measured_before_the_layer_runs(session: MemorySession) -> None:
    """An in-place layer changes its input, which is the output of the layer before."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True))
    observe(model, session, signals=BOTH)
    x = torch.randn(4, 3)
    model(x)
    hidden = model[0](x).detach()
    linear, relu = session.of(Signal.INPUT)
    assert placed([linear, relu]) == [("0", 0, "input"), ("1", 0, "input")]
    assert (value(linear), linear.shape) == (pytest.approx(x.double().mean().item()), (4, 3))
    assert value(relu, "min") == hidden.min().item() < 0
    assert value(session.outputs()[1], "min") == 0.0
    assert num_hooks(model) == 2, "only the permanent ones stay"


def test_keyword_arguments_and_nested_ones_are_measured(session: MemorySession) -> None:
    """A mask that is given by name has its name."""

    class Inner(nn.Module):
        @override
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return x if mask is None else x * mask

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x, mask=torch.zeros(2)))

    model = Outer()
    observe(model, session, signals=INPUT)
    model(torch.ones(2))
    measured = session.of(Signal.INPUT)
    assert placed(measured) == [("inner", 0, "input"), ("inner", 0, "input.mask"), ("inner", 1, "input")]
    assert [value(m) for m in measured] == [1.0, 0.0, 0.0]
    assert session.outputs() == []
    assert session.samples()[0].modules_fired == 1


def test_the_input_of_the_model_itself_is_measured_where_it_is_selected(session: MemorySession) -> None:
    """With what was given by name too."""
    model = Recorder(lambda x, scale: x * scale)
    model.forward = lambda x, *, scale: x * scale  # type: ignore[method-assign]
    observe(model, session, selector=everything, signals=BOTH)
    model(torch.full((2,), 3.0), scale=torch.full((1,), 2.0))
    assert placed(session.of(Signal.INPUT)) == [("", 0, "input"), ("", 0, "input.scale")]
    assert [value(m) for m in session.of(Signal.INPUT)] == [3.0, 2.0]
    assert [value(m) for m in session.outputs()] == [6.0]


def test_input_and_output_of_a_call_have_the_same_ordinal(session: MemorySession) -> None:
    """A call that raised, and was caught, takes its number with it."""

    class Picky(nn.Module):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() < 0:
                raise ValueError
            return x + 1

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picky = Picky()

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.picky(-x)
            except ValueError:
                return self.picky(x)

    model = Trying()
    observe(model, session, signals=BOTH)
    model(torch.ones(2))
    assert [(m.call_index, value(m)) for m in session.of(Signal.INPUT)] == [(0, -1.0), (1, 1.0)]
    assert [(m.call_index, value(m)) for m in session.outputs()] == [(1, 2.0)]


def test_a_layer_without_a_tensor_says_so(session: MemorySession) -> None:
    """And a container that raises costs itself alone."""

    class Raises(dict[str, object]):
        @override
        def items(self) -> object:  # type: ignore[override]
            raise RuntimeError("closed")

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recorder(lambda *_: torch.ones(1))

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(3) + self.inner(x, Raises(a=x))

    model = Caller()
    observe(model, session, signals=INPUT)
    model(torch.ones(1))
    assert [(m.call_index, m.tensor_path, m.reasons[0]) for m in session.of(Signal.INPUT)] == [
        (0, "input", "no_tensor_input"),
        (1, "input.1", "unreadable_input: RuntimeError: closed"),
        (1, "input.0", ""),
    ]


def test_the_recomputation_of_a_checkpoint_is_no_second_input(session: MemorySession) -> None:
    """It is no forward of the layer's."""

    class Block(nn.Module):
        def __init__(self, *, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant
            self.inner = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = checkpoint(self.inner, x, use_reentrant=self.reentrant)
            assert isinstance(output, torch.Tensor)
            return output

    for reentrant in (False, True):
        model = Block(reentrant=reentrant)
        observe(model, session, signals=INPUT)
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(session.of(Signal.INPUT)) == 2


def test_direct_forwards_are_measured_once(session: MemorySession) -> None:
    """Whether a layer is called or its forward is."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner.forward(x))

    model = Direct()
    observe(model, session, signals=BOTH, selector=everything, capture_direct_forwards=True)
    model.forward(torch.ones(1, 2))
    assert placed(session.of(Signal.INPUT)) == [
        ("", 0, "input"),
        ("inner", 0, "input"),
        ("inner", 1, "input"),
    ]
    assert sorted(placed(session.outputs())) == [
        ("", 0, "output"),
        ("inner", 0, "output"),
        ("inner", 1, "output"),
    ]


def test_a_fused_layer_takes_no_hook_and_says_what_did_not_run(session: MemorySession) -> None:
    """Its own input is measured in both modes; what lies inside has one where it runs."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(layer).eval()
    observe(model, session, signals=INPUT, selector=everything)
    with torch.no_grad():
        model(torch.ones(1, 3, 8))
    measured = {(m.layer, m.tensor_path): m.reasons[0] for m in session.of(Signal.INPUT)}
    assert measured["0", "input"] == ""
    assert measured["0.linear1", "input"] == "inside_fused"
    session.deliveries.clear()
    model(torch.ones(1, 3, 8))
    running = {(m.layer, m.tensor_path): m.reasons[0] for m in session.of(Signal.INPUT)}
    assert running["0.linear1", "input"] == running["0", "input"] == ""
    assert num_hooks(model) == 2, "only the permanent ones of the model, none in the layer"


def test_a_fused_model_has_its_own_input(session: MemorySession) -> None:
    """Seen through the slot of its call."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    observe(model, session, signals=INPUT, selector=everything)
    with torch.no_grad():
        model(torch.full((1, 3, 8), 2.0))
    own = [m for m in session.of(Signal.INPUT) if m.layer == ""]
    assert [(m.tensor_path, value(m)) for m in own] == [("input", 2.0)]


def test_compiled_layers_say_that_they_are(session: MemorySession) -> None:
    """Their inputs are inside the compiled code, that of the whole region is not."""
    block = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    assert isinstance(block, nn.Module)
    model = nn.Sequential(block)
    observe(model, session, signals=INPUT, selector=everything)
    model(torch.ones(1, 2))
    found = {m.layer: (m.reasons[0], m.execution) for m in session.of(Signal.INPUT)}
    assert found["0.0"] == ("inside_compiled", Execution.INSIDE_COMPILED)
    assert found["0"] == ("", Execution.EAGER)


def test_gradients_are_measured_without_the_outputs_too(session: MemorySession) -> None:
    """The forward's delivery is empty, and its backward has every layer."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    observe(model, session, signals=(Signal.OUTPUT_GRADIENT,))
    model(torch.ones(4, 2)).sum().backward()
    forward, backward = session.samples()
    assert (forward.measurements, backward.state) == ((), SampleState.BACKWARD_OBSERVED)
    assert [(m.layer, m.shape, m.tensor_path) for m in backward.measurements] == [
        ("1", (4, 1), "grad_output"),
        ("0", (4, 3), "grad_output"),
    ]


def test_a_gradient_that_does_not_come_lends_its_shape_from_an_output_that_is_not_measured(
    session: MemorySession,
) -> None:
    """What is missing still says what it would be."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(2, 1)
            self.right = nn.Linear(2, 3)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.right(x)
            return self.left(x)

    model = Heads()
    observe(model, session, signals=(Signal.OUTPUT_GRADIENT,))
    model(torch.ones(4, 2)).sum().backward()
    left, right = session.gradients()
    assert (left.layer, left.reasons[0], left.shape) == ("left", "", (4, 1))
    assert (right.layer, right.reasons[0], right.shape, right.dtype) == (
        "right",
        "no_gradient",
        (4, 3),
        "float32",
    )


def test_outputs_without_gradients_put_no_hook_on_any_tensor(session: MemorySession) -> None:
    """Nothing is expected, so the sample is settled with its forward."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session, signals=(Signal.OUTPUT,))
    output = model(torch.ones(1, 2))
    assert not output._backward_hooks
    output.sum().backward()
    assert [(s.settled, s.state) for s in session.samples()] == [(True, SampleState.FORWARD_COMPLETE)]


def test_a_leaf_selector_without_outputs_still_counts_what_fired(session: MemorySession) -> None:
    """Or coverage would call every layer unused."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    observe(model, session, selector=leaf_modules(), signals=(Signal.PARAMETER,))
    model(torch.ones(1, 2))
    assert session.samples()[0].modules_fired == 2
    assert [record.fired for record in session.modules] == [1, 1]


def test_a_copy_made_inside_a_sampled_forward_takes_no_input(session: MemorySession) -> None:
    """The hooks before a layer do not travel either, nor do they in a pickle."""
    copies: list[nn.Module] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not copies:
                copies.extend((copy.deepcopy(self.fc), pickle.loads(pickle.dumps(self.fc))))
                for twin in copies:
                    twin(x)
            return self.fc(x)

    model = Model()
    observe(model, session, signals=frozenset(Signal))
    model(torch.ones(1, 2))
    assert len(session.of(Signal.INPUT)) == 1
