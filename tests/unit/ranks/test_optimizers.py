"""Real optimizers under the watch."""

import contextlib
import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer
from torch.optim import optimizer as torch_optimizer
from typing_extensions import override

from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.optimizers import OptimizerWatch, first_lr, unwrapped
from torchinstruments.records import Evidence, GradSync, Outcome


class _Training:
    """A model whose root forwards and optimizers feed a clock."""

    def __init__(self, only=None, model=None):
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)) if model is None else model
        self.errors = []
        self.now = 0.0
        self.clock = StepClock()
        self.watch = OptimizerWatch(
            self.clock,
            weakref.ref(self.model),
            only,
            on_error=lambda probe, error: self.errors.append((probe, error)),
            now=self.tick,
        )
        self.watch.attach()
        self.records = []

    def tick(self):
        self.now += 1.0
        return self.now

    def forward(self, x=None):
        started = self.clock.forward_started(grad_enabled=True, now_s=self.tick(), now_us=0)
        self.records += [attempt.resolve() for attempt in started.closed]
        loss = self.model(torch.ones(2, 4) if x is None else x).sum()
        self.clock.forward_ended(self.tick(), GradSync.NOT_DISTRIBUTED)
        return loss

    def close(self):
        self.records += [attempt.resolve() for attempt in self.clock.close(self.tick())]
        self.watch.detach()
        assert self.errors == []
        return self.records

    @property
    def outcomes(self):
        return [(r.attempt, r.optimizer, r.optimizer_attempt, r.outcome) for r in self.records]


@pytest.fixture
def training():
    """A training that leaves no hook behind, whatever the test did."""
    one = _Training()
    yield one
    one.watch.detach()


def _hooks():
    return len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)


def test_steps_of_the_models_optimizer_are_attempts_with_their_learning_rate(training):
    """Nothing but the global hooks tells of them."""
    optimizer = SGD(training.model.parameters(), lr=0.5)
    for _ in range(2):
        training.forward().backward()
        optimizer.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, 0, 1, Outcome.APPLIED)]
    assert [(r.lr, r.evidence) for r in training.records] == [(0.5, Evidence.OPTIMIZER_HOOK)] * 2


def test_an_optimizer_of_another_model_is_not_counted(training):
    """As a discriminator's beside an attached generator."""
    other = nn.Linear(2, 2)
    training.forward().backward()
    SGD(other.parameters(), lr=1.0).step()
    training.close()
    assert training.outcomes == [(0, -1, 0, Outcome.UNKNOWN)]


def test_only_the_named_optimizer_counts_whatever_its_parameters():
    """An optimizer with master weights of its own shares none with the model."""
    masters = SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    training = _Training(only=masters)
    other = SGD(training.model.parameters(), lr=1.0)
    training.forward().backward()
    other.step()
    masters.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED)]


def test_an_optimizer_made_after_parameters_were_replaced_counts(training):
    """As after fully_shard; the old one, whose parameters are the model's no longer, does not."""
    old = SGD(training.model.parameters(), lr=1.0)
    training.forward().backward()
    old.step()
    for layer in training.model:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.bias = nn.Parameter(layer.bias.detach().clone())
    new = SGD(training.model.parameters(), lr=1.0)
    training.forward().backward()
    old.step()
    new.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, 1, 0, Outcome.APPLIED)]


def test_all_parameters_are_compared_once_an_optimizer_and_not_once_a_step(training):
    """An unsampled step has to cost microseconds, whatever the size of the model."""
    compared: list[Optimizer] = []
    find = training.watch._membership.find

    def counted(optimizer):
        compared.append(optimizer)
        return find(optimizer)

    training.watch._membership.find = counted
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(300)]
    optimizers = [SGD(training.model.parameters(), lr=1.0), SGD(parameters, lr=1.0)]
    for _ in range(5):
        training.forward().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert compared == optimizers


