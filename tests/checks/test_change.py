"""Parameters without gradients, over steps."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from checks.training import batch, compiled, mlp, scaler, train
from torchinstruments.checks import ChecksSession, CheckViolationError
from torchinstruments.checks.sustained import Sustained
from torchinstruments.errors import ConfigurationError


def _told(pattern, window=(5, 8)):
    """Returns at which observations of one subject something is told; ``x`` is bad."""
    one = Sustained(window)
    return [step for step, mark in enumerate(pattern) if one.observe({0} if mark == "x" else (), {0})]


@pytest.mark.parametrize("shift", range(8))
def test_seven_bad_ones_of_eight_are_told_wherever_the_good_one_stands(shift):
    """Also where the window first becomes full on a good one."""
    pattern = ("xxxxxxx." * 8)[shift:]
    assert len(_told(pattern)) == 1


def test_it_is_told_once_and_again_after_a_clean_window():
    """Seven good ones are not clean enough."""
    assert _told("xxxxx" + "." * 7 + "xxxxx") == [4]
    assert _told("xxxxx" + "." * 8 + "xxxxx") == [4, 17]
    assert _told(".x" * 20) == []


def test_subjects_that_are_not_looked_at_keep_their_windows():
    """Two optimizers step at different times."""
    one = Sustained((2, 3))
    assert one.observe({0}, {0}) == []
    for _ in range(5):
        assert one.observe((), {1}) == []
    assert one.observe({0}, {0}) == [0]


class _Branches(nn.Module):
    """Two parameters, of which the forward uses those that it is told to."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.dead = nn.Linear(4, 4)
        self.takes_dead = False

    def forward(self, x):
        return self.used(x) + (self.dead(x) if self.takes_dead else 0.0)


def _session(model, optimizer, action="collect", **options):
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_change_check(action=action, **options)
    return session


def test_a_layer_without_gradients_is_found_though_its_weights_decay():
    """AdamW moves what is dead; the gradient does not lie. Movement is told with its latency."""
    model = _Branches()
    optimizer = AdamW(model.parameters(), lr=0.1)
    model.takes_dead = True
    train(model, optimizer, steps=2)
    model.takes_dead = False
    with _session(model, optimizer) as session:
        for _ in range(6):
            optimizer.zero_grad(set_to_none=False)
            model(batch()).square().mean().backward()
            optimizer.step()
    (finding,) = session.report().findings
    assert finding.code == "param_received_no_gradient"
    assert finding.names == ("dead.weight", "dead.bias")
    assert finding.values["num_gradient_zero"] == 2
    assert finding.values["num_gradient_none"] == 0
    assert finding.values["movement_steps_looked_at"] == 4
    assert finding.values["movement_latency_steps"] == 4
    assert "dead" not in finding.message.replace("dead.weight", "").replace("dead.bias", "")


def test_an_unused_layer_has_no_gradient_at_all():
    """None, and a model that uses it now and then is left alone."""
    model = _Branches()
    optimizer = SGD(model.parameters(), lr=0.1)
    with _session(model, optimizer) as session:
        for step in range(16):
            model.takes_dead = step % 2 == 0
            train(model, optimizer, steps=1)
    assert session.report().findings == ()
    model.takes_dead = False
    with _session(model, optimizer) as session:
        train(model, optimizer, steps=16)
    (finding,) = session.report().findings
    assert finding.values["num_gradient_none"] == 2
    assert finding.values["movement_latency_steps"] == 0


def test_raise_is_honoured():
    """After the write of the step that completed the window."""
    model = _Branches()
    with _session(model, None, action="raise"), pytest.raises(CheckViolationError, match=r"dead\.weight"):
        train(model, steps=8)


def test_a_generator_that_steps_seldom_is_not_blamed_for_the_critics_steps():
    """Critic 5:1 with full zero_grad: each optimizer has windows of its own parameters and steps."""
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    g, d = SGD(model["g"].parameters(), lr=0.01), SGD(model["d"].parameters(), lr=0.01)
    with _session(model, [g, d]) as session:
        for step in range(30):
            model.zero_grad()
            if step % 6 == 5:
                model["d"](model["g"](batch())).sum().backward()
                g.step()
            else:
                model["d"](batch()).sum().backward()
                d.step()
    assert session.report().findings == ()


