"""Nonfinite gradients: named where they arise, raised before they are written."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW

from checks.training import INF, batch, mlp, poisoned, scaler, train
from torchinstruments.checks import ChecksSession, CheckViolationError


def _watched(model, optimizer=None, **options):
    session = ChecksSession(model, optimizer, **options)
    session.register_nonfinite_grad_check()
    return session


def _finding(raised) -> dict[str, Any]:
    return raised.value.fields["finding"]


def _copies(model):
    return [p.detach().clone() for p in model.parameters()]


def _equal(model, copies):
    return all(torch.equal(p, c) for p, c in zip(model.parameters(), copies, strict=True))


def test_a_nonfinite_gradient_is_raised_before_it_is_written():
    """The weights are bit for bit what they were, and the batch can be run again."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    before = _copies(model)
    with _watched(model, optimizer, scaler=None) as session:
        model(batch()).sum().backward()
        poisoned(model[1].weight)
        with pytest.raises(CheckViolationError, match=r"1\.weight") as raised:
            optimizer.step()
        assert _equal(model, before)
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()
    assert not _equal(model, before)
    assert raised.value.fields["code"] == "param_grad_nonfinite"
    assert raised.value.fields["names"] == ["1.weight"]
    report = raised.value.fields["report"]
    assert isinstance(report, dict)
    assert report["findings"][0]["attribution"] == "exact"
    assert session.report().counters["accepted_steps"] == 1


def test_clipping_that_spreads_an_infinity_names_its_culprit_and_counts_the_zeroed():
    """One Inf, then the canonical clipping: three healthy gradients are zero."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with _watched(model, optimizer, scaler=None):
        model(batch()).sum().backward()
        poisoned(model[1].weight)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(CheckViolationError) as raised:
            optimizer.step()
    finding = _finding(raised)
    assert finding["names"] == ["1.weight"]
    assert finding["attribution"] == "exact"
    assert finding["collateral_zeroed"] == 3


def test_a_gradient_that_was_zero_before_clipping_is_no_collateral():
    """Whatever was declared of clipping; what clipping has zeroed is counted alone."""
    for clip_norm in (None, 1.0):
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        optimizer = SGD(model.parameters(), lr=0.1)
        session = ChecksSession(model, optimizer, scaler=None, clip_norm=clip_norm)
        session.register_nonfinite_grad_check()
        with session:
            (model["a"](batch()) + model["b"](batch()) * 0 + model["c"](batch())).sum().backward()
            poisoned(model["a"].weight)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with pytest.raises(CheckViolationError) as raised:
                optimizer.step()
        assert (_finding(raised)["names"], _finding(raised)["collateral_zeroed"]) == (["a.weight"], 3)


def test_clipping_that_spreads_a_nan_names_what_was_nan_before_it():
    """Everything is NaN at the step; the accumulation site knows where it began."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x):
            bad = self.b * 1.0
            bad.register_hook(lambda gradient: gradient * float("nan"))
            return self.a(x) + bad

    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with _watched(model, optimizer, scaler=None) as session:
        model(batch()).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert all(torch.isnan(p.grad).all() for p in model.parameters() if p.grad is not None)
        with pytest.raises(CheckViolationError) as raised:
            optimizer.step()
    finding = _finding(raised)
    assert finding["names"] == ["b"]
    assert finding["attribution"] == "exact"
    assert finding["values"]["num_spread_by_clipping"] == 2
    arisen = [f for f in session.report().findings if f.code == "param_grad_nonfinite_at_accumulation"]
    assert [f.names for f in arisen] == [("b",)]
    assert arisen[0].values["num_gradients_with_nan"] == 1


