"""The handle that a training script holds."""

import copy
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchinstruments.config import ErrorPolicy
from torchinstruments.errors import ConfigurationError, ObserverAlreadyAttachedError
from torchinstruments.observe.observer import InertObserver, Observer, observer_of
from torchinstruments.observe.step_block import StepBlock
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.records import Counters, Evidence, Outcome, StepProvenance
from unit.observe.memory import MemorySession, observe


def test_a_model_has_one_observer_in_whatever_wrapper(session: MemorySession) -> None:
    """A second one is refused on the model, on its wrapper and on what it wraps."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    assert observer_of(model) is observer
    assert observer_of(nn.DataParallel(model)) is observer
    for again in (model, nn.DataParallel(model)):
        with pytest.raises(ObserverAlreadyAttachedError, match=r"call remove_observer\(model\) first"):
            observe(again, MemorySession())
    observer.close()
    assert observer_of(model) is None
    wrapped = observe(nn.DataParallel(model), MemorySession())
    with pytest.raises(ObserverAlreadyAttachedError):
        observe(model, MemorySession())
    wrapped.close()


def test_a_part_of_an_observed_model_may_have_an_observer_of_its_own(session: MemorySession) -> None:
    """Both see the part's calls."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    observe(model, session)
    other = MemorySession()
    observe(model[0], other)
    model(torch.ones(1, 2)).sum().backward()
    assert [len(session.deliveries), len(other.deliveries)] == [2, 2]
    assert session.outputs()[0].values == other.outputs()[0].values


def test_the_model_keeps_its_observer(session: MemorySession) -> None:
    """A script that drops the handle is observed all the same."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    model(torch.ones(1, 2))
    assert len(session.deliveries) == 1
    found = observer_of(model)
    assert found is not None
    assert found.observing


def test_flush_and_close_answer_for_the_session(session: MemorySession) -> None:
    """The catalog is told first; closing again asks the session again, which waits for the same end."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    for _ in range(2):
        model(torch.ones(1, 2))
    assert session.modules[0].fired == 1
    assert observer.flush()
    assert session.modules[0].fired == 2
    assert not observer.flush(timeout_s=0.0)
    assert observer.close()
    assert observer.close()
    assert session.num_closed == 2
    assert not observer.observing
    assert observer.url == "memory://run"


