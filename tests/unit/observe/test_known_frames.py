"""Frames that are found again by the identity of observations."""

import pytest

from torchinstruments.observe import known_frames
from torchinstruments.observe.known_frames import KnownFrames
from torchinstruments.observe.observed import Observation
from torchinstruments.records import Signal, Stage
from unit.observe.test_observed import kind

METRICS = ("mean", "std")


def observations(*numbers: int, shape: tuple[int, ...] = (4,)) -> list[Observation]:
    """Returns new observations of layers."""
    return [Observation(kind(number), shape, "") for number in numbers]


def test_a_frame_says_what_its_tensors_are_of() -> None:
    """Each field has its place, with the traversal between them and the metrics behind."""
    gradient = kind(7)._replace(
        signal=Signal.PARAMETER_GRADIENT, stage=Stage.APPLIED, tensor_path="weight", replica_key="a part"
    )
    frame, shapes = KnownFrames().find([Observation(gradient, (4,), "")], [METRICS], 3)
    (described,) = frame.described
    assert {name: value for name, value in described._asdict().items() if name in gradient._fields} == {
        **gradient._asdict(),
        "stage": "applied",
    }
    assert type(described.stage) is str
    assert (described.backward_index, described.metrics, shapes) == (3, METRICS, [(4,)])


def test_the_same_observations_have_the_same_frame_and_shapes() -> None:
    """Whether they are the same objects or only equal ones, and in deliveries that take turns."""
    frames = KnownFrames()
    given = observations(0, 1, 2)
    frame, shapes = frames.find(given, [METRICS] * 3, 0)
    other, _ = frames.find(given[:2], [METRICS] * 2, 0)
    again = frames.find([*given], [METRICS] * 3, 0)
    equal = frames.find(observations(0, 1, 2), [METRICS] * 3, 0)
    assert other is not frame
    for found in (again, equal):
        assert found[0] is frame
        assert found[1] is shapes


def test_of_other_shapes_only_these_are_new() -> None:
    """The next delivery with them has them."""
    frames = KnownFrames()
    frame, _ = frames.find(observations(0, 1), [METRICS] * 2, 0)
    wider = observations(0, 1, shape=(5,))
    found, shapes = frames.find(wider, [METRICS] * 2, 0)
    assert (found is frame, shapes) == (True, [(5,)] * 2)
    assert frames.find(wider, [METRICS] * 2, 0)[1] is shapes
    assert frames.find(observations(0, 1), [METRICS] * 2, 0) == (frame, [(4,)] * 2)


def test_other_metrics_and_other_traversals_have_other_frames() -> None:
    """The observations being the same objects."""
    frames, given = KnownFrames(), observations(0, 1)
    frame, _ = frames.find(given, [METRICS] * 2, 0)
    fewer, _ = frames.find(given, [METRICS, ("mean",)], 0)
    later, _ = frames.find(given, [METRICS] * 2, 1)
    assert len({frame, fewer, later}) == 3
    assert (fewer.lengths, fewer.num_scalars) == ([2, 1], 3)
    assert [one.backward_index for one in later.described] == [1, 1]
    assert frames.find(given, [METRICS] * 2, 0)[0] is frame


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of deliveries that all differ the last few, of large ones the last."""
    frames = KnownFrames()
    for number in range(20):
        frames.find(observations(number), [METRICS], 0)
    assert [known.kinds[0].layer_index for known in frames._known] == [*range(19, 11, -1)]
    monkeypatch.setattr(known_frames, "_MAX_TENSORS", 5)
    large = observations(*range(6))
    frame, _ = frames.find(large, [METRICS] * 6, 0)
    assert len(frames._known) == 1
    assert frames.find(large, [METRICS] * 6, 0)[0] is frame
