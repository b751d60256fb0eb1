"""Real gradient scalers on the CPU under the watch."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from torchinstruments.config import UNSET
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.loss_scale import ScalerWatch
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.records import Evidence, GradSync, Outcome, ScaleProvenance


class _Training:
    """A one-weight model, its clock, and both watches."""

    def __init__(self, declared: Any = UNSET, model: Any = None):
        self.model: Any = nn.Linear(1, 1, bias=False) if model is None else model
        self.errors = []
        self.clock = StepClock()
        self.optimizers = OptimizerWatch(self.clock, weakref.ref(self.model), on_error=self.report)
        self.notices = []
        self.scalers = ScalerWatch(
            self.clock,
            self.optimizers,
            declared=declared,
            on_error=self.report,
            on_notice=self.notice,
        )
        self.records = []

    def report(self, probe, error):
        self.errors.append((probe, error))

    def notice(self, probe, sentence):
        assert probe == "loss_scale"
        self.notices.append(sentence)

    def __enter__(self):
        self.optimizers.attach()
        self.scalers.attach()
        return self

    def __exit__(self, *_):
        self.scalers.detach()
        self.optimizers.detach()
        assert self.errors == []

    def step(self, scaler, optimizer, *, overflow=False):
        started = self.clock.forward_started(grad_enabled=True, now_s=0.0, now_us=0)
        self.records += [attempt.resolve() for attempt in started.closed]
        loss = self.model(torch.full((1, 1), float("inf") if overflow else 1.0)).sum()
        self.clock.forward_ended(0.0, GradSync.NOT_DISTRIBUTED)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def close(self):
        self.records += [attempt.resolve() for attempt in self.clock.close(0.0)]
        return [(r.outcome, r.evidence, r.found_inf) for r in self.records]


def _scaler_of(**options):
    return GradScaler("cpu", init_scale=1024.0, **options)


def test_an_ordinary_optimizer_is_applied_or_skipped_by_the_scalers_findings():
    """The scaler reads them on the host itself, before it calls the optimizer."""
    with _Training() as training:
        optimizer, scaler = SGD(training.model.parameters(), lr=0.1), _scaler_of()
        for overflow in (False, True, False):
            training.step(scaler, optimizer, overflow=overflow)
        assert training.close() == [
            (Outcome.APPLIED, Evidence.FOUND_INF, 0.0),
            (Outcome.SKIPPED, Evidence.FOUND_INF, 1.0),
            (Outcome.APPLIED, Evidence.FOUND_INF, 0.0),
        ]
        assert [r.optimizer_attempt for r in training.records] == [0, 1, 2]
        assert [r.lr for r in training.records] == [0.1] * 3


def test_an_optimizer_that_a_scaler_failed_to_step_is_asked_for_anew():
    """By the time that the program steps it, it may hold nothing of the model any more."""
    with _Training() as training:
        optimizer, scaler = SGD(training.model.parameters(), lr=0.1), _scaler_of()
        training.step(scaler, optimizer)
        optimizer.zero_grad()
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)
        optimizer.param_groups[0]["params"] = list(nn.Linear(2, 2).parameters())
        started = training.clock.forward_started(grad_enabled=True, now_s=0.0, now_us=0)
        training.records += [attempt.resolve() for attempt in started.closed]
        optimizer.step()
        training.close()
        assert [(r.attempt, r.lr, r.outcome) for r in training.records] == [
            (0, 0.1, Outcome.APPLIED),
            (1, None, Outcome.ABANDONED),
        ]


def test_an_optimizer_that_a_scaler_skipped_is_asked_for_anew():
    """What it holds may be exchanged before the program steps it, without a forward in between."""
    with _Training() as training:
        optimizer, scaler = SGD(training.model.parameters(), lr=0.1), _scaler_of()
        training.step(scaler, optimizer, overflow=True)
        optimizer.param_groups[0]["params"] = list(nn.Linear(2, 2).parameters())
        optimizer.step()
        training.close()
        assert [record.outcome for record in training.records] == [Outcome.SKIPPED]


def test_a_fused_optimizer_is_called_in_any_case_and_its_findings_decide():
    """It is called on both steps, so that a call proves nothing."""
    with _Training() as training:
        optimizer, scaler = AdamW(training.model.parameters(), fused=True), _scaler_of()
        for overflow in (False, True):
            training.step(scaler, optimizer, overflow=overflow)
        assert training.close() == [
            (Outcome.APPLIED, Evidence.FOUND_INF, 0.0),
            (Outcome.SKIPPED, Evidence.FOUND_INF, 1.0),
        ]


def test_a_disabled_scaler_leaves_the_hooks_evidence():
    """It passes the step on and scales nothing."""
    with _Training() as training:
        scaler = _scaler_of(enabled=False)
        training.step(scaler, SGD(training.model.parameters(), lr=0.1))
        assert training.close() == [(Outcome.APPLIED, Evidence.OPTIMIZER_HOOK, None)]
        assert training.scalers.current_scale() == (None, ScaleProvenance.NONE_SEEN)


def test_the_current_scale_is_the_scalers_own_tensor_once_it_scaled():
    """Before the first scale nobody knows of a scaler."""
    with _Training() as training:
        scaler = _scaler_of()
        assert training.scalers.current_scale() == (None, ScaleProvenance.NONE_SEEN)
        scaler.scale(torch.ones(()))
        scale, provenance = training.scalers.current_scale()
        assert scale is scaler._scale
        assert provenance is ScaleProvenance.GRADSCALER
        assert scale is not None
        assert scale.item() == 1024.0


def test_of_several_scalers_the_one_that_steps_the_models_optimizer_is_its():
    """Until it did, none of them is believed."""
    with _Training() as training:
        other_model = nn.Linear(1, 1)
        mine, other = _scaler_of(), _scaler_of()
        other.scale(other_model(torch.ones(1, 1)).sum()).backward()
        mine.scale(torch.ones(()))
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNKNOWN)
        training.step(mine, SGD(training.model.parameters(), lr=0.1))
        other.step(SGD(other_model.parameters(), lr=0.1))
        assert training.scalers.current_scale() == (mine._scale, ScaleProvenance.GRADSCALER)


class _Halves:
    """Two halves of one model, each with an optimizer, and the provenance and scale at each backward."""

    def __init__(self):
        halves = {name: nn.Linear(1, 1) for name in "ab"}
        self.training = _Training(model=nn.ModuleDict(halves))
        self.of = {name: SGD(half.parameters(), lr=0.1) for name, half in halves.items()}
        self.told = []

    def forward(self, name="a"):
        clock = self.training.clock
        index = clock.forward_started(grad_enabled=True, now_s=0.0, now_us=0).position.forward_index
        loss = self.training.model[name](torch.ones(1, 1)).sum()
        clock.forward_ended(0.0, GradSync.NOT_DISTRIBUTED)
        return loss, index

    def backward(self, loss, index, scaler=None):
        (loss if scaler is None else scaler.scale(loss)).backward()
        scale, provenance = self.training.scalers.current_scale(index)
        self.told.append(provenance.value if scale is None else scale.item())

    def step(self, scaler=None, name="a"):
        """Runs an attempt of one half, with or without a scaler."""
        self.backward(*self.forward(name), scaler)
        if scaler is None:
            self.of[name].step()
        else:
            scaler.step(self.of[name])
            scaler.update()


def test_two_scalers_of_one_model_are_told_apart_by_who_scaled_since_the_forward():
    """Each backward has the scale that its loss went through, from the first on."""
    halves = _Halves()
    with halves.training:
        first, second = _scaler_of(), GradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            halves.step(first, "a")
            halves.step(second, "b")
        assert halves.training.scalers.current_scale() == (None, ScaleProvenance.UNKNOWN)
    assert halves.told == [1024.0, 8.0] * 3


def test_two_scalers_that_scaled_since_one_forward_leave_its_scale_unknown():
    """Through which of them the loss went, nothing tells."""
    halves = _Halves()
    with halves.training:
        first, second = _scaler_of(), GradScaler("cpu", init_scale=8.0)
        one, other = halves.forward("a"), halves.forward("b")
        halves.backward(*one, first)
        halves.backward(*other, second)
        halves.backward(*halves.forward("b"), second)
    assert halves.told == [1024.0, "unknown", 8.0]


def test_a_scaler_that_replaces_another_counts_from_its_first_backward_on():
    """Also while the old one lives."""
    halves = _Halves()
    with halves.training:
        old = _scaler_of()
        halves.step(old)
        new = GradScaler("cpu", init_scale=16.0)
        halves.step(new)
        halves.step(new)
        assert old is not new
    assert halves.told == [1024.0, 16.0, 16.0]


def test_an_optimizer_that_steps_without_the_scaler_beside_it_makes_the_scale_unknown():
    """No backward is attributed any more; of the first ones none wrongly."""
    halves = _Halves()
    with halves.training:
        scaler = _scaler_of()
        for _ in range(2):
            halves.step(scaler, "a")
            halves.step(None, "b")
    assert halves.told == [1024.0, "unknown", "unknown", "unknown"]


def test_a_step_before_any_scaler_was_seen_makes_nothing_unknown():
    """A warm-up without one."""
    halves = _Halves()
    with halves.training:
        halves.step(None)
        halves.step(_scaler_of())
    assert halves.told == ["none_seen", 1024.0]


def test_a_scaler_of_another_model_that_scaled_first_is_not_taken_for_this_ones():
    """It scaled before the forward, and the optimizer then steps without it."""
    halves, theirs, scaler = _Halves(), nn.Linear(1, 1), _scaler_of()
    with halves.training:
        scaler.scale(theirs(torch.ones(1, 1)).sum()).backward()
        halves.step(None)
        loss, index = halves.forward()
        scaler.scale(theirs(torch.ones(1, 1)).sum()).backward()
        halves.backward(loss, index)
    assert halves.told == ["unknown"] * 2


def test_a_backward_before_the_loss_was_scaled_has_no_known_scale():
    """A penalty on gradients is computed from the loss as it is."""
    halves = _Halves()
    with halves.training:
        scaler = _scaler_of()
        halves.step(scaler)
        halves.backward(*halves.forward())
        halves.backward(*halves.forward(), scaler)
    assert halves.told == [1024.0, "unknown", 1024.0]


def test_a_scaler_whose_scaling_cannot_be_seen_counts_by_its_steps_where_it_is_the_only_one():
    """A program compiled it, or multiplies with the scale itself."""
    halves = _Halves()
    with halves.training:
        scaler = _scaler_of()
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        for _ in range(2):
            loss, index = halves.forward()
            halves.backward(scaler.get_scale() * loss, index)
            scaler.step(halves.of["a"])
            scaler.update()
        other = _scaler_of()
        other.scale(torch.ones(()))
        halves.backward(*halves.forward())
    assert halves.told == ["none_seen", 1024.0, "unknown"]


def test_a_scaler_that_stepped_only_another_model_is_not_believed():
    """Its scale would be a guess."""
    with _Training() as training:
        other_model, other = nn.Linear(1, 1), _scaler_of()
        other.scale(other_model(torch.ones(1, 1)).sum()).backward()
        other.step(SGD(other_model.parameters(), lr=0.1))
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNKNOWN)


def test_a_scaler_that_is_gone_is_forgotten():
    """The watch keeps no scaler alive."""
    with _Training() as training:
        _scaler_of().scale(torch.ones(()))
        assert training.scalers.current_scale() == (None, ScaleProvenance.NONE_SEEN)


def test_a_sharded_scaler_is_seen_though_it_overrides_scale():
    """It does not call the method of its base class."""
    with _Training() as training:
        scaler = ShardedGradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        assert training.scalers.current_scale() == (scaler._scale, ScaleProvenance.GRADSCALER)


def test_a_subclass_that_is_made_after_attach_is_known_from_the_next_question_on():
    """A late import brings one in."""
    with _Training() as training:

        class _Late(GradScaler):
            @override
            def scale(self, outputs):
                if self._scale is None:
                    self._lazy_init_scale_growth_tracker(outputs.device)
                return outputs * self._scale

        scaler = _Late("cpu", init_scale=16.0)
        assert training.scalers.current_scale() == (None, ScaleProvenance.NONE_SEEN)
        scaler.scale(torch.ones(()))
        assert training.scalers.current_scale() == (scaler._scale, ScaleProvenance.GRADSCALER)
    assert not hasattr(_Late.scale, "__wrapped__")


class _HostReads(TorchDispatchMode):
    """Counts reads of a scalar on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _count_host_reads(training):
    optimizer, scaler = SGD(training.model.parameters(), lr=0.1), _scaler_of()
    with _HostReads() as reads:
        training.step(scaler, optimizer)
        training.scalers.current_scale()
    return reads.count


