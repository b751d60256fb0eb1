"""What a tensor is, as one object for as long as it stays the same."""

import pytest

from torchinstruments.observe import observed
from torchinstruments.observe.observed import Kind, KnownObservations
from torchinstruments.records import Execution, Scope, Signal, Stage


def kind(number: int = 0, *, mode: str = "train") -> Kind:
    """Returns what an output of a layer is."""
    return Kind(
        layer=f"layer.{number}",
        layer_index=number,
        call_index=0,
        signal=Signal.OUTPUT,
        stage=Stage.NONE,
        tensor_path="output",
        mode=mode,
        grad_enabled=True,
        scope=Scope.LOCAL,
        replica_key="",
        execution=Execution.EAGER,
        dtype="float32",
        device="cpu",
    )


def test_the_same_tensor_is_the_same_object_again() -> None:
    """At the beginning, after what came before it the last time, and after something else."""
    known = KnownObservations()
    first = known.find(None, tuple(kind(0)), (2, 3), "")
    second = known.find(first, tuple(kind(1)), (2,), "")
    third = known.find(second, tuple(kind(2)), (2,), "")
    assert (first.kind, first.shape, first.reason) == (kind(0), (2, 3), "")
    assert known.find(None, tuple(kind(0)), (2, 3), "") is first
    assert known.find(first, tuple(kind(1)), (2,), "") is second
    assert known.find(first, tuple(kind(2)), (2,), "") is third
    assert known.find(third, tuple(kind(1)), (2,), "") is second
    assert (first.follower, third.follower) == (third, second)


def test_whatever_differs_makes_another_one() -> None:
    """A shape or a reason keeps the kind, and what follows upon it."""
    known = KnownObservations()
    first = known.find(None, kind(0), (2,), "")
    second = known.find(first, kind(1), (), "")
    wider = known.find(None, kind(0), (3,), "")
    missing = known.find(wider, kind(1), (), "empty")
    assert (wider.shape, missing.shape, missing.reason) == ((3,), (), "empty")
    assert wider.kind is first.kind
    assert missing.kind is second.kind
    assert (first.shape, second.reason) == ((2,), "")
    for field in Kind._fields:
        changed = ["another" if name == field else value for name, value in kind(1)._asdict().items()]
        other = known.find(first, tuple(changed), (), "")
        assert other not in (second, missing)
        assert getattr(other.kind, field) == "another"


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors without end, each called otherwise than all before, no more than so many are kept."""
    monkeypatch.setattr(observed, "_MAX_KINDS", 8)
    known = KnownObservations()
    before = None
    for number in range(100):
        before = known.find(before, kind(number), (number,), "")
        assert before.kind.layer_index == number
        assert len(known._by_kind) <= 8
