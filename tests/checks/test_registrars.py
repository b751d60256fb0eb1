"""What registrars refuse, and that the page of checks has their defaults."""

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from checks.training import INF, batch, mlp
from torchinstruments.checks import (
    ChecksSession,
    CheckViolationError,
    CheckWarning,
    LivenessProbe,
    RangeProbe,
    func,
    module,
    param_health,
)
from torchinstruments.errors import ConfigurationError

_PAGE = Path(__file__).parents[2] / "docs" / "checks.md"
_ROW = re.compile(r"^\| `(?:(\w+)\()?(\w+)=\)?` \| `([^`]+)` \|", re.MULTILINE)


@pytest.mark.parametrize("action", ["raise", "warn"])
@pytest.mark.parametrize("bounds", [None, (None, None)])
def test_an_action_on_ratios_that_nothing_judges_is_refused(action, bounds):
    """The sentence names what is missing; collecting needs no bounds, and one bound is enough."""
    session = ChecksSession(mlp(), scaler=None)
    with pytest.raises(ConfigurationError, match=rf"action='{action}' needs bounds="):
        session.register_update_ratio_check(bounds=bounds, action=action)
    session.register_update_ratio_check()
    session.register_update_ratio_check(bounds=(None, 0.1), action=action)


_TORCHECK_KINDS = ("changing", "unchanging", "nan", "inf")
_LOW = {"vanishing_threshold": 1e-9, "exploding_threshold": 1e-6}
_BAD = {
    "change": ("register_change_check", {}, "param_received_no_gradient"),
    "frozen": ("register_frozen_check", {"names": ["table"]}, "frozen_param_changed"),
    "ratio": ("register_update_ratio_check", {"bounds": (None, 1e-9)}, "update_ratio_out_of_band"),
    "magnitude": ("register_magnitude_check", _LOW, "grad_magnitude_flagged"),
    "gradient": ("register_nonfinite_grad_check", {}, "param_grad_nonfinite"),
    "parameter": ("register_nonfinite_param_check", {}, "param_value_nonfinite"),
}


def _spoil(kind, model, is_bad):
    """Does to a step what a check finds."""
    if kind == "change" and is_bad:
        model.zero_grad()
    elif kind == "frozen":
        model.table.add_(float(is_bad))
    elif kind == "gradient":
        model.spare.grad = torch.full((2,), INF) if is_bad else None
    elif kind == "parameter":
        model.table.fill_(INF if is_bad else 1.0)


def _trained(kind, action, is_bad):
    """Returns the session of 30 steps, some of which are bad."""
    model = mlp()
    model.register_buffer("table", torch.ones(2))
    model.spare = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD(model.parameters(), lr=0.01)
    registrar, options, _ = _BAD[kind]
    session = ChecksSession(model, optimizer, scaler=None)
    getattr(session, registrar)(**options, action=action)
    with session:
        for step in range(30):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            _spoil(kind, model, is_bad(step))
            optimizer.step()
    return session


@pytest.mark.parametrize("kind", _BAD)
def test_raise_is_honoured_by_every_registrar(kind):
    """And the finding has the code that the exception has."""
    with pytest.raises(CheckViolationError) as raised:
        _trained(kind, "raise", lambda _: True)
    assert raised.value.fields["code"] == _BAD[kind][2]


@pytest.mark.parametrize("kind", _BAD)
def test_every_finding_says_where_its_numbers_come_from(kind):
    """The stage, what is known of the scale, the evidence, and the attempt."""
    found = _trained(kind, "collect", lambda _: True).report().findings
    assert _BAD[kind][2] in {one.code for one in found}
    for one in found:
        assert one.stage is not None, one.code
        assert one.scale_provenance == "unscaled", one.code
        assert one.evidence is not None, one.code
        assert one.moment.attempt is not None, one.code


