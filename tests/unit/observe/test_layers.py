"""Modules that a program exchanges after attach are found at the next sampled forward."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe import layers as layers_module
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.layers import ObservedLayers, Structure
from torchinstruments.observe.observer import Observer
from torchinstruments.observe.probe import RootProbe
from torchinstruments.observe.sampling import AlwaysSampler
from torchinstruments.observe.selection import leaf_modules, select_layers
from torchinstruments.ranks.clock import StepClock
from torchinstruments.statistics.reducers import default_reducers
from unit.observe.memory import MemorySession, no_selector_error, observe, value


def constant(weight: float) -> nn.Linear:
    """A layer with one weight everywhere, and no bias."""
    linear = nn.Linear(2, 2)
    nn.init.constant_(linear.weight, weight)
    nn.init.zeros_(linear.bias)
    return linear


X = torch.ones(1, 2)


def test_a_replaced_module_is_measured_under_its_name_and_said_so_once(session: MemorySession) -> None:
    """Its rows have the same layer and index; the old module is let go."""
    model = nn.Sequential(constant(1.0), nn.ReLU())
    observe(model, session)
    model(X)
    gone = weakref.ref(model[0])
    model[0] = constant(3.0)
    with pytest.warns(RuntimeWarning, match="of the selected layers 1 are others, 0 are new and 0 are gone"):
        model(X)
    model[0] = nn.Sequential(constant(4.0))
    model(X)
    model(X)
    assert [(m.layer, m.layer_index, value(m)) for m in session.outputs()] == [
        ("0", 0, 2.0),
        ("1", 1, 2.0),
        ("0", 0, 6.0),
        ("1", 1, 6.0),
        ("0.0", 2, 8.0),
        ("1", 1, 8.0),
        ("0.0", 2, 8.0),
        ("1", 1, 8.0),
    ]
    assert [e.probe for e in session.errors] == ["selector", "selector"]
    session.deliveries.clear()
    gc.collect()
    assert gone() is None


def test_new_and_gone_modules_change_the_catalog_at_its_end(session: MemorySession) -> None:
    """Indices stay, what is gone is not expected any more, and a new type is told."""
    model = nn.Sequential(constant(1.0), nn.ReLU(), nn.Tanh())
    observer = observe(model, session)
    model(X)
    del model[1]
    model.append(nn.Sigmoid())
    with pytest.warns(RuntimeWarning, match="were replaced"):
        model(X)
    observer.flush()
    assert [(m.layer, m.type, m.expected, m.fired) for m in session.modules] == [
        ("0", "Linear", True, 2),
        ("1", "Tanh", True, 2),
        ("2", "Sigmoid", True, 2),
    ]
    model[2] = nn.Sequential(nn.Sigmoid())
    model(X)
    assert [(m.layer, m.expected) for m in session.modules] == [
        ("0", True),
        ("1", True),
        ("2", False),
        ("2.0", True),
    ]
    assert session.samples()[-1].modules_expected == 3


def test_a_wrapper_put_round_a_layer_keeps_its_name(session: MemorySession) -> None:
    """Activation checkpointing applied after attach is a wrapper, and its layer is the same."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    observe(model, session)
    model(X)
    model[0] = checkpoint_wrapper(model[0])
    with pytest.warns(RuntimeWarning, match="0 are others, 0 are new and 0 are gone"):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert [m.layer for m in session.outputs()] == ["0", "1"] * 2
    assert sorted((m.layer, m.reasons[0]) for m in session.gradients()) == [("0", ""), ("1", "")]


def test_a_change_is_found_at_any_depth_and_costs_no_module() -> None:
    """By identity; the structure itself keeps nothing alive."""
    middle = nn.Sequential(nn.Sequential(nn.ReLU()))
    model = nn.Sequential(middle)
    structure = Structure(model)
    assert not structure.has_changed()
    gone = weakref.ref(middle[0])
    fresh = nn.Sequential(nn.ReLU())
    middle[0] = fresh
    gc.collect()
    assert structure.has_changed()
    assert gone() is None
    structure = Structure(model)
    fresh.append(nn.Tanh())
    assert structure.has_changed()


def test_without_a_selector_a_change_is_only_reported(session: MemorySession) -> None:
    """Once, and the old layers go on being watched where they still are."""
    model = nn.Sequential(constant(1.0), nn.ReLU())
    probe = RootProbe(
        model,
        layers=select_layers(model, leaf_modules(), no_selector_error),
        sampler=AlwaysSampler(),
        reducers=default_reducers(),
        session=session,
        clock=StepClock(),
        faults=Faults(ErrorPolicy.WARN, session.put_error),
    )
    Observer(probe).attach(model)
    model[0] = constant(2.0)
    with pytest.warns(RuntimeWarning, match="the new ones are not observed"):
        model(X)
    model(X)
    assert [m.layer for m in session.outputs()] == ["1", "1"]
    assert len(session.errors) == 1


def test_a_change_that_leaves_nothing_to_select_keeps_the_old_layers(session: MemorySession) -> None:
    """The error says so, and training goes on."""

    def linear(name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    observe(model, session, selector=linear)
    model[0] = nn.Tanh()
    with pytest.warns(RuntimeWarning, match="selected none of the model's"):
        model(X)
    model(X)
    assert session.outputs() == []
    assert len(session.errors) == 1


def test_changes_without_end_are_given_up(session: MemorySession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is another one at each step is selected anew a bounded number of times."""
    monkeypatch.setattr(layers_module, "MAX_SELECTIONS", 2)
    model = nn.Sequential(nn.ReLU())
    observed = ObservedLayers(
        model,
        select_layers(model, leaf_modules(), no_selector_error),
        leaf_modules(),
        Faults(ErrorPolicy.IGNORE, session.put_error),
    )
    renewed = []
    for _ in range(4):
        model[0] = nn.ReLU()
        renewed.append(observed.refresh(model))
    assert renewed == [True, True, False, False]
    assert [e.message.split(";")[-1] for e in session.errors][-1] == " the new ones are not observed"
    assert len(session.errors) == 3


def test_a_selector_that_raises_at_a_change_is_reported(session: MemorySession) -> None:
    """That module is left out, as at attach."""
    calls: list[str] = []

    def picky(name: str, module: nn.Module) -> bool:
        calls.append(name)
        if len(calls) > 3 and name == "0":
            raise ValueError("not this one")
        return name != ""

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    observe(model, session, selector=picky)
    model[0] = nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(X)
    assert "selector failed in 0: ValueError: not this one" in str(caught[0].message)
    assert "1 are gone" in str(caught[1].message)
    assert [m.layer for m in session.outputs()] == ["1"]
