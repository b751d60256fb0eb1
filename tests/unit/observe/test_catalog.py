"""The catalog knows when a layer was first called and how often it was seen."""

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
