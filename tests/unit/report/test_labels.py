"""Names in pictures: short where they can be, and one for an output and its gradient."""

import pytest

from torchinstruments.report.labels import (
    forward_label,
    label_text,
    layer_label,
    signal_label,
    stretch_labels,
)

ROW = {
    "layer": "fc",
    "call_index": 0,
    "tensor_path": "output",
    "scope": "local",
    "signal": "output",
    "stage": "",
    "mode": "train",
    "backward_index": 0,
    "generation": 2,
    "attempt": 7,
    "forward_in_attempt": 0,
    "forward_index": None,
}


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "fc"),
        ({"layer": ""}, "(root)"),
        ({"tensor_path": "grad_output"}, "fc"),
        ({"tensor_path": "grad_output.0"}, "fc"),
        ({"tensor_path": "grad_output.logits"}, "fc output.logits"),
        ({"tensor_path": "weight", "scope": "local_shard"}, "fc weight (part)"),
        ({"call_index": 1}, "fc call 1"),
    ],
)
def test_a_layer_is_named_shortly(changes: dict[str, object], label: str) -> None:
    """What says nothing is left out."""
    assert layer_label(ROW | changes) == label


def test_signals_and_forwards_say_what_is_not_usual() -> None:
    """A stage, an evaluation, a later traversal, a generation and a forward in its attempt."""
    assert signal_label(ROW) == "output"
    changed = ROW | {"signal": "parameter_gradient", "stage": "reduced", "mode": "eval", "backward_index": 1}
    assert signal_label(changed) == "parameter_gradient reduced, eval, traversal 1"
    assert forward_label(ROW, names_generation=False) == "attempt 7"
    changed = ROW | {"forward_in_attempt": 3}
    assert forward_label(changed, names_generation=True) == "generation 2, attempt 7, forward 3"
    changed = ROW | {"attempt": None, "forward_in_attempt": None, "forward_index": 5}
    assert forward_label(changed, names_generation=False) == "forward 5"


def test_stretches_name_the_generation_where_there_are_several() -> None:
    """A stretch of one attempt is its number."""
    assert stretch_labels([(0, 0, 0), (0, 4, 7)]) == ["0", "4-7"]
    assert stretch_labels([(0, 0, 3), (1, 0, 3)]) == ["g0: 0-3", "g1: 0-3"]


def test_a_label_is_one_line_without_markup() -> None:
    """Plotly reads labels as markup."""
    assert label_text("<b>a</b>\n&") == "&lt;b&gt;a&lt;/b&gt;\\n&amp;"
    assert len(label_text("x" * 5000)) < 200
