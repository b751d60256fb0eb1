"""What torch may run fused is run fused while it is measured, and gives the same bits."""

import copy
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from torchinstruments.observe.fused import fused_regions
from torchinstruments.observe.sampling import EveryNForwardsSampler
from torchinstruments.observe.selection import select_layers
from unit.observe.memory import MemorySession, no_selector_error, num_hooks, observe, traces


class Around(nn.Module):
    """Has an attention module as a child."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    @override
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """Returns what the child returns."""
        return self.part(*args, **kwargs)


def everything(name: str, module: nn.Module) -> bool:
    """Selects every module."""
    return True


def encoder_layer() -> nn.TransformerEncoderLayer:
    """Returns a layer that may run fused."""
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def encoder() -> nn.TransformerEncoder:
    """Returns two of them; with a mask they run on nested tensors."""
    return nn.TransformerEncoder(encoder_layer(), 2)


def attention() -> nn.MultiheadAttention:
    """Returns attention alone."""
    return nn.MultiheadAttention(16, 2, batch_first=True)


def inputs(part: nn.Module, kind: str) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Returns arguments for a module: plain, with a padding mask, or nested."""
    if kind == "nested":
        x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    else:
        x = torch.randn(2, 5, 16)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    is_attention = isinstance(part, nn.MultiheadAttention)
    name = "key_padding_mask" if is_attention else "src_key_padding_mask"
    return ((x, x, x) if is_attention else (x,)), ({name: mask} if kind == "masked" else {})


def as_tensor(output: Any) -> torch.Tensor:
    """Returns the first tensor of an output, padded where it is nested."""
    first = output[0] if isinstance(output, tuple) else output
    return first.to_padded_tensor(0.0) if first.is_nested else first


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("make", [encoder_layer, encoder, attention])
@pytest.mark.parametrize("kind", ["plain", "masked", "nested"])
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_child", [True, False])
@pytest.mark.parametrize("selector", [None, everything])
def test_outputs_keep_their_bits(
    session: MemorySession,
    make: Callable[[], nn.Module],
    kind: str,
    without_gradients: Callable[[], Any],
    is_child: bool,
    selector: Any,
) -> None:
    """With and without masks, as a child and as the attached model, whatever is selected."""
    part = make().eval()
    args, kwargs = inputs(part, kind)
    model = Around(part).eval() if is_child else part
    with without_gradients():
        bare = as_tensor(model(*args, **kwargs))
        observer = observe(model, session, selector=selector)
        observed = as_tensor(model(*args, **kwargs))
    assert torch.equal(bare, observed)
    assert len(session.deliveries) == 1
    assert session.errors == []
    observer.close()
    assert (num_hooks(model), traces(model), "_compiled_call_impl" in vars(model)) == (0, {}, False)


def test_what_a_fused_call_left_out_says_so_call_by_call(session: MemorySession) -> None:
    """The module itself has its values, nothing inside counts as called, and the next module is measured."""
    part = encoder_layer()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part
            self.head = nn.Linear(16, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.part(self.part(x)))

    model = Twice().eval()
    observe(model, session, selector=everything)
    with torch.no_grad():
        model(torch.randn(2, 5, 16))
    reasons = {(m.layer, m.call_index): m.reasons[0] for m in session.outputs()}
    inside = [f"part.{name}" for name, _ in part.named_modules() if name]
    assert reasons == {
        **{(name, call): "inside_fused" for name in inside for call in (0, 1)},
        ("part", 0): "",
        ("part", 1): "",
        ("head", 0): "",
        ("", 0): "",
    }
    assert session.samples()[0].modules_fired == 3
    assert {m.layer for m in session.modules if m.fired} == {"", "part", "head"}


@pytest.mark.parametrize("is_training", [True, False])
def test_with_gradients_all_of_it_is_measured_as_ever(session: MemorySession, is_training: bool) -> None:
    """Outputs and gradients of the parts, each once, in training and in evaluation mode."""
    model = Around(encoder_layer()).train(is_training)
    observe(model, session, selector=everything)
    model(torch.randn(2, 5, 16)).sum().backward()
    expected = {name for name, _ in model.named_modules()} - {"part.self_attn.out_proj"}
    assert sorted(m.layer for m in session.outputs()) == sorted(expected)
    assert sorted(m.layer for m in session.gradients()) == sorted(expected)
    assert {m.reasons[0] for m in session.outputs() + session.gradients()} == {""}


