"""What one thread has observed, side by side."""

from collections.abc import Iterable
from typing import Self

import pytest
from typing_extensions import override

from torchinstruments.observe.observed import KnownObservations, Observation
from torchinstruments.observe.part import Part
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.reducers import default_reducers
from unit.observe.test_observed import kind


def part(known: KnownObservations) -> Part:
    """Returns an empty one."""
    return Part(ScalarBatch(default_reducers(), lambda *_: None), known)


def rows(given: Part) -> list[tuple[int, int, int]]:
    """Returns layer, time and index of each observation."""
    layers = [one.kind.layer_index for one in given.observations]
    assert len(given.timestamps_us) == len(given.indices) == len(layers)
    return [*zip(layers, given.timestamps_us, given.indices, strict=True)]


def test_observations_of_one_sample_are_those_of_the_next() -> None:
    """Where nothing has changed they are the same objects; times and indices are those of the moment."""
    known = KnownObservations()
    first, second = part(known), part(known)
    for number in range(4):
        first.add(tuple(kind(number)), (4,), "", 10 + number, number)
        second.add(tuple(kind(number)), (4,) if number else (5,), "", 20 + number, 3 - number)
    assert first.observations[1:] == second.observations[1:]
    assert (first.observations[0].shape, second.observations[0].shape) == ((4,), (5,))
    assert rows(first) == [(0, 10, 0), (1, 11, 1), (2, 12, 2), (3, 13, 3)]
    assert rows(second) == [(0, 20, 3), (1, 21, 2), (2, 22, 1), (3, 23, 0)]


def test_the_last_one_takes_the_place_of_an_earlier_one() -> None:
    """With its time and its index."""
    given = part(KnownObservations())
    for number in range(3):
        given.add(kind(number), (4,), "", 10 + number, number)
    given.move_last_to(0)
    assert rows(given) == [(2, 12, 2), (1, 11, 1)]


def test_an_interrupt_leaves_no_time_at_the_wrong_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was half taken is gone with the next observation."""
    given = part(KnownObservations())
    given.add(kind(0), (4,), "", 10, 0)

    class Interrupted(list[Observation]):
        @override
        def __iadd__(self, those: Iterable[Observation]) -> Self:
            raise KeyboardInterrupt(those)

    whole = given.observations
    monkeypatch.setattr(given, "observations", Interrupted(whole))
    with pytest.raises(KeyboardInterrupt):
        given.add(kind(1), (4,), "", 11, 1)
    monkeypatch.setattr(given, "observations", whole)
    given.add(kind(2), (4,), "", 12, 2)
    assert rows(given) == [(0, 10, 0), (2, 12, 2)]
