"""The ledger of skipped steps, held to an oracle that compares parameters before and after each step."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from typing_extensions import override

from torchinstruments.ranks import loss_scale
from torchinstruments.ranks.scaled_attempt import ScaledAttempt, judge
from torchinstruments.records import Evidence, Outcome, ScaleProvenance
from unit.ranks.scaled_training import ScaledTraining, grad_scaler, overflows


@pytest.fixture
def rank_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _optimizer(kind: str, parameters: Any) -> Optimizer:
    makers: dict[str, Any] = {
        "sgd": lambda: SGD(parameters, lr=0.1),
        "fused sgd": lambda: SGD(parameters, lr=0.1, fused=True),
        "adamw": lambda: AdamW(parameters, lr=0.1),
        "fused adamw": lambda: AdamW(parameters, lr=0.1, fused=True),
        "fused adam": lambda: Adam(parameters, lr=0.1, fused=True),
        "fused adagrad": lambda: Adagrad(parameters, lr=0.1, fused=True),
    }
    return makers[kind]()


KINDS = ("sgd", "fused sgd", "adamw", "fused adamw", "fused adam", "fused adagrad")
BOTH = ("adamw", "fused adamw")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["....", ".x..", ".xxx.", "xxxx", "...x"])
def test_one_three_or_all_steps_that_overflow_also_the_last(kind: str, pattern: str) -> None:
    """Outcome, findings, both scales, learning rate and the ordinals of tries are right in every row."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()
        for overflow in overflows(pattern):
            training.step(scaler, optimizer, overflow=overflow)
        records = training.judged()
    assert [r.found_inf for r in records] == [float(one) for one in overflows(pattern)]
    assert [r.scale_after for r in records] == training.scales_after
    assert [r.evidence for r in records] == [Evidence.FOUND_INF] * len(pattern)
    assert [(r.attempt, r.optimizer, r.optimizer_attempt, r.lr) for r in records] == [
        (index, 0, index, 0.1) for index in range(len(pattern))
    ]


@pytest.mark.parametrize("kind", BOTH)
def test_growth_after_every_clean_step_is_no_skip_and_hides_none(kind: str) -> None:
    """growth_interval=1: the scale doubles and halves by turns."""
    with ScaledTraining() as training:
        optimizer = _optimizer(kind, training.model["a"].parameters())
        scaler = grad_scaler(growth_interval=1)
        for overflow in overflows("..x.xx."):
            training.step(scaler, optimizer, overflow=overflow)
        records = training.judged()
    assert [r.scale_after for r in records] == [2048, 4096, 2048, 4096, 2048, 1024, 2048]


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_that_are_unscaled_and_clipped_before_the_step(kind: str) -> None:
    """unscale_ finds what the step then acts upon."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()

        def clip() -> None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(training.model["a"].parameters(), 1.0)

        for overflow in overflows(".x."):
            training.step(scaler, optimizer, overflow=overflow, between=clip)
        records = training.judged()
    assert [r.found_inf for r in records] == [0.0, 1.0, 0.0]
    assert [r.scale_after for r in records] == training.scales_after


@pytest.mark.parametrize("kind", BOTH)
def test_accumulated_gradients_are_one_attempt(kind: str) -> None:
    """An infinity in one micro-batch of two skips the attempt."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()
        for overflow in overflows(".x."):
            optimizer.zero_grad()
            training.backward(scaler, overflow=overflow)
            training.backward(scaler)
            with training.oracle(scaler, training.model["a"].parameters()):
                scaler.step(optimizer)
            scaler.update()
        assert [r.micro_batches for r in training.judged()] == [2, 2, 2]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("unscales", [False, True])
def test_accumulated_gradients_under_a_scale_that_grows_after_every_clean_step(
    kind: str, unscales: bool
) -> None:
    """Both micro-batches have the scale of their attempt, and the next one's is twice or half of it."""
    with ScaledTraining() as training:
        optimizer = _optimizer(kind, training.model["a"].parameters())
        scaler = grad_scaler(growth_interval=1)
        for overflow in overflows("..x.xx."):
            optimizer.zero_grad()
            training.backward(scaler)
            training.backward(scaler, overflow=overflow)
            if unscales:
                scaler.unscale_(optimizer)
            with training.oracle(scaler, training.model["a"].parameters()):
                scaler.step(optimizer)
            scaler.update()
        records = training.judged()
    assert [r.micro_batches for r in records] == [2] * 7
    assert [r.found_inf for r in records] == [float(one) for one in overflows("..x.xx.")]
    assert [r.scale_before for r in records] == [1024, 2048, 4096, 2048, 4096, 2048, 1024]
    assert [r.scale_after for r in records] == [2048, 4096, 2048, 4096, 2048, 1024, 2048]


