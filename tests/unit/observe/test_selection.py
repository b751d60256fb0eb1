"""Layers are chosen by name and module, and their names do not depend on wrappers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from typing_extensions import override

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.compiled import compiled_parts
from torchinstruments.observe.selection import Layer, Selector, leaf_modules, select_layers
from unit.observe.memory import no_selector_error


class Encoder(nn.Module):
    """A model with a child that is called like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.act = nn.ReLU()

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the activation."""
        return self.act(self.module(x))


class Wrapper(nn.parallel.DistributedDataParallel):
    """A wrapper of DDP's type that needs no process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def everything(name: str, module: nn.Module) -> bool:
    """Selects every module."""
    return True


def chosen(model: nn.Module, selector: Selector | None = None) -> dict[str, Layer]:
    """Layers by name."""
    return {
        layer.name: layer for layer in select_layers(model, selector or leaf_modules(), no_selector_error)
    }


def test_leaf_modules_chooses_what_has_no_children() -> None:
    """A child named like a wrapper's segment keeps its name, for its parent is no wrapper."""
    model = nn.Sequential(Encoder(), nn.Linear(2, 1))
    assert list(chosen(model)) == ["0.module", "0.act", "1"]


def test_a_module_whose_weight_is_parametrized_is_a_leaf() -> None:
    """What makes its weight is none, and is never taken for an activation."""
    model = nn.ModuleDict(
        {
            "spectral": spectral_norm(nn.Conv2d(1, 2, 3)),
            "plain": nn.Linear(2, 2),
            "parametrized_block": nn.Sequential(weight_norm(nn.Linear(2, 2)), nn.ReLU()),
        }
    )
    layers = select_layers(model, leaf_modules(), no_selector_error)
    assert [one.name for one in layers] == [
        "spectral",
        "plain",
        "parametrized_block.0",
        "parametrized_block.1",
    ]
    (root,) = select_layers(spectral_norm(nn.Linear(2, 2)), leaf_modules(), no_selector_error)
    assert root.is_root


def test_a_model_that_is_a_leaf_itself_is_the_root_layer() -> None:
    """Its name is empty and its calls are seen by the permanent hooks."""
    (layer,) = chosen(nn.Linear(2, 2)).values()
    assert layer.name == ""
    assert layer.is_root


def test_a_selector_sees_every_module_once_with_the_root_first() -> None:
    """Names are those of named_modules for a model without wrappers."""
    model = nn.Sequential(Encoder(), nn.Linear(2, 1))
    assert list(chosen(model, everything)) == [name for name, _ in model.named_modules()]


@pytest.mark.parametrize("wrap", [Wrapper, checkpoint_wrapper, torch.compile])
def test_wrappers_leave_no_segment_in_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Around the model, around a block and around a leaf, names stay those of the bare model."""
    bare = list(chosen(nn.Sequential(Encoder(), nn.Linear(2, 1)), everything))
    model = nn.Sequential(wrap(Encoder()), wrap(nn.Linear(2, 1)))
    assert list(chosen(wrap(model), everything)) == bare


def test_wrappers_around_wrappers_leave_no_segment_either() -> None:
    """A compiled DDP of a model has the model's names."""
    model = torch.compile(Wrapper(nn.Sequential(nn.Linear(2, 2))))
    assert isinstance(model, nn.Module)
    assert list(chosen(model)) == ["0"]


def test_a_layer_is_watched_at_its_outermost_wrapper() -> None:
    """There its output belongs to the graph under reentrant checkpointing."""
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    layer = chosen(nn.Sequential(wrapped))["0"]
    assert layer.watched is wrapped
    assert type(layer.module) is nn.Linear
    assert layer.record().type == "Linear"


def test_a_shared_module_is_one_layer_with_aliases() -> None:
    """The first name counts; another place inside a wrapper does not change where it is watched."""
    linear = nn.Linear(2, 2)
    model = nn.ModuleDict(
        {"first": linear, "second": nn.Sequential(linear), "third": checkpoint_wrapper(linear)}
    )
    layer = chosen(model)["first"]
    assert layer.aliases == ("second.0", "third")
    assert layer.watched is linear


