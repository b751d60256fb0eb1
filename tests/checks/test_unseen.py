"""What a session could not look at has a name and a reason: changed parameters, and compiled steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo import config as dynamo_config
from torch.optim import SGD

from checks.training import batch, mlp, scaler, train
from torchinstruments.checks import ChecksSession
from torchinstruments.checks.findings import CheckWarning

pytestmark = pytest.mark.filterwarnings(
    # torch's own, while compiled autograd makes its inputs fake
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def _forgets_what_was_compiled() -> Any:
    yield
    torch.compiler.reset()


def _watched(model: nn.Module, optimizer: SGD | None = None) -> ChecksSession:
    """Returns a session with every check."""
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    session.register_nonfinite_param_check()
    session.register_change_check(action="collect")
    session.register_update_ratio_check()
    session.register_magnitude_check()
    session.register_frozen_check(["1.bias"], action="collect")
    return session


def _reasons(session: ChecksSession) -> dict[str, tuple[str, ...]]:
    """Returns what the session says of itself: code of the reason to names."""
    found = session.report().unavailable
    return {one.reason.partition(":")[0]: one.names for one in found if one.check == "session"}


def test_a_parameter_that_was_replaced_is_named():
    """The one that the session watches is no longer the model's; its alias is named once."""
    model = mlp()
    session = _watched(model)
    with session:
        train(model)
        assert _reasons(session) == {}
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        train(model)
        assert _reasons(session) == {"replaced_after_attach": ("0.weight",)}
    assert _reasons(session) == {"replaced_after_attach": ("0.weight",)}
    session.attach()
    assert _reasons(session) == {}
    session.detach()


def test_a_parameter_that_came_later_is_named():
    """A layer that was added, to the model and to its optimizer."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    session = _watched(model, optimizer)
    with session:
        model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": model[2].parameters()})
        train(model, optimizer)
    assert _reasons(session) == {"added_after_attach": ("2.weight", "2.bias")}


def test_a_parameter_that_was_unfrozen_is_named_and_its_steps_are_looked_at():
    """No hook tells of its gradients, so that magnitudes are not known; its updates are."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    session = _watched(model)
    with session:
        train(model)
        model[0].weight.requires_grad_(True)
        train(model)
    report = session.report()
    assert _reasons(session) == {"unfrozen_after_attach": ("0.weight",)}
    assert "0.weight" in report.ledgers["update_ratio"][0]["parameters"]
    unknown = [one for one in report.unavailable if one.check == "grad_magnitude"]
    assert [(one.reason.partition(":")[0], one.names) for one in unknown] == [
        ("no_accumulation_evidence", ("0.weight",))
    ]


def _in_compiled_autograd(model: nn.Module, optimizer: SGD) -> None:
    with compiled_autograd._enable(torch.compile(backend="eager")):
        train(model, optimizer, steps=4)


def _in_compiled_function(model: nn.Module, optimizer: SGD) -> None:
    @torch.compile(backend="eager")
    def backward() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()

    with dynamo_config.patch(compiled_autograd=True):
        for _ in range(4):
            backward()
            optimizer.step()