@pytest.mark.parametrize("first", BOTH)
@pytest.mark.parametrize("second", BOTH)
def test_two_optimizers_on_one_scaler_of_which_none_one_or_both_overflow(first: str, second: str) -> None:
    """Each has its own findings, though the update adds them up in place, and both share its scale."""
    with ScaledTraining() as training:
        scaler = grad_scaler()
        one = _optimizer(first, training.model["a"].parameters())
        other = _optimizer(second, training.model["b"].parameters())
        after = []
        for in_a, in_b in ((False, False), (True, False), (False, True), (True, True)):
            one.zero_grad()
            other.zero_grad()
            scaler.scale(
                training.forward("a", overflow=in_a) + training.forward("b", overflow=in_b)
            ).backward()
            for optimizer, half in ((one, "a"), (other, "b")):
                with training.oracle(scaler, training.model[half].parameters()):
                    scaler.step(optimizer)
            scaler.update()
            after += [scaler.get_scale()] * 2
        records = training.judged()
    assert [r.optimizer for r in records] == [0, 1] * 4
    assert [r.found_inf for r in records] == [0, 0, 1, 0, 0, 1, 1, 1]
    assert [r.scale_after for r in records] == after == [1024] * 2 + [512] * 2 + [256] * 2 + [128] * 2


@pytest.mark.parametrize("kind", BOTH)
def test_a_scale_that_the_program_sets_is_no_skip(kind: str) -> None:
    """The step before it was applied, though the scale fell."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()
        for new_scale in (256.0, torch.tensor(64.0)):
            optimizer.zero_grad()
            training.backward(scaler)
            with training.oracle(scaler, training.model["a"].parameters()):
                scaler.step(optimizer)
            scaler.update(new_scale)
        training.step(scaler, optimizer, overflow=True)
        records = training.judged()
    assert [(r.outcome, r.scale_before, r.scale_after) for r in records] == [
        (Outcome.APPLIED, 1024, 256),
        (Outcome.APPLIED, 256, 64),
        (Outcome.SKIPPED, 64, 32),
    ]


class _Patient(GradScaler):
    """Backs off at the second skip in a row only."""

    skips = 0

    @override
    def update(self, new_scale=None):
        found = any(
            value.item()
            for state in self._per_optimizer_states.values()
            for value in state["found_inf_per_device"].values()
        )
        self.skips = self.skips + 1 if found else 0
        if self.skips == 1:
            super().update(self.get_scale())
        else:
            super().update(new_scale)


@pytest.mark.parametrize("kind", BOTH)
def test_a_skip_without_a_lower_scale_is_a_skip(kind: str) -> None:
    """A scaler with hysteresis keeps its scale at the first one; its update is told of once."""
    with ScaledTraining() as training:
        optimizer = _optimizer(kind, training.model["a"].parameters())
        scaler = _Patient("cpu", init_scale=1024.0)
        for overflow in overflows(".xx."):
            training.step(scaler, optimizer, overflow=overflow)
        records = training.judged()
    assert [r.scale_after for r in records] == [1024, 1024, 512, 512]


@pytest.mark.parametrize("kind", BOTH)
def test_a_disabled_scaler_scales_nothing_and_skips_nothing(kind: str) -> None:
    """The optimizer's own hook is what is known, also of a step that applies infinities."""
    with ScaledTraining() as training:
        optimizer = _optimizer(kind, training.model["a"].parameters())
        scaler = GradScaler("cpu", enabled=False)
        for overflow in overflows(".x"):
            training.step(scaler, optimizer, overflow=overflow)
        records = training.records()
    assert training.truth == [True, True]
    assert [(r.outcome, r.evidence, r.found_inf, r.scale_before, r.scale_after) for r in records] == [
        (Outcome.APPLIED, Evidence.OPTIMIZER_HOOK, None, None, None)
    ] * 2


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("overflow", [False, True])
def test_a_watch_that_leaves_between_step_and_update_knows_all_but_the_scale_after(
    kind: str, overflow: bool
) -> None:
    """And one that leaves right behind the update knows that too, which the other tests show."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()
        training.backward(scaler, overflow=overflow)
        with training.oracle(scaler, training.model["a"].parameters()):
            scaler.step(optimizer)
        (record,) = training.judged()
    assert (record.found_inf, record.scale_after) == (float(overflow), None)


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_that_were_unscaled_and_never_stepped_are_an_abandoned_attempt(kind: str) -> None:
    """The program looked at them and went on with an update; the findings say what it saw."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()
        training.step(scaler, optimizer)
        optimizer.zero_grad()
        training.backward(scaler, overflow=True)
        scaler.unscale_(optimizer)
        scaler.update()
        training.step(scaler, optimizer)
        records = training.records()
    assert training.truth == [True, True]
    assert [(r.attempt, r.optimizer, r.outcome, r.found_inf) for r in records] == [
        (0, 0, Outcome.APPLIED, 0.0),
        (1, 0, Outcome.ABANDONED, 1.0),
        (2, 0, Outcome.APPLIED, 0.0),
    ]
    assert (records[1].scale_before, records[1].scale_after, records[1].lr) == (1024, 512, 0.1)