def test_the_watch_reads_nothing_on_the_host():
    """What the scaler reads without it is all that is read with it."""
    without = _count_host_reads(_Training())
    with _Training() as training:
        assert _count_host_reads(training) == without


def test_a_declared_scaler_alone_counts_from_the_beginning_on():
    """Another one that scales as well is not asked, whatever it steps once the declared one has scaled."""
    scaler, other = _scaler_of(), _scaler_of()
    with _Training(scaler) as training:
        other.scale(torch.ones(()))
        assert training.scalers.current_scale() == (None, ScaleProvenance.NONE_SEEN)
        optimizer = SGD(training.model.parameters(), lr=0.1)
        training.step(scaler, optimizer)
        training.step(other, optimizer, overflow=True)
        assert training.scalers.current_scale() == (scaler._scale, ScaleProvenance.GRADSCALER)
        assert training.notices == []
        # What became of a step is a fact whoever scaled.
        assert [outcome for outcome, _, _ in training.close()] == [Outcome.APPLIED, Outcome.SKIPPED]


def test_a_declared_scaler_that_is_disabled_declares_that_nothing_scales():
    """It passes the loss on as it is."""
    with _Training(_scaler_of(enabled=False)) as training:
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNKNOWN)
    scaler = _scaler_of(enabled=False)
    with _Training(scaler) as training:
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNSCALED)