def test_names_that_collide_without_segments_keep_their_full_form() -> None:
    """A wrapper with a child of its own beside the wrapped model may have two modules of one name."""
    model = Wrapper(nn.ModuleDict({"head": nn.Linear(2, 2)}))
    model.head = nn.Linear(2, 3)
    names = chosen(model)
    assert list(names) == ["head", "head#2"]
    assert names["head"].module.out_features == 2

    inner = nn.ModuleDict({"a": nn.Linear(2, 2)})
    outer = Wrapper(inner)
    outer.a = checkpoint_wrapper(nn.Linear(2, 3))
    assert list(chosen(outer)) == ["a", "a._checkpoint_wrapped_module"]


def test_a_selector_that_raises_leaves_out_that_module_alone() -> None:
    """The error is told with the module's name."""
    errors: list[tuple[str, str]] = []

    def picky(name: str, module: nn.Module) -> bool:
        if name == "1":
            raise KeyError(name)
        return True

    def note(name: str, error: BaseException) -> None:
        errors.append((name, type(error).__name__))

    layers = select_layers(nn.Sequential(nn.ReLU(), nn.ReLU()), picky, note)
    assert [layer.name for layer in layers] == ["", "0"]
    assert errors == [("1", "KeyError")]


def test_a_selector_that_selects_nothing_is_refused_with_names_to_choose_from() -> None:
    """The sentence says how many modules there were."""

    def nothing(name: str, module: nn.Module) -> bool:
        return False

    with pytest.raises(ConfigurationError, match=r"selected none of the model's 3 modules.*'0'"):
        select_layers(nn.Sequential(nn.ReLU(), nn.ReLU()), nothing, no_selector_error)


def test_what_cannot_be_called_is_no_selector() -> None:
    """A text is refused by value."""
    wrong: Any = "encoder"
    with pytest.raises(ConfigurationError, match="selector='encoder' cannot be called"):
        select_layers(nn.ReLU(), wrong, no_selector_error)


def test_parameters_are_counted_without_children_and_without_lazy_ones() -> None:
    """Frozen ones are in the first count alone; an uninitialised one counts as none."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(4))
    model[0].bias.requires_grad_(False)
    records = [layer.record() for layer in chosen(model, everything).values()]
    assert [(r.layer, r.parameter_count, r.trainable_parameter_count) for r in records] == [
        ("", 0, 0),
        ("0", 8, 6),
        ("1", 0, 0),
    ]


def test_a_model_that_contains_itself_is_walked_to_an_end() -> None:
    """The cycle is entered once."""
    model = nn.Sequential(nn.ReLU())
    model.append(model)
    assert list(chosen(model)) == ["0"]


def test_a_scripted_module_is_known_to_take_no_hooks() -> None:
    """It is listed as not expected to fire."""
    scripted = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.ReLU()).eval()))
    layer = chosen(nn.Sequential(nn.Linear(2, 2), scripted))["1"]
    assert not layer.takes_hooks
    assert not layer.record().expected


def test_modules_inside_compiled_code_are_known() -> None:
    """The wrapper that torch.compile makes is outside, what Module.compile() was called on is inside."""
    in_place = nn.Sequential(nn.ReLU())
    model = nn.Sequential(nn.Sequential(nn.ReLU()), in_place, nn.ReLU())
    assert compiled_parts(model).inside == frozenset()
    wrapper = torch.compile(model[0], backend="eager")
    assert isinstance(wrapper, nn.Module)
    model[0] = wrapper
    in_place.compile(backend="eager")
    inside = compiled_parts(model).inside
    assert id(wrapper) not in inside
    assert id(model[2]) not in inside
    assert {id(m) for m in (*wrapper.children(), in_place, in_place[0])} <= inside
    layers = select_layers(model, leaf_modules(), no_selector_error, compiled_parts(model))
    assert {layer.name: layer.record().expected for layer in layers} == {
        "0": True,
        "0.0": False,
        "1": True,
        "1.0": False,
        "2": True,
    }


def test_a_layer_compiled_by_itself_is_watched_from_outside() -> None:
    """Its wrapper's hooks run eagerly, so it is expected to fire."""
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model[0], backend="eager")
    assert isinstance(compiled, nn.Module)
    model[0] = compiled
    layer = chosen(model)["0"]
    assert layer.watched is compiled
    assert layer.record().expected