@pytest.mark.parametrize("kind", BOTH)
def test_a_program_that_steps_by_itself_after_unscaling_has_made_that_attempt(kind: str) -> None:
    """One row a try: applied where it stepped, with findings and scales; abandoned where it did not."""
    with ScaledTraining() as training:
        optimizer = _optimizer(kind, training.model["a"].parameters())
        scaler = grad_scaler(growth_interval=1)
        for overflow in overflows(".x."):
            optimizer.zero_grad()
            training.backward(scaler, overflow=overflow)
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(training.model["a"].parameters(), 1.0)
            with training.oracle(scaler, training.model["a"].parameters()):
                if torch.isfinite(norm):
                    optimizer.step()
            scaler.update()
            training.scales_after.append(scaler.get_scale())
        records = training.records()
    assert training.truth == [True, False, True]
    assert [r.outcome for r in records] == [Outcome.APPLIED, Outcome.ABANDONED, Outcome.APPLIED]
    assert [(r.attempt, r.optimizer_attempt, r.micro_batches) for r in records] == [
        (index, index, 1) for index in range(3)
    ]
    assert [r.found_inf for r in records] == [0.0, 1.0, 0.0]
    assert [r.scale_before for r in records] == training.scales == [1024, 2048, 1024]
    assert [r.scale_after for r in records] == training.scales_after == [2048, 1024, 2048]


@pytest.mark.parametrize("is_updated", [True, False])
def test_gradients_that_a_block_unscaled_and_never_stepped_are_its_abandoned_attempt(
    is_updated: bool,
) -> None:
    """Though the update comes after the block, or never; and nothing stepped between blocks."""
    with ScaledTraining() as training:
        optimizer, scaler = SGD(training.model["a"].parameters(), lr=0.1), grad_scaler()
        records = []
        for overflow in overflows("x."):
            training.clock.boundary_entered(0.0, 0)
            optimizer.zero_grad()
            training.backward(scaler, overflow=overflow)
            scaler.unscale_(optimizer)
            (closed,) = training.clock.boundary_left(0.0)
            assert not closed.is_complete()
            if is_updated:
                scaler.update()
            else:
                scaler._per_optimizer_states.clear()
            records.append(closed)
        training.detach()
        assert [closed.is_complete() for closed in records] == [True, True]
        told = [closed.resolve() for closed in records]
    assert training.clock.num_steps_between_boundaries == 0
    assert [(r.attempt, r.optimizer, r.optimizer_attempt) for r in told] == [(0, 0, 0), (1, 0, 1)]
    assert [r.outcome for r in told] == [Outcome.ABANDONED] * 2
    assert [r.found_inf for r in told] == [1.0, 0.0]
    before = [1024.0, 512.0] if is_updated else [1024.0, 1024.0]
    assert [r.scale_before for r in told] == before
    assert [r.scale_after for r in told] == ([512.0, 512.0] if is_updated else [None, None])
    assert [r.lr for r in told] == [0.1, 0.1]


@pytest.mark.parametrize("by_scaler", [True, False])
def test_a_step_after_the_block_that_unscaled_belongs_nowhere(by_scaler: bool) -> None:
    """The block's row says that none came in it, and stays so."""
    with ScaledTraining() as training:
        optimizer, scaler = SGD(training.model["a"].parameters(), lr=0.1), grad_scaler()
        training.clock.boundary_entered(0.0, 0)
        training.backward(scaler)
        scaler.unscale_(optimizer)
        (closed,) = training.clock.boundary_left(0.0)
        if by_scaler:
            scaler.step(optimizer)
        else:
            optimizer.step()
        scaler.update()
        record = closed.resolve()
    assert (record.outcome, record.found_inf, record.scale_after) == (Outcome.ABANDONED, 0.0, 1024.0)
    assert training.clock.num_steps_between_boundaries == 1


