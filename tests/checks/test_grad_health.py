"""One backward, module by module: what its gradients show, and where that begins."""

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from checks.training import INF, Secretive, compiled, mlp, scaler
from torchinstruments.checks import CheckLifecycleError, Severity, grad_health
from torchinstruments.errors import ConfigurationError

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def deep(**constants: float) -> Any:
    """Returns four linear layers with ReLU between, some biases of which are constants."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 2),
    )
    with torch.no_grad():
        for name, value in constants.items():
            model.get_parameter(f"{name.removeprefix('layer')}.bias").fill_(value)
    return model


class Residual(nn.Module):
    """Two branches whose sum goes into a head."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right, self.head = (nn.Linear(4, 4) for _ in range(4))
        self.act = nn.ReLU()

    def forward(self, x):
        """(batch, 4) -> the same."""
        x = self.stem(x)
        return self.head(self.act(self.left(x)) + self.right(x))


def frontier(health, code):
    """Returns where a finding begins."""
    return [row.module for row in health.rows if code in row.frontier_of]


def test_the_frontier_is_where_gradients_begin_to_be_zero():
    """A ReLU that is flat everywhere leaves all layers before it without a gradient; one is named."""
    model = deep(layer4=-1000.0)
    with grad_health(model, scaler=None) as health:
        model(X).sum().backward()
    (finding,) = health.findings
    assert (finding.code, finding.severity, finding.names) == ("gradient_zero", Severity.WARNING, ("4",))
    assert finding.values["4"]["num_flagged_modules"] == 5
    assert [row.module for row in health.rows if row.flags] == ["0", "1", "2", "3", "4"]
    assert frontier(health, "gradient_zero") == ["4"]
    assert (health.row("5").norm or 0.0) > 0
    assert (health.row("4").num_zero, health.row("4").num_values, health.row("4").parameter_norm) == (
        24,
        24,
        0.0,
    )
    assert "dead" not in health.to_json()


def test_a_healthy_backward_has_no_findings():
    """Norms are those of the outputs' gradients and of the parameters' own."""
    model = mlp(depth=1)
    with grad_health(model, scaler=None, within=["0"]) as health:
        model(torch.ones(2, 4)).sum().backward()
    (row,) = health.rows
    assert health.findings == ()
    assert (row.norm, row.num_values, row.num_arrived, row.reason) == (pytest.approx(8**0.5), 8, 1, "")
    whole = sum(parameter.grad.double().square().sum() for parameter in model.parameters()) ** 0.5
    assert row.parameter_norm == pytest.approx(float(whole))
    assert (row.num_parameters, row.num_parameters_without_gradient) == (2, 0)


def test_branches_have_a_frontier_of_their_own():
    """One branch that passes nothing on is named, and what both come from is not touched by it."""
    torch.manual_seed(0)
    model = Residual()
    with torch.no_grad():
        model.left.bias.fill_(-1000.0)
    with grad_health(model, scaler=None) as health:
        model(X).sum().backward()
    assert frontier(health, "gradient_zero") == ["left"]
    assert health.row("stem").flags == ()


def test_nonfinite_gradients_begin_somewhere_too():
    """An infinity that comes in behind a layer reaches all before it."""
    model = deep()
    with grad_health(model) as health:
        hidden = model[:5](X) * 1.0
        hidden.register_hook(lambda gradient: gradient * INF)
        model[5:](hidden).sum().backward()
    assert frontier(health, "gradient_nonfinite") == ["4"]
    assert health.findings[0].severity is Severity.CRITICAL
    row = health.row("4")
    assert (row.norm, row.magnitude_reason) == (None, "nonfinite")
    assert row.num_nonfinite > 0
    json.loads(health.to_json())