def test_a_declared_scaler_that_is_gone_leaves_the_scale_unknown():
    """The watch keeps no scaler alive."""
    scaler = _scaler_of()
    with _Training(scaler) as training:
        scaler.scale(torch.ones(()))
        del scaler
        gc.collect()
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNKNOWN)


def test_a_declared_scaler_that_never_scaled_is_contradicted_by_one_that_steps():
    """Most likely the wrong one was given."""
    declared, scaler = _scaler_of(), _scaler_of()
    with _Training(declared) as training:
        training.step(scaler, SGD(training.model.parameters(), lr=0.1))
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNKNOWN)
        (notice,) = training.notices
        assert notice.startswith("a scaler that has not scaled anything was given, but another GradScaler")


def test_none_declares_that_nothing_scales():
    """A number beside it would be a guess."""
    with _Training(None) as training:
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNSCALED)


def test_a_number_declares_what_the_loop_multiplies_with():
    """It comes as a tensor, like every other scale."""
    with _Training(512.0) as training:
        scale, provenance = training.scalers.current_scale()
        assert scale is not None
        assert (scale.item(), provenance) == (512.0, ScaleProvenance.EXPLICIT)


@pytest.mark.parametrize("declared", [None, 512.0])
def test_a_scaler_that_steps_against_what_was_declared_is_said_once_and_makes_it_unknown(declared):
    """From its first scaling on nothing is claimed; the ledger has what the scaler did all the same."""
    with _Training(declared) as training:
        optimizer, scaler = SGD(training.model.parameters(), lr=0.1), _scaler_of()
        scaler.scale(torch.ones(()))
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNKNOWN)
        training.step(scaler, optimizer)
        training.step(scaler, optimizer, overflow=True)
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNKNOWN)
        (notice,) = training.notices
        assert notice.startswith(f"scaler={declared} was given, but a GradScaler stepped an optimizer")
        assert training.close() == [
            (Outcome.APPLIED, Evidence.FOUND_INF, 0.0),
            (Outcome.SKIPPED, Evidence.FOUND_INF, 1.0),
        ]
        assert [(r.scale_before, r.scale_after) for r in training.records] == [(1024, 1024), (1024, 512)]


