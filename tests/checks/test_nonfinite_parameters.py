"""Parameters and buffers that are not finite."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from checks.training import mlp, train
from torchinstruments.checks import ChecksSession, CheckViolationError


def _session(model, optimizer=None, **options):
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_param_check(**options)
    return session


def test_a_nonfinite_buffer_is_raised_after_the_write():
    """With its name."""
    model = mlp()
    model.register_buffer("table", torch.ones(3))
    with _session(model):
        optimizer = train(model, steps=2)
        model.table[0] = float("nan")
        with pytest.raises(CheckViolationError, match="table"):
            train(model, optimizer, steps=1)


def test_buffers_can_be_left_out_and_integers_are_no_matter():
    """BatchNorm counts in int64."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("table", torch.tensor(float("inf")))
    with _session(model, include_buffers=False) as session:
        train(model)
    assert session.report().findings == ()
    assert session.report().unavailable == ()
    assert session.report().checks_run == ("nonfinite_param",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e5m2], ids=str)
def test_a_mask_of_attention_is_no_finding_until_it_is_none(dtype):
    """A buffer of zeros and negative infinity; what is NaN in it later is raised all the same."""
    model = mlp()
    model.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4).to(dtype))
    with _session(model) as session:
        optimizer = train(model, steps=3)
        assert (session.report().findings, session.report().unavailable) == ((), ())
        assert session.report().counters["host_reads"] == 3
        model.mask[0, 0] = float("nan")
        with pytest.raises(CheckViolationError, match="mask"):
            train(model, optimizer, steps=1)


def test_a_parameter_of_zeros_and_negative_infinity_is_no_mask():
    """What an optimizer steps is to be finite."""
    model = mlp()
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([0.0, -float("inf"), 0.0, 0.0]))
    with _session(model), pytest.raises(CheckViolationError, match=r"0\.bias"):
        SGD(model.parameters(), lr=0.0).step()


def test_the_scan_has_a_cadence_and_says_new_names_once():
    """Every second step; the same names again are no news."""
    model = mlp()
    model.register_buffer("table", torch.tensor(float("inf")))
    with _session(model, every=2, action="collect") as session:
        train(model, steps=8)
    (finding,) = session.report().findings
    assert finding.moment.accepted_step == 1
    assert session.report().counters["host_reads"] == 4


def test_only_an_optimizers_own_parameters_and_those_of_none_are_scanned():
    """What another optimizer steps is looked at when that one steps."""
    model = mlp()
    a, b = SGD(model[0].parameters(), lr=0.1), SGD(model[1].parameters(), lr=0.1)
    with _session(model, [a, b]):
        with torch.no_grad():
            model[1].weight[0, 0] = float("nan")
        a.step()
        with pytest.raises(CheckViolationError, match=r"1\.weight"):
            b.step()


def test_what_one_optimizer_steps_stays_known_when_another_steps():
    """Neither is told twice of what is no news."""
    model = mlp()
    optimizers = [SGD(layer.parameters(), lr=0.0) for layer in model]
    with torch.no_grad():
        model[0].weight[0, 0] = model[1].weight[0, 0] = float("inf")
    with _session(model, optimizers, action="collect") as session:
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.step()
    assert [finding.names for finding in session.report().findings] == [("0.weight",), ("1.weight",)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_one_tensor_that_cannot_be_read_leaves_the_others_looked_at():
    """A nested one has no norm, and freed memory must not be touched."""
    model = mlp()
    freed = torch.ones(4)
    model.register_buffer("freed", freed)
    model.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    model.register_buffer("table", torch.tensor(float("inf")))
    freed.untyped_storage().resize_(0)
    with _session(model, action="collect") as session:
        train(model)
    assert [finding.names for finding in session.report().findings] == [("table",)]
    assert [entry.reason for entry in session.report().unavailable] == ["unsupported_layout: nested"]