def test_an_optimizer_counts_once_its_module_has_joined_the_model(training):
    """A head that was trained by itself before it was added."""
    head = nn.Linear(1, 1)
    optimizer = SGD(head.parameters(), lr=1.0)
    training.forward().backward()
    optimizer.step()
    training.model.append(head)
    for _ in range(2):
        training.forward().backward()
        optimizer.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, 0, 1, Outcome.APPLIED)]


def test_an_optimizer_counts_once_one_of_its_parameters_is_replaced_by_the_models(training):
    """Whichever group it lies in, with groups as many and as long as before."""
    optimizer = SGD([{"params": [nn.Parameter(torch.zeros(3))]} for _ in range(3)], lr=1.0)
    training.forward().backward()
    optimizer.step()
    optimizer.param_groups[1]["params"][0] = training.model[0].weight
    optimizer.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED)]


@pytest.mark.parametrize(
    "leave",
    [
        lambda model, _: model.__setitem__(1, nn.Linear(3, 1)),
        lambda model, _: model.__delitem__(1),
        lambda model, _: setattr(model[1], "weight", nn.Parameter(torch.zeros(1, 3))),
        lambda _, optimizer: optimizer.param_groups[0]["params"].__setitem__(0, nn.Parameter(torch.zeros(1))),
        lambda _, optimizer: optimizer.param_groups[0]["params"].clear(),
        lambda _, optimizer: optimizer.param_groups.pop(0),
    ],
)
def test_an_optimizer_counts_no_longer_once_no_parameter_of_it_is_the_models(training, leave):
    """Its module, its parameter or its group was exchanged; before that it counted."""
    other = nn.Parameter(torch.zeros(1))
    optimizer = SGD([{"params": [training.model[1].weight]}, {"params": [other]}], lr=1.0)
    training.forward().backward()
    optimizer.step()
    leave(training.model, optimizer)
    training.forward().sum().backward()
    optimizer.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, -1, 0, Outcome.ABANDONED)]


def test_an_optimizer_goes_on_counting_while_any_parameter_of_it_is_the_models(training):
    """The one that was found first leaves, and another one stays."""
    optimizer = SGD(training.model.parameters(), lr=1.0)
    training.forward().backward()
    optimizer.step()
    training.model[0] = nn.Linear(4, 3)
    training.forward().backward()
    optimizer.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, 0, 1, Outcome.APPLIED)]


def test_a_group_that_is_added_later_can_make_an_optimizer_the_models(training):
    """The verdict is looked at again when the groups change."""
    optimizer = SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    training.forward().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(training.model.parameters())})
    optimizer.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED)]


def test_a_closures_forwards_belong_to_its_step(training):
    """LBFGS with several evaluations a step."""
    optimizer = LBFGS(training.model.parameters(), lr=0.01, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = training.forward().square()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    training.close()
    assert [r.attempt for r in training.records] == [0, 1, 2]
    assert all(r.micro_batches >= 1 for r in training.records)


def test_a_subclass_that_calls_its_parents_step_counts_once(training):
    """Both steps are wrapped by torch and fire the hooks."""

    class _Careful(SGD):
        @override
        def step(self, closure=None):
            return super().step(closure)

    SGD(training.model.parameters(), lr=1.0)
    optimizer = _Careful(training.model.parameters(), lr=1.0)
    for _ in range(2):
        training.forward().backward()
        optimizer.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, 0, 1, Outcome.APPLIED)]


def test_an_optimizer_that_steps_another_one_counts_once(training):
    """A wrapper around a fused one, as ZeroRedundancyOptimizer is."""

    class _Outer(SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=1.0)
            self.inner = AdamW(self.param_groups[0]["params"], lr=1e-3)

        @override
        def step(self, closure=None):
            self.inner.step(closure)

    optimizer = _Outer(list(training.model.parameters()))
    for _ in range(2):
        training.forward().backward()
        optimizer.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, 0, 1, Outcome.APPLIED)]


class _Failing(SGD):
    """Raises in its first steps."""

    failures = 1

    @override
    def step(self, closure=None):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of memory")
        super().step(closure)