def test_a_row_waits_for_an_update_that_comes_after_the_next_forward() -> None:
    """The window is over by then."""
    with ScaledTraining() as training:
        optimizer, scaler = SGD(training.model["a"].parameters(), lr=0.1), grad_scaler(growth_interval=1)
        training.backward(scaler)
        scaler.step(optimizer)
        training.forward()
        (closed,) = training._closed
        assert not closed.is_complete()
        scaler.update()
        assert closed.is_complete()
        assert closed.resolve().scale_after == 2048.0


def test_a_program_that_steps_infinities_by_itself_has_applied_them() -> None:
    """Nobody asked the scaler."""
    with ScaledTraining() as training:
        optimizer, scaler = AdamW(training.model["a"].parameters(), fused=True), grad_scaler()
        training.backward(scaler, overflow=True)
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()
        (record,) = training.records()
    assert (record.outcome, record.evidence) == (Outcome.APPLIED, Evidence.OPTIMIZER_HOOK)
    assert (record.found_inf, record.scale_before, record.scale_after) == (1.0, 1024.0, 512.0)


@pytest.mark.parametrize("kind", BOTH)
def test_a_program_that_skips_step_and_update_goes_on_in_the_same_attempt(kind: str) -> None:
    """Torch keeps the findings until an update, and so does the ledger."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()
        training.backward(scaler, overflow=True)
        scaler.unscale_(optimizer)
        training.backward(scaler)
        with pytest.raises(RuntimeError, match="already been called on this optimizer"):
            scaler.unscale_(optimizer)
        records = training.records()
    assert [(r.attempt, r.micro_batches, r.outcome, r.found_inf, r.scale_after) for r in records] == [
        (0, 2, Outcome.ABANDONED, 1.0, None)
    ]


def test_an_optimizer_without_gradients_is_refused_by_the_scaler_and_is_no_skip() -> None:
    """What torch raises reaches the program as without a watch, and the other optimizer's row is right."""
    with ScaledTraining() as training:
        scaler = grad_scaler()
        one = SGD(training.model["a"].parameters(), lr=0.1)
        idle = SGD(training.model["b"].parameters(), lr=0.1)
        training.backward(scaler, overflow=True)
        with training.oracle(scaler, training.model["a"].parameters()):
            scaler.step(one)
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            scaler.step(idle)
        scaler.update()
        (record,) = training.judged()
    assert (record.optimizer, record.found_inf, record.scale_after) == (0, 1.0, 512.0)


def test_a_fused_optimizer_without_gradients_is_called_and_is_no_skip() -> None:
    """Though the scale falls for another one's sake."""
    with ScaledTraining() as training:
        scaler = grad_scaler()
        one = AdamW(training.model["a"].parameters(), fused=True)
        idle = AdamW(training.model["b"].parameters(), fused=True)
        training.backward(scaler, overflow=True)
        scaler.step(one)
        scaler.step(idle)
        scaler.update()
        records = training.records()
    assert [(r.outcome, r.evidence, r.found_inf) for r in records] == [
        (Outcome.SKIPPED, Evidence.FOUND_INF, 1.0),
        (Outcome.APPLIED, Evidence.OPTIMIZER_HOOK, None),
    ]


