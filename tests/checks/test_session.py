"""A session by itself: attaching, counting, pausing, reporting."""

import gc
import json
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

from checks.training import Secretive, batch, compiled, mlp, scaler, train
from torchinstruments.checks import CheckLifecycleError, ChecksSession
from torchinstruments.errors import ConfigurationError


def _num_step_hooks():
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(
        torch_optimizer._global_optimizer_post_hooks
    )


def _num_tensor_hooks(model):
    return sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())


def test_a_session_that_is_made_touches_nothing(capsys, recwarn):
    """No hook, no output, no warning."""
    model = mlp()
    before = _num_step_hooks()
    ChecksSession(model, SGD(model.parameters(), lr=0.1), scaler=None)
    assert _num_step_hooks() == before
    assert _num_tensor_hooks(model) == 0
    assert capsys.readouterr().out == ""
    assert len(recwarn) == 0


def test_detaching_leaves_no_hook_and_may_be_repeated():
    """Neither on parameters, nor on the model, nor on the process."""
    model, before = mlp(), _num_step_hooks()
    session = ChecksSession(model).attach()
    assert _num_tensor_hooks(model) == 4
    train(model)
    session.detach()
    session.detach()
    assert _num_step_hooks() == before
    assert _num_tensor_hooks(model) == 0
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_attaching_twice_is_refused():
    """The message has the way out."""
    session = ChecksSession(mlp()).attach()
    with pytest.raises(CheckLifecycleError, match=r"detach\(\)"):
        session.attach()
    session.detach()


def test_a_session_that_is_dropped_leaves_no_hook_of_the_process():
    """Global hooks go with the session."""
    before = _num_step_hooks()
    session = ChecksSession(mlp()).attach()
    assert _num_step_hooks() > before
    del session
    gc.collect()
    assert _num_step_hooks() == before


def test_attempts_and_micro_batches_are_counted_per_attempt():
    """Four micro-batches a step, none divided out."""
    model = mlp()
    with ChecksSession(model, scaler=None) as session:
        train(model, steps=3, micro_batches=4)
    scale = session.report().to_dict()["ledgers"]["scale"]
    assert (scale["attempts"], scale["accepted_steps"], scale["skipped_attempts"]) == (3, 3, 0)
    assert scale["micro_batches_per_attempt"] == {"lowest": 4, "highest": 4, "most_frequent": 4}
    assert session.report().counters["backwards"] == 12


@pytest.mark.parametrize(("overflows", "skipped"), [((1,), 1), ((1, 2, 3), 3), ((7,), 1), (range(8), 8)])
def test_skipped_steps_are_counted_exactly(overflows, skipped):
    """One, three in a row, the last, all."""
    model, grad_scaler = mlp(), scaler()
    with ChecksSession(model, scaler=grad_scaler) as session:
        train(model, steps=8, grad_scaler=grad_scaler, overflows=tuple(overflows))
    scale = session.report().ledgers["scale"]
    assert (scale["attempts"], scale["skipped_attempts"]) == (8, skipped)
    assert scale["accepted_steps"] == 8 - skipped
    assert scale["backoff_events"] == skipped


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_growth_of_the_scale_is_counted_apart_from_skips(micro_batches):
    """An interval of one: every accepted step grows."""
    model, grad_scaler = mlp(), scaler(growth_interval=1)
    with ChecksSession(model, scaler=grad_scaler) as session:
        train(model, steps=8, micro_batches=micro_batches, grad_scaler=grad_scaler, overflows=(2, 5))
    scale = session.report().ledgers["scale"]
    assert (scale["skipped_attempts"], scale["growth_events"]) == (2, 6)


def test_backwards_of_disjoint_parameters_are_two():
    """Two losses over two halves: eight backwards in four steps."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    optimizer = SGD(model.parameters(), lr=0.1)
    with ChecksSession(model, scaler=None) as session:
        for _ in range(4):
            optimizer.zero_grad()
            for half in model.values():
                half(batch()).sum().backward()
            optimizer.step()
    assert session.report().counters["backwards"] == 8


def test_a_layer_that_is_checkpointed_twice_belongs_to_one_backward():
    """Reentrant checkpointing makes backwards of its own inside one."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            x = checkpoint(self.layer, x, use_reentrant=True)
            return checkpoint(self.layer, x, use_reentrant=True)

    model = Twice()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ChecksSession(model, scaler=None) as session:
        for _ in range(4):
            optimizer.zero_grad()
            model(batch().requires_grad_()).sum().backward()
            optimizer.step()
    assert session.report().counters["backwards"] == 4