def test_an_alias_stands_for_the_tensor():
    """A tied weight is watched under either name."""
    model = mlp()
    model[1].weight = model[0].weight
    optimizer = SGD(model.parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_change_check(within=["1.weight"], window=(2, 2), action="collect")
    with session:
        for _ in range(2):
            model.zero_grad()
            model[0].bias.sum().backward()
            optimizer.step()
    assert session.report().findings[0].names == ("0.weight",)


def test_what_no_step_ever_had_is_unavailable():
    """A parameter that needs no gradient, and one that no optimizer has."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = SGD(model[1].parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_change_check(within=["0.weight", "0.bias", "1.weight"])
    with session:
        train(model, optimizer)
    reasons = {entry.names: entry.reason for entry in session.report().unavailable}
    assert reasons == {
        ("0.weight",): "never_observed: requires_grad is False",
        ("0.bias",): "never_observed: no step of a watched optimizer had it",
    }


def test_a_name_that_is_not_the_models_is_refused_at_registration():
    """The sentence has the name and the way out."""
    with pytest.raises(ConfigurationError, match=r"within has '3\.weight'"):
        ChecksSession(mlp()).register_change_check(within=["3.weight"])
    with pytest.raises(ConfigurationError, match=r"window=\(9, 8\)"):
        ChecksSession(mlp()).register_change_check(window=(9, 8))


def test_names_with_wrappers_and_patterns_stand_for_parameters():
    """As a compiled model writes them."""
    model = compiled(mlp())
    session = ChecksSession(model, scaler=None)
    session.register_change_check(within=["_orig_mod.0.weight", "1.*"], window=(1, 1), action="collect")
    optimizer = SGD(model.parameters(), lr=0.0)
    with session:
        for _ in range(2):
            optimizer.step()
    assert session.report().findings[0].names == ("0.weight", "1.weight", "1.bias")


def test_a_skipped_attempt_is_no_observation():
    """Only applied steps count."""
    model, grad_scaler = _Branches(), scaler()
    session = ChecksSession(model, scaler=grad_scaler)
    session.register_change_check(window=(2, 4), action="collect")
    with session:
        train(model, steps=3, grad_scaler=grad_scaler, overflows=(1, 2))
    assert session.report().findings == ()


def test_a_parameter_without_elements_breaks_nothing():
    """Zero-size: nothing to look at, with every check on."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(3)), "e": nn.Parameter(torch.ones(0))})
    optimizer = SGD(model.parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_change_check()
    session.register_frozen_check(["e"])
    session.register_update_ratio_check()
    session.register_nonfinite_grad_check()
    session.register_nonfinite_param_check()
    session.register_magnitude_check()
    with session:
        for _ in range(10):
            optimizer.zero_grad()
            (model["w"].sum() + model["e"].sum()).backward()
            optimizer.step()
    report = session.report()
    assert report.findings == ()
    assert not [entry for entry in report.unavailable if "internal_error" in entry.reason]


def test_a_report_that_is_made_early_leaves_nothing_behind():
    """What was not observed by then may be observed later."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_change_check(within=["0.weight"])
    with session:
        early = session.report().unavailable
        train(model, steps=1)
        late = session.report().unavailable
    assert [entry.reason.partition(":")[0] for entry in early] == ["never_observed", "never_ran"]
    assert late == ()


def test_windows_go_on_from_one_block_to_the_next():
    """Five of eight steps may lie in several; of other tensors nothing is known."""
    model = mlp()
    model[0].weight.register_hook(torch.zeros_like)
    session = ChecksSession(model, scaler=None)
    session.register_change_check(window=(4, 4), action="collect")
    for _ in range(2):
        with session:
            train(model, steps=2)
    assert [finding.names for finding in session.report().findings] == [("0.weight",)]
    model[0] = nn.Linear(4, 4)
    model[0].weight.register_hook(torch.zeros_like)
    with session:
        train(model, steps=3)
    assert len(session.report().findings) == 1