@pytest.mark.parametrize("kind", BOTH)
def test_a_loop_that_runs_its_closure_before_it_unscales_and_steps(kind: str) -> None:
    """As Lightning does it: closure, unscale_, clip, step, update."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()

        def closure(*, overflow: bool = False) -> None:
            optimizer.zero_grad()
            training.backward(scaler, overflow=overflow)

        for overflow in overflows(".x."):
            closure(overflow=overflow)
            scaler.unscale_(optimizer)
            with training.oracle(scaler, training.model["a"].parameters()):
                scaler.step(optimizer)
            scaler.update()
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, closure=closure)
        training.judged()


def test_a_disabled_scaler_passes_a_closure_on() -> None:
    """Its forward belongs to the attempt of that step."""
    with ScaledTraining() as training:
        optimizer, scaler = SGD(training.model["a"].parameters(), lr=0.1), GradScaler("cpu", enabled=False)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = scaler.scale(training.forward())
            loss.backward()
            return loss

        training.forward()
        for _ in range(2):
            scaler.step(optimizer, closure=closure)
            scaler.update()
        records = training.records()
    assert [(r.attempt, r.outcome, r.micro_batches) for r in records] == [
        (0, Outcome.APPLIED, 2),
        (1, Outcome.APPLIED, 1),
    ]


class _Accelerated(Optimizer):
    """The shape of Accelerate's wrapper: an Optimizer that never ran its base class's ``__init__``."""

    def __init__(self, optimizer: Any, scaler: GradScaler) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.called = False
        self.was_skipped = False
        original = optimizer.step

        def patched(*args: Any, **kwargs: Any) -> Any:
            self.called = True
            return original(*args, **kwargs)

        self._original, self._patched = original, patched

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    @override
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore
        self.optimizer.step = self._patched
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.was_skipped, self.called = not self.called, False
        self.optimizer.step = self._original


@pytest.mark.parametrize("kind", BOTH)
def test_a_wrapper_that_steps_the_inner_optimizer_with_a_patched_method(kind: str) -> None:
    """Accelerate's own idea of a skip is wrong for fused optimizers; the ledger's is not."""
    with ScaledTraining() as training:
        inner, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()
        wrapper = _Accelerated(inner, scaler)
        for overflow in overflows(".x."):
            inner.zero_grad()
            training.backward(scaler, overflow=overflow)
            with training.oracle(scaler, training.model["a"].parameters()):
                wrapper.step()
            assert wrapper.was_skipped == (overflow and kind == "adamw")
        training.judged()


class _Leading(Optimizer):
    """An Optimizer whose step has the scaler step another one, or several."""

    def __init__(self, scaler: GradScaler, *led: Optimizer) -> None:
        self.scaler, self.led = scaler, led
        super().__init__([group for one in led for group in one.param_groups], {"lr": 0.5})

    @override
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore
        for one in self.led:
            self.scaler.step(one)
        self.scaler.update()


@pytest.mark.parametrize("kind", BOTH)
def test_a_step_that_has_the_scaler_step_another_optimizer_is_judged_by_that(kind: str) -> None:
    """Its own hook tells only that it returned."""
    with ScaledTraining() as training:
        scaler = grad_scaler()
        outer = _Leading(scaler, _optimizer(kind, training.model["a"].parameters()))
        for overflow in overflows(".x."):
            outer.zero_grad()
            training.backward(scaler, overflow=overflow)
            with training.oracle(scaler, training.model["a"].parameters()):
                outer.step()
        records = training.judged()
    assert [r.evidence for r in records] == [Evidence.FOUND_INF] * 3
    assert [r.found_inf for r in records] == [0.0, 1.0, 0.0]
    assert [r.scale_after for r in records] == [1024.0, 512.0, 512.0]
    assert [(r.optimizer, r.optimizer_attempt) for r in records] == [(0, 0), (0, 1), (0, 2)]


def test_a_step_that_has_the_scaler_step_several_others_is_unknown() -> None:
    """One of them may be skipped and the other not."""
    with ScaledTraining() as training:
        scaler = grad_scaler()
        halves = [SGD(training.model[half].parameters(), lr=0.1) for half in "ab"]
        scaler.scale(training.forward("a", overflow=True) + training.forward("b")).backward()
        _Leading(scaler, *halves).step()
        (record,) = training.records()
    assert (record.outcome, record.evidence, record.found_inf) == (Outcome.UNKNOWN, Evidence.NONE, None)


@pytest.mark.parametrize("led", [False, True])
def test_a_step_led_by_the_scaler_or_after_unscaling_is_none_without_it(led: bool) -> None:
    """The loss scale stays known."""
    with ScaledTraining() as training:
        scaler = grad_scaler()
        optimizer = SGD(training.model["a"].parameters(), lr=0.1)
        outer: Any = _Leading(scaler, optimizer) if led else optimizer
        for index in range(3):
            training.backward(scaler)
            if led:
                outer.step()
            else:
                scaler.unscale_(optimizer)
                optimizer.step()
                scaler.update()
            scale, provenance = training.scalers.current_scale(index)
            assert (scale, provenance) == (scaler._scale, ScaleProvenance.GRADSCALER)


class _Holder:
    """No Optimizer, but it holds one and lends its attributes."""

    def __init__(self, optimizer: object) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class _Unusual:
    """The same, under names that nobody would look for."""

    def __init__(self, optimizer: object, other: object = None) -> None:
        self.opt = optimizer
        self.other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opt, name)


def test_a_wrapper_of_several_optimizers_leaves_the_scaler_this_models() -> None:
    """It steps one of them, which is this model's."""
    with ScaledTraining() as training:
        one, other = (SGD(training.model[half].parameters(), lr=0.1) for half in "ab")
        scaler = grad_scaler()
        for index in range(2):
            training.step(scaler, _Unusual(one, other))
            scale, provenance = training.scalers.current_scale(index)
            assert (scale, provenance) == (scaler._scale, ScaleProvenance.GRADSCALER)