def test_a_scaler_of_another_model_does_not_contradict_what_was_declared():
    """Once its step has shown whose it is."""
    with _Training(None) as training:
        other_model, other = nn.Linear(1, 1), _scaler_of()
        other.scale(other_model(torch.ones(1, 1)).sum()).backward()
        other.step(SGD(other_model.parameters(), lr=0.1))
        assert training.scalers.current_scale() == (None, ScaleProvenance.UNSCALED)
        assert training.notices == []


def test_a_scaler_that_is_never_updated_does_not_fill_the_memory():
    """Torch refuses a second step of one optimizer, but a program may make new ones for ever."""
    with _Training() as training:
        scaler = _scaler_of()
        optimizers = [SGD(training.model.parameters(), lr=0.1) for _ in range(300)]
        for optimizer in optimizers:
            scaler.scale(training.model(torch.ones(1, 1)).sum()).backward()
            scaler.step(optimizer)
        (ledger,) = training.scalers._ledgers.values()
        assert len(ledger.open) == 256
        scaler.update()
        assert ledger.open == []


class _Broken(GradScaler):
    """Answers nothing but what torch itself needs."""

    @override
    def is_enabled(self):
        raise OSError("do not ask")


def test_what_fails_in_a_scaler_of_somebody_elses_reaches_the_errors_and_not_the_loop():
    """Its steps are then known by the optimizer's hooks alone."""
    training = _Training()
    with pytest.raises(AssertionError, match="loss_scale"), training:
        training.step(_Broken("cpu", init_scale=2.0), SGD(training.model.parameters(), lr=0.1))
    assert {(probe, str(error)) for probe, error in training.errors} == {("loss_scale", "do not ask")}
    assert training.close() == [(Outcome.APPLIED, Evidence.OPTIMIZER_HOOK, None)]


