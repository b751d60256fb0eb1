"""Whether a run has any value, and what is said where it has none."""

from dataclasses import replace

import pytest

from torchinstruments.records import KeptFrames, Sample
from torchinstruments.sinks.yields import Yield
from unit.store.material import forward, measurement, with_columns


def without_values(*reasons: str) -> Sample:
    """Returns a delivery whose numbers are all missing, one for each reason."""
    sample = forward(0, measurement())
    one = replace(
        sample.measurements[0],
        metrics=tuple(f"metric_{place}" for place in range(len(reasons))),
        values=(None,) * len(reasons),
        reasons=reasons,
    )
    return replace(sample, measurements=(one,))


def test_one_value_is_enough() -> None:
    """What comes before and after it may all be missing."""
    found = Yield()
    found.add(without_values("no_gradient"))
    assert found.emptiness()
    found.add(forward(0, measurement()))
    found.add(without_values("no_gradient"))
    assert found.emptiness() == ""


def test_one_value_among_columns_is_enough() -> None:
    """The same where a delivery has columns in place of objects."""
    found, frames = Yield(), KeptFrames()
    found.add(with_columns(without_values("no_gradient"), frames))
    assert found.emptiness().startswith("1 of 1 rows say 'no_gradient'")
    found.add(with_columns(forward(0, measurement(values=(None, None, 1.0))), frames))
    assert found.emptiness() == ""


def test_nothing_is_said_where_nothing_was_measured() -> None:
    """A run without samples has a sentence of its own."""
    assert Yield().emptiness() == ""


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (("empty",), "1 of 1 rows say 'empty': every tensor was empty"),
        (("empty", "no_gradient", "no_gradient"), "2 of 3 rows say 'no_gradient': no backward reached"),
        (("sharded",), "1 of 1 rows say 'sharded': docs/what-is-seen.md says"),
        (("reducer_error: ValueError: a", "reducer_error: ValueError: b"), "2 of 2 rows say 'reducer_error'"),
        (("mine: 1", "mine: 2"), "2 of 2 rows say 'a reason of its own'"),
    ],
)
def test_the_commonest_reason_is_named(reasons: tuple[str, ...], words: str) -> None:
    """By its code, with how many rows have it and what to do."""
    found = Yield()
    found.add(without_values(*reasons))
    assert found.emptiness().startswith(words)