def test_a_wrapper_with_the_optimizer_under_an_unusual_name_is_resolved_too() -> None:
    """Skips have rows, and attempts do not merge."""
    with ScaledTraining() as training:
        stepped, scaler = _Unusual(SGD(training.model["a"].parameters(), lr=0.1)), grad_scaler()
        for overflow in overflows("x.x"):
            training.step(scaler, stepped, overflow=overflow)
        assert [(r.attempt, r.found_inf) for r in training.judged()] == [(0, 1.0), (1, 0.0), (2, 1.0)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrapper_that_the_scaler_is_given_is_resolved_to_the_optimizer_inside(depth: int) -> None:
    """The scaler keeps its findings under the wrapper, and the hooks name the one inside."""
    with ScaledTraining() as training:
        stepped: Any = SGD(training.model["a"].parameters(), lr=0.1)
        for _ in range(depth):
            stepped = _Holder(stepped)
        scaler = grad_scaler()
        for overflow in overflows(".x."):
            training.step(scaler, stepped, overflow=overflow)
        records = training.judged()
    assert [r.optimizer for r in records] == [0, 0, 0]
    assert [r.lr for r in records] == [0.1] * 3


def test_a_wrapper_that_keeps_the_findings_from_a_fused_optimizer_does_not_skip() -> None:
    """The scaler leaves them with the wrapper, so that the optimizer inside applies infinities."""
    with ScaledTraining() as training:
        inner, scaler = AdamW(training.model["a"].parameters(), fused=True), grad_scaler()
        training.step(scaler, _Holder(inner), overflow=True)
        (record,) = training.judged()
    assert training.truth == [True]
    assert (record.evidence, record.found_inf) == (Evidence.OPTIMIZER_HOOK, 1.0)


@pytest.mark.parametrize("kind", BOTH)
def test_a_learning_rate_scheduler_changes_nothing_but_the_rate(kind: str) -> None:
    """It replaces the optimizer's ``step`` by a method that counts."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer(kind, training.model["a"].parameters()), grad_scaler()
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        for overflow in overflows(".x."):
            training.step(scaler, optimizer, overflow=overflow)
            scheduler.step()
        assert [r.lr for r in training.judged()] == [0.1, 0.05, 0.025]


def test_an_optimizer_whose_step_was_compiled_is_judged_by_the_findings() -> None:
    """Its hooks are traced away, so that a call that nobody saw proves no skip."""
    with ScaledTraining() as training:
        optimizer: Any = SGD(training.model["a"].parameters(), lr=0.1)
        scaler = grad_scaler()
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        for overflow in overflows(".x."):
            training.step(scaler, optimizer, overflow=overflow)
        records = training.judged()
    assert [r.evidence for r in records] == [Evidence.FOUND_INF] * 3


def test_a_step_that_the_program_replaced_by_nothing_is_unknown() -> None:
    """The scaler found nothing and called something, but no step was seen."""
    with ScaledTraining() as training:
        optimizer: Any = SGD(training.model["a"].parameters(), lr=0.1)
        scaler = grad_scaler()
        optimizer.step = dict
        training.backward(scaler)
        scaler.step(optimizer)
        scaler.update()
        (record,) = training.records()
    assert (record.outcome, record.evidence, record.found_inf) == (Outcome.UNKNOWN, Evidence.NONE, 0.0)


class _Choosy(GradScaler):
    """Skips for a reason of its own."""

    skips_next = False

    @override
    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return (
            None if self.skips_next else super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        )


def test_a_scaler_that_skips_without_an_infinity_is_believed_by_the_optimizers_hooks() -> None:
    """The findings alone would say that the step was applied."""
    with ScaledTraining() as training:
        optimizer, scaler = SGD(training.model["a"].parameters(), lr=0.1), _Choosy("cpu", init_scale=8.0)
        for scaler.skips_next in (False, True, False):
            training.step(scaler, optimizer)
        records = training.judged()
    assert [(r.evidence, r.found_inf) for r in records] == [
        (Evidence.FOUND_INF, 0.0),
        (Evidence.OPTIMIZER_HOOK, 0.0),
        (Evidence.FOUND_INF, 0.0),
    ]


class _OwnScaling(Optimizer):
    """Takes the scaler as an argument and decides by itself: the deprecated way."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @override
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # pyrefly: ignore
        scale = grad_scaler._scale
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                gradient = parameter.grad / scale
                is_finite = gradient.isfinite().all()
                parameter.sub_(torch.where(is_finite, 0.1 * gradient, torch.zeros_like(gradient)))


class _Opaque(GradScaler):
    """Keeps its findings to itself."""

    found = 0.0

    @override
    def update(self, new_scale=None):
        self._per_optimizer_states[0]["found_inf_per_device"] = {"cpu": torch.tensor(self.found)}
        super().update(new_scale)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_findings_out_of_reach_leave_the_scale_to_tell_of_skips_only() -> None:
    """A scale that fell was a skip; one that did not may hide one, and one that was set says nothing."""
    with ScaledTraining() as training:
        optimizer, scaler = _OwnScaling(training.model["a"].parameters()), _Opaque("cpu", init_scale=1024.0)
        for scaler.found in (0.0, 1.0):
            training.step(scaler, optimizer, overflow=scaler.found == 1.0)
        training.backward(scaler)
        scaler.step(optimizer)
        scaler.update(4.0)
        records = training.records()
    assert training.truth == [True, False]
    assert [(r.outcome, r.evidence, r.found_inf, r.scale_after) for r in records] == [
        (Outcome.UNKNOWN, Evidence.NONE, None, 1024.0),
        (Outcome.SKIPPED, Evidence.SCALE_BACKOFF, None, 512.0),
        (Outcome.UNKNOWN, Evidence.NONE, None, 4.0),
    ]


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_scale_that_fell_for_two_optimizers_names_neither(is_ours: bool) -> None:
    """Also where the other one belongs to another model."""
    with ScaledTraining() as training:
        scaler = grad_scaler()
        own = _OwnScaling(training.model["a"].parameters())
        theirs = nn.Linear(3, 3)
        other = SGD((training.model["b"] if is_ours else theirs).parameters(), lr=0.1)
        loss = training.forward("b") if is_ours else theirs(torch.ones(1, 3)).sum()
        scaler.scale(training.forward("a") + float("inf") * loss).backward()
        scaler.step(own)
        scaler.step(other)
        scaler.update()
        records = training.records()
    assert (records[0].outcome, records[0].scale_after) == (Outcome.UNKNOWN, 512.0)
    assert [r.outcome for r in records[1:]] == [Outcome.SKIPPED] * is_ours


def test_findings_that_ranks_added_up_do_not_make_a_fused_optimizer_skip() -> None:
    """Its kernel skips at exactly 1: two ranks that both found an infinity sum to 2, and it is applied."""
    with ScaledTraining() as training:
        optimizer, scaler = AdamW(training.model["a"].parameters(), fused=True), grad_scaler()

        def add_up() -> None:
            scaler.unscale_(optimizer)
            for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.mul_(2)

        optimizer.zero_grad()
        training.backward(scaler, overflow=True)
        add_up()
        with training.oracle(scaler, training.model["a"].parameters()):
            scaler.step(optimizer)
        scaler.update()
        (record,) = training.records()
    assert training.truth == [True]
    assert (record.outcome, record.evidence, record.found_inf) == (Outcome.UNKNOWN, Evidence.NONE, 2.0)


class _AllInOne(GradScaler):
    """Updates inside its step."""

    @override
    def step(self, optimizer, *args, **kwargs):
        result = super().step(optimizer, *args, **kwargs)
        self.update()
        return result


def _fill(scaler: GradScaler) -> None:
    assert scaler._scale is not None
    scaler._scale.fill_(64.0)


def _fill_unnoticed(scaler: GradScaler) -> None:
    assert scaler._scale is not None
    # As a collective does, which changes a tensor without changing its version.
    scaler._scale.data.fill_(64.0)


def _replace(scaler: GradScaler) -> None:
    scaler._scale = torch.full((), 64.0)


@pytest.mark.parametrize("change", [_fill, _fill_unnoticed, _replace])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scale_that_the_program_changes_itself_stands_beside_the_step_that_it_was_changed_before(
    change: Callable[[GradScaler], None], unscales: bool
) -> None:
    """In place, so that no version tells, or by another tensor; what an update left stays as it was."""
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer("sgd", training.model["a"].parameters()), grad_scaler()
        for number in range(3):
            optimizer.zero_grad()
            training.backward(scaler)
            if unscales:
                scaler.unscale_(optimizer)
            if number == 1:
                change(scaler)
            scaler.step(optimizer)
            scaler.update()
        records = training.records()
    assert [record.scale_before for record in records] == [1024.0, 64.0, 64.0]
    assert [record.scale_after for record in records] == [1024.0, 64.0, 64.0]


@pytest.mark.parametrize("kind", BOTH)
def test_a_scaler_that_updates_inside_its_step(kind: str) -> None:
    """The findings are copied before the update discards them."""
    with ScaledTraining() as training:
        optimizer = _optimizer(kind, training.model["a"].parameters())
        scaler = _AllInOne("cpu", init_scale=1024.0)
        for overflow in overflows(".x."):
            optimizer.zero_grad()
            training.backward(scaler, overflow=overflow)
            with training.oracle(scaler, training.model["a"].parameters()):
                scaler.step(optimizer)
        records = training.judged()
    assert [(r.found_inf, r.scale_after) for r in records] == [(0, 1024), (1, 512), (0, 512)]


def test_a_step_that_raises_leaves_no_second_row() -> None:
    """How far it came is not known; the attempt is told of once."""
    with ScaledTraining() as training:
        optimizer, scaler = SGD(training.model["a"].parameters(), lr=0.1), grad_scaler()
        training.backward(scaler)
        optimizer.register_step_pre_hook(_raise)
        with pytest.raises(OSError, match="in the hook"):
            scaler.step(optimizer)
        scaler.update()
        training.forward()
        records = training.records()
    assert [(r.attempt, r.outcome) for r in records] == [(0, Outcome.UNKNOWN), (1, Outcome.ABANDONED)]


def _raise(*_: Any) -> None:
    raise OSError("in the hook")


def test_findings_are_asked_for_without_an_entry_being_made() -> None:
    """An entry that the scaler did not make would be there at its next update."""
    with ScaledTraining() as training:
        optimizer, scaler = AdamW(training.model["a"].parameters(), fused=True), grad_scaler()
        training.backward(scaler)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert list(scaler._per_optimizer_states) == [id(optimizer)]
        scaler.update()
        assert scaler._per_optimizer_states == {}


def _whole_run(kind: str, *, watched: bool) -> tuple[Any, ...]:
    """Trains with overflows, growth and clipping; returns every bit that a program could see of it."""
    with ScaledTraining(watched=watched) as training:
        optimizer = _optimizer(kind, training.model["a"].parameters())
        scaler = grad_scaler(growth_interval=2)
        for index, overflow in enumerate(overflows("..x...xx..")):
            clips = index % 3 == 0
            training.step(
                scaler,
                optimizer,
                overflow=overflow,
                between=(lambda: scaler.unscale_(optimizer)) if clips else None,
            )
        copies = pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)
        assert [one.state_dict() for one in copies] == [scaler.state_dict()] * 2
        return (
            [loss.item() for loss in training.losses if loss.isfinite()],
            [parameter.tolist() for parameter in training.model.parameters()],
            scaler.state_dict(),
            sorted(vars(scaler)),
            [
                value.tolist()
                for state in optimizer.state.values()
                for value in state.values()
                if value is not None
            ],
            torch.get_rng_state().tolist(),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_the_same_with_and_without_the_watch(kind: str) -> None:
    """Losses, weights, optimizer state, scaler, its attributes, its pickle and the random generator."""
    assert _whole_run(kind, watched=True) == _whole_run(kind, watched=False)


def test_a_sharded_scaler_has_a_ledger_though_it_overrides_all_but_step(rank_of_one: None) -> None:
    """Its update does not call the one of its base class."""
    with ScaledTraining() as training:
        optimizer = SGD(training.model["a"].parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=1024.0)
        for overflow in overflows(".x."):
            training.step(scaler, optimizer, overflow=overflow)
        records = training.judged()
    assert [(r.found_inf, r.scale_after) for r in records] == [(0, 1024), (1, 512), (0, 512)]


class _Looked(ScaledAttempt):
    """Is looked at by the writer thread whenever anything of it changes."""

    seen: ClassVar[list[tuple[Outcome, float | None]]] = []

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if getattr(self, "is_stepped", False):
            tickets = (self.scale_before, self.scale_after)
            before, after = (None if ticket is None else ticket.read() for ticket in tickets)
            self.seen.append((judge(self, None, before, after).outcome, after))


def test_a_scale_that_the_program_sets_is_no_skip_at_any_moment_at_which_the_writer_thread_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an optimizer whose findings are out of reach, which a lower scale would tell of otherwise."""
    monkeypatch.setattr(loss_scale, "ScaledAttempt", _Looked)
    monkeypatch.setattr(loss_scale, "_findings", lambda *_: None)
    with ScaledTraining() as training:
        optimizer, scaler = _optimizer("fused sgd", training.model["a"].parameters()), grad_scaler()
        optimizer.zero_grad()
        training.backward(scaler)
        scaler.step(optimizer)
        scaler.update(512.0)
        (record,) = training.records()
    assert (record.outcome, record.scale_before, record.scale_after) == (Outcome.UNKNOWN, 1024.0, 512.0)
    assert (Outcome.UNKNOWN, 512.0) in _Looked.seen
    assert {outcome for outcome, _ in _Looked.seen} == {Outcome.UNKNOWN}