def test_a_gradient_penalty_is_part_of_its_backward():
    """What autograd.grad computes adds to no gradient."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ChecksSession(model, scaler=None) as session:
        for _ in range(3):
            optimizer.zero_grad()
            x = batch().requires_grad_()
            loss = model(x).sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            optimizer.step()
    assert session.report().counters["backwards"] == 3


def test_blocks_count_attempts_and_compare_declared_micro_batches():
    """The caller's numbers, and the block that did not do what it said."""
    model, grad_scaler = mlp(), scaler()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ChecksSession(model, optimizer, scaler=grad_scaler) as session:
        for step in range(3):
            with session.step(global_step=step, micro_batches=2):
                train(
                    model,
                    optimizer,
                    steps=1,
                    micro_batches=1 + (step != 1),
                    grad_scaler=grad_scaler,
                    overflows=(0,) if step == 2 else (),
                )
    report = session.report()
    assert report.counters["explicit_attempts"] == 3
    assert report.counters["explicit_accepted"] == 2
    assert report.counters["explicit_skipped"] == 1
    assert report.disclosures["boundary_micro_batches"]["mismatches"] == 1
    assert report.disclosures["boundary_micro_batches"]["first_mismatch"]["seen"] == 1


def test_a_skipped_block_with_an_unused_parameter_is_skipped():
    """A parameter that no backward reaches leaves nothing open."""
    model, grad_scaler = mlp(), scaler()
    model.unused = nn.Parameter(torch.ones(2))
    optimizer = SGD(model.parameters(), lr=0.1)
    with ChecksSession(model, optimizer, scaler=grad_scaler) as session:
        with session.step():
            train(model[:2], optimizer, steps=1, grad_scaler=grad_scaler, overflows=(0,))
    assert session.report().counters["explicit_skipped"] == 1


def test_what_cannot_be_watched_is_refused_in_one_sentence():
    """Model and optimizer are checked when the session is made."""
    with pytest.raises(ConfigurationError, match=r"model=int cannot be watched"):
        ChecksSession(cast("nn.Module", 3))
    with pytest.raises(ConfigurationError, match=r"model has the key 1, which is no name"):
        ChecksSession(cast("nn.Module", {"a": torch.ones(1), 1: torch.ones(1)}))
    with pytest.raises(ConfigurationError, match=r"optimizer='adam'"):
        ChecksSession(mlp(), "adam")


def test_an_optimizer_of_another_model_is_refused():
    """A check before its writes would protect nothing; no hook is left."""
    model, before = mlp(), _num_step_hooks()
    session = ChecksSession(model, SGD(mlp().parameters(), lr=0.1), scaler=None)
    session.register_nonfinite_grad_check()
    with pytest.raises(ConfigurationError, match="optimizer=SGD has no parameter of the model"):
        session.attach()
    assert _num_step_hooks() == before
    assert _num_tensor_hooks(model) == 0
    assert not session.is_attached


def test_each_of_several_optimizers_has_to_be_the_models():
    """One with a single parameter of it is, one that has no parameters yet may become so."""
    model, other = mlp(), mlp()
    part = SGD([*other.parameters(), model[1].bias], lr=0.1)
    empty = SGD([{"params": []}], lr=0.1)
    with ChecksSession(model, [part, empty], scaler=None) as session:
        assert session.is_attached
    with pytest.raises(ConfigurationError, match="optimizer=SGD has no parameter"):
        ChecksSession(model, [part, SGD(other.parameters(), lr=0.1)], scaler=None).attach()


@pytest.mark.parametrize("given", ["x", 0, True, -1.0, float("nan"), float("inf"), 10**400, GradScaler])
def test_a_scaler_that_scales_nothing_is_refused(given):
    """The sentence has what was given, and what may be."""
    with pytest.raises(ConfigurationError, match=r"scaler=.* is not possible; give the torch.amp.GradScaler"):
        ChecksSession(mlp(), scaler=given)


@pytest.mark.parametrize("given", [8, 8.0])
def test_a_number_is_a_scale(given):
    """An integer is one too, and stands in what the report discloses."""
    assert ChecksSession(mlp(), scaler=given).report().disclosures["scaler_declared"] == 8.0


def test_a_report_is_strict_json_and_cannot_be_changed():
    """Whatever is in it."""
    model = mlp()
    with ChecksSession(model) as session:
        train(model)
    report = session.final_report
    assert report is not None
    assert report.finalized_reason == "scope_exit"
    text = report.to_json()
    assert json.loads(text, parse_constant=pytest.fail)["schema_version"] == 1
    with pytest.raises(TypeError):
        report.ledgers["scale"]["attempts"] = 5
    with pytest.raises(AttributeError):
        setattr(report, "findings", ())  # noqa: B010 - as a program does that is not type-checked


