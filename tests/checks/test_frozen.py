"""Tensors that must not change."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from checks.training import mlp, train
from torchinstruments.checks import ChecksSession, CheckViolationError
from torchinstruments.checks.frozen import FrozenCheck
from torchinstruments.errors import ConfigurationError


def _session(model, names, optimizer=None, **options):
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_frozen_check(names, **options)
    return session


@pytest.mark.parametrize("evidence", ["clone", "digest"])
def test_a_frozen_parameter_that_moves_is_raised(evidence):
    """The exception names it."""
    model = mlp()
    with _session(model, ["0.weight"], evidence=evidence):
        with pytest.raises(CheckViolationError, match=r"0\.weight") as raised:
            train(model, steps=1)
    assert raised.value.fields["code"] == "frozen_param_changed"


@pytest.mark.parametrize("evidence", ["clone", "digest"])
def test_what_stays_is_not_told(evidence):
    """Not in an optimizer, NaN or not; a buffer too."""
    model = mlp()
    model.register_buffer("table", torch.tensor([1.0, float("nan"), -0.0]))
    model[0].requires_grad_(False)
    with _session(model, ["0.*", "table"], evidence=evidence) as session:
        train(model, SGD(model[1].parameters(), lr=0.1))
    assert session.report().findings == ()
    assert session.report().checks_run == ("frozen",)


@pytest.mark.parametrize("evidence", ["clone", "digest"])
def test_a_change_between_steps_is_seen(evidence):
    """A load, an average, a hand that wrote; even of a sign of zero."""
    model = mlp()
    model.register_buffer("table", torch.zeros(3))
    with _session(model, ["table"], evidence=evidence, action="collect") as session:
        optimizer = train(model, steps=2)
        model.table[1] = -0.0
        train(model, optimizer, steps=2)
    (finding,) = session.report().findings
    assert finding.moment.accepted_step == 2
    assert finding.evidence == evidence


def test_the_alias_of_a_tied_weight_is_the_weight():
    """Its movement is seen under either name."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    optimizer = SGD(model.parameters(), lr=0.1)
    with _session(model, ["b.weight"], optimizer):
        model["a"](torch.ones(1, 4)).sum().backward()
        with pytest.raises(CheckViolationError, match=r"a\.weight"):
            optimizer.step()


def test_decay_moves_what_has_no_gradient():
    """AdamW with a parameter that is thought to be frozen by having zero gradients."""
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    with _session(model, ["0.weight"], optimizer, action="collect") as session:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.step()
    (finding,) = session.report().findings
    assert finding.names == ("0.weight",)


def test_several_groups_can_be_frozen_with_different_evidence():
    """Registering again adds a check."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_frozen_check(["0.weight"], action="collect")
    session.register_frozen_check(["1.weight"], evidence="digest", action="collect")
    with session:
        train(model, steps=1)
    assert [finding.names for finding in session.report().findings] == [("0.weight",), ("1.weight",)]


def test_copies_are_estimated_and_dropped():
    """Bytes before anything is allocated; nothing is held after the end."""
    model = mlp()
    session = _session(model, ["0.weight"], action="collect")
    assert session.estimated_snapshot_bytes == 16 * 4
    session.register_update_ratio_check()
    assert session.estimated_snapshot_bytes == (16 + 40) * 4
    with session:
        train(model)
    (frozen, _) = session._checks
    assert isinstance(frozen, FrozenCheck)
    assert not frozen._clones


def test_only_names_that_exist_can_be_frozen():
    """And at least one."""
    with pytest.raises(ConfigurationError, match="names has 'x'"):
        ChecksSession(mlp()).register_frozen_check(["x"])
    with pytest.raises(ConfigurationError, match="at least one"):
        ChecksSession(mlp()).register_frozen_check([])
    with pytest.raises(ConfigurationError, match="evidence='hash'"):
        ChecksSession(mlp()).register_frozen_check(["0.bias"], evidence="hash")


@pytest.mark.filterwarnings("ignore")  # torch says of these kinds that they are old, or new
@pytest.mark.parametrize("evidence", ["clone", "digest"])
def test_tensors_without_bytes_say_why_and_the_others_are_compared(evidence):
    """Reading freed memory would end the process."""
    model = mlp()
    freed = torch.ones(4)
    tensors = {
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.zeros(3, device="meta"),
        "freed": freed,
        "empty": torch.ones(0, 3),
        "small": torch.ones(3).to(torch.float8_e5m2),
        "counts": torch.zeros(3, dtype=torch.uint16),
        "complex": torch.ones(3, dtype=torch.complex32),
        "across": torch.randn(6, 4).t()[:, ::2],
    }
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    freed.untyped_storage().resize_(0)
    with _session(model, list(tensors), evidence=evidence, action="collect") as session:
        optimizer = train(model, steps=1)
        model.across[1, 1] += 1
        train(model, optimizer, steps=1)
    assert [finding.names for finding in session.report().findings] == [("across",)]
    refused = {name for entry in session.report().unavailable for name in entry.names}
    assert refused == {"sparse", "compressed", "nested", "quantised", "meta", "freed"}
