"""Names of values in loggers."""

import pytest

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Signal
from torchinstruments.sinks.tags import checked_prefix, quoted, tensor_tag


def test_a_tag_names_layer_call_and_tensor() -> None:
    """As in the documentation."""
    tag = tensor_tag("p", "encoder.projection", 3, "output.logits", 0)
    assert tag == "p/modules/encoder.projection/call_3/output.logits"


def test_the_root_has_a_name_that_no_layer_can_have() -> None:
    """A layer that is called so is quoted."""
    assert tensor_tag("p", "", 0, "output", 0) == "p/modules/@root/call_0/output"
    assert tensor_tag("p", "@root", 0, "output", 0) == "p/modules/%40root/call_0/output"


def test_a_later_traversal_has_a_series_of_its_own() -> None:
    """The second backward of a graph does not run into the first."""
    assert tensor_tag("p", "a", 0, "grad_output", 2) == "p/modules/a/call_0/grad_output/backward_2"


def test_parameters_have_no_calls_and_their_gradients_have_moments() -> None:
    """One that is named like an output is no output, and no stage runs into another."""
    assert tensor_tag("p", "a", 0, "output", 0, Signal.PARAMETER) == "p/modules/a/parameters/output"
    tags = [
        tensor_tag("p", "a", 0, "weight", 1, Signal.PARAMETER_GRADIENT, stage)
        for stage in ("local_accumulated", "reduced")
    ]
    assert tags == [
        "p/modules/a/parameter_gradients/weight/local_accumulated/backward_1",
        "p/modules/a/parameter_gradients/weight/reduced/backward_1",
    ]


def test_segments_are_percent_quoted() -> None:
    """A slash makes no folder, and letters beyond ASCII stay readable to every reader."""
    assert quoted("a/b c") == "a%2Fb%20c"
    assert quoted("Ab9._-") == "Ab9._-"
    assert quoted("ä") == "%C3%A4"


def test_blanks_and_slashes_around_a_prefix_are_left_out() -> None:
    """What is inside it stays."""
    assert checked_prefix(" /runs/a/ ") == "runs/a"


@pytest.mark.parametrize("prefix", ["", "  ", "/", " // ", None, 3])
def test_an_empty_prefix_is_refused(prefix: object) -> None:
    """The message holds what was given."""
    with pytest.raises(ConfigurationError, match="prefix="):
        checked_prefix(prefix)