def test_a_step_that_raises_is_unknown_and_the_next_one_is_its_own(training):
    """Nothing may take the second step for a part of the first."""
    optimizer = _Failing(training.model.parameters(), lr=1.0)
    optimizer.failures = 2
    for _ in range(4):
        training.forward().backward()
        with contextlib.suppress(RuntimeError):
            optimizer.step()
    training.close()
    assert [(r.attempt, r.outcome) for r in training.records] == [
        (0, Outcome.UNKNOWN),
        (1, Outcome.UNKNOWN),
        (2, Outcome.APPLIED),
        (3, Outcome.APPLIED),
    ]


def test_after_a_step_that_raised_another_optimizer_is_not_inside_it(training):
    """Its frame may even lie at the same address."""
    failing = _Failing(training.model.parameters(), lr=1.0)
    other = SGD(training.model.parameters(), lr=1.0)
    training.forward().backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        failing.step()
    other.step()
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.UNKNOWN), (0, 1, 0, Outcome.APPLIED)]


def test_what_a_step_that_raised_held_is_not_kept_alive(training):
    """A kept frame would hold the locals of all its callers."""
    optimizer = _Failing(training.model.parameters(), lr=1.0)

    def train():
        activation = torch.ones(3)
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
        return weakref.ref(activation)

    training.forward().backward()
    reference = train()
    gc.collect()
    assert reference() is None


def test_a_step_with_a_scalers_findings_is_unknown(training):
    """A fused optimizer is called on a skipped step too."""
    optimizer = SGD(training.model.parameters(), lr=1.0, fused=True)
    training.forward().backward()
    vars(optimizer)["found_inf"] = torch.zeros(())
    optimizer.step()
    training.close()
    assert [(r.outcome, r.evidence) for r in training.records] == [(Outcome.UNKNOWN, Evidence.NONE)]


def test_a_learning_rate_that_is_a_tensor_is_not_read():
    """It may lie on a device."""
    parameters = [nn.Parameter(torch.zeros(1))]
    assert first_lr(SGD(parameters, lr=0.25)) == 0.25
    assert first_lr(AdamW(parameters, lr=torch.tensor(0.25))) is None
    assert first_lr(object()) is None


def test_an_optimizer_is_not_kept_alive_and_its_ordinal_is_not_used_again(training):
    """Programs that make an optimizer a round must not grow."""
    references = []
    for _ in range(3):
        training.forward().backward()
        optimizer = SGD(training.model.parameters(), lr=1.0)
        optimizer.step()
        references.append(weakref.ref(optimizer))
        del optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert training.watch._known == {}
    training.close()
    assert [r.optimizer for r in training.records] == [0, 1, 2]


def test_errors_inside_the_hooks_stay_inside():
    """They are reported, and the step happens."""
    errors = []

    def broken():
        raise ZeroDivisionError

    watch = OptimizerWatch(StepClock(), broken, on_error=lambda *error: errors.append(error))
    watch.attach()
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    SGD([weight], lr=0.5).step()
    watch.detach()
    assert weight.item() == 0.5
    assert [(probe, type(error)) for probe, error in errors] == [("optimizer", ZeroDivisionError)]


def test_attaching_and_detaching_leaves_torchs_hooks_as_they_were():
    """Twice attached is once attached."""
    before = _hooks()
    watch = OptimizerWatch(StepClock(), lambda: None)
    watch.attach()
    watch.attach()
    assert _hooks() == (before[0] + 1, before[1] + 1)
    watch.detach()
    watch.detach()
    assert _hooks() == before


def test_a_forked_child_is_left_alone(training):
    """Its clock belongs to the parent."""
    optimizer = SGD(training.model.parameters(), lr=1.0)
    training.forward().backward()
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0 if training.now == 2.0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_compiled_step_works_with_the_hooks_attached(training):
    """The hooks return while the compiler traces them."""
    optimizer = SGD(training.model.parameters(), lr=0.5)
    compiled = torch.compile(optimizer.step, backend="eager")
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.forward().backward()
    compiled()
    assert all(
        torch.equal(old - 0.5 * new.grad, new.detach())
        for old, new in zip(before, training.model.parameters(), strict=True)
    )
    assert training.errors == []


