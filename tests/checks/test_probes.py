"""Range and liveness probes: what they count, and what they say of selectors."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from checks.training import INF, mlp
from torchinstruments.checks import (
    CheckLifecycleError,
    CheckWarning,
    LivenessProbe,
    RangeProbe,
    Severity,
    func,
    module,
)
from torchinstruments.errors import ConfigurationError

NAN = float("nan")
X = torch.tensor([[1.0, -2.0, 8.0, 0.0]])


class Calls(nn.Module):
    """Calls ReLU in the ways in which programs do."""

    def forward(self, x):
        """(batch, 4) -> the same."""
        x = torch.relu(x) + functional.relu(x) + x.relu()
        x = functional.relu(x, inplace=True)
        return x.clone().relu_()


def wrong(value: Any) -> Any:
    """Returns what is no such argument."""
    return value


def scripted() -> Any:
    """Returns a model that Python does not call."""
    return torch.jit.script(nn.ReLU())


def probed(probe, model, *inputs):
    """Returns the probe after the model was called with each input."""
    with probe.watch(model):
        for x in inputs:
            model(x)
    return probe


def test_values_outside_of_a_range_are_a_finding():
    """Bounds are part of the range; the finding has counts, extremes and the first forward."""
    probe = probed(RangeProbe({func("relu"): (0, 6)}), nn.ReLU(), X.clamp(max=6), X, X + 1)
    (finding,) = probe.findings
    assert (finding.code, finding.severity, finding.names) == (
        "activation_range_violated",
        Severity.WARNING,
        ("(model):relu",),
    )
    values = finding.values["(model):relu"]
    assert (values["num_violations"], values["num_seen"], values["first_violation"]) == (2, 3, 1)
    assert (values["num_above"], values["num_below"], values["maximum"]) == (2, 0, 9.0)
    assert probed(RangeProbe({func("relu"): (0, 9)}), nn.ReLU(), X, X + 1).findings == ()


def test_one_side_may_be_open():
    """No number lies beyond it, an infinity neither."""
    model = nn.Identity()
    assert probed(RangeProbe({module(""): (None, 10)}), model, X, X - INF).findings == ()
    (finding,) = probed(RangeProbe({module(""): (-1, None)}), model, X).findings
    assert finding.values["(model)"]["num_below"] == 1
    (finding,) = probed(RangeProbe({module(""): (None, 10)}), model, X + INF).findings
    assert finding.values["(model)"]["num_above"] == 4


@pytest.mark.parametrize("bounds", [(0, 6), (None, None), (None, 6)])
def test_nan_is_seen_in_every_range(bounds):
    """It lies in none, and has a critical finding of its own."""
    probe = probed(RangeProbe({func("relu"): bounds}), nn.ReLU(), torch.tensor([NAN, 1.0]))
    assert [(one.code, one.severity) for one in probe.findings] == [
        ("activation_nan", Severity.CRITICAL),
        ("activation_range_violated", Severity.WARNING),
    ]
    assert probe.facts()[0].scanned.num_nan == 1
    json.loads(probe.to_json())


def test_negate_wants_a_value_outside():
    """A tensor that lies wholly in the range is the finding; NaN is said all the same."""
    probe = probed(RangeProbe({module(""): (-1, 1)}, negate=True), nn.Identity(), X, X / 100)
    (finding,) = probe.findings
    assert (finding.code, finding.values["(model)"]["first_violation"]) == ("activation_range_violated", 1)
    probe = probed(RangeProbe({module(""): (-1, 1)}, negate=True), nn.Identity(), torch.tensor([NAN, 0.5]))
    assert [one.code for one in probe.findings] == ["activation_nan"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_every_real_dtype_is_looked_at(dtype):
    """Each in its own."""
    (facts,) = probed(RangeProbe({module(""): (-1, 5)}), nn.Identity(), X.to(dtype)).facts()
    assert (facts.scanned.num_below, facts.scanned.num_above, facts.scanned.maximum) == (1, 1, 8)


def test_a_site_may_come_in_several_dtypes():
    """Under autocast for one; the numbers are those of all."""
    (facts,) = probed(RangeProbe({module(""): (-1, 5)}), nn.Identity(), X, X.half(), X.long()).facts()
    assert (facts.num_seen, facts.num_violations, facts.scanned.num_above) == (3, 3, 3)


def test_a_function_is_known_by_name_in_all_its_forms():
    """Functions, methods, and what works in place; the second call in a module has its ordinal."""
    probe = probed(RangeProbe({func("relu"): (0, None)}), Calls(), X)
    assert [one.site for one in probe.facts()] == [
        "(model):relu",
        "(model):relu#1",
        "(model):relu#2",
        "(model):relu#3",
        "(model):relu#4",
    ]
    assert probe.unmatched == ()


def test_operators_and_overloads_have_the_names_of_functions():
    """Whichever side the number stands on, and from whichever namespace of torch."""

    class Operators(nn.Module):
        def forward(self, x):
            x = (1 - x) + (x - 1) + torch.ops.aten.relu.default(x) + torch.ops.aten.relu(x)
            return torch.special.softmax(2 / (x / 2) @ x.mT, -1)[0]

    names = {"sub": 2, "add": 3, "relu": 2, "div": 2, "matmul": 1, "softmax": 1, "getitem": 1}
    probe = probed(LivenessProbe([func(name) for name in names]), Operators(), X)
    found = [one.site.partition(":")[2].partition("#")[0] for one in probe.facts()]
    assert {name: found.count(name) for name in names} == names
    probed(exact := LivenessProbe([func("__getitem__"), func(torch.ops.aten.relu.default)]), Operators(), X)
    assert [one.site for one in exact.facts()] == ["(model):relu", "(model):getitem"]


@pytest.mark.parametrize("given", [functional.relu, "torch.nn.functional.relu"])
def test_a_function_itself_is_that_one_alone(given):
    """As an object or by its dotted name."""
    assert len(probed(RangeProbe({func(given): (0, None)}), Calls(), X).facts()) == 2


def test_modules_are_chosen_by_pattern_without_wrappers():
    """A module that is called twice has two sites; so has one of two patterns that both choose it."""
    model = nn.Sequential(mlp(depth=2), nn.Tanh())
    probe = probed(RangeProbe({module("0.*"): (-9, 9), module("1"): (-1, 1)}), model, X)
    assert [one.site for one in probe.facts()] == ["0.0", "0.1", "1"]
    shared = nn.Linear(4, 4)
    probe = probed(RangeProbe({module("1"): (-99, 99)}), nn.Sequential(shared, shared), X)
    assert [one.site for one in probe.facts()] == ["0", "0#1"]


def test_every_tensor_of_an_output_is_looked_at():
    """Under its path."""

    class Two(nn.Module):
        def forward(self, x):
            return {"low": x, "pair": (x, None, x + 100)}

    probe = probed(RangeProbe({module(""): (None, 50)}), Two(), X)
    sites = {one.site: one.num_violations for one in probe.facts()}
    assert sites == {"(model)[output.low]": 0, "(model)[output.pair.0]": 0, "(model)[output.pair.2]": 1}


def test_selectors_that_match_nothing_are_said():
    """Once by a warning, and always by the probe; those that match later are no more among them."""
    probe = RangeProbe({func("rellu"): (0, 1), module("nothing"): (0, 1), func("relu"): (0, 9)})
    model = nn.ReLU()
    with probe.watch(model):
        pass
    with pytest.warns(CheckWarning, match=r"func\('rellu'\), module\('nothing'\) matched nothing"):
        probed(probe, model, X)
    probed(probe, model, X)
    assert probe.unmatched == ("func('rellu')", "module('nothing')")
    without, entry = probe.unavailable
    assert without.reason == "no_forward: the model was not called in a block"
    assert (entry.reason, entry.names) == ("selector_matched_nothing", probe.unmatched)
    assert "selector_matched_nothing" in str(probe)
    assert probe.num_forwards == 2


def test_a_warning_that_is_an_error_does_not_reach_the_program():
    """The properties say the same."""
    probe = probed(RangeProbe({func("rellu"): (0, 1)}), nn.ReLU(), X)
    assert probe.unmatched == ("func('rellu')",)


def test_what_cannot_be_looked_at_has_a_reason():
    """Meta, empty, sparse, and outputs that hold no tensor."""

    class Odd(nn.Module):
        def forward(self, x):
            return x

    probe = RangeProbe({module(""): (0, 1)})
    inputs = (
        torch.empty(2, device="meta"),
        torch.empty(0),
        torch.eye(2).to_sparse(),
        torch.ones(2) * 1j,
        None,
    )
    probed(probe, Odd(), *inputs)
    reasons = {entry.reason.partition(":")[0] for entry in probe.unavailable}
    assert reasons == {"meta_tensor", "empty", "unsupported_layout", "unsupported_dtype", "no_tensor_output"}
    assert probe.facts() == ()
    json.loads(probe.to_json())


def test_a_probe_watches_one_block_at_a_time():
    """Blocks add up."""
    probe, model = RangeProbe({func("relu"): (0, 1)}), nn.ReLU()
    with probe.watch(model), pytest.raises(CheckLifecycleError), probe.watch(model):
        pass
    probed(probe, model, X)
    probed(probe, model, X)
    assert (probe.num_forwards, probe.facts()[0].num_seen) == (2, 2)


def test_liveness_is_a_share_of_zeros():
    """Over all values, of the last tensor, with the largest magnitude; there are no findings."""
    probe = probed(LivenessProbe([func("relu")]), nn.ReLU(), X, -X.abs())
    (facts,) = probe.facts()
    assert (facts.num_zero, facts.num_values, facts.zero_fraction) == (6, 8, 0.75)
    assert (facts.last_zero_fraction, facts.max_abs, facts.num_forwards) == (1.0, 8.0, 2)
    assert facts.units_reason.startswith("not_asked")
    assert not hasattr(probe, "findings")
    assert "dead" not in probe.to_json() + str(probe)


def test_liveness_sees_nan():
    """It is no zero, and it is counted; the largest magnitude is that of the finite values."""
    (facts,) = probed(LivenessProbe([func("relu")]), nn.ReLU(), torch.tensor([NAN, INF, 0.0, 3.0])).facts()
    assert (facts.num_zero, facts.num_nonfinite, facts.max_abs) == (1, 2, 3.0)
    (facts,) = probed(LivenessProbe([func("relu")]), nn.ReLU(), torch.tensor([NAN])).facts()
    assert (facts.num_nonfinite, facts.max_abs) == (1, None)


def test_units_that_were_zero_in_all_forwards_are_told():
    """On request, by their place, and from two forwards on."""
    probe = LivenessProbe([func("relu")], unit_dim=-1)
    probed(probe, nn.ReLU(), X)
    (facts,) = probe.facts()
    assert (facts.num_units, facts.units_reason) == (None, "too_few_forwards: 1 of at least 2")
    probed(probe, nn.ReLU(), torch.tensor([[0.0, -1.0, -1.0, -1.0]]))
    (facts,) = probe.facts()
    assert (facts.num_units, facts.num_units_zero_in_all, facts.units_zero_in_all) == (4, 2, (1, 3))
    probed(probe, nn.ReLU(), torch.tensor([[0.0, NAN, 0.0, 0.0]]))
    assert probe.facts()[0].units_zero_in_all == (3,)


def test_units_of_a_convolution_are_its_channels():
    """Any dimension may be the units'; where it is not there, or changes its size, the site says so."""
    values = torch.ones(2, 3, 4, 4)
    values[:, 1] = 0
    probe = LivenessProbe([module("")], unit_dim=1)
    probed(probe, nn.Identity(), values, values)
    assert probe.facts()[0].units_zero_in_all == (1,)
    probed(probe, nn.Identity(), torch.ones(2, 5))
    assert probe.facts()[0].units_reason == "shape_changed: 3 units, then 5"
    probe = LivenessProbe([module("")], unit_dim=3)
    probed(probe, nn.Identity(), X, X)
    assert probe.facts()[0].units_reason == (
        "no_such_dimension: unit_dim=3, and a tensor here has 2 dimensions"
    )
    assert "(no_such_dimension: unit_dim=3, and" in str(probe)
    assert "not_asked" not in str(probed(LivenessProbe([module("")]), nn.Identity(), X))


