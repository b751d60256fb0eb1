"""Norms of gradients before clipping."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from checks.training import INF, batch, mlp, scaler, train
from torchinstruments.checks import ChecksSession, CheckViolationError
from torchinstruments.errors import ConfigurationError


def _session(model, grad_scaler=None, **options):
    session = ChecksSession(model, scaler=grad_scaler, clip_norm=1.0)
    session.register_magnitude_check(**options)
    return session


def test_an_explosion_is_seen_though_clipping_follows():
    """The number is the one before clipping."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.0)
    with _session(model) as session:
        (model(batch()).sum() * 1e7).backward()
        norm = float(model[1].weight.grad.norm())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    (finding,) = session.report().findings
    assert finding.values["num_exploding"] == 4
    assert finding.values["norm_highest"] >= norm
    assert (finding.stage, finding.scale_provenance) == ("pre_clip_unscaled", "unscaled")


def test_norms_are_in_unscaled_units_on_skipped_attempts_too():
    """A scale of 1024 makes no explosion, and vanishing is not hidden by it."""
    model, grad_scaler = mlp(), scaler(init_scale=2.0**14)
    with _session(model, grad_scaler, exploding_threshold=1e4, vanishing_threshold=1e-9) as session:
        train(model, steps=2, grad_scaler=grad_scaler)
    assert session.report().findings == ()
    model, grad_scaler = mlp(), scaler(init_scale=2.0**14)
    with _session(model, grad_scaler, vanishing_threshold=1e3) as session:
        train(model, steps=1, grad_scaler=grad_scaler)
    assert session.report().findings[0].loss_scale == 2.0**14
    assert session.report().findings[0].values["num_vanishing"] == 4


def test_the_sum_of_the_micro_batches_is_judged():
    """One verdict an attempt, of what all backwards added up to."""
    model = mlp()
    with _session(model, exploding_threshold=1e-6, vanishing_threshold=1e-9) as session:
        train(model, steps=2, micro_batches=4)
    assert len(session.report().findings) == 2


def test_an_unknown_scale_gives_no_verdict():
    """The loop scales against what was declared."""
    model, grad_scaler = mlp(), scaler()
    session = _session(model, None, exploding_threshold=10.0)
    with pytest.warns(RuntimeWarning, match="scaler=None"), session:
        train(model, steps=2, grad_scaler=grad_scaler)
    report = session.report()
    assert report.findings == ()
    assert any(entry.reason.startswith("unknown_scale") for entry in report.unavailable)


def test_gradients_that_no_backward_added_have_no_magnitude():
    """torch.autograd.grad and a hand that writes .grad: a typed entry, no verdict."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.0)
    with _session(model) as session:
        gradients = torch.autograd.grad(model(batch()).sum() * 1e9, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    (entry,) = [one for one in session.report().unavailable if one.check == "grad_magnitude"][:1]
    assert entry.reason.startswith(("never_ran", "no_accumulation_evidence"))
    assert session.report().findings == ()


def test_it_is_off_unless_registered_and_says_what_clipping_hides():
    """A declared clip_norm and no check."""
    session = ChecksSession(mlp(), scaler=None, clip_norm=1.0)
    assert [entry.check for entry in session.report().unavailable] == ["grad_magnitude"]
    assert session.report().unavailable[0].reason.startswith("clipping_censors")


def test_raise_comes_before_the_write():
    """The weights are what they were."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    with _session(model, exploding_threshold=1e-6, vanishing_threshold=1e-9, action="raise"):
        with pytest.raises(CheckViolationError):
            train(model, steps=1)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_thresholds_must_be_in_order():
    """One sentence."""
    with pytest.raises(ConfigurationError, match="lower one for vanishing"):
        ChecksSession(mlp()).register_magnitude_check(vanishing_threshold=2.0, exploding_threshold=1.0)


def _vanishing(model, optimizer=None, threshold=1e-3):
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_magnitude_check(vanishing_threshold=threshold, exploding_threshold=1e9)
    return session


def test_a_report_between_micro_batches_judges_none_of_them():
    """The sum of all of them is what counts."""
    model = mlp()
    with _vanishing(model) as session:
        for factor in (1e-5, 1e-5, 1.0):
            (model(batch()).sum() * factor).backward()
            assert session.report().findings == ()
        SGD(model.parameters(), lr=0.1).step()
    assert session.report().findings == ()


def test_what_was_never_stepped_is_judged_at_the_end():
    """An attempt that is open when the session is detached too."""
    model = mlp()
    with _vanishing(model) as session:
        (model(batch()).sum() * 1e-5).backward()
    (finding,) = session.report().findings
    assert finding.values["num_vanishing"] == 4


def test_a_backward_is_evidence_for_every_optimizer_that_steps_after_it():
    """The second one's gradients came by the same backward."""
    model = mlp()
    optimizers = [SGD(layer.parameters(), lr=0.1) for layer in model]
    with _vanishing(model, optimizers) as session:
        for _ in range(2):
            model.zero_grad()
            model(batch()).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert session.report().unavailable == ()


def test_a_gradient_that_is_not_finite_has_no_magnitude():
    """That is said, for without the check of nonfinite gradients nobody else would."""
    model = mlp()
    with _vanishing(model) as session:
        (model(batch()).sum() * INF).backward()
        SGD(model.parameters(), lr=0.0).step()
    (entry,) = session.report().unavailable
    assert (entry.reason.partition(":")[0], entry.num_names) == ("nonfinite", 4)