def test_gradients_that_are_off_inside_alone_are_noticed_at_the_call(session: MemorySession) -> None:
    """A frozen encoder under no_grad in a forward that records gradients keeps its bits too."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = encoder_layer().eval()
            self.head = nn.Linear(16, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                features = self.part(x)
            return self.head(features)

    model = Frozen()
    x = torch.randn(2, 5, 16)
    bare = model(x)
    observe(model, session)
    assert torch.equal(model(x), bare)
    assert {m.reasons[0] for m in session.outputs() if m.layer != "head"} == {"inside_fused"}


def test_unsampled_forwards_of_an_attached_layer_keep_their_bits(session: MemorySession) -> None:
    """The attached model has no hook at any time."""
    model = encoder_layer().eval()
    args, kwargs = inputs(model, "masked")
    with torch.no_grad():
        bare = model(*args, **kwargs)
        observe(model, session, sampler=EveryNForwardsSampler(2))
        outputs = [model(*args, **kwargs) for _ in range(2)]
    assert all(torch.equal(bare, output) for output in outputs)
    assert (num_hooks(model), len(session.deliveries)) == (0, 1)


def test_an_attached_layer_is_seen_call_by_call(session: MemorySession) -> None:
    """An exception fails the sample, a direct forward counts where it is captured, copies are not seen."""
    model = encoder_layer().eval()
    observe(model, session, capture_direct_forwards=True)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        model(x)
        model.forward(x)
        with pytest.raises(RuntimeError, match="embed_dim"):
            model(torch.randn(2, 5, 8).requires_grad_())
        copy.deepcopy(model)(x)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        torch.load(file, weights_only=False)(x)
    assert [sample.state.value for sample in session.samples()] == [
        "forward_complete",
        "forward_complete",
        "failed",
    ]


def test_an_attached_layer_compiles_and_exports_as_it_is(session: MemorySession) -> None:
    """What stands in its slot is no part of a program, and counts what is exported."""
    model = encoder_layer().eval()
    x = torch.randn(2, 5, 16)
    observer = observe(model, session)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    assert len(session.deliveries) == 1
    observer.close()
    assert [error.message for error in session.errors] == ["1 forward under torch.export was not observed"]


def test_a_layer_inside_compiled_code_says_that(session: MemorySession) -> None:
    """It is not called fused, for nothing of it is seen."""
    compiled = torch.compile(encoder_layer().eval(), backend="eager")
    assert isinstance(compiled, nn.Module)
    model = nn.Sequential(compiled)
    observe(model, session, selector=everything)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.randn(2, 5, 16))
    reasons = {m.layer: m.reasons[0] for m in session.outputs()}
    assert (reasons["0"], reasons["0.linear1"]) == ("", "inside_compiled")


def test_observers_of_a_model_and_of_its_layer_see_their_calls(session: MemorySession) -> None:
    """They stand over each other in the slot and leave in any order."""
    model = Around(encoder_layer()).eval()
    own = MemorySession()
    outer = observe(model, session, selector=everything)
    inner = observe(model.part, own, selector=everything)
    args, kwargs = inputs(model.part, "masked")
    with torch.no_grad():
        first = model(*args, **kwargs)
        assert (len(session.deliveries), len(own.deliveries)) == (1, 1)
        inner.close()
        assert torch.equal(model(*args, **kwargs), first)
        outer.close()
        assert torch.equal(model(*args, **kwargs), first)
    assert (len(session.deliveries), len(own.deliveries)) == (2, 1)
    assert traces(model) == {}


def test_a_call_in_another_thread_is_not_measured(session: MemorySession) -> None:
    """The forward of a thread has the rows of its own calls alone."""
    part = encoder_layer()

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=part, args=(x,))
            thread.start()
            thread.join()
            return part(x)

    model = Apart().train()
    observe(model, session, selector=everything)
    model(torch.randn(2, 5, 16))
    assert [m.layer for m in session.outputs()].count("part.linear1") == 1
    assert [m.layer for m in session.outputs()].count("part") == 1


def test_regions_know_the_layers_at_and_below_them() -> None:
    """A model without such a module has none."""
    model = nn.Sequential(encoder_layer(), nn.Linear(2, 2))
    (region,) = fused_regions(model, select_layers(model, everything, no_selector_error))
    assert region.own is not None
    assert (region.own.name, region.is_root, len(region.inside)) == ("0", False, 9)
    (region,) = fused_regions(model[0], select_layers(model[0], everything, no_selector_error))
    assert (region.own, region.is_root) == (None, True)
    assert fused_regions(model[1], select_layers(model[1], everything, no_selector_error)) == ()