def test_an_observer_shows_what_it_is(session: MemorySession) -> None:
    """Where the run lies, how much was measured, and whether it goes on."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    model(torch.ones(1, 2))
    assert repr(observer) == "Observer('memory://run', observing, 1 of 1 forwards measured)"
    observer.close()
    assert repr(observer) == "Observer('memory://run', closed, 1 of 1 forwards measured)"
    assert repr(InertObserver("file:///run")) == "InertObserver('file:///run', observes nothing)"


def test_an_inert_observer_has_the_same_surface_and_does_nothing() -> None:
    """It only marks its model as taken, for as long as the model lives or until it is closed."""
    model = nn.Sequential(nn.Linear(2, 2))
    InertObserver("file:///run").attach(model)
    observer = observer_of(model)
    assert observer is not None
    with pytest.raises(ObserverAlreadyAttachedError):
        observe(model, MemorySession())
    with observer.paused():
        model(torch.ones(1, 2))
    assert (observer.url, observer.observing, observer.counters) == ("file:///run", False, Counters())
    assert observer.flush()
    assert observer.close()
    assert observer_of(model) is None


def test_copies_and_pickles_of_an_observer_are_inert(session: MemorySession) -> None:
    """Whatever holds one can be copied."""
    model = nn.Sequential(nn.Linear(2, 2))
    trainer = {"model": model, "observer": observe(model, session)}
    for twin in (
        copy.deepcopy(trainer)["observer"],
        copy.copy(trainer["observer"]),
        pickle.loads(pickle.dumps(trainer))["observer"],
    ):
        assert isinstance(twin, Observer)
        assert not twin.observing
        assert twin.url == "memory://run"
        assert twin.close()
    assert session.num_closed == 0


class Marked:
    """A model in training whose program marks its steps.

    Args:
        session: Keeps what is observed.
        policy: Of errors.
        observed: Whether it has an observer.
    """

    def __init__(
        self, session: MemorySession, policy: ErrorPolicy = ErrorPolicy.WARN, *, observed: bool = True
    ) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.session = session
        self.clock = StepClock()
        watch = OptimizerWatch(self.clock, weakref.ref(self.model))
        self.observer: Observer = InertObserver()
        if observed:
            self.observer = observe(self.model, session, policy=policy, clock=self.clock, companions=(watch,))

    def micro_step(self, *, step: bool = True) -> None:
        """A forward, a backward, and the optimizer's step."""
        self.model(torch.randn(4, 2)).sum().backward()
        if step:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def micro_loss(self) -> float:
        """A closure."""
        self.micro_step(step=False)
        return 0.0

    def blocks(self, times: int = 1, *, error: BaseException | None = None, **numbers: Any) -> None:
        """Micro-steps in blocks of their own; one that is to raise does so in place of its step."""
        for _ in range(times):
            with self.observer.step(**numbers):
                self.micro_step(step=error is None)
                if error is not None:
                    raise error

    def nested_blocks(self) -> None:
        """Two blocks with two blocks inside each."""
        for number in range(2):
            with self.observer.step(number):
                for inner in (10, 11):
                    with self.observer.step(inner):
                        self.micro_step(step=inner == 11)

    def block_that_fails_late(self) -> None:
        """A block that raises after its step."""
        with self.observer.step():
            self.micro_step()
            raise ValueError("late")

    def notices(self) -> list[str]:
        """What was told of the marks."""
        return [error.message for error in self.session.errors if error.probe == "step"]


def test_a_block_groups_its_forwards_and_names_its_step(session: MemorySession) -> None:
    """Four forwards, one evaluation and one step are one attempt with the caller's numbers."""
    marked = Marked(session)
    for number in (100, 101):
        with marked.observer.step(global_step=number, micro_batches=3):
            with torch.no_grad():
                marked.model(torch.ones(1, 2))
            for last in (False, False, True):
                marked.micro_step(step=last)
    marked.observer.close()
    positions = [sample.position for sample in session.samples() if sample.backward_index is None]
    assert [(p.attempt, p.forward_in_attempt, p.micro_batch) for p in positions] == [
        (attempt, ordinal, None if ordinal == 0 else ordinal - 1)
        for attempt in (0, 1)
        for ordinal in range(4)
    ]
    assert {p.step_provenance for p in positions} == {StepProvenance.EXPLICIT}
    assert [
        (a.attempt, a.global_step, a.micro_batches, a.micro_batches_declared, a.outcome, a.evidence)
        for a in session.attempts
    ] == [
        (0, 100, 3, 3, Outcome.APPLIED, Evidence.OPTIMIZER_HOOK),
        (1, 101, 3, 3, Outcome.APPLIED, Evidence.OPTIMIZER_HOOK),
    ]
    assert marked.notices() == []


def test_a_disagreement_between_declared_and_seen_is_in_every_row_and_told_once(
    session: MemorySession,
) -> None:
    """With both numbers, as a warning."""
    marked = Marked(session)
    with pytest.warns(RuntimeWarning, match=r"declared micro_batches=4 and ran 1 with gradients") as caught:
        marked.blocks(3, global_step=0, micro_batches=4)
    assert len(caught) == 1
    assert [(a.micro_batches, a.micro_batches_declared) for a in session.attempts] == [(1, 4)] * 3
    (notice,) = marked.notices()
    assert "attempt 0, global_step 0" in notice


