"""One hook in place of many, as long as it tells of every backward."""

import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from checks.training import batch, mlp, scaler, train
from torchinstruments.checks import ChecksSession
from torchinstruments.checks.lookout import STREAK, Lookout

LONG = STREAK + 3
"""Steps after which one hook is enough."""


def _hooked(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that have a hook."""
    return [name for name, one in model.named_parameters() if one._post_accumulate_grad_hooks]


def _missed(session: ChecksSession) -> list[str]:
    return [one.reason.split(":")[0] for one in session.report().unavailable if one.check == "backwards"]


def _learnt(tasks: range = range(STREAK + 2)) -> Lookout:
    """Returns a lookout that has heard of backwards that were alike, each with a step."""
    lookout = Lookout()
    for number, task in enumerate(tasks):
        lookout.began(task, 7, is_whole=number > 0)
        lookout.stepped(number)
    return lookout


def test_one_is_enough_once_many_in_a_row_were_alike() -> None:
    """The first is nobody's successor."""
    assert not _learnt(range(STREAK)).is_one_enough
    assert _learnt().is_one_enough


@pytest.mark.parametrize(("task", "first", "is_whole"), [(1, 7, True), (0, 8, True), (0, 7, False)])
def test_one_that_is_not_alike_begins_the_count_anew(task: int, first: int, is_whole: bool) -> None:
    """By its number, its first parameter, or what the one before it reached."""
    lookout = _learnt(range(STREAK))
    lookout.began(STREAK + task, first, is_whole=is_whole)
    for number in range(STREAK - 1):
        lookout.began(STREAK + task + 1 + number, first, is_whole=True)
    assert not lookout.is_one_enough
    lookout.began(3 * STREAK, first, is_whole=True)
    assert not lookout.is_one_enough


def test_numbers_that_are_left_out_are_counted_until_all_hooks_had_their_turn() -> None:
    """Also those between the last that was heard of and the first behind the return of all."""
    lookout = _learnt()
    lookout.left_one()
    task = STREAK + 2
    lookout.began(task, 7, is_whole=False)
    assert (lookout.num_missed, lookout.needs_all) == (0, False)
    lookout.began(task + 3, 7, is_whole=False)
    assert (lookout.num_missed, lookout.needs_all) == (2, True)
    lookout.all_back()
    assert not lookout.needs_all
    lookout.began(task + 5, 7, is_whole=False)
    assert (lookout.num_missed, lookout.is_over) == (3, True)


@pytest.mark.parametrize("most_steps", [1, 3])
def test_more_steps_behind_a_backward_than_ever_before_are_suspicious(most_steps: int) -> None:
    """As many as there were at most while it learnt are not."""
    lookout = _learnt()
    for _ in range(most_steps):
        lookout.stepped(1_000)
    lookout.left_one()
    for number in range(3):
        for _ in range(most_steps):
            lookout.stepped(2_000 + number)
            assert not lookout.needs_all
    lookout.stepped(2_002)
    assert lookout.needs_all


@pytest.mark.parametrize(("is_own", "num_missed"), [(True, 2), (False, 3)])
def test_what_is_asked_for_tells_of_what_was_left_out_before(is_own: bool, num_missed: int) -> None:
    """Once; a number that was given for being asked is nobody's backward."""
    lookout = _learnt()
    lookout.left_one()
    last = STREAK + 1
    for _ in range(2):
        lookout.passed(last + 3, is_own=is_own)
        assert (lookout.num_missed, lookout.needs_all) == (num_missed, True)
    lookout.began(last + 4, 7, is_whole=False)
    assert lookout.num_missed == num_missed


@pytest.mark.parametrize(("task", "is_alike"), [(STREAK, True), (STREAK + 1, False)])
def test_what_others_ask_for_changes_nothing_that_is_learnt(task: int, is_alike: bool) -> None:
    """Unless there was something else before it."""
    lookout = _learnt(range(STREAK))
    lookout.passed(task, is_own=True)
    lookout.began(task + 1, 7, is_whole=True)
    lookout.began(task + 2, 7, is_whole=True)
    assert lookout.is_one_enough == is_alike
    assert lookout.num_missed == 0


def _check_nothing(_session: ChecksSession) -> None:
    """Counts alone."""


def _check_parameters(session: ChecksSession) -> None:
    session.register_nonfinite_param_check(action="collect")


@pytest.mark.parametrize("register", [_check_nothing, _check_parameters])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_counts_are_exact_with_one_hook(
    register: Callable[[ChecksSession], None], micro_batches: int
) -> None:
    """Of all that follow, with and without a look at steps."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    register(session)
    with session:
        optimizer = train(model, steps=LONG, micro_batches=micro_batches)
        assert _hooked(model) == ["1.bias"]
        num_fires = session.overhead()["num_accumulation_hooks"]
        train(model, optimizer, steps=100, micro_batches=micro_batches)
        assert session.overhead()["num_accumulation_hooks"] == num_fires + 100 * micro_batches
    report = session.report()
    assert report.counters["backwards"] == (LONG + 100) * micro_batches
    assert report.counters["accepted_steps"] == report.ledgers["scale"]["accepted_steps"] == LONG + 100
    assert report.ledgers["scale"]["micro_batches_per_attempt"]["lowest"] == micro_batches
    assert report.coverage["parameters_that_fired"] == 4
    assert _missed(session) == []
    assert _hooked(model) == []


def test_a_look_at_gradients_needs_every_hook() -> None:
    """However alike backwards are."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_nonfinite_grad_check()
    with session:
        train(model, steps=LONG)
        assert len(_hooked(model)) == 4


def test_a_backward_that_passes_the_hook_by_brings_all_back_and_is_told() -> None:
    """One of the first layer; from there on each is counted."""
    model = mlp()
    with ChecksSession(model, scaler=None) as session:
        optimizer = train(model, steps=LONG)
        model[0](batch()).sum().backward()
        train(model, optimizer, steps=1)
        assert len(_hooked(model)) == 4
        assert _missed(session) == ["up_to_1_not_counted"]
        before = session.report().counters["backwards"]
        for _ in range(LONG):
            model[0](batch()).sum().backward()
            train(model, optimizer, steps=1)
        assert session.report().counters["backwards"] == before + 2 * LONG
        assert _missed(session) == ["up_to_1_not_counted"]
        assert len(_hooked(model)) == 4


def test_a_layer_that_is_frozen_takes_its_hook_out_of_use_and_all_come_back() -> None:
    """By the steps that come behind no backward; it has its own again too, for when it is thawed."""
    model = mlp()
    with ChecksSession(model, scaler=None) as session:
        optimizer = train(model, steps=LONG)
        model[1].requires_grad_(False)
        train(model, optimizer, steps=5)
        assert len(_hooked(model)) == 4
        assert _missed(session) == ["up_to_1_not_counted"]
        assert session.report().counters["backwards"] == LONG + 4
        model[1].requires_grad_(True)
        train(model, optimizer, steps=5)
        assert session.report().counters["backwards"] == LONG + 9
    assert _hooked(model) == []


def test_traversals_of_another_model_may_have_been_this_ones() -> None:
    """The engine does not say whose they were."""
    model, other = mlp(), mlp()
    with ChecksSession(model, scaler=None) as session:
        optimizer = train(model, steps=LONG)
        for _ in range(3):
            other(batch()).sum().backward()
        train(model, optimizer, steps=2)
        assert _missed(session) == ["up_to_3_not_counted"]
        assert session.report().counters["backwards"] == LONG + 2


@pytest.mark.parametrize("kind", ["another model", "a part", "a gradient"])
def test_where_something_else_is_traversed_in_turn_every_hook_stays(kind: str) -> None:
    """From the begin on."""
    model, other = mlp(), mlp()
    with ChecksSession(model, scaler=None) as session:
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(LONG):
            train(model, optimizer, steps=1)
            if kind == "another model":
                other(batch()).sum().backward()
            elif kind == "a part":
                model[0](batch()).sum().backward()
            else:
                torch.autograd.grad(model(batch()).sum(), list(model.parameters()))
        assert len(_hooked(model)) == 4
        assert _missed(session) == []
        assert session.report().counters["backwards"] == LONG * (2 if kind == "a part" else 1)


def test_several_optimizers_step_behind_one_backward() -> None:
    """As they did while it was learnt; one hook is enough for them too."""
    model = mlp()
    optimizers = [SGD(layer.parameters(), lr=0.1) for layer in model]
    with ChecksSession(model, scaler=None) as session:
        for _ in range(2 * LONG):
            model(batch()).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert _hooked(model) == ["1.bias"]
    assert session.report().counters["accepted_steps"] == 4 * LONG
    assert _missed(session) == []


def test_skipped_steps_are_no_reason_for_more_hooks() -> None:
    """Nor are the steps behind them."""
    model, grad_scaler = mlp(), scaler()
    with ChecksSession(model, scaler=grad_scaler) as session:
        optimizer = train(model, steps=LONG, grad_scaler=grad_scaler)
        train(model, optimizer, steps=9, grad_scaler=grad_scaler, overflows=(2, 3, 6))
        assert _hooked(model) == ["1.bias"]
    report = session.report()
    assert report.counters["backwards"] == LONG + 9
    assert report.ledgers["scale"]["skipped_attempts"] == 3
    assert _missed(session) == []


def test_a_session_that_is_attached_again_learns_anew() -> None:
    """What it missed before stands in its report."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    with session:
        optimizer = train(model, steps=LONG)
        model[0](batch()).sum().backward()
        train(model, optimizer, steps=1)
    with session:
        assert len(_hooked(model)) == 4
        train(model, optimizer, steps=LONG)
        assert _hooked(model) == ["1.bias"]
    assert _missed(session) == ["up_to_1_not_counted"]


def test_hooks_of_the_program_stay_where_they_are() -> None:
    """They are called by every backward, whatever a session needs."""
    model, calls = mlp(), [0]

    def count(_parameter: Any) -> None:
        calls[0] += 1

    handles = [one.register_post_accumulate_grad_hook(count) for one in model.parameters()]
    with ChecksSession(model, scaler=None):
        train(model, steps=2 * LONG)
    assert calls == [4 * 2 * LONG]
    for handle in handles:
        handle.remove()
    assert _hooked(model) == []


@pytest.mark.parametrize("steps", [0, 1])
def test_what_passed_by_last_is_told_too(steps: int) -> None:
    """No later backward has to come for it, nor a step."""
    model = mlp()
    with ChecksSession(model, scaler=None) as session:
        optimizer = train(model, steps=LONG)
        model[1].requires_grad_(False)
        for _ in range(7):
            model(batch()).sum().backward()
        for _ in range(steps):
            optimizer.step()
        assert _missed(session) == ["up_to_7_not_counted"]
        if steps:
            model(batch()).sum().backward()
        assert _missed(session) == ["up_to_7_not_counted"]
        assert session.report().counters["backwards"] == LONG + steps
    mlp()(batch()).sum().backward()
    assert session.final_report is not None
    assert session.final_report.counters["backwards"] == LONG + steps
    assert _missed(session) == ["up_to_7_not_counted"]


def test_what_passed_by_before_a_detach_is_told_behind_it() -> None:
    """The hooks that would have told are gone by then."""
    model = mlp()
    session = ChecksSession(model, scaler=None).attach()
    train(model, steps=LONG)
    model[0](batch()).sum().backward()
    session.detach()
    model(batch()).sum().backward()
    assert _missed(session) == ["up_to_1_not_counted"]


def test_a_report_inside_of_a_backward_does_not_count_this_one() -> None:
    """Of which a hook is about to tell."""
    model, missed = mlp(), list[str]()
    with ChecksSession(model, scaler=None) as session:
        optimizer = train(model, steps=LONG)
        output = model(batch())
        output.register_hook(lambda _gradient: missed.extend(_missed(session)))
        output.sum().backward()
        optimizer.step()
        assert _hooked(model) == ["1.bias"]
    assert missed == _missed(session) == []
    assert session.report().counters["backwards"] == LONG + 1


def test_reports_are_nothing_that_is_missed() -> None:
    """Neither by the session that makes them nor by another one, whether it has learnt or not."""
    model = mlp()
    with ChecksSession(model, scaler=None) as session:
        optimizer = train(model, steps=LONG)
        assert _hooked(model) == ["1.bias"]
        with ChecksSession(model, scaler=None) as second:
            for _ in range(LONG):
                train(model, optimizer, steps=1)
                session.report()
                second.report()
            assert [len(one._post_accumulate_grad_hooks) for one in model.parameters()] == [0, 0, 0, 2]
    for one, number in ((session, 2 * LONG), (second, LONG)):
        assert one.report().counters["backwards"] == number
        assert _missed(one) == []


@contextmanager
def _signal_at(name: str, number: int, handle: Callable[[], None]) -> Generator[None]:
    """Handles a signal where a function is about to be called for the so-manieth time, or has just been."""
    seen = 0

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal seen
        if event in {"call", "return"} and frame.f_code.co_name == name:
            seen += 1
            if seen == number:
                signal.raise_signal(signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, lambda *_: handle())
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR1, former)
    assert seen >= number


@pytest.mark.parametrize("number", range(1, 9))
def test_no_hook_comes_back_behind_a_detach(number: int) -> None:
    """Which the handler of a signal may ask for while they do."""
    model = mlp()
    session = ChecksSession(model, scaler=None).attach()
    optimizer = train(model, steps=LONG)
    model[1].requires_grad_(False)
    with _signal_at("put_back", number, session.detach):
        train(model, optimizer, steps=1)
    assert _hooked(model) == []
    assert _missed(session) == ["up_to_1_not_counted"]


@pytest.mark.parametrize("number", range(1, 9))
def test_an_interrupt_while_hooks_come_back_loses_and_doubles_none(number: int) -> None:
    """The next step goes on with it."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    model = mlp()
    with ChecksSession(model, scaler=None):
        optimizer = train(model, steps=LONG)
        model[1].requires_grad_(False)
        with pytest.raises(KeyboardInterrupt), _signal_at("put_back", number, interrupt):
            train(model, optimizer, steps=1)
        train(model, optimizer, steps=1)
        assert [len(one._post_accumulate_grad_hooks) for one in model.parameters()] == [1, 1, 1, 1]
    assert _hooked(model) == []


def test_hooks_neither_go_nor_come_back_inside_a_backward() -> None:
    """A step that an optimizer makes in one leaves them as they are; the next one outside does not."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    seen: list[int] = []

    def num_hooks() -> int:
        return sum(len(one._post_accumulate_grad_hooks or ()) for one in model.parameters())

    def step(_parameter: torch.Tensor) -> None:
        optimizer.step()
        seen.append(num_hooks())

    with ChecksSession(model, scaler=None) as session:
        hook = model[0].weight.register_post_accumulate_grad_hook(step)
        for _ in range(LONG):
            model(batch()).sum().backward()
        assert set(seen) == {4 + 1}
        optimizer.step()
        assert num_hooks() == 1 + 1
        model[1](batch().requires_grad_()).sum().backward()
        model[0](batch()).sum().backward()
        seen.clear()
        model(batch()).sum().backward()
        assert seen == [1 + 1]
        hook.remove()
        optimizer.step()
        assert num_hooks() == 4
        assert session.report().counters["backwards"] == LONG + 2
        assert _missed(session) == ["up_to_1_not_counted"]
