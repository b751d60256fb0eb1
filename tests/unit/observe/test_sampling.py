"""Samplers choose forwards by what they are told, and refuse settings that cannot work."""

import itertools
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.sampling import (
    AlwaysSampler,
    EveryNForwardsSampler,
    EveryNStepsSampler,
    SamplingEvent,
    TimedSampler,
    describe,
    is_own,
    validate_sampler,
)


def event(
    index: int = 0, *, attempt: int | None = 0, grad_enabled: bool = True, monotonic_s: float = 0.0
) -> SamplingEvent:
    """A forward that is about to run."""
    return SamplingEvent(attempt, index, index if grad_enabled else None, index, grad_enabled, monotonic_s)


def test_always_sampler_chooses_every_forward() -> None:
    """Training and evaluation forwards alike are chosen."""
    sampler = AlwaysSampler()
    assert all(sampler.should_sample(event(i, grad_enabled=bool(i % 2))) for i in range(5))


def test_every_n_forwards_counts_all_root_forwards_from_the_first() -> None:
    """With n=3 the forwards of index 2 and 5 are chosen."""
    sampler = EveryNForwardsSampler(3)
    chosen = [sampler.should_sample(event(i)) for i in range(7)]
    assert chosen == [False, False, True, False, False, True, False]


def test_every_n_steps_chooses_all_micro_batches_of_an_attempt_and_no_evaluation() -> None:
    """With n=2 the grad-enabled forwards of attempts 1 and 3 are chosen."""
    sampler = EveryNStepsSampler(2)
    assert [sampler.should_sample(event(attempt=a)) for a in (0, 0, 1, 1, 2, 3)] == [
        False,
        False,
        True,
        True,
        False,
        True,
    ]
    assert not sampler.should_sample(event(attempt=1, grad_enabled=False))
    assert not sampler.should_sample(event(attempt=None, grad_enabled=False))


def test_timed_sampler_waits_until_each_deadline() -> None:
    """An interval of 10 that starts at 100 chooses at 110 and 120, not a tenth before."""
    sampler = TimedSampler(timedelta(seconds=10))
    chosen = [sampler.should_sample(event(monotonic_s=t)) for t in (100.0, 109.9, 110.0, 110.1, 119.9, 120.0)]
    assert chosen == [False, False, True, False, False, True]


@given(
    interval_s=st.integers(1, 60),
    gaps_s=st.lists(st.integers(0, 200), min_size=1, max_size=50),
)
def test_timed_sampler_chooses_the_first_forward_of_each_interval_that_has_one(
    interval_s: int, gaps_s: list[int]
) -> None:
    """Whatever the pace, that is one sample for each later interval of the grid with a forward in it."""
    sampler = TimedSampler(timedelta(seconds=interval_s))
    times_s = list(itertools.accumulate(gaps_s, initial=1_000))
    chosen = [t for t in times_s if sampler.should_sample(event(monotonic_s=float(t)))]
    first_of_interval: dict[int, int] = {}
    for time_s in times_s:
        first_of_interval.setdefault((time_s - 1_000) // interval_s, time_s)
    assert chosen == [t for interval, t in first_of_interval.items() if interval > 0]


def test_timed_sampler_may_choose_the_first_forward_at_once() -> None:
    """With immediate=True the first forward is chosen and the next one an interval later."""
    sampler = TimedSampler(timedelta(seconds=10), immediate=True)
    assert [sampler.should_sample(event(monotonic_s=t)) for t in (5.0, 6.0, 15.0)] == [True, False, True]


def test_timed_sampler_makes_up_once_for_a_long_pause() -> None:
    """Ten intervals without a forward lead to one sample, and the next lies on the old grid."""
    sampler = TimedSampler(timedelta(seconds=10))
    chosen = [sampler.should_sample(event(monotonic_s=t)) for t in (100.0, 203.0, 203.1, 209.9, 210.0)]
    assert chosen == [False, True, False, False, True]


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "3", None])
@pytest.mark.parametrize("sampler", [EveryNForwardsSampler, EveryNStepsSampler])
def test_a_count_that_is_no_positive_whole_number_is_refused(sampler: Any, n: Any) -> None:
    """The message names the sampler and the value."""
    with pytest.raises(ConfigurationError, match=rf"{sampler.__name__}\({n!r}\)"):
        sampler(n)


@pytest.mark.parametrize("interval", [timedelta(0), timedelta(seconds=-1), 60, "1m"])
def test_an_interval_that_is_no_positive_timedelta_is_refused(interval: Any) -> None:
    """The message says what to give instead."""
    with pytest.raises(ConfigurationError, match="give a timedelta of more than zero"):
        TimedSampler(interval)


def test_immediate_has_to_be_a_bool() -> None:
    """A truthy text is refused by name."""
    wrong: Any = "yes"
    with pytest.raises(ConfigurationError, match="immediate='yes'"):
        TimedSampler(immediate=wrong)


def test_samplers_are_described_by_type_and_settings() -> None:
    """What run.json says of each sampler is plain JSON."""
    assert describe(AlwaysSampler()) == {"type": "always", "settings": {}}
    assert describe(EveryNForwardsSampler(3)) == {"type": "every_n_forwards", "settings": {"n": 3}}
    assert describe(EveryNStepsSampler(4)) == {"type": "every_n_steps", "settings": {"n": 4}}
    assert describe(TimedSampler(timedelta(seconds=90))) == {
        "type": "timed",
        "settings": {"interval_s": 90.0, "immediate": False},
    }


def test_a_sampler_of_ones_own_is_described_by_class_name_and_dataclass_fields() -> None:
    """Values that JSON has no form for become text."""

    @dataclass
    class Mine:
        every: int
        limit: float = float("nan")

        def should_sample(self, event: SamplingEvent) -> bool:
            return event.forward_index % self.every == 0

    class Plain:
        def should_sample(self, event: SamplingEvent) -> bool:
            return event.grad_enabled

    assert describe(Mine(7)) == {"type": "Mine", "settings": {"every": 7, "limit": "nan"}}
    assert describe(Plain()) == {"type": "Plain", "settings": {}}


def test_what_cannot_be_asked_is_no_sampler() -> None:
    """An object without should_sample and a class instead of an instance are refused."""
    wrong: Any = 5
    with pytest.raises(ConfigurationError, match="should_sample"):
        validate_sampler(wrong)
    a_class: Any = AlwaysSampler
    with pytest.raises(ConfigurationError, match="give an instance"):
        validate_sampler(a_class)
    sampler = AlwaysSampler()
    assert validate_sampler(sampler) is sampler


def test_settings_of_a_sampler_can_be_stored_whatever_they_are() -> None:
    """Text that is not UTF-8 is escaped, and what has no text goes by its type."""

    class NoText:
        @override
        def __repr__(self) -> str:
            raise ValueError("no text")

    @dataclass
    class Mine:
        name: str = "a\udc80"
        thing: object = field(default_factory=NoText)

        def should_sample(self, event: SamplingEvent) -> bool:
            return event.grad_enabled

    assert describe(Mine()) == {"type": "Mine", "settings": {"name": "a\\udc80", "thing": "NoText"}}


def test_a_subclass_of_a_sampler_is_the_programs_own() -> None:
    """What it does besides is not known."""

    class Mine(AlwaysSampler):
        pass

    assert is_own(AlwaysSampler())
    assert not is_own(Mine())