def test_an_exception_leaves_its_block_abandoned_and_goes_on_untouched(session: MemorySession) -> None:
    """The same object comes out; a step that happened before it stays applied."""
    marked = Marked(session)
    for error in (ValueError("nan"), StopIteration(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            marked.blocks(error=error, global_step=7, micro_batches=9)
        assert caught.value is error
    with pytest.raises(ValueError, match="late"):
        marked.block_that_fails_late()
    assert [(a.global_step, a.optimizer, a.outcome, a.evidence) for a in session.attempts] == [
        *[(7, -1, Outcome.ABANDONED, Evidence.EXPLICIT)] * 3,
        (None, 0, Outcome.APPLIED, Evidence.OPTIMIZER_HOOK),
    ]
    assert marked.notices() == []


def test_a_block_inside_another_one_is_ignored_and_told_once(session: MemorySession) -> None:
    """The outer attempt goes on to its end."""
    marked = Marked(session)
    with pytest.warns(RuntimeWarning, match="inside another one") as caught:
        marked.nested_blocks()
    assert len(caught) == 1
    assert [(a.attempt, a.global_step, a.micro_batches) for a in session.attempts] == [(0, 0, 2), (1, 1, 2)]


def test_a_block_object_may_be_entered_inside_itself_and_again(session: MemorySession) -> None:
    """The outermost entrance is the attempt; what comes after it is grouped as without blocks."""
    marked = Marked(session)
    block = marked.observer.step(5)

    def train() -> None:
        for _ in range(2):
            with block:
                with block:
                    marked.micro_step(step=False)
                marked.micro_step()

    with pytest.warns(RuntimeWarning, match="inside another one") as caught:
        train()
    assert len(caught) == 1
    for _ in range(2):
        marked.micro_step()
    marked.observer.close()
    assert [(a.attempt, a.global_step, a.micro_batches, a.evidence) for a in session.attempts] == [
        (0, 5, 2, Evidence.OPTIMIZER_HOOK),
        (1, 5, 2, Evidence.OPTIMIZER_HOOK),
        (2, None, 1, Evidence.OPTIMIZER_HOOK),
        (3, None, 1, Evidence.OPTIMIZER_HOOK),
    ]


def test_a_block_that_is_left_elsewhere_is_over(session: MemorySession) -> None:
    """By another thread, after one that was entered later, by a generator's end, and once too often."""
    marked = Marked(session)
    blocks = [marked.observer.step(number) for number in range(3)]

    def leave(block: StepBlock) -> None:
        block.__exit__(None, None, None)

    def generator() -> Generator[None]:
        with blocks[2]:
            marked.micro_step()
            yield

    blocks[0].__enter__()
    with pytest.warns(RuntimeWarning, match="inside another one"):
        blocks[1].__enter__()
    marked.micro_step()
    thread = threading.Thread(target=leave, args=(blocks[0],))
    thread.start()
    thread.join()
    assert [a.global_step for a in session.attempts] == [0]
    leave(blocks[1])
    leave(blocks[1])
    running = generator()
    next(running)
    running.close()
    marked.micro_step()
    marked.observer.close()
    assert [(a.global_step, a.micro_batches) for a in session.attempts] == [(0, 1), (2, 1), (None, 1)]


def test_steps_beyond_a_block_are_told_at_the_end(session: MemorySession) -> None:
    """They have no row; a program that steps before its first forward is not meant."""
    marked = Marked(session)
    marked.optimizer.step()
    with marked.observer.step():
        marked.micro_step(step=False)
    marked.optimizer.step()
    with pytest.warns(RuntimeWarning, match=r"1 step of optimizers came after a block"):
        marked.observer.close()


def test_several_steps_with_forwards_between_them_in_a_block_are_no_bypass(session: MemorySession) -> None:
    """In an inferred window, a second step of an optimizer came without a forward; in a block it need not."""
    marked = Marked(session)
    with marked.observer.step():
        marked.micro_step()
        marked.micro_step()
    with marked.observer.step():
        marked.micro_step()
        marked.micro_step()
        marked.observer.close()
    assert [(a.attempt, a.optimizer_attempt) for a in session.attempts] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert session.errors == []


def test_an_attempt_reaches_the_session_where_a_long_evaluation_begins(session: MemorySession) -> None:
    """A process that is killed in it has lost none; the evaluation's samples stand in the attempt."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    clock = StepClock(told_after_s=-1.0)
    observe(model, session, clock=clock, companions=(OptimizerWatch(clock, weakref.ref(model)),))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert session.attempts == []
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 2))
    (record,) = session.attempts
    assert (record.attempt, record.outcome, record.last_forward_index) == (0, Outcome.APPLIED, 0)
    places = [one.position for one in session.samples() if one.backward_index is None]
    assert [(one.attempt, one.forward_in_attempt) for one in places] == [(0, 0), (0, 1), (0, 2)]


def test_a_block_that_was_told_before_its_end_is_still_held_to_what_it_declared(
    session: MemorySession,
) -> None:
    """Its end brings no further row then, and the notice all the same."""
    marked = Marked(session)
    block = marked.observer.step(global_step=3, micro_batches=1)
    block.__enter__()
    marked.micro_step(step=False)
    marked.micro_step()
    told = marked.clock.overdue(time.perf_counter() + 100.0)
    with pytest.warns(RuntimeWarning, match=r"declared micro_batches=1 and ran 2 with gradients"):
        block.__exit__(None, None, None)
    assert [(one.record.global_step, one.record.micro_batches) for one in told] == [(3, 2)]
    assert session.attempts == []


def test_steps_without_a_forward_are_counted_though_some_were_told_before(session: MemorySession) -> None:
    """What is told of them rests on the window, not on the rows that leave at its end."""
    marked = Marked(session)
    marked.micro_step()
    assert len(marked.clock.overdue(time.perf_counter() + 100.0)) == 1
    marked.optimizer.step()
    with pytest.warns(RuntimeWarning, match="1 step of its optimizers came without a call of it"):
        marked.observer.close()
    assert [(one.optimizer, one.optimizer_attempt) for one in session.attempts] == [(0, 1)]


def test_a_block_inside_a_step_is_ignored_and_told_once(session: MemorySession) -> None:
    """The attempt is that of the step, which was applied; around the step it has the caller's number."""
    marked = Marked(session)

    def closure() -> float:
        with marked.observer.step(7):
            return marked.micro_loss()

    with pytest.warns(RuntimeWarning, match=r"inside optimizer.step\(closure\).* put it around the step"):
        marked.optimizer.step(closure)
    marked.optimizer.step(closure)
    assert len(marked.notices()) == 1
    with marked.observer.step(9):
        marked.optimizer.step(marked.micro_loss)
    marked.observer.close()
    told = [(one.attempt, one.optimizer, one.micro_batches, one.global_step) for one in session.attempts]
    assert told == [(0, 0, 1, None), (1, 0, 1, None), (2, 0, 1, 9)]
    assert {one.outcome for one in session.attempts} == {Outcome.APPLIED}


def test_a_block_that_is_gone_without_its_end_ends_where_the_next_one_begins(session: MemorySession) -> None:
    """However it was entered by hand; one that somebody still holds goes on."""
    marked = Marked(session)
    held = marked.observer.step(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (1, 2):
            held.__enter__()
            marked.micro_step()
            held = marked.observer.step(number)
        marked.observer.step(3).__enter__()
        marked.micro_step()
        with marked.observer.step(4):
            marked.observer.step(5).__enter__()
            marked.micro_step()
        marked.micro_step()
        marked.observer.close()
    assert len(caught) == len(marked.notices()) == 2
    assert "entered and never left; it ended where the next one began" in marked.notices()[0]
    assert "inside another one" in marked.notices()[1]
    told = [(one.attempt, one.global_step, one.outcome) for one in session.attempts]
    assert told == [(at, number, Outcome.APPLIED) for at, number in enumerate((0, 1, 3, 4, None))]


class Odd(int):
    """A number that raises whatever is asked of it."""

    def _raise(self, *_: object) -> Any:
        raise ArithmeticError("odd")

    __int__ = __index__ = __le__ = __lt__ = __ge__ = __gt__ = __eq__ = __bool__ = _raise
    __hash__ = __repr__ = __str__ = _raise


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"global_step": -1}, r"step\(global_step=...\) was given -1"),
    ({"global_step": True}, r"was given True"),
    ({"global_step": 1.0}, r"was given 1.0"),
    ({"global_step": 2**63}, r"give an int from 0 to"),
    ({"global_step": torch.tensor(3)}, r"of type Tensor.*reading a tensor would wait for its device"),
    ({"micro_batches": 0}, r"step\(micro_batches=...\) was given 0, .* from 1 to"),
    ({"micro_batches": "4"}, r"was given '4'"),
    ({"global_step": Odd(3)}, r"was given of type Odd"),
    ({"micro_batches": Odd(3)}, r"was given of type Odd"),
]