def test_muon_for_matrices_and_adamw_for_the_rest_are_two_records_of_one_attempt(training):
    """The usual pair: each has its own ordinal, learning rate and time."""
    parameters = list(training.model.parameters())
    matrices = Muon([one for one in parameters if one.ndim == 2], lr=0.02)
    rest = AdamW([one for one in parameters if one.ndim != 2], lr=0.001)
    for _ in range(2):
        training.forward().backward()
        matrices.step()
        rest.step()
    training.close()
    assert [(r.attempt, r.optimizer, r.optimizer_attempt, r.lr) for r in training.records] == [
        (0, 0, 0, 0.02),
        (0, 1, 0, 0.001),
        (1, 0, 1, 0.02),
        (1, 1, 1, 0.001),
    ]


def test_optimizers_that_step_inside_the_backward_are_steps_of_its_window(training):
    """A small optimizer a parameter, stepped by the hook of its gradient, on an autograd thread or not."""
    optimizers = {}

    def step_at_once(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in training.model.parameters():
        optimizers[parameter] = SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(step_at_once)
    for _ in range(3):
        training.forward().backward()
    training.close()
    assert [(r.attempt, r.optimizer_attempt, r.outcome) for r in training.records] == [
        (attempt, attempt, Outcome.APPLIED) for attempt in range(3) for _ in range(4)
    ]
    assert sorted({r.optimizer for r in training.records}) == [0, 1, 2, 3]
    assert all(r.backward_s == 4.0 for r in training.records)


def test_two_models_with_an_optimizer_each_count_their_own(training):
    """Both watches hear of every step in the process."""
    other = _Training()
    mine, theirs = (SGD(one.model.parameters(), lr=1.0) for one in (training, other))
    for _ in range(2):
        training.forward().backward()
        mine.step()
    other.forward().backward()
    theirs.step()
    training.close()
    other.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, 0, 1, Outcome.APPLIED)]
    assert other.outcomes == [(0, 0, 0, Outcome.APPLIED)]


@pytest.mark.parametrize("place", ["gap", "attempt"])
def test_where_another_model_was_trained_the_gap_is_not_known(training, place):
    """Whether it stepped before the first forward or after it; the attempts before and behind have theirs."""
    mine = SGD(training.model.parameters(), lr=1.0)
    theirs = SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    for attempt in range(4):
        if attempt == 2 and place == "gap":
            theirs.step()
        loss = training.forward()
        if attempt == 2 and place == "attempt":
            theirs.step()
        loss.backward()
        mine.step()
    training.close()
    assert [r.gap_s is None for r in training.records] == [False, False, True, False]
    assert [r.gap_s for r in training.records[:2]] == [0.0, 1.0]


def test_what_steps_inside_the_models_step_or_holds_nothing_is_no_other_model(training):
    """As the parts of a sharded optimizer, of which a rank may have none."""
    inner = SGD([{"params": []}], lr=1.0)

    class _Wrapping(SGD):
        @override
        def step(self, closure=None):
            SGD(nn.Linear(2, 2).parameters(), lr=1.0).step()
            return super().step(closure)

    mine = _Wrapping(training.model.parameters(), lr=1.0)
    for _ in range(3):
        training.forward().backward()
        inner.step()
        mine.step()
    training.close()
    assert all(r.gap_s is not None for r in training.records)


@pytest.mark.parametrize("is_models", [True, False])
def test_beside_a_named_optimizer_only_those_of_other_models_are_others(is_models):
    """One of the model itself that was not named trains no other model."""
    model = nn.Linear(4, 1)
    named = SGD([model.weight], lr=1.0)
    training = _Training(named, model)
    other = SGD([model.bias] if is_models else nn.Linear(2, 2).parameters(), lr=1.0)
    for _ in range(2):
        training.forward().backward()
        named.step()
        other.step()
    training.close()
    assert training.records[1].gap_s == (1.0 if is_models else None)