class _Left:
    """Asks at every step which factor is left in the gradients of a forward."""

    def __init__(self, training, forward_index=0):
        self.training, self.forward_index, self.told = training, forward_index, []

    def _ask(self, optimizer):
        left, provenance = self.training.scalers.scale_left(optimizer, self.forward_index)
        self.told.append((float(left) if isinstance(left, torch.Tensor) else left, provenance))

    def step_began(self, optimizer, *, has_closure):
        assert not has_closure
        self._ask(optimizer)

    def step_ended(self, optimizer):
        pass

    def step_skipped(self, optimizer):
        self._ask(optimizer)


class _Holder:
    """Holds an optimizer under a name of its own, and lends its attributes."""

    def __init__(self, optimizer):
        self.opt = optimizer

    def __getattr__(self, name):
        return getattr(self.opt, name)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, _Holder])
def test_the_scale_that_is_left_follows_what_the_scaler_did(wrap):
    """An ordinary optimizer finds its gradients unscaled, also where it is skipped and in a wrapper."""
    with _Training() as training:
        left = training.optimizers.listener = _Left(training)
        optimizer = SGD(training.model.parameters(), lr=0.1)
        optimizer.step()
        scaler = _scaler_of()
        training.step(scaler, wrap(optimizer))
        training.step(scaler, wrap(optimizer), overflow=True)
    assert left.told == [(None, ScaleProvenance.NONE_SEEN)] + [(1.0, ScaleProvenance.GRADSCALER)] * 2


def test_a_fused_optimizer_divides_itself_unless_the_program_had_it_unscaled():
    """Asking makes no entry."""
    with _Training() as training:
        left = training.optimizers.listener = _Left(training)
        optimizer, scaler = AdamW(training.model.parameters(), fused=True), _scaler_of()
        training.step(scaler, optimizer)
        scaler.scale(training.model(torch.ones(1, 1)).sum()).backward()
        assert training.scalers.scale_left(optimizer, 0) == (None, ScaleProvenance.UNKNOWN)
        assert not scaler._per_optimizer_states
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert left.told == [(1024.0, ScaleProvenance.GRADSCALER), (1.0, ScaleProvenance.GRADSCALER)]


def test_the_scale_that_is_left_where_the_program_steps_itself():
    """After unscale_ it is known; whether the program divided by itself, nothing tells."""
    with _Training() as training:
        left = training.optimizers.listener = _Left(training)
        optimizer, scaler = SGD(training.model.parameters(), lr=0.1), _scaler_of()
        for unscales in (True, False):
            scaler.scale(training.model(torch.ones(1, 1)).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            optimizer.step()
    assert left.told == [(1.0, ScaleProvenance.GRADSCALER), (None, ScaleProvenance.UNKNOWN)]


def test_the_scale_that_is_left_is_unknown_where_two_scalers_have_scaled_since_the_forward():
    """The one that steps has divided by its own scale alone."""
    with _Training() as training:
        left = training.optimizers.listener = _Left(training)
        optimizer, scaler, other = SGD(training.model.parameters(), lr=0.1), _scaler_of(), _scaler_of()
        training.clock.forward_started(grad_enabled=True, now_s=0.0, now_us=0)
        for one in (scaler, other):
            one.scale(training.model(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
    assert left.told == [(None, ScaleProvenance.UNKNOWN)]


def test_a_listener_is_told_of_begun_ended_and_skipped_steps():
    """Of this model's optimizers alone, and of a closure."""
    told: list[tuple[object, ...]] = []

    class Listener:
        def step_began(self, optimizer, *, has_closure):
            told.append(("began", optimizer, has_closure))

        def step_ended(self, optimizer):
            told.append(("ended", optimizer))

        def step_skipped(self, optimizer):
            told.append(("skipped", optimizer))

    with _Training() as training:
        training.optimizers.listener = Listener()
        optimizer = SGD(training.model.parameters(), lr=0.1)
        scaler = _scaler_of()
        training.step(scaler, optimizer)
        training.step(scaler, optimizer, overflow=True)
        optimizer.step(lambda: 0.0)
        optimizer.step(closure=lambda: 0.0)
        SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert told == [
        ("began", optimizer, False),
        ("ended", optimizer),
        ("skipped", optimizer),
        ("began", optimizer, True),
        ("ended", optimizer),
        ("began", optimizer, True),
        ("ended", optimizer),
    ]