def test_a_report_is_finalised_after_an_exception():
    """The exception goes on."""
    model = mlp()
    session = ChecksSession(model)

    def failing_loop():
        with session:
            train(model)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        failing_loop()
    assert session.final_report is not None
    assert session.final_report.finalized_reason == "exception_exit"


def test_the_environment_turns_a_session_off(monkeypatch):
    """No hook, and the report says so."""
    monkeypatch.setenv("TORCHINSTRUMENTS_DISABLED", "1")
    model = mlp()
    with ChecksSession(model) as session:
        assert _num_tensor_hooks(model) == 0
        train(model)
    assert session.report().disclosures["disabled_by_environment"] is True


def test_a_mapping_of_tensors_can_be_watched():
    """Its names are the mapping's."""
    weight = torch.ones(3, requires_grad=True)
    optimizer = SGD([weight], lr=0.1)
    with ChecksSession({"weight": weight}, scaler=None) as session:
        for _ in range(2):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
    assert session.report().ledgers["scale"]["accepted_steps"] == 2
    assert session.report().coverage["parameters_that_fired"] == 1


def test_a_buffer_whose_class_answers_no_question_is_compared():
    """Neither a step nor the report asks it."""
    model = mlp()
    model.register_buffer("table", torch.ones(3).as_subclass(Secretive))
    session = ChecksSession(model, scaler=None)
    session.register_frozen_check(["table"])
    session.register_nonfinite_param_check()
    with session:
        train(model)
    assert (session.report().unavailable, session.report().findings) == ((), ())


def test_counts_go_on_from_one_block_to_the_next():
    """So that they agree with the ledger, and no attempt has the number of another."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_nonfinite_grad_check(action="collect")
    for _ in range(2):
        with session:
            train(model, steps=1, overflows=(0,))
    report = session.report()
    assert (report.counters["accepted_steps"], report.counters["backwards"]) == (2, 2)
    assert report.ledgers["scale"]["accepted_steps"] == 2
    found = [(one.code, one.moment.attempt, one.moment.backward) for one in report.findings]
    assert [(attempt, backward) for code, attempt, backward in found if "accumulation" in code] == [
        (0, 0),
        (1, 1),
    ]


def test_a_session_may_be_detached_in_the_middle_of_a_step():
    """What comes after is not looked at, and no copy of a parameter stays."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    session.register_update_ratio_check()
    session.attach()

    def closure():
        session.detach()
        loss = model(batch()).sum() * float("inf")
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (session.is_attached, session.report().findings) == (False, ())
    assert not torch.isfinite(model[0].weight).all()


