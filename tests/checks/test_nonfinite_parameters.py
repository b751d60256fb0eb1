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
