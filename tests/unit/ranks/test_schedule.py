"""Plans of forwards that lie ahead: heard in time by whoever looks, at the pace of the planner's clock."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.ranks.schedule import (
    MAX_TARGETS,
    News,
    Plan,
    Planner,
    Progress,
    ScheduleListener,
    Unit,
    decode_news,
)


def progress_at(now_s: float, pace_s: float, *, optimizer: bool = True, start_s: float = 0.0) -> Progress:
    """Returns how far a rank has come that runs an attempt of two micro-batches every `pace_s`."""
    attempt = math.floor((now_s - start_s) / pace_s)
    return Progress(attempt, 2 * attempt + 1, 2 * attempt + 1, optimizer, start_s)


def plans_of(planner: Planner, pace_s: float, end_s: float, look_s: float) -> list[tuple[float, Plan]]:
    """Has a planner look at a steady rank; returns each plan with its moment."""
    found = []
    for look in range(1, math.floor(end_s / look_s)):
        now_s = look * look_s
        plan = planner.look(now_s, progress_at(now_s, pace_s))
        if plan is not None:
            found.append((now_s, plan))
    return found


def test_a_minute_at_a_steady_pace_is_met_within_seconds() -> None:
    """One target an interval, each a little after its deadline, told at least the lead ahead."""
    planner = Planner(interval_s=60.0, lead_s=12.0, look_s=5.0)
    found = plans_of(planner, pace_s=0.5, end_s=600.0, look_s=5.0)
    targets = [target for _, plan in found for target in plan.targets]
    assert [plan.unit for _, plan in found] == [Unit.ATTEMPT] * len(found)
    assert len(targets) == 10
    for number, target in enumerate(targets, start=1):
        assert 0 <= target * 0.5 - number * 60.0 < 2.0
    for told_s, plan in found:
        assert plan.targets[0] * 0.5 >= told_s + 12.0


@given(
    pace_s=st.floats(0.002, 100.0),
    interval_s=st.floats(0.05, 300.0),
    look_s=st.floats(0.25, 5.0),
)
@settings(max_examples=60, deadline=None)
def test_no_target_is_nearer_than_the_lead(pace_s: float, interval_s: float, look_s: float) -> None:
    """Whatever the pace: targets ascend, come once, are bounded, and begin a lead after they were told."""
    lead_s = 2.4 * look_s
    planner = Planner(interval_s=interval_s, lead_s=lead_s, look_s=look_s)
    found = plans_of(planner, pace_s, 60 * look_s, look_s)
    targets = [target for _, plan in found for target in plan.targets]
    assert len(targets) == len(set(targets))
    assert len(targets) <= 60 * look_s / interval_s + 1
    end = 0
    for told_s, plan in found:
        assert plan.first == end
        end = plan.end
        assert 0 < len(plan.targets) <= MAX_TARGETS
        assert list(plan.targets) == sorted(plan.targets)
        if pace_s <= look_s:
            # One attempt of slack: a count of whole attempts tells no pace finer than that.
            assert plan.targets[0] * pace_s >= told_s + lead_s - pace_s
        assert plan.targets[0] >= progress_at(told_s, pace_s).attempt + 2


def test_the_unit_is_the_best_that_the_rank_has_seen() -> None:
    """Attempts where an optimizer steps, else training forwards, else root forwards."""
    known = progress_at(10.0, 1.0)
    assert known.unit is Unit.ATTEMPT
    assert replace(known, counts_attempts=False).unit is Unit.TRAINING_FORWARD
    assert replace(known, training_forward=-1).unit is Unit.FORWARD
    assert [known.ordinal(unit) for unit in Unit] == [10, 21, 21]


def test_nothing_is_planned_before_the_first_forward_or_of_an_unknown_pace() -> None:
    """One look tells where a rank stands, and only two tell how fast it is."""
    planner = Planner(interval_s=1.0, lead_s=2.0, look_s=1.0)
    assert planner.look(0.0, None) is None
    assert planner.look(5.0, progress_at(5.0, 0.1)) is None
    assert planner.look(6.0, progress_at(6.0, 0.1)) is not None


def test_a_pause_does_not_make_the_pace_forgotten() -> None:
    """After an hour without a training forward the next target still lies a lead ahead at the old pace."""
    planner = Planner(interval_s=60.0, lead_s=12.0, look_s=5.0)
    for look in range(8):
        planner.look(5.0 * look, progress_at(5.0 * look, 0.1))
    stands = progress_at(35.0, 0.1)
    told = [planner.look(40.0 + 5.0 * look, stands) for look in range(720)]
    targets = {target for plan in told if plan is not None for target in plan.targets}
    assert min(targets) > stands.attempt + 120
    # The deadlines that pass meanwhile do not pile up: all of them would be met at the same moments.
    assert len(targets) < 70


def test_deadlines_that_passed_are_made_up_for_once() -> None:
    """A rank that stood for ten intervals gets one target, not ten."""
    planner = Planner(interval_s=1.0, lead_s=0.5, look_s=0.25)
    planner.look(0.0, progress_at(0.0, 0.01))
    planner.look(0.25, progress_at(0.25, 0.01))
    plan = planner.look(10.1, progress_at(10.1, 0.01))
    assert plan is not None
    assert len(plan.targets) == 1


def test_news_come_back_as_they_were_written() -> None:
    """And what is no news is None, or lacks the plans that cannot be read."""
    news = News(3, 40, (Plan(0, Unit.ATTEMPT, (7, 9)), Plan(2, Unit.FORWARD, (100,))), ended=True)
    assert decode_news(news.encode()) == news
    for raw in (
        None,
        b"",
        b"[]",
        b'{"beat": 1}',
        b'{"beat": "x", "forwards": 1, "plans": [], "ended": false}',
    ):
        assert decode_news(raw) is None
    broken = (
        b'{"beat": 1, "forwards": 2, "plans": [{"first": 0, "unit": "day", "targets": [1]}], "ended": false}'
    )
    assert decode_news(broken) == News(1, 2)


def test_a_listener_takes_each_plan_once_and_counts_those_that_it_never_saw() -> None:
    """A look that comes late finds the newest plans; how many targets stood in the others is known."""
    listener = ScheduleListener(now_s=0.0, patience_s=90.0)
    first, second, third = (Plan(start, Unit.ATTEMPT, (10 + start, 11 + start)) for start in (0, 2, 4))
    heard = listener.hear(1.0, News(1, 5, (first,)).encode(), 5)
    assert (heard.plans, heard.num_lost, heard.is_led) == ((first,), 0, True)
    assert listener.hear(2.0, News(1, 5, (first,)).encode(), 6).plans == ()
    heard = listener.hear(3.0, News(3, 9, (third,)).encode(), 9)
    assert (heard.plans, heard.num_lost) == ((third,), 2)
    assert listener.hear(4.0, News(2, 9, (second,)).encode(), 9).plans == ()


def test_a_listener_whose_planner_is_silent_goes_by_its_own_time_and_comes_back() -> None:
    """Silence counts from the last new beat; an end counts at once."""
    listener = ScheduleListener(now_s=0.0, patience_s=90.0)
    assert listener.hear(89.0, None, 1).is_led
    assert not listener.hear(90.0, None, 2).is_led
    assert listener.hear(95.0, News(1, 2).encode(), 3).is_led
    assert not listener.hear(185.0, News(1, 2).encode(), 9).is_led
    assert listener.hear(190.0, News(2, 3).encode(), 9).is_led
    assert not listener.hear(191.0, News(3, 3, ended=True).encode(), 9).is_led


def test_a_planner_that_stands_while_this_rank_runs_leads_nobody() -> None:
    """Its thread beats, but its model is never called; a rank that stands too goes on waiting."""
    listener = ScheduleListener(now_s=0.0, patience_s=90.0)
    running = [listener.hear(30.0 * beat, News(beat, 0).encode(), own_forwards=beat) for beat in range(1, 7)]
    assert [heard.is_led for heard in running] == [True, True, False, False, False, False]
    waiting = ScheduleListener(now_s=0.0, patience_s=90.0)
    standing = [waiting.hear(30.0 * beat, News(beat, 4).encode(), own_forwards=5) for beat in range(1, 7)]
    assert all(heard.is_led for heard in standing)


@pytest.mark.parametrize("jitter", [0.0, 0.2])
@given(pace_s=st.floats(0.01, 20.0), delay_s=st.floats(-0.05, 0.05), phase=st.floats(0.0, 1.0))
@settings(max_examples=25, deadline=None)
def test_a_listener_50_ms_apart_always_hears_in_time(
    jitter: float, pace_s: float, delay_s: float, phase: float
) -> None:
    """At the slowest jitter and any phase, every target still lies ahead of a listener that hears of it."""
    planner = Planner(interval_s=60.0, lead_s=12.0, look_s=5.0)
    listener = ScheduleListener(now_s=0.0, patience_s=90.0)
    look_s = 5.0 * (1 + jitter)
    next_look_s, raw = 0.1 + phase * look_s, None
    for look in range(1, 120):
        now_s = 5.0 * look
        while next_look_s < now_s:
            own = progress_at(next_look_s, pace_s, start_s=delay_s)
            heard = listener.hear(next_look_s, raw, own.forward)
            assert heard.num_lost == 0
            for plan in heard.plans:
                assert plan.targets[0] > own.attempt
            next_look_s += look_s
        if planner.look(now_s, progress_at(now_s, pace_s)) is not None:
            raw = planner.news(progress_at(now_s, pace_s)).encode()