def _warned(kind, is_bad):
    """Returns the session and how often it has warned."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        session = _trained(kind, "warn", is_bad)
    return session, len([one for one in warned if issubclass(one.category, CheckWarning)])


@pytest.mark.parametrize("kind", _BAD)
def test_warn_is_honoured_by_every_registrar_and_speaks_once_of_what_lasts(kind):
    """Thirty bad steps in a row."""
    session, num_warnings = _warned(kind, lambda _: True)
    assert num_warnings == 1
    assert _BAD[kind][2] in {one.code for one in session.report().findings}


@pytest.mark.parametrize("kind", ["frozen", "gradient", "parameter"])
def test_warn_speaks_again_only_after_a_clean_window(kind):
    """Every second step is bad, then ten are not; each bad one is in the report."""
    session, num_warnings = _warned(kind, lambda step: step % 2 == 0 and not 10 < step < 20)
    assert num_warnings == 2
    found = [one for one in session.report().findings if one.code == _BAD[kind][2]]
    assert [one.action for one in found] == ["warn", *["collect"] * 5, "warn", *["collect"] * 4]


def test_the_page_has_every_default_as_it_is():
    """Each argument of a registrar but names and actions, and those of a session that are numbers."""
    registrars = {name: getattr(ChecksSession, name) for name in dir(ChecksSession) if "register_" in name}
    rows = _ROW.findall(_PAGE.read_text(encoding="utf-8"))
    shown = {(owner, argument): default for owner, argument, default in rows}
    callables = {"ChecksSession": ChecksSession.__init__, **registrars}
    for (owner, argument), default in shown.items():
        owners = [owner] if owner else registrars
        found = [inspect.signature(callables[one]).parameters.get(argument) for one in owners]
        defaults = {repr(one.default) for one in found if one is not None}
        assert defaults == {default.replace('"', "'")}, (owner, argument)
    arguments = {
        (name, argument)
        for name, registrar in registrars.items()
        for argument in inspect.signature(registrar).parameters
        if argument not in {"self", "names", "action"}
    }
    told = {(name, one) for name, one in arguments if (name, one) in shown or ("", one) in shown}
    assert told == arguments
    assert {("ChecksSession", "clip_norm"), ("ChecksSession", "accumulation_steps")} <= shown.keys()


class _Unshown:
    """What has no text."""

    def __repr__(self):
        raise ArithmeticError


@pytest.mark.parametrize("value", [torch.ones(40, 3), _Unshown(), {"x": "y" * 1_000}], ids=type)
def test_whatever_is_given_the_sentence_has_one_line_and_an_end(value):
    """A tensor prints many lines, and another object none."""
    session = ChecksSession(mlp(), scaler=None)
    for wrong in (
        lambda: session.register_update_ratio_check(bounds=value),
        lambda: session.register_magnitude_check(exploding_threshold=value),
        lambda: session.register_change_check(within=value, window=value),
        lambda: session.register_nonfinite_grad_check(action=value),
        lambda: ChecksSession(mlp(), value),
        lambda: param_health(mlp(), bounds={"*": value}),
        lambda: param_health(mlp(), max_fraction=value),
        lambda: RangeProbe(value),
        lambda: LivenessProbe(value),
        lambda: func(value),
        lambda: module(value),
    ):
        with pytest.raises(ConfigurationError) as raised:
            wrong()
        assert "\n" not in str(raised.value)
        assert "give" in str(raised.value)
        assert len(str(raised.value)) < 400


def test_the_page_maps_each_registrar_and_control_of_torcheck():
    """Nine and four."""
    kinds = [f"add_{what}_{kind}_check" for what in ("tensor", "module") for kind in _TORCHECK_KINDS]
    names = [*kinds, "add_module_output_range_check", "disable", "enable", "verbose_on", "verbose_off"]
    _, _, table = _PAGE.read_text(encoding="utf-8").partition("## Coming from torcheck")
    shown = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(shown) == sorted(names)
