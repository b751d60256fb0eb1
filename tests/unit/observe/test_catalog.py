"""The catalog knows when a layer was first called and how often it was seen."""

from dataclasses import replace

import torch
from torch import nn

from torchinstruments.observe.catalog import MIN_INTERVAL_S, Catalog
from torchinstruments.observe.selection import leaf_modules, select_layers
from unit.observe.memory import no_selector_error


def test_order_is_of_the_first_sample_that_reached_a_layer_and_counts_are_of_samples() -> None:
    """Layers that never fired have no order and count zero."""
    model = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())
    catalog = Catalog(select_layers(model, leaf_modules(), no_selector_error))
    assert catalog.fired((1, 0), 0.0)
    catalog.fired((0, 1), 1.0)
    rows = [(record.layer, record.execution_order, record.fired) for record in catalog.records()]
    assert rows == [("0", 1, 2), ("1", 0, 2), ("2", None, 0)]


def test_it_is_told_again_for_a_new_layer_or_after_a_while() -> None:
    """Counts alone are told once a minute at most."""
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    catalog = Catalog(select_layers(model, leaf_modules(), no_selector_error))
    assert catalog.fired((0,), 0.0)
    assert not catalog.fired((0,), MIN_INTERVAL_S - 1)
    assert catalog.fired((0, 1), MIN_INTERVAL_S - 1)
    assert catalog.fired((0, 1), 2 * MIN_INTERVAL_S)


def test_a_layer_that_learns_its_parameters_is_told_anew() -> None:
    """Its type and counts are those that it has by then."""
    model = nn.Sequential(nn.LazyLinear(3))
    catalog = Catalog(select_layers(model, leaf_modules(), no_selector_error))
    assert catalog.fired((0,), 0.0)
    assert not catalog.fired((0,), 1.0)
    model(torch.ones(1, 2))
    assert catalog.fired((0,), 2.0)
    assert not catalog.fired((0,), 3.0)
    assert [(m.type, m.parameter_count, m.fired) for m in catalog.records()] == [("Linear", 9, 4)]


def test_a_renewed_catalog_keeps_what_is_known_by_place() -> None:
    """A layer that is gone stays with its counts; a new one comes last with none."""
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    catalog = Catalog(select_layers(model, leaf_modules(), no_selector_error))
    catalog.fired((1, 0), 0.0)
    assert catalog.places() == {"0": 0, "1": 1}
    kept, new = select_layers(nn.Sequential(nn.Tanh(), nn.Tanh()), leaf_modules(), no_selector_error)
    catalog.renew([kept, replace(new, name="2", index=2)])
    assert [(m.layer, m.type, m.expected, m.execution_order, m.fired) for m in catalog.records()] == [
        ("0", "Tanh", True, 1, 1),
        ("1", "ReLU", False, 0, 1),
        ("2", "Tanh", True, None, 0),
    ]
