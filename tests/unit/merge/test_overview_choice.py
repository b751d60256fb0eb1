"""What is chosen for pictures: bounded, evenly spread, and always with what went wrong."""

import numpy as np
import pytest

from torchinstruments.merge import overview_choice
from torchinstruments.merge.overview_choice import choose_pictured, notable_forwards, notable_ranks


def samples(number: int) -> np.ndarray:
    """Returns forwards of one generation, one an attempt."""
    return np.stack([np.zeros(number, np.int64), np.arange(number) * 3, np.zeros(number, np.int64)], axis=1)


def test_of_two_ranks_every_forward_has_both() -> None:
    """The forwards lie at equal distances from the first to the last; each is detailed."""
    found = choose_pictured(samples(5000), {"std": 100}, [0, 1], [], [])
    attempts = [one[1] for one in found.moments]
    assert len(attempts) == overview_choice.MAX_FORWARDS
    assert (attempts[0], attempts[-1]) == (0, 4999 * 3)
    assert set(np.diff(attempts)) <= {72, 75, 78}
    assert found.detailed == set(found.moments)
    assert (found.ranks, found.group_ranks, found.metrics) == ((0, 1), 1, None)


@pytest.mark.parametrize("layers", [10, 100, 900, 50_000])
def test_the_numbers_are_bounded_for_many_ranks_and_layers(layers: int) -> None:
    """Forwards, ranks and statistics get fewer, so that rows times numbers stay within the bound."""
    metrics = dict.fromkeys(("mean", "std", "p25", "nonfinite_fraction"), 2 * layers)
    found = choose_pictured(samples(1000), metrics, range(1024), [700], [])
    kept = set(metrics) if found.metrics is None else found.metrics
    rows = min(sum(metrics[one] for one in kept), found.max_rows)
    numbers = rows * (len(found.moments) * (6 + len(found.ranks)) + len(found.detailed) * 64)
    assert numbers <= 1.01 * overview_choice.MAX_NUMBERS
    assert "std" in kept
    assert found.group_ranks == 16
    assert {0, 700, 1023} <= set(found.ranks)
    assert len(found.ranks) == overview_choice.MAX_LINES


def test_what_went_wrong_is_always_there() -> None:
    """A forward that is named is chosen; where it was not measured, the next one of its generation is."""
    found = choose_pictured(
        samples(5000), {"std": 9000}, range(100), [], [(0, 301, 0), (0, 303, 0), (7, 1, 0)]
    )
    assert {(0, 303, 0)} <= found.detailed
    assert {(0, 303, 0)} <= set(found.moments)


def test_nothing_to_choose_from_is_no_error() -> None:
    """A run without a sample has an empty choice."""
    found = choose_pictured(samples(0), {}, [], [], [(0, 1, 0)])
    assert found.moments == ()
    assert not found.between((0, 0, 0), (9, 9, 9))


def test_notable_are_those_that_the_result_speaks_of() -> None:
    """Ranks of the first nonfinite value come first, then the fewest of a split, late ones, and extrema."""
    sections = {
        "first_nonfinite": {"first": {"generation": 0, "attempt": None, "forward_index": 8, "ranks": "5"}},
        "steps": {
            "first_disagreement": {
                "generation": 0,
                "attempt": 4,
                "differences": [{"values": [{"ranks": "7"}, {"ranks": "0-6"}]}],
            }
        },
        "replicas": {"first_divergence": None},
        "own_work": {"generations": [{"late_ranks": "2"}]},
    }
    assert notable_ranks(sections, [7, 1]) == [5, 7, 2, 1]
    assert notable_forwards(sections) == [(0, -1, 8), (0, 4, 0)]
