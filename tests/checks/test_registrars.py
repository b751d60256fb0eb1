"""What registrars refuse, and that the page of checks has their defaults."""

import inspect
import re
from pathlib import Path

import pytest

from checks.training import mlp
from torchinstruments.checks import ChecksSession
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
