"""Meeting planned forwards: measured in time, missed where they were heard of too late; alone it is local."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.observe import aligned
from torchinstruments.observe.aligned import AlignedSampler, Due, Place
from torchinstruments.observe.sampling import TimedSampler
from torchinstruments.ranks.schedule import Plan, Progress, Unit
from torchinstruments.records import Position, StepProvenance


class Loop:
    """A training loop of two micro-batches an attempt and an evaluation forward after them."""

    def __init__(self, sampler: AlignedSampler, *, optimizer: bool = True, step_s: float = 1.0) -> None:
        self.sampler = sampler
        self.provenance = StepProvenance.INFERRED if optimizer else StepProvenance.NONE
        self.optimizer = optimizer
        self.forward = 0
        self.micro_batch = 0
        self.step_s = step_s
        self.dues: list[tuple[Position, Due]] = []

    def run(self, num_forwards: int, *, paused: bool = False) -> None:
        """Runs forwards: training, training, evaluation, over and over."""
        for _ in range(num_forwards):
            place = self.forward % 3
            attempt, ordinal = (self.forward // 3, place) if self.optimizer else (0, self.forward)
            grad = place < 2
            micro = (place if self.optimizer else self.micro_batch) if grad else None
            self.micro_batch += grad
            position = Position(attempt, ordinal, micro, self.forward, grad, self.provenance)
            due = self.sampler.forward_started(
                position, started_at_us=self.forward, now_s=self.forward * self.step_s, is_paused=paused
            )
            self.dues.append((position, due))
            self.forward += 1

    @property
    def measured(self) -> list[int]:
        """Forwards that were measured."""
        return [position.forward_index for position, due in self.dues if due.sample]

    @property
    def missed(self) -> list[Position]:
        """Positions that were missed, in the order in which that was found out."""
        return [place.position for _, due in self.dues for place in due.missed]


def make(interval_s: float = 1000.0, *, immediate: bool = False) -> AlignedSampler:
    """Returns a sampler that has not heard anything."""
    return AlignedSampler(TimedSampler(timedelta(seconds=interval_s), immediate=immediate))


def test_each_unit_names_its_own_forward() -> None:
    """Attempt 4 is met at its first micro-batch, training forward 11 and root forward 20 where they are."""
    sampler = make()
    sampler.take(
        [Plan(0, Unit.ATTEMPT, (4,)), Plan(1, Unit.FORWARD, (20,)), Plan(2, Unit.TRAINING_FORWARD, (11,))]
    )
    loop = Loop(sampler)
    loop.run(30)
    assert loop.measured == [12, 16, 20]
    assert loop.missed == []


def test_without_an_optimizer_training_forwards_are_counted() -> None:
    """Everything is attempt 0 then, and the ordinal leaves evaluation out."""
    sampler = make()
    sampler.take([Plan(0, Unit.TRAINING_FORWARD, (5,))])
    loop = Loop(sampler, optimizer=False)
    loop.run(12)
    assert loop.measured == [7]
    assert sampler.progress == Progress(0, 7, 11, False, 0.0)


def test_what_is_heard_too_late_is_missed_where_it_was() -> None:
    """The forward that the others measured, with its own place and time."""
    sampler = make()
    loop = Loop(sampler)
    loop.run(10)
    sampler.take(
        [Plan(0, Unit.ATTEMPT, (1, 3, 4)), Plan(3, Unit.FORWARD, (2,)), Plan(4, Unit.TRAINING_FORWARD, (3,))]
    )
    loop.run(5)
    assert loop.measured == [12]
    assert [position.forward_index for position in loop.missed] == [3, 9, 2, 4]
    assert [place.started_at_us for _, due in loop.dues for place in due.missed] == [3, 9, 2, 4]


def test_what_is_heard_after_the_last_forward_is_missed_at_the_end() -> None:
    """And what never came about is not."""
    sampler = make()
    Loop(sampler).run(10)
    sampler.take([Plan(0, Unit.ATTEMPT, (2, 50))], num_lost=3)
    assert sampler.finish() == Due(
        False, (Place(Position(2, 0, 0, 6, True, StepProvenance.INFERRED), 6),), num_lost=3
    )
    assert sampler.finish() == Due(False)


def test_what_lies_too_far_back_is_counted_without_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded; so are plans that nobody takes."""
    monkeypatch.setattr(aligned, "MAX_REMEMBERED", 6)
    sampler = make()
    loop = Loop(sampler)
    loop.run(30)
    sampler.take([Plan(0, Unit.ATTEMPT, (1, 9))])
    sampler.take([Plan(number, Unit.ATTEMPT, (900 + number,)) for number in range(2, 102)])
    loop.run(1)
    due = loop.dues[-1][1]
    assert [place.position.attempt for place in due.missed] == []
    assert due.num_lost == 2 + 36
    assert len(sampler._untaken) == 0