def test_gradients_that_explode_or_vanish_are_compared_in_unscaled_units():
    """A declared scale is divided out before thresholds are looked at."""
    model = deep()
    found = {}
    for name, factor, given in (
        ("small", 1e-12, None),
        ("large", 1e9, None),
        ("scaled", 1e9, 1e9),
        ("unknown", 1e9, ...),
    ):
        options: dict[str, Any] = {} if given is ... else {"scaler": given}
        with grad_health(model, **options) as health:
            (model(X).sum() * factor).backward()
        found[name] = [finding.code for finding in health.findings]
    assert found == {
        "small": ["gradient_vanishing"],
        "large": ["gradient_exploding"],
        "scaled": [],
        "unknown": [],
    }
    # The last one: no scale was declared, which is said and not guessed.
    assert health.row("6").scale_provenance == "unknown"
    assert health.row("6").magnitude_reason.startswith("unknown_scale")
    assert health.unavailable[0].reason.startswith("unknown_scale")


def test_a_gradient_scaler_gives_the_scale_that_the_backward_had():
    """Though an overflow lowers it inside the block."""
    model, grad_scaler = deep(), scaler(2.0**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with grad_health(model, scaler=grad_scaler) as health:
        grad_scaler.scale(model(X).sum()).backward()
        model[0].weight.grad[0, 0] = INF
        grad_scaler.step(optimizer)
        grad_scaler.update()
    assert grad_scaler.get_scale() == 2.0**19
    row = health.row("6")
    assert (row.loss_scale, row.scale_provenance) == (2.0**20, "gradscaler")
    assert row.norm == pytest.approx(6**0.5)
    with grad_health(model, scaler=scaler(enabled=False)) as health:
        model(X).sum().backward()
    assert (health.row("6").loss_scale, health.row("6").scale_provenance) == (1.0, "unscaled")


def test_missing_gradients_are_information():
    """Behind ``detach`` nothing comes back, which a branch that is not taken looks like too."""
    model = deep()
    with grad_health(model, scaler=None) as health:
        model[2:](model[:2](X).detach()).sum().backward()
    (finding,) = health.findings
    assert (finding.code, finding.severity, finding.names) == ("gradient_missing", Severity.INFO, ("1",))
    assert health.row("0").reason == "no_gradient"
    assert health.row("0").num_parameters_without_gradient == 2


def test_an_output_of_several_that_is_not_used_is_no_missing_gradient():
    """A recurrent layer gives its states too; a healthy loss of the sequence alone finds nothing."""
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 4), "gru": nn.GRU(4, 4), "head": nn.Linear(4, 4)})
    with grad_health(model, scaler=None) as health:
        model["head"](model["gru"](model["lstm"](X)[0])[0]).square().sum().backward()
    assert health.findings == ()
    assert (health.row("lstm").num_outputs, health.row("lstm").num_arrived) == (3, 1)
    assert not any(row.is_frontier for row in health.rows)


def test_modules_with_children_and_parameters_of_their_own_have_rows():
    """Attention, a parametrised layer, and one with a token; a container without parameters has none."""
    model = nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False)),
    )
    model.register_parameter("token", nn.Parameter(torch.ones(4)))
    with grad_health(model, scaler=None) as health:
        (model(X[None]) * 0 * model.token).sum().backward()
    for name in ("", "0.self_attn", "1"):
        assert health.row(name).num_arrived == 1, name
    assert health.row("0.self_attn").parameter_norm == 0.0
    with pytest.raises(KeyError):
        health.row("0")
    assert frontier(health, "gradient_zero") == ["1"]


def test_modules_without_evidence_say_why():
    """Never called, no output that requires a gradient, or no backward at all."""
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "spare": nn.Linear(4, 4), "frozen": nn.Linear(4, 4)})
    model["frozen"].requires_grad_(requires_grad=False)
    with grad_health(model) as health:
        model["frozen"](X)
        model["used"](X).sum().backward()
    assert health.row("spare").reason == "never_called: this thread made no call inside the block"
    assert health.row("frozen").reason == "no_gradient: no output requires one"
    with grad_health(model) as health:
        model["used"](X)
    assert health.row("used").reason.startswith("no_backward")
    assert health.findings == ()


def test_a_module_that_is_called_twice_is_one_row():
    """With the gradients of both calls."""
    model = mlp(depth=1)
    with grad_health(model, scaler=None, within=["0"]) as health:
        model(model(torch.ones(2, 4))).sum().backward()
    assert (health.row("0").num_calls, health.row("0").num_outputs, health.row("0").num_values) == (2, 2, 16)