@pytest.mark.parametrize("run", [_in_compiled_autograd, _in_compiled_function])
def test_compiled_autograd_hides_backwards_and_not_steps(run: Callable[[nn.Module, SGD], None]):
    """Gradients are looked at before the write; of before clipping nothing is known, which is said."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    session = _watched(model, optimizer)
    with session:
        run(model, optimizer)
    report = session.report()
    assert report.counters["accepted_steps"] == 4
    assert report.counters["backwards"] == 0
    reasons = {(one.check, one.reason.partition(":")[0]): one.num_names for one in report.unavailable}
    assert reasons.pop(("scale_ledger", "no_attempts"), None) == (0 if run is _in_compiled_function else None)
    assert reasons == {
        ("accumulation", "no_hook_fired"): 4,
        ("grad_magnitude", "no_accumulation_evidence"): 4,
    }
    assert {"nonfinite_grad", "change", "update_ratio", "frozen"} <= set(report.checks_run)
    assert report.ledgers["scale"]["attempts"] == (0 if run is _in_compiled_function else 4)


def test_a_nan_under_compiled_autograd_is_raised_before_the_write():
    """The look before the write needs no hook of a backward."""
    model = mlp()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    with session, compiled_autograd._enable(torch.compile(backend="eager")):
        (model(batch()).sum() * float("nan")).backward()
        with pytest.raises(RuntimeError, match="nonfinite"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_step_is_said_not_to_be_seen(whole: bool):
    """Training is what it was; each check that looks at steps says that none was seen, and why."""
    plain, model = mlp(), mlp()
    train(plain, steps=3)
    optimizer = SGD(model.parameters(), lr=0.01)

    def one_step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(one_step if whole else optimizer.step, backend="eager")
    session = _watched(model, optimizer)
    with session:
        for _ in range(3):
            if not whole:
                optimizer.zero_grad()
                model(batch()).square().mean().backward()
            compiled()
    report = session.report()
    assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    # Two rounds of gradients were cleared: the third backward tells.
    assert [one.code for one in report.findings] == ([] if whole else ["check_no_step_seen"])
    reasons = {one.check: one.reason for one in report.unavailable}
    assert {"change", "frozen", "nonfinite_param", "update_ratio"} <= reasons.keys()
    started = "never_ran: no backward was seen and no step" if whole else "never_ran: no step"
    assert reasons["change"].startswith(started)
    assert "torch.compile" in reasons["change"]
    assert report.counters["backwards"] == (0 if whole else 3)


def _rounds(
    session: ChecksSession, model: Any, optimizer: SGD, step: Callable[[], object], *, micro_batches: int = 1
) -> list[str]:
    """Trains five rounds by a step; returns the codes of what was found after each."""
    codes = []
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            model(batch()).square().mean().backward()
        step()
        codes.append(",".join(finding.code for finding in session.report().findings))
    return codes


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_raise_that_no_step_can_reach_is_warned_about_once(micro_batches: int):
    """After two rounds of gradients, however many backwards make one; the report is no pass."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    step = torch.compile(optimizer.step, backend="eager")
    with session, pytest.warns(CheckWarning, match="2 rounds of gradients came and no step") as warned:
        codes = _rounds(session, model, optimizer, step, micro_batches=micro_batches)
    assert codes == ["", "", *["check_no_step_seen"] * 3]
    assert len([one for one in warned if issubclass(one.category, CheckWarning)]) == 1
    (entry,) = session.report().unavailable
    assert entry.check == "nonfinite_grad"
    assert entry.reason.startswith("before_the_write_never_ran: no step of the session's optimizers was seen")


def test_declared_accumulation_tells_where_no_gradient_is_ever_cleared():
    """Two rounds of two backwards are over when the fifth ends."""
    model = mlp()
    session = ChecksSession(model, scaler=None, accumulation_steps=2)
    session.register_nonfinite_grad_check(action="collect")
    found = []

    def one_backward() -> None:
        model(batch()).square().mean().backward()
        found.append(len(session.report().findings))

    with session:
        for _ in range(4):
            one_backward()
        with pytest.warns(CheckWarning, match="2 rounds"):
            one_backward()
        one_backward()
    assert found == [0, 0, 0, 0, 1, 1]


def test_long_accumulation_and_skipped_steps_are_no_missing_steps():
    """Twelve backwards before the first step, and a scaler that skips all."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_nonfinite_grad_check()
    with session:
        train(model, steps=2, micro_batches=12)
    assert session.report().findings == ()
    assert session.report().unavailable == ()
    grad_scaler = scaler()
    with ChecksSession(model, scaler=grad_scaler) as session_of_scaler:
        train(model, steps=4, grad_scaler=grad_scaler, overflows=(0, 1, 2, 3))
    assert session_of_scaler.report().findings == ()


def test_backwards_that_reach_nothing_of_the_sessions_optimizer_are_no_missing_steps():
    """A critic's, of which the session of a generator that steps seldom is told too."""
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    g, d = SGD(model["g"].parameters(), lr=0.01), SGD(model["d"].parameters(), lr=0.01)
    sessions = [ChecksSession(model, one, scaler=None, accumulation_steps=1) for one in (g, d)]
    for session in sessions:
        session.register_change_check()
        session.register_nonfinite_grad_check()
        session.attach()
    for step in range(24):
        model.zero_grad()
        if step % 6 == 5:
            model["d"](model["g"](batch())).square().mean().backward()
            g.step()
        else:
            model["d"](batch()).square().mean().backward()
            d.step()
    for session, number in zip(sessions, (4, 20), strict=True):
        session.detach()
        assert session.report().findings == ()
        assert session.report().unavailable == ()
        assert session.report().counters["accepted_steps"] == number
    of_critic = sessions[1].report().ledgers["scale"]
    assert (of_critic["attempts"], of_critic["micro_batches_per_attempt"]["most_frequent"]) == (20, 1)


def test_a_session_that_only_counts_says_nothing_of_missing_steps():
    """Without a check nothing is asked for that is not done."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, scaler=None)
    with session:
        codes = _rounds(session, model, optimizer, lambda: None)
    assert codes == [""] * 5
