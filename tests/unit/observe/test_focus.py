"""The layers in focus are the first ones that were asked for."""

from typing import Any

import pytest
import torch
from torch import nn

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.focus import select_focus
from torchinstruments.observe.selection import Layer, leaf_modules, select_layers
from unit.observe.memory import no_selector_error


def layers_of(model: nn.Module) -> tuple[Layer, ...]:
    """The leaves of a model."""
    return select_layers(model, leaf_modules(), no_selector_error)


def test_without_a_selector_the_first_layers_are_in_focus() -> None:
    """In the order of the model, and no more than the maximum."""
    layers = layers_of(nn.Sequential(*[nn.ReLU() for _ in range(5)]))
    assert select_focus(layers, None, 3, no_selector_error) == {0, 1, 2}
    assert select_focus(layers, None, 8, no_selector_error) == {0, 1, 2, 3, 4}


def test_without_a_selector_layers_that_cannot_be_measured_take_no_place() -> None:
    """A scripted one has no histogram to show."""
    scripted = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.ReLU()).eval()))
    layers = layers_of(nn.Sequential(scripted, nn.ReLU(), nn.ReLU()))
    assert select_focus(layers, None, 1, no_selector_error) == {1}


def test_a_selector_chooses_by_name_and_module_up_to_the_maximum() -> None:
    """Only among observed layers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    layers = layers_of(model)

    def late_linear(name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and name != "0"

    assert select_focus(layers, late_linear, 8, no_selector_error) == {2, 3}
    assert select_focus(layers, late_linear, 1, no_selector_error) == {2}


def test_a_selector_that_matches_nothing_is_refused_with_names_to_choose_from() -> None:
    """The sentence says among how many."""

    def nothing(name: str, module: nn.Module) -> bool:
        return False

    with pytest.raises(ConfigurationError, match=r"matched none of the 2 observed modules.*'0', '1'"):
        select_focus(layers_of(nn.Sequential(nn.ReLU(), nn.ReLU())), nothing, 8, no_selector_error)


@pytest.mark.parametrize("maximum", [0, -1, True, 2.0, "8", None])
def test_a_maximum_that_is_no_whole_number_of_at_least_one_is_refused(maximum: Any) -> None:
    """With its value."""
    with pytest.raises(ConfigurationError, match=f"max_histogram_modules={maximum!r} is not possible"):
        select_focus(layers_of(nn.Sequential(nn.ReLU())), None, maximum, no_selector_error)


def test_what_cannot_be_called_is_no_selector() -> None:
    """A text is refused by value."""
    selector: Any = "encoder"
    with pytest.raises(ConfigurationError, match="histogram_selector='encoder' cannot be called"):
        select_focus(layers_of(nn.Sequential(nn.ReLU())), selector, 8, no_selector_error)


def test_a_selector_that_raises_leaves_out_that_layer_alone() -> None:
    """The error is told with the layer's name."""
    failed: list[tuple[str, str]] = []

    def picky(name: str, module: nn.Module) -> bool:
        if name == "0":
            raise ValueError("not this one")
        return True

    def note(name: str, error: BaseException) -> None:
        failed.append((name, str(error)))

    assert select_focus(layers_of(nn.Sequential(nn.ReLU(), nn.ReLU())), picky, 8, note) == {1}
    assert failed == [("0", "not this one")]