def test_several_backwards_are_counted():
    """Their numbers are added up, and how many there were is said."""
    model = mlp(depth=1)
    with grad_health(model, within=["0"]) as health:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert (health.num_backwards, health.row("0").num_values) == (2, 16)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_is_seen_or_said(use_reentrant):
    """The recomputation is no second call; reentrant checkpointing hides the outputs inside."""
    model = mlp(depth=3)
    x = torch.ones(2, 4, requires_grad=True)
    with grad_health(model) as health:
        model[2](checkpoint(model[:2], x, use_reentrant=use_reentrant)).sum().backward()
    row = health.row("0")
    assert row.num_calls == 1
    assert row.reason == ("reentrant_checkpoint" if use_reentrant else "")
    assert row.num_arrived == (0 if use_reentrant else 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_parts_are_seen_at_their_boundary_and_not_inside():
    """Nothing is compiled anew for it."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), compiled(mlp(depth=2)), nn.Linear(4, 4))
    model(X).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"), grad_health(model) as health:
        model(X).sum().backward()
    assert health.row("1.0").reason == "inside_compiled"
    assert health.row("0").num_arrived == health.row("2").num_arrived == 1


def test_training_is_the_same_bit_for_bit():
    """Gradients, and hooks that are left: none."""
    bare, watched = deep(), deep()
    bare(X).square().sum().backward()
    with grad_health(watched, scaler=None):
        output = watched(X)
        output.square().sum().backward()
    for mine, theirs in zip(bare.parameters(), watched.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert not any(module._forward_hooks for module in watched.modules())
    assert not output._backward_hooks


def test_an_exception_goes_through_and_leaves_no_hook():
    """What was seen until then is there."""

    def fails():
        model(X)
        raise RuntimeError("mine")

    model = deep()
    watching = grad_health(model)
    with pytest.raises(RuntimeError, match="mine"), watching as health:
        fails()
    assert not any(module._forward_hooks for module in model.modules())
    assert health.row("0").num_calls == 1


def test_a_graph_that_outlives_the_block_keeps_nothing_of_it():
    """Its outputs are gone and cannot be asked for their hooks; the backward goes on as if none had been."""
    model = deep()
    with grad_health(model, scaler=None) as health:
        loss = model(X).sum()
    reference = weakref.ref(health)
    del health
    gc.collect()
    assert reference() is None
    loss.backward()
    assert model[0].weight.grad is not None


def test_a_gradient_whose_class_answers_no_question_is_measured():
    """Neither the end of the block nor a hook asks it."""
    model = mlp(depth=1)
    with grad_health(model, scaler=None) as health:
        model(torch.ones(2, 4)).sum().backward()
        norm = float(model[0].weight.grad.norm())
        model[0].weight.grad = model[0].weight.grad.as_subclass(Secretive)
    assert health.row("0").parameter_norm == pytest.approx((norm**2 + 16) ** 0.5)


def test_it_is_for_one_block():
    """A second use would mix two backwards."""
    watching = grad_health(mlp())
    with watching:
        pass
    with pytest.raises(CheckLifecycleError), watching:
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": torch.ones(1)}, "model=Tensor has no modules"),
        ({"within": ["nothing"]}, "within has 'nothing'"),
        ({"within": []}, "give names of modules as in model.named_modules()"),
        ({"exploding_threshold": 10**400}, "give a positive number"),
        ({"vanishing_threshold": 0}, "give a positive number"),
        ({"vanishing_threshold": 2.0, "exploding_threshold": 1.0}, "is not below"),
        ({"scaler": "auto"}, "give the torch.amp.GradScaler"),
        ({"scaler": -1}, "a positive number"),
    ],
)
def test_mistakes_are_one_sentence(options, message):
    """With the value and the way out."""
    with pytest.raises(ConfigurationError, match=message):
        grad_health(options.pop("model", mlp()), **options)


def test_a_row_that_is_not_there_is_one_sentence():
    """With a name that is; and before the block has ended, with that."""
    model = mlp()
    with grad_health(model, scaler=None) as health:
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(KeyError, match="no rows before the block of grad_health has ended"):
            health.row("0")
    with pytest.raises(KeyError, match=r"'nope' is no module that was audited; give a name as in .*'0'"):
        health.row("nope")