def test_what_was_nonfinite_everywhere_is_smeared():
    """A loss that is NaN names nobody."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with _watched(model, optimizer, scaler=None):
        (model(batch()).sum() * float("nan")).backward()
        with pytest.raises(CheckViolationError) as raised:
            optimizer.step()
    assert _finding(raised)["attribution"] == "smeared"
    assert _finding(raised)["num_names"] == 4


def test_a_skipped_attempt_keeps_the_names_of_what_overflowed():
    """Under a scaler nothing is raised, and the names are in the report all the same."""
    model, grad_scaler = mlp(), scaler()
    with _watched(model, scaler=grad_scaler) as session:
        train(model, steps=4, grad_scaler=grad_scaler, overflows=(2,))
    (finding,) = session.report().findings
    assert finding.code == "param_grad_nonfinite_at_accumulation"
    assert finding.severity == "info"
    assert finding.moment.attempt == 2
    assert set(finding.names) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert (finding.stage, finding.scale_provenance) == ("pre_clip_scaled", "gradscaler")
    assert finding.loss_scale == 1024.0


def test_a_fused_optimizer_under_a_scaler_is_not_raised_for():
    """The scaler calls its step and lets the kernel skip."""
    model, grad_scaler = mlp(), scaler()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    with _watched(model, optimizer, scaler=grad_scaler) as session:
        train(model, optimizer, steps=8, grad_scaler=grad_scaler, overflows=(3,))
    report = session.report()
    assert report.ledgers["scale"]["accepted_steps"] == 7
    assert report.ledgers["scale"]["skipped_attempts"] == 1
    assert report.counters["accepted_steps"] == 7
    assert all(finding.severity == "info" for finding in report.findings)


def test_a_gradient_that_is_poisoned_after_the_scaler_looked_is_raised():
    """What a fused optimizer would write all the same."""
    model, grad_scaler = mlp(), scaler()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    with _watched(model, optimizer, scaler=grad_scaler):
        grad_scaler.scale(model(batch()).sum()).backward()
        grad_scaler.unscale_(optimizer)
        poisoned(model[0].weight)
        with pytest.raises(CheckViolationError):
            grad_scaler.step(optimizer)


def test_a_closure_is_looked_at_after_it_ran_and_before_the_write():
    """LBFGS: the infinity of this step's closure is not written."""
    model = mlp()
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=5)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = model(batch()).square().mean() * (INF if calls == 3 else 1.0)
        loss.backward()
        return loss

    with _watched(model, scaler=None) as session:
        with pytest.raises(CheckViolationError):
            optimizer.step(closure)
        assert all(torch.isfinite(p).all() for p in model.parameters())
        # One that an exception left in the middle cannot go on.
        optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=5)
        optimizer.step(closure)
    assert session.report().ledgers["watchdog"]["num_trips"] == 0


def test_a_step_that_is_given_a_closure_writes_nothing_of_it():
    """As Lightning steps: the gradients of the step before are not what is looked at."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with _watched(model, optimizer, scaler=None) as session:
        for step in range(3):

            def closure(factor=INF if step == 2 else 1.0):
                optimizer.zero_grad()
                loss = model(batch()).square().mean() * factor
                loss.backward()
                return loss

            before = _copies(model)
            if step == 2:
                with pytest.raises(CheckViolationError):
                    optimizer.step(closure)
                assert _equal(model, before)
            else:
                assert optimizer.step(closure=closure) is not None
                assert not _equal(model, before)
    assert session.report().counters["accepted_steps"] == 2


def test_an_optimizer_is_looked_at_with_its_own_parameters_only():
    """A NaN that stands in the discriminator does not stop the generator."""
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    g, d = SGD(model["g"].parameters(), lr=0.1), SGD(model["d"].parameters(), lr=0.1)
    with _watched(model, [g, d], scaler=None):
        model["d"](model["g"](batch())).sum().backward()
        poisoned(model["d"].weight, float("nan"))
        g.step()
        with pytest.raises(CheckViolationError, match=r"d\.weight"):
            d.step()


def test_half_gradients_whose_squares_overflow_are_finite():
    """400 elements of 30,000 in float16."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(400, dtype=torch.float16))})
    optimizer = SGD(model.parameters(), lr=0.0)
    with _watched(model, optimizer, scaler=None, clip_norm=1.0) as session:
        (model["w"] * 30_000.0).sum().backward()
        assert torch.isfinite(model["w"].grad).all()
        optimizer.step()
    assert session.report().findings == ()
    assert session.report().ledgers["clip"]["nonfinite_totals"] == 0


def test_sparse_gradients_are_looked_at():
    """An embedding with sparse=True."""
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    with _watched(model, optimizer, scaler=None) as session:
        model(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        (model(torch.tensor([1])) * INF).sum().backward()
        with pytest.raises(CheckViolationError):
            optimizer.step()
    assert session.report().counters["accepted_steps"] == 1


@pytest.mark.parametrize("value", [1e-30, 1e30, 1e-170, 1e170])
def test_numbers_at_the_ends_of_a_dtype_are_neither_zero_nor_nonfinite(value):
    """Squares that leave the range do not decide."""
    dtype = torch.float64 if not 1e-38 < value < 1e38 else torch.float32
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, dtype=dtype))})
    optimizer = SGD(model.parameters(), lr=0.0)
    with _watched(model, optimizer, scaler=None) as session:
        (model["w"] * value).sum().backward()
        optimizer.step()
    assert session.report().findings == ()


def test_a_check_whose_warning_is_an_error_does_not_stop_training():
    """The finding is in the report, with a word about the warning."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.0)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check(action="warn")
    with session:
        model(batch()).sum().backward()
        poisoned(model[0].bias)
        optimizer.step()
    assert session.report().findings[0].code == "param_grad_nonfinite"
    assert [entry.reason for entry in session.report().unavailable] == ["warning_was_an_error"]


def test_gradients_that_are_cleared_are_free_whether_a_step_came_or_not():
    """What waits to be judged is numbers."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_nonfinite_grad_check(action="collect")
    session.register_magnitude_check()
    with session:
        model(batch()).sum().backward()
        gradient = weakref.ref(model[0].weight.grad)
        model.zero_grad()
        assert gradient() is None
