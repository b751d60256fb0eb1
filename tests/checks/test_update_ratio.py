"""How far steps move parameters."""

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD

from checks.training import batch, mlp, train
from torchinstruments.checks import ChecksSession, CheckViolationError, CheckWarning


def _session(model, optimizer=None, **options):
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_update_ratio_check(**options)
    return session


def test_every_ratio_is_in_the_report_raw_and_by_its_own_groups_rate():
    """Against the formula, two groups with different rates."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.1}]
    optimizer = SGD(groups)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with _session(model, optimizer) as session:
        train(model, optimizer, steps=1)
    (table,) = session.report().ledgers["update_ratio"]
    assert set(table["parameters"]) == set(before)
    for name, parameter in model.named_parameters():
        expected = float((parameter.detach() - before[name]).norm() / before[name].norm())
        row = table["parameters"][name]
        assert row["last"] == pytest.approx(expected, rel=1e-5)
        assert row["lr"] == (0.5 if name.startswith("0") else 0.1)
        assert row["last_per_lr"] == pytest.approx(expected / row["lr"], rel=1e-5)


def test_a_rate_that_is_a_tensor_or_zero():
    """A tensor is read with the rest; of zero there is no normalised ratio."""
    model = mlp()
    optimizer = SGD(
        [{"params": [model[0].weight]}, {"params": [model[1].weight], "lr": 0.0}], lr=torch.tensor(0.5)
    )
    with _session(model, optimizer) as session:
        train(model, optimizer, steps=1)
    (table,) = session.report().ledgers["update_ratio"]
    assert table["parameters"]["0.weight"]["lr"] == 0.5
    assert table["parameters"]["1.weight"]["last"] == 0.0
    assert table["parameters"]["1.weight"]["last_per_lr"] is None
    assert '"lr": 0.5' in session.report().to_json()


def test_a_ratio_outside_its_bounds_is_collected_each_time():
    """The finding has the value and the bounds."""
    model = mlp()
    with _session(model, bounds=(None, 1e-9)) as session:
        train(model, steps=3)
    report = session.report()
    assert [finding.code for finding in report.findings] == ["update_ratio_out_of_band"] * 3
    assert report.findings[0].num_names == 4
    assert report.findings[0].values["high"] == 1e-9


def test_two_bands_stand_beside_each_other_also_by_an_alias():
    """Registering again adds a check; the alias of a tied weight is that weight."""
    model = mlp()
    model[1].weight = model[0].weight
    session = _session(model, within=["1.weight"], bounds=(None, 1e-9))
    session.register_update_ratio_check(within=["0.bias"], bounds=(1e9, None))
    with session:
        train(model, steps=1)
    assert [finding.names for finding in session.report().findings] == [("0.weight",), ("0.bias",)]


def test_warn_warns_once_for_what_lasts_and_raise_raises():
    """Five of eight, not the first."""
    model = mlp()
    with (
        pytest.warns(CheckWarning, match="outside") as caught,
        _session(model, bounds=(None, 1e-9), action="warn"),
    ):
        train(model, steps=8)
    assert len(caught) == 1
    model = mlp()
    with _session(model, bounds=(None, 1e-9), action="raise"), pytest.raises(CheckViolationError):
        train(model, steps=1)


def test_a_parameter_of_zeros_has_no_ratio_and_is_told_once():
    """Not an infinity in the report."""
    model = mlp()
    nn.init.zeros_(model[1].bias)
    with _session(model) as session:
        train(model, steps=3)
    (finding,) = session.report().findings
    assert (finding.code, finding.names, finding.zero_baseline) == (
        "update_ratio_zero_baseline",
        ("1.bias",),
        True,
    )


def test_only_what_was_stepped_is_measured():
    """The critic's steps say nothing of the generator's parameters."""
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    d = SGD(model["d"].parameters(), lr=0.01)
    with _session(model, d) as session:
        model["d"](model["g"](batch())).sum().backward()
        d.step()
    (table,) = session.report().ledgers["update_ratio"]
    assert set(table["parameters"]) == {"d.weight", "d.bias"}


def test_a_cadence_costs_nothing_in_between():
    """No copy is made on the steps that are not looked at."""
    model = mlp()
    with _session(model, every=4) as session:
        train(model, steps=8)
    (table,) = session.report().ledgers["update_ratio"]
    assert table["parameters"]["0.weight"]["num_looks"] == 2
    assert session.report().counters["host_reads"] == 2


def test_the_training_is_what_it_was():
    """Bit for bit, with every check on, clipping and a scheduler."""

    def run(checked):
        model = mlp(width=8, depth=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = ChecksSession(model, optimizer, scaler=None, clip_norm=0.1)
        if checked:
            session.register_change_check()
            session.register_frozen_check(["0.weight"], action="collect")
            session.register_update_ratio_check()
            session.register_nonfinite_grad_check()
            session.register_nonfinite_param_check()
            session.register_magnitude_check()
            session.attach()
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.dropout(model(torch.randn(3, 8)), 0.3).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        session.detach()
        return [p.detach() for p in model.parameters()], torch.get_rng_state()

    plain, plain_rng = run(checked=False)
    watched, watched_rng = run(checked=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert torch.equal(plain_rng, watched_rng)


def test_a_closure_that_is_evaluated_often_has_the_ratio_of_the_whole_step():
    """LBFGS moves the parameters between evaluations; the step began before the first."""
    model = mlp()
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=5)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_update_ratio_check()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    with session:
        optimizer.step(closure)
    rows = session.report().ledgers["update_ratio"][0]["parameters"]
    for name, parameter in model.named_parameters():
        expected = float((parameter.detach() - before[name]).norm() / before[name].norm())
        assert rows[name]["last"] == pytest.approx(expected, rel=1e-5)


def test_rows_belong_to_tensors_and_not_to_positions():
    """A layer that is gone at the next attach takes its row along; what is new begins one."""
    model = mlp(depth=3)
    session = ChecksSession(model, scaler=None)
    session.register_update_ratio_check()
    with session:
        train(model, steps=3)
    kept = session.report().ledgers["update_ratio"][0]["parameters"]["1.weight"]["last"]
    del model[0]
    model.add_module("new", nn.Linear(4, 4))
    with session:
        rows = session.report().ledgers["update_ratio"][0]["parameters"]
        train(model, steps=2)
    assert rows["0.weight"]["last"] == kept
    rows = session.report().ledgers["update_ratio"][0]["parameters"]
    assert (rows["0.weight"]["num_looks"], rows["new.weight"]["num_looks"]) == (5, 2)
