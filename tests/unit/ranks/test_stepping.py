"""Ordinals of optimizers, and the step that runs."""

from torchinstruments.ranks.stepping import OptimizerOrdinals, RunningStep


def test_optimizers_are_numbered_in_the_order_of_first_sight_and_their_tries_from_0():
    """A forgotten key is a new optimizer."""
    ordinals = OptimizerOrdinals()
    assert [ordinals.next_attempt(key) for key in (9, 4, 9)] == [(0, 0), (1, 0), (0, 1)]
    ordinals.forget(9)
    ordinals.forget(123)
    assert [ordinals.next_attempt(key) for key in (9, 4)] == [(2, 0), (1, 1)]


def test_a_step_ends_after_those_inside_it():
    """The end of a nested one takes along those inside it that never said so."""
    running = RunningStep(1, 0.0, in_backward=False)
    running.nested += [2, 1, 3]
    assert running.knows(1)
    assert running.knows(3)
    assert not running.knows(7)
    assert running.ends_nested(1)
    assert running.nested == [2]
    assert running.ends_nested(2)
    assert not running.ends_nested(1)