def test_a_planned_forward_in_a_pause_is_missed() -> None:
    """Other ranks measure it; the next forward is not taken in its place."""
    sampler = make()
    sampler.take([Plan(0, Unit.ATTEMPT, (2,))])
    loop = Loop(sampler)
    loop.run(9, paused=True)
    loop.run(9)
    assert loop.measured == []
    assert [position.attempt for position in loop.missed] == [2]


def test_alone_a_pause_uses_no_interval_up() -> None:
    """What fell due in the pause is made up for after it, once."""
    sampler = make(10.0)
    sampler.go_alone()
    loop = Loop(sampler)
    loop.run(5)
    loop.run(20, paused=True)
    loop.run(10)
    assert loop.measured == [25, 30]
    assert loop.missed == []


@pytest.mark.parametrize("immediate", [False, True])
def test_at_once_means_the_first_forward_of_all(immediate: bool) -> None:
    """Its place needs no word between the ranks."""
    loop = Loop(make(immediate=immediate))
    loop.run(9)
    assert loop.measured == ([0] if immediate else [])


def test_alone_it_is_the_callers_sampler() -> None:
    """The interval counts from the first forward, though it was settled later who is there."""
    sampler = make(10.0, immediate=True)
    loop = Loop(sampler)
    loop.run(25)
    assert loop.measured == [0]
    sampler.go_alone()
    loop.run(25)
    alone = TimedSampler(timedelta(seconds=10), immediate=True)
    assert loop.measured == [0, 25, 30, 40]
    assert alone.interval == timedelta(seconds=sampler.interval_s)


def test_a_rank_that_lost_its_planner_waits_an_interval_of_its_own_and_can_be_led_again() -> None:
    """So the last forward before the end is not measured on the ranks that outlive the planner."""
    sampler = make(10.0)
    loop = Loop(sampler)
    loop.run(35)
    sampler.follow(is_led=False)
    loop.run(15)
    assert loop.measured == [45]
    sampler.follow(is_led=True)
    sampler.take([Plan(0, Unit.FORWARD, (90,))])
    loop.run(50)
    assert loop.measured == [45, 90]


@given(
    targets=st.lists(st.integers(0, 60), unique=True, max_size=20).map(sorted),
    heard_at=st.integers(0, 200),
    unit=st.sampled_from(Unit),
)
@settings(max_examples=80, deadline=None)
def test_every_target_that_came_about_is_measured_or_missed_once(
    targets: list[int], heard_at: int, unit: Unit
) -> None:
    """At the same forward on a rank that heard in time and on one that did not."""
    prompt, late = make(), make()
    loops = [Loop(prompt), Loop(late)]
    if targets:
        prompt.take([Plan(0, unit, tuple(targets))])
    loops[1].run(heard_at)
    if targets:
        late.take([Plan(0, unit, tuple(targets))])
    for loop in loops:
        loop.run(210 - loop.forward)
    assert loops[0].missed == []
    missed = [position.forward_index for position in loops[1].missed]
    assert sorted(loops[1].measured + missed) == loops[0].measured
    assert all(forward < heard_at for forward in missed)
    assert len(loops[0].measured) == len(targets)