def test_a_session_may_be_detached_in_the_middle_of_a_backward():
    """The gradients that come after begin nothing anew."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    session.attach()
    model[1].weight.register_hook(lambda _: session.detach())
    (model(batch()).sum() * float("inf")).backward()
    optimizer.step()
    assert session.report().findings == ()
    assert _num_tensor_hooks(model) == 0


def test_what_is_no_optimizer_is_named_in_one_line():
    """Without the many lines that an optimizer prints."""
    model = mlp()
    with pytest.raises(ConfigurationError) as raised:
        ChecksSession(model, [SGD(model.parameters()), 3])
    assert str(raised.value).startswith("optimizer=[SGD, 3] is no torch.optim.Optimizer")
    assert "\n" not in str(raised.value)
    with pytest.raises(
        ConfigurationError,
        match=r"^optimizer=\{SGD \( Parameter Group 0 .{50,70}\.\.\. is no torch.optim.Optimizer",
    ):
        ChecksSession(model, {SGD(model.parameters())})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_step_of_other_parameters_behind_one_that_raised_is_none_of_the_models(is_checked: bool) -> None:
    """The optimizer is the same, and the clock has not heard yet that its last step is over."""
    model, other = mlp(), mlp()
    optimizer = SGD(model.parameters(), lr=0.1)

    def fail() -> float:
        raise OSError("mine")

    session = ChecksSession(model)
    if is_checked:
        session.register_nonfinite_grad_check()
    with session:
        train(model, optimizer, steps=1)
        model(batch()).sum().backward()
        with pytest.raises(OSError, match="mine"):
            optimizer.step(fail)
        optimizer.param_groups[0]["params"] = list(other.parameters())
        other(batch()).sum().backward()
        optimizer.step()
        assert session.report().counters["accepted_steps"] == 1


class _Wrapping(SGD):
    """An optimizer that has another one step inside of its own step."""

    inner: SGD

    def step(self, closure: Any = None) -> Any:
        """Steps both."""
        self.inner.step()
        return super().step(closure)


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_step_inside_another_one_is_a_part_of_it(is_checked: bool) -> None:
    """Whether something looks at steps, or they are only counted."""
    model = mlp()
    optimizer = _Wrapping(model[0].parameters(), lr=0.1)
    optimizer.inner = SGD(model[1].parameters(), lr=0.1)
    session = ChecksSession(model, scaler=None)
    if is_checked:
        session.register_nonfinite_param_check()
    with session:
        train(model, optimizer, steps=3)
        optimizer.inner.step()
    assert session.report().counters["accepted_steps"] == 4


@pytest.mark.parametrize("is_checked", [False, True])
def test_of_several_optimizers_those_that_were_named_are_counted(is_checked: bool) -> None:
    """The other one steps the model too."""
    model = mlp()
    named, other = SGD(model[0].parameters(), lr=0.1), SGD(model[1].parameters(), lr=0.1)
    session = ChecksSession(model, named, scaler=None)
    if is_checked:
        session.register_nonfinite_param_check()
    with session:
        train(model, named, steps=2)
        other.step()
    assert session.report().counters["accepted_steps"] == 2


@pytest.mark.parametrize("is_checked", [False, True])
def test_steps_are_accepted_while_nothing_is_looked_at(is_checked: bool) -> None:
    """A pause ends looks, and no count."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    if is_checked:
        session.register_nonfinite_param_check()
    with session:
        optimizer = train(model, steps=1)
        with session.paused():
            train(model, optimizer, steps=2)
    assert session.report().counters["accepted_steps"] == 3


def test_a_session_that_only_counts_hears_of_steps_as_long_as_it_is_attached() -> None:
    """Counts go on where it is attached again, and stop where it is not."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None)
    for _ in range(2):
        with session:
            train(model, optimizer, steps=2)
        train(model, optimizer, steps=1)
    assert session.report().counters["accepted_steps"] == 4


def test_a_session_that_only_counts_may_be_detached_in_the_middle_of_a_step() -> None:
    """That step is none of it."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None).attach()

    def closure() -> torch.Tensor:
        session.detach()
        loss = model(batch()).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert session.report().counters["accepted_steps"] == 0


def test_a_call_of_the_model_inside_a_call_of_it_is_no_micro_batch() -> None:
    """Also behind a call that raised."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            if depth < 0:
                raise OSError("mine")
            return self.layer(x) if depth == 0 else self(x, depth - 1)

    model = Twice()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ChecksSession(model, optimizer, scaler=None) as session:
        with torch.no_grad(), pytest.raises(OSError, match="mine"):
            model(batch(), -1)
        train(model, optimizer, steps=3, micro_batches=2)
    spread = session.report().ledgers["scale"]["micro_batches_per_attempt"]
    assert spread == {"lowest": 2, "highest": 2, "most_frequent": 2}


def test_a_compiled_model_that_is_run_uncompiled_is_called_once() -> None:
    """The wrapper and the model inside tell of the same call."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ChecksSession(model, optimizer, scaler=None) as session:
        wrapped = compiled(model)
        train(wrapped, optimizer, steps=2)
        with torch.compiler.set_stance("force_eager"):
            train(wrapped, optimizer, steps=2)
        train(model, optimizer, steps=2)
    spread = session.report().ledgers["scale"]["micro_batches_per_attempt"]
    assert spread == {"lowest": 1, "highest": 1, "most_frequent": 1}
    assert session.report().counters["accepted_steps"] == 6


def test_each_wrapper_of_a_model_tells_of_a_call_once_where_it_runs_uncompiled() -> None:
    """The model was compiled in two wrappers, one after the other, and is called in both."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ChecksSession(model, optimizer, scaler=None) as session:
        wrappers = [compiled(model), compiled(model)]
        for wrapped in wrappers:
            torch._dynamo.reset()
            train(wrapped, optimizer, steps=2)
        with torch.compiler.set_stance("force_eager"):
            for wrapped in wrappers:
                train(wrapped, optimizer, steps=2)
    spread = session.report().ledgers["scale"]["micro_batches_per_attempt"]
    assert spread == {"lowest": 1, "highest": 1, "most_frequent": 1}
    assert session.report().counters["accepted_steps"] == 8