@pytest.mark.parametrize(("numbers", "message"), UNUSABLE)
def test_a_number_that_cannot_be_used_is_left_out_and_told_once(
    session: MemorySession, numbers: dict[str, Any], message: str
) -> None:
    """Training goes on; with error_policy="raise" the call says so."""
    marked = Marked(session)
    with pytest.warns(RuntimeWarning, match=message) as caught:
        marked.blocks(2, **numbers)
    assert len(caught) == 1
    assert [(a.global_step, a.micro_batches_declared) for a in session.attempts] == [(None, None)] * 2
    strict = Marked(MemorySession(), ErrorPolicy.RAISE)
    with pytest.raises(ConfigurationError, match=message):
        strict.observer.step(**numbers)


def test_each_kind_of_notice_is_told_whatever_was_told_before(session: MemorySession) -> None:
    """A number that disagreed first silences none that cannot be used, of either argument, and vice versa."""
    usable: list[dict[str, Any]] = [{"micro_batches": 4}, {"micro_batches": 0}, {"global_step": -1}]
    for order in (usable, usable[::-1]):
        marked = Marked(MemorySession())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for numbers in order * 2:
                marked.blocks(**numbers)
        assert len(caught) == len(marked.notices()) == 3
        for text in (
            "declared micro_batches=4 and ran 1",
            "step(micro_batches=...)",
            "step(global_step=...)",
        ):
            assert sum(text in notice for notice in marked.notices()) == 1