def test_an_optimizer_over_the_parameters_of_both_models_is_each_ones(training):
    """Its step ends an attempt of the one and of the other."""
    other = _Training()
    both = SGD([*training.model.parameters(), *other.model.parameters()], lr=1.0)
    for _ in range(2):
        (training.forward() + other.forward()).backward()
        both.step()
    training.close()
    other.close()
    assert training.outcomes == other.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, 0, 1, Outcome.APPLIED)]


def test_a_step_in_another_thread_counts_though_the_model_is_called_meanwhile(training):
    """It is not on the stack of the thread that asks, which looked like an exception at first."""
    stepping, evaluated = threading.Event(), threading.Event()

    class _Slow(SGD):
        @override
        def step(self, closure=None):
            stepping.set()
            assert evaluated.wait(20.0)
            return super().step(closure)

    optimizer = _Slow(training.model.parameters(), lr=0.5)
    training.forward().backward()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    assert stepping.wait(20.0)
    started = training.clock.forward_started(grad_enabled=False, now_s=training.tick(), now_us=0)
    training.clock.forward_ended(training.tick(), GradSync.NOT_DISTRIBUTED, started.position)
    evaluated.set()
    thread.join()
    training.close()
    assert [(r.attempt, r.outcome, r.lr) for r in training.records] == [(0, Outcome.APPLIED, 0.5)]


class _Accelerated(Optimizer):
    """Built as Accelerate's wrapper is: an optimizer by name that torch never set up, around a real one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    @override
    def param_groups(self):  # pyrefly: ignore
        return self.optimizer.param_groups

    @override
    def step(self, closure=None):
        return self.optimizer.step(closure)


class _EngineOptimizer:
    """Built as DeepSpeed's is: no optimizer to torch, with parameters of its own in the one it holds."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


def test_wrappers_are_seen_through_to_the_optimizer_that_torch_knows():
    """However many there are; an optimizer whose step torch announces is the end."""
    inner = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    for wrapper in (_Accelerated(inner), _EngineOptimizer(inner), _Accelerated(_EngineOptimizer(inner))):
        assert unwrapped(wrapper) is inner
    assert unwrapped(inner) is inner
    assert unwrapped(nn.Linear(1, 1)) is None
    loop = _EngineOptimizer(None)
    loop.optimizer = loop
    assert unwrapped(loop) is None


def test_lightnings_optimizer_is_seen_through():
    """It has the class of what it wraps, and a step of its own."""
    inner = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    wrapper: Any = LightningOptimizer(inner)
    assert isinstance(wrapper, SGD)
    assert unwrapped(wrapper) is inner


def test_a_wrapper_that_steps_counts_as_the_optimizer_inside(training):
    """Also where it is named, and where a scaler asks for it."""
    inner = SGD(training.model.parameters(), lr=1.0)
    wrapper = _Accelerated(inner)
    named = OptimizerWatch(StepClock(), lambda: None, unwrapped(wrapper))
    for _ in range(2):
        training.forward().backward()
        wrapper.step()
    assert training.watch.known(wrapper) is training.watch.known(inner)
    assert training.watch.known(inner) is not None
    assert named.known(wrapper) is not None
    assert named.known(SGD([nn.Parameter(torch.zeros(1))], lr=1.0)) is None
    training.close()
    assert training.outcomes == [(0, 0, 0, Outcome.APPLIED), (1, 0, 1, Outcome.APPLIED)]


def test_several_named_optimizers_count_and_no_other_one():
    """Whatever their parameters."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    named = [SGD([nn.Parameter(torch.zeros(3))], lr=lr) for lr in (0.25, 0.5)]
    training = _Training(only=named, model=model)
    other = SGD(model.parameters(), lr=1.0)
    training.forward().backward()
    for optimizer in (*named, other):
        optimizer.step()
    training.close()
    assert [(r.optimizer, r.lr) for r in training.records] == [(0, 0.25), (1, 0.5)]