def test_units_are_looked_at_in_blocks(monkeypatch):
    """The blocks of a large tensor add up, along whatever dimension they lie."""
    monkeypatch.setattr("torchinstruments.checks.probes.liveness._BLOCK_ENTRIES", 8)
    values = torch.zeros(5, 3, 4)
    values[4, 1, 2] = 1.0
    for unit_dim, expected in ((0, (0, 1, 2, 3)), (1, (0, 2)), (-1, (0, 1, 3))):
        probe = LivenessProbe([module("")], unit_dim=unit_dim)
        probed(probe, nn.Identity(), values, values.mT.contiguous().mT)
        assert probe.facts()[0].units_zero_in_all == expected


def test_names_that_modules_share_with_functions_are_the_functions():
    """Whatever of the room was imported before."""
    code = (
        "import torchinstruments.checks as c; "
        "c.ParamHealth, c.GradHealth; print(c.param_health, c.grad_health)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "<function param_health" in printed
    assert "<class" in printed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RangeProbe({}), "not empty"),
        (lambda: RangeProbe(wrong({"relu": (0, 1)})), "which is no selector"),
        (lambda: RangeProbe({func("relu"): (1, 0)}), "low <= high"),
        (lambda: RangeProbe(wrong({func("relu"): None})), "is None"),
        (lambda: RangeProbe({func("relu"): (0, 1)}, negate=wrong("yes")), "give True or False"),
        (lambda: LivenessProbe([]), "give selectors"),
        (lambda: LivenessProbe(wrong(["relu"])), "give selectors"),
        (lambda: LivenessProbe([func("relu")], unit_dim=wrong("last")), "give a dimension"),
        (lambda: func("torch.no_such_function"), "names no function"),
        (lambda: func("no/function"), "names no function"),
        (lambda: module(wrong(3)), "give a name or a pattern"),
        (lambda: LivenessProbe([func("relu")]).watch(wrong(3)).__enter__(), "give an nn.Module"),
        (lambda: LivenessProbe([func("relu")]).watch(scripted()).__enter__(), "takes no hooks"),
        (lambda: RangeProbe({func("relu"): (0, 10**400)}), "low <= high"),
    ],
)
def test_mistakes_are_one_sentence(make, message):
    """With the value and the way out."""
    with pytest.raises(ConfigurationError, match=message):
        make()