def test_integers_of_numpy_are_numbers_too(session: MemorySession) -> None:
    """They lie on the host."""
    marked = Marked(session)
    with marked.observer.step(np.int64(5), np.int32(1)):  # pyrefly: ignore
        marked.micro_step()
    (record,) = session.attempts
    assert (type(record.global_step), record.global_step, record.micro_batches_declared) == (int, 5, 1)


def test_a_block_of_an_observer_that_does_not_observe_does_nothing(session: MemorySession) -> None:
    """Inert, closed, or on a rank that turns out not to observe; whatever its numbers."""
    with InertObserver().step(global_step=-5, micro_batches=0):
        pass
    marked = Marked(session)
    block = marked.observer.step(1)
    marked.observer.close()
    with block, marked.observer.step(2):
        marked.micro_step()
    away = Marked(MemorySession(begins=False))
    with away.observer.step(3):
        away.micro_step()
    assert session.attempts == away.session.attempts == []


def test_training_in_blocks_is_bit_identical(session: MemorySession) -> None:
    """Parameters, gradients and random state after ten steps, with and without an observer."""
    left = []
    for observed in (False, True):
        torch.manual_seed(3)
        marked = Marked(session, observed=observed)
        for number in range(10):
            with marked.observer.step(number, 2):
                marked.micro_step(step=False)
                marked.micro_step()
        left.append([*marked.model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
    assert len(session.attempts) == 10
