"""What is known of a reducer before it is called."""

from collections.abc import Mapping
from functools import partial

import torch

from torchinstruments.statistics.contract import as_packed, known_metrics, reducer_name
from torchinstruments.statistics.profile import ExactProfile


class Declares:
    """A reducer that says what it will return."""

    metrics = ("a", "b")

    def __call__(self, _tensor: torch.Tensor) -> Mapping[str, int]:
        """Returns two scalars."""
        return {"a": 1, "b": 2}


def plain(tensor: torch.Tensor) -> Mapping[str, int]:
    """Returns one scalar."""
    return {"c": 3}


def test_declared_metrics_are_known() -> None:
    """An attribute counts, whether of the class or of the object; a text is not a sequence of names."""
    plain_with_text = partial(plain)
    plain_with_text.metrics = "abc"  # pyrefly: ignore
    assert known_metrics(Declares()) == ("a", "b")
    assert known_metrics(plain) == ()
    assert known_metrics(plain_with_text) == ()


def test_a_reducer_is_called_what_its_author_called_it() -> None:
    """A function by its name, an object by its class."""
    assert (reducer_name(plain), reducer_name(Declares()), reducer_name(partial(plain))) == (
        "plain",
        "Declares",
        "partial",
    )


def test_only_a_reducer_with_pack_stays_on_the_device() -> None:
    """The exact profile does; a plain function does not."""
    assert as_packed(ExactProfile())
    assert not as_packed(plain)
